"""Requests to nodes, and what their answers, silence and accusations say about partitions.

Each method returns the partitions to look at again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from nsqha.election.controller.events import Answered, Blamed, Probe
from nsqha.election.controller.pending_probes import PendingProbes
from nsqha.election.controller.rounds import OpenProbe, Round, TopicPartition
from nsqha.election.controller.state import ControllerState
from nsqha.election.model import PartitionMeta
from nsqha.election.placement import PartitionName
from nsqha.ids import PartitionKey


class Probing:
    """Asks nodes what they have, and takes what comes back."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._probes = PendingProbes(state.limits)
        self._next: list[PartitionName] = []  # waited for an answer that has come

    def suspect(self, node: int, why: str, now: float, *, open_: bool = False) -> Iterable[PartitionName]:
        """`open_`: only because it is silent, on a stream that is open."""
        state = self._state
        if not state.standing.suspect(node, now, open_=open_):
            return ()
        state.say("node_suspected", f"node {state.name(node)} is suspected: {why}", "warning", node=node, why=why)
        # The node is asked even if it leads nothing, so that the suspicion ends.
        self._probe(node, [state.parts[name].key for name in state.led[node]], now, urgent=True)
        return state.led[node]

    def blamed(self, event: Blamed, now: float) -> Iterable[PartitionName]:
        state, by = self._state, event.by
        forgiven, anew = state.standing.blamed(by, event.nodes, now)
        again, unheard = state.standing.unheard(by, event.unheard, now)
        dirty: set[PartitionName] = set().union(*(state.led[node] for node in forgiven + again))
        for node in anew + unheard:
            if node in state.standing.silent:
                dirty |= state.led[node]  # perhaps it goes on leading only because this one heard it
        for node in anew:
            dirty.update(self.suspect(node, f"node {state.name(by)} lost it", now))
        state.wake_at(now + state.limits.blamed_s)
        return dirty

    def answered(self, event: Answered, now: float) -> Iterable[PartitionName]:
        state = self._state
        asked, node = self._returned(event.number, event.node), event.node
        dirty: set[PartitionName] = set()
        if state.standing.answered(node, event.registration, now):
            dirty |= state.led[node]
        for key in asked.keys if asked else ():
            name = state.names.get(key)
            if name is None:
                continue
            report, part = event.reports.get(key), state.parts[name]
            if report is None:
                state.seen.get(name, {}).pop(node, None)
            else:
                state.seen.setdefault(name, {})[node] = report
            state.leader_check.answered(part, node, report, now)
            round_ = state.rounds.get(name)
            if round_ is not None and asked is not None and asked.sent >= round_.since:
                round_.heard[node] = now
                round_.failed.discard(node)
                if report is not None:
                    round_.reports[node] = report
                if node != part.meta.leader and self._more_to_hear(part, round_, now):
                    continue
            dirty.add(name)
        return dirty

    def _more_to_hear(self, part: TopicPartition, round_: Round, now: float) -> bool:
        """Whether others that live are to be heard before anything can be decided. To look at each of a thousand again
        for every answer would double the work of their elections."""
        state, until = self._state, round_.since + self._state.gather_s(round_)
        if round_.kind != "elect" or now >= until:
            return False
        heard, silent, nodes = round_.heard, state.standing.silent, state.nodes
        if all(uid in heard or uid in silent or uid not in nodes for uid in part.meta.isr):
            return False
        round_.due_at(until)
        state.wake_at(until)
        return True

    def not_answered(self, number: int, node: int, why: str, now: float) -> Iterable[PartitionName]:
        state = self._state
        asked, dirty = self._returned(number, node), set[PartitionName]()
        for key in asked.keys if asked else ():
            name = state.names.get(key)
            round_ = state.rounds.get(name) if name is not None else None
            if name is not None and round_ is not None:
                round_.heard[node] = now
                round_.failed.add(node)
                round_.reports.pop(node, None)
                dirty.add(name)
        if state.standing.not_answered(node):
            state.say("node_silent", f"node {state.name(node)} does not answer: {why}", "warning", node=node, why=why)
            dirty |= state.led[node]
        return dirty

    def audit(self, now: float) -> None:
        state = self._state
        moving: dict[int, list[PartitionKey]] = {uid: [] for uid in state.nodes}
        for name, wanted in state.planner.moves.items():
            for uid in wanted:
                if name in state.parts and uid in moving:
                    moving[uid].append(state.parts[name].key)
        for uid, more in moving.items():
            if uid not in state.standing.silent:
                # In one order always: one run is like the other, whatever a set does with strings.
                led = {name: state.parts[name] for name in sorted(state.led[uid])}
                if keys := state.leader_check.turn(uid, led, more):
                    self._probe(uid, keys, now)

    def ask_silent(self, now: float) -> None:
        """Ask the nodes that do not answer whether they are back."""
        for node in [uid for uid in self._state.standing.silent if uid in self._state.nodes]:
            self._probe(node, [], now)

    def ask(self, names: Iterable[PartitionName], now: float) -> None:
        """Probe the nodes that the rounds have not heard from for a while. What waits for the answer to an earlier
        probe is looked at when that is there, and not before; should it be lost, long after it was due."""
        state = self._state
        pauses: dict[PartitionName, float] = {}
        wanted: dict[tuple[int, bool], list[PartitionName]] = defaultdict(list)
        waited, self._next = self._next, []
        pause = state.ask_again_s
        for name in dict.fromkeys([*waited, *names]):
            if name not in state.rounds or name in state.puts:
                continue
            round_, part = state.rounds[name], state.parts[name]
            due = round_.since + state.limits.handover_s
            if round_.kind == "transfer" and now < due:
                round_.due_at(due)
                state.wake_at(due)
                continue
            again = {"transfer": state.limits.transfer_ask_s, "watch": state.limits.watch_ask_s}.get(round_.kind, pause)
            if not part.meta.isr and now - round_.since < 1.0:
                again = state.limits.begin_ask_s
            for uid in self._members(part.meta, round_):
                heard = round_.heard.get(uid)
                if uid not in state.nodes or (heard is not None and now - heard < again):
                    continue
                if not self._probes.asked(uid, part.key, round_.since, now):
                    wanted[uid, round_.kind == "doubt"].append(name)
                    pauses[name] = again
            if name not in pauses:
                self._again_after(round_, again, now)
        parts: list[tuple[int, Probe]] = []
        for (uid, urgent), waiting in wanted.items():
            left = self._ask_in_parts(uid, waiting, now, urgent=urgent, parts=parts)
            for name in waiting[: len(waiting) - len(left)]:
                self._again_after(state.rounds[name], pauses[name], now)
            for name in left:
                self._again_after(state.rounds[name], pauses[name] + 3 * state.limits.probe_s, now)
            self._probes.wait(uid, urgent, left)
        # The first parts of all nodes come first: with their answers the first leaders are elected.
        state.actions += [probe for _, probe in sorted(parts, key=lambda part: part[0])]

    def _ask_in_parts(
        self, node: int, names: list[PartitionName], now: float, *, urgent: bool, parts: list[tuple[int, Probe]]
    ) -> list[PartitionName]:
        """Ask a node for partitions whose leaders are sought: `parts` with their places. Returns those for which there
        is no room now."""
        state = self._state
        room = min(state.limits.round_keys, state.limits.keys_max)
        suspected = state.standing.suspected_since(node) is not None
        for first in range(0, len(names), room):
            keys = [state.parts[name].key for name in names[first : first + room]]
            probe = self._probes.ask_part(node, keys, now, urgent=urgent, suspected=suspected, beside=len(names))
            if probe is None:
                return names[first:]
            parts.append((first, probe))
        return []

    def _again_after(self, round_: Round, seconds: float, now: float) -> None:
        round_.due_at(now + seconds)
        self._state.wake_at(now + seconds)

    @staticmethod
    def _members(meta: PartitionMeta, round_: Round) -> Iterable[int]:
        if round_.kind == "transfer":
            return (meta.leader, meta.successor)
        return meta.electable

    def _probe(
        self, node: int, keys: Iterable[PartitionKey], now: float, *, urgent: bool = False, suspected: bool = True
    ) -> bool:
        """False: it has not answered the last question yet."""
        probe = self._probes.ask(node, keys, now, urgent=urgent, suspected=suspected)
        if probe is not None:
            self._state.actions.append(probe)
        return probe is not None

    def _returned(self, number: int, node: int) -> OpenProbe | None:
        """The request that was answered. Of what waited for that, as much as goes with one request is asked next: to
        look at all of it, at each of the answers, would be quadratic."""
        state, (asked, waiting) = self._state, self._probes.returned(number, node)
        sought = sorted(name for name in waiting if name in state.rounds and name not in state.puts)
        room = state.limits.round_keys
        if asked is not None:
            self._next += sought[:room]
            self._probes.wait(node, asked.urgent, sought[room:])
        return asked
