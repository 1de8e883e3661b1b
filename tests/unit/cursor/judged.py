"""A leader whose committed effects are told to the naive model, in the order of the log, and judged by it."""

from __future__ import annotations

from collections.abc import Callable

from nsqha.cursor.committed import checkpoint
from nsqha.cursor.committed.state import ChannelState
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.passing import PassingChannels
from nsqha.election.policy import ChannelPolicy
from tests.unit.cursor.counted import Passed, Tally, judge_law
from tests.unit.cursor.model import PENDING, Model, check
from tests.unit.cursor.tiny import Entry, Leader, TinyLog

SMALL = ChannelLimits(
    window=24,
    short_delay_s=5.0,
    waiting_max=3,
    singles_max=6,
    changes_per_batch=5,
    checkpoint_bytes_per_batch=200,
    checkpoint_frame_bytes=150,
    checkpoint_every_bytes=1 << 40,
    max_msg_timeout_s=100.0,
    retry_after_max=4,
    share_of=8,
    share=4,
    retries_at_once=3,
)
Step = Callable[[], None]


def offsets_of(state: ChannelState) -> set[int]:
    return {ref.offset for ref in state.deferred.items()}


class Judged(Leader):
    """A leader whose committed effects are told to the model in the order of the log."""

    def __init__(self, model: Model, log: TinyLog, **given: object) -> None:
        self.model = model
        self.requested: list[Step] = []  # since the last batch: what its events will do
        self.effects_of: dict[int, list[Step]] = {}
        self.encoded: dict[int, bytes] = {}
        self.max_floor: dict[int, int] = {}
        self.record = given["record"]  # type: ignore[assignment]
        self.policy = ChannelPolicy()  # that the leader follows
        self.published_at: dict[int, int] = {}
        self.tallies: dict[Channel, Tally] = {}
        self._watched: PassingChannels | None = None
        self._passed: list[tuple[str, int]] = []
        self.requested.append(model.epoch_started)
        super().__init__(log, **given)  # type: ignore[arg-type]

    def tally_of(self, channel: Channel) -> Tally:
        return self.tallies.setdefault(channel, Tally())

    def _watch(self) -> None:
        """Have what policies pass over judged."""
        passing = self.cursors.passing
        if self._watched is passing:
            return
        self._watched, look = passing, passing.look

        def judged(moved: bool = True) -> None:
            policy = self.policy
            if policy.skip is None and policy.ttl_ms is None and policy.max_depth is None:
                look(moved)
                return
            channels = [c for c in self.cursors.channels.values() if not c.committed.reader]
            passed = {channel: Passed(channel, channel.cursor.end) for channel in channels}
            look(moved)
            for channel, each in passed.items():
                exact = not (self.ordered or channel.ephemeral)
                tally = self.tally_of(channel)
                gone = each.judge(policy, tally, self.published_at, self.clock.wall_ns(), exact=exact)
                self._passed += [(channel.name, offset) for offset in gone]

        passing.look = judged  # type: ignore[method-assign]

    def told_passed(self) -> None:
        """The model hears what policies passed over."""
        for name, offset in self._passed:
            self.model.channels[name].passed_over(offset)
        self._passed = []

    def expire(self) -> None:
        """What becomes too old is passed over, as the broker looks for it once a second."""
        self._watch()
        end = self.log.end_offset

        def first_since(time_ns: int) -> int:
            return next((offset for offset in range(end) if self.published_at[offset] >= time_ns), end)

        if self.cursors.passing:
            self.cursors.passing.expire(self.clock.wall_ns(), first_since)
            self.told_passed()

    def _write(self, events: bytes, flags: int, frames: list[bytes], count: int) -> None:
        log_id = self.log.log_id + 1
        self.effects_of[log_id], self.requested = self.requested, []
        self.published_at.update(dict.fromkeys(range(self.log.end_offset, self.log.end_offset + count), self._now_ns))
        if events:
            for name, channel in self.cursors.channels.items():
                if not channel.cursor.is_dirty and name in self.model.channels:
                    self.model.channels[name].written_in(log_id)
        super()._write(events, flags, frames, count)

    @property
    def _now_ns(self) -> int:
        return self.clock.wall_ns()

    def commit(self, count: int | None = None) -> None:
        self._watch()
        for _ in range(len(self.outstanding) if count is None else count):
            entry, data = self.outstanding.pop(0)
            # A seek does not touch what is deferred: what was before the batch and was not finished by it, and what
            # the batch itself deferred before the seek.
            self.applied_ns = entry.timestamp_ns
            before = {name: offsets_of(state) for name, state in self.cursors.state.channels.items()}
            self.effects += self.cursors.apply(entry, data, self.now)
            self.deferred = {
                name: {o for o in before.get(name, set()) if not model.finished_by(o, entry.log_id)}
                | (offsets_of(self.cursors.state.channels[name]) if name in self.cursors.state.channels else set())
                for name, model in self.model.channels.items()
            }
            self.model.begins_at(self.cursors.state.log_start[0])
            for step in self.effects_of.pop(entry.log_id, []):
                step()
            self.told_passed()
            for channel in self.model.channels.values():
                channel.committed(entry.log_id)
                channel.log_begins(self.cursors.state.log_start[0])
            self.after_commit(entry)

    def after_commit(self, entry: Entry) -> None:
        self.encoded[entry.log_id] = checkpoint.encode(self.cursors.state)
        state = self.cursors.state
        self.model.judge_held(state.log_start[0], self.cursors.retention.holds(entry.timestamp_ns), entry.timestamp_ns)
        check(state.pump == self.model.pump, f"the pump is at {state.pump}, nsqd's at {self.model.pump}")
        known = self.model.channels.keys() | self.model.readers.keys()
        check(state.channels.keys() == known, "the channels differ")
        for name, reader in self.model.readers.items():
            channel = state.channels[name]
            check(channel.reader and channel.uid == reader.uid, f"{name} is not the reader's that was made")
            check(channel.floor == reader.floor, f"the reader's floor is at {channel.floor}, not at {reader.floor}")
            check(len(channel.deferred) == 0, "a message is deferred for a reader")
            check(state.log_start[0] <= channel.floor, "log start is above a reader's floor")
        for name in self.model.channels:
            committed = state.channels[name]
            model = self.model.channels[name]
            check(committed.uid == model.uid, f"{name} has another uid")
            check(committed.paused == model.paused or model.ephemeral, f"pause of {name} differs")
            before = self.max_floor.get(committed.uid, 0)
            check(committed.floor >= before, f"the floor of {name} went back from {before} to {committed.floor}")
            self.max_floor[committed.uid] = committed.floor
            if not model.ephemeral:
                self.judge_committed(name)

    def judge_counts(self) -> None:
        """Nothing has left a channel uncounted; called when all that was asked for is committed."""
        for name, model in self.model.channels.items():
            channel = self.cursors.channels[name]
            self.tally_of(channel).judge(channel)
            judge_law(channel, model, self.cursors.state.pump, self._now_ns)

    def judge_committed(self, name: str) -> None:
        """The committed cursor passes nothing that is unfinished, unless it is deferred."""
        committed, model = self.cursors.state.channels[name], self.model.channels[name]
        held = {ref.offset for ref in committed.deferred.items()}
        check(not any(offset in committed.ranges for offset in held), f"{name} has finished what is deferred")
        for offset, status in model.status.items():
            passed = offset < committed.floor or offset in committed.ranges
            if status == PENDING and offset not in model.put_back:
                check(not passed or offset in held, f"{name} has lost {offset}: {committed}")
        check(committed.floor <= self.cursors.state.pump, "a floor is above the pump")
        check(self.cursors.state.log_start[0] <= committed.floor, "log start is above a floor")
