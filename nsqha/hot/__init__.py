"""What touches every message: compiled when the extensions are there, a pure-Python twin otherwise.

A message is stored, replicated and delivered as one and the same frame, big endian, HEADER = 34 bytes and the body:

    [size u32 = 30 + len(body)][frame type u32 = 2][timestamp ns i64][attempts u16 = 1][id 16 lowercase hex][body]

and control frames of the log have the same outer shape: `[size u32 = 4 + len(payload)][frame type u32 >= 16][payload]`.

    pub_run, mpub_body, frame    commands of a client -> frames whose id and timestamp are blank
    stamp                        blank frames -> frames of a partition, when the batch is written
    walk, skip_control           where the frames of a batch end
    patch_attempts               one frame for a redelivery
    crc32                        of a batch, as zlib's
    next_entry, copied_entry     the commitlog entry of a batch; one that came from elsewhere
    fins_end, Ring               FIN commands -> slots of the in-flight ring
    Publisher, PublishQueue      PUBs of one connection -> what waits for the next batch
    SyncThreads, SyncedFile      a disk round: files synced beside the interpreter
    tell_stored, Slot, Replies   a committed batch -> OKs, in the order of each client's commands
    Reply, Waiter, Taken         who waits for a publish, and what goes into a batch together; of both twins

`_hot.pyx` and `_hot_py.py`, and likewise `_publishing` and `_syncing`, behave identically, one test suite runs over
both. ACTIVE says which one serves; it is shown at start and in /stats because it is worth a factor of five in CPU.
NSQHA_NO_EXT=1 forces the twin. A machine without a compiler installs all the same (they are optional in setup.py)
and runs the twin.

Downwards:

    _syncing_py     the twin of `_syncing.pyx`, and the description of what both do
    _publishing_py  the twin of `_publishing.pyx`, and the description of what both do
    _hot_py         the twin of `_hot.pyx`, and the description of what both do

What comes from a client (commands, lengths, ids) is never trusted: a run stops before what is wrong. What comes from
our own side and does not fit (positions outside the buffer, frames that do not tile a batch, a ring used out of order)
is a ValueError. A number that does not fit its field is an OverflowError: ids and timestamps have 64 bits, owners and
attempts 16. Offsets and positions stay below 2^63.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nsqha.hot._publishing_py import NOT_STORED, OUTCOME_UNKNOWN, Reply, Taken, Waiter

if TYPE_CHECKING:
    from nsqha.hot._hot import (
        DEFERRED,
        FINISHED,
        FREE,
        HEADER,
        IN_FLIGHT,
        SINGLE,
        WAITING,
        Ring,
        copied_entry,
        crc32,
        fins_end,
        frame,
        mpub_body,
        next_entry,
        patch_attempts,
        pub_run,
        skip_control,
        stamp,
        walk,
    )
    from nsqha.hot._publishing_py import Publisher, PublishQueue, Replies, Slot, tell_stored
    from nsqha.hot._syncing_py import SyncedFile, SyncThreads

    ACTIVE: str
else:
    try:
        if os.environ.get("NSQHA_NO_EXT", "") not in ("", "0"):
            raise ImportError("NSQHA_NO_EXT is set")
        from nsqha.hot._hot import (
            DEFERRED,
            FINISHED,
            FREE,
            HEADER,
            IN_FLIGHT,
            SINGLE,
            WAITING,
            Ring,
            copied_entry,
            crc32,
            fins_end,
            frame,
            mpub_body,
            next_entry,
            patch_attempts,
            pub_run,
            skip_control,
            stamp,
            walk,
        )
        from nsqha.hot._publishing import Publisher, PublishQueue, Replies, Slot, tell_stored
        from nsqha.hot._syncing import SyncedFile, SyncThreads

        ACTIVE = "compiled"
    except ImportError:
        from nsqha.hot._hot_py import (
            DEFERRED,
            FINISHED,
            FREE,
            HEADER,
            IN_FLIGHT,
            SINGLE,
            WAITING,
            Ring,
            copied_entry,
            crc32,
            fins_end,
            frame,
            mpub_body,
            next_entry,
            patch_attempts,
            pub_run,
            skip_control,
            stamp,
            walk,
        )
        from nsqha.hot._publishing_py import Publisher, PublishQueue, Replies, Slot, tell_stored
        from nsqha.hot._syncing_py import SyncedFile, SyncThreads

        ACTIVE = "pure"

__all__ = [
    "ACTIVE",
    "DEFERRED",
    "FINISHED",
    "FREE",
    "HEADER",
    "IN_FLIGHT",
    "NOT_STORED",
    "OUTCOME_UNKNOWN",
    "SINGLE",
    "WAITING",
    "PublishQueue",
    "Publisher",
    "Replies",
    "Reply",
    "Ring",
    "Slot",
    "SyncThreads",
    "SyncedFile",
    "Taken",
    "Waiter",
    "copied_entry",
    "crc32",
    "fins_end",
    "frame",
    "mpub_body",
    "next_entry",
    "patch_attempts",
    "pub_run",
    "skip_control",
    "stamp",
    "tell_stored",
    "walk",
]
