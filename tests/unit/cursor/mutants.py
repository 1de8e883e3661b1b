"""Every rule of the channel core, switched off on purpose: do the random histories notice?

python -m tests.unit.cursor.mutants [NAME ...]      see tests/mutation.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from nsqha.cursor import events
from nsqha.cursor.committed import checkpoint, loading, state
from nsqha.cursor.committed.checkpoint import CheckpointWriter, Gatherer
from nsqha.cursor.committed.state import ChannelState, PartitionState
from nsqha.cursor.deferred.dead import DEAD_FROM, Reason
from nsqha.cursor.deferred.deferred_set import Deferred, MemoryDeferred
from nsqha.cursor.deferred.later import LaterMessages
from nsqha.cursor.deferred.overlay import DeferredOverlay
from nsqha.cursor.events import ChannelProgress
from nsqha.cursor.listing import Listing
from nsqha.cursor.live import acting, progress, requeue
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.live.cursor import ChannelCursor
from nsqha.cursor.live.dead import DeadLetters
from nsqha.cursor.live.flight import Flight
from nsqha.cursor.live.looking import Held, MessageState
from nsqha.cursor.live.ordered import OrderedChannel
from nsqha.cursor.live.passing import PassingOver
from nsqha.cursor.live.progress import Written
from nsqha.cursor.live.requeue import Requeues
from nsqha.cursor.live.unread import UnreadLog
from nsqha.cursor.live.unread_share import UnreadShare
from nsqha.cursor.partition import PartitionCursors
from nsqha.cursor.passing import PassingChannels
from nsqha.cursor.policy import RetryPolicy
from nsqha.cursor.retention import ChannelRetention
from nsqha.hot import DEFERRED, FINISHED, IN_FLIGHT, SINGLE, WAITING
from tests.mutation import Patch, instead, run
from tests.unit.cursor import mutants_of_readers
from tests.unit.cursor.mutant import SUITE, mutant

__all__ = ["SUITE", "mutants_of_readers"]  # with those of that module

# ---- cursors


@mutant("the floor passes only what is finished or deferred")
def floor_is_next_read() -> list[Patch]:
    advance = Written.advance

    def wrong(self: Written, floor: int, finished: list[tuple[int, int]], next_read: int) -> list[tuple[int, int]]:
        return advance(self, finished[-1][1] if finished else floor, finished, next_read)

    return [instead(Written, "advance", wrong)]


@mutant("finished ranges above the floor are written")
def no_ranges() -> list[Patch]:
    advance = Written.advance
    return [instead(Written, "advance", lambda self, floor, finished, next_read: advance(self, floor, [], next_read))]


@mutant("only a seek lowers a floor: progress that a newer seek precedes is stale")
def stale_progress_applies() -> list[Patch]:
    progress = PartitionState._progress

    def wrong(self: PartitionState, channel: ChannelState, change: ChannelProgress, effects: list[Any]) -> None:
        progress(self, channel, replace(change, seek=1 << 62), effects)

    return [instead(PartitionState, "_progress", wrong)]


@mutant("of stale progress the changes to offsets that are deferred still apply")
def stale_progress_is_dropped() -> list[Patch]:
    progress = PartitionState._progress

    def wrong(self: PartitionState, channel: ChannelState, change: ChannelProgress, effects: list[Any]) -> None:
        if change.seek >= channel.seek:
            progress(self, channel, change, effects)

    return [instead(PartitionState, "_progress", wrong)]


@mutant("a floor never passes a message whose deferral is not in the log yet")
def floor_before_its_deferrals() -> list[Patch]:
    return [patch.object(DeferredOverlay, "unsent", property(lambda self: 0)), _takes_some()]


def _takes_some() -> Patch:
    take = DeferredOverlay.take_unsent
    return instead(DeferredOverlay, "take_unsent", lambda self, limit: take(self, limit or 5))


@mutant("the reader stops a window behind the committed floor")
def no_window() -> list[Patch]:
    return [instead(UnreadLog, "window_end", lambda self: 1 << 60)]


@mutant("what timed out comes again")
def timeout_forgets() -> list[Patch]:
    return [instead(Channel, "_came_back", lambda self, offsets, singles, *_: len(offsets) + len(singles))]


@mutant("what was delivered is finished only by a FIN of its owner")
def any_owner_may_answer() -> list[Patch]:
    refuse = Flight.refuse

    def wrong(self: Flight, offset: int, owner: int) -> str | None:
        why = refuse(self, offset, owner)
        return None if why == "client does not own message" else why

    return [instead(Flight, "refuse", wrong)]


# ---- the pump


@mutant("the pump stands still while the topic is paused")
def pump_ignores_pause() -> list[Patch]:
    return [patch.object(PartitionState, "moving", property(lambda self: bool(self.channels)))]


@mutant("the pump stands still while there is no channel")
def pump_ignores_channels() -> list[Patch]:
    return [patch.object(PartitionState, "moving", property(lambda self: not self.paused))]


@mutant("a new channel starts at the pump as it was before the event moved it")
def new_channel_starts_at_the_end() -> list[Patch]:
    create = PartitionState._create

    def wrong(self: PartitionState, name: str, uid: int, effects: list[Any], **kind: bool) -> None:
        pump, self.pump = self.pump, self.applied.end_offset
        create(self, name, uid, effects, **kind)
        self.pump = pump

    return [instead(PartitionState, "_create", wrong)]


@mutant("topic_empty finishes what the topic held for all channels")
def topic_empty_only_moves_the_pump() -> list[Patch]:
    def wrong(self: PartitionState, place: int, effects: list[Any]) -> None:
        self.pump = max(self.pump, place)
        self.later.cut(self.pump)

    return [instead(PartitionState, "_topic_empty", wrong)]


@mutant("topic_empty defers nothing")
def topic_empty_defers() -> list[Patch]:
    empty = PartitionState._topic_empty

    def wrong(self: PartitionState, place: int, effects: list[Any]) -> None:
        if self.pump < place:
            pump = self.pump
            self._move_pump(place, effects)
            self.pump = pump
        empty(self, place, effects)

    return [instead(PartitionState, "_topic_empty", wrong)]


@mutant("when the pump passes a message with a deliver-at time every channel defers it")
def deliver_at_is_ignored() -> list[Patch]:
    return [
        instead(LaterMessages, "add", lambda self, offset, due_ns: None),
        instead(Channel, "meet", lambda self, offset, due_ns, now: False),
    ]


@mutant("a reader that meets a message before its due time defers it")
def nothing_is_met() -> list[Patch]:
    return [instead(Channel, "meet", lambda self, offset, due_ns, now: False)]


# ---- the channel list


@mutant("a version below the highest in the log is not applied")
def old_versions_apply() -> list[Patch]:
    channels = PartitionState._channels

    def wrong(self: PartitionState, event: events.ChannelsEvent, effects: list[Any]) -> None:
        self.version = min(self.version, event.version)
        channels(self, event, effects)

    return [instead(PartitionState, "_channels", wrong)]


@mutant("a channel that is deleted and created again is another one")
def recreated_is_the_same() -> list[Patch]:
    channels = PartitionState._channels

    def wrong(self: PartitionState, event: events.ChannelsEvent, effects: list[Any]) -> None:
        kept = tuple(
            c._replace(uid=self.channels[c.name].uid) if c.name in self.channels else c for c in event.channels
        )
        channels(self, replace(event, channels=Listing.of(kept)), effects)

    return [instead(PartitionState, "_channels", wrong)]


@mutant("ephemeral channels end with the epoch")
def ephemerals_survive() -> list[Patch]:
    apply = PartitionState._apply_event

    def wrong(self: PartitionState, event: Any, entry: Any, position: int, effects: list[Any]) -> None:
        if isinstance(event, events.EpochStart):
            self.epoch = event.epoch
        else:
            apply(self, event, entry, position, effects)

    return [instead(PartitionState, "_apply_event", wrong)]


# ---- seek


@mutant("a seek does not touch the deferred set")
def seek_drops_deferred() -> list[Patch]:
    seek = PartitionState._seek

    def wrong(self: PartitionState, event: events.Seek, log_id: int, effects: list[Any]) -> None:
        seek(self, replace(event, drop_deferred=True), log_id, effects)

    return [instead(PartitionState, "_seek", wrong)]


@mutant("empty drops the deferred set")
def empty_keeps_deferred() -> list[Patch]:
    seek = PartitionState._seek

    def wrong(self: PartitionState, event: events.Seek, log_id: int, effects: list[Any]) -> None:
        seek(self, replace(event, drop_deferred=False), log_id, effects)

    return [instead(PartitionState, "_seek", wrong)]


@mutant("deferred messages in flight stay in flight over a seek")
def seek_forgets_deferred_deliveries() -> list[Patch]:
    forget = Flight.forget
    return [instead(Flight, "forget", lambda self, low, keep=(): forget(self, low))]


@mutant("a FIN for a delivery that a seek forgot fails")
def old_fin_finishes_new_delivery() -> list[Patch]:
    return [_forgets_nothing()]


def _forgets_nothing() -> Patch:
    forget = Flight.forget

    def wrong(self: Flight, low: int, *, keep: Any = ()) -> dict[int, int]:
        counts = forget(self, low, keep=keep)
        self._forgotten.clear()
        return counts

    return instead(Flight, "forget", wrong)


@mutant("a TOUCH takes no forgotten delivery off")
def touch_takes_one_off() -> list[Patch]:
    forgotten = Flight.forgotten

    def wrong(self: Flight, offset: int, owner: int, *, answered: bool) -> bool:
        return forgotten(self, offset, owner, answered=True)

    return [instead(Flight, "forgotten", wrong)]


@mutant("forgotten deliveries are counted: two seeks, two late answers")
def forgotten_once() -> list[Patch]:
    forgotten = Flight.forgotten

    def wrong(self: Flight, offset: int, owner: int, *, answered: bool) -> bool:
        found = forgotten(self, offset, owner, answered=answered)
        while found and answered and forgotten(self, offset, owner, answered=True):
            pass
        return found

    return [instead(Flight, "forgotten", wrong)]


@mutant("a seek is clamped to [log start, pump] when it is applied")
def seek_is_not_clamped() -> list[Patch]:
    return [instead(PartitionState, "clamp", lambda self, channel, target: min(target, self.applied.end_offset))]


@mutant("an undo brings the finished ranges back")
def undo_without_ranges() -> list[Patch]:
    seek = PartitionState._seek

    def wrong(self: PartitionState, event: events.Seek, log_id: int, effects: list[Any]) -> None:
        seek(self, replace(event, old_ranges=None), log_id, effects)

    return [instead(PartitionState, "_seek", wrong)]


@mutant("progress gathered before a seek is written before it")
def seek_without_progress() -> list[Patch]:
    take = PartitionCursors._take_progress

    def wrong(self: PartitionCursors, parts: list[bytes], now: Any) -> Any:
        return [] if self.requests.queue else take(self, parts, now)

    return [instead(PartitionCursors, "_take_progress", wrong)]


# ---- deferred messages


@mutant("the reader passes over deferred messages")
def reader_meets_deferred() -> list[Patch]:
    return [instead(MemoryDeferred, "next_offset", lambda self, offset: None)]


@mutant("a FIN of a deferred message at or above the floor adds its offset to the finished ranges")
def fin_of_deferred_adds_no_range() -> list[Patch]:
    progress = PartitionState._progress

    def wrong(self: PartitionState, channel: ChannelState, change: ChannelProgress, effects: list[Any]) -> None:
        for offset in change.finished:
            channel.deferred.remove(offset)
        progress(self, channel, replace(change, finished=()), effects)

    return [instead(PartitionState, "_progress", wrong)]


@mutant("a deferred message leaves its set only by FIN: delivery does not take it out")
def delivery_takes_it_out() -> list[Patch]:
    redelivered = Channel.redelivered

    def wrong(self: Channel, redelivery: Any, owner: int, deadline: float) -> None:
        overlay = self.cursor.deferred_overlay
        if self.cursor.ring.get(redelivery.offset) != WAITING and redelivery.offset in overlay:
            overlay.put(Deferred(redelivery.offset, DEAD_FROM - 1, redelivery.attempts))
            self.cursor.mark_dirty()
            redelivered(self, redelivery, owner, deadline)
            overlay.finish(redelivery.offset)
        else:
            redelivered(self, redelivery, owner, deadline)

    return [instead(Channel, "redelivered", wrong)]


@mutant("a policy's delay holds for time-outs, too")
def retry_spares_timeouts() -> list[Patch]:
    came_back = Channel._came_back

    def wrong(self: Channel, offsets: Any, singles: Any, now: Any, reason: Reason) -> int:
        return came_back(self, offsets, singles, now, Reason.DISCONNECTED)

    return [instead(Channel, "_came_back", wrong)]


@mutant("who fails at delivery max_attempts is dead")
def death_one_attempt_late() -> list[Patch]:
    add = Requeues.add

    def wrong(self: Requeues, offset: int, single: Any, delay_s: float, now: Any, reason: Any) -> None:
        if single is not None:
            single.attempts -= 1
        add(self, offset, single, delay_s, now, reason)

    return [instead(Requeues, "add", wrong)]


@mutant("a dead letter is in the deferred set, so that the floor loses nothing")
def death_is_not_deferred() -> list[Patch]:
    def wrong(self: Requeues, offset: int, attempts: int, reason: Any, now: Any, *, deferred: bool) -> None:
        self._cursor.dead.letter(offset, attempts, reason, now.wall_ns)
        if not deferred:
            self._cursor.ring.set(offset, DEFERRED)

    return [instead(Requeues, "_die", wrong)]


@mutant("a dead letter that is requeued begins at attempt 1")
def raising_keeps_attempts() -> list[Patch]:
    return [instead(acting, "_attempts", lambda found: found.attempts)]


@mutant("emptying keeps the dead letters")
def empty_takes_the_dead() -> list[Patch]:
    return [instead(state, "clear_alive", lambda held: held.clear())]


@mutant("with dead_max dead letters what fails waits, and is not lost")
def breaker_loses() -> list[Patch]:
    die = Requeues._die
    full = DeadLetters.full

    def wrong(self: Requeues, offset: int, attempts: int, reason: Any, now: Any, *, deferred: bool) -> None:
        policy = self._cursor.dead.policy
        if policy is not None and full(self._cursor.dead, policy, self._cursor.deferred_overlay.dead):
            if not deferred:
                self._cursor.ring.set(offset, FINISHED)
            else:
                self._cursor.finish_deferred(offset)
            self._cursor.mark_dirty()
        else:
            die(self, offset, attempts, reason, now, deferred=deferred)

    return [instead(DeadLetters, "full", lambda self, policy, kept: False), instead(Requeues, "_die", wrong)]


@mutant("what is put back comes once, also if the reader is in front of it")
def put_back_comes_twice() -> list[Patch]:
    def wrong(self: UnreadLog, offset: int) -> None:
        self.passed.discard(offset, offset + 1)
        self._ahead.discard(offset, offset + 1)
        self.look()

    return [instead(UnreadLog, "put_back", wrong)]


@mutant("what is put back below the floor is deferred")
def put_back_is_lost_below_the_floor() -> list[Patch]:
    pieces = progress.pieces
    return [instead(progress, "pieces", lambda whole, floor_before, put_back: pieces(whole, floor_before))]


@mutant("only what is older than the policy allows expires")
def ttl_by_order() -> list[Patch]:
    expire = PassingChannels.expire

    def wrong(self: PassingChannels, wall_ns: int, first_since: Any) -> bool:
        return expire(self, wall_ns, lambda time_ns: first_since(time_ns) + 2)

    return [instead(PassingChannels, "expire", wrong)]


@mutant("the depth that a policy allows is of unread messages")
def max_depth_counts_in_flight() -> list[Patch]:
    look = PassingOver.look

    def wrong(self: PassingOver, ring: Any, unread: UnreadLog, end: int, policy: Any) -> bool:
        if policy.max_depth is not None:
            flying = sum(ring.get(offset) in (IN_FLIGHT, SINGLE) for offset in range(ring.low, ring.next))
            policy = replace(policy, max_depth=max(policy.max_depth - flying, 0))
        return look(self, ring, unread, end, policy)

    return [instead(PassingOver, "look", wrong)]


@mutant("what is passed over is counted")
def passing_is_not_counted() -> list[Patch]:
    look = PassingOver.look

    def wrong(self: PassingOver, *given: Any) -> bool:
        before = self.dropped
        found = look(self, *given)
        self.dropped = before
        return found

    return [instead(PassingOver, "look", wrong)]


@mutant("what is passed over moves the floor in the log")
def passing_is_not_written() -> list[Patch]:
    return [instead(PassingOver, "look", _quiet(PassingOver.look))]


def _quiet(look: Any) -> Any:
    return lambda self, *given: bool(look(self, *given)) and False


@mutant("a retry that is too old is a dead letter where these are kept")
def expired_retries_vanish() -> list[Patch]:
    def wrong(self: Requeues, offset: int, attempts: int, now: Any, death: Any) -> None:
        with patch.object(DeadLetters, "policy", None):
            self.expire(offset, attempts, now)

    return [instead(Requeues, "_die_of_age", wrong)]


@mutant("what is finished in front of the reader is taken off the depth once")
def depth_counts_it_twice() -> list[Patch]:
    def wrong(self: UnreadLog, offsets: Any) -> None:
        for offset in offsets:
            self.passed.add(offset, offset + 1)
            self._back.discard(offset)
        self.look()

    return [instead(UnreadLog, "finish_deferred", wrong)]


@mutant("the wire never shows more attempts than max_attempts")
def attempts_are_not_bounded() -> list[Patch]:
    return [instead(Channel, "redelivery", lambda self, now: self._next_redelivery(now))]


@mutant("what an operator finished in front of the reader is in the log")
def finished_ahead_is_not_written() -> list[Patch]:
    def wrong(self: UnreadLog, offset: int) -> None:
        self.passed.add(offset, offset + 1)
        self.look()

    return [instead(UnreadLog, "finish", wrong)]


@mutant("the consumer of a message that an operator took back has it no more")
def taken_back_stays_in_flight() -> list[Patch]:
    take_out = acting._take_out

    def wrong(cursor: ChannelCursor, found: Held) -> bool:
        if found.state is MessageState.IN_FLIGHT:
            return found.offset in cursor.deferred_overlay
        return take_out(cursor, found)

    return [instead(acting, "_take_out", wrong)]


@mutant("of the policy's delay and the client's the longer one counts")
def retry_is_the_shorter_delay() -> list[Patch]:
    delay = RetryPolicy.delay

    def wrong(self: RetryPolicy, asked_s: float, **given: Any) -> float:
        return min(asked_s, delay(self, asked_s, **given))

    return [instead(RetryPolicy, "delay", wrong)]


@mutant("the delay grows with each failure")
def retry_does_not_grow() -> list[Patch]:
    delay = RetryPolicy.delay

    def wrong(self: RetryPolicy, asked_s: float, *, failures: int, draw: float) -> float:
        return delay(self, asked_s, failures=1, draw=draw)

    return [instead(RetryPolicy, "delay", wrong)]


@mutant("a long requeue survives a crash")
def requeues_stay_in_memory() -> list[Patch]:
    return [patch.object(requeue, "stays_in_memory", lambda **_: True)]


@mutant("a deferral that is committed behind what was read by due time is found again")
def no_hint() -> list[Patch]:
    return [instead(DeferredOverlay, "_hint", lambda self, key: None)]


@mutant("a clean stop writes attempts")
def clean_stop_without_attempts() -> list[Patch]:
    return [instead(PartitionCursors, "prepare_stop", lambda self: None)]


# ---- what the log may forget


@mutant("log start is capped by every committed floor and by the pump when it is applied")
def log_start_is_not_capped() -> list[Patch]:
    return [instead(PartitionState, "log_start_limit", lambda self: 1 << 60)]


@mutant("log start is capped by the pump")
def log_start_passes_the_pump() -> list[Patch]:
    def wrong(self: PartitionState) -> int:
        return min([1 << 60, *(c.floor for c in self.channels.values() if not c.ephemeral)])

    return [instead(PartitionState, "log_start_limit", wrong)]


@mutant("what is below the log start is carried first")
def nothing_is_carried() -> list[Patch]:
    return [instead(MemoryDeferred, "below", lambda self, offset, position: iter(()))]


@mutant("a carried copy is carried again")
def copies_are_not_carried() -> list[Patch]:
    below = MemoryDeferred.below

    def wrong(self: MemoryDeferred, offset: int, position: int) -> Iterator[Deferred]:
        return (ref for ref in below(self, offset, position) if not ref.position)

    return [instead(MemoryDeferred, "below", wrong)]


@mutant("a carry moves the reference")
def carry_moves_nothing() -> list[Patch]:
    return [instead(PartitionState, "_carry", lambda self, offset, position: None)]


@mutant("a carry moves a reference only if it still exists")
def carry_revives() -> list[Patch]:
    def wrong(self: PartitionState, offset: int, position: int) -> None:
        for channel in self.channels.values():
            ref = channel.deferred.get(offset) or Deferred(offset, 0, 0)
            channel.deferred.put(ref._replace(position=position))

    return [instead(PartitionState, "_carry", wrong)]


@mutant("nothing is unlinked without a complete checkpoint above it")
def unlink_without_checkpoint() -> list[Patch]:
    def wrong(self: ChannelRetention, *, end_offset: int, end_position: int, end_log_id: int) -> bool:
        return end_offset <= self._state.log_start[0] and end_position <= self._state.log_start[1]

    return [instead(ChannelRetention, "may_unlink", wrong)]


@mutant("a pair goes only if its position is below log start, too")
def unlink_by_offset_only() -> list[Patch]:
    def wrong(self: ChannelRetention, *, end_offset: int, end_position: int, end_log_id: int) -> bool:
        return end_offset <= self._state.log_start[0] and self._state.checkpoint.as_of >= end_log_id

    return [instead(ChannelRetention, "may_unlink", wrong)]


# ---- checkpoints


@mutant("a checkpoint without its end is no checkpoint")
def half_a_checkpoint_counts() -> list[Patch]:
    apply = PartitionState._checkpoint_frame

    def wrong(self: PartitionState, frame: events.CheckpointFrame, entry: Any, effects: list[Any]) -> None:
        apply(self, frame, entry, effects)
        if not frame.last and frame.sequence == 0 and frame.as_of >= self.checkpoint.as_of:
            self.checkpoint = replace(self.checkpoint, as_of=frame.as_of)

    return [instead(PartitionState, "_checkpoint_frame", wrong)]


@mutant("events between as_of and the end of the checkpoint count")
def state_is_as_of_the_last_frame() -> list[Patch]:
    newest = loading.newest_checkpoint

    def wrong(log: Any, read: Any, end_log_id: int, new_deferred: Any = None) -> PartitionState | None:
        state = newest(log, read, end_log_id, new_deferred)
        as_of = state.applied.log_id if state is not None else end_log_id
        for entry in log.entries(as_of, end_log_id):
            if any(frame.last and frame.as_of == as_of for frame in checkpoint.checkpoint_frames(read(entry))):
                state.applied = state.applied._replace(log_id=entry.log_id)
        return state

    return [patch.object(loading, "newest_checkpoint", wrong)]


@mutant("none is written below an existing one, and the highest as_of wins")
def the_last_checkpoint_wins() -> list[Patch]:
    feed = Gatherer.feed

    def wrong_feed(self: Gatherer, frame: events.CheckpointFrame) -> bool:
        self.as_of = 0
        return feed(self, frame)

    apply = PartitionState._checkpoint_frame

    def wrong_apply(self: PartitionState, frame: events.CheckpointFrame, entry: Any, effects: list[Any]) -> None:
        highest = self.checkpoint
        apply(self, frame, entry, effects)
        if self.checkpoint.as_of < highest.as_of:
            self.checkpoint = highest

    def wrong_begin(self: CheckpointWriter, snapshot: PartitionState) -> None:
        self.frames = checkpoint.write(snapshot, self._limits.checkpoint_frame_bytes)

    return [
        instead(Gatherer, "feed", wrong_feed),
        instead(PartitionState, "_checkpoint_frame", wrong_apply),
        instead(CheckpointWriter, "begin", wrong_begin),
    ]


@mutant("a checkpoint holds the deliver-at times that the pump has not passed")
def checkpoint_without_later() -> list[Patch]:
    write = checkpoint.write

    def wrong(state: PartitionState, body_bytes_max: int) -> Iterator[bytes]:
        copy = state.snapshot()
        copy.later.cut(1 << 60)
        return write(copy, body_bytes_max)

    return [patch.object(checkpoint, "write", wrong)]


# ---- whose turn it is


@mutant("what comes back goes behind what is unread")
def place_before_the_reader() -> list[Patch]:
    return [patch.object(Requeues, "place", property(lambda self: self._cursor.floor))]


@mutant("what comes back is behind so many unread messages at most")
def place_is_the_end() -> list[Patch]:
    return [patch.object(Requeues, "place", property(lambda self: 1 << 60))]


@mutant("what comes back waits so long for its place at most")
def place_for_ever() -> list[Patch]:
    def wrong(self: Requeues) -> bool:
        return self._cursor.ring.next >= self._cursor.waiting.group().place

    return [instead(Requeues, "place_reached", lambda self, now: wrong(self))]


@mutant("a share of what is handed out is unread")
def share_is_ignored() -> list[Patch]:
    return [instead(UnreadShare, "unread_first", lambda self: 0)]


@mutant("when nothing unread can be handed out, what waits has its turn")
def blocked_reader_blocks_all() -> list[Patch]:
    return [instead(Channel, "unread_ready", lambda self: self.cursor.ring.next < self.cursor.end)]


# ---- ordered channels


@mutant("the next message waits until the FIN of the one before is committed", ordered=True)
def ordered_does_not_wait_for_commit() -> list[Patch]:
    def wrong(self: OrderedChannel) -> bool:
        return not self.in_flight and self.cursor.floor == self.cursor.next_read

    return [instead(OrderedChannel, "_all_committed", wrong)]


@mutant("the reader of an ordered channel waits at a deferred message", ordered=True)
def ordered_passes_deferred() -> list[Patch]:
    return [
        instead(DeferredOverlay, "lowest", lambda self, first=0: None),
        instead(OrderedChannel, "due", Channel.due),
    ]


@mutant("one message of an ordered channel is in flight", ordered=True)
def ordered_redelivers_many() -> list[Patch]:
    return [
        instead(OrderedChannel, "redelivery", Channel.redelivery),
        instead(OrderedChannel, "due", Channel.due),
    ]


if __name__ == "__main__":
    run(SUITE)
