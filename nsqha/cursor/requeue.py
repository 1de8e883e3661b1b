"""Where a message waits that was requeued or timed out. One rule:

    it is deferred already                       stays deferred, with a new due time
    no delay, delivered once                     memory (an integer)
    a delay above `short_delay_s`                deferred
    more than `waiting_max` remembered           deferred
    otherwise                                    memory

and, when the reader can not go on because the window is full, what waits at the floor is deferred until there is room
(`Channel.spill`). Deferring costs an event in the log and survives a crash with due time and attempts; memory costs
nothing and a crash hands the message out again at once, with attempts begun anew.
"""

from __future__ import annotations

from nsqha.cursor.limits import ChannelLimits

ATTEMPTS_MAX = 65535  # what the message frame can say


def stays_in_memory(*, delay_s: float, attempts: int, remembered: int, limits: ChannelLimits) -> bool:
    """Whether a message that is not deferred waits in memory."""
    if delay_s <= 0 and attempts == 1:
        return True
    return delay_s <= limits.short_delay_s and remembered < limits.waiting_max
