"""What is decided on one partition: whether it needs another leader, which one, and leaderships that move."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from nsqha.election.controller.events import Say
from nsqha.election.controller.rounds import Round, TopicPartition
from nsqha.election.controller.state import ControllerState, text_of
from nsqha.election.elect import Ballot, Elected, Wait, choose, unanswered
from nsqha.election.model import PartitionMeta
from nsqha.election.placement import PartitionName

SILENT, IDLE, DEAF = "leader does not answer", "leader does not lead", "leader commits nothing"
CUT_OFF = "leader is cut off from its followers"
SAID_S = 1.0  # an election that takes longer than members are waited for, and this, says what it waits for
RUNNING = (IDLE, DEAF, CUT_OFF)  # of leaders that answer: a replacement may not help


class Elections:
    """Another leader, in place of one that is gone or does not lead."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._avoided: frozenset[int] | None = None  # of all partitions, in this step

    def begin_step(self) -> None:
        """What is said of the nodes may be other than in the step before."""
        self._avoided = None

    def reason(self, part: TopicPartition, now: float) -> str:
        """Why the partition needs another leader, or another epoch; empty if it does not."""
        state = self._state
        meta = part.meta
        if not meta.replicas:
            return ""
        if meta.leader == 0:
            return "no leader yet"
        node = state.nodes.get(meta.leader)
        if node is None:
            return "leader is gone"
        if state.standing.restarted(meta):
            return "leader restarted"
        if node.poisoned:
            return "leader's disk is closed"
        silent_since = state.standing.silent.get(meta.leader)
        if silent_since is not None and self._lost(part, silent_since):
            return SILENT
        if now < state.failed.next_due(part.name):
            return ""
        if state.leader_check.does_not_lead(part.name, meta):
            return IDLE
        if state.standing.cut_off(meta, now, after=state.limits.blamed_s):
            return CUT_OFF
        return DEAF if self._deaf(part, now) else ""

    def not_in_order(self, names: Iterable[PartitionName]) -> list[PartitionName]:
        """Those that may have a reason, or are to be watched. Of the leaders of the others nothing bad is known: of
        thousands of partitions that are nearly all, in each scan."""
        state = self._state
        parts, rounds, lives, doubted = state.parts, state.rounds, state.standing.in_order(), state.leader_check.doubted
        found = []
        for name in names:
            if (part := parts.get(name)) is not None:
                meta = part.meta
                newest = lives.get(meta.leader)
                good = newest is not None and (not meta.registration or meta.registration >= newest)
                if not good or name in rounds or name in doubted or not meta.replicas:
                    found.append(name)
        return found

    def watched(self, part: TopicPartition, now: float) -> bool:
        """Whether the followers are to be asked if they hear the leader."""
        state, meta = self._state, part.meta
        if not meta.leader or meta.leader in state.standing.leaving:
            return False
        return meta.leader in state.standing.silent or self._stuck_since(part, now) is not None

    def _stuck_since(self, part: TopicPartition, now: float) -> float | None:
        since = self._state.leader_check.stuck_since(part.name, part.meta)
        return since if since is not None and now - since >= self._state.limits.stuck_s else None

    def _lost(self, part: TopicPartition, since: float) -> bool:
        """Whether a leader that does not answer the controller cannot lead on."""
        linked = self._state.standing.linked(part.meta.leader)
        return not (linked or self._heard(part, since)) or self._unheard(part)  # what costs less comes first

    def _unheard(self, part: TopicPartition) -> bool:
        """Whether so many followers say that they do not hear the leader that it cannot commit, and that they can. One
        that says nothing may hear it: it has not looked long enough, or was late itself."""
        state, meta = self._state, part.meta
        witnesses = state.standing.witnesses(meta.leader) & meta.isr.keys()
        others = meta.isr.keys() - witnesses - {meta.leader}
        may_join = {uid for uid in meta.replicas if uid not in meta.isr and uid in state.nodes}
        enough = len(witnesses | may_join - state.standing.silent.keys()) >= meta.min_isr
        return bool(witnesses) and enough and not (others and 1 + len(others) >= meta.min_isr)

    def _heard(self, part: TopicPartition, since: float) -> bool:
        """Whether so many followers hear the leader that it can commit: only the controller has lost it."""
        state, meta = self._state, part.meta
        hearing = state.leader_check.hearing(part.name, meta, since)
        if not hearing:
            return False
        hearing -= state.standing.blamers(meta.leader)
        return bool(hearing) and 1 + len(hearing) >= meta.min_isr

    def _deaf(self, part: TopicPartition, now: float) -> bool:
        """Whether the leader can not commit, and a member of the ISR that answers could, with other replicas."""
        state, meta = self._state, part.meta
        since = self._stuck_since(part, now)
        if since is None:
            return False
        # One that should not lead would be no better, and perhaps its own disk is why it has not followed yet.
        deaf = state.leader_check.deaf(part.name, meta, since) - state.planner.avoided(state.nodes)
        may_join = {uid for uid in meta.replicas if uid not in meta.isr and uid in state.nodes}
        enough = len(deaf | may_join - state.standing.silent.keys()) >= meta.min_isr
        return bool(deaf) and enough and not self._heard(part, since)

    def elect(self, part: TopicPartition, round_: Round, now: float) -> None:
        state = self._state
        meta = part.meta
        round_.many = max(round_.many, len(state.rounds))
        if meta.isr and not round_.reports:  # as with most of a thousand, when their rounds begin
            if self._takes_long(round_, now):
                self._wait(part, round_, unanswered(sorted(meta.isr)), now)
            else:
                self._due(round_, now + state.ask_again_s)
            return
        reports = dict(round_.reports)
        dead = set()
        if round_.why != "leader restarted" and meta.leader:
            dead.add(meta.leader)
        if round_.why in (CUT_OFF, DEAF):
            reports.pop(meta.leader, None)
        mine = reports.get(meta.leader)
        if mine is not None and mine.log_uid != meta.isr.get(meta.leader):
            dead.add(meta.leader)
        if self._avoided is None:
            self._avoided = state.avoided(now)
        found = choose(
            Ballot(
                meta,
                part.sync,
                reports,
                self._failed(meta, round_),
                state.nodes,
                round_.since,
                now,
                frozenset(dead),
                state.last(part.name, now, self._avoided) | ({meta.leader} if round_.why == IDLE else set()),
                state.gather_s(round_),
            )
        )
        if isinstance(found, Elected):
            if round_.why == SILENT or round_.why in RUNNING:
                state.failed.failed(part.name, meta.leader, meta.registration, now)
            if round_.why in RUNNING:
                state.failed.replaced(part.name, now)
            if meta.leader not in (0, found.leader):
                state.failed.lost(part.name, meta.leader, now)
            registered = {found.leader: found.meta.registration}
            state.put(
                part.name, found.meta, round_.why, now, since=round_.since, registered=registered, loss=found.loss
            )
        else:
            self._wait(part, round_, found, now)

    def _failed(self, meta: PartitionMeta, round_: Round) -> frozenset[int]:
        """Who is not waited for. A node that is silent was asked, if not for this partition."""
        silent, nodes = self._state.standing.silent, self._state.nodes
        return frozenset(round_.failed).union(uid for uid in meta.isr if uid in silent or uid not in nodes)

    def _due(self, round_: Round, due: float) -> None:
        round_.due_at(due)
        self._state.wake_at(due)

    def _takes_long(self, round_: Round, now: float) -> bool:
        """Of thousands that are elected together most wait for their turn, and that is no news."""
        return now - round_.since > SAID_S + self._state.gather_s(round_)

    def _wait(self, part: TopicPartition, round_: Round, wait: Wait, now: float) -> None:
        state = self._state
        self._due(round_, now + state.ask_again_s if wait.until is None else wait.until)
        if wait.why != round_.waiting and (wait.operator or self._takes_long(round_, now)):
            round_.waiting = wait.why
            event, level = ("operator_needed", "error") if wait.operator else ("election_waits", "warning")
            name = part.name
            text = f"{text_of(name)} ({round_.why}): {wait.why}"
            if wait.operator:
                text += f"; `nsqha cluster elect {name.topic}/{name.number} --unclean` shows what each replica has"
            state.actions.append(
                Say(event, text, level, {"topic": name.topic, "partition": name.number, "why": wait.why})  # type: ignore[arg-type]
            )


class LeaderTransfers:
    """The lead passes to a successor that the record names."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._after: dict[PartitionName, float] = {}  # no transfer is begun again before

    def forget(self, name: PartitionName) -> None:
        self._after.pop(name, None)

    def begin(self, name: PartitionName, target: int, now: float) -> None:
        state = self._state
        if state.free(name) and name not in state.rounds and now >= self._after.get(name, 0.0):
            meta = state.parts[name].meta
            if meta.leader != target and not meta.successor and target not in state.failed.last(name, state.nodes, now):
                state.put(name, replace(meta, successor=target), "transfer_begins", now)

    def go_on(self, part: TopicPartition, round_: Round, now: float) -> None:
        meta, state = part.meta, self._state
        node, leader = state.nodes.get(meta.successor), state.nodes.get(meta.leader)
        theirs, ours = round_.reports.get(meta.successor), round_.reports.get(meta.leader)
        fit = node is not None and not (node.poisoned or node.leaving or node.declines) and meta.successor in meta.isr
        late = now - round_.since > state.limits.transfer_s
        forced = late and leader is not None and leader.leaving
        if node is not None and fit and theirs is not None and theirs.registration == node.registration:
            ready = theirs.log_uid == meta.isr[meta.successor] and not theirs.poisoned and not theirs.corrupt
            equal = ours is not None and ours.leading and ours.reach == theirs.reach
            if ready and (equal or forced):
                epoch = max(meta.epoch, theirs.promise, ours.promise if ours else 0) + 1
                new = replace(meta, leader=meta.successor, epoch=epoch, registration=node.registration, successor=0)
                registered = {node.node_uid: node.registration}
                state.put(part.name, new, "transfer", now, since=round_.since, registered=registered)
                return
        if not fit or late:
            self._after[part.name] = now + state.limits.transfer_pause_s
            if node is not None:
                state.failed.failed(part.name, meta.successor, node.registration, now)
            text = f"{text_of(part.name)}: node {state.name(meta.successor)} could not take the lead in time"
            state.say("transfer_given_up", text, "warning", topic=part.name.topic, partition=part.name.number)
            state.put(part.name, replace(meta, successor=0), "transfer_given_up", now)
            return
        round_.due_at(now + state.limits.transfer_ask_s)
        state.wake_at(round_.due)

    def leader_leaves(self, part: TopicPartition, now: float) -> None:
        """A leader that shuts down and has not handed over by itself."""
        meta, state = part.meta, self._state
        since = state.standing.leaving.get(meta.leader)
        if since is None:
            return
        due = since + state.limits.handover_s
        if now < due:
            state.wake_at(due)
            return
        self._begin_elsewhere(part, state.planner.avoided(state.nodes), now)

    def leave(self, part: TopicPartition, now: float) -> bool:
        """Move the lead to a member of the ISR that the controller reaches; False: there is none."""
        return self._begin_elsewhere(part, self._state.last(part.name, now), now)

    def _begin_elsewhere(self, part: TopicPartition, avoided: Collection[int], now: float) -> bool:
        meta, state = part.meta, self._state
        unfit = {meta.leader, *avoided, *state.standing.silent}
        fit = [uid for uid in meta.replicas if uid in meta.isr and uid in state.nodes and uid not in unfit]
        if fit:
            self.begin(part.name, fit[0], now)
        return bool(fit)
