"""The leader's view of one partition: who has which batches, and up to where they are committed.

The local disk is one more acknowledging replica. Writing to the own page cache, the own fdatasync and the acks of
followers are the same kind of fact, so append, disk round and push can run in parallel and one replica is not a
special case:

    committed = min over the effective ISR of acked(replica)
    acked     = durable end   if the topic is sync=always   (fdatasync'ed there)
                log end       otherwise                      (written to the OS there)

The *effective* ISR is the union of every set that may be in force while a change of the metadata is under way, so a
change whose outcome is unknown never lets a batch commit without a replica that could still be elected.

Invariants: durable <= end for each replica; committed never falls; nothing counts below `min_isr` members.
All ends are exclusive log ids. Per batch this costs a few integer comparisons and no object.
"""

from __future__ import annotations

from collections.abc import Iterable


class Progress:
    """What one replica of the partition has told us."""

    __slots__ = ("durable", "end")

    def __init__(self, end: int, durable: int) -> None:
        self.end = end
        self.durable = durable

    def __repr__(self) -> str:
        return f"Progress(end={self.end}, durable={self.durable})"


class LeaderReplica:
    """The commit rule of one partition in one leader epoch."""

    def __init__(
        self, *, node: int, epoch: int, isr: Iterable[int], min_isr: int, sync_always: bool, end: int, durable: int
    ) -> None:
        """`end` and `durable` are this node's own log end and its durable part, as recovery found them."""
        self.node = node
        self.epoch = epoch
        self.min_isr = min_isr
        self.sync_always = sync_always
        self.committed = 0
        self._replicas = {node: Progress(end, durable)}
        self._effective: tuple[Progress, ...] = ()
        self.set_effective_isr(isr)

    def set_effective_isr(self, nodes: Iterable[int]) -> None:
        """Who must acknowledge from now on; a node not heard of yet has acknowledged nothing."""
        members = set(nodes) | {self.node}
        for member in members:
            self._replicas.setdefault(member, Progress(0, 0))
        self._effective = tuple(self._replicas[member] for member in sorted(members))

    @property
    def durable(self) -> int:
        """End of what is durable on every member of the effective ISR; stamped into each entry."""
        effective = self._effective
        return effective[0].durable if len(effective) == 1 else min(p.durable for p in effective)

    def acked(self, node: int, *, end: int, durable: int) -> bool:
        """`node` has everything below `end`, and everything below `durable` on disk. True if the commit point moved."""
        progress = self._replicas.get(node)
        if progress is None:
            return False
        assert durable <= end, f"node {node} reports durable {durable} behind its end {end}"
        if end > progress.end:
            progress.end = end
        if durable > progress.durable:
            progress.durable = durable
        return self._advance()

    def written(self, end: int) -> bool:
        """Our own log has been written up to `end`. True if the commit point moved."""
        self._replicas[self.node].end = end
        return self._advance()

    def set_sync_always(self, sync_always: bool) -> bool:
        """The topic's sync setting changed. True if the commit point moved."""
        self.sync_always = sync_always
        return self._advance()

    def _advance(self) -> bool:
        effective = self._effective
        if len(effective) < self.min_isr:
            return False
        if len(effective) == 1:
            acked = effective[0].durable if self.sync_always else effective[0].end
        elif self.sync_always:
            acked = min(p.durable for p in effective)
        else:
            acked = min(p.end for p in effective)
        if acked <= self.committed:
            return False
        self.committed = acked
        return True
