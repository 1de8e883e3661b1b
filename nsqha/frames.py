"""The numbers of control frames and batch flags that both the log and the channels need.

    [size u32 = 4 + len(payload)][type u32][payload]         big endian

Type 2 is a message. A reader of the log must understand types 16 to 31 and may skip types from 32 on. In a batch,
channel events come first and their place is the batch's first offset; an attributes frame precedes its messages. The
formats of the payloads are in `nsqha.cursor.events`.
"""

from __future__ import annotations

import struct
from typing import Final

MESSAGE: Final = 2
CONTROL_MIN: Final = 16
SKIPPABLE_MIN: Final = 32

ATTRIBUTES: Final = 16
CHANNELS: Final = 17
EPHEMERAL: Final = 18
TOPIC_EMPTY: Final = 19
PROGRESS: Final = 20
SEEK: Final = 21
CARRY: Final = 22
LOG_START: Final = 23
CHECKPOINT: Final = 24
EPOCH_START: Final = 25
HOLD: Final = 26

# Flags of a commitlog entry: reasons why a reader may not skip the batch unread.
HAS_EVENTS: Final = 1
HAS_ATTRIBUTES: Final = 2
HAS_CHECKPOINT: Final = 4
HAS_CARRY: Final = 8
# The frames of the batch cannot be read on this replica, and an operator has given them up; see `commitlog.entry`.
LOST: Final = 1 << 29

HEAD: Final = struct.Struct(">II")


def control_frame(frame_type: int, payload: bytes) -> bytes:
    """A whole control frame."""
    assert frame_type >= CONTROL_MIN, f"type {frame_type} is not a control frame"
    return HEAD.pack(4 + len(payload), frame_type) + payload
