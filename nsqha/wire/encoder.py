"""Frames that the server sends, other than messages (those are stored as the frames they leave as).

    [size u32 = 4 + len(data)][frame type u32][data]        big endian

The codes and wording of errors: errors.py, session.py, mpub.py, identify.py.
"""

from __future__ import annotations

import struct

RESPONSE = 0
ERROR = 1

_HEAD = struct.Struct(">II")


def response(data: bytes) -> bytes:
    """A whole response frame."""
    return _HEAD.pack(4 + len(data), RESPONSE) + data


def error(data: bytes) -> bytes:
    """A whole error frame; `data` is the code, a space and a description."""
    return _HEAD.pack(4 + len(data), ERROR) + data


OK = response(b"OK")
HEARTBEAT = response(b"_heartbeat_")
CLOSE_WAIT = response(b"CLOSE_WAIT")
