"""Random lives of a partition, judged by the naive model.

One history is some dozens of steps of publishers, consumers, administrators, retention and bad luck. Commits may lag
behind writes, leaders stop cleanly or crash with the end of the log cut off, checkpoints are written from snapshots
that lag, files go as soon as they may. At the end everything is drained. Judged all along:

    the model        nothing skipped, nothing finished delivered again, nothing early, nothing twice in flight
    the floor        passes only what is finished or deferred; the committed one never goes back but by a seek
    the files        rebuilding the state from what is left of the log gives the very same bytes, also when the log is
                     cut anywhere behind what retention relied on, or less of it is known to be committed
    the frames       every message that is handed out is still in the log, at the place that is said
"""

from __future__ import annotations

from dataclasses import replace

from nsqha.cursor.committed import checkpoint
from nsqha.cursor.committed.loading import first_checkpoint_end, load
from nsqha.cursor.deferred.dead import Reason, dead_in
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.events import TARGET_END, Abandoned, ChannelsEvent
from nsqha.cursor.listing import ChannelEntry, Listing
from nsqha.cursor.live.acting import Action, act
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.live.looking import MessageState, held
from nsqha.election.policy import ChannelPolicy
from nsqha.errors import Conflict, LimitReached, NotFound
from nsqha.frames import HAS_EVENTS
from tests.unit.cursor.judged import Step
from tests.unit.cursor.life import OWNERS, Life
from tests.unit.cursor.model import FINISHED, MAYBE, PENDING, ChannelModel, Due, Snapshot, check
from tests.unit.cursor.tiny import Info, Leader, TinyLog
from tests.unit.cursor.tiny_cache import CountedLog

EPHEMERAL, READER = "e#ephemeral", "r"


POLICIES = (
    ChannelPolicy(),
    ChannelPolicy(retry_ms=1000, retry_max_ms=4000, retry_factor=2.0, retry_jitter=0.0),
    ChannelPolicy(retry_ms=10_000, retry_max_ms=60_000, retry_factor=3.0, retry_jitter=0.5),
    ChannelPolicy(retry_ms=2000, retry_max_ms=60_000, retry_factor=10.0, retry_jitter=0.2, retry_instead=True),
    ChannelPolicy(max_attempts=2),
    ChannelPolicy(max_attempts=1, dead_letter="topic:elsewhere"),
    ChannelPolicy(max_attempts=2, dead_letter="drop"),
    ChannelPolicy(max_attempts=3, dead_max=2, retry_ms=1000, retry_max_ms=4000, retry_factor=2.0, retry_jitter=0.0),
    ChannelPolicy(retry_ms=0, retry_max_ms=60_000, retry_factor=1.0, retry_jitter=0.0, retry_instead=True),
    ChannelPolicy(max_depth=3),
    ChannelPolicy(max_depth=1, max_attempts=2, ttl_ms=20_000),
    ChannelPolicy(skip=True),
    ChannelPolicy(skip=True, max_depth=2, ttl_ms=1000),
    ChannelPolicy(ttl_ms=5000),
    ChannelPolicy(ttl_ms=30_000, max_depth=6, dead_letter="drop"),
    ChannelPolicy(ttl_ms=10_000, dead_max=1),
)


class History(Life):
    """One random life."""

    # ---- running

    def run(self) -> None:
        if self.rng.random() < 0.8:
            self.create_channel()
        if self.rng.random() < 0.4:
            self.ask_policy()
        for _ in range(self.steps):
            step = self.rng.choices(*self.menu())[0]
            self.trace.append(step.__name__)
            step()
            if not self.leader.outstanding:
                self.leader.judge_counts()
        self.trace.append("drain")
        self.drain()

    def menu(self) -> tuple[list[Step], list[float]]:
        steps: dict[Step, int] = {
            self.publish: 12,
            self.publish_deferred: 4,
            self.deliver: 14,
            self.redeliver: 10,
            self.hand_out: 10,
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
            self.ask_policy: 2,
            self.act_on_dead: 2,
            self.act_on_one: 4,
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
            self.hold_files: 2,
            self.create_reader: 1,
            self.move_reader: 3,
            self.release_files: 1,
            self.rebuild: 2,
            self.cut: 1,
            self.follow: 1,
            self.crash: 2,
            self.restart: 2,
            self.hesitate: 1,
        }
        steps[self.abandon] = 1
        if not self.ordered:
            steps[self.create_ephemeral] = 1
            steps[self.delete_ephemeral] = 1
        if self.swarm is None:
            # Some of everything is rarely much of anything: each life has its own habits.
            self.swarm = {step.__name__: self.rng.choice([0.3, 1, 1, 4]) for step in steps}
        return list(steps), [weight * self.swarm[step.__name__] for step, weight in steps.items()]

    # ---- administrators

    def _reconcile(self, **changes: object) -> None:
        self.record = self.record._replace(version=self.record.version + 1, **changes)
        self._write_record()

    def _write_record(self) -> None:
        self.leader.record = self.record
        record = self.record
        wanted = {name: (info.uid, info.paused) for name, info in record.channels.items() if not info.reader}
        readers = {name: info.uid for name, info in record.channels.items() if info.reader}
        self.leader.policy = record.policy
        if self.leader.cursors.requests.reconcile(record):
            self._request(lambda: self.model.listed(wanted, readers, record.paused))
        self.leader.flush()

    def create_channel(self) -> None:
        free = [name for name in ("a", "b", "c") if name not in self.record.channels]
        if free:
            self.uids += 1
            self._reconcile(channels={**self.record.channels, self.rng.choice(free): Info(self.uids)})

    def create_reader(self) -> None:
        if READER not in self.record.channels:
            self.uids += 1
            self._reconcile(channels={**self.record.channels, READER: Info(self.uids, reader=True)})

    def move_reader(self) -> None:
        """A reader says how far it is, perhaps late; or begins somewhere else."""
        cursors = self.leader.cursors
        if READER not in self.model.readers or READER not in cursors.channels:
            return
        uid, back = self.model.readers[READER].uid, self.rng.random() < 0.3
        target = self.rng.randint(0, self.log.end_offset + 2)
        (cursors.requests.seek if back else cursors.requests.advance)(READER, target)

        def moved() -> None:
            reader = self.model.readers.get(READER)
            if reader is not None and reader.uid == uid:
                reader.moved(min(max(target, cursors.state.log_start[0]), self.model.end), back=back)

        self._request(moved)
        self.leader.flush()

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
            channels = Listing.of([ChannelEntry("a", 1 << 40)])
            event = ChannelsEvent(self.record.version - 1, self.rng.random() < 0.5, channels)
            self.leader._write(event.encode(), HAS_EVENTS, [], 0)

    def pause_channel(self) -> None:
        if self.record.channels:
            name = self.rng.choice(sorted(self.record.channels))
            info = self.record.channels[name]
            self._reconcile(channels={**self.record.channels, name: info._replace(paused=not info.paused)})

    def ask_policy(self) -> None:
        """An operator asks that what failed comes again later than its consumers say."""
        self._reconcile(policy=self.rng.choice(POLICIES))

    def act_on_dead(self) -> None:
        """An operator wants some dead letters delivered again, or gone."""
        if (found := self.some_channel()) is not None:
            channel, model = found
            refs = channel.cursor.deferred_overlay.dead_letters((0, 0), self.rng.randint(1, 4))
            self._act_on_dead(channel, model, refs)

    def _act_on_dead(self, channel: Channel, model: ChannelModel, refs: list[Deferred]) -> None:
        check({ref.offset for ref in refs} <= model.ever_dead, f"{refs} are dead, and never died")
        raises = self.rng.random() < 0.5
        for ref in refs:
            act(channel.cursor, ref.offset, Action.REQUEUE if raises else Action.FINISH, self.leader.now)
            self.leader.tally_of(channel).finished += not raises
            if raises:
                model.raised(ref.offset)
                self.model.brought_forward.add(ref.offset)
            else:
                model.died(ref.offset, kept=False)

    def act_on_one(self) -> None:
        """An operator does something to one message, wherever it is."""
        if (found := self.some_channel()) is None or not self.model.pump:
            return
        channel, model = found
        offset = self.rng.randrange(self.model.pump)
        action = self.rng.choice(list(Action))
        due_ns = self.now_ns + self.rng.choice([0, 3, 200]) * 1_000_000_000
        dead_before = channel.cursor.deferred_overlay.dead
        before = held(channel.cursor, offset)
        try:
            owner = act(channel.cursor, offset, action, self.leader.now, due_ns=due_ns)
        except (NotFound, Conflict, LimitReached):
            return
        assert before is not None
        if before.state is MessageState.FINISHED:
            check(model.status.get(offset) != PENDING, f"{offset} is put back, and was not finished")
            check(action in (Action.REQUEUE, Action.DEFER), f"{action.name} of {offset}, which is finished")
            self.model.brought_forward.add(offset)
            model.returned_by_operator(offset, self.now_ns if action is Action.REQUEUE else due_ns)
            return
        check(owner == model.in_flight.get(offset, 0), f"{offset} was in flight to {owner}")
        self._acted(model, offset, action, due_ns, dies=channel.cursor.deferred_overlay.dead > dead_before)

    def _acted(self, model: ChannelModel, offset: int, action: Action, due_ns: int, *, dies: bool) -> None:
        check(model.status[offset] != FINISHED, f"{offset} was finished, and {action.name} was done to it")
        was_dead = offset in model.dead
        tally = self.leader.tally_of(self.leader.cursors.channels[model.name])
        tally.finished += action is Action.FINISH
        tally.died[Reason.OPERATOR] += action is Action.KILL
        model.in_flight.pop(offset, None)
        self.turns_of(self.leader.cursors.channels[model.name]).back.pop(offset, None)
        if model.status[offset] == MAYBE:
            model.status[offset] = PENDING  # it was there
        if action in (Action.REQUEUE, Action.DEFER):
            self.model.brought_forward.add(offset)
        match action:
            case Action.FINISH:
                model.died(offset, kept=False)
            case Action.REQUEUE:
                model.due.pop(offset, None)
            case Action.DEFER:
                model.due[offset] = Due(due_ns, long=True)
            case Action.KILL:
                model.died(offset, kept=dies)
        if was_dead and action in (Action.REQUEUE, Action.DEFER):
            model.deliveries[offset] = 0

    def pause_topic(self) -> None:
        self._reconcile(paused=not self.record.paused)

    def create_ephemeral(self) -> None:
        if EPHEMERAL not in self.leader.cursors.channels:
            self.uids += 1
            uid = self.uids
            self.leader.cursors.requests.create_ephemeral(EPHEMERAL, uid)
            self._request(lambda: self.model.ephemeral(EPHEMERAL, uid, True))
            self.leader.flush()

    def delete_ephemeral(self) -> None:
        if EPHEMERAL in self.leader.cursors.channels:
            uid = self.leader.cursors.channels[EPHEMERAL].uid
            self.leader.cursors.requests.delete_ephemeral(EPHEMERAL)
            self._request(lambda: self.model.ephemeral(EPHEMERAL, uid, False))
            self.leader.flush()

    def empty_topic(self) -> None:
        self.leader.cursors.requests.topic_empty()
        self._request(self.model.topic_emptied)
        self.leader.flush()

    def seek(self) -> None:
        if (found := self.some_channel()) is not None:
            target = self.rng.choice([0, TARGET_END, self.rng.randint(0, self.log.end_offset + 2)])
            self.leader.cursors.requests.seek(found[0].name, target)
            self._seek_requested(found[1], target)

    def empty(self) -> None:
        if (found := self.some_channel()) is not None:
            self.leader.cursors.requests.empty(found[0].name)
            self._seek_requested(found[1], TARGET_END, drop=True)

    def undo(self) -> None:
        if (found := self.some_channel()) is None:
            return
        if found[0].committed.undo is None:
            target = self.rng.randint(0, self.log.end_offset)
            self.leader.cursors.requests.seek(found[0].name, target)
            self._seek_requested(found[1], target)
        if found[0].committed.undo is not None:
            self.leader.cursors.requests.undo(found[0].name)
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
                held = {ref.offset for ref in channel.cursor.deferred_overlay.committed.items()}
            was_held = held
            went_back = model.undo if undo else None
            if undo and went_back is None:
                return
            goal = went_back.floor if went_back is not None else target
            goal = min(max(goal, leader.cursors.state.log_start[0]), self.model.pump)
            if went_back is not None:
                went_back = replace(went_back, floor=goal)
            # What was deferred by the batch that drops it is in no set before or after.
            just_now = {o for o, due in model.due.items() if due.long and model.status[o] == PENDING}
            now_id = leader.cursors.state.applied.log_id
            put_back = {o for o, at in model.put_back.items() if at is None or at > now_id}
            just_now -= put_back
            dead = model.dead
            if drop and committed.undo is not None:
                # What failed waits in memory or deferred, which is the channel's business.
                waiting = {o for o, status in model.status.items() if status != FINISHED}
                just_now |= waiting.intersection(ref.offset for ref in committed.undo.deferred)
            if drop:
                held = {ref.offset for ref in committed.deferred.items()}
                lost = {offset for offset in dead if model.due[offset].certain} - held
                check(not lost, f"emptying took the dead letters {lost}")
                check(held <= model.ever_dead, f"emptying kept {held - model.ever_dead}")
            if not (drop and model.ephemeral):
                held |= put_back
            model.sought(goal, self.model.pump, held, undo=went_back)
            if went_back is not None and not model.ephemeral:
                there = {ref.offset: ref.due_ns for ref in committed.deferred.items()}
                back_again = went_back.dropped & there.keys()
                # Below it only copies of messages are left, carried there, if the log still has them.
                gone = {o for o in went_back.dropped - back_again if o >= leader.cursors.state.log_start[0]}
                check(not gone, f"the undo did not defer {gone} again")
                model.returned({offset: there[offset] for offset in back_again})
            model.undo = back[0]
            if drop and not model.ephemeral:
                model.undo.dropped = {offset for offset in (was_held | just_now) - held - dead if offset < goal}
            leader.max_floor[committed.uid] = 0

        self._request(sought)
        channel = leader.cursors.channels[name]
        events, flags = leader.cursors.take_events(leader.now)
        back.append(
            Snapshot(
                channel.cursor.written.floor,
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
        if not self.snapshots or self.rng.random() < 0.5:
            self.take_snapshot()
        self.leader.cursors.checkpoints.begin(self.rng.choice(self.snapshots))  # one that was written, perhaps

    def _border(self, highest: int) -> tuple[int, int] | None:
        """A place between batches at or below an offset, where a log could start."""
        borders = [
            (entry.end_offset, entry.end_position) for entry, _ in self.log.batches if entry.end_offset <= highest
        ]
        return self.rng.choice(borders) if borders else None

    def move_log_start(self) -> None:
        self.leader.flush()  # what was put back is in the log before anybody looks
        cursors = self.leader.cursors
        careless = self.rng.random() < 0.3  # a leader that did not look; applying must cap it
        place = self._border(self.log.end_offset if careless else cursors.retention.log_start_limit(self.now_ns))
        if place is None:
            return
        place_is_free = False
        if not careless or self.rng.random() < 0.5:
            for ref in cursors.retention.to_carry(*place):
                frame = self.log.frame_at(ref.position) if ref.position else self.log.frame_of(ref.offset)
                cursors.retention.carry(ref.offset, frame)
            if self.rng.random() < 0.5:
                self.leader.flush()
                place_is_free = not careless and not self.leader.hold
        cursors.retention.propose_log_start(*place)
        self.leader.flush()
        if place_is_free:
            start = cursors.state.log_start
            check(
                start[0] >= place[0] and start[1] >= place[1], f"log start is {start}, nothing holds it below {place}"
            )

    def hold_files(self) -> None:
        """A batch reader holds what it is about to read, or goes on to."""
        cursors, id_ = self.leader.cursors, self.rng.randint(1, 3)
        offset = self.rng.randint(0, self.log.end_offset)
        until_ns = self.now_ns + self.rng.choice([1, 60, 600]) * 1_000_000_000
        cursors.retention.hold(id_, offset, until_ns, now_ns=self.now_ns)

        def held() -> None:
            self.model.hold(id_, max(offset, cursors.state.log_start[0]), until_ns, self.leader.applied_ns)

        self._request(held)
        self.leader.flush()

    def release_files(self) -> None:
        id_ = self.rng.randint(1, 3)
        self.leader.cursors.retention.release(id_)
        self._request(lambda: self.model.held.pop(id_, None))
        self.leader.flush()

    def abandon(self) -> None:
        if (found := self.some_channel()) is None or found[1].ephemeral:
            return
        channel, model = found
        place = self._border(self.leader.cursors.state.pump)
        if place is None:
            return
        for ref in self.leader.cursors.retention.to_carry(*place):
            frame = self.log.frame_at(ref.position) if ref.position else self.log.frame_of(ref.offset)
            self.leader.cursors.retention.carry(ref.offset, frame)
        self.leader.cursors.retention.propose_log_start(
            *place, (Abandoned(channel.uid, channel.cursor.floor, place[0]),)
        )

        def abandoned() -> None:
            live = self.leader.cursors.channels.get(model.name)
            if live is None or live.uid != model.uid:
                return
            end = min(place[0], self.model.pump)
            held = self.leader.deferred[model.name]
            for offset, status in model.status.items():
                if offset < end and offset not in held and offset not in model.put_back and status != FINISHED:
                    model.status[offset] = FINISHED
                    model.in_flight.pop(offset, None)
                    model.due.pop(offset, None)
            for offset in list(model.uncertain):
                if offset < end and offset not in held and offset not in model.put_back:
                    del model.uncertain[offset]

        self._request(abandoned)
        self.leader.flush()

    def unlink(self) -> None:
        """Files hold one batch each here; those that may go, go."""
        cursors, batches = self.leader.cursors, self.log.batches
        durable = self.leader.outstanding[0][0].log_id - 1 if self.leader.outstanding else self.log.log_id
        if cursors.retention.needed_durable > durable:
            return
        while len(batches) > 1:
            entry = batches[0][0]
            if not cursors.retention.may_unlink(
                end_offset=entry.end_offset, end_position=entry.end_position, end_log_id=entry.log_id + 1
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
        lowest = max(self.leader.cursors.retention.needed_durable, self.log_unlinked, 1)
        applied = self.leader.cursors.state.applied.log_id
        if lowest < applied:
            self._judge_rebuilt(self.rng.randint(lowest, applied))

    def follow(self) -> None:
        """A replica that knows less to be committed has the state of then."""
        log = CountedLog(self.log)
        lowest = 1 if self.log.batches[0][0].position == 0 else first_checkpoint_end(log, log.read)
        committed = self.rng.randint(lowest, self.leader.cursors.state.applied.log_id + 1)
        state = load(log, log.read, committed=committed).state
        if committed > 1:
            check(checkpoint.encode(state) == self.encoded[committed - 1], f"the state as of {committed} differs")

    def _judge_rebuilt(self, log_id: int) -> None:
        if log_id < self.log.start.log_id:
            return
        state = TinyLog.rebuild(self.log, log_id + 1)  # without a cache
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
            model.dead_again({ref.offset for ref in dead_in(committed.deferred)})
        self.snapshots.clear()
        old = self.leader
        self.start()
        self.leader.max_floor = old.max_floor
        self._write_record()

    def hesitate(self) -> None:
        """A leader was to stop, and goes on."""
        self.leader.cursors.prepare_stop()
        self.leader.flush()

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
        live = self.leader.cursors.channels
        for name, model in self.model.channels.items():
            self._drain(live[name], model)
            self._judge_dead(live[name], model)
        self.commit_all()
        for name, model in self.model.channels.items():
            if not model.ephemeral:
                self.judge_drained(live[name], model)
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

    def _judge_dead(self, channel: Channel, model: ChannelModel) -> None:
        """What is not delivered is dead, and an operator can have it."""
        while refs := channel.cursor.deferred_overlay.dead_letters((0, 0), 3):
            missing = model.dead if channel.cursor.deferred_overlay.dead < len(model.dead) else ()
            check(not missing, f"{channel.cursor.deferred_overlay.dead} of {missing} are dead")
            self._act_on_dead(channel, model, refs)
            if channel.cursor.deferred_overlay.dead == 0:
                self._drain(channel, model)  # what is too old dies where others were in its way
        check(not model.dead, f"{model.name} has lost the dead letters {model.dead}")
        self._drain(channel, model)
        left = [offset for offset, status in model.status.items() if status == PENDING]
        check(not left, f"{model.name} never delivers {left}: {channel}")

    def judge_drained(self, channel: Channel, model: ChannelModel) -> None:
        end = self.leader.cursors.state.pump
        cursor, committed = channel.cursor, channel.committed
        check(
            committed.floor == cursor.floor == cursor.next_read == end,
            f"{channel} is not at the end {end}",
        )
        check(not committed.ranges, f"{channel} has ranges left: {committed.ranges}")
        check(
            len(committed.deferred) == 0 == len(cursor.deferred_overlay),
            f"{channel} has deferred messages left",
        )
        check(channel.in_flight == 0 == cursor.depth(end), f"{channel} counts what is not there")
        check(cursor.deferred_count == 0, f"{channel} counts deferred messages that are not there")
        check(
            cursor.uncommitted_progress == 0 == cursor.deferred_overlay.uncommitted,
            f"{channel} has news after a flush",
        )
