"""What is wrong with the replicas of this node: ends that recovery cut, batches that do not verify, their repair.

Owner of two doubts about a log, which an election and a leader's Open ask for: its end was cut when it was recovered,
and has not come again (`cut`: others that have more go first); from some log id on nothing can be vouched for
(`unsound_from`: it does not lead, and follows by fetching that part anew). Batches that are found later, by whoever
reads them, are mended where they are by the `Repairer`; readers that stopped in front of them hear of it.

Invariant: what neither is committed nor has an entry behind it, and so may be cut yet, is not mended.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from nsqha.server.repair import Repairer

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.commitlog.verdict import Report
    from nsqha.election.model import NodeInfo
    from nsqha.server.disk import DiskRounds
    from nsqha.server.peers import Peers
    from nsqha.server.replicas import Replicas

Key = tuple[int, int]  # topic uid, partition


class ReplicaDamage:
    """The damage of one node's replicas."""

    def __init__(
        self,
        replicas: Replicas,
        *,
        node: int,
        cluster_id: int,
        peers: Peers,
        nodes: Callable[[], Mapping[int, NodeInfo]],
        disk: DiskRounds,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`nodes`: those that are alive; `on_failure`: the disk failed."""
        self.on_mended: Callable[[PartitionLog, int, int], None] = lambda log_, first_log_id, end_log_id: None
        self._replicas = replicas
        self._node = node
        self._nodes = nodes
        self._cut: set[Key] = set()
        self._unsound_from: dict[Key, int] = {}
        self._repairer = Repairer(
            peers,
            cluster_id=cluster_id,
            log_of=replicas.log_of,
            others=self._others,
            mended=self._mended,
            run=disk.run,
            on_failure=on_failure,
            spawn=spawn,
        )

    # ---- doubts

    def recovered(self, key: Key, report: Report | None) -> None:
        """A log was opened; None: it is new."""
        if report is not None and any(cut.why == "torn" for cut in report.cuts):
            self._cut.add(key)
        if report is not None and report.serve_end is not None:
            self._unsound_from[key] = report.serve_end

    def leads(self, key: Key) -> None:
        """What this replica has is the truth from now on."""
        self._cut.discard(key)

    def unsound_from(self, key: Key) -> int | None:
        """The log id from which on nothing can be vouched for; None: all can."""
        return self._unsound_from.get(key)

    def renewed(self, key: Key) -> None:
        """Nothing is left of what could not be vouched for: the leader gave it again, or the log was begun anew."""
        self._unsound_from.pop(key, None)

    def doubts(self, key: Key) -> tuple[bool, bool]:
        """Of a replica: whether recovery cut its end, and whether a range of it does not verify."""
        follower = self._replicas.followers.get(key)
        if key in self._cut and follower is not None and follower.complete:
            self._cut.discard(key)  # what was cut has come again, as far as it counts
        return key in self._cut, key in self._unsound_from or (follower is not None and follower.damage is not None)

    # ---- found while this node runs

    def found(self, key: Key, first: int, end: int) -> None:
        """Batches of a replica of this node do not verify any more."""
        log_ = self._replicas.log_of(key)
        # The entry behind says what was here, committed or not: nobody may lead before, who could say that it is.
        proven = log_ is not None and end < log_.end.log_id
        if (proven or end <= self._replicas.committed_of(key)) and self._others(key):
            self._repairer.damaged(key, first, end)

    def _mended(self, key: Key, first: int, end: int) -> None:
        if (log_ := self._replicas.log_of(key)) is not None:
            self.on_mended(log_, first, end)
        if (leadership := self._replicas.leading.get(key)) is not None:
            for delivery in leadership.partition.deliveries.values():
                delivery.mended()
        if (follower := self._replicas.followers.get(key)) is not None:
            follower.mended()

    def _others(self, key: Key) -> list[str]:
        """Where the other replicas of a partition are, members of the ISR first."""
        topic, nodes = self._replicas.record_of(key), self._nodes()
        if topic is None:
            return []
        meta = topic.record.partitions[key[1]]
        order = [*meta.isr, *(node for node in meta.replicas if node not in meta.isr)]
        return [nodes[node].grpc_address for node in order if node != self._node and node in nodes]
