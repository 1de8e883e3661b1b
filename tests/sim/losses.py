"""Batches that every replica has damaged: nobody can mend them, so an operator gives them up, and all else goes on.

    begin     somewhere in a life, while all replicas are up: one batch, or a few, on the disk of each that has it; half
              of the time all nodes begin anew then
    operator  from `heal` on, once a second: `nsqha log skip` of what is concerned
    end       all have the same of it, LOST or as it was (memory may have had it), and still do after all have restarted

What is given up is one batch without channel events: else channels may be as they were before (docs/guarantees.md), and
replicas that had applied them already would know better. Its neighbours are left alone: where two entries side by side
do not verify, nothing tells them apart.

All chance is of a source of its own: lives without losses are what they were before there were any.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT
from nsqha.errors import LogCorrupt
from nsqha.frames import HAS_ATTRIBUTES, HAS_CARRY, HAS_EVENTS
from nsqha.server.opening.state_loader import DURABLE_ENTRIES

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from tests.sim.cluster import SimCluster
    from tests.sim.node import SimNode

Key = tuple[int, int]

OPERATOR_SECONDS = 1.0
RETRY_SECONDS = 0.3
BODY_AT = 4  # of a frame or an entry: nothing there is a size


def vouched_on_disk(log: PartitionLog) -> int:
    """The end of what entries that are on this disk themselves call durable everywhere. What the last ones say goes
    with them when the power does: progress waits half a second for its sync."""
    end = log.local_durable
    try:
        return max((entry.durable for entry in log.entries(end - DURABLE_ENTRIES, end)), default=0)
    except LogCorrupt:
        return 0


class Losses:
    """Of one cluster. What was lost is in `SimCluster.lost`."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self._rng = random.Random(f"losses {cluster.plan.seed}")
        self._damaged: set[tuple[Key, int]] = set()
        self._over = False

    def begin(self, damaged: set[tuple[Key, int]]) -> None:
        """Lose as many batches as were drawn; `damaged`: what else does not verify somewhere."""
        self._damaged = damaged
        for _ in range(self.cluster.plan.losses):
            self.cluster.world.call_later(self._rng.uniform(0.5, self.cluster.plan.seconds), self._lose)

    def healed(self) -> None:
        """Nothing more is lost, and an operator comes."""
        self._over = True
        if self.cluster.lost:
            self._operator()

    def _operator(self) -> None:
        operators, lost = self.cluster.operators, {key for key, _ in self.cluster.lost}
        assert operators is not None
        for topic in sorted({name for name, key, _ in self.cluster.named_metas() if key in lost}):
            operators.skip(topic)
        self.cluster.world.call_later(OPERATOR_SECONDS, self._operator)

    # ---- one batch

    def _lose(self) -> None:
        if self._over:
            return
        key, meta = self._rng.choice(self.cluster.metas())
        holders = self._holders(key, {*meta.replicas, *meta.isr})
        log_id = self._choose(key, holders) if holders is not None else None
        if holders is None or log_id is None:
            self.cluster.world.call_later(RETRY_SECONDS, self._lose)
            return
        self.cluster.lost.add((key, log_id))
        self._damaged |= {(key, near) for near in (log_id - 1, log_id, log_id + 1)}
        entries = self._rng.choice((0.0, 0.3, 1.0))
        places = ["entry" if self._rng.random() < entries else "frames" for _ in holders]
        for (node, log), place in zip(holders, places, strict=True):
            self.damage(node, log, log_id, entry=place == "entry")
        self.cluster.count("batches lost")
        self.cluster.note(f"batch {log_id} of {self.cluster.name_of(key)} is lost: {places}")
        if self._rng.random() < 0.5:
            self.cluster.world.call_soon(self._restart_all)

    def _restart_all(self) -> None:
        """Whoever may lead then has found it."""
        for node in self.cluster.nodes:
            node.end("killed with all others")

    def _holders(self, key: Key, uids: set[int]) -> list[tuple[SimNode, PartitionLog]] | None:
        """All replicas, if they are up."""
        found = []
        for node in self.cluster.nodes:
            log = None if node.replicas is None or not node.joined else node.replicas.table.log_of(key)
            if log is not None:
                found.append((node, log))
                uids = uids - {node.uid}
        return None if uids else found

    def _choose(self, key: Key, holders: list[tuple[SimNode, PartitionLog]]) -> int | None:
        first = max(log.start.log_id for _, log in holders)
        # A damaged end, after a power loss, is a torn one to whoever finds it.
        end = min(min(vouched_on_disk(log), log.local_durable) for _, log in holders)
        end = min(end, self.cluster.oracle.ledger.known(key))
        able = [n for n in range(first, end) if self._may_go(key, holders, n)]
        return self._rng.choice(able) if able else None

    def _may_go(self, key: Key, holders: list[tuple[SimNode, PartitionLog]], log_id: int) -> bool:
        if any((key, near) in self._damaged for near in (log_id - 1, log_id, log_id + 1)):
            return False
        try:
            return not any(log.entry(log_id).flags & (HAS_EVENTS | HAS_ATTRIBUTES | HAS_CARRY) for _, log in holders)
        except LogCorrupt:
            return False

    def damage(self, node: SimNode, log: PartitionLog, log_id: int, *, entry: bool) -> None:
        """The frames, and the entry too."""
        known, pair = log.entry(log_id), log.files.pair_of(log_id)
        node.storage.flip(pair.path(SEGMENT), 8 * (known.position - pair.position + BODY_AT))
        if entry:
            node.storage.flip(pair.path(COMMITLOG), 8 * (pair.slot(log_id) + BODY_AT))
