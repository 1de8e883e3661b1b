"""Batch readers of a simulated cluster: they hold the log start of partitions, and what is held is on every replica.

A hold is asked for at a leader, at a rate that the seed drew. From its answer on no replica's log may begin above it,
as long as no batch is known with a timestamp at which it is over. Where an operator elected somebody, or gave batches
up, the hold may be among what was lost; with sync=interval, too: those partitions are not judged.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsqha.errors import NsqhaError
from nsqha.server.partition import holding

if TYPE_CHECKING:
    from nsqha.server.partition.partition import Partition
    from tests.sim.cluster import SimCluster
    from tests.sim.node import SimNode

Key = tuple[int, int]


@dataclass(frozen=True)
class Held:
    """What a leader answered."""

    by: str
    id: int
    offset: int
    until_ns: int
    log_id: int  # of a batch behind the event that says so


class BatchReaders:
    """All holds of one run."""

    def __init__(self, cluster: SimCluster, rng: random.Random) -> None:
        self.cluster = cluster
        self._rng = rng
        self._over = False
        self._ids = 0
        self._held: dict[Key, list[Held]] = {}
        self._newest_ns: dict[Key, int] = {}  # timestamps that any replica has seen
        self._next()

    def stop(self) -> None:
        """Nothing more is held; what is stays so."""
        self._over = True

    def _next(self) -> None:
        self.cluster.world.call_later(self._rng.expovariate(self.cluster.plan.batch_readers), self._act)

    def _act(self) -> None:
        if self._over:
            return
        self._next()
        led = [
            (node, key, leadership.partition)
            for node in self.cluster.nodes
            if node.joined and not node.frozen and node.replicas is not None
            for key, leadership in node.replicas.leading.items()
        ]
        if led:
            self._hold(*self._rng.choice(led))

    def _hold(self, node: SimNode, key: Key, partition: Partition) -> None:
        self._ids += 1
        id_, start = self._ids, partition.log.start.offset
        offset = self._rng.choice((start, self._rng.randint(start, partition.log.end.offset)))
        hold_ms = self._rng.choice((500, 2_000, 8_000))
        loop = node.loop

        async def ask() -> None:
            try:
                held = await holding.hold(partition, id_, offset, hold_ms)
            except NsqhaError as error:
                self.cluster.note(f"hold {id_} of {key} at {node.name}: {type(error).__name__}: {error}")
                return
            self.cluster.count("holds")
            self.cluster.note(f"hold {id_} of {key} at {node.name}: from {held.offset}")
            log_id = partition.cursors.state.applied.log_id
            self._held.setdefault(key, []).append(Held(node.name, id_, held.offset, held.until_ns, log_id))

        loop.call_soon(lambda: loop.create_task(ask()))

    # ---- after a turn

    def look(self, node: SimNode) -> None:
        """Whether a node's logs begin where what is held does, or before."""
        if not self._held or node.replicas is None or not self.cluster.sync_always:
            return
        logs = [(key, leadership.log) for key, leadership in node.replicas.leading.items()]
        logs += [(key, follower.log) for key, follower in node.replicas.followers.items()]
        for key, log in logs:
            last = log.last
            if last is not None and last.timestamp_ns > self._newest_ns.get(key, 0):
                self._newest_ns[key] = last.timestamp_ns
            if key not in self._held or self._lossy(key):
                continue
            alive = [held for held in self._held[key] if held.until_ns > self._newest_ns.get(key, 0)]
            self._held[key] = alive
            for held in alive:
                if log.end.log_id > held.log_id and log.start.offset > held.offset:
                    at, what = log.start.offset, f"hold {held.id} from {held.offset}, made at {held.by}"
                    self.cluster.oracle.broken(f"{node.name} {key}: the log begins at {at}, past {what}")

    def _lossy(self, key: Key) -> bool:
        elected = any(found == key for found, _ in self.cluster.oracle.operators_elections)
        return elected or any(found == key for found, _ in self.cluster.lost)
