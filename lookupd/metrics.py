"""/metrics of a lookup daemon for Prometheus: what it holds, and in a cluster how its partitions are.

Every lookup daemon of a cluster shows the same state of the cluster, from its own copy of the metadata: a rule takes
the maximum over them. Elections and probes are those of this process, made while it was the controller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import (
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from lookupd.controller import ControllerCounts
from nsqha import NSQ_VERSION, __version__
from nsqha.election import health
from nsqha.election.model import NodeInfo
from nsqha.election.placement import PartitionName, able, metas_of
from nsqha.election.session import View
from nsqha.ids import is_ephemeral
from nsqha.server.http.metrics.families import Requests, certificates, counters, gauge, gauges, histogram, http_requests
from nsqha.server.runtime.measures import certificates_end


@dataclass(frozen=True)
class ClusterFigures:
    """The cluster at one moment, as one of its lookup daemons knows it."""

    view: View
    counts: ControllerCounts = field(default_factory=ControllerCounts)
    is_controller: bool = False
    rounds: int = 0  # partitions that wait for a leader
    unled: frozenset[PartitionName] = frozenset()  # their leaders run, and say that they do not lead


@dataclass(frozen=True)
class LookupFigures:
    """A lookup daemon at one moment."""

    topics: int = 0
    producers: int = 0
    requests: Requests = field(default_factory=dict)
    cluster: ClusterFigures | None = None


def render(figures: LookupFigures, accept: str) -> tuple[bytes, str]:
    """The body, and its Content-Type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LookupMetrics(figures))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class LookupMetrics(Collector):
    """All families of one moment of a lookup daemon."""

    def __init__(self, figures: LookupFigures) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return ()  # a registry looks for duplicate names with it; there is only this collector

    def collect(self) -> Iterable[Metric]:
        figures = self._figures
        yield InfoMetricFamily(
            "nsqha_lookupd_build", "What is running.", value={"version": __version__, "nsq_version": NSQ_VERSION}
        )
        yield gauge("lookupd_topics", "Topics that nsqds have registered here.", figures.topics)
        yield gauge("lookupd_producers", "Nsqds that are registered here.", figures.producers)
        yield http_requests(figures.requests)
        yield certificates(sorted(certificates_end.items()))
        if figures.cluster is not None:
            yield from _state(figures.cluster.view, figures.cluster.unled)
            yield from _controller(figures.cluster)


def _state(view: View, unled: Collection[PartitionName]) -> Iterable[Metric]:
    metas = metas_of({name: topic.record for name, topic in view.topics.items()})
    states = health.counts(metas, view.nodes, unled)
    away = {node for meta in metas.values() for node in meta.replicas if node not in view.nodes}
    yield gauge("cluster_nodes", "Nodes that hold a lease.", len(view.nodes))
    yield gauge("cluster_nodes_away", "Nodes without a lease that have replicas.", len(away))
    yield gauges(
        "cluster_node_refuses_to_lead",
        "1 for a node that is not to lead: its disk or clock (declines), its stop (leaving), a failed disk (poisoned); "
        "or that gets nothing new, as connections are missing (joining).",
        ("node", "why"),
        [((node.name, why), 1.0) for node in view.nodes.values() for why in _refusals(node)],
    )
    yield gauge("cluster_topics", "Topics.", len(view.topics))
    yield gauge("cluster_partitions", "Partitions of all topics.", len(metas))
    yield gauge("cluster_partitions_leaderless", "Partitions that no node leads.", states[health.LEADERLESS])
    yield gauge(
        "cluster_partitions_under_replicated",
        "Partitions that serve with fewer in-sync replicas than they have replicas.",
        states[health.UNDER],
    )
    yield gauge(
        "cluster_partitions_below_min_isr",
        "Partitions that have a leader and acknowledge nothing, because in-sync replicas are missing.",
        states[health.BELOW],
    )
    yield gauge("cluster_replicas_owed", "Replicas that topics require and that have no node.", _owed(view))


def _refusals(node: NodeInfo) -> list[str]:
    signs = {"declines": node.declines, "poisoned": node.poisoned, "leaving": node.leaving, "joining": node.joining}
    return [why for why, there in signs.items() if there]


def _controller(cluster: ClusterFigures) -> Iterable[Metric]:
    counts = cluster.counts
    yield gauge("controller", "1 if this process is the controller.", float(cluster.is_controller))
    yield gauge("controller_rounds", "Partitions that wait for a leader.", cluster.rounds)
    yield _count("controller_terms", "Times this process became controller.", counts.terms)
    yield _count("possible_losses", "Elections that may have lost messages.", counts.possible_losses)
    yield _count("controller_probes", "Times that a node was asked what it has.", counts.probes)
    yield _count("controller_probes_failed", "Times that a node gave no answer.", counts.probes_failed)
    yield _counted("elections", "Leaders elected by this process.", "why", counts.elections)
    yield _counted(
        "controller_changes", "Compare-and-sets of partition records, by outcome.", "outcome", counts.changes
    )
    text = "From the suspicion to the new leader's record."
    yield histogram("election_seconds", text, counts.election_seconds.data())


def _owed(view: View) -> int:
    nodes = able(view.nodes)
    return sum(
        health.owed(meta, topic.record.settings, nodes)
        for name, topic in view.topics.items()
        for meta in topic.record.partitions.values()
        if not is_ephemeral(name)
    )


def _count(name: str, text: str, value: int) -> Metric:
    return counters(name, text, (), [((), value)])


def _counted(name: str, text: str, label: str, counted: Mapping[Any, int]) -> Metric:
    return counters(name, text, (label,), [((value,), count) for value, count in sorted(counted.items())])
