"""What a simulated cluster has promised: every message that was ever committed, and what operators were told.

The ledger reads batches as they are committed, anywhere, and keeps its own copy; no node can talk it out of that.

    stored      a message has one place, for ever, and an MPUB is in one piece; what is delivered is what was committed
    refused     what was refused is in no log; acknowledged: it is in one
    owed        each channel gets each message, at least once since it was committed
    again       ... and, if somebody sought back and was told so, once more since then
    excused     unless an operation that may drop it was carried out since, or may have been: a seek forward, an
                undo, an empty. One that nobody answered may be carried out at any time until all is calm (`settle`)
    paused      a leader that was told delivers nothing
    ordered     in a topic that is so, nothing comes before all that is in front of it was finished, nor after anything
                that is behind it came from the same leader, or an earlier one: that waited for a committed FIN

A leader that the asked node did not know of yet follows by its own watch (docs/guarantees.md, "Clients of a
cluster"): it is believed from the next change of leader on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.errors import LogCorrupt
from nsqha.frames import MESSAGE

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.election.model import TopicRecord
    from tests.sim.clients import History

Key = tuple[int, int]  # topic uid, partition

FOR_EVER = float("inf")
DEAD_TOPIC = "dead"  # where dead letters are moved
LATE_SECONDS = 7.0  # what was answered with an error may still land in the metadata so much later
BODY_AT = 34  # in a message's frame


@dataclass(frozen=True, slots=True)
class Stored:
    """A committed message."""

    body: bytes
    key: Key
    offset: int
    log_id: int
    epoch: int
    at: float


@dataclass(slots=True)
class Operation:
    """Something an operator asked for, of one channel of one partition."""

    kind: str
    topic: str
    channel: str  # "": all of the topic
    number: int
    began: float
    ended: float = FOR_EVER  # nothing happens on its account any more
    drops_below: float = FOR_EVER  # it may drop messages below this offset; 0: none
    again_from: int | None = None  # answered: what is at or above is delivered again
    finished_excused: bool = False  # ... unless it was finished: an undo brings that back too
    bodies: frozenset[bytes] | None = None  # of these messages; None: all

    def may_drop(self, stored: Stored, since: float) -> bool:
        """Whether it may be why a message is not delivered after `since`."""
        if self.bodies is not None and stored.body not in self.bodies:
            return False
        return self.ended >= since and stored.offset < self.drops_below and stored.at <= self.ended


@dataclass(slots=True)
class RecordChange:
    """What an operator asked of a channel, or a topic (channel ""), that its record says and its leaders follow."""

    topic: str
    channel: str
    began: float
    known: dict[int, int]  # partition -> epoch of the leader that the asked node knew; 0: none
    answered: float = FOR_EVER
    current: dict[int, int] = field(default_factory=dict)  # partition -> epoch of the record when it was answered
    over: float = FOR_EVER  # it can not take effect after this

    def binds(self, number: int, epoch: int) -> bool:
        """Whether the leader of this epoch had to know when it was answered, or has read the record since."""
        known = self.known.get(number, 0)
        return epoch == known or epoch > self.current.get(number, 0)


@dataclass(slots=True)
class Pause(RecordChange):
    """It is paused or not."""

    paused: bool = False


@dataclass(slots=True)
class PolicyChange(RecordChange):
    """Its policy says this."""

    fields: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """One cluster's."""

    def __init__(self) -> None:
        self.messages: dict[Key, list[Stored]] = {}  # by offset
        self.places: dict[bytes, Stored] = {}
        self.operations: list[Operation] = []
        self.pauses: list[Pause] = []
        self.policies: list[PolicyChange] = []
        self.moved: dict[bytes, list[Stored]] = {}  # dead letters, in the topic for them
        self._dead: set[Key] = set()  # its partitions
        self.ordered: set[Key] = set()
        self._delivered: dict[tuple[str, Key], dict[int, int]] = {}  # (channel, partition) -> epoch -> highest offset
        self._finished: dict[tuple[str, Key], int] = {}  # below this offset everything was
        self._read: dict[Key, int] = {}  # the log id up to which a partition is known
        self._lives: dict[tuple[str, int], list[tuple[int, Key]]] = {}  # (topic, partition) -> [(id base, key)]

    # ---- what is committed

    def record(self, record: TopicRecord) -> None:
        """A topic is there, or has more partitions."""
        for number in record.partitions:
            lives = self._lives.setdefault((record.name, number), [])
            life = (ids.id_base(number, record.salt), (record.uid, number))
            if life not in lives:
                lives.append(life)
            if record.name == DEAD_TOPIC:
                self._dead.add((record.uid, number))
            if record.settings.ordered:
                self.ordered.add((record.uid, number))

    def known(self, key: Key) -> int:
        """Everything below this log id has been read."""
        return self._read.get(key, 1)

    def read(self, key: Key, log: PartitionLog, committed: int, now: float) -> Iterator[str]:
        """Take in what was committed; says what is wrong with it."""
        at = self.known(key)
        if committed <= at or log.start.log_id > at:
            return
        messages = self.messages.setdefault(key, [])
        try:
            for entry in log.entries(at, min(committed, log.end.log_id)):
                data = log.read(entry) if entry.count else b""
                if entry.first_offset != len(messages):
                    yield f"{key}: batch {entry.log_id} begins at {entry.first_offset}, and not at {len(messages)}"
                    return
                for body in bodies(data):
                    stored = Stored(body, key, len(messages), entry.log_id, entry.epoch, now)
                    if key in self._dead:
                        self.moved.setdefault(body, []).append(stored)
                        messages.append(stored)
                        continue
                    if body in self.places:
                        yield f"{body[:40]!r} is stored twice: {self.places[body]} and {stored}"
                    self.places[body] = stored
                    messages.append(stored)
                self._read[key] = entry.log_id + 1
        except LogCorrupt:
            return  # its copy of it is damaged; another one is not

    def find(self, topic: str, message_id: bytes) -> tuple[Key, int] | None:
        """The partition and offset that a wire id speaks of."""
        number = int(message_id, 16)
        for base, key in self._lives.get((topic, ids.partition_of(number)), ()):
            if 0 <= number - base < 1 << ids.SALT_SHIFT:
                return key, number - base
        return None

    def wire_id(self, topic: str, stored: Stored) -> str:
        """By which consumers know it."""
        base = next(base for base, key in self._lives[topic, stored.key[1]] if key == stored.key)
        return f"{base + stored.offset:016x}"

    def lives(self) -> Iterator[tuple[str, Key]]:
        """Every partition that ever was, with its topic."""
        for (topic, _), lives in self._lives.items():
            for _, key in lives:
                yield topic, key

    # ---- what was promised

    def wrong_outcomes(self, history: History) -> Iterator[str]:
        """What publishers were told, against what is stored."""
        for body in history.acked:
            if body not in self.places:
                yield f"{body[:40]!r} was acknowledged at {history.acked[body]:.3f} and is not stored"
        for body, why in history.failed.items():
            if body in self.places:
                yield f"{body[:40]!r} was refused ({why}) and is stored: {self.places[body]}"
        for group in history.groups:
            places = [self.places.get(body) for body in group]
            there = [place for place in places if place is not None]
            if there and (
                len(there) != len(group)
                or {(place.key, place.log_id) for place in there} != {(there[0].key, there[0].log_id)}
                or [place.offset for place in there] != list(range(there[0].offset, there[0].offset + len(group)))
            ):
                yield f"an MPUB is not in one piece: {[body[:20] for body in group]} is at {places}"

    def missing(self, history: History, topic: str, channel: str, keys: list[Key]) -> Iterator[Stored]:
        """What the channel was to get, has not got since then, and nothing excuses."""
        last = history.last.get((topic, channel), {})
        finished = history.finished.get((topic, channel), {})
        for key in keys:
            mine = [
                operation
                for operation in self.operations
                if operation.topic == topic and operation.channel in ("", channel) and operation.number == key[1]
            ]
            again = [operation for operation in mine if operation.again_from is not None]
            drops = [operation for operation in mine if operation.drops_below]
            for stored in self.messages.get(key, ()):
                came = last.get(stored.body, -1.0)
                if came < 0 and not any(drop.may_drop(stored, stored.at) for drop in drops):
                    yield stored
                    continue
                for seek in again:
                    assert seek.again_from is not None
                    if stored.offset < seek.again_from or stored.at > seek.began or came >= seek.began:
                        continue
                    # One that was deferred is not moved by a seek: its FIN counts also after it.
                    if finished.get(stored.body, -1.0) >= (0.0 if seek.finished_excused else seek.began):
                        continue
                    since = stored.at if seek.finished_excused else seek.began
                    if not any(drop is not seek and drop.may_drop(stored, since) for drop in drops):
                        yield stored
                        break

    def excused(self, stored: Stored, topic: str, channel: str, *, but: str = "") -> bool:
        """Whether an operator may be why the channel has not got it, by an operation of another kind than `but`."""
        number = stored.key[1]
        return any(
            op.topic == topic and op.channel in ("", channel) and op.number == number and op.may_drop(stored, stored.at)
            for op in self.operations
            if op.kind != but
        )

    def attempts_broken(self, topic: str, channel: str, number: int, epoch: int, attempts: int, now: float) -> str:
        """Why the leader of this epoch may not deliver a message with so many attempts; empty if it may."""
        mine = [c for c in self.policies if (c.topic, c.channel) == (topic, channel) and c.began <= now]
        binding = [c for c in mine if c.answered <= now and c.binds(number, epoch)]
        known = [c for c in mine if not any(other.began >= c.over for other in binding)]
        limits = [c.fields["max_attempts"] for c in known]
        if not binding or None in limits or attempts <= max(limits):
            return ""
        return f"attempts {attempts}, max_attempts is {limits}"

    def order_broken(self, history: History, topic: str, channel: str, stored: Stored, epoch: int) -> str | None:
        """Why an ordered channel may not deliver this message now."""
        place = (channel, stored.key)
        highest = self._delivered.setdefault(place, {})
        if (last := max((offset for e, offset in highest.items() if e <= epoch), default=-1)) > stored.offset:
            return f"offset {last} came before"
        highest[epoch] = stored.offset
        finished, messages = history.finished.get((topic, channel), {}), self.messages[stored.key]
        for offset in range(self._finished.get(place, 0), stored.offset):
            if messages[offset].body not in finished:
                return f"{messages[offset]} is not finished"
            self._finished[place] = offset + 1
        return None

    def settle(self, now: float) -> None:
        """All is calm: what was not answered happens no more."""
        for operation in self.operations:
            operation.ended = min(operation.ended, now)
        for change in (*self.pauses, *self.policies):
            change.over = min(change.over, now)

    def pause_broken(self, topic: str, channel: str, stored: Stored, epoch: int, now: float) -> Pause | None:
        """The pause that a delivery by the leader of this epoch breaks."""
        for pause in self.pauses:
            if not pause.paused or pause.answered > now or pause.topic != topic or pause.channel not in ("", channel):
                continue
            number = stored.key[1]
            if not pause.binds(number, epoch):
                continue
            if not pause.channel and (stored.at <= pause.answered or not pause.binds(number, stored.epoch)):
                continue  # handed to the channels before
            if not pause.channel and self._passed_by_an_empty(stored, topic):
                continue  # the pump went past it, and a seek brings it back
            if not any(other is not pause and self._ends(other, pause) for other in self.pauses):
                return pause
        return None

    def _passed_by_an_empty(self, stored: Stored, topic: str) -> bool:
        return any(
            op.kind == "empty" and (op.topic, op.channel, op.number) == (topic, "", stored.key[1])
            for op in self.operations
            if op.may_drop(stored, stored.at)
        )

    @staticmethod
    def _ends(other: Pause, pause: Pause) -> bool:
        """Whether `other` may have taken the pause back, or has come after it."""
        same = other.topic == pause.topic and other.channel == pause.channel
        return same and not other.paused and other.over > pause.began


def bodies(data: bytes | bytearray) -> Iterator[bytes]:
    """Of the messages in a batch."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if int.from_bytes(data[at + 4 : at + 8], "big") == MESSAGE:
            yield bytes(data[at + BODY_AT : at + 4 + size])
        at += 4 + size
