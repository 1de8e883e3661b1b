"""Taking a batch apart into its frames: messages and control frames (their numbers are in `nsqha.frames`).

For tools and for rare cases; delivery never looks at single frames this way, it walks them with `nsqha.hot`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nsqha.errors import LogCorrupt
from nsqha.frames import (
    ATTRIBUTES,
    CARRY,
    CHANNELS,
    CHECKPOINT,
    EPHEMERAL,
    EPOCH_START,
    HEAD,
    HOLD,
    LOG_START,
    MESSAGE,
    PROGRESS,
    SEEK,
    TOPIC_EMPTY,
)

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
    HOLD: "hold",
}


class Frame(NamedTuple):
    """One frame of a batch; the others are places in the batch's bytes."""

    type: int
    position: int
    payload_position: int
    end: int


def iter_frames(data: bytes | bytearray | memoryview) -> Iterator[Frame]:
    """Every frame of a batch. LogCorrupt if they do not tile the bytes."""
    position, end = 0, len(data)
    while position < end:
        if end - position < HEAD.size:
            raise LogCorrupt(f"{end - position} stray bytes behind the last frame, at {position}")
        size, frame_type = HEAD.unpack_from(data, position)
        after = position + 4 + size
        if size < 4 or after > end:
            raise LogCorrupt(f"frame at {position} says {size} bytes, {end - position - 4} are there")
        yield Frame(frame_type, position, position + HEAD.size, after)
        position = after
