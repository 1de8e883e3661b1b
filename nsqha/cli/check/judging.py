"""What is a warning and what is critical.

Critical is what clients notice now, or what only an operator repairs: no answer, a closed data directory, publishes
that are refused, partitions without a leader. A warning is what heals by itself or may wait: a replica that catches
up, an etcd that is away, a node that is leaving.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nsqha.cli.check.verdict import CheckResult, Observation, Severity
from nsqha.cli.cluster.show import no_controller, slow_ones, stuck_lines
from nsqha.cli.terminal.screen import show_count, some
from nsqha.cli.terminal.times import show_duration

NOTHING: Mapping[int, str] = {}
OK, WARNING, CRITICAL = Severity.OK, Severity.WARNING, Severity.CRITICAL
HEALS = ("joined", "not_exiting", "replicas")
"""Checks of /readyz that end without an operator, as a rule: each start of a node has them."""
_LINE = re.compile(r"\[([+-])\] (\w+)(?:: (.*))?")


def of_node(alive: str, checks: str | None) -> CheckResult:
    """`alive`: the answer of /healthz, `checks`: of /readyz?verbose, None if it was not asked."""
    if alive != "OK":
        return CheckResult("NODE", _reasons(alive) or [Observation(CRITICAL, f"/healthz answers: {alive[:200]}")])
    if checks is None:
        return CheckResult("NODE", [Observation(OK, "alive")])
    reasons = _reasons(checks)
    ready = checks.partition("\n")[0] == "OK"
    if not ready and not any(reason.severity for reason in reasons):
        reasons.append(Observation(CRITICAL, f"/readyz answers: {checks[:200]}"))
    return CheckResult("NODE", [*reasons, Observation(OK, "alive and ready")] if ready else reasons)


def _reasons(answer: str) -> list[Observation]:
    """From the lines `[+] name: detail` and `[-] name: detail`."""
    reasons = []
    for line in answer.split("\n")[1:]:
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        sign, name, detail = found[1], found[2], found[3] or ""
        if sign == "-":
            reasons.append(Observation(WARNING if name in HEALS else CRITICAL, f"{name}: {detail or 'failed'}"))
        elif name == "metadata":  # of a lookup daemon
            reasons.append(Observation(WARNING if detail.endswith("controller none") else OK, f"{name}: {detail}"))
        elif detail:  # it passes, and yet has something to say: etcd is away
            reasons.append(Observation(WARNING, f"{name}: {detail}"))
    return reasons


def of_cluster(shown: Mapping[str, Any]) -> CheckResult:
    """From the page of `nsqha cluster status`."""
    reasons = [
        Observation(severity, f"{show_count(len(shown[key]), 'partition')} {what}: {some(shown[key])}")
        for key, what, severity in (
            ("leaderless", "without a leader", CRITICAL),
            ("below_min_isr", "below min_isr, so that nothing is acknowledged", CRITICAL),
            ("stalled", "whose leader acknowledges nothing", CRITICAL),
            ("unasked", "whose leader does not answer, so that it is not known whether it serves", WARNING),
            ("under_replicated", "under-replicated", WARNING),
        )
        if shown[key]
    ]
    reasons += [Observation(CRITICAL, line) for line in stuck_lines(shown["not_led"])]
    slow = {where: seconds for where, seconds in shown["slow"].items() if where not in shown["stalled"]}
    if slow:
        reasons.append(Observation(WARNING, f"publishes wait: {some(slow_ones(slow))}"))
    if shown["doubt"]:
        reasons.append(Observation(WARNING if shown["stale"] else CRITICAL, f"metadata: {shown['doubt']}"))
    if shown["controller"] is None:
        reasons.append(Observation(CRITICAL, f"there is no controller: {no_controller(shown)}"))
    if shown["unreadable"]:
        reasons.append(Observation(CRITICAL, f"records that cannot be read: {some(shown['unreadable'])}"))
    if shown["away"]:
        reasons.append(Observation(WARNING, f"away: {', '.join(shown['away'])}"))
    reasons += [Observation(WARNING, f"{node}: {why}") for node, why in shown["unfit"].items()]
    reasons += [Observation(WARNING, f"{node} does not answer: {why}") for node, why in shown["silent"].items()]
    if shown["owed"]:
        reasons.append(Observation(WARNING, f"replicas that have no node, of {some(list(shown['owed']))}"))
    if not reasons:
        counts = f"{show_count(len(shown['nodes']), 'node')}, {show_count(shown['partitions'], 'partition')}"
        reasons.append(Observation(OK, f"{counts}, all in sync"))
    counted = ("nodes", "leaderless", "below_min_isr", "stalled", "under_replicated")
    figures = {key: float(len(shown[key])) for key in counted}
    return CheckResult("CLUSTER", reasons, {"partitions": float(shown["partitions"]), **figures})


def of_channel(
    channel: Any,
    stopped: Mapping[int, str] = NOTHING,
    *,
    oldest_ns: int | None,
    oldest_warning_ns: int | None,
) -> CheckResult:
    """`channel`: as DescribeChannel answers. `stopped`: partitions that acknowledge nothing, a consumer's FIN as little
    as a publish, and why. The limits are of the age of its oldest unfinished message."""
    age = channel.oldest_unfinished_seconds
    silent = {p.partition: p.error for p in channel.partitions if p.error}
    found = sorted({**stopped, **silent}.items())
    reasons = [Observation(CRITICAL, f"partition {number}: {why}") for number, why in found]
    stuck = [str(p.partition) for p in channel.partitions if p.stuck]
    if stuck:
        reasons.append(Observation(CRITICAL, f"stopped by damage in partition {', '.join(stuck)}: nsqha log skip"))
    if oldest_ns is not None and age > oldest_ns / 1e9:
        reasons.append(Observation(CRITICAL, _older(age, oldest_ns)))
    elif oldest_warning_ns is not None and age > oldest_warning_ns / 1e9:
        reasons.append(Observation(WARNING, _older(age, oldest_warning_ns)))
    if channel.paused:
        reasons.append(Observation(WARNING, "it is paused"))
    elif not channel.consumers and channel.depth and not channel.reader:
        reasons.append(Observation(WARNING, "it has no consumers"))
    reasons.append(Observation(OK, f"{channel.depth:,} messages, the oldest {show_duration(age) if age else 'none'}"))
    figures = {
        "depth": channel.depth,
        "in_flight": channel.in_flight,
        "deferred": channel.deferred,
        "consumers": channel.consumers,
        "oldest_unfinished_seconds": round(age, 3),
    }
    return CheckResult("CHANNEL", reasons, figures)


def _older(age: float, limit_ns: int) -> str:
    return f"its oldest message is {show_duration(age)} old, above {show_duration(limit_ns / 1e9)}"
