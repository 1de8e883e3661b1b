"""A partition in a few lines: an in-memory log, and a leader that drives PartitionCursors over it.

Bodies are not looked at anywhere in the channel core, so a message's body is its offset in the order of publishing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nsqha import hot
from nsqha.clock import ManualClock, Now, read
from nsqha.cursor.committed.loading import load
from nsqha.cursor.committed.state import EntryLike, PartitionState
from nsqha.cursor.events import Attributes, EpochStart
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.channel import Channel, Redelivery
from nsqha.cursor.partition import PartitionCursors
from nsqha.election.policy import ChannelPolicy, InForce, PoliciesSaid, in_force
from nsqha.frames import HAS_ATTRIBUTES, HAS_EVENTS

ID_BASE = 5 << 30


class Place(NamedTuple):
    log_id: int
    offset: int
    position: int


class Entry(NamedTuple):
    log_id: int
    epoch: int
    first_offset: int
    count: int
    position: int
    size: int
    chain: int
    flags: int
    timestamp_ns: int = 0

    @property
    def end_offset(self) -> int:
        return self.first_offset + self.count

    @property
    def end_position(self) -> int:
        return self.position + self.size


class TinyLog:
    """Batches, in order; `first` counts those that retention took away."""

    def __init__(self) -> None:
        self.batches: list[tuple[Entry, bytes]] = []
        self.end_offset = 0
        self.end_position = 0
        self.log_id = 0

    def append(self, data: bytes, *, count: int, flags: int, epoch: int, timestamp_ns: int = 0) -> Entry:
        self.log_id += 1
        chain = hash((self.log_id, epoch, data)) & 0xFFFF_FFFF
        entry = Entry(
            self.log_id, epoch, self.end_offset, count, self.end_position, len(data), chain, flags, timestamp_ns
        )  # fmt: skip
        self.batches.append((entry, data))
        self.end_offset += count
        self.end_position += len(data)
        return entry

    @property
    def start(self) -> Place:
        if not self.batches:
            return self.end
        first = self.batches[0][0]
        return Place(first.log_id, first.first_offset, first.position)

    @property
    def end(self) -> Place:
        return Place(self.log_id + 1, self.end_offset, self.end_position)

    def entry(self, log_id: int) -> Entry:
        assert self.start.log_id <= log_id < self.end.log_id, "asked for an entry that is not there"
        return self.batches[log_id - self.start.log_id][0]

    def entries(self, first_log_id: int, end_log_id: int) -> Iterable[Entry]:
        for log_id in range(max(first_log_id, self.start.log_id), min(end_log_id, self.end.log_id)):
            yield self.entry(log_id)

    def read(self, entry: EntryLike) -> bytes:
        found, data = self.batches[entry.log_id - self.start.log_id]
        assert found == entry
        return data

    def rebuild(self, end_log_id: int | None = None) -> PartitionState:
        """The state that it says, without a cache."""
        return load(self, self.read, end_log_id=end_log_id).state

    def frame_at(self, position: int) -> bytes:
        for entry, data in self.batches:
            if entry.position <= position < entry.end_position:
                at = position - entry.position
                size = int.from_bytes(data[at : at + 4])
                assert data[at + 4 : at + 8] == b"\0\0\0\2", "no message there"
                return data[at : at + 4 + size]
        raise AssertionError(f"position {position} is not in the log")

    def frame_of(self, offset: int) -> bytes:
        for entry, data in self.batches:
            if entry.first_offset <= offset < entry.end_offset:
                at, here = 0, entry.first_offset
                while True:
                    at = hot.skip_control(data, at, len(data))
                    after, count = hot.walk(data, at, len(data), 1)
                    assert count == 1
                    if here == offset:
                        return data[at:after]
                    at, here = after, here + 1
        raise AssertionError(f"offset {offset} is not in the log")


class Info(NamedTuple):
    uid: int
    paused: bool = False
    reader: bool = False


class Record(NamedTuple):
    version: int = 0
    paused: bool = False
    channels: dict[str, Info] = {}
    policy: ChannelPolicy = ChannelPolicy()  # of all channels

    @property
    def policies(self) -> PoliciesSaid:
        return PoliciesSaid({}, self.policy)

    def changed_since(self, before: Record) -> set[str]:
        names = before.channels.keys() | self.channels.keys()
        return {name for name in names if before.channels.get(name) != self.channels.get(name)}

    def policy_in_force(self, name: str) -> Mapping[str, InForce]:
        return in_force(ChannelPolicy(), self.policy)


class Leader:
    """Publishes, writes events, commits and delivers; commits at once unless `hold` is set."""

    def __init__(
        self,
        log: TinyLog | None = None,
        *,
        clock: ManualClock | None = None,
        limits: ChannelLimits | None = None,
        ordered: bool = False,
        record: Record | None = None,
        epoch: int = 1,
        cursors: type[PartitionCursors] = PartitionCursors,
    ) -> None:
        self.log = log if log is not None else TinyLog()
        self.clock = clock if clock is not None else ManualClock()
        self.record = record if record is not None else Record()
        self.epoch = epoch
        self.ordered = ordered
        self.hold = False
        self.outstanding: list[tuple[Entry, bytes]] = []
        self.cursors = cursors(id_base=ID_BASE, state=self.log.rebuild(), limits=limits, ordered=ordered)
        self.effects: list[object] = []
        self._write(EpochStart(epoch).encode(), HAS_EVENTS, [], 0)

    # ---- writing

    @property
    def now(self) -> Now:
        return read(self.clock)

    def publish(self, count: int = 1, *, deliver_at: int = 0, force: bool = False) -> range:
        """A batch of messages behind whatever events are due. Returns their offsets."""
        first = self.log.end_offset
        frames = []
        for offset in range(first, first + count):
            frame = hot.frame(b"m%d" % offset)
            if deliver_at:
                frame = Attributes(1, deliver_at).encode() + frame
            frames.append(frame)
        events, flags = self.cursors.take_events(self.now, force=force)
        self._write(events, flags | (HAS_ATTRIBUTES if deliver_at else 0), frames, count)
        return range(first, first + count)

    def flush(self) -> None:
        """Write what events there are, without messages, until there are none."""
        for _ in range(100):
            events, flags = self.cursors.take_events(self.now, force=True)
            if not events:
                return
            self._write(events, flags, [], 0)
        raise AssertionError("events never end")

    def _write(self, events: bytes, flags: int, frames: list[bytes], count: int) -> None:
        data = bytearray(events + b"".join(frames))
        now_ns = self.clock.wall_ns()
        hot.stamp(data, len(events), ID_BASE + self.log.end_offset, now_ns)
        entry = self.log.append(bytes(data), count=count, flags=flags, epoch=self.epoch, timestamp_ns=now_ns)
        self.outstanding.append((entry, bytes(data)))
        if not self.hold:
            self.commit()

    def commit(self, count: int | None = None) -> None:
        for _ in range(len(self.outstanding) if count is None else count):
            entry, data = self.outstanding.pop(0)
            self.effects += self.cursors.apply(entry, data, self.now)

    # ---- the record

    def _reconcile(self) -> None:
        self.cursors.requests.reconcile(self.record)
        self.flush()

    def create(self, name: str, uid: int | None = None, *, reader: bool = False) -> Channel:
        uid = uid if uid is not None else len(name) * 1000 + self.record.version + 1
        channels = {**self.record.channels, name: Info(uid, reader=reader)}
        self.record = self.record._replace(version=self.record.version + 1, channels=channels)
        self._reconcile()
        return self.cursors.channels[name]

    def delete(self, name: str) -> None:
        channels = {n: info for n, info in self.record.channels.items() if n != name}
        self.record = self.record._replace(version=self.record.version + 1, channels=channels)
        self._reconcile()

    def pause(self, name: str, paused: bool = True) -> None:
        channels = {**self.record.channels, name: self.record.channels[name]._replace(paused=paused)}
        self.record = self.record._replace(version=self.record.version + 1, channels=channels)
        self._reconcile()

    def ask(self, **policy: Any) -> None:
        """The policy of all channels is this now."""
        self.record = self.record._replace(version=self.record.version + 1, policy=ChannelPolicy(**policy))
        self._reconcile()

    def pause_topic(self, paused: bool = True) -> None:
        self.record = self.record._replace(version=self.record.version + 1, paused=paused)
        self._reconcile()

    # ---- consuming

    def deliver(self, channel: Channel, count: int = 1_000_000, *, owner: int = 1, timeout: float = 60.0) -> list[int]:
        """First deliveries, up to `count`."""
        found: list[int] = []
        while count > 0 and (run := channel.next_run(self.cursors.state.pump, count)) is not None:
            first, end = run
            channel.delivered(first, end, owner, self.clock.monotonic() + timeout)
            found += range(first, end)
            count -= end - first
        return found

    def redeliver(
        self, channel: Channel, count: int = 1_000_000, *, owner: int = 1, timeout: float = 60.0
    ) -> list[Redelivery]:
        """Deliveries that are not first ones, up to `count`."""
        found: list[Redelivery] = []
        while len(found) < count and (redelivery := channel.redelivery(self.now)) is not None:
            channel.redelivered(redelivery, owner, self.clock.monotonic() + timeout)
            self.check_frame(redelivery)
            found.append(redelivery)
        return found

    def check_frame(self, redelivery: Redelivery) -> None:
        """The message is where the redelivery says."""
        where = redelivery.position
        frame = self.log.frame_at(where) if where else self.log.frame_of(redelivery.offset)
        assert frame[18:34] == b"%016x" % (ID_BASE + redelivery.offset)

    def fin(self, channel: Channel, *offsets: int, owner: int = 1) -> list[str | None]:
        return [channel.fin(offset, owner) for offset in offsets]

    def restart(self, **changes: object) -> Leader:
        """Another leader on the same log; what was not written is gone."""
        given: dict[str, object] = {
            "clock": self.clock,
            "limits": self.cursors.limits,
            "record": self.record,
            "epoch": self.epoch + 1,
        }
        given.update(changes)
        return Leader(self.log, **given)  # type: ignore[arg-type]


def fins(*offsets: int) -> bytes:
    """FIN lines."""
    return b"".join(b"FIN %016x\n" % (ID_BASE + offset) for offset in offsets)
