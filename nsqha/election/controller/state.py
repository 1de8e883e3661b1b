"""What a term of a controller knows and has under way; its parts share this, and add what they want done."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Literal

from nsqha.election.controller.events import Action, PutPartition, Say
from nsqha.election.controller.failed_leaders import FailedLeaders
from nsqha.election.controller.leader_check import LeaderCheck
from nsqha.election.controller.node_health import NodeHealth
from nsqha.election.controller.planner import Planner, World
from nsqha.election.controller.rounds import ControllerLimits, Round, TopicPartition
from nsqha.election.elect import GATHER_S, ReplicaReport
from nsqha.election.model import NodeInfo, PartitionMeta, TopicSettings
from nsqha.election.placement import PartitionName
from nsqha.ids import PartitionKey


class PlannedPartitions:
    """What plans are made from, kept up as partitions change: to copy thousands for each change would be quadratic."""

    def __init__(self) -> None:
        self._metas: dict[PartitionName, PartitionMeta] = {}
        self._settings: dict[PartitionName, TopicSettings] = {}
        self._holders: Counter[int] = Counter()  # node -> partitions that it is to have a replica of
        self._version = 1

    def put(self, name: PartitionName, meta: PartitionMeta, settings: TopicSettings) -> None:
        """A partition is new, or has changed."""
        before = self._metas.get(name)
        if before is None or before.replicas != meta.replicas:
            if before is not None:
                self._holders.subtract(before.replicas)
            self._holders.update(meta.replicas)
        self._metas[name], self._settings[name] = meta, settings
        self._version += 1

    def forget(self, name: PartitionName) -> None:
        """The partition is gone."""
        self._holders.subtract(self._metas.pop(name).replicas)
        del self._settings[name]
        self._version += 1

    def world(self, nodes: Mapping[int, NodeInfo], writing: Mapping[PartitionName, PartitionMeta]) -> World:
        """All of it, with what is being written as if it were, or the same work would be planned twice."""
        holders = {uid for uid, count in self._holders.items() if count > 0}
        holders.update(uid for meta in writing.values() for uid in meta.replicas)
        metas = {**self._metas, **writing} if writing else self._metas
        version = 0 if writing else self._version
        return World(metas, self._settings, nodes, holders=frozenset(holders), version=version)


class ControllerState:
    """Partitions, their rounds and changes, the nodes, and the actions of the present step."""

    def __init__(self, now: float, limits: ControllerLimits) -> None:
        self.limits = limits
        self.parts: dict[PartitionName, TopicPartition] = {}
        self.names: dict[PartitionKey, PartitionName] = {}
        self.led: defaultdict[int, set[PartitionName]] = defaultdict(set)
        self.rounds: dict[PartitionName, Round] = {}
        self.seen: dict[PartitionName, dict[int, ReplicaReport]] = {}  # the last report of each replica
        self.puts: dict[PartitionName, tuple[PutPartition, float, str]] = {}
        self.reading: set[str] = set()
        self.standing = NodeHealth()
        self.leader_check = LeaderCheck(limits)
        self.failed = FailedLeaders()
        self.planner = Planner(now, limits.plan)
        self.planned = PlannedPartitions()
        self.actions: list[Action] = []
        self.wake = now

    @property
    def nodes(self) -> Mapping[int, NodeInfo]:
        """Those that are registered."""
        return self.standing.nodes

    @property
    def ask_again_s(self) -> float:
        """Between requests for one partition: longer while many leaders are sought, as all are asked for. The work for
        each would grow with their number else."""
        return self.limits.ask_again_s + self.limits.key_s * max(0, len(self.rounds) - 1)

    def gather_s(self, round_: Round) -> float:
        """How long members that live are waited for. Who has much to say of many is waited for, or who answers first
        would lead all of them; also the last of them, when most have been elected."""
        round_.many = max(round_.many, len(self.rounds))
        return GATHER_S + self.limits.key_s * (round_.many - 1)

    def free(self, name: PartitionName) -> bool:
        return name in self.parts and name not in self.puts and name.topic not in self.reading

    def add(self, part: TopicPartition) -> None:
        """A partition that was not known."""
        name, meta = part.name, part.meta
        self.parts[name] = part
        self.names[part.key] = name
        self.led[meta.leader].add(name)
        self.planned.put(name, meta, part.settings)

    def set_meta(self, part: TopicPartition, meta: PartitionMeta) -> None:
        self.led[part.meta.leader].discard(part.name)
        if (part.meta.leader, part.meta.epoch) != (meta.leader, meta.epoch):
            self.rounds.pop(part.name, None)
            self.leader_check.forget(part.name)
        part.meta = meta
        self.planned.put(part.name, meta, part.settings)
        self.led[meta.leader].add(part.name)

    def forget(self, name: PartitionName) -> None:
        part = self.parts.pop(name, None)
        if part is not None:
            self.led[part.meta.leader].discard(name)
            del self.names[part.key]
            self.planned.forget(name)
        for held in (self.rounds, self.seen, self.puts):
            held.pop(name, None)
        self.leader_check.forget(name)
        self.failed.forget(name)

    def world(self) -> World:
        """What plans of the present step are made from."""
        writing = {name: action.meta for name, (action, _, _) in self.puts.items()}
        return self.planned.world(self.nodes, writing)

    def name(self, uid: int) -> str:
        node = self.nodes.get(uid)
        return f"{uid:016x} ({node.name})" if node is not None and node.name else f"{uid:016x}"

    def put(
        self,
        name: PartitionName,
        meta: PartitionMeta,
        why: str,
        now: float,
        *,
        since: float | None = None,
        registered: Mapping[int, int] | None = None,
        loss: str = "",
    ) -> None:
        action = PutPartition(name, meta, why, registered or {})
        self.puts[name] = (action, now if since is None else since, loss)
        self.actions.append(action)

    def avoided(self, now: float) -> frozenset[int]:
        """Nodes that should lead any partition only if no other can."""
        return self.planner.avoided(self.nodes) | self.standing.unlinked(now, after=self.limits.unlinked_s)

    def last(self, name: PartitionName, now: float, avoided: frozenset[int] | None = None) -> frozenset[int]:
        """Nodes that should lead this partition only if no other can; with those `avoided`, if the caller knows."""
        declined = {uid for uid, report in self.seen.get(name, {}).items() if report.declines}
        known = self.avoided(now) if avoided is None else avoided
        return known | declined | self.failed.last(name, self.nodes, now)

    def wake_at(self, moment: float) -> None:
        self.wake = min(self.wake, moment)

    def say(self, event: str, text: str, level: Literal["info", "warning", "error"] = "info", **fields: object) -> None:
        self.actions.append(Say(event, text, level, fields))


def text_of(name: PartitionName) -> str:
    return f"{name.topic}:{name.number}"
