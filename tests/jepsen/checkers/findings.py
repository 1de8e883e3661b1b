"""What a checker has to say: problems with examples, figures, and promises beside what was seen of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

EXAMPLES = 5  # of each kind of problem are kept as text


@dataclass(frozen=True)
class Promise:
    """A bound of docs/guarantees.md and what the run showed. Runs that had nothing to show for it do not name it."""

    text: str
    bound: str
    seen: str
    kept: bool = True


@dataclass
class Findings:
    """Of one checker."""

    name: str
    problems: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    promises: list[Promise] = field(default_factory=list)
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # (seconds, value), for the report
    times: dict[str, list[float]] = field(default_factory=dict)  # seconds each, for reports of many runs

    def add(self, kind: str, text: str) -> None:
        self.problems[kind] += 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < EXAMPLES:
            examples.append(text)

    def promise(self, text: str, bound: str, seen: str, *, kept: bool) -> None:
        """What was seen of it. What breaks it has been added as a problem, where it is one."""
        self.promises.append(Promise(text, bound, seen, kept))


def quantile(values: Sequence[float], q: float) -> float:
    """0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
