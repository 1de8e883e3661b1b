"""Frames and headers of HTTP/2 (RFC 9113), as far as a gRPC stream takes them.

    frame:    size 3 | type 1 | flags 1 | stream 4 | payload
    message:  compressed 1 | size 4 | protobuf          in the payloads of DATA, cut anywhere

Headers are the `hpack` package's business: there are a few of them for each stream, and none for a message.
"""

from __future__ import annotations

import struct

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 2, 3, 4, 5
NO_ERROR, PROTOCOL_ERROR, REFUSED_STREAM, CANCEL = 0, 1, 7, 8
STREAM = 1  # the first one of a connection; it has no others
HEAD_BYTES = 5  # before each message: whether it is compressed, and its size
FRAME_BYTES = 16384  # that a frame may have unless its reader says otherwise; we do not. Nobody may say less, or more
FRAME_BYTES_MAX = (1 << 24) - 1  # than that
HEADERS_BYTES_MAX = 16 << 10
PING_BYTES = 8
WINDOW_BYTES = 65535  # that may be sent unless the reader says otherwise
WINDOW_BYTES_MAX = (1 << 31) - 1

FRAME = struct.Struct(">BHBBL")  # the size in two parts, type, flags, stream
FRAME_AND_HEAD = struct.Struct(">BHBBLBL")
HEAD = struct.Struct(">BL")
NUMBER = struct.Struct(">L")
SETTING = struct.Struct(">HL")
LAST_AND_CODE = struct.Struct(">LL")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in pairs))


def unpadded(start: int, stop: int, padding: int) -> int:
    """Where the content of a padded frame ends. ValueError."""
    if stop - padding < start:
        raise ValueError("more padding than there is")
    return stop - padding


class Headers:
    """Both directions of one connection's headers."""

    def __init__(self) -> None:
        self._encoder = hpack.Encoder()
        self._encoder.header_table_size = 0  # two blocks repeat nothing, and no reader has to say how much it remembers
        self._decoder = hpack.Decoder(max_header_list_size=HEADERS_BYTES_MAX)

    def frame(self, flags: int, *fields: tuple[str, str]) -> bytes:
        """A HEADERS frame of the stream."""
        return frame(HEADERS, flags | END_HEADERS, STREAM, self._encoder.encode(fields))

    def read(self, block: bytes) -> dict[str, str]:
        """By name; the last one counts. ValueError."""
        try:
            return {str(name): str(value) for name, value in self._decoder.decode(block)}
        except hpack.HPACKError as error:
            raise ValueError(f"headers: {type(error).__name__}") from None
