"""What the figures are to reach. A target belongs to one workload and one figure; it is judged on the median.

CPU targets are for the compiled functions at sync=interval and 100-byte bodies; without the functions six times as
much is allowed. A row that was not run, or was run smaller than the target says, has no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .figures import Spread

PURE_FACTOR = 6.0
MB = 1e6

Summary = Mapping[tuple[str, str], Mapping[str, Spread]]  # (workload, subject) -> figure -> spread


@dataclass(frozen=True)
class Target:
    workload: str
    figure: str
    limit: float
    unit: str
    scale: float = 1.0  # figure / scale is in `unit`
    relaxed: bool = False  # times PURE_FACTOR for the pure-Python twin
    at_least: bool = False  # the figure is to be as high, not as low


@dataclass(frozen=True)
class Verdict:
    """`passed` is None when the row was not measured."""

    subject: str
    workload: str
    figure: str
    measured: float | None
    wanted: str
    unit: str
    passed: bool | None


TARGETS: tuple[Target, ...] = (
    Target("pub-pipelined-100", "cpu_us", 0.30, "us/msg", relaxed=True),
    Target("mpub-100", "cpu_us", 0.20, "us/msg", relaxed=True),
    Target("consume", "cpu_us", 0.15, "us/msg", relaxed=True),
    Target("e2e-mpub", "cpu_us", 0.25, "us/msg", relaxed=True),
    Target("fanout-3", "cpu_us", 0.5, "us/msg", relaxed=True),
    Target("pub-16x1", "cpu_us", 9.0, "us/msg", relaxed=True),
    Target("latency-1000-defaults", "delivery_p50_us", 1.0, "ms", scale=1e3),
    Target("idle", "rss_bytes", 75.0, "MB", scale=MB),
    Target("idle", "idle_cpu_ms_per_s", 4.0, "ms/s"),
    Target("idle", "ready_s", 1.0, "s"),
    Target("memory-in-flight", "anonymous_peak_growth_bytes", 100.0, "MB", scale=MB),
    Target("memory-deferred", "anonymous_peak_growth_bytes", 100.0, "MB", scale=MB),
)
# Three nodes on one machine of two cores; the CPU of all three.
CLUSTER_TARGETS: tuple[Target, ...] = (
    Target("pub-pipelined-100", "cpu_us", 1.5, "us/msg"),
    Target("pub-pipelined-100", "rate_per_s", 200_000, "msg/s", at_least=True),
    Target("mpub-100", "cpu_us", 1.0, "us/msg"),
    Target("mpub-100", "rate_per_s", 400_000, "msg/s", at_least=True),
    Target("consume", "cpu_us", 0.5, "us/msg"),
    Target("pub-16x1", "cpu_us", 60.0, "us/msg"),
    Target("always-pub-pipelined-100", "cpu_us", 3.0, "us/msg"),
    Target("always-pub-pipelined-100", "rate_per_s", 100_000, "msg/s", at_least=True),
)
CLUSTER_NODES = 3
HELD_WANTED = 1_000_000


def judge_cluster(summary: Summary, subject: str) -> list[Verdict]:
    """The targets of a cluster of `CLUSTER_NODES`."""
    return [_judge_one(t, summary.get((t.workload, subject), {}), subject, relaxed=False) for t in CLUSTER_TARGETS]


def judge(summary: Summary, subject: str, *, relaxed: bool) -> list[Verdict]:
    """All targets for one of our subjects; `relaxed` for the pure-Python twin."""
    verdicts = [_judge_one(target, summary.get((target.workload, subject), {}), subject, relaxed) for target in TARGETS]
    return [*verdicts, _judge_always(summary, subject)]


def _judge_one(target: Target, figures: Mapping[str, Spread], subject: str, relaxed: bool) -> Verdict:
    limit = target.limit * (PURE_FACTOR if relaxed and target.relaxed else 1.0)
    spread = figures.get(target.figure)
    if "held" in figures and figures["held"].median < HELD_WANTED:
        spread = None
    measured = spread.median / target.scale if spread else None
    passed = None if measured is None else measured >= limit if target.at_least else measured <= limit
    wanted = f">= {limit:,.0f}" if target.at_least else f"<= {limit:g}"
    return Verdict(subject, target.workload, target.figure, measured, wanted, target.unit, passed)


def _judge_always(summary: Summary, subject: str) -> Verdict:
    """60 % of 400 / T, T being the disk round measured beside the row, but never more than without the sync."""
    row = summary.get(("always-pub-pipelined-100", subject), {})
    rate, disk_round = row.get("rate_per_s"), row.get("disk_round_us")
    measured = wanted = passed = None
    if rate and disk_round:
        unsynced = summary.get(("pub-pipelined-100", subject), {}).get("rate_per_s")
        wanted = 0.6 * 400 / (disk_round.median / 1e6)
        wanted = min(wanted, unsynced.median) if unsynced else wanted
        measured = rate.median
        passed = measured >= wanted
    text = f">= {wanted:,.0f}" if wanted else ">= 60 % of 400/T"
    return Verdict(subject, "always-pub-pipelined-100", "rate_per_s", measured, text, "msg/s", passed)
