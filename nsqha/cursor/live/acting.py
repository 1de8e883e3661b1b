"""What an operator does to single messages of a channel.

    finish    nobody gets it any more
    requeue   it comes again as soon as it can; a dead letter as if it had never been delivered
    defer     it comes again at a time
    kill      it is a dead letter, or what the policy makes of one

What was finished, or passed over, is put back by requeue and defer, as if it had never been delivered, while the log
has it: it is deferred, also below the floor.

A consumer that has the message in flight loses it, as after a time-out: its answer is refused. All of this is progress
of the channel, so it is in the log, on every replica, like a FIN.
"""

from __future__ import annotations

from enum import IntEnum

from nsqha.clock import Now
from nsqha.cursor.deferred.dead import Reason
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.live.cursor import ChannelCursor
from nsqha.cursor.live.looking import Held, MessageState, held
from nsqha.cursor.live.requeue import place_of
from nsqha.cursor.policy import DeathPolicy
from nsqha.errors import Conflict, LimitReached, NotFound
from nsqha.hot import DEFERRED, FINISHED


class Action(IntEnum):
    """What is to become of a message."""

    FINISH = 1
    REQUEUE = 2
    DEFER = 3
    KILL = 4


def check(cursor: ChannelCursor, offset: int, action: Action) -> Held:
    """The message, if this can be done to it. NotFound, Conflict: it cannot; LimitReached: no more may die."""
    found = held(cursor, offset)
    if found is None:
        raise NotFound(f"channel {cursor.name} has not got it yet")
    if found.state is MessageState.FINISHED:
        if action not in (Action.REQUEUE, Action.DEFER):
            raise Conflict("it is finished already; while the log has it, nsqha message requeue puts it back")
        if offset < cursor.context.state.log_start[0]:
            raise Conflict("it is finished, and the log need not have it any more")
    if found.state is MessageState.UNREAD and action is not Action.FINISH:
        raise Conflict("it is unread: it can be finished, nothing else")
    if action is Action.KILL:
        if found.state is MessageState.DEAD:
            raise Conflict("it is dead already")
        policy = cursor.dead.policy or DeathPolicy()
        kept = cursor.deferred_overlay.dead
        if cursor.dead.full(policy, kept):
            raise LimitReached(f"the channel has {kept} dead letters in this partition, as many as it may")
    return found


def act(cursor: ChannelCursor, offset: int, action: Action, now: Now, *, due_ns: int = 0) -> int:
    """Do it; the owner that had the message in flight, 0 if none. `due_ns`: until when it is deferred. As `check`."""
    found = check(cursor, offset, action)
    if found.state is MessageState.FINISHED:
        _put_back(cursor, Deferred(offset, now.wall_ns if action is Action.REQUEUE else due_ns, 0))
        cursor.mark_dirty()
        return 0
    match action:
        case Action.FINISH:
            _finish(cursor, found)
            cursor.passing.finished_by_operator += 1
        case Action.REQUEUE:
            _requeue(cursor, found, now)
        case Action.DEFER:
            _defer(cursor, found, Deferred(offset, due_ns, _attempts(found)))
        case Action.KILL:
            letter = cursor.dead.letter(offset, found.attempts, Reason.OPERATOR, now.wall_ns)
            if letter is None:
                _finish(cursor, found)
            else:
                _defer(cursor, found, letter)
    cursor.mark_dirty()
    return found.owner


def _attempts(found: Held) -> int:
    return 0 if found.state is MessageState.DEAD else found.attempts


def _take_out(cursor: ChannelCursor, found: Held) -> bool:
    """Nobody has the message now, and it waits nowhere but in the deferred set; whether it is in that."""
    if found.state is MessageState.IN_FLIGHT:
        single = cursor.flight.take_back(found.offset)
        return single is not None and single.deferred
    if found.state is MessageState.WAITING:
        cursor.waiting.give_up(found.offset)
        return False
    return found.state in (MessageState.DEFERRED, MessageState.DEAD)


def _finish(cursor: ChannelCursor, found: Held) -> None:
    if found.state is MessageState.UNREAD:
        cursor.unread.finish(found.offset)
    elif _take_out(cursor, found):
        cursor.finish_deferred(found.offset)
    else:
        cursor.ring.set(found.offset, FINISHED)


def _defer(cursor: ChannelCursor, found: Held, ref: Deferred) -> None:
    was_deferred = _take_out(cursor, found)
    cursor.deferred_overlay.put(ref)
    if not was_deferred:
        cursor.ring.set(found.offset, DEFERRED)


def _put_back(cursor: ChannelCursor, ref: Deferred) -> None:
    """A message that was finished is deferred."""
    ring = cursor.ring
    cursor.deferred_overlay.put(ref)
    if ring.low <= ref.offset < ring.next:
        ring.set(ref.offset, DEFERRED)
    elif ref.offset >= ring.next:
        cursor.unread.put_back(ref.offset)
    cursor.deferred_overlay.put_back[ref.offset] = None


def _requeue(cursor: ChannelCursor, found: Held, now: Now) -> None:
    if found.state is MessageState.WAITING and not found.deadline:
        return  # it waits for its turn only
    if _take_out(cursor, found):
        cursor.deferred_overlay.put(Deferred(found.offset, now.wall_ns, _attempts(found)))
        cursor.unread.look()
    else:
        cursor.waiting.add(found.offset, found.attempts, place_of(cursor), now.mono)
