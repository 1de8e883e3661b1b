"""Every rule of replication, switched off on purpose: do the random histories notice?

    python -m tests.unit.replication.mutants [NAME ...]      see tests/mutation.py

Assertions of the product are off meanwhile (`unasserted`), so that what is found is the harm and not the missing rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nsqha.replication import acceptance, divergence
from nsqha.replication.isr import Action, IsrKeeper, Outcome, ProposalRefused, Unknown
from nsqha.replication.leader import LeaderReplica
from tests.mutation import Mutant, Patch, Suite, applied, instead, run
from tests.unit.replication.history import History
from tests.unit.replication.tiny import Tiny
from tests.unit.replication.tiny_parts import Replica, Wrong

LOSS = ("NoLoss", "LeaderComplete", "NoFork", "NamedCopies")
Make = Callable[[], list[Patch]]


@dataclass(frozen=True)
class Checks:
    """One of these has to fail."""

    names: tuple[str, ...]


def _attempt(mutant: Mutant[Checks], seed: int) -> str | None:
    # The mutant's own patches last: they win.
    with applied(unasserted()), mutant.plant():
        try:
            History(seed).run()
        except Wrong as wrong:
            if str(wrong).split(":")[0] in mutant.hint.names:
                return str(wrong)
        except (AssertionError, IndexError):
            pass  # something broke before a check could see why
    return None


SUITE: Suite[Checks] = Suite("tests.unit.replication.mutants", _attempt, runs=5000)


def mutant(rule: str, *finds: str) -> Callable[[Make], Make]:
    """Break this rule of replication; `finds`: the checks of which one must fail."""
    return lambda make: SUITE.add(make, rule, Checks(finds or LOSS))


def unasserted() -> list[Patch]:
    """Without the assertions that would stop a mutant before it does harm."""

    def set_members(self: LeaderReplica, recorded: set[int], effective: set[int]) -> None:
        for member in effective:
            if member not in self._replicas:
                self._set_progress(member, 0, 0)
        self._effective = tuple(self._replicas[member] for member in sorted(effective))
        self._enough = len(recorded) >= self.min_isr

    return [
        instead(IsrKeeper, "_checked", lambda self, actions: actions),
        instead(LeaderReplica, "_set_members", set_members),
        instead(acceptance, "check_cut", lambda to, committed: None),
        instead(acceptance, "check_replacement", lambda to, committed: None),
    ]


# ---- commit


@mutant("commits ask everybody who may be in force, not only who is proposed")
def proposed_isr_only() -> list[Patch]:
    def effective(self: IsrKeeper) -> frozenset[int]:
        return frozenset(self.meta.isr if self._proposal is None else self._proposal.meta.isr)

    return [instead(IsrKeeper, "effective", property(effective))]


@mutant("commits ask everybody who may be in force, not only who is recorded")
def recorded_isr_only() -> list[Patch]:
    return [instead(IsrKeeper, "effective", property(lambda self: frozenset(self.meta.isr)))]


@mutant("an ack counts only under the log_uid that the ISR names")
def any_log_uid() -> list[Patch]:
    def countable(self: IsrKeeper, node: int, log_uid: int) -> bool:
        return node in self.meta.isr or (self._proposal is not None and node in self._proposal.meta.isr)

    return [instead(IsrKeeper, "countable", countable)]


@mutant("nothing commits while fewer than min_isr members are recorded")
def commit_below_floor() -> list[Patch]:
    set_members = LeaderReplica._set_members

    def enough(self: LeaderReplica, recorded: set[int], effective: set[int]) -> None:
        set_members(self, recorded, effective)
        self._enough = True

    def write(self: Tiny, uid: int) -> None:
        """As if the shell admitted publishes below the floor."""
        node = self.nodes[uid]
        assert node.leading is not None
        meta = node.leading.keeper.meta
        object.__setattr__(node.leading.keeper, "meta", _with_floor(meta, 1))
        original_write(self, uid)
        if node.leading is not None:
            object.__setattr__(node.leading.keeper, "meta", meta)

    original_write = Tiny.write
    return [instead(LeaderReplica, "_set_members", enough), instead(Tiny, "write", write)]


def _with_floor(meta: Any, min_isr: int) -> Any:
    from dataclasses import replace

    return replace(meta, min_isr=min_isr)


@mutant("sync=always: an ack is what is on the disk")
def ack_before_disk() -> list[Patch]:
    init = LeaderReplica.__init__

    def lazy(self: LeaderReplica, **arguments: Any) -> None:
        init(self, **{**arguments, "sync_always": False})

    return [instead(LeaderReplica, "__init__", lazy)]


# ---- changes of the ISR


@mutant("no proposal goes below the floor", "Floor")
def floor_ignored() -> list[Patch]:
    return [instead(IsrKeeper, "_floor", 0)]


@mutant("an unknown outcome is not a refusal")
def unknown_is_refused() -> list[Patch]:
    replied = IsrKeeper.replied

    def forget(self: IsrKeeper, outcome: Outcome, now: float) -> list[Action]:
        return replied(self, ProposalRefused() if isinstance(outcome, Unknown) else outcome, now)

    return [instead(IsrKeeper, "replied", forget)]


@mutant("who joins has all that is committed")
def join_without_committed() -> list[Patch]:
    return [instead(IsrKeeper, "_may_join", _may_join_with(committed=False))]


@mutant("who joins has all that the leader began with")
def join_without_epoch_start() -> list[Patch]:
    return [instead(IsrKeeper, "_may_join", _may_join_with(epoch_start=False))]


def _may_join_with(*, committed: bool = True, epoch_start: bool = True) -> Callable[[IsrKeeper, int], bool]:
    may_join = IsrKeeper._may_join

    def wrong(self: IsrKeeper, node: int) -> bool:
        before = self._committed, self._epoch_start
        self._committed = before[0] if committed else 0
        self._epoch_start = before[1] if epoch_start else 0
        try:
            return may_join(self, node)
        finally:
            self._committed, self._epoch_start = before

    return wrong


@mutant("who joins is compared by registration, or has a log of its own life")
def join_of_an_earlier_life() -> list[Patch]:
    """Neither the transaction compares the registration, nor does a log that lost something get a new uid."""
    request, restart = Tiny._request, Tiny.restart

    def unregistered(self: Tiny, node: Replica, meta: Any, registered: dict[int, int]) -> None:
        request(self, node, meta, {})

    def same_uid(self: Tiny, uid: int) -> None:
        self.nodes[uid].vouched = True
        restart(self, uid)

    return [instead(Tiny, "_request", unregistered), instead(Tiny, "restart", same_uid)]


# ---- followers


@mutant("a batch is a duplicate only if its content is the same")
def duplicates_by_id() -> list[Patch]:
    def by_length(self: divergence.Divergence, leader: divergence.EpochEndAnswer) -> Any:
        self.outcome = divergence.InSync(self._end)
        return self.outcome

    def any_past(*, end: int, own_start: int, own_end: int, **_: Any) -> bool:
        return True

    def follows(run: Any, *, epoch: int, promise: int, last: Any, own: Any) -> Any:
        if epoch < promise:
            return acceptance.Fenced(promise)
        new = [i for i, entry in enumerate(run) if entry.log_id > last.log_id]
        if not new:
            return acceptance.Duplicate()
        if run[new[0]].log_id > last.log_id + 1:
            return acceptance.Gap(last.log_id + 1)
        return acceptance.Append(new[0])

    return [
        instead(divergence.Divergence, "answered", by_length),
        instead(acceptance, "same_past", any_past),
        instead(acceptance, "decide_append", follows),
    ]


@mutant("a follower promises the epoch, and takes nothing of a lower one")
def no_promise() -> list[Patch]:
    decide_append = acceptance.decide_append

    def takes(run: Any, *, epoch: int, promise: int, last: Any, own: Any) -> Any:
        return decide_append(run, epoch=epoch, promise=epoch, last=last, own=own)

    return [
        instead(acceptance, "decide_open", lambda **_: acceptance.Accepted()),
        instead(acceptance, "decide_append", takes),
        instead(Tiny, "_stop_leading", _stop_unless_accepting(Tiny._stop_leading)),
    ]


def _stop_unless_accepting(stop: Callable[[Tiny, Replica, str], None]) -> Callable[[Tiny, Replica, str], None]:
    def wrong(self: Tiny, node: Replica, why: str) -> None:
        if why != "accepts another leader":
            stop(self, node, why)

    return wrong


@mutant("logs part where the chain says so, not where the shorter one ends")
def cut_at_the_shorter() -> list[Patch]:
    def shorter(self: divergence.Divergence, leader: divergence.EpochEndAnswer) -> Any:
        to = min(self._end, leader.end)
        self.outcome = divergence.InSync(to) if to == self._end else divergence.Truncate(to)
        return self.outcome

    return [
        instead(divergence.Divergence, "answered", shorter),
        instead(acceptance, "same_past", lambda **arguments: arguments["end"] <= arguments["own_end"]),
        instead(acceptance, "_continuation", lambda entries, first, last, epoch: acceptance.Append(first)),
        instead(acceptance, "same_batch", lambda one, other: True),
    ]


if __name__ == "__main__":
    run(SUITE)
