"""The bounds and intervals of channels, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChannelLimits:
    """One set per node; the defaults are what the documentation promises."""

    # How far the reader may be ahead of the committed floor. It bounds the ring, what a crash can repeat, and how long
    # a stalled commit goes unnoticed.
    window: int = 1_000_000
    # A requeue of at most this long stays in memory: most are shorter than the price of two events in the log.
    short_delay_s: float = 5.0
    # How many requeued or repeated messages a channel remembers one by one; further ones are deferred.
    waiting_max: int = 10_000
    # How many redelivered or touched messages are in flight at once per channel (each is a small object).
    singles_max: int = 100_000
    # Progress rides with a data batch at most every `progress_soon_s`: what a killed process repeats. Each row of it (a
    # channel, a finished range) takes some microseconds here and at every replica, so the next one waits
    # `progress_row_s` for each, up to `progress_interval_s`. A hundred channels ride every 40 ms, one rides every 4 ms.
    progress_soon_s: float = 0.004
    progress_row_s: float = 0.001
    progress_interval_s: float = 0.04
    # Without data it is written after at most `progress_idle_s`. A leader without followers writes it with the FINs, if
    # its node did so for no partition in the last `progress_alone_s`: a batch of its own costs much more than riding.
    progress_idle_s: float = 0.05
    progress_alone_s: float = 0.01
    # All these are longer by this for each finished range that is held, which costs time to find.
    progress_range_s: float = 20e-6
    progress_ranges_s_max: float = 0.95
    # A message that comes back is behind at most this many unread ones, and not for longer than this: consumers must
    # not wait for what always fails, nor what failed once for a whole backlog.
    retry_after_max: int = 1000
    retry_wait_s: float = 30.0
    # Of any so many messages handed out, so many may be other than unread while something unread can be handed out.
    share_of: int = 128
    share: int = 64
    # So many messages that timed out are taken back at once where a policy gives each its delay: 5 ms, twice as much to
    # write and apply that in the same turn, and a checkpoint may come on top.
    retries_at_once: int = 500
    # TOUCH never prolongs an attempt beyond this, as nsqd.
    max_msg_timeout_s: float = 900.0
    # How many unread messages an ephemeral channel keeps (nsqd: --mem-queue-size).
    ephemeral_unread_max: int = 10_000
    # What one batch takes of a channel's deferrals (about 1 MB) and of a checkpoint (2,500 deferred messages, 2.5 ms);
    # the rest rides with the next.
    changes_per_batch: int = 50_000
    # With this many deferrals to write, progress does not wait for its interval: each takes half a kilobyte until then.
    changes_urgent: int = 10_000
    checkpoint_bytes_per_batch: int = 64 << 10
    checkpoint_frame_bytes: int = 60 << 10
    # A checkpoint is due when the log grew by this, or by four times the last checkpoint if that is more.
    checkpoint_every_bytes: int = 64 << 20
