"""A naive model of nsqd's topic and channels, with lists and sets, that judges what the channel core does.

It knows what an administrator and a consumer can know: which messages a channel must still deliver, which it must not
deliver any more, and not before when. It does not know floors, ranges, rings or where a message waits.

A message of a channel is PENDING, FINISHED, or MAYBE: it was finished, but nobody knows whether that outlived a crash,
so it may come again (and is PENDING then) or not. A FIN is certain when the batch that was written after it is
committed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

PENDING, FINISHED, MAYBE = "pending", "finished", "maybe"
NEVER = 1 << 62  # when a dead letter is due


class Wrong(AssertionError):
    """The channel core did what it must not."""


def check(condition: object, why: str) -> None:
    if not condition:
        raise Wrong(why)


@dataclass
class Due:
    """Not to be delivered before `at_ns`. A crash forgets it unless it is certain and long (or happens to be kept)."""

    at_ns: int
    long: bool = False
    written: int | None = None
    certain: bool = False


@dataclass
class Snapshot:
    """What an undo goes back to."""

    floor: int
    finished: set[int]
    maybe: set[int]
    dropped: set[int] = field(default_factory=set)  # deferred messages that the seek dropped


@dataclass
class ReaderModel:
    """A reader's channel: a place in the log, and what an emptied topic takes from it."""

    uid: int
    floor: int
    emptied: set[int] = field(default_factory=set)

    def moved(self, target: int, *, back: bool) -> None:
        if back or target > self.floor:
            self.floor = target
            self.emptied.clear()

    def topic_emptied(self, offsets: range) -> None:
        self.emptied.update(offsets)
        while self.floor in self.emptied:
            self.floor += 1


@dataclass
class ChannelModel:
    name: str
    uid: int
    paused: bool = False
    status: dict[int, str] = field(default_factory=dict)
    in_flight: dict[int, int] = field(default_factory=dict)  # offset -> owner
    deliveries: dict[int, int | None] = field(default_factory=dict)  # None: not known after a crash
    due: dict[int, Due] = field(default_factory=dict)
    uncertain: dict[int, int | None] = field(default_factory=dict)  # finished -> log_id that says so, once written
    forgotten: Counter[tuple[int, int]] = field(default_factory=Counter)  # (owner, offset)
    undo: Snapshot | None = None
    ever_dead: set[int] = field(default_factory=set)
    put_back: dict[int, int | None] = field(default_factory=dict)  # finished once -> log_id that says so, once written
    ever_finished: set[int] = field(default_factory=set)  # by a consumer, or an operator

    @property
    def dead(self) -> set[int]:
        """Messages that are never due."""
        return {offset for offset, due in self.due.items() if due.at_ns == NEVER and self.status[offset] != FINISHED}

    @property
    def ephemeral(self) -> bool:
        return self.name.endswith("#ephemeral")

    # ---- what consumers do

    def delivered(self, offset: int, owner: int, attempts: int, now_ns: int, attempts_max: int | None = None) -> None:
        check(not self.paused, f"{self.name} delivers {offset} while paused")
        check(offset in self.status, f"{self.name} delivers {offset}, which it never got")
        check(self.status[offset] != FINISHED, f"{self.name} delivers {offset}, which is finished")
        check(offset not in self.in_flight, f"{self.name} delivers {offset}, which is in flight")
        due = self.due.get(offset)
        check(due is None or due.at_ns <= now_ns, f"{self.name} delivers {offset} before it is due")
        before = self.deliveries.get(offset, 0)
        check(attempts_max is None or attempts <= attempts_max, f"{offset} has attempts {attempts} of {attempts_max}")
        wanted = (before or 0) + 1
        wanted = wanted if attempts_max is None else min(wanted, attempts_max)
        check(before is None or attempts == wanted, f"{offset} has attempts {attempts} after {before} deliveries")
        self.deliveries[offset] = attempts
        self.status[offset] = PENDING
        self.in_flight[offset] = owner
        self.due.pop(offset, None)

    def answer(self, offset: int, owner: int, *, fin_or_req: bool) -> str | None:
        """The error that an answer of `owner` must get."""
        if self.forgotten[owner, offset] > 0:
            self.forgotten[owner, offset] -= fin_or_req
            return "ID not in flight"
        if offset not in self.in_flight:
            return "ID not in flight"
        return None if self.in_flight[offset] == owner else "client does not own message"

    def finished(self, offset: int) -> None:
        del self.in_flight[offset]
        self.ever_finished.add(offset)
        self.status[offset] = FINISHED
        self.uncertain[offset] = None

    def died(self, offset: int, *, kept: bool) -> None:
        """It was given up. `kept`: as a dead letter."""
        self.ever_dead.add(offset)
        if kept:
            self.due[offset] = Due(NEVER, long=True)
        else:
            self.passed_over(offset)

    def passed_over(self, offset: int) -> None:
        """Its policy says that nobody gets it."""
        check(self.status.get(offset, FINISHED) != FINISHED, f"{self.name} passes over {offset}, which is finished")
        self.ever_finished.add(offset)
        self.status[offset] = FINISHED
        self.uncertain[offset] = None
        self.due.pop(offset, None)

    def raised(self, offset: int) -> None:
        """An operator wants this dead letter delivered again."""
        self.due.pop(offset, None)
        self.deliveries[offset] = 0

    def returned_by_operator(self, offset: int, at_ns: int) -> None:
        """It was finished, and an operator put it back."""
        self.status[offset] = PENDING
        self.deliveries[offset] = 0
        self.uncertain.pop(offset, None)
        if not self.ephemeral:
            self.put_back[offset] = None
        self.due[offset] = Due(at_ns, long=True)

    def requeued(self, offset: int, due: Due | None) -> None:
        del self.in_flight[offset]
        if due is not None:
            self.due[offset] = due

    def detached(self, owner: int) -> int:
        gone = [offset for offset, o in self.in_flight.items() if o == owner]
        for offset in gone:
            del self.in_flight[offset]
        for key in [key for key in self.forgotten if key[0] == owner]:
            del self.forgotten[key]
        return len(gone)

    # ---- what the log does

    def finished_by(self, offset: int, log_id: int) -> bool:
        """Whether the log says so up to here."""
        at = self.uncertain.get(offset, 0)
        return self.status.get(offset) == FINISHED and at is not None and at <= log_id

    def written_in(self, log_id: int) -> None:
        """All that happened so far is in this batch."""
        for offset, at in self.uncertain.items():
            if at is None:
                self.uncertain[offset] = log_id
        for offset, at in self.put_back.items():
            if at is None:
                self.put_back[offset] = log_id
        for due in self.due.values():
            if due.written is None:
                due.written = log_id

    def committed(self, log_id: int) -> None:
        for offset in [o for o, at in self.uncertain.items() if at is not None and at <= log_id]:
            del self.uncertain[offset]
        for offset in [o for o, at in self.put_back.items() if at is not None and at <= log_id]:
            del self.put_back[offset]
        for due in self.due.values():
            due.certain = due.certain or (due.written is not None and due.written <= log_id)

    def sought(self, target: int, pump: int, deferred: set[int], *, undo: Snapshot | None) -> None:
        """The cursor goes to `target`; `deferred` messages are not touched."""
        for offset in range(pump):
            if offset in deferred:
                continue
            self.status[offset] = PENDING if offset >= target else FINISHED
            if undo is not None and offset >= target:
                if offset in undo.finished:
                    self.status[offset] = FINISHED
                elif offset in undo.maybe:
                    self.status[offset] = MAYBE
            self.uncertain.pop(offset, None)
            self.deliveries[offset] = 0
            self.due.pop(offset, None)
            if offset in self.in_flight:
                self.forgotten[self.in_flight.pop(offset), offset] += 1

    def returned(self, due_ns: dict[int, int]) -> None:
        """An undo deferred these again, each until its time."""
        for offset, at_ns in due_ns.items():
            # A FIN that was not written yet holds for what is deferred, whatever was sought meanwhile.
            self.status[offset] = MAYBE if offset in self.ever_finished else PENDING
            self.deliveries[offset] = None
            self.due[offset] = Due(at_ns, long=True, written=0, certain=True)

    def crashed(self, deferred: set[int]) -> None:
        """What was not committed is open; `deferred` are the messages that the log says are deferred."""
        self.in_flight.clear()
        self.forgotten.clear()
        for offset in [*self.uncertain, *self.put_back]:
            self.status[offset] = MAYBE
        self.uncertain.clear()
        self.put_back.clear()
        self.due = {offset: due for offset, due in self.due.items() if due.certain and (due.long or offset in deferred)}
        for offset, count in self.deliveries.items():
            if count:
                self.deliveries[offset] = None

    def log_begins(self, log_start: int) -> None:
        """What was put back there, and is not in the log, does not come any more."""
        for offset in [offset for offset in self.put_back if offset < log_start]:
            self.status[offset], self.deliveries[offset] = MAYBE, None
            del self.put_back[offset]

    def dead_again(self, offsets: set[int]) -> None:
        """After a crash these are dead letters: that they died was committed, not what became of them then."""
        check(offsets <= self.ever_dead, f"{offsets - self.ever_dead} are dead, and never died")
        for offset in offsets:
            self.due[offset] = Due(NEVER, long=True, written=0, certain=True)


class Model:
    """The topic: what it holds back, and what its channels have to do."""

    def __init__(self) -> None:
        self.end = 0
        self.pump = 0
        self.paused = False
        self.channels: dict[str, ChannelModel] = {}
        self.readers: dict[str, ReaderModel] = {}
        self.deliver_at: dict[int, int] = {}
        self.brought_forward: set[int] = set()  # by an operator: before their deliver-at times
        self.held: dict[int, tuple[int, int]] = {}  # hold -> offset, until when

    def published(self, count: int, deliver_at: int) -> None:
        for offset in range(self.end, self.end + count):
            if deliver_at:
                self.deliver_at[offset] = deliver_at
        self.end += count
        self._flow()

    def _flow(self) -> None:
        """What the topic holds goes to every channel, as nsqd's message pump does."""
        if self.paused or not self.channels:
            return
        for channel in self.channels.values():
            for offset in range(self.pump, self.end):
                channel.status.setdefault(offset, PENDING)
                if offset in self.deliver_at:
                    channel.due[offset] = Due(self.deliver_at[offset], long=True, certain=True)
        self.pump = self.end

    def begins_at(self, log_start: int) -> None:
        """The log begins here: a topic that only readers keep lets go what they have read."""
        if self.readers and not self.channels and not self.paused:
            self.pump = max(self.pump, log_start)

    # ---- who holds the files

    def hold(self, id_: int, offset: int, until_ns: int, now_ns: int) -> None:
        """A reader needs what follows `offset`; it goes on to need what it needed."""
        offset_before, until_before = self.held.get(id_, (offset, 0))
        self.held[id_] = (min(offset, offset_before) if until_before > now_ns else offset, until_ns)

    def judge_held(self, log_start: int, holds: dict[int, tuple[int, int, int]], now_ns: int) -> None:
        """What is held is there, and exactly that is held."""
        mine = {id_: held for id_, held in self.held.items() if held[1] > now_ns}
        check(mine == {id_: hold[:2] for id_, hold in holds.items()}, f"the holds are {holds}, not {mine}")
        for offset, _ in mine.values():
            check(log_start <= offset, f"log start {log_start} passed what is held from {offset} on")

    # ---- the channels

    def listed(self, record: dict[str, tuple[int, bool]], readers: dict[str, int], paused: bool) -> None:
        """The channel list is this now."""
        self.readers = {name: reader for name, reader in self.readers.items() if readers.get(name) == reader.uid}
        for name, uid in readers.items():
            self.readers.setdefault(name, ReaderModel(uid, self.pump))
        for name, channel in list(self.channels.items()):
            if not channel.ephemeral and (name not in record or record[name][0] != channel.uid):
                del self.channels[name]
        for name, (uid, channel_paused) in record.items():
            if name not in self.channels:
                self.channels[name] = ChannelModel(name, uid)
            self.channels[name].paused = channel_paused
        self.paused = paused
        self._flow()

    def ephemeral(self, name: str, uid: int, exists: bool) -> None:
        if exists and name not in self.channels:
            self.channels[name] = ChannelModel(name, uid)
        elif not exists and name in self.channels:
            del self.channels[name]
        self._flow()

    def epoch_started(self) -> None:
        for name in [name for name, channel in self.channels.items() if channel.ephemeral]:
            del self.channels[name]

    def topic_emptied(self) -> None:
        for channel in self.channels.values():
            for offset in range(self.pump, self.end):
                channel.status[offset] = FINISHED
        for reader in self.readers.values():
            reader.topic_emptied(range(self.pump, self.end))
        self.pump = self.end
