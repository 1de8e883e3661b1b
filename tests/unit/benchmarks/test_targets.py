from __future__ import annotations

from benchmarks.figures import Spread
from benchmarks.targets import CLUSTER_TARGETS, TARGETS, Verdict, judge, judge_cluster
from benchmarks.workloads import WORKLOADS, select


def figures(**values: float) -> dict[str, Spread]:
    return {name: Spread(value, value, value) for name, value in values.items()}


def verdict(verdicts: list[Verdict], workload: str, figure: str) -> Verdict:
    (found,) = [each for each in verdicts if (each.workload, each.figure) == (workload, figure)]
    return found


def test_every_target_belongs_to_a_row() -> None:
    names = {workload.name for workload in WORKLOADS}
    assert {target.workload for target in TARGETS} <= names


def test_names_are_unique() -> None:
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)


def test_the_twin_may_use_six_times_the_cpu() -> None:
    summary = {("mpub-100", name): figures(cpu_us=0.7) for name in ("compiled", "pure")}
    assert verdict(judge(summary, "compiled", relaxed=False), "mpub-100", "cpu_us").passed is False
    assert verdict(judge(summary, "pure", relaxed=True), "mpub-100", "cpu_us").passed is True


def test_memory_and_idle_are_not_relaxed() -> None:
    summary = {("idle", "pure"): figures(rss_bytes=80e6, idle_cpu_ms_per_s=3.0, ready_s=0.5)}
    verdicts = judge(summary, "pure", relaxed=True)
    assert verdict(verdicts, "idle", "rss_bytes").passed is False
    assert verdict(verdicts, "idle", "ready_s").passed is True


def test_what_was_not_run_has_no_verdict() -> None:
    assert {each.passed for each in judge({}, "compiled", relaxed=False)} == {None}


def test_a_smaller_run_than_asked_for_has_no_verdict() -> None:
    summary = {("memory-deferred", "compiled"): figures(held=200_000, anonymous_peak_growth_bytes=1.0)}
    target = ("memory-deferred", "anonymous_peak_growth_bytes")
    assert verdict(judge(summary, "compiled", relaxed=False), *target).passed is None


def test_the_disk_sets_the_bar_for_synced_publishing() -> None:
    # One round takes 1 ms: 400,000/s if half of 800 waiting commands ride each; 60 % of it is asked for.
    row = {("always-pub-pipelined-100", "compiled"): figures(rate_per_s=250_000, disk_round_us=1000)}
    assert verdict(judge(row, "compiled", relaxed=False), "always-pub-pipelined-100", "rate_per_s").passed is True
    row = {("always-pub-pipelined-100", "compiled"): figures(rate_per_s=230_000, disk_round_us=1000)}
    assert verdict(judge(row, "compiled", relaxed=False), "always-pub-pipelined-100", "rate_per_s").passed is False


def test_but_never_more_than_without_the_sync() -> None:
    summary = {
        ("always-pub-pipelined-100", "compiled"): figures(rate_per_s=900_000, disk_round_us=100),
        ("pub-pipelined-100", "compiled"): figures(rate_per_s=800_000, cpu_us=0.1),
    }
    assert verdict(judge(summary, "compiled", relaxed=False), "always-pub-pipelined-100", "rate_per_s").passed is True


def test_rows_by_name() -> None:
    assert [each.name for each in select("verify")] == ["verify"]
    assert {each.name for each in select("latency,!defaults")} == {"latency-1000", "latency-5000"}
    assert {each.name for each in select("pub-*x1")} == {"pub-16x1", "pub-200x1", "pub-1x1"}
    assert select(None) == list(WORKLOADS)
    assert select("nothing-of-this-name") == []


def test_a_cluster_is_judged_by_its_own_targets_and_rates_have_to_be_high_enough() -> None:
    verdicts = judge_cluster({("mpub-100", "3 nodes"): figures(cpu_us=0.9, rate_per_s=3e5)}, "3 nodes")
    assert verdict(verdicts, "mpub-100", "cpu_us").passed is True
    assert verdict(verdicts, "mpub-100", "rate_per_s").passed is False
    assert verdict(verdicts, "consume", "cpu_us").passed is None
    assert {target.workload for target in CLUSTER_TARGETS} <= {workload.name for workload in WORKLOADS}
