"""The names and labels of all series that brokers and lookup daemons expose, from the code that writes them."""

from __future__ import annotations

from collections.abc import Iterable

from lookupd.metrics import ClusterFigures, LookupFigures, LookupMetrics
from nsqha.election.session import View
from nsqha.server.http.metrics.exposition import Family, label_names
from nsqha.server.http.metrics.families import NO_REQUESTS, NodeMetrics
from nsqha.server.http.metrics.series import SeriesBound
from nsqha.server.http.stats import BrokerStats, ClusterStats, NodeStats

OF_A_TARGET = {"instance", "job"}
"""What Prometheus itself adds."""
SUFFIXES = {"counter": {"_total": set()}, "info": {"_info": {"version", "nsq_version", "python", "hot"}}}
HISTOGRAM = {"_bucket": {"le"}, "_sum": set[str](), "_count": set[str]()}


def series() -> dict[str, set[str]]:
    """Labels by the name of the series."""
    member = BrokerStats(health="OK", start_time_ns=0, node=NodeStats(cluster=ClusterStats(node=1)))
    found = _series(NodeMetrics(member, SeriesBound(), NO_REQUESTS).collect())
    found |= _series(LookupMetrics(LookupFigures(cluster=ClusterFigures(View()))).collect())
    return found | {"up": OF_A_TARGET}


def _series(families: Iterable[Family]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in families:
        kind, name = family.type, family.name
        suffixes = HISTOGRAM if kind == "histogram" else SUFFIXES.get(kind, {"": set()})
        for suffix, more in suffixes.items():
            found[name + suffix] = {*label_names(family), *more, *OF_A_TARGET}
    return found
