"""The controller: sees that every partition has replicas and a leader. `step(event, now) -> actions`, and no memory
that matters: everything that must survive it is in the metadata store, so any lookup daemon can go on at any moment.

A partition without a good leader has a *round*: whoever may lead is asked what it has, until `elect.choose` has heard
enough. Rounds have four kinds.

    doubt      the leader's stream ended, or is silent, or others blame it: it is asked once more, with a short
               deadline, and in the same breath the rest of the ISR, so that an election can follow at once
    watch      the leader does not answer the controller, or commits nothing: its followers are asked whether they
               have its stream. One that enough of them hear goes on leading, as only the controller has lost it
    elect      the leader is gone, restarted, silent, has a closed disk, does not lead, or there never was one
    transfer   the record names a successor: when that one has all that the leader has, it is elected. The leader sees
               that first and writes it itself (`nsqha.replication.isr`); here it is done if it does not

A leader whose stream has ended is replaced unless followers say that they hear it. One that is only silent, its stream
still open, may be slow: it is replaced if so many followers say that they hear nothing that it cannot commit, and the
others could (`Elections`).

A suspicion that is wrong costs an epoch, never a message: the new leader needs the promises of the ISR, and the
compare-and-set names the version that was read, the registration of the new leader and the epoch of the controller.

Parts: all share a `ControllerState`. `Probing` asks nodes and takes their answers, `Elections` and `LeaderTransfers`
decide on one partition. `NodeHealth` knows which nodes are suspected or silent, `LeaderCheck` whether leaders lead.
`Planner` does what may be slow: replicas for partitions that have none, moves (`nsqha.election.moves`), replacement of
nodes that stay away, leaderships back to their first replica.

Records are believed by version: an older one that arrives late changes nothing. A record that is missing ends our work
on it, and deletes nothing. #ephemeral topics live and die with the node that made them and are nothing to us.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nsqha.election.controller.elections import Elections, LeaderTransfers
from nsqha.election.controller.events import (
    Action,
    Answered,
    Blamed,
    Event,
    IntentDone,
    Linked,
    Metadata,
    NotAnswered,
    PutDone,
    ReadTopic,
    Resign,
    Suspect,
    Tick,
    TopicRead,
    Unheard,
)
from nsqha.election.controller.isolation import Isolation
from nsqha.election.controller.probing import Probing
from nsqha.election.controller.rounds import ControllerLimits, Round, TopicPartition
from nsqha.election.controller.state import ControllerState, text_of
from nsqha.election.model import PartitionMeta, TopicRecord, Versioned
from nsqha.election.placement import PartitionName
from nsqha.ids import is_ephemeral


class ControllerMachine:
    """One term of one controller."""

    def __init__(self, now: float, limits: ControllerLimits | None = None) -> None:
        self.state = state = ControllerState(now, limits or ControllerLimits())
        self._topics: dict[str, Versioned[TopicRecord]] = {}
        self._probing = Probing(state)
        self._elections = Elections(state)
        self._transfers = LeaderTransfers(state)
        self._isolation = Isolation(state)
        self._next_audit = now + state.limits.audit_s
        self._next_scan = now
        self._unscanned: list[PartitionName] = []
        self._next_plan = now  # at the latest; earlier while no leader is sought

    def next_tick(self) -> float:
        """When `Tick` is due, at the latest."""
        return self.state.wake

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what to do, in order."""
        state = self.state
        state.actions = []
        self._elections.begin_step()
        dirty = sorted(self._take(event, now))  # one run is like the other, whatever a set does with strings
        self._place([name for name in dirty if state.free(name) and not state.parts[name].meta.replicas], now)
        for name in dirty:
            self._review(name, now)
        self._probing.ask(dirty, now)
        return state.actions

    # ---- events

    def _take(self, event: Event, now: float) -> Iterable[PartitionName]:
        match event:
            case Metadata():
                return self._metadata(event, now)
            case TopicRead(name, topic):
                self.state.reading.discard(name)
                self._topic(name, topic, now)
                record = topic.record if topic is not None else None
                return [PartitionName(name, record.uid, n) for n in record.partitions] if record is not None else ()
            case Suspect(node, why):
                self.state.standing.link(node, now, open_=False)
                return self._probing.suspect(node, why, now)
            case Linked(node):
                self.state.standing.link(node, now, open_=True)
                return ()
            case Unheard(node):
                return self._probing.suspect(node, "nothing is heard of it", now, open_=True)
            case Blamed():
                return self._probing.blamed(event, now)
            case Answered():
                return self._probing.answered(event, now)
            case NotAnswered(number, node, why):
                return self._probing.not_answered(number, node, why, now)
            case PutDone():
                return self._put_done(event, now)
            case IntentDone(intent_name):
                self.state.planner.intent_done(intent_name)
                return ()
            case Tick(wall_s):
                return self._tick(now, wall_s)

    def _metadata(self, event: Metadata, now: float) -> Iterable[PartitionName]:
        state = self.state
        dirty: set[PartitionName] = set()
        for name in self._topics.keys() - event.topics.keys():
            dirty.update(self._topic(name, None, now))
        # Few of thousands have changed, each time: what is unchanged must cost next to nothing.
        known = self._topics
        for name in [name for name, topic in event.topics.items() if known.get(name) is not topic]:
            if not is_ephemeral(name):
                dirty.update(self._topic(name, event.topics[name], now))
        changed = state.standing.changed(event.nodes, now)
        for uid in changed:
            dirty.update(state.led[uid])
            if uid in state.standing.leaving:
                state.wake_at(now + state.limits.handover_s)
        intents = {name: intent.record for name, intent in event.intents.items()}
        versions = {name: intent.version for name, intent in event.intents.items()}
        state.planner.metadata(state.world(), intents, versions, now)
        if changed:
            dirty.update(name for name, part in state.parts.items() if not part.meta.replicas)
            dirty.update(state.rounds)
        return dirty

    def _topic(self, name: str, topic: Versioned[TopicRecord] | None, now: float) -> list[PartitionName]:
        """Take the partitions of a topic as they are now, unless we know better. Returns those of which it says
        something new: most news of a failover are of our own elections."""
        state = self.state
        old = self._topics.pop(name, None)
        if old is not None and (topic is None or old.record.uid != topic.record.uid):
            for number in old.record.partitions:
                gone = PartitionName(name, old.record.uid, number)
                state.forget(gone)
                self._transfers.forget(gone)
        if topic is None:
            return []
        self._topics[name] = topic
        record, changed = topic.record, []
        for number, meta in record.partitions.items():
            key = PartitionName(name, record.uid, number)
            known = state.parts.get(key)
            if known is None:
                state.add(TopicPartition(key, record.settings, meta))
                changed.append(key)
                continue
            newer = meta.version > known.meta.version
            if newer or known.settings is not record.settings:
                known.settings = record.settings
                state.planned.put(key, known.meta, record.settings)
                changed.append(key)
            if newer:
                if meta.epoch > known.meta.epoch and key not in state.puts:
                    began = state.rounds[key].since if key in state.rounds else now
                    self._elected(known, meta, "handed over", now - began, "")
                state.set_meta(known, meta)
        return changed

    def _put_done(self, event: PutDone, now: float) -> Iterable[PartitionName]:
        state = self.state
        name = event.name
        action, since, loss = state.puts.pop(name, (None, now, ""))
        part = state.parts.get(name)
        if part is None or action is None:
            return ()
        if event.outcome != "applied" or event.meta is None:
            state.say("change_" + event.outcome, f"{text_of(name)}: {action.why} was {event.outcome}", topic=name.topic)
            if name.topic not in state.reading:
                state.reading.add(name.topic)
                state.actions.append(ReadTopic(name.topic))
            return ()
        if action.registered:  # an election, also if the news of it came before the reply
            self._elected(part, event.meta, action.why, now - since, loss)
        if event.meta.version > part.meta.version:
            state.set_meta(part, event.meta)
        return (name,)

    def _elected(self, part: TopicPartition, meta: PartitionMeta, why: str, seconds: float, loss: str) -> None:
        state = self.state
        name = part.name
        fields: dict[str, Any] = {
            "topic": name.topic,
            "partition": name.number,
            "leader": f"{meta.leader:016x}",
            "epoch": meta.epoch,
            "why": why,
            "seconds": round(seconds, 6),
        }
        text = f"{text_of(name)}: node {state.name(meta.leader)} leads epoch {meta.epoch} after {seconds:.3f} s ({why})"
        state.say("leader_elected", text, **fields)
        if loss:
            state.say("possible_loss", f"{text_of(name)}: acknowledged messages may be gone: {loss}", "error", **fields)

    def _tick(self, now: float, wall_s: float) -> Iterable[PartitionName]:
        state = self.state
        state.wake = now + state.limits.scan_s
        scan = now >= self._next_scan
        # Of a thousand rounds few are due at a time; what is not known to be due is looked at with the scan.
        dirty = {name for name, round_ in state.rounds.items() if round_.due <= now}
        dirty.update(*(state.led[node] for node in state.standing.leaving))
        if state.rounds:
            state.wake_at(min((round_.due for round_ in state.rounds.values() if round_.due > now), default=math.inf))
        if now >= self._next_audit:
            self._next_audit = now + state.limits.audit_s
            self._probing.audit(now)
        if scan:
            self._next_scan = now + state.limits.scan_s
            self._probing.ask_silent(now)
            self._leave_unlinked(now)
            dirty.update(self._scan(now))
            self._plan(now, wall_s)
            if why := self._isolation.why_resign(now):
                state.actions.append(Resign(why))
        return dirty

    def _scan(self, now: float) -> Iterable[PartitionName]:
        """Those of the next partitions in turn that are to be looked at. Not of all: what a second costs would grow
        with their number, and the work for each of many that are elected with it."""
        state = self.state
        if not self._unscanned:
            self._unscanned = list(state.parts)[::-1]
        some = self._unscanned[-state.limits.scan_parts :][::-1]
        del self._unscanned[-state.limits.scan_parts :]
        for name in self._elections.not_in_order(some):
            part, round_ = state.parts.get(name), state.rounds.get(name)
            if part is None or (round_ is not None and round_.due < math.inf):
                continue  # it is looked at when it is due
            if (
                round_ is not None
                or not part.meta.replicas
                or self._elections.reason(part, now)
                or self._elections.watched(part, now)
            ):
                yield name

    def _leave_unlinked(self, now: float) -> None:
        """Leaders at whose peer port the controller is refused hand over to a member of the ISR where it is not."""
        state = self.state
        room = state.limits.plan.transfers_max
        for node in state.standing.unlinked(now, after=state.limits.unlinked_s) - state.standing.silent.keys():
            for name in sorted(state.led[node]):
                if room > 0 and self._transfers.leave(state.parts[name], now):
                    room -= 1

    def _plan(self, now: float, wall_s: float) -> None:
        state = self.state
        sought = {name: round_.since for name, round_ in state.rounds.items() if round_.kind == "elect"}
        wait = state.limits.plan_wait_s
        if now < self._next_plan and any(now - since < wait for since in sought.values()):
            return
        self._next_plan = now + wait
        unled = frozenset(sought)
        away = frozenset(state.standing.silent) | state.standing.unlinked(now, after=state.limits.unlinked_s)
        steps = state.planner.plan(replace(state.world(), unled=unled, unreachable=away, wall_s=wall_s), now)
        for put in steps.puts:
            if state.free(put.name):
                state.put(put.name, put.meta, put.why, now)
        for transfer in steps.transfers:
            if state.failed.may_return(transfer.name, transfer.target, now):
                self._transfers.begin(transfer.name, transfer.target, now)
        state.actions += steps.intents

    # ---- decisions

    def _place(self, names: list[PartitionName], now: float) -> None:
        state = self.state
        if names and not state.planner.nodes_are_tried(state.nodes, now):
            for put in state.planner.place(sorted(names), state.world()):
                state.put(put.name, put.meta, put.why, now)

    def _review(self, name: PartitionName, now: float) -> None:
        """Begin, go on with or end the round of a partition."""
        state = self.state
        part = state.parts.get(name)
        if part is None or not state.free(name):
            return
        reason = self._elections.reason(part, now)
        round_ = state.rounds.get(name)
        if round_ is not None:
            round_.due = math.inf
        if reason:
            if round_ is None or round_.kind != "elect":
                began = state.standing.silent.get(part.meta.leader, now)
                if round_ is None or round_.kind != "doubt":
                    round_ = state.rounds[name] = Round("elect", reason, began)
                round_.kind = "elect"  # a doubt that was right: what has been answered counts
            round_.why = reason  # it may be another one by now: a leader that was cut off and has restarted can lead
            self._elections.elect(part, round_, now)
        elif (since := state.standing.suspected_since(part.meta.leader)) is not None:
            if round_ is None or round_.kind != "transfer":
                state.rounds.setdefault(name, Round("doubt", "", since))
        elif part.meta.successor:
            if round_ is None or round_.kind != "transfer":
                round_ = state.rounds[name] = Round("transfer", "transfer", now)
            self._transfers.go_on(part, round_, now)
        elif self._elections.watched(part, now):
            if round_ is None or round_.kind != "watch":
                state.rounds[name] = Round("watch", "", now)
        else:
            state.rounds.pop(name, None)
            self._transfers.leader_leaves(part, now)
