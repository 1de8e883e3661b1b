"""Judges, in the random lives of a channel, that nothing leaves it uncounted, and what its policy passed over.

One law, whenever the model is in line with the core:

    handed over by the pump = finished + passed over + dropped + dead + deferred + waiting + in flight + unread

Each message is in one of these states, the channel's figures count exactly them, and what counts as finished is what
the model saw go: by a FIN, by an operator, passed over, dropped at its death, or sought past.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nsqha.cursor.deferred.dead import Reason
from nsqha.cursor.live import counts
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.live.looking import MessageState, held
from nsqha.election.policy import ChannelPolicy
from tests.unit.cursor.model import FINISHED, MAYBE, PENDING, ChannelModel, check

UNREAD, DEFERRED, DEAD = MessageState.UNREAD, MessageState.DEFERRED, MessageState.DEAD
States = dict[int, MessageState]


def states_of(channel: Channel, end: int) -> States:
    """Where each message is that the channel was handed."""
    found: States = {}
    for offset in range(end):
        one = held(channel.cursor, offset)
        check(one is not None, f"{channel.name} does not know {offset}")
        assert one is not None
        found[offset] = one.state
    return found


@dataclass
class Tally:
    """What the model saw one channel of one leader count."""

    finished: int = 0
    skipped: int = 0
    expired: int = 0
    dropped: int = 0
    died: Counter[Reason] = field(default_factory=Counter)

    def judge(self, channel: Channel) -> None:
        cursor = channel.cursor
        passing = cursor.passing
        mine = (self.finished, self.skipped, self.expired, self.dropped, +self.died)
        died = +Counter(cursor.dead.died)
        its = (channel.finished_count, passing.skipped, passing.expired, passing.dropped, died)
        check(mine == its, f"{channel.name} counts {its}, and it were {mine}")


def judge_law(channel: Channel, model: ChannelModel, end: int, now_ns: int) -> None:
    """Each message is somewhere, once, and counted there."""
    cursor = channel.cursor
    states = states_of(channel, end)
    count = Counter(states.values())
    delayed = len(cursor.waiting.delays)
    deferred = [held(cursor, offset) for offset, state in states.items() if state is DEFERRED]
    its = {
        "depth": (cursor.depth(end), count[UNREAD] + count[MessageState.WAITING] - delayed),
        "deferred": (cursor.deferred_count, count[DEFERRED] + delayed),
        "dead": (cursor.deferred_overlay.dead, count[DEAD]),
        "in flight": (channel.in_flight, count[MessageState.IN_FLIGHT]),
    }
    due = sum(one is not None and one.due_ns <= now_ns for one in deferred)
    shown = counts.held(cursor, now_ns)
    its_shown = {
        "depth with what is due": (shown.depth, its["depth"][1] + due),
        "deferred without it": (shown.deferred, its["deferred"][1] - due),
    }
    for name, (figure, there) in (its | its_shown).items():
        check(figure == there, f"{channel.name} says {name} {figure}, and it are {there}: {states}")
    gone = 0
    for offset, state in states.items():
        status = model.status.get(offset, FINISHED)
        if state is MessageState.FINISHED:
            gone += 1
            check(status != PENDING, f"{channel.name} takes {offset} for finished, and nobody finished it")
        else:
            check(status in (PENDING, MAYBE), f"{channel.name} has {offset} {state.name}, and it is finished")
            check((state is DEAD) <= (offset in model.ever_dead), f"{channel.name} has {offset} dead; it never died")
    there = sum(figure for figure, _ in its.values())
    check(gone + there == end, f"{channel.name} was handed {end}, of which {gone} are gone and {there} there")


class Passed:
    """One look of a channel's policy: what it passed over, against what it had to."""

    def __init__(self, channel: Channel, end: int) -> None:
        self._channel = channel
        self._end = end
        self._before = self._unread()
        passing = channel.cursor.passing
        self._counts = passing.skipped, passing.expired, passing.dropped
        self._reach = channel.cursor.unread.window_end()

    def _unread(self) -> list[int]:
        return [offset for offset, state in states_of(self._channel, self._end).items() if state is UNREAD]

    def judge(
        self, policy: ChannelPolicy, tally: Tally, published_at: Mapping[int, int], now_ns: int, *, exact: bool
    ) -> Iterator[int]:
        """The messages that it passed over. `exact`: as many as it had to; for channels whose reader never waits."""
        passing = self._channel.cursor.passing
        name, before = self._channel.name, self._before
        counts = passing.skipped, passing.expired, passing.dropped
        skipped, expired, dropped = (new - old for new, old in zip(counts, self._counts, strict=True))
        after = set(self._unread())
        gone = [offset for offset in before if offset not in after]
        check(after <= set(before), f"{name} passes over, and {after - set(before)} are unread")
        check(len(gone) == skipped + expired + dropped, f"{name} passed over {gone}, and counts {counts}")
        check(gone == before[: len(gone)], f"{name} passed over {gone}, which are not the oldest of {before}")
        check(not skipped or policy.skip, f"{name} skips, and nobody asked for it")
        check(not expired or policy.ttl_ms is not None, f"{name} lets expire, and nobody asked for it")
        for offset in gone[:expired]:
            old = published_at[offset] < now_ns - (policy.ttl_ms or 0) * 1_000_000
            check(old, f"{name} lets {offset} expire, which is not so old")
        reached = sum(offset < self._reach for offset in before)
        if policy.skip:
            check(not exact or skipped == reached, f"{name} skips {skipped} of {reached}")
        else:
            excess = 0 if policy.max_depth is None else max(len(before) - expired - policy.max_depth, 0)
            check(dropped <= excess, f"{name} drops {dropped}, {excess} are too many")
            check(not exact or dropped >= min(excess, reached - expired), f"{name} drops {dropped} of {excess}")
        tally.skipped += skipped
        tally.expired += expired
        tally.dropped += dropped
        return iter(gone)
