"""Four Grafana dashboards, made of PromQL over the families of docs/metrics.md.

    cluster      is everything served, and by whom
    topics       rates, depth, age, failures, by topic and channel
    node         disk, memory, loop, connections of one process
    replication  lag, acknowledgements, changes of leaders and of in-sync replicas

They have no data source of their own: `DS` is chosen where they are imported, or by the provisioning beside them.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

FOLDER = "deploy/grafana/dashboards"
SCHEMA = 38
WIDTH, HEIGHT = 8, 7  # of a panel; a row is 24 wide
SOURCE = {"type": "prometheus", "uid": "${DS}"}


class Panel(NamedTuple):
    """One picture: PromQL, and the legend of each of its series."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""


def rate(counter: str, by: str) -> str:
    return f"sum by ({by}) (rate({counter}[$__rate_interval]))"


def quantile(q: float, histogram: str, by: str) -> str:
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({histogram}_bucket[$__rate_interval])))"


def _state(name: str, title: str) -> Panel:
    return Panel(title, ((f"max(nsqha_cluster_{name})", title),), kind="stat")


OF_CHANNEL = "topic, channel"
IN_CHANNEL = '{topic=~"$topic",channel=~"$channel"}'
IN_TOPIC = '{topic=~"$topic"}'
ON = '{instance=~"$instance"}'

DASHBOARDS: dict[str, tuple[str, dict[str, str], tuple[Panel, ...]]] = {
    "cluster": (
        "nsqha: cluster",
        {},
        (
            _state("nodes", "Nodes"),
            _state("nodes_away", "Nodes away"),
            _state("partitions", "Partitions"),
            _state("partitions_leaderless", "Without a leader"),
            _state("partitions_below_min_isr", "Below min_isr"),
            _state("partitions_under_replicated", "Under-replicated"),
            Panel("Messages published", ((rate("nsqha_publish_messages_total", "instance"), "{{instance}}"),), "ops"),
            Panel("Bytes published", ((rate("nsqha_publish_bytes_total", "instance"), "{{instance}}"),), "Bps"),
            Panel("Publishes that failed", ((rate("nsqha_publish_errors_total", "code"), "{{code}}"),), "ops"),
            Panel(
                "Partitions led",
                (("nsqha_cluster_leaders", "{{instance}}"),),
                text="A node that leads none has declined, or has come back a moment ago.",
            ),
            Panel(
                "Oldest unfinished message, worst channels",
                (
                    (
                        f"topk(5, max by ({OF_CHANNEL}) (nsqha_channel_oldest_unfinished_seconds))",
                        "{{topic}}/{{channel}}",
                    ),
                ),
                "s",
            ),
            Panel("Elections", ((rate("nsqha_elections_total", "why"), "{{why}}"),), "ops"),
            Panel(
                "From suspicion to the new leader",
                ((quantile(0.99, "nsqha_election_seconds", "job"), "p99"),),
                "s",
            ),
            Panel("Disk free", (("nsqha_disk_free_bytes / nsqha_disk_total_bytes", "{{instance}}"),), "percentunit"),
            Panel("Controller", (("nsqha_controller", "{{instance}}"),)),
        ),
    ),
    "topics": (
        "nsqha: topics and channels",
        {
            "topic": "label_values(nsqha_publish_messages_total, topic)",
            "channel": f"label_values(nsqha_channel_acked_total{IN_TOPIC}, channel)",
        },
        (
            Panel("Published", ((rate(f"nsqha_publish_messages_total{IN_TOPIC}", "topic"), "{{topic}}"),), "ops"),
            Panel(
                "Finished",
                ((rate(f"nsqha_channel_acked_total{IN_CHANNEL}", OF_CHANNEL), "{{topic}}/{{channel}}"),),
                "ops",
            ),
            Panel("Depth", ((f"sum by ({OF_CHANNEL}) (nsqha_channel_depth{IN_CHANNEL})", "{{topic}}/{{channel}}"),)),
            Panel(
                "Age of the oldest unfinished message",
                (
                    (
                        f"max by ({OF_CHANNEL}) (nsqha_channel_oldest_unfinished_seconds{IN_CHANNEL})",
                        "{{topic}}/{{channel}}",
                    ),
                ),
                "s",
            ),
            Panel(
                "In flight",
                ((f"sum by ({OF_CHANNEL}) (nsqha_channel_in_flight{IN_CHANNEL})", "{{topic}}/{{channel}}"),),
            ),
            Panel(
                "Deferred", ((f"sum by ({OF_CHANNEL}) (nsqha_channel_deferred{IN_CHANNEL})", "{{topic}}/{{channel}}"),)
            ),
            Panel(
                "Requeued and timed out",
                (
                    (rate(f"nsqha_channel_requeued_total{IN_CHANNEL}", OF_CHANNEL), "{{topic}}/{{channel}} requeued"),
                    (rate(f"nsqha_channel_timed_out_total{IN_CHANNEL}", OF_CHANNEL), "{{topic}}/{{channel}} timed out"),
                ),
                "ops",
            ),
            Panel(
                "From publish to delivery, p99",
                ((quantile(0.99, "nsqha_channel_delivery_seconds", OF_CHANNEL), "{{topic}}/{{channel}}"),),
                "s",
                text="A sample: one message of each channel at a time.",
            ),
            Panel(
                "From delivery to FIN, p99",
                ((quantile(0.99, "nsqha_channel_process_seconds", OF_CHANNEL), "{{topic}}/{{channel}}"),),
                "s",
                text="A sample: one message of each channel at a time.",
            ),
            Panel(
                "Attempts at FIN, p99",
                ((quantile(0.99, "nsqha_channel_attempts", OF_CHANNEL), "{{topic}}/{{channel}}"),),
            ),
            Panel(
                "Dead letters", ((f"sum by ({OF_CHANNEL}) (nsqha_channel_dead{IN_CHANNEL})", "{{topic}}/{{channel}}"),)
            ),
            Panel(
                "Died",
                (
                    (
                        rate(f"nsqha_channel_died_total{IN_CHANNEL}", f"{OF_CHANNEL}, reason"),
                        "{{topic}}/{{channel}} {{reason}}",
                    ),
                ),
                "ops",
            ),
            Panel(
                "Passed over by policies",
                tuple(
                    (rate(f"nsqha_channel_{kind}_total{IN_CHANNEL}", OF_CHANNEL), "{{topic}}/{{channel}} " + kind)
                    for kind in ("skipped", "dropped", "expired")
                ),
                "ops",
            ),
            Panel(
                "Consumers", ((f"sum by ({OF_CHANNEL}) (nsqha_channel_clients{IN_CHANNEL})", "{{topic}}/{{channel}}"),)
            ),
            Panel("Stuck", ((f"max by ({OF_CHANNEL}) (nsqha_channel_stuck{IN_CHANNEL})", "{{topic}}/{{channel}}"),)),
        ),
    ),
    "node": (
        "nsqha: node",
        {"instance": "label_values(nsqha_start_time_seconds, instance)"},
        (
            Panel("Healthy", ((f"nsqha_healthy{ON}", "{{instance}}"),), kind="stat"),
            Panel("Uptime", ((f"time() - nsqha_start_time_seconds{ON}", "{{instance}}"),), "s", "stat"),
            Panel("Version", ((f"nsqha_build_info{ON}", "{{version}} {{hot}}"),), kind="stat"),
            Panel(
                "Commit of a batch",
                (
                    (quantile(0.5, "nsqha_publish_seconds", "instance"), "{{instance}} p50"),
                    (quantile(0.99, "nsqha_publish_seconds", "instance"), "{{instance}} p99"),
                ),
                "s",
            ),
            Panel(
                "Fsync",
                (
                    (quantile(0.5, "nsqha_fsync_seconds", "instance"), "{{instance}} p50"),
                    (quantile(0.99, "nsqha_fsync_seconds", "instance"), "{{instance}} p99"),
                ),
                "s",
            ),
            Panel(
                "Messages in a batch",
                ((quantile(0.5, "nsqha_publish_group_commit_messages", "instance"), "{{instance}} p50"),),
            ),
            Panel(
                "Event loop runs late, p99",
                ((quantile(0.99, "nsqha_loop_lag_seconds", "instance"), "{{instance}}"),),
                "s",
            ),
            Panel("Memory", ((f"nsqha_resident_memory_bytes{ON}", "{{instance}}"),), "bytes"),
            Panel("Open files", ((f"nsqha_open_files{ON}", "{{instance}}"),)),
            Panel(
                "Connections",
                (
                    (f"nsqha_connections{ON}", "{{instance}}"),
                    (rate(f"nsqha_connections_accepted_total{ON}", "instance"), "{{instance}} new per second"),
                ),
            ),
            Panel("Disk free", ((f"nsqha_disk_free_bytes{ON}", "{{instance}}"),), "bytes"),
            Panel(
                "Removed by retention",
                ((rate(f"nsqha_retention_removed_bytes_total{ON}", "instance"), "{{instance}}"),),
                "Bps",
            ),
            Panel(
                "HTTP requests", ((rate(f"nsqha_http_requests_total{ON}", "route, code"), "{{route}} {{code}}"),), "ops"
            ),
            Panel(
                "gRPC requests",
                ((rate(f"nsqha_grpc_requests_total{ON}", "method, code"), "{{method}} {{code}}"),),
                "ops",
            ),
            Panel(
                "Logins and requests that were refused",
                (
                    (rate(f"nsqha_auth_refused_logins_total{ON}", "instance, why"), "{{instance}} login {{why}}"),
                    (rate(f"nsqha_access_refused_requests_total{ON}", "instance, status"), "{{instance}} {{status}}"),
                ),
                "ops",
            ),
            Panel("Events to look into", ((f"nsqha_log_events_total{ON}", "{{instance}} {{event}}"),)),
            Panel(
                "Certificates expire in",
                ((f"nsqha_certificate_expiry_timestamp_seconds{ON} - time()", "{{instance}} {{path}}"),),
                "s",
            ),
        ),
    ),
    "replication": (
        "nsqha: replication",
        {},
        (
            Panel(
                "Acknowledgement of followers, p99",
                ((quantile(0.99, "nsqha_replication_seconds", "instance, follower"), "{{instance}} to {{follower}}"),),
                "s",
            ),
            Panel("Oldest batch not acknowledged", (("nsqha_push_lag_seconds", "{{instance}} to {{follower}}"),), "s"),
            Panel("Bytes not acknowledged", (("nsqha_push_lag_bytes", "{{instance}} to {{follower}}"),), "bytes"),
            Panel(
                "Left to fetch",
                (("nsqha_catch_up_left_bytes", "{{instance}} {{kind}}"),),
                "bytes",
                text="Of replicas that fell behind, and of those that began empty.",
            ),
            Panel("Followers behind", (("nsqha_cluster_followers_behind", "{{instance}}"),)),
            Panel(
                "Changes of in-sync replicas",
                ((rate("nsqha_partition_isr_changes_total", "topic, kind"), "{{topic}} {{kind}}"),),
                "ops",
            ),
            Panel("Changes of leaders", ((rate("nsqha_partition_leader_changes_total", "topic"), "{{topic}}"),), "ops"),
            Panel("Lease left", (("nsqha_lease_remaining_seconds", "{{instance}}"),), "s"),
            Panel(
                "Requests to etcd, p99",
                ((quantile(0.99, "nsqha_metadata_request_seconds", "instance"), "{{instance}}"),),
                "s",
            ),
            Panel(
                "Requests to etcd that failed",
                ((rate("nsqha_metadata_requests_failed_total", "instance"), "{{instance}}"),),
                "ops",
            ),
            Panel("Clocks", (("nsqha_clock_offset_seconds", "{{instance}} sees {{peer}}"),), "s"),
            Panel(
                "Forwarded publishes", ((rate("nsqha_forwarded_messages_total", "instance"), "{{instance}}"),), "ops"
            ),
            Panel(
                "Relayed to consumers elsewhere",
                ((rate("nsqha_relayed_messages_total", "instance"), "{{instance}}"),),
                "ops",
            ),
        ),
    ),
}


def files() -> dict[str, str]:
    """The dashboards, by their paths in the repository."""
    return {f"{FOLDER}/{name}.json": _dashboard(name, *parts) for name, parts in DASHBOARDS.items()}


def _dashboard(name: str, title: str, variables: dict[str, str], panels: tuple[Panel, ...]) -> str:
    found = {
        "uid": f"nsqha-{name}",
        "title": title,
        "tags": ["nsqha"],
        "schemaVersion": SCHEMA,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), *(_variable(*item) for item in variables.items())]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }
    return json.dumps(found, indent=1) + "\n"


def _source() -> dict[str, Any]:
    return {"name": "DS", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, 24 // WIDTH)
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.text,
        "type": panel.kind,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0 if panel.title != "Clocks" else None},
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for n, (expr, legend) in enumerate(panel.queries)
        ],
    }
