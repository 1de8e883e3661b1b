"""The text of series that come in thousands: those of topics, partitions, channels and cursors.

prometheus_client has an object with a dict for each series; with its encoder, one series costs 6 us. Here the labels of
a row are written once, for all its families, and a series is one format of them: 1 us. The lines are those that
prometheus_client writes, in both formats, but a label that differs in a row comes last. They come in pieces, none of
which takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from nsqha.quantile import HistogramData

PIECE = 64  # series, about
_HISTOGRAM_PIECE = 4  # rows of a histogram, which are ten series and more each

Row = tuple[str, Any]
"""The labels as text, and what the values are taken from."""

number: Callable[[float], str] = lru_cache(4096)(floatToGoString)  # most figures are small, and come again


@dataclass(frozen=True, slots=True)
class SeriesTable:
    """One family: of each row one series, or several that differ in further labels."""

    name: str
    type: str  # counter, gauge or histogram
    documentation: str
    labels: tuple[str, ...]
    rows: Sequence[Row]
    value: Callable[[Any], Any] | str
    """The field, or what makes the value; of a histogram `HistogramData`."""
    further: bool = False  # the value is several: pairs of the text of one more label, and a value

    def pieces(self, *, openmetrics: bool) -> Iterator[str]:
        shown = f"{self.name}_total" if self.type == "counter" else self.name
        described = self.name if openmetrics else shown
        yield f"# HELP {described} {self.documentation}\n# TYPE {described} {self.type}\n"
        value = attrgetter(self.value) if isinstance(self.value, str) else self.value
        if self.type == "histogram":
            for at in range(0, len(self.rows), _HISTOGRAM_PIECE):
                yield "".join(
                    _histogram(shown, text, value(row)) for text, row in self.rows[at : at + _HISTOGRAM_PIECE]
                )
            return
        for at in range(0, len(self.rows), PIECE):
            rows = self.rows[at : at + PIECE]
            if self.further:
                values = [(f"{text},{more}", figure) for text, row in rows for more, figure in value(row)]
            else:
                values = [(text, value(row)) for text, row in rows]
            yield "".join([f"{shown}{{{text}}} {number(figure)}\n" for text, figure in values])


Family = Metric | SeriesTable


def label_text(names: Sequence[str], values: Sequence[str]) -> str:
    """name="value",name="value" as it stands in braces, in the order of names."""
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in sorted(zip(names, values, strict=True))])


def label_names(family: Family) -> tuple[str, ...]:
    """The labels of a family's series; of a histogram without `le`."""
    return family.labels if isinstance(family, SeriesTable) else tuple(getattr(family, "_labelnames", ()))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _histogram(name: str, text: str, data: HistogramData) -> str:
    lines, total = [], 0
    for bound, count in zip(_bounds(data.bounds), data.counts, strict=True):
        total += count
        lines.append(f'{name}_bucket{{{text},le="{bound}"}} {number(total)}\n')
    lines.append(f"{name}_count{{{text}}} {number(total)}\n{name}_sum{{{text}}} {number(data.sum)}\n")
    return "".join(lines)


@lru_cache(16)
def _bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(str, map(float, bounds)), "+Inf")
