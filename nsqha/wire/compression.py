"""Snappy and deflate on a connection, without a socket: bytes in, bytes out, each bounded.

Snappy is its framing format: the stream identifier, then chunks

    [type u8][length u24 little endian][data]     00: CRC-32C, snappy; 01: CRC-32C, plain bytes; 80..ff: skipped

whose data is at most 64 KiB uncompressed. Deflate is raw (no zlib header), window 15; all that is written at once
ends in a sync flush, so that the client can decode it at once.

A few bytes may decompress to many, or be many chunks of nothing. `decompress` returns at most PIECE_BYTES_MAX at a
time, looks at CHUNKS_AT_ONCE, and says with `pending` that there is more; the caller decides when. Held are the
compressed bytes it was given and not more than one incomplete chunk.

What is written is cut so that one chunk with its header fits one TLS record (16 KiB) when each is written by itself:
pynsq takes a read in which no chunk ends for the end of the stream. nsqd writes headers and data apart, so with it that
client fails under TLS.
"""

from __future__ import annotations

import zlib
from typing import Protocol

import cramjam

PIECE_BYTES_MAX = 256 << 10
"""What one call of `decompress` returns at most."""
CHUNKS_AT_ONCE = 500
"""Snappy chunks that one call looks at, in a quarter of a millisecond: they may be empty, and of four bytes each."""

_STREAM_ID = b"\xff\x06\x00\x00sNaPpY"
_BLOCK_BYTES_MAX = 64 << 10
_CHUNK_BYTES_MAX = 76490 + 4  # the longest that a block may become, and its CRC
_SENT_BLOCK_BYTES = 16_000
_RUN_CHUNKS = 8  # that could be looked at while a run of blocks begins to be decompressed, however short it is
_PLAIN, _SKIPPABLE = 0x01, 0x80  # kinds of chunks; 0x00 is compressed


class Codec(Protocol):
    """Both directions of one connection."""

    pending: bool
    """More has been received than `decompress` returned: call it again, with nothing."""

    def decompress(self, data: bytes) -> bytes:
        """The next bytes that the client sent; ValueError if it did not send a valid stream."""

    def chunks(self, data: bytes | memoryview) -> list[bytes]:
        """`data` for the client; each item should be written by itself."""

    def compress(self, data: bytes | memoryview) -> bytes:
        """`chunks` in one piece."""


def new_codec(name: str, deflate_level: int) -> Codec:
    """`snappy` or `deflate`, as IDENTIFY agreed."""
    if name == "snappy":
        return Snappy()
    assert name == "deflate"
    return Deflate(deflate_level)


class Deflate:
    """Raw deflate."""

    def __init__(self, level: int) -> None:
        self.pending = False
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)

    def decompress(self, data: bytes) -> bytes:
        stream = self._decompressor
        try:
            out = stream.decompress(stream.unconsumed_tail + data, PIECE_BYTES_MAX)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if stream.unused_data:
            raise ValueError("bytes after the end of the deflate stream")
        # With as many bytes as asked for, zlib may hold more even when it has read all input.
        self.pending = len(out) == PIECE_BYTES_MAX
        return out

    def chunks(self, data: bytes | memoryview) -> list[bytes]:
        return [self.compress(data)]

    def compress(self, data: bytes | memoryview) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)


class Snappy:
    """The snappy framing format."""

    def __init__(self) -> None:
        self.pending = False
        self._compressor = cramjam.snappy.Compressor()  # writes the stream identifier before its first chunk
        self._held = b""
        self._greeted = False

    def decompress(self, data: bytes) -> bytes:
        held = self._held + data if self._held else data
        pos = stop = chunks = 0
        plain = 0  # bytes that held[pos:stop] will be
        out = []
        self.pending = False
        while len(held) - stop >= 4:
            kind, size = held[stop], int.from_bytes(held[stop + 1 : stop + 4], "little")
            self._check(kind, size, held, stop)
            end = stop + 4 + size
            if end > len(held):
                break
            if chunks >= CHUNKS_AT_ONCE:
                self.pending = True
                break
            chunks += 1
            if kind >= _SKIPPABLE:
                if pos < stop:
                    out.append(_blocks(held[pos:stop]))
                    chunks += _RUN_CHUNKS
                pos = stop = end
                self._greeted = True  # `_check` has seen that the first chunk is the identifier
                continue
            block = size - 4 if kind == _PLAIN else _block_bytes(held, stop + 8, end)
            if block > _BLOCK_BYTES_MAX:
                raise ValueError(f"a snappy block of {block} bytes")
            if plain + block > PIECE_BYTES_MAX:
                self.pending = True
                break
            plain += block
            stop = end
        out.append(_blocks(held[pos:stop]))
        self._held = held[stop:]
        return b"".join(out)

    def _check(self, kind: int, size: int, held: bytes, pos: int) -> None:
        """Refuse a chunk by its header, before its data has come."""
        if kind == _STREAM_ID[0]:
            if not _STREAM_ID.startswith(held[pos : pos + len(_STREAM_ID)]):
                raise ValueError("not the snappy stream identifier")
        elif not self._greeted:
            raise ValueError("the snappy stream does not begin with its identifier")
        elif _PLAIN < kind < _SKIPPABLE:
            raise ValueError(f"a snappy chunk of type {kind}")
        elif size > _CHUNK_BYTES_MAX or (kind < _SKIPPABLE and size < 4):
            raise ValueError(f"a snappy chunk of {size} bytes")

    def chunks(self, data: bytes | memoryview) -> list[bytes]:
        compressor, written = self._compressor, []
        for first in range(0, len(data), _SENT_BLOCK_BYTES):
            compressor.compress(bytes(data[first : first + _SENT_BLOCK_BYTES]))
            written.append(bytes(compressor.flush()))
        return written

    def compress(self, data: bytes | memoryview) -> bytes:
        return b"".join(self.chunks(data))


def _block_bytes(held: bytes, pos: int, end: int) -> int:
    """How long the snappy block held[pos:end] says it is when uncompressed: a base-128 number, low digits first."""
    value = shift = 0
    for byte in held[pos : min(end, pos + 5)]:
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    raise ValueError("a snappy block without its length")


def _blocks(chunks: bytes) -> bytes:
    """The bytes in some whole data chunks; checks their CRCs and that blocks are as long as they say."""
    if not chunks:
        return b""
    try:
        return bytes(cramjam.snappy.decompress(_STREAM_ID + chunks))
    except cramjam.DecompressionError as error:
        raise ValueError(str(error)) from None
