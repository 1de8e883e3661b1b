"""Frames and headers of HTTP/2 (RFC 9113), as far as a gRPC stream takes them.

    frame:    size 3 | type 1 | flags 1 | stream 4 | payload
    message:  compressed 1 | size 4 | protobuf          in the payloads of DATA, cut anywhere

Headers are the `hpack` package's business: there are a few of them for each stream, and none for a message.
"""

from __future__ import annotations

import struct
from functools import cached_property

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY_FRAME, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 2, 3, 4, 5, 6
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 8, 9, 11
NO_STREAM = -1  # no frame has this number
CLIENT_STREAM = 1  # what our client calls the only stream of its connection
HEAD_BYTES = 5  # before each message: whether it is compressed, and its size
FRAME_BYTES = 16384  # that a frame may have unless its reader announces more; we do not
FRAME_BYTES_MAX = (1 << 24) - 1  # that a reader may announce
HEADERS_BYTES_MAX = 16 << 10
PRIORITY_BYTES = 5
PING_BYTES = 8
WINDOW_BYTES = 65535  # that may be sent unless the reader says otherwise
WINDOW_BYTES_MAX = (1 << 31) - 1

FRAME = struct.Struct(">BHBBL")  # the size in two parts, type, flags, stream
FRAME_AND_HEAD = struct.Struct(">BHBBLBL")
HEAD = struct.Struct(">BL")
NUMBER = struct.Struct(">L")
SETTING = struct.Struct(">HL")
LAST_AND_CODE = struct.Struct(">LL")

PAYLOAD_BYTES = {PRIORITY_FRAME: PRIORITY_BYTES, RST_STREAM: NUMBER.size, PING: PING_BYTES, WINDOW_UPDATE: NUMBER.size}
"""The sizes of the frames that have one size."""
OF_CONNECTION = frozenset({SETTINGS, PING, GOAWAY})
OF_STREAM = frozenset({DATA, HEADERS, PRIORITY_FRAME, RST_STREAM, CONTINUATION})


class Http2Error(ValueError):
    """The other side broke the protocol; `code` is what GOAWAY says."""

    def __init__(self, why: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in pairs))


def number(payload: bytes) -> int:
    """The 31 bits of a stream's number or of a window."""
    found: int = NUMBER.unpack_from(payload)[0]
    return found & 0x7FFFFFFF


def unpadded(start: int, stop: int, padding: int) -> int:
    """Where the content of a padded frame ends. Http2Error."""
    if stop - padding < start:
        raise Http2Error("more padding than there is")
    return stop - padding


def check_frame(kind: int, flags: int, stream: int, size: int) -> None:
    """Http2Error: a frame of this type cannot have this stream or size. Unknown types may have any."""
    if kind in OF_CONNECTION if stream else kind in OF_STREAM:
        raise Http2Error(f"a frame of type {kind} with stream {stream}")
    wanted = PAYLOAD_BYTES.get(kind, size)
    if kind == SETTINGS:
        wanted = 0 if flags & ACK else size - size % SETTING.size
    elif kind == GOAWAY:
        wanted = max(size, LAST_AND_CODE.size)
    if size != wanted:
        names = {PING: "a ping", SETTINGS: "settings"}
        raise Http2Error(f"{names.get(kind, f'a frame of type {kind}')} of {size} bytes", FRAME_SIZE_ERROR)


class Headers:
    """Both directions of one connection's headers."""

    def __init__(self) -> None:
        self.incomplete = 0  # the stream whose header block goes on in a CONTINUATION; 0: none
        self.ends_stream = False  # as the first frame of the block says
        self._block = b""

    @cached_property
    def _encoder(self) -> hpack.Encoder:
        encoder = hpack.Encoder()
        encoder.header_table_size = 0  # two blocks repeat nothing, and no reader has to say how much it remembers
        return encoder

    @cached_property
    def _decoder(self) -> hpack.Decoder:
        return hpack.Decoder(max_header_list_size=HEADERS_BYTES_MAX)

    def frame(self, flags: int, stream: int, *fields: tuple[str, str]) -> bytes:
        """A HEADERS frame."""
        return frame(HEADERS, flags | END_HEADERS, stream, self._encoder.encode(fields))

    def add(self, kind: int, flags: int, stream: int, payload: bytes) -> bool:
        """A HEADERS or CONTINUATION frame that came; whether the block is complete. Http2Error."""
        if (stream if kind == CONTINUATION else 0) != self.incomplete:
            raise Http2Error("headers in the wrong order")
        if kind == HEADERS:
            if flags & PADDED:
                payload = payload[1 : unpadded(1, len(payload), payload[0])]
            self._block = payload[PRIORITY_BYTES:] if flags & PRIORITY else payload
            self.ends_stream = bool(flags & END_STREAM)
        else:
            self._block += payload
        if len(self._block) > HEADERS_BYTES_MAX:
            raise Http2Error(f"headers of more than {HEADERS_BYTES_MAX} bytes", ENHANCE_YOUR_CALM)
        self.incomplete = 0 if flags & END_HEADERS else stream
        return not self.incomplete

    def fields(self) -> dict[str, str]:
        """The fields of the complete block, by name; the last one counts. Each block is decoded, or the next ones
        cannot be."""
        block, self._block = self._block, b""
        return self.read(block)

    def read(self, block: bytes) -> dict[str, str]:
        """The fields of a given block. Http2Error."""
        try:
            return {str(name): str(value) for name, value in self._decoder.decode(block)}
        except hpack.HPACKError as error:
            raise Http2Error(f"headers: {type(error).__name__}", COMPRESSION_ERROR) from None
