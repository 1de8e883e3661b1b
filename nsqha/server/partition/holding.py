"""Holds of one partition that is led here: asked for, renewed and released, each answered when it is committed.

    hold | renew | release  ->  a HOLD event  ->  committed and applied  ->  what is held now

`until_ns` counts in the log's own time: batches never go back in time, so the leader adds `hold_ms` to the timestamp
that the next batch would have. Where the last leader's clock ran ahead, the log's time stands still until this one's
gets there, and a hold lasts longer by that much. Where this leader's clock is ahead of the one that dated the hold, or
steps forward, the hold ends earlier by that much: batches carry that time, and all that apply them must get the same
result. A hold in use is renewed with a quarter of an hour to spare (`segments.renewals`), for clocks that differ by
less.

Readers compare: a hold that begins above what was asked for came too late for what lies between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqha.cursor.committed.holds import HOLD_MS_MAX, LiveHold
from nsqha.errors import LimitReached, NotFound, Unavailable

if TYPE_CHECKING:
    from nsqha.server.partition.partition import Partition

_NS = 1_000_000


def live_holds(partition: Partition) -> dict[int, LiveHold]:
    """What is held in this partition now, by id."""
    return partition.cursors.retention.holds(log_time(partition))


async def hold(partition: Partition, hold_id: int, offset: int, hold_ms: int) -> LiveHold:
    """Keep what follows `offset` from retention for `hold_ms`; what is held then.

    A hold that is known already is renewed, and reaches down to the lower one of both offsets. The answer's offset is
    above `offset` if the log start was above it already. ValueError: longer than HOLD_MS_MAX. LimitReached: too many
    holds. Unavailable: nothing was done, also while this leader's epoch has only begun. OutcomeUnknown.
    """
    if not 0 < hold_ms <= HOLD_MS_MAX:
        raise ValueError(f"a hold of {hold_ms} ms: it is at least 1 and at most {HOLD_MS_MAX} (6 hours), then renewed")
    if not partition.serving:
        raise Unavailable(partition.begins)  # before an event is queued
    now_ns = log_time(partition)
    offset = min(offset, partition.log.end.offset)
    partition.cursors.retention.hold(hold_id, offset, now_ns + hold_ms * _NS, now_ns=now_ns)
    await partition.commit_events()
    held = live_holds(partition).get(hold_id)
    if held is None:  # others, of the last leader, were in front; or it was released meanwhile
        what = f"partition {partition.number} could not be held"
        raise LimitReached(f"{what}: too many readers hold it, or the hold was released meanwhile")
    return held


async def renew(partition: Partition, hold_id: int, hold_ms: int) -> LiveHold:
    """Put a live hold's end off to `hold_ms` from now, as far as a hold may live; what is held then.

    Nothing is written while more than half of that is left, so every read may ask. NotFound: no such hold is alive.
    Else as `hold`.
    """
    held = live_holds(partition).get(hold_id)
    if held is None:
        what = f"partition {partition.number} is not held by {hold_id:016x}"
        raise NotFound(f"{what}: its time is over, or it was released")
    wanted = min(log_time(partition) + hold_ms * _NS // 2, held.renewable_until_ns)
    return held if held.until_ns >= wanted else await hold(partition, hold_id, held.offset, hold_ms)


async def release(partition: Partition, hold_id: int) -> bool:
    """End a hold; False if there was none that is alive. Unavailable: nothing was done. OutcomeUnknown."""
    if not partition.serving:
        raise Unavailable(partition.begins)
    if hold_id not in live_holds(partition):
        return False
    partition.cursors.retention.release(hold_id)
    await partition.commit_events()
    return True


def log_time(partition: Partition) -> int:
    """The timestamp that a batch written now would have."""
    return partition.log.next_timestamp(partition.now().wall_ns)
