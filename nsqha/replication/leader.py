"""The leader's view of one partition: the progress of its replicas, and the commit point.

The local disk is one more acknowledging replica. The local write to the page cache, the local fdatasync and the acks
of followers are the same kind of event, so append, disk round and push can run in parallel and one replica is not a
special case:

    committed = min over the effective ISR of acked(replica), while the recorded ISR has min_isr members
    acked     = durable end   if the topic is sync=always   (fdatasync'ed there)
                log end       otherwise                      (written to the OS there)

The *recorded* ISR is the one that the metadata are known to have. The *effective* ISR is the union of every set that
may be in force while a change of the metadata is under way, so a change whose outcome is unknown never lets a batch
commit without a replica that could still be elected. `nsqha.replication.isr` decides both.

Invariants: durable <= end for each replica; recorded is a subset of effective; committed never falls; nothing commits
while fewer than `min_isr` members are recorded.
All ends are exclusive log ids. Per batch this costs a few integer comparisons and no object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

NOTHING: tuple[int, int] = (0, 0)  # (end, durable) acknowledged by a replica that has not reported yet


class ReplicaProgress:
    """What one replica of the partition has reported."""

    __slots__ = ("durable", "end")

    def __init__(self, end: int, durable: int) -> None:
        self.end = end
        self.durable = durable

    def __repr__(self) -> str:
        return f"Progress(end={self.end}, durable={self.durable})"


class LeaderReplica:
    """The commit rule of one partition in one leader epoch (Commit in the spec)."""

    def __init__(
        self, *, node: int, epoch: int, isr: Iterable[int], min_isr: int, sync_always: bool, end: int, durable: int
    ) -> None:
        """`end` and `durable` are this node's own log end and its durable part, as recovery found them."""
        self.node = node
        self.epoch = epoch
        self.min_isr = min_isr
        self.sync_always = sync_always
        self.committed = 0
        self._replicas = {node: ReplicaProgress(end, durable)}
        self._effective: tuple[ReplicaProgress, ...] = ()
        self._enough = False  # enough members are recorded, so that batches may commit
        self._spare = 0  # how many members may leave the ISR
        self._set_members(set(isr) | {node}, set(isr) | {node})

    def set_isr(
        self,
        recorded: Iterable[int],
        effective: Iterable[int],
        *,
        min_isr: int | None = None,
        acked: Mapping[int, tuple[int, int]] | None = None,
    ) -> bool:
        """Set the replicas that must acknowledge from now on. True if the commit point moved.

        `acked` repeats the (end, durable) that followers reported before their acks began to count. A member that has
        never reported has acknowledged nothing.
        """
        if min_isr is not None:
            self.min_isr = min_isr
        for node, (end, durable) in (acked or {}).items():
            if node != self.node:
                self._set_progress(node, end, durable)
        self._set_members(set(recorded), set(effective))
        return self._advance()

    def _set_members(self, recorded: set[int], effective: set[int]) -> None:
        assert self.node in recorded, f"the leader {self.node} is not in the ISR {sorted(recorded)}"
        assert recorded <= effective, f"of the ISR {sorted(recorded)} only {sorted(effective)} would be asked"
        for member in effective:
            self._replicas.setdefault(member, ReplicaProgress(*NOTHING))
        self._effective = tuple(self._replicas[member] for member in sorted(effective))
        self._enough = len(recorded) >= self.min_isr
        self._spare = len(recorded) - self.min_isr

    @property
    def waits_for(self) -> str:
        """Why batches are not committed, for people; empty if the disk, or followers that may leave, cause it."""
        if not self._enough:
            return f"fewer than {self.min_isr} replicas (min_isr) are in sync"
        own = self._replicas[self.node]
        behind = sum(self._acked(p) < self._acked(own) for p in self._effective)
        if self._spare > 0 or not behind:
            return ""
        members = len(self._effective)
        return f"only {members - behind} of {members} in-sync replicas acknowledge, and min_isr is {self.min_isr}"

    @property
    def alone(self) -> bool:
        """Whether a write to the page cache here commits at once: no other replica and no disk round is waited for."""
        return not self.sync_always and len(self._effective) == 1 and self._enough

    def _acked(self, progress: ReplicaProgress) -> int:
        return progress.durable if self.sync_always else progress.end

    @property
    def durable(self) -> int:
        """End of what is durable on every member of the effective ISR; stamped into each entry."""
        durable = self._effective[0].durable
        for progress in self._effective:
            if progress.durable < durable:
                durable = progress.durable
        return durable

    def opened(self, node: int, *, end: int, durable: int) -> bool:
        """A follower began a stream: this replaces what it reported before. True if the commit point moved.

        It may have less than it acknowledged once: entries that were not durable, or another log. Pass zeros for one
        whose log_uid does not count or whose log is not a prefix of ours.
        """
        assert node != self.node, "a leader does not follow itself"
        self._set_progress(node, end, durable)
        return self._advance()

    def _set_progress(self, node: int, end: int, durable: int) -> None:
        assert durable <= end, f"node {node} reports durable {durable} behind its end {end}"
        progress = self._replicas.setdefault(node, ReplicaProgress(*NOTHING))
        progress.end = end
        progress.durable = durable

    def acked(self, node: int, *, end: int, durable: int) -> bool:
        """`node` has everything below `end`, and everything below `durable` on disk. True if the commit point moved.

        Only for acks that count: `IsrKeeper.countable`.
        """
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
        # Called for each write and each ack, and mostly nothing moves: a plain loop, left at the first member behind.
        committed, acked = self.committed, None
        for progress in self._effective:
            end = progress.durable if self.sync_always else progress.end
            if end <= committed:
                return False
            if acked is None or end < acked:
                acked = end
        if acked is None or not self._enough:
            return False
        self.committed = acked
        return True
