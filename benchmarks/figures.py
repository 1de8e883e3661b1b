"""Statistics of a benchmark: percentiles of one cell, medians and ratios over rounds.

A *cell* is one run of one workload against one fresh server. Its figures are plain numbers with the unit in the
name; over rounds a figure becomes a median with its range, never a single best value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

Figures = dict[str, float]

# A generator busier than this share of a core may be what limits the rate.
CLIENT_BOUND_SHARE = 0.70
# Others on the machine, or a hypervisor that took time away: the cell stands, marked.
NOISY_SHARE = 0.10


@dataclass(frozen=True)
class Spread:
    """One figure over several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Cell:
    """What one run of one workload against one subject gave."""

    workload: str
    subject: str
    round: int
    figures: Figures = field(default_factory=dict)
    marks: list[str] = field(default_factory=list)
    failure: str | None = None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of all values do not exceed."""
    if not ordered:
        raise ValueError("a percentile of nothing")
    if not 0 < share <= 1:
        raise ValueError(f"a share of {share}")
    # 0.999 * 1000 is 999.0000000000001 in binary; that is no reason to skip a rank.
    return ordered[math.ceil(round(share * len(ordered), 6)) - 1]


def latencies(name: str, values_ns: Sequence[int]) -> Figures:
    """`<name>_p50_us` and friends; nothing if there are no values."""
    if not values_ns:
        return {}
    ordered = sorted(values_ns)
    return {
        f"{name}_p50_us": percentile(ordered, 0.50) / 1e3,
        f"{name}_p99_us": percentile(ordered, 0.99) / 1e3,
        f"{name}_p999_us": percentile(ordered, 0.999) / 1e3,
        f"{name}_max_us": ordered[-1] / 1e3,
    }


def summarise(cells: Sequence[Cell]) -> dict[str, Spread]:
    """Every figure of the cells that worked."""
    names = {name: None for cell in cells for name in cell.figures if cell.failure is None}
    return {
        name: Spread.of([cell.figures[name] for cell in cells if cell.failure is None and name in cell.figures])
        for name in names
    }


def ratio(ours: Sequence[Cell], theirs: Sequence[Cell], figure: str) -> Spread | None:
    """theirs / ours, round by round: neighbours in time are compared, so slow drift of the machine cancels out."""
    by_round = {cell.round: cell.figures.get(figure) for cell in theirs if cell.failure is None}
    pairs = [
        (cell.figures[figure], other)
        for cell in ours
        if cell.failure is None and cell.figures.get(figure) and (other := by_round.get(cell.round))
    ]
    return Spread.of([other / own for own, other in pairs]) if pairs else None


def marks_of(figures: Figures) -> list[str]:
    """What a reader must know about a cell before believing its rate."""
    marks = []
    if figures.get("client_share", 0) > CLIENT_BOUND_SHARE:
        marks.append("client-bound")
    if figures.get("steal_share", 0) > NOISY_SHARE or figures.get("others_share", 0) > NOISY_SHARE:
        marks.append("noisy")
    return marks
