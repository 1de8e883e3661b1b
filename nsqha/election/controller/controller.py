"""The controller: sees that every partition has replicas and a leader. `step(event, now) -> actions`, and no memory
that matters: everything that must survive it is in the metadata store, so any lookup daemon can go on at any moment.

A partition without a good leader has a *round*: whoever may lead is asked what it has, until `elect.choose` has heard
enough. Rounds have three kinds.

    doubt      the leader's stream ended, or others blame it: it is asked once more, with a short deadline, and in the
               same breath the rest of the ISR, so that its silence can be followed by an election at once
    elect      the leader is gone, restarted, silent, has a closed disk, does not lead, or there never was one
    transfer   the record names a successor: when that one has all that the leader has, it is elected. The leader sees
               that first and writes it itself (`nsqha.replication.isr`); here it is done if it does not

A suspicion that is wrong costs an epoch, never a message: the new leader needs the promises of the ISR, and the
compare-and-set names the version that was read, the registration of the new leader and the epoch of the controller.

Parts: `NodeHealth` knows which nodes are suspected or silent, `LeaderCheck` whether leaders lead, `PendingProbes` what
was asked and is not answered yet. `Planner` does what may be slow: replicas for partitions that have none, moves
(`nsqha.election.moves`), replacement of nodes that stay away, leaderships back to their first replica.

Records are believed by version: an older one that arrives late changes nothing. A record that is missing ends our work
on it, and deletes nothing. #ephemeral topics live and die with the node that made them and are nothing to us.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from nsqha.election.controller.events import (
    Action,
    Answered,
    Blamed,
    Event,
    IntentDone,
    Metadata,
    NotAnswered,
    PutDone,
    PutPartition,
    ReadTopic,
    Say,
    Suspect,
    Tick,
    TopicRead,
)
from nsqha.election.controller.leader_check import LeaderCheck
from nsqha.election.controller.node_health import NodeHealth
from nsqha.election.controller.pending_probes import PendingProbes
from nsqha.election.controller.planner import Planner, World
from nsqha.election.controller.rounds import ControllerLimits, OpenProbe, Round, TopicPartition
from nsqha.election.elect import Ballot, Elected, ReplicaReport, Wait, choose
from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, Versioned
from nsqha.election.placement import PartitionName
from nsqha.ids import PartitionKey, is_ephemeral


class ControllerMachine:
    """One term of one controller."""

    def __init__(self, now: float, limits: ControllerLimits | None = None) -> None:
        self.limits = limits or ControllerLimits()
        self.parts: dict[PartitionName, TopicPartition] = {}
        self.standing = NodeHealth()
        self.rounds: dict[PartitionName, Round] = {}
        self.seen: dict[PartitionName, dict[int, ReplicaReport]] = {}  # the last report of each replica
        self.planner = Planner(now, self.limits.plan)
        self._topics: dict[str, Versioned[TopicRecord]] = {}
        self._names: dict[PartitionKey, PartitionName] = {}
        self._led: defaultdict[int, set[PartitionName]] = defaultdict(set)
        self._puts: dict[PartitionName, tuple[PutPartition, float, str]] = {}
        self._reading: set[str] = set()
        self._probes = PendingProbes(self.limits)
        self._leader_check = LeaderCheck(self.limits)
        self._transfer_after: dict[PartitionName, float] = {}
        self._next_audit = now + self.limits.audit_s
        self._next_scan = now
        self._wake = now
        self._picture: World | None = None
        self._actions: list[Action] = []

    @property
    def nodes(self) -> Mapping[int, NodeInfo]:
        """Those that are registered."""
        return self.standing.nodes

    def next_tick(self) -> float:
        """When `Tick` is due, at the latest."""
        return self._wake

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what to do, in order."""
        self._actions = []
        dirty = sorted(self._take(event, now))  # one run is like the other, whatever a set does with strings
        self._place([name for name in dirty if self._free(name) and not self.parts[name].meta.replicas], now)
        for name in dirty:
            self._review(name, now)
        self._ask([name for name in dirty if name in self.rounds], now)
        return self._actions

    # ---- events

    def _take(self, event: Event, now: float) -> Iterable[PartitionName]:
        match event:
            case Metadata():
                return self._metadata(event, now)
            case TopicRead(name, topic):
                self._reading.discard(name)
                return self._topic(name, topic, now)
            case Suspect(node, why):
                return self._suspect(node, why, now)
            case Blamed(by, nodes):
                return self._blamed(by, nodes, now)
            case Answered():
                return self._answered(event, now)
            case NotAnswered(number, node, why):
                return self._not_answered(number, node, why, now)
            case PutDone():
                return self._put_done(event, now)
            case IntentDone(intent_name):
                self.planner.intent_done(intent_name)
                return ()
            case Tick():
                return self._tick(now)

    def _metadata(self, event: Metadata, now: float) -> Iterable[PartitionName]:
        dirty: set[PartitionName] = set()
        topics = {name: topic for name, topic in event.topics.items() if not is_ephemeral(name)}
        for name in [name for name in self._topics if name not in topics]:
            dirty.update(self._topic(name, None, now))
        for name, topic in topics.items():
            if topic is not self._topics.get(name):
                dirty.update(self._topic(name, topic, now))
        changed = self.standing.changed(event.nodes, now)
        for uid in changed:
            self._picture = None
            dirty.update(self._led[uid])
            if uid in self.standing.leaving:
                self._wake_at(now + self.limits.handover_s)
        intents = {name: intent.record for name, intent in event.intents.items()}
        versions = {name: intent.version for name, intent in event.intents.items()}
        self.planner.metadata(self._world(), intents, versions, now)
        if changed:
            dirty.update(name for name, part in self.parts.items() if not part.meta.replicas)
            dirty.update(self.rounds)
        return dirty

    def _topic(self, name: str, topic: Versioned[TopicRecord] | None, now: float) -> list[PartitionName]:
        """Take the partitions of a topic as they are now, unless we know better."""
        old = self._topics.pop(name, None)
        if old is not None and (topic is None or old.record.uid != topic.record.uid):
            for number in old.record.partitions:
                self._forget(PartitionName(name, old.record.uid, number))
        if topic is None:
            return []
        self._topics[name] = topic
        self._picture = None
        record, changed = topic.record, []
        for number, meta in record.partitions.items():
            key = PartitionName(name, record.uid, number)
            known = self.parts.get(key)
            if known is None:
                self.parts[key] = TopicPartition(key, record.settings, meta)
                self._names[record.uid, number] = key
                self._led[meta.leader].add(key)
            else:
                known.settings = record.settings
                if meta.version > known.meta.version:
                    if meta.epoch > known.meta.epoch and key not in self._puts:
                        began = self.rounds[key].since if key in self.rounds else now
                        self._elected(known, meta, "handed over", now - began, "")
                    self._set_meta(known, meta)
            changed.append(key)
        return changed

    def _forget(self, name: PartitionName) -> None:
        self._picture = None
        part = self.parts.pop(name, None)
        if part is not None:
            self._led[part.meta.leader].discard(name)
            del self._names[part.key]
        for held in (self.rounds, self.seen, self._puts, self._transfer_after):
            held.pop(name, None)
        self._leader_check.forget(name)

    def _set_meta(self, part: TopicPartition, meta: PartitionMeta) -> None:
        self._led[part.meta.leader].discard(part.name)
        if (part.meta.leader, part.meta.epoch) != (meta.leader, meta.epoch):
            self.rounds.pop(part.name, None)
            self._leader_check.forget(part.name)
        part.meta = meta
        self._picture = None
        self._led[meta.leader].add(part.name)

    def _suspect(self, node: int, why: str, now: float) -> Iterable[PartitionName]:
        if not self.standing.suspect(node, now):
            return ()
        self._say("node_suspected", f"node {self._name(node)} is suspected: {why}", "warning", node=node, why=why)
        # The node is asked even if it leads nothing, so that the suspicion ends.
        self._probe(node, [self.parts[name].key for name in self._led[node]], now, urgent=True)
        return self._led[node]

    def _blamed(self, by: int, nodes: frozenset[int], now: float) -> Iterable[PartitionName]:
        forgiven, anew = self.standing.blamed(by, nodes, now)
        dirty: set[PartitionName] = set().union(*(self._led[node] for node in forgiven))
        for node in anew:
            dirty.update(self._suspect(node, f"node {self._name(by)} lost it", now))
        self._wake_at(now + self.limits.blamed_s)
        return dirty

    def _answered(self, event: Answered, now: float) -> Iterable[PartitionName]:
        asked, dirty = self._returned(event.number, event.node)
        node = event.node
        if self.standing.answered(node, event.registration):
            dirty |= self._led[node]
        for key in asked.keys if asked else ():
            name = self._names.get(key)
            if name is None:
                continue
            dirty.add(name)
            report = event.reports.get(key)
            if report is None:
                self.seen.get(name, {}).pop(node, None)
            else:
                self.seen.setdefault(name, {})[node] = report
            self._leader_check.answered(self.parts[name], node, report, now)
            round_ = self.rounds.get(name)
            if round_ is not None and asked is not None and asked.sent >= round_.since:
                round_.heard[node] = now
                round_.failed.discard(node)
                if report is not None:
                    round_.reports[node] = report
        return dirty

    def _not_answered(self, number: int, node: int, why: str, now: float) -> Iterable[PartitionName]:
        asked, dirty = self._returned(number, node)
        for key in asked.keys if asked else ():
            name = self._names.get(key)
            round_ = self.rounds.get(name) if name is not None else None
            if name is not None and round_ is not None:
                round_.heard[node] = now
                round_.failed.add(node)
                round_.reports.pop(node, None)
                dirty.add(name)
        if self.standing.not_answered(node):
            self._say("node_silent", f"node {self._name(node)} does not answer: {why}", "warning", node=node, why=why)
            dirty |= self._led[node]
        return dirty

    def _returned(self, number: int, node: int) -> tuple[OpenProbe | None, set[PartitionName]]:
        asked, waiting = self._probes.returned(number, node)
        return asked, {name for name in waiting if name in self.parts}

    def _put_done(self, event: PutDone, now: float) -> Iterable[PartitionName]:
        name = event.name
        action, since, loss = self._puts.pop(name, (None, now, ""))
        part = self.parts.get(name)
        if part is None or action is None:
            return ()
        if event.outcome != "applied" or event.meta is None:
            self._say("change_" + event.outcome, f"{_text(name)}: {action.why} was {event.outcome}", topic=name.topic)
            if name.topic not in self._reading:
                self._reading.add(name.topic)
                self._actions.append(ReadTopic(name.topic))
            return ()
        if action.registered:  # an election, also if the news of it came before the reply
            self._elected(part, event.meta, action.why, now - since, loss)
        if event.meta.version > part.meta.version:
            self._set_meta(part, event.meta)
        return (name,)

    def _elected(self, part: TopicPartition, meta: PartitionMeta, why: str, seconds: float, loss: str) -> None:
        name = part.name
        fields: dict[str, Any] = {
            "topic": name.topic,
            "partition": name.number,
            "leader": f"{meta.leader:016x}",
            "epoch": meta.epoch,
            "why": why,
            "seconds": round(seconds, 6),
        }
        text = f"{_text(name)}: node {self._name(meta.leader)} leads epoch {meta.epoch} after {seconds:.3f} s ({why})"
        self._say("leader_elected", text, **fields)
        if loss:
            self._say("possible_loss", f"{_text(name)}: acknowledged messages may be gone: {loss}", "error", **fields)

    def _tick(self, now: float) -> Iterable[PartitionName]:
        self._wake = now + self.limits.scan_s
        dirty = set(self.rounds).union(*(self._led[node] for node in self.standing.leaving))
        if now >= self._next_audit:
            self._next_audit = now + self.limits.audit_s
            self._audit_all(now)
        if now >= self._next_scan:
            self._next_scan = now + self.limits.scan_s
            for node in [uid for uid in self.standing.silent if uid in self.nodes]:
                self._probe(node, [], now)  # is it back?
            dirty.update(n for n, part in self.parts.items() if not part.meta.replicas or self._reason(part, now))
            self._plan(now)
        return dirty

    def _audit_all(self, now: float) -> None:
        keys = {uid: [self.parts[name].key for name in self._led[uid]] for uid in self.nodes}
        for name, wanted in self.planner.moves.items():
            for uid in wanted:
                if name in self.parts and uid in keys:
                    keys[uid].append(self.parts[name].key)
        for uid, asked in keys.items():
            if asked and uid not in self.standing.silent:
                self._probe(uid, self._leader_check.turn(uid, asked), now)

    def _plan(self, now: float) -> None:
        unled = frozenset(name for name, round_ in self.rounds.items() if round_.kind == "elect")
        steps = self.planner.plan(replace(self._world(), unled=unled), now)
        for put in steps.puts:
            if self._free(put.name):
                self._put(put.name, put.meta, put.why, now)
        for transfer in steps.transfers:
            self._begin_transfer(transfer.name, transfer.target, now)
        self._actions += steps.intents

    # ---- decisions

    def _place(self, names: list[PartitionName], now: float) -> None:
        if names:
            for put in self.planner.place(sorted(names), self._world()):
                self._put(put.name, put.meta, put.why, now)

    def _review(self, name: PartitionName, now: float) -> None:
        """Begin, go on with or end the round of a partition."""
        part = self.parts.get(name)
        if part is None or not self._free(name):
            return
        reason = self._reason(part, now)
        round_ = self.rounds.get(name)
        if reason:
            if round_ is None or round_.kind != "elect":
                began = self.standing.silent.get(part.meta.leader, now)
                kept = round_ if round_ is not None and round_.kind == "doubt" else Round("elect", reason, began)
                round_ = self.rounds[name] = replace(kept, kind="elect", why=reason)
            round_.why = reason  # it may be another one by now: a leader that was cut off and has restarted can lead
            self._elect(part, round_, now)
        elif (since := self.standing.suspected_since(part.meta.leader)) is not None:
            if round_ is None or round_.kind != "transfer":
                self.rounds.setdefault(name, Round("doubt", "", since))
        elif part.meta.successor:
            if round_ is None or round_.kind != "transfer":
                round_ = self.rounds[name] = Round("transfer", "transfer", now)
            self._transfer(part, round_, now)
        else:
            self.rounds.pop(name, None)
            self._leave(part, now)

    def _free(self, name: PartitionName) -> bool:
        return name in self.parts and name not in self._puts and name.topic not in self._reading

    def _reason(self, part: TopicPartition, now: float) -> str:
        """Why the partition needs another leader, or another epoch; empty if it does not."""
        meta = part.meta
        if not meta.replicas:
            return ""
        if meta.leader == 0:
            return "no leader yet"
        node = self.nodes.get(meta.leader)
        if node is None:
            return "leader is gone"
        if self.standing.restarted(meta):
            return "leader restarted"
        if node.poisoned:
            return "leader's disk is closed"
        if meta.leader in self.standing.silent:
            return "leader does not answer"
        if self._leader_check.does_not_lead(part.name, meta):
            return "leader does not lead"
        if self.standing.cut_off(meta, now, after=self.limits.blamed_s):
            return "leader is cut off from its followers"
        return ""

    def _elect(self, part: TopicPartition, round_: Round, now: float) -> None:
        meta = part.meta
        reports = dict(round_.reports)
        dead = set()
        if round_.why != "leader restarted" and meta.leader:
            dead.add(meta.leader)
        if round_.why == "leader is cut off from its followers":
            reports.pop(meta.leader, None)
        mine = reports.get(meta.leader)
        if mine is not None and mine.log_uid != meta.isr.get(meta.leader):
            dead.add(meta.leader)
        found = choose(
            Ballot(
                meta,
                part.sync,
                reports,
                frozenset(round_.failed | (set(meta.isr) - set(self.nodes))),
                self.nodes,
                round_.since,
                now,
                frozenset(dead),
                self.planner.avoided(self.nodes),
            )
        )
        if isinstance(found, Elected):
            registered = {found.leader: found.meta.registration}
            self._put(
                part.name, found.meta, round_.why, now, since=round_.since, registered=registered, loss=found.loss
            )
        else:
            self._wait(part, round_, found, now)

    def _wait(self, part: TopicPartition, round_: Round, wait: Wait, now: float) -> None:
        self._wake_at(now + self.limits.ask_again_s if wait.until is None else wait.until)
        if wait.why != round_.waiting and (wait.operator or now - round_.since > 1.0):
            round_.waiting = wait.why
            event, level = ("operator_needed", "error") if wait.operator else ("election_waits", "warning")
            name = part.name
            text = f"{_text(name)} ({round_.why}): {wait.why}"
            self._actions.append(
                Say(event, text, level, {"topic": name.topic, "partition": name.number, "why": wait.why})  # type: ignore[arg-type]
            )

    def _transfer(self, part: TopicPartition, round_: Round, now: float) -> None:
        meta = part.meta
        node, leader = self.nodes.get(meta.successor), self.nodes.get(meta.leader)
        theirs, ours = round_.reports.get(meta.successor), round_.reports.get(meta.leader)
        fit = node is not None and not node.poisoned and not node.leaving and meta.successor in meta.isr
        late = now - round_.since > self.limits.transfer_s
        forced = late and leader is not None and leader.leaving
        if node is not None and fit and theirs is not None and theirs.registration == node.registration:
            ready = theirs.log_uid == meta.isr[meta.successor] and not theirs.poisoned and not theirs.corrupt
            equal = ours is not None and ours.leading and ours.reach == theirs.reach
            if ready and (equal or forced):
                epoch = max(meta.epoch, theirs.promise, ours.promise if ours else 0) + 1
                new = replace(meta, leader=meta.successor, epoch=epoch, registration=node.registration, successor=0)
                registered = {node.node_uid: node.registration}
                self._put(part.name, new, "transfer", now, since=round_.since, registered=registered)
                return
        if not fit or late:
            self._transfer_after[part.name] = now + self.limits.transfer_pause_s
            text = f"{_text(part.name)}: node {self._name(meta.successor)} could not take the lead in time"
            self._say("transfer_given_up", text, "warning", topic=part.name.topic, partition=part.name.number)
            self._put(part.name, replace(meta, successor=0), "transfer_given_up", now)
            return
        self._wake_at(now + self.limits.transfer_ask_s)

    def _leave(self, part: TopicPartition, now: float) -> None:
        """A leader that shuts down and has not handed over by itself."""
        meta = part.meta
        since = self.standing.leaving.get(meta.leader)
        if since is None:
            return
        due = since + self.limits.handover_s
        if now < due:
            self._wake_at(due)
            return
        avoided = self.planner.avoided(self.nodes)
        for uid in meta.replicas:
            if uid in meta.isr and uid in self.nodes and uid not in avoided and uid not in self.standing.silent:
                self._begin_transfer(part.name, uid, now)
                return

    def _begin_transfer(self, name: PartitionName, target: int, now: float) -> None:
        if self._free(name) and name not in self.rounds and now >= self._transfer_after.get(name, 0.0):
            meta = self.parts[name].meta
            if meta.leader != target and not meta.successor:
                self._put(name, replace(meta, successor=target), "transfer_begins", now)

    # ---- actions

    def _put(
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
        self._puts[name] = (action, now if since is None else since, loss)
        self._actions.append(action)

    def _ask(self, names: Iterable[PartitionName], now: float) -> None:
        """Probe whoever the rounds have not heard for a while."""
        wanted: dict[tuple[int, bool], list[PartitionName]] = defaultdict(list)
        for name in names:
            round_, part = self.rounds[name], self.parts[name]
            if name in self._puts:
                continue
            due = round_.since + self.limits.handover_s
            if round_.kind == "transfer" and now < due:
                self._wake_at(due)
                continue
            again = self.limits.transfer_ask_s if round_.kind == "transfer" else self.limits.ask_again_s
            if not part.meta.isr and now - round_.since < 1.0:
                again = self.limits.begin_ask_s
            for uid in self._members(part.meta, round_):
                heard = round_.heard.get(uid)
                if uid in self.nodes and (heard is None or now - heard >= again):
                    wanted[uid, round_.kind == "doubt"].append(name)
            self._wake_at(now + again)
        for (uid, urgent), waiting in wanted.items():
            room = self.limits.keys_max
            if not self._probe(uid, [self.parts[name].key for name in waiting[:room]], now, urgent=urgent):
                room = 0
            self._probes.wait(uid, urgent, waiting[room:])

    @staticmethod
    def _members(meta: PartitionMeta, round_: Round) -> Iterable[int]:
        if round_.kind == "transfer":
            return (meta.leader, meta.successor)
        return meta.isr or meta.replicas

    def _probe(self, node: int, keys: Iterable[PartitionKey], now: float, *, urgent: bool = False) -> bool:
        """False: it has not answered the last question yet."""
        probe = self._probes.ask(node, keys, now, urgent=urgent)
        if probe is not None:
            self._actions.append(probe)
        return probe is not None

    def _wake_at(self, moment: float) -> None:
        self._wake = min(self._wake, moment)

    def _world(self) -> World:
        if self._picture is None:
            metas = {name: part.meta for name, part in self.parts.items()}
            self._picture = World(metas, {name: part.settings for name, part in self.parts.items()}, self.nodes)
        if not self._puts:
            return self._picture
        # What is being written counts as written, or the same work would be planned twice.
        metas = {**self._picture.metas, **{name: action.meta for name, (action, _, _) in self._puts.items()}}
        return replace(self._picture, metas=metas)

    def _name(self, uid: int) -> str:
        node = self.nodes.get(uid)
        return f"{uid:016x} ({node.name})" if node is not None and node.name else f"{uid:016x}"

    def _say(
        self, event: str, text: str, level: Literal["info", "warning", "error"] = "info", **fields: object
    ) -> None:
        self._actions.append(Say(event, text, level, fields))


def _text(name: PartitionName) -> str:
    return f"{name.topic}:{name.number}"
