"""Alert rules for Prometheus, and docs/alerts.md with what to do about each; one table for both.

A rule says what is wrong for users or soon will be, not what is unusual. Thresholds are those that hold for most
installations; whoever knows better copies the file and changes it. Counters of a process begin at its start, so rules
about what must never happen (damage, possible loss) look at the value, and clear with a restart of that node.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

RULES = "deploy/prometheus/nsqha.rules.yml"
PAGE = "docs/alerts.md"


class Alert(NamedTuple):
    """One rule. `lasts`: how long it must hold before it fires, as Prometheus writes durations."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    remedy: str


CRITICAL, WARNING = "critical", "warning"

ALERTS = (
    Alert(
        "NsqhaDown",
        'up{job=~"nsqha.*"} == 0',
        "1m",
        CRITICAL,
        "{{ $labels.instance }} does not answer.",
        "Look whether the process runs and what its log ends with (`journalctl -u nsqha-broker`). In a cluster "
        "the other "
        "nodes serve meanwhile; a single node's topics are away until it is back.",
    ),
    Alert(
        "NsqhaUnhealthy",
        "nsqha_healthy == 0",
        "0m",
        CRITICAL,
        "{{ $labels.instance }} could not write to its disk.",
        "`GET /ping` says what failed. The data folder is closed after a failed fsync: replace the disk if it "
        "is broken, "
        "then restart the node, which verifies everything.",
    ),
    Alert(
        "NsqhaNodeAway",
        "max(nsqha_cluster_nodes_away) > 0",
        "1m",
        CRITICAL,
        "{{ $value }} nodes with replicas are away.",
        "`nsqha cluster nodes` names them. Bring them back, or replace them (`nsqha cluster forget`, docs/operate.md). "
        "After `--replace-after` their replicas are made elsewhere.",
    ),
    Alert(
        "NsqhaNoController",
        "(max(nsqha_controller) or vector(0)) == 0 and on() max(nsqha_cluster_registered) > 0",
        "1m",
        CRITICAL,
        "No lookup daemon is the controller: nobody elects leaders.",
        "Look at the lookup daemons' logs (`controller_paused`, `metadata_stale`) and at etcd.",
    ),
    Alert(
        "NsqhaPartitionLeaderless",
        "max(nsqha_cluster_partitions_leaderless) > 0",
        "30s",
        CRITICAL,
        "{{ $value }} partitions have no leader.",
        "`nsqha cluster topics` names them and says why. They need one in-sync replica back; with `sync=always` an "
        "operator may choose another (`nsqha cluster elect --unclean`), which may lose messages.",
    ),
    Alert(
        "NsqhaBelowMinIsr",
        "max(nsqha_cluster_partitions_below_min_isr) > 0",
        "1m",
        CRITICAL,
        "{{ $value }} partitions acknowledge nothing: too few replicas are in sync.",
        "Bring the missing nodes back. Publishes wait, then fail as not stored; nothing is lost.",
    ),
    Alert(
        "NsqhaUnderReplicated",
        "max(nsqha_cluster_partitions_under_replicated) > 0",
        "5m",
        WARNING,
        "{{ $value }} partitions have fewer in-sync replicas than replicas.",
        "Usual for a moment while a node restarts or a replica is made. If it stays: `nsqha cluster nodes`, "
        "the log of the "
        "node that is missing (`catch_up_delayed`), its disk and its link.",
    ),
    Alert(
        "NsqhaIsrFlapping",
        "sum by (topic) (increase(nsqha_partition_isr_changes_total[15m])) "
        "> on (topic) 6 * count by (topic) (nsqha_partition_epoch)",
        "0m",
        WARNING,
        "In-sync replicas of {{ $labels.topic }} leave and join again and again.",
        "A node's disk or link is at its limit: `nsqha_push_lag_seconds` and `nsqha_fsync_seconds` say whose.",
    ),
    Alert(
        "NsqhaLeaderFlapping",
        "sum by (topic) (increase(nsqha_partition_leader_changes_total[10m])) "
        # `increase` extrapolates to the whole window: three changes may be nearly four.
        "> on (topic) 4 * count by (topic) (nsqha_partition_epoch)",
        "0m",
        WARNING,
        "Partitions of {{ $labels.topic }} change their leaders again and again.",
        "The lookup daemons' logs say why each election was made; look at the node that is left each time.",
    ),
    Alert(
        "NsqhaFollowerBehind",
        "max by (instance, follower) (nsqha_push_lag_seconds) > 5",
        "1m",
        WARNING,
        "{{ $labels.follower }} is {{ $value }} s behind the leader {{ $labels.instance }}.",
        "Its disk (`nsqha_fsync_seconds`), its CPU, or the link between the two.",
    ),
    Alert(
        "NsqhaCatchUpStalls",
        "min_over_time(nsqha_catch_up_left_bytes[15m]) > 0 and delta(nsqha_catch_up_left_bytes[15m]) >= 0",
        "15m",
        WARNING,
        "{{ $labels.instance }} lacks {{ $value | humanize1024 }}B of its leaders' logs, and comes no nearer.",
        "`nsqha cluster status` names the replicas. `catch_up_delayed` in its log says why; where clients leave it no "
        "room, a higher `--catch-up-bytes-per-second` does.",
    ),
    Alert(
        "NsqhaRefusesToLead",
        'max by (node, why) (nsqha_cluster_node_refuses_to_lead{why!="leaving"}) > 0',
        "1m",
        WARNING,
        "{{ $labels.node }} is not to lead: {{ $labels.why }}.",
        "`nsqha cluster nodes` says why: a disk that is full, slow or failed, or a clock that is wrong.",
    ),
    Alert(
        "NsqhaChannelStuck",
        "max by (topic, channel) (nsqha_channel_stuck) > 0",
        "1m",
        CRITICAL,
        "Channel {{ $labels.topic }}/{{ $labels.channel }} stands before a damaged part of the log.",
        "`nsqha log verify` shows the range. Restore the files or bring back a replica; `nsqha log skip` gives it up.",
    ),
    Alert(
        "NsqhaChannelOld",
        "max by (topic, channel) (nsqha_channel_oldest_unfinished_seconds) > 900",
        "5m",
        WARNING,
        "The oldest message of {{ $labels.topic }}/{{ $labels.channel }} is {{ $value | humanizeDuration }} old.",
        "More consumers, or find what they wait for. Deferred messages count with when they were published.",
    ),
    Alert(
        "NsqhaChannelWithoutConsumers",
        "sum by (topic, channel) (nsqha_channel_clients) == 0 and sum by (topic, channel) (nsqha_channel_depth) > 0",
        "10m",
        WARNING,
        "Channel {{ $labels.topic }}/{{ $labels.channel }} has messages and no consumer.",
        "Start its consumers, or delete the channel if it is not used any more: it keeps its messages for ever "
        "(`--max-depth`, `--ttl` bound that).",
    ),
    Alert(
        "NsqhaRequeueStorm",
        "sum by (topic, channel) (rate(nsqha_channel_requeued_total[5m]) + rate(nsqha_channel_timed_out_total[5m])) "
        "> sum by (topic, channel) (rate(nsqha_channel_acked_total[5m])) and "
        "sum by (topic, channel) (rate(nsqha_channel_requeued_total[5m]) + "
        "rate(nsqha_channel_timed_out_total[5m])) > 1",
        "10m",
        WARNING,
        "More messages of {{ $labels.topic }}/{{ $labels.channel }} fail than are finished.",
        "What the handlers need is away. A retry policy (docs/policies.md) keeps them from hammering on it.",
    ),
    Alert(
        "NsqhaDeadLetters",
        "sum by (topic, channel, reason) (increase(nsqha_channel_died_total[1h])) > 0 or "
        "sum by (topic, channel, reason) (nsqha_channel_died_total unless nsqha_channel_died_total offset 1h) > 0",
        "0m",
        WARNING,
        "Messages of {{ $labels.topic }}/{{ $labels.channel }} died ({{ $labels.reason }}).",
        "`nsqha dead list` shows them; `nsqha dead requeue` once the cause is mended.",
    ),
    Alert(
        "NsqhaDiskRefuses",
        "nsqha_disk_refusing_publishes == 1",
        "0m",
        CRITICAL,
        "{{ $labels.instance }} refuses publishes: its disk is low.",
        "Free space; `nsqha topic set --retention`; finish what channels hold back (`nsqha topic show`).",
    ),
    Alert(
        "NsqhaDiskFillsSoon",
        "predict_linear(nsqha_disk_free_bytes[1h], 14400) < 0 and nsqha_disk_free_bytes / nsqha_disk_total_bytes < 0.3",
        "10m",
        WARNING,
        "The disk of {{ $labels.instance }} will be full within four hours.",
        "Add space, lower retention, or find the channel that keeps its messages (`nsqha_channel_depth`).",
    ),
    Alert(
        "NsqhaFsyncSlow",
        "histogram_quantile(0.99, sum by (instance, le) (rate(nsqha_fsync_seconds_bucket[5m]))) > 0.25",
        "10m",
        WARNING,
        "A hundredth of the fsyncs of {{ $labels.instance }} take longer than {{ $value }} s.",
        "What else uses that disk? With `sync=always` each OK waits for the slowest in-sync replica.",
    ),
    Alert(
        "NsqhaLoopStalled",
        "histogram_quantile(0.99, sum by (instance, le) (rate(nsqha_loop_lag_seconds_bucket[5m]))) > 0.25",
        "5m",
        WARNING,
        "The event loop of {{ $labels.instance }} runs late: {{ $value }} s.",
        "The host has too little CPU for it, or swaps. `GET /debug/pprof/profile` shows what it does.",
    ),
    Alert(
        "NsqhaLeaseShort",
        "min_over_time(nsqha_lease_remaining_seconds[1m]) < 1 and nsqha_cluster_registered == 1",
        "0m",
        WARNING,
        "The lease of {{ $labels.instance }} was nearly over.",
        "etcd is slow (`nsqha_metadata_request_seconds`) or the node stalls; without its lease it loses its "
        "leaderships.",
    ),
    Alert(
        "NsqhaLogDamaged",
        'nsqha_log_events_total{event=~"log_damaged|scrub_damage"} > 0',
        "0m",
        CRITICAL,
        "Stored batches on {{ $labels.instance }} did not verify ({{ $labels.event }}).",
        "In a cluster they are fetched from other replicas (`repaired` in the log). Look at the disk. It "
        "clears with the "
        "next start of the node.",
    ),
    Alert(
        "NsqhaPossibleLoss",
        'nsqha_log_events_total{event="possible_loss"} > 0 or nsqha_possible_losses_total > 0',
        "0m",
        CRITICAL,
        "Acknowledged messages may be gone, as a topic does not sync before OK.",
        "docs/guarantees.md says what each mode survives. Have producers send again, or `nsqha seek` to what is there.",
    ),
    Alert(
        "NsqhaAuthUnanswered",
        'rate(nsqha_auth_refused_logins_total{why="no_answer"}[5m]) > 0',
        "2m",
        CRITICAL,
        "{{ $labels.instance }} lets clients in no more: auth servers do not answer.",
        "`auth_failed` in its log has what each server said. Clients that were let in go on until an answer expires.",
    ),
    Alert(
        "NsqhaClockOffset",
        "max by (instance, peer) (abs(nsqha_clock_offset_seconds)) > 1",
        "5m",
        WARNING,
        "The clocks of {{ $labels.instance }} and {{ $labels.peer }} are {{ $value }} s apart.",
        "Run NTP on every host. Beyond `--max-clock-skew` a node does not lead.",
    ),
    Alert(
        "NsqhaCertificateExpires",
        "nsqha_certificate_expiry_timestamp_seconds - time() < 14 * 86400",
        "0m",
        WARNING,
        "The certificate {{ $labels.path }} of {{ $labels.instance }} expires in {{ $value | humanizeDuration }}.",
        "Replace the files; they are read again within two seconds, without a restart.",
    ),
    Alert(
        "NsqhaVersions",
        "count(count by (version) (nsqha_build_info)) > 1",
        "24h",
        WARNING,
        "{{ $value }} versions run side by side for a day.",
        "Finish the roll, or go back: docs/operate.md.",
    ),
)

HEAD = """\
# Alerts

`deploy/prometheus/nsqha.rules.yml` has these rules; both are made by `nsqha generate prometheus`, do not edit them.
*critical* wakes
somebody; *warning* waits for the morning. Rules take the maximum over lookup daemons, since each shows the whole
cluster.
"""


def files() -> dict[str, str]:
    """The rules and the page, by their paths in the repository."""
    return {RULES: _rules(), PAGE: _page()}


def _rules() -> str:
    lines = ["# Made by `nsqha generate prometheus`; docs/alerts.md says what to do about each."]
    lines += ["groups:", "  - name: nsqha", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr)}",
            f"        for: {alert.lasts}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          runbook: {PAGE}#{alert.name.lower()}",
        ]
    return "\n".join(lines) + "\n"


def _page() -> str:
    return "\n".join([HEAD, *_sections()])


def _sections() -> Iterable[str]:
    for alert in ALERTS:
        lasts = "" if alert.lasts == "0m" else f", for {alert.lasts}"
        yield f"## {alert.name}\n\n{alert.severity}{lasts}: {_plain(alert.summary)}\n"
        yield f"```\n{alert.expr}\n```\n\n{alert.remedy}\n"


def _plain(summary: str) -> str:
    """Without Prometheus' templates."""
    words = summary.replace("{{ $value | humanizeDuration }}", "a time").replace("{{ $value }}", "some")
    for label in ("instance", "topic", "channel", "follower", "peer", "node", "why", "reason", "event", "path"):
        words = words.replace("{{ $labels." + label + " }}", label.upper())
    return words
