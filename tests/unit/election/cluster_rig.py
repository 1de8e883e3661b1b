"""A cluster that is only as real as the controller needs it: a MemoryStore, nodes with logs that are lists of numbers,
and one queue of things to happen in virtual time. All randomness comes from one seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from nsqha.election.controller.controller import ControllerMachine
from nsqha.election.controller.events import (
    Action,
    Answered,
    Event,
    IntentDone,
    Metadata,
    NotAnswered,
    Probe,
    PutDone,
    PutIntent,
    PutPartition,
    ReadTopic,
    RemoveIntent,
    Resign,
    Say,
    Suspect,
    Tick,
    TopicRead,
)
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.elect import ReplicaReport
from nsqha.election.memory import MemorySession, MemoryStore
from nsqha.election.model import Controller, NodeInfo, PartitionMeta, TopicSettings
from nsqha.election.placement import PartitionName
from nsqha.errors import Conflict, NotFound, OutcomeUnknown
from nsqha.ids import PartitionKey

LEASE_S = 3.0


@dataclass
class Log:
    """A replica: entries are the epochs they were written in."""

    log_uid: int
    entries: list[int] = field(default_factory=list)
    promise: int = 0
    leading: int = 0  # epoch
    cut: bool = False


@dataclass
class Node:
    uid: int
    info: NodeInfo
    session: Any = None
    up: bool = False
    silent: bool = False  # runs, and nobody hears it
    logs: dict[PartitionKey, Log] = field(default_factory=dict)


class Cluster:
    """`seconds` of simulated time go by in `run`; faults are methods."""

    def __init__(
        self, seed: int = 1, *, nodes: int = 3, zones: int = 0, limits: ControllerLimits | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0
        self.store = MemoryStore(self.rng)
        self.nodes: dict[int, Node] = {}
        self.said: list[Say] = []
        self.puts: list[PutPartition] = []
        self.resigned: list[str] = []  # why the controller should have
        self.acked: dict[PartitionName, list[int]] = {}
        self.leaders: dict[tuple[PartitionName, int], tuple[int, int]] = {}  # epoch -> (node, registration)
        self.lose_cas = 0.0  # how often an outcome is unknown
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._limits = limits
        self._told = False
        self.term: MemorySession | None = None
        self.store.watch.on_change(lambda name: self._hint())
        for uid in range(1, nodes + 1):
            self.nodes[uid] = Node(uid, NodeInfo(uid, f"n{uid}", zone=f"z{uid % zones}" if zones else ""))
            self.start(uid)
        self.new_controller()
        self._nodes_tick()

    # ---- time

    def _nodes_tick(self) -> None:
        for node in self.nodes.values():
            self._reconcile(node)
        self.at(0.1, self._nodes_tick)

    def at(self, delay: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), do))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            wake = self.machine.next_tick()
            if self._queue and self._queue[0][0] <= min(end, wake):
                self.now, _, do = heapq.heappop(self._queue)
                do()
            elif wake <= end:
                self.now = max(self.now, wake)
                self.feed(Tick())
            else:
                self.now = end
                return

    # ---- the controller's shell

    def new_controller(self) -> None:
        if self.term is not None:
            self.term.close()
        self.term = self.store.sessions.open(ttl_s=LEASE_S, lost=lambda: None)
        won = self.term.campaign(Controller("test"))
        assert won is not None
        self.epoch = won.epoch
        self.machine = ControllerMachine(self.now, self._limits)
        self._hint()

    def feed(self, event: Event) -> None:
        machine = self.machine
        for action in machine.step(event, self.now):
            self._perform(action, machine)

    def _hint(self) -> None:
        if not self._told:
            self._told = True
            self.at(0.002, self._metadata)

    def _metadata(self) -> None:
        self._told = False
        view = self.store.watch.view()
        self.feed(Metadata(view.topics, view.nodes, self.store.intents.all()))
        for node in self.nodes.values():
            self.at(0.002, lambda node=node: self._reconcile(node))  # type: ignore[misc]

    def _perform(self, action: Action, machine: ControllerMachine) -> None:
        def later(delay: float, event: Callable[[], Event]) -> None:
            self.at(delay, lambda: self.feed(event()) if machine is self.machine else None)

        match action:
            case Say():
                self.said.append(action)
            case Resign(why):
                self.resigned.append(why)
            case Probe(number, uid, keys, timeout):
                node = self.nodes[uid]
                if not node.up:
                    later(0.001, lambda: NotAnswered(number, uid, "refused"))
                elif node.silent:
                    later(timeout, lambda: NotAnswered(number, uid, "silent"))
                else:
                    later(self.rng.uniform(0.001, 0.01), lambda: self._status(number, node, keys))
            case PutPartition():
                self.puts.append(action)
                later(self.rng.uniform(0.001, 0.01), lambda: self._put(action))
            case ReadTopic(topic):
                later(0.005, lambda: TopicRead(topic, self.store.records.topic(topic)))
            case PutIntent(intent, record, version):
                self.store.intents.put(intent, record, expected_version=version)
                later(0.005, lambda: IntentDone(intent))
            case RemoveIntent(intent, version):
                self.store.intents.remove(intent, version)
                later(0.005, lambda: IntentDone(intent))

    def _put(self, action: PutPartition) -> Event:
        name, lost = action.name, self.rng.random() < self.lose_cas
        if lost and self.rng.random() < 0.5:
            return PutDone(name, "unknown")
        try:
            meta = self.store.records.replace_partition(
                name.topic, name.uid, name.number, action.meta, registered=action.registered, controller=self.epoch
            )
        except (Conflict, NotFound):
            return PutDone(name, "refused")
        except OutcomeUnknown:
            return PutDone(name, "unknown")
        return PutDone(name, "unknown") if lost else PutDone(name, "applied", meta)

    # ---- nodes

    def _status(self, number: int, node: Node, keys: tuple[PartitionKey, ...]) -> Event:
        if not node.up:
            return NotAnswered(number, node.uid, "died")
        found = {}
        for key in keys:
            log = node.logs.get(key)
            if log is not None:
                found[key] = ReplicaReport(
                    node.info.registration,
                    log.log_uid,
                    log.entries[-1] if log.entries else 0,
                    len(log.entries),
                    log.promise,
                    committed=self._committed(key, log),
                    leading=log.leading > 0,
                    cut=log.cut,
                    led_by=self._led_by(key, log),
                )
        return Answered(number, node.uid, node.info.registration, found)

    def _committed(self, key: PartitionKey, log: Log) -> int:
        acked = next((acked for name, acked in self.acked.items() if (name.uid, name.number) == key), [])
        return min(len(acked), len(log.entries))

    def _led_by(self, key: PartitionKey, log: Log) -> int:
        """The node that pushes to this replica, if it runs and is heard."""
        for name, meta in self.parts().items():
            leader = self.nodes.get(meta.leader)
            if (name.uid, name.number) == key and leader is not None and leader.up and not leader.silent:
                return meta.leader if log.promise == meta.epoch else 0
        return 0

    def start(self, uid: int) -> None:
        node = self.nodes[uid]
        node.session = self.store.sessions.open(ttl_s=LEASE_S, lost=lambda: None)
        node.info = node.session.register(replace(node.info, leaving=False))
        node.up = True
        self.at(0.005, lambda: self._reconcile(node))

    def kill(self, uid: int, *, heard: bool = True) -> None:
        """The process dies; its lease runs out later. `heard`: the controller's stream to it ends."""
        node = self.nodes[uid]
        node.up = False
        for log in node.logs.values():
            log.leading = 0
        session, node.session = node.session, None
        self.at(LEASE_S, session.close)
        if heard:
            self.at(0.001, lambda: self.feed(Suspect(uid, "stream ended")))

    def restart(self, uid: int, *, lost_log: bool = False) -> None:
        """Once its old lease is over."""
        node = self.nodes[uid]
        if node.up or uid in self.store.records.nodes():
            return
        if lost_log:
            for log in node.logs.values():
                log.log_uid = self.rng.getrandbits(64)
        self.start(uid)

    def parts(self) -> dict[PartitionName, PartitionMeta]:
        return {
            PartitionName(topic.record.name, topic.record.uid, number): meta
            for topic in self.store.records.topics().values()
            for number, meta in topic.record.partitions.items()
        }

    def _reconcile(self, node: Node) -> None:
        """What a node does with what it reads: open logs, lead, catch up and let others join."""
        if not node.up or node.silent:
            return
        for name, meta in self.parts().items():
            key = (name.uid, name.number)
            if node.uid not in meta.replicas:
                node.logs.pop(key, None)
                continue
            log = node.logs.setdefault(key, Log(self.rng.getrandbits(64)))
            mine = meta.leader == node.uid and meta.registration == node.info.registration
            if mine and log.promise < meta.epoch:
                assert self.leaders.setdefault((name, meta.epoch), (node.uid, meta.registration)) == (
                    node.uid,
                    meta.registration,
                ), "two leaders in one epoch"
                acked = self.acked.get(name, [])
                assert log.entries[: len(acked)] == acked, f"{name}: {node.uid} leads without what was acknowledged"
                log.promise = log.leading = meta.epoch
                log.entries.append(meta.epoch)
            elif log.leading and (not mine or log.leading != meta.epoch):
                log.leading = 0
            if log.leading:
                self._lead(node, name, meta, log)

    def _lead(self, node: Node, name: PartitionName, meta: PartitionMeta, log: Log) -> None:
        joined = dict(meta.isr)
        for uid in meta.replicas:
            other = self.nodes[uid]
            theirs = other.logs.get((name.uid, name.number))
            if uid == node.uid or not other.up or other.silent or theirs is None or theirs.promise > meta.epoch:
                continue
            theirs.promise, theirs.leading = meta.epoch, 0
            theirs.entries, theirs.cut = list(log.entries), False
            joined[uid] = theirs.log_uid
        for uid in meta.isr:
            if not self.nodes[uid].up and len(joined) > meta.min_isr:
                del joined[uid]
        if joined != meta.isr:
            registered = {uid: self.nodes[uid].info.registration for uid in joined if uid not in meta.isr}
            try:
                new = replace(meta, isr=joined)
                self.store.records.replace_partition(name.topic, name.uid, name.number, new, registered=registered)
            except Conflict:
                self.at(0.05, lambda: self._reconcile(node))
            return
        if len(meta.isr) >= meta.min_isr and all(self._has(uid, name, log) for uid in meta.isr):
            self.acked[name] = list(log.entries)

    def _has(self, uid: int, name: PartitionName, log: Log) -> bool:
        theirs = self.nodes[uid].logs.get((name.uid, name.number))
        meta = self.parts()[name]
        return theirs is not None and theirs.entries == log.entries and theirs.log_uid == meta.isr[uid]

    def publish(self) -> None:
        """Every leader that can writes one entry and pushes it."""
        for name, meta in self.parts().items():
            node = self.nodes.get(meta.leader)
            log = node.logs.get((name.uid, name.number)) if node else None
            if node and log and node.up and log.leading == meta.epoch and not meta.successor:
                log.entries.append(meta.epoch)
                self._lead(node, name, meta, log)

    # ---- what tests ask

    def create(self, topic: str, **settings: Any) -> None:
        self.store.records.create_topic(topic, TopicSettings(**settings))

    def meta(self, topic: str, number: int = 0) -> PartitionMeta:
        found = self.store.records.topic(topic)
        assert found is not None
        return found.record.partitions[number]

    def events(self, name: str) -> list[Mapping[str, object]]:
        return [say.fields for say in self.said if say.event == name]

    def healthy(self, name: PartitionName, meta: PartitionMeta) -> bool:
        node = self.nodes.get(meta.leader)
        return node is not None and node.up and node.logs[name.uid, name.number].leading == meta.epoch
