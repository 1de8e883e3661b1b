"""Control frames: V2-shaped frames of type 16 and above that live between messages, take no offset and are never sent.

    [size u32 = 4 + len(payload)][type u32 >= 16][payload]

Types 16 to 31 must be understood by whoever reads the log (an older node stops at an unknown one), types from 32 on
may be skipped. In a batch, channel events come first and their place is the batch's first offset; attribute frames
precede the messages they speak of. What the payloads say is decided in `nsqha.cursor.events`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from nsqha.errors import LogCorrupt

MESSAGE = 2
CONTROL_MIN = 16
SKIPPABLE_MIN = 32

ATTRIBUTES = 16
CHANNELS = 17
EPHEMERAL = 18
TOPIC_EMPTY = 19
PROGRESS = 20
SEEK = 21
CARRY = 22
LOG_START = 23
CHECKPOINT = 24
EPOCH_START = 25

NAMES = {
    MESSAGE: "message",
    ATTRIBUTES: "attributes",
    CHANNELS: "channels",
    EPHEMERAL: "ephemeral",
    TOPIC_EMPTY: "topic_empty",
    PROGRESS: "progress",
    SEEK: "seek",
    CARRY: "carry",
    LOG_START: "log_start",
    CHECKPOINT: "checkpoint",
    EPOCH_START: "epoch_start",
}

_HEAD = struct.Struct(">II")


class Frame(NamedTuple):
    """One frame of a batch; `position` and `end` are places in the batch's bytes."""

    type: int
    position: int
    payload_position: int
    end: int


def control_frame(frame_type: int, payload: bytes) -> bytes:
    """A whole control frame."""
    assert frame_type >= CONTROL_MIN, f"type {frame_type} is not a control frame"
    return _HEAD.pack(4 + len(payload), frame_type) + payload


def iter_frames(data: bytes | bytearray | memoryview) -> Iterator[Frame]:
    """Every frame of a batch, messages and control frames. LogCorrupt if they do not tile the bytes."""
    position, end = 0, len(data)
    while position < end:
        if end - position < 8:
            raise LogCorrupt(f"{end - position} stray bytes behind the last frame, at {position}")
        size, frame_type = _HEAD.unpack_from(data, position)
        after = position + 4 + size
        if size < 4 or after > end:
            raise LogCorrupt(f"frame at {position} says {size} bytes, {end - position - 4} are there")
        yield Frame(frame_type, position, position + 8, after)
        position = after
