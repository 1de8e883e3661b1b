"""What the nodes themselves say of partitions, beside what the records say: who leads, and whether it acknowledges.

A record only names a leader. Its node may run and not lead: it was not elected again, it declined, its log is stopped.
So a partition is judged by what the leader of the record answers (`questions`), and by its epoch (`Observed.of`). Nodes
with replicas that are not in sync are asked, too, where their logs end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nsqha.election.model import NodeInfo, PartitionMeta
from nsqha.election.placement import PartitionName
from nsqha.ids import PartitionKey

KEYS_MAX = 200  # partitions that a node is asked for by one request: it answers within one event loop iteration


class ReplicaAnswer(NamedTuple):
    """What a node says of its replica of one partition."""

    leads_epoch: int = 0  # 0: it leads none
    waits_ms: int = 0  # since when it has acknowledged nothing of what waits; 0: it acknowledges
    position: int | None = None  # end of its log in bytes; None: an older build, which does not say
    why: str = ""  # why it does not lead, if it says so


class LeaderState(NamedTuple):
    """What is known of a partition from the leader that its record names."""

    leads: bool
    waits_s: float = 0.0
    why: str = ""  # why it does not lead


NO_ANSWER: ReplicaAnswer = ReplicaAnswer(why="its node does not have the partition")


@dataclass(frozen=True)
class Observed:
    """The answers of all nodes that were asked."""

    answers: Mapping[int, Mapping[PartitionKey, ReplicaAnswer]] = field(default_factory=dict)  # node -> partition
    silent: Mapping[int, str] = field(default_factory=dict)  # nodes that did not answer, and why

    def of(self, name: PartitionName, meta: PartitionMeta) -> LeaderState | None:
        """What the leader says; None: it was not asked, or did not answer."""
        said = self.answers.get(meta.leader)
        if said is None:
            return None
        answer = said.get((name.uid, name.number), NO_ANSWER)
        if answer.leads_epoch >= meta.epoch:  # above: it was elected again after the record was read
            return LeaderState(True, answer.waits_ms / 1000)
        if answer.leads_epoch:
            return LeaderState(False, why=f"it leads epoch {answer.leads_epoch} and not {meta.epoch}")
        return LeaderState(False, why=answer.why)


def answers_in(reply: Any, node: int) -> dict[PartitionKey, ReplicaAnswer] | str:
    """What a node says in its answer to Status; a text: another node answers at its address."""
    if reply.node_uid != node:
        return f"node {reply.node_uid:016x} answers at its address"
    return {
        (replica.key.topic_uid, replica.key.partition): ReplicaAnswer(
            _epoch_led(replica, node),
            replica.waits_ms,
            replica.position if replica.HasField("position") else None,
            "" if replica.led_by == node and not replica.corrupt else _why_not(replica, reply.poisoned),
        )
        for replica in reply.replicas
    }


def _epoch_led(replica: Any, node: int) -> int:
    if replica.leads_epoch or replica.led_by != node or replica.corrupt:
        return int(replica.leads_epoch)
    return int(replica.promise)  # an older build, which does not say in which epoch it leads


def _why_not(replica: Any, poisoned: str) -> str:
    if poisoned:
        return f"its data directory is closed: {poisoned}"
    if replica.corrupt:
        return "its log has damage, or is stopped"
    return str(replica.declines) or "it runs, and was not elected in this life or for this log"


def questions(
    metas: Mapping[PartitionName, PartitionMeta], nodes: Mapping[int, NodeInfo]
) -> dict[int, list[list[PartitionKey]]]:
    """Node -> what it is asked, by one request after the other: partitions that it leads by their records; and where a
    replica that is not in sync is on a node that is alive, that node and the leader."""
    wanted: dict[int, list[PartitionKey]] = {}
    for name, meta in metas.items():
        key = (name.uid, name.number)
        late = [node for node in meta.replicas if node not in meta.isr]
        for node in dict.fromkeys((meta.leader, *late)):
            if node in nodes and nodes[node].grpc_address:
                wanted.setdefault(node, []).append(key)
    return {node: list(_parts(keys)) for node, keys in wanted.items()}


def _parts(keys: list[PartitionKey]) -> Iterable[list[PartitionKey]]:
    for first in range(0, len(keys), KEYS_MAX):
        yield keys[first : first + KEYS_MAX]
