"""docs/metrics.md: every metric of a broker and of a lookup daemon, from the very code that writes them."""

from __future__ import annotations

from collections.abc import Iterable

from lookupd.metrics import ClusterFigures, LookupFigures, LookupMetrics
from nsqha.election.session import View
from nsqha.server.http.metrics.exposition import Family, label_names
from nsqha.server.http.metrics.families import NO_REQUESTS, NodeMetrics
from nsqha.server.http.metrics.series import SERIES_MAX, SeriesBound
from nsqha.server.http.stats import BrokerStats, ClusterStats, NodeStats

HEAD = f"""\
# Metrics

`GET /metrics` at the HTTP port of a broker and of a lookup daemon, in Prometheus' or OpenMetrics' format. This page
is made by
`nsqha generate docs`; do not edit it. Units are seconds and bytes; counters count from the start of the process
and end in
`_total`, histograms have `_bucket`, `_sum` and `_count`.

Alert rules over these metrics are in `deploy/prometheus`, dashboards in `deploy/grafana`.

## The bound of a broker's series

A broker shows at most {SERIES_MAX:,} series. When there would be more, it merges some, in this order:

| step | what is seen |
|---|---|
| partitions | `partition="all"` for all topics |
| channels | those with the fewest messages since the start are `channel="(other)"` of their topic |
| topics | those with the fewest messages since the start are `topic="(other)"` |

`nsqha_metrics_merged{{label="partition"}}`, `{{label="channel"}}` and `{{label="topic"}}` say how many have no series
of their own; 0: none.
A merged series has the sum; of ages, epochs, quantiles, `min_isr`, replicas and flags (0 or 1) the largest, of
`isr_size` the
smallest. Its counters do not go back when a channel or a topic is deleted. Labels do not flap: partitions are
separate again below
80 % of the bound; what has series of its own keeps them while there is room, and others get theirs below 90 %.
`GET /metrics?topic=orders` shows one topic, and the node, with the same bound for itself.
"""

OF_LOOKUPD = """\
## A lookup daemon

Those that begin with `nsqha_cluster` describe the whole cluster, and each lookup daemon has them. Without a cluster
there are
only the first ones.
"""


def files() -> dict[str, str]:
    """The page, by its path in the repository."""
    alone = BrokerStats(health="OK", start_time_ns=0)
    member = BrokerStats(health="OK", start_time_ns=0, node=NodeStats(cluster=ClusterStats(node=1)))
    names = {family.name for family in NodeMetrics(alone, SeriesBound(), NO_REQUESTS).collect()}
    of_all = list(NodeMetrics(member, SeriesBound(), NO_REQUESTS).collect())
    lookupd = LookupMetrics(LookupFigures(cluster=ClusterFigures(View())))
    parts = [
        HEAD,
        "## A broker\n",
        _table(family for family in of_all if family.name in names),
        "## A broker of a cluster, besides\n",
        _table(family for family in of_all if family.name not in names),
        OF_LOOKUPD,
        _table(lookupd.collect()),
    ]
    return {"docs/metrics.md": "\n".join(parts)}


def _table(families: Iterable[Family]) -> str:
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda found: found.name):
        rows.append(_row(family))
    return "\n".join(rows) + "\n"


def _row(family: Family) -> str:
    name, kind, text = family.name, family.type, family.documentation
    suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
    labels = ", ".join(f"`{label}`" for label in label_names(family))
    return f"| `{name}{suffix}` | {kind} | {labels} | {text} |"
