"""Random lives of a partition, judged by the naive model.

One history is some dozens of steps of publishers, consumers, administrators, retention and bad luck. Commits may lag
behind writes, leaders stop cleanly or crash with the end of the log cut off, checkpoints are written from snapshots
that lag, files go as soon as they may. At the end everything is drained. Judged all along:

    the model        nothing skipped, nothing finished delivered again, nothing early, nothing twice in flight
    the floor        passes only what is finished or deferred; the committed one never goes back but by a seek
    the files        rebuilding the state from what is left of the log gives the very same bytes, also when the log is
                     cut anywhere behind what retention relied on
    the frames       every message that is handed out is still in the log, at the place that is said
"""

from __future__ import annotations

import random
from collections.abc import Callable

from nsqha.clock import ManualClock
from nsqha.cursor import checkpoint
from nsqha.cursor.channel import Channel
from nsqha.cursor.events import TARGET_END, Abandoned, ChannelEntry, Channels
from nsqha.cursor.limits import Limits
from nsqha.cursor.partition import PartitionCursors
from nsqha.cursor.state import ChannelState, PartitionState
from nsqha.frames import HAS_EVENTS
from tests.unit.cursor.model import FINISHED, MAYBE, PENDING, ChannelModel, Due, Model, Snapshot, check
from tests.unit.cursor.tiny import Entry, Info, Leader, Record, TinyLog, fins

OWNERS = (1, 2, 3)
SMALL = Limits(
    window=24,
    short_delay_s=5.0,
    waiting_max=3,
    singles_max=6,
    changes_per_batch=5,
    checkpoint_bytes_per_batch=200,
    checkpoint_frame_bytes=150,
    checkpoint_every_bytes=1 << 40,
    max_msg_timeout_s=100.0,
)
EPHEMERAL = "e#ephemeral"

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
        self.requested.append(model.epoch_started)
        super().__init__(log, **given)  # type: ignore[arg-type]

    def _write(self, events: bytes, flags: int, frames: list[bytes], count: int) -> None:
        log_id = self.log.log_id + 1
        self.effects_of[log_id], self.requested = self.requested, []
        if events:
            for name, channel in self.cursors.channels.items():
                if not channel.is_dirty and name in self.model.channels:
                    self.model.channels[name].written_in(log_id)
        super()._write(events, flags, frames, count)

    def commit(self, count: int | None = None) -> None:
        for _ in range(len(self.outstanding) if count is None else count):
            entry, data = self.outstanding.pop(0)
            # A seek does not touch what is deferred: what was before the batch and was not finished by it, and what
            # the batch itself deferred before the seek.
            before = {name: offsets_of(state) for name, state in self.cursors.state.channels.items()}
            self.effects += self.cursors.apply(entry, data, self.now)
            self.deferred = {
                name: {o for o in before.get(name, set()) if not model.finished_by(o, entry.log_id)}
                | (offsets_of(self.cursors.state.channels[name]) if name in self.cursors.state.channels else set())
                for name, model in self.model.channels.items()
            }
            for step in self.effects_of.pop(entry.log_id, []):
                step()
            for channel in self.model.channels.values():
                channel.committed(entry.log_id)
            self.after_commit(entry)

    def after_commit(self, entry: Entry) -> None:
        self.encoded[entry.log_id] = checkpoint.encode(self.cursors.state)
        state = self.cursors.state
        check(state.pump == self.model.pump, f"the pump is at {state.pump}, nsqd's at {self.model.pump}")
        check(state.channels.keys() == self.model.channels.keys(), "the channels differ")
        for name, committed in state.channels.items():
            model = self.model.channels[name]
            check(committed.uid == model.uid, f"{name} has another uid")
            check(committed.paused == model.paused or model.ephemeral, f"pause of {name} differs")
            before = self.max_floor.get(committed.uid, 0)
            check(committed.floor >= before, f"the floor of {name} went back from {before} to {committed.floor}")
            self.max_floor[committed.uid] = committed.floor
            if not model.ephemeral:
                self.judge_committed(name)

    def judge_committed(self, name: str) -> None:
        """The committed cursor passes nothing that is unfinished, unless it is deferred."""
        committed, model = self.cursors.state.channels[name], self.model.channels[name]
        held = {ref.offset for ref in committed.deferred.items()}
        for offset, status in model.status.items():
            passed = offset < committed.floor or offset in committed.ranges
            if status == PENDING:
                check(not passed or offset in held, f"{name} has lost {offset}: {committed}")
        check(committed.floor <= self.cursors.state.pump, "a floor is above the pump")
        check(self.cursors.state.log_start[0] <= committed.floor, "log start is above a floor")


class History:
    """One random life."""

    def __init__(
        self,
        seed: int,
        *,
        steps: int = 60,
        ordered: bool = False,
        limits: Limits = SMALL,
        cursors: type[PartitionCursors] = PartitionCursors,
    ) -> None:
        self.rng = random.Random(seed)
        self.steps = steps
        self.ordered = ordered
        self.limits = limits
        self.cursors_class = cursors
        self.model = Model()
        self.log = TinyLog()
        self.clock = ManualClock()
        self.record = Record()
        self.epoch = 0
        self.uids = 0
        self.encoded: dict[int, bytes] = {}
        self.log_unlinked = 0  # batches below this log_id are gone
        self.snapshots: list[PartitionState] = []
        self.swarm: dict[str, float] | None = None
        self.trace: list[str] = []
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.leader = Judged(
            self.model,
            self.log,
            clock=self.clock,
            limits=self.limits,
            ordered=self.ordered,
            record=self.record,
            epoch=self.epoch,
            cursors=self.cursors_class,
        )
        self.leader.encoded = {**self.encoded, **self.leader.encoded}
        self.encoded = self.leader.encoded

    # ---- running

    def run(self) -> None:
        if self.rng.random() < 0.8:
            self.create_channel()
        for _ in range(self.steps):
            step = self.rng.choices(*self.menu())[0]
            self.trace.append(step.__name__)
            step()
        self.trace.append("drain")
        self.drain()

    def menu(self) -> tuple[list[Step], list[float]]:
        steps: dict[Step, int] = {
            self.publish: 12,
            self.publish_deferred: 4,
            self.deliver: 14,
            self.redeliver: 10,
            self.answer_fin: 16,
            self.answer_req: 8,
            self.answer_touch: 2,
            self.answer_old: 3,
            self.pass_time: 8,
            self.lose_consumer: 2,
            self.flush: 6,
            self.create_channel: 2,
            self.delete_channel: 1,
            self.recreate_channel: 1,
            self.old_record: 1,
            self.pause_channel: 2,
            self.pause_topic: 2,
            self.empty_topic: 1,
            self.seek: 3,
            self.empty: 1,
            self.undo: 2,
            self.hold: 3,
            self.commit: 3,
            self.take_snapshot: 2,
            self.write_checkpoint: 2,
            self.move_log_start: 3,
            self.unlink: 3,
            self.rebuild: 2,
            self.cut: 1,
            self.crash: 2,
            self.restart: 2,
        }
        if not self.ordered:
            steps[self.abandon] = 1
            steps[self.create_ephemeral] = 1
            steps[self.delete_ephemeral] = 1
        if self.swarm is None:
            # Some of everything is rarely much of anything: each life has its own habits.
            self.swarm = {step.__name__: self.rng.choice([0.3, 1, 1, 4]) for step in steps}
        return list(steps), [weight * self.swarm[step.__name__] for step, weight in steps.items()]

    @property
    def now_ns(self) -> int:
        return self.clock.wall_ns()

    def some_channel(self) -> tuple[Channel, ChannelModel] | None:
        """A live channel that the model knows, too (with commits lagging one may be ahead)."""
        names = sorted(self.leader.cursors.channels.keys() & self.model.channels.keys())
        if not names:
            return None
        name = self.rng.choice(names)
        return self.leader.cursors.channels[name], self.model.channels[name]

    # ---- publishers

    def publish(self, deliver_at: int = 0) -> None:
        count = self.rng.randint(1, 5)
        # Events come first in a batch, then its messages.
        self._request(lambda: self.model.published(count, deliver_at))
        self.leader.publish(count, deliver_at=deliver_at, force=self.rng.random() < 0.3)

    def publish_deferred(self) -> None:
        self.publish(self.now_ns + self.rng.choice([1, 20, 200]) * 1_000_000_000)

    def flush(self) -> None:
        self.leader.flush()

    # ---- consumers

    def deliver(self) -> None:
        if (found := self.some_channel()) is not None:
            self._deliver(*found, self.rng.randint(1, 6))

    def _deliver(self, channel: Channel, model: ChannelModel, count: int) -> int:
        total = 0
        owner = self.rng.choice(OWNERS)
        deadline = self.clock.monotonic() + self.rng.choice([10.0, 60.0])
        while count > 0 and (run := channel.next_run(self.leader.cursors.pump, count)) is not None:
            first, end = run
            check(end <= self.model.pump, f"{model.name} is to read up to {end}, the pump is at {self.model.pump}")
            stamped = [o for o in range(first, end) if o in self.model.deliver_at]
            if stamped and stamped[0] == first:
                if channel.meet(first, self.model.deliver_at[first], self.leader.now):
                    model.due.setdefault(first, Due(self.model.deliver_at[first], long=True))
                    continue
                end = first + 1
            elif stamped:
                end = stamped[0]
            if self.ordered:
                self.judge_order(model, first)
            for offset in range(first, end):
                self.judge_early(offset)
                model.delivered(offset, owner, 1, self.now_ns)
                self.leader.log.frame_of(offset)
            channel.delivered(first, end, owner, deadline)
            behind = channel.floor if model.ephemeral else channel.committed.floor
            check(end - behind <= self.limits.window, f"{model.name} reads {end - behind} ahead of its floor")
            total += end - first
            count -= end - first
        return total

    def redeliver(self) -> None:
        if (found := self.some_channel()) is not None:
            self._redeliver(*found, self.rng.randint(1, 6))

    def _redeliver(self, channel: Channel, model: ChannelModel, count: int) -> int:
        owner = self.rng.choice(OWNERS)
        deadline = self.clock.monotonic() + self.rng.choice([10.0, 60.0])
        for n in range(count):
            redelivery = channel.redelivery(self.leader.now)
            if redelivery is None:
                return n
            self.judge_early(redelivery.offset)
            if self.ordered:
                check(not model.in_flight, "two messages of an ordered channel in flight")
                if not model.deliveries.get(redelivery.offset, 0):
                    self.judge_order(model, redelivery.offset)
            model.delivered(redelivery.offset, owner, redelivery.attempts, self.now_ns)
            self.leader.check_frame(redelivery)
            channel.redelivered(redelivery, owner, deadline)
        return count

    def judge_early(self, offset: int) -> None:
        at = self.model.deliver_at.get(offset, 0)
        check(at <= self.now_ns, f"{offset} is delivered before its deliver-at time")

    def judge_order(self, model: ChannelModel, offset: int) -> None:
        check(not model.in_flight, "two messages of an ordered channel in flight")
        for other, status in model.status.items():
            if other < offset:
                check(status != PENDING, f"{offset} is first delivered before {other} is finished")
                check(other not in model.uncertain, f"{offset} is first delivered before FIN of {other} is committed")

    def _held(self, model: ChannelModel) -> tuple[int, list[int]] | None:
        owners = sorted(set(model.in_flight.values()))
        if not owners:
            return None
        owner = self.rng.choice(owners)
        return owner, [offset for offset, o in model.in_flight.items() if o == owner]

    def answer_fin(self) -> None:
        if (found := self.some_channel()) is None or (held := self._held(found[1])) is None:
            return
        channel, model = found
        owner, offsets = held
        count = self.rng.randint(1, len(offsets))
        self._fin(
            channel, model, owner, self.rng.sample(offsets, count) if self.rng.random() < 0.5 else offsets[:count]
        )

    def _fin(self, channel: Channel, model: ChannelModel, owner: int, offsets: list[int]) -> None:
        """As the broker: the run, and one by one where it stops."""
        data = fins(*offsets)
        pos = 0
        while pos < len(data):
            after, count = channel.fin_run(data, pos, len(data), owner)
            check(after - pos == 21 * count, "a run finished more or fewer than it went over")
            for at in range(pos, after, 21):
                self._told_fin(model, offsets[at // 21], owner, None)
            pos = after
            if pos < len(data):
                offset = offsets[pos // 21]
                self._told_fin(model, offset, owner, channel.fin(offset, owner))
                pos += 21

    def _told_fin(self, model: ChannelModel, offset: int, owner: int, why: str | None) -> None:
        wanted = model.answer(offset, owner, fin_or_req=True)
        check(why == wanted, f"FIN {offset} of {owner} got {why}, not {wanted}")
        if why is None:
            model.finished(offset)

    def answer_old(self) -> None:
        """A consumer answers what it does not hold, or not any more."""
        if (found := self.some_channel()) is None or not found[1].status:
            return
        channel, model = found
        old = [key for key, count in model.forgotten.items() if count]
        if old and self.rng.random() < 0.8:
            owner, offset = self.rng.choice(old)
        else:
            owner, offset = self.rng.choice(OWNERS), self.rng.choice(list(model.status))
        if self.rng.random() < 0.7:
            self._fin(channel, model, owner, [offset])
        else:
            why = channel.touch(offset, owner, self.leader.now, 10.0)
            check(why == model.answer(offset, owner, fin_or_req=False), f"TOUCH {offset} of {owner} got {why}")

    def answer_req(self) -> None:
        if (found := self.some_channel()) is None or (held := self._held(found[1])) is None:
            return
        channel, model = found
        owner, offsets = held
        offset = self.rng.choice(offsets)
        delay_s = self.rng.choice([0, 0, 2, 30, 300])
        wanted = model.answer(offset, owner, fin_or_req=True)
        why = channel.req(offset, owner, delay_s * 1000, self.leader.now)
        check(why == wanted, f"REQ {offset} of {owner} got {why}, not {wanted}")
        if why is None:
            due = Due(self.now_ns + delay_s * 1_000_000_000, long=delay_s > self.limits.short_delay_s)
            model.requeued(offset, due if delay_s else None)

    def answer_touch(self) -> None:
        if (found := self.some_channel()) is None or (held := self._held(found[1])) is None:
            return
        channel, model = found
        owner, offsets = held
        offset = self.rng.choice(offsets)
        wanted = model.answer(offset, owner, fin_or_req=False)
        why = channel.touch(offset, owner, self.leader.now, 60.0)
        check(why == wanted, f"TOUCH {offset} of {owner} got {why}, not {wanted}")

    def pass_time(self) -> None:
        self.clock.advance(self.rng.choice([0.2, 2.0, 15.0, 70.0]))
        self._expire()

    def _expire(self) -> None:
        for name, channel in self.leader.cursors.channels.items():
            model = self.model.channels.get(name)
            back = channel.expire(self.leader.now)
            if model is not None:
                self._resync(channel, model, sum(count for _, count in back))

    def _resync(self, channel: Channel, model: ChannelModel, back: int) -> None:
        """Deadlines are the channel's business; what is in flight afterwards must be part of what was."""
        held = {o: owner for o, owner in model.in_flight.items() if channel._flight.refuse(o, owner) is None}
        check(len(held) == channel.in_flight, f"{channel.in_flight} in flight, {len(held)} by the model")
        check(len(held) + back == len(model.in_flight), "what timed out was not in flight, or was not told")
        model.in_flight = held

    def lose_consumer(self) -> None:
        if (found := self.some_channel()) is not None:
            channel, model = found
            owner = self.rng.choice(OWNERS)
            check(channel.detach(owner, self.leader.now) == model.detached(owner), "detach gave back another count")

    # ---- administrators

    def _request(self, step: Step) -> None:
        self.leader.requested.append(step)

    def _reconcile(self, **changes: object) -> None:
        self.record = self.record._replace(version=self.record.version + 1, **changes)
        self._write_record()

    def _write_record(self) -> None:
        self.leader.record = self.record
        record = self.record
        wanted = {name: (info.uid, info.paused) for name, info in record.channels.items()}
        if self.leader.cursors.reconcile(record):
            self._request(lambda: self.model.listed(wanted, record.paused))
        self.leader.flush()

    def create_channel(self) -> None:
        free = [name for name in ("a", "b", "c") if name not in self.record.channels]
        if free:
            self.uids += 1
            self._reconcile(channels={**self.record.channels, self.rng.choice(free): Info(self.uids)})

    def delete_channel(self) -> None:
        if self.record.channels:
            gone = self.rng.choice(sorted(self.record.channels))
            self._reconcile(channels={n: info for n, info in self.record.channels.items() if n != gone})

    def recreate_channel(self) -> None:
        """Deleted and created again before any leader looked."""
        if self.record.channels:
            self.uids += 1
            self._reconcile(
                channels={**self.record.channels, self.rng.choice(sorted(self.record.channels)): Info(self.uids)}
            )

    def old_record(self) -> None:
        """A leader that read the record long ago writes what it read."""
        if self.record.version > 1:
            event = Channels(self.record.version - 1, self.rng.random() < 0.5, (ChannelEntry("a", 1 << 40),))
            self.leader._write(event.encode(), HAS_EVENTS, [], 0)

    def pause_channel(self) -> None:
        if self.record.channels:
            name = self.rng.choice(sorted(self.record.channels))
            info = self.record.channels[name]
            self._reconcile(channels={**self.record.channels, name: info._replace(paused=not info.paused)})

    def pause_topic(self) -> None:
        self._reconcile(paused=not self.record.paused)

    def create_ephemeral(self) -> None:
        if EPHEMERAL not in self.leader.cursors.channels:
            self.uids += 1
            uid = self.uids
            self.leader.cursors.create_ephemeral(EPHEMERAL, uid)
            self._request(lambda: self.model.ephemeral(EPHEMERAL, uid, True))
            self.leader.flush()

    def delete_ephemeral(self) -> None:
        if EPHEMERAL in self.leader.cursors.channels:
            uid = self.leader.cursors.channels[EPHEMERAL].uid
            self.leader.cursors.delete_ephemeral(EPHEMERAL)
            self._request(lambda: self.model.ephemeral(EPHEMERAL, uid, False))
            self.leader.flush()

    def empty_topic(self) -> None:
        self.leader.cursors.topic_empty()
        self._request(self.model.topic_emptied)
        self.leader.flush()

    def seek(self) -> None:
        if (found := self.some_channel()) is not None:
            target = self.rng.choice([0, TARGET_END, self.rng.randint(0, self.log.end_offset + 2)])
            self.leader.cursors.seek(found[0].name, target)
            self._seek_requested(found[1], target)

    def empty(self) -> None:
        if (found := self.some_channel()) is not None:
            self.leader.cursors.empty(found[0].name)
            self._seek_requested(found[1], TARGET_END, drop=True)

    def undo(self) -> None:
        if (found := self.some_channel()) is None:
            return
        if found[0].committed.undo is None:
            target = self.rng.randint(0, self.log.end_offset)
            self.leader.cursors.seek(found[0].name, target)
            self._seek_requested(found[1], target)
        if found[0].committed.undo is not None:
            self.leader.cursors.undo(found[0].name)
            self._seek_requested(found[1], 0, undo=True)

    def _seek_requested(self, model: ChannelModel, target: int, *, drop: bool = False, undo: bool = False) -> None:
        leader = self.leader
        name = model.name
        back: list[Snapshot] = []

        def sought() -> None:
            if name not in self.model.channels or self.model.channels[name].uid != model.uid:
                return
            channel = leader.cursors.channels[name]
            committed = channel.committed
            held = leader.deferred[name]
            if model.ephemeral:
                held = {ref.offset for ref in channel.postponed.committed.items()}
            went_back = model.undo if undo else None
            if undo and went_back is None:
                return
            goal = went_back.floor if went_back is not None else target
            goal = min(max(goal, leader.cursors.state.log_start[0]), self.model.pump)
            if went_back is not None:
                went_back = Snapshot(goal, went_back.finished, went_back.maybe)
            model.sought(goal, self.model.pump, held, drop=drop, undo=went_back)
            model.undo = back[0]
            leader.max_floor[committed.uid] = 0

        self._request(sought)
        channel = leader.cursors.channels[name]
        events, flags = leader.cursors.take_events(leader.now)
        back.append(
            Snapshot(
                channel.written.floor,
                {o for o, status in model.status.items() if status == FINISHED},
                {o for o, status in model.status.items() if status == MAYBE},
            )
        )
        leader._write(events, flags, [], 0)

    # ---- commits

    def hold(self) -> None:
        self.leader.hold = True

    def commit(self) -> None:
        self.leader.commit(self.rng.randint(0, len(self.leader.outstanding)))
        if not self.leader.outstanding:
            self.leader.hold = False

    def commit_all(self) -> None:
        self.leader.hold = False
        self.leader.commit()
        self.leader.flush()

    # ---- checkpoints and retention

    def take_snapshot(self) -> None:
        self.snapshots.append(self.leader.cursors.state.snapshot())

    def write_checkpoint(self) -> None:
        if not self.snapshots:
            self.take_snapshot()
        snapshot = self.snapshots.pop(self.rng.randrange(len(self.snapshots)))
        self.leader.cursors.begin_checkpoint(snapshot)

    def _border(self, highest: int) -> tuple[int, int] | None:
        """A place between batches at or below an offset, where a log could start."""
        borders = [
            (entry.end_offset, entry.end_position) for entry, _ in self.log.batches if entry.end_offset <= highest
        ]
        return self.rng.choice(borders) if borders else None

    def move_log_start(self) -> None:
        cursors = self.leader.cursors
        careless = self.rng.random() < 0.3  # a leader that did not look; applying must cap it
        place = self._border(self.log.end_offset if careless else cursors.log_start_limit())
        if place is None:
            return
        place_is_free = False
        if not careless or self.rng.random() < 0.5:
            for ref in cursors.to_carry(*place):
                frame = self.log.frame_at(ref.position) if ref.position else self.log.frame_of(ref.offset)
                cursors.carry(ref.offset, frame)
            if self.rng.random() < 0.5:
                self.leader.flush()
                place_is_free = not careless and not self.leader.hold
        cursors.propose_log_start(*place)
        self.leader.flush()
        if place_is_free:
            start = cursors.log_start
            check(
                start[0] >= place[0] and start[1] >= place[1], f"log start is {start}, nothing holds it below {place}"
            )

    def abandon(self) -> None:
        if (found := self.some_channel()) is None or found[1].ephemeral:
            return
        channel, model = found
        place = self._border(self.leader.cursors.pump)
        if place is None:
            return
        for ref in self.leader.cursors.to_carry(*place):
            frame = self.log.frame_at(ref.position) if ref.position else self.log.frame_of(ref.offset)
            self.leader.cursors.carry(ref.offset, frame)
        self.leader.cursors.propose_log_start(*place, (Abandoned(channel.uid, channel.floor, place[0]),))

        def abandoned() -> None:
            live = self.leader.cursors.channels.get(model.name)
            if live is None or live.uid != model.uid:
                return
            end = min(place[0], self.model.pump)
            held = self.leader.deferred[model.name]
            for offset, status in model.status.items():
                if offset < end and offset not in held and status != FINISHED:
                    model.status[offset] = FINISHED
                    model.in_flight.pop(offset, None)
                    model.due.pop(offset, None)
            for offset in list(model.uncertain):
                if offset < end and offset not in held:
                    del model.uncertain[offset]

        self._request(abandoned)
        self.leader.flush()

    def unlink(self) -> None:
        """Files hold one batch each here; those that may go, go."""
        cursors, batches = self.leader.cursors, self.log.batches
        durable = self.leader.outstanding[0][0].log_id - 1 if self.leader.outstanding else self.log.log_id
        if cursors.needed_durable > durable:
            return
        while len(batches) > 1:
            entry = batches[0][0]
            if not cursors.may_unlink(
                end_offset=entry.end_offset, end_position=entry.end_position, end_log_id=entry.log_id
            ):
                return
            del batches[0]
            self.log_unlinked = entry.log_id + 1

    def rebuild(self) -> None:
        """The files as they are, without what is not committed, give the state."""
        applied = self.leader.cursors.state.applied.log_id
        self._judge_rebuilt(applied)

    def cut(self) -> None:
        """A log that ends earlier gives the state of then."""
        lowest = max(self.leader.cursors.needed_durable, self.log_unlinked, 1)
        applied = self.leader.cursors.state.applied.log_id
        if lowest < applied:
            self._judge_rebuilt(self.rng.randint(lowest, applied))

    def _judge_rebuilt(self, log_id: int) -> None:
        data = {entry.log_id: data for entry, data in self.log.batches}
        entries = [entry for entry, _ in self.log.batches if entry.log_id <= log_id]
        if not entries:
            return
        state = checkpoint.rebuild(lambda: entries, lambda entry: data[entry.log_id])
        check(checkpoint.encode(state) == self.encoded[log_id], f"the state rebuilt as of {log_id} differs")

    # ---- bad luck

    def crash(self) -> None:
        self.leader.hold = True
        self.commit()
        gone = len(self.leader.outstanding)
        for entry, _ in self.leader.outstanding:
            self.log.end_offset, self.log.end_position = entry.first_offset, entry.position
            self.log.log_id = entry.log_id - 1
            break
        if gone:
            del self.log.batches[-gone:]
        self._after_stop()

    def _after_stop(self) -> None:
        state = self.leader.cursors.state
        for name, model in self.model.channels.items():
            committed = state.channels[name]
            model.crashed({ref.offset for ref in committed.deferred.items()})
        self.snapshots.clear()
        old = self.leader
        self.start()
        self.leader.max_floor = old.max_floor
        self._write_record()

    def restart(self) -> None:
        """A clean stop: what was in flight is told, so attempts go on."""
        self.commit_all()
        self.leader.cursors.prepare_stop()
        self.leader.flush()
        known = {name: dict(model.deliveries) for name, model in self.model.channels.items()}
        self._after_stop()
        for name, deliveries in known.items():
            if name in self.model.channels:
                self.model.channels[name].deliveries = deliveries
        self.rebuild()

    # ---- the end

    def drain(self) -> None:
        """Everything that is still to be delivered is, and then nothing is left."""
        self.commit_all()
        if self.record.paused:
            self.pause_topic()
        for name, info in self.record.channels.items():
            if info.paused:
                self._reconcile(channels={**self.record.channels, name: info._replace(paused=False)})
        for name, channel in self.leader.cursors.channels.items():
            self._drain(channel, self.model.channels[name])
        self.commit_all()
        for name, channel in self.leader.cursors.channels.items():
            if not channel.ephemeral:
                self.judge_drained(channel, self.model.channels[name])
        self.rebuild()
        again = Leader(self.log, clock=self.clock, limits=self.limits, ordered=self.ordered, epoch=self.epoch + 1)
        for channel in again.cursors.channels.values():
            check(not again.deliver(channel, 1) and not again.redeliver(channel, 1), "finished comes after a restart")

    def _drain(self, channel: Channel, model: ChannelModel) -> None:
        idle = 0
        while idle < 12:
            found = self._redeliver(channel, model, 50) + self._deliver(channel, model, 50)
            for owner in OWNERS:
                self._fin(channel, model, owner, [o for o, held in list(model.in_flight.items()) if held == owner])
            self.commit_all()
            if not found:
                idle += 1
                self.clock.advance(60.0)
                self._expire()
            else:
                idle = 0
        left = [offset for offset, status in model.status.items() if status == PENDING]
        check(not left, f"{model.name} never delivers {left}: {channel}")

    def judge_drained(self, channel: Channel, model: ChannelModel) -> None:
        end = self.leader.cursors.pump
        committed = channel.committed
        check(committed.floor == channel.floor == channel.next_read == end, f"{channel} is not at the end {end}")
        check(not committed.ranges, f"{channel} has ranges left: {committed.ranges}")
        check(len(committed.deferred) == 0 == len(channel.postponed), f"{channel} has deferred messages left")
        check(channel.in_flight == 0 == channel.depth(end), f"{channel} counts what is not there")
        check(channel.deferred_count == 0, f"{channel} counts deferred messages that are not there")
        check(channel.uncommitted_progress == 0 == channel.postponed.uncommitted, f"{channel} has news after a flush")
