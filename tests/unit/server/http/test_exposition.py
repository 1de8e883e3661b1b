"""Series of rows are written as prometheus_client writes them, in both formats."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from nsqha.quantile import HistogramData
from nsqha.server.http.metrics.exposition import PIECE, SeriesTable, label_text

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
NAMES = ("topic", "channel")
VALUES = (("t", "c"), ("t", "d#ephemeral"), ("t", 'a "quoted\\one"\n'))
FIGURES = (0, 12345678.0, 2.5)


class One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def table(kind: str, figures: tuple[object, ...], **how: object) -> SeriesTable:
    texts = [label_text(NAMES, values) for values in VALUES]
    rows = [(text, SimpleNamespace(field=figure)) for text, figure in zip(texts, figures, strict=True)]
    return SeriesTable("nsqha_x", kind, "What it is.", NAMES, rows, "field", **how)  # type: ignore[arg-type]


def written(found: SeriesTable, accept: str) -> str:
    return "".join(found.pieces(openmetrics=accept == OPENMETRICS))


def expected(family: Metric, accept: str) -> str:
    encode, _ = choose_encoder(accept)
    return encode(One(family)).decode().removesuffix("# EOF\n")


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
@pytest.mark.parametrize(("kind", "make"), [("counter", CounterMetricFamily), ("gauge", GaugeMetricFamily)])
def test_one_series_of_each_row(kind: str, make: type[GaugeMetricFamily], accept: str) -> None:
    family = make("nsqha_x", "What it is.", labels=NAMES)
    for values, figure in zip(VALUES, FIGURES, strict=True):
        family.add_metric(values, figure)
    assert written(table(kind, FIGURES), accept) == expected(family, accept)


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_several_series_of_a_row_that_differ_in_one_more_label(accept: str) -> None:
    family = GaugeMetricFamily("nsqha_x", "What it is.", labels=(*NAMES, "way"))
    figures = ((("in", 1), ("out", 2)), (), (("in", True),))
    for values, several in zip(VALUES, figures, strict=True):
        for way, figure in several:
            family.add_metric((*values, way), figure)
    rows = tuple([(f'way="{way}"', figure) for way, figure in several] for several in figures)
    assert written(table("gauge", rows, further=True), accept) == expected(family, accept)


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_histograms_have_cumulative_buckets(accept: str) -> None:
    family = HistogramMetricFamily("nsqha_x", "What it is.", labels=("channel", "a"))
    family.add_metric(("c", "t"), [("0.001", 1), ("5.0", 3), ("+Inf", 6)], 7.25)
    data = HistogramData((0.001, 5), (1, 2, 3), 7.25)
    found = SeriesTable(
        "nsqha_x", "histogram", "What it is.", ("a", "channel"), [('a="t",channel="c"', data)], lambda row: row
    )
    assert written(found, accept) == expected(family, accept)


def test_thousands_come_in_pieces() -> None:
    rows = [(f'topic="{n}"', n) for n in range(10 * PIECE)]
    pieces = list(SeriesTable("x", "gauge", "text", ("topic",), rows, lambda row: row).pieces(openmetrics=False))
    assert len(pieces) == 11
    assert max(piece.count("\n") for piece in pieces) == PIECE
