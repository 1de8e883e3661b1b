"""What scenes begin with: a healthy cluster, and what a test does to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT
from tests.sim.cluster import SimCluster
from tests.sim.node import SimNode
from tests.sim.plan import Plan

SELDOM = 1e-9  # of what the test does itself


@contextmanager
def healthy(**plan: Any) -> Iterator[SimCluster]:
    """Three healthy nodes with a topic and clients."""
    with SimCluster(Plan(**{"seed": 1, "pause_seconds": 0.1, **plan})) as made:
        made.start()
        made.clients()
        made.run_for(1.0)
        yield made


def leader(cluster: SimCluster) -> SimNode:
    return next(node for node in cluster.nodes if node.replicas is not None and node.replicas.leading)


def a_follower(cluster: SimCluster) -> SimNode:
    return next(node for node in cluster.nodes if node is not leader(cluster))


def flip(cluster: SimCluster, node: SimNode, log_id: int, *, entry: bool, keep: bool = True) -> None:
    """Damage a batch on one disk; `keep`: it is to be as it was at the end."""
    ((key, _),) = cluster.metas()
    assert node.replicas is not None
    log = node.replicas.table.log_of(key)
    assert log is not None
    known, pair = log.entry(log_id), log.files.pair_of(log_id)
    places = [(pair.path(SEGMENT), known.position - pair.position + 4)]
    if entry:
        places.append((pair.path(COMMITLOG), pair.slot(log_id) + 50))
    for path, at in places:
        if keep:
            cluster.flips.append((node, path, at, node.storage.contents()[path][at]))
        node.storage.flip(path, 8 * at)


def all_down(cluster: SimCluster) -> None:
    for node in cluster.nodes:
        cluster.keep_down.add(node.name)
        node.end("killed")


def power_loss(cluster: SimCluster) -> None:
    for node in cluster.nodes:
        node.end("power loss", power=True)


def all_up(cluster: SimCluster) -> None:
    cluster.keep_down.clear()
    for node in cluster.nodes:
        node.start()
    cluster.until(lambda: all(node.joined for node in cluster.nodes), 15.0, "they are back")
