"""Both codecs give back what went in however it is cut, and never more than their bound at a time."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from itertools import pairwise

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha.wire import encoder
from nsqha.wire.compression import CHUNKS_AT_ONCE, PIECE_BYTES_MAX, Codec, Deflate, Snappy, new_codec

STREAM_ID = b"\xff\x06\x00\x00sNaPpY"

codecs = pytest.mark.parametrize("new", [Snappy, lambda: Deflate(6)], ids=["snappy", "deflate"])


def drain(codec: Codec, data: bytes) -> list[bytes]:
    """Everything that `data` makes available, as the shell takes it."""
    out = [codec.decompress(data)]
    while codec.pending:
        out.append(codec.decompress(b""))
    return out


def chunk(kind: int, data: bytes) -> bytes:
    return bytes([kind]) + len(data).to_bytes(3, "little") + data


bodies = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda seed, n: random.Random(seed).randbytes(n), st.integers(0, 9), st.integers(0, 80_000)),
    st.builds(lambda part, n: part * n, st.binary(max_size=5), st.integers(0, 100_000)),
)


@codecs
@settings(max_examples=40, deadline=None)
@given(parts=st.lists(bodies, max_size=4), cuts=st.lists(st.integers(0, 200_000), max_size=6))
def test_round_trip_however_it_is_cut(new: Callable[[], Codec], parts: list[bytes], cuts: list[int]) -> None:
    sender, receiver = new(), new()
    sent = b"".join(sender.compress(part) for part in parts)
    at = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    received = b"".join(piece for a, b in pairwise(at) for piece in drain(receiver, sent[a:b]))
    assert received == b"".join(parts)


@codecs
def test_one_byte_at_a_time(new: Callable[[], Codec]) -> None:
    sender, receiver = new(), new()
    sent = sender.compress(b"PUB t\n") + sender.compress(b"x" * 3000)
    assert b"".join(receiver.decompress(bytes([byte])) for byte in sent) == b"PUB t\n" + b"x" * 3000


@codecs
def test_everything_written_can_be_read_at_once(new: Callable[[], Codec]) -> None:
    sender, receiver = new(), new()
    for part in (b"a", b"b" * 100, b"c" * 300_000):
        assert b"".join(drain(receiver, sender.compress(part))) == part


@codecs
def test_a_memoryview_compresses_like_bytes(new: Callable[[], Codec]) -> None:
    data = random.Random(1).randbytes(40_000)
    assert b"".join(drain(new(), new().compress(memoryview(data)))) == data


def test_a_deflate_bomb_comes_out_in_pieces() -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    sent = bomb.compress(bytes(20 << 20)) + bomb.flush(zlib.Z_SYNC_FLUSH)
    assert len(sent) < 25_000
    pieces = drain(Deflate(6), sent)
    assert max(map(len, pieces)) == PIECE_BYTES_MAX
    assert sum(map(len, pieces)) == 20 << 20


def test_deflate_holds_back_nothing_when_a_piece_is_exactly_full() -> None:
    codec = Deflate(6)
    assert b"".join(drain(codec, Deflate(6).compress(bytes(PIECE_BYTES_MAX)))) == bytes(PIECE_BYTES_MAX)
    assert not codec.pending


def test_deflate_gives_all_that_a_cut_stream_holds() -> None:
    sent = zlib.compress(bytes(PIECE_BYTES_MAX + 200), wbits=-15)
    for cut in range(1, 8):
        expected = zlib.decompressobj(-15).decompress(sent[:-cut])
        assert b"".join(drain(Deflate(6), sent[:-cut])) == expected


def test_a_snappy_bomb_comes_out_in_pieces() -> None:
    sender = cramjam.snappy.Compressor()
    sender.compress(bytes(8 << 20))
    sent = bytes(sender.flush())
    assert len(sent) < 400_000
    pieces = drain(Snappy(), sent)
    assert PIECE_BYTES_MAX - (64 << 10) < max(map(len, pieces)) <= PIECE_BYTES_MAX
    assert sum(map(len, pieces)) == 8 << 20


def test_a_snappy_block_that_lies_about_its_length_is_refused() -> None:
    claims_4_gib = chunk(0, bytes(4) + b"\xff\xff\xff\xff\x0f" + b"abc")
    endless = chunk(0, bytes(4) + b"\xff\xff\xff\xff\xff\xff")
    claims_none = chunk(0, bytes(4))
    for bad in (claims_4_gib, endless, claims_none):
        with pytest.raises(ValueError, match="snappy"):
            Snappy().decompress(STREAM_ID + bad)


@pytest.mark.parametrize(
    "sent",
    [
        Snappy().compress(b"hello")[len(STREAM_ID) :],  # no identifier
        b"PUB t\n",
        b"\xff\x06\x00\x00sNaPpX",
        STREAM_ID + chunk(2, b"x"),  # must be understood
        STREAM_ID + b"\x00\xff\xff\xff",  # longer than any chunk
        STREAM_ID + b"\xfe\xff\xff\xff",
        STREAM_ID + chunk(1, b"0000" + bytes(65537)),
        STREAM_ID + chunk(1, b"0000x"),  # wrong CRC
        STREAM_ID + chunk(1, b"000"),
    ],
)
def test_what_is_not_snappy_is_refused(sent: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Snappy().decompress(sent)


def test_snappy_chunks_that_may_be_skipped_are_skipped() -> None:
    plain = Snappy().compress(b"hello")
    sent = plain + chunk(0xFE, bytes(1000)) + STREAM_ID + chunk(0x80, b"") + plain[len(STREAM_ID) :]
    assert Snappy().decompress(sent) == b"hellohello"


@pytest.mark.parametrize("nothing", [STREAM_ID, chunk(0x80, b""), chunk(0xFE, b"x")])
def test_many_snappy_chunks_of_nothing_are_looked_at_in_parts(nothing: bytes) -> None:
    codec, parts = Snappy(), 3
    sent = STREAM_ID + nothing * (parts * CHUNKS_AT_ONCE) + Snappy().compress(b"hello")
    assert drain(codec, sent) == [b""] * parts + [b"hello"]


def test_many_small_snappy_chunks_come_out_in_parts() -> None:
    codec = Snappy()
    small = Snappy().compress(b"NOP\n")[len(STREAM_ID) :]
    out = drain(codec, STREAM_ID + small * (CHUNKS_AT_ONCE + 1))
    assert [len(piece) for piece in out] == [4 * (CHUNKS_AT_ONCE - 1), 8]


def test_snappy_blocks_with_an_identifier_each_come_out_in_smaller_parts() -> None:
    """Each is decompressed by itself, which takes as long as it takes to look at several chunks."""
    small = Snappy().compress(b"NOP\n")
    out = drain(Snappy(), small * CHUNKS_AT_ONCE)
    assert b"".join(out) == b"NOP\n" * CHUNKS_AT_ONCE
    assert max(map(len, out)) <= 4 * CHUNKS_AT_ONCE // 8


def test_incompressible_bytes_are_sent_as_they_are() -> None:
    data = random.Random(2).randbytes(1000)
    assert data in Snappy().compress(data)


def test_each_snappy_chunk_fits_a_tls_record_with_its_header() -> None:
    data = random.Random(3).randbytes(100_000)
    sender = Snappy()
    written = sender.chunks(data) + sender.chunks(b"more")
    assert written[0].startswith(STREAM_ID)
    assert max(map(len, written)) <= 16384
    receiver = Snappy()
    assert b"".join(map(receiver.decompress, written)) == data + b"more"
    assert all(Snappy().decompress(STREAM_ID + one) for one in written[1:])  # each is whole


def test_deflate_ends_in_a_sync_flush_and_starts_without_a_header() -> None:
    sent = Deflate(1).compress(encoder.OK)
    assert sent.endswith(b"\x00\x00\xff\xff")
    assert zlib.decompressobj(-15).decompress(sent) == encoder.OK


@pytest.mark.parametrize("sent", [b"\x07", b"\xff" * 20, zlib.compress(b"x", wbits=-15) + b"more"])
def test_what_is_not_deflate_is_refused(sent: bytes) -> None:
    codec = Deflate(6)
    with pytest.raises(ValueError, match=r"."):
        codec.decompress(sent)


def test_nothing_follows_the_end_of_a_deflate_stream() -> None:
    codec = Deflate(6)
    assert codec.decompress(zlib.compress(b"NOP\n", wbits=-15)) == b"NOP\n"
    with pytest.raises(ValueError, match="after the end"):
        codec.decompress(b"x")


@codecs
@settings(max_examples=100, deadline=None)
@given(garbage=st.binary(max_size=300), greet=st.booleans())
def test_garbage_is_an_error_or_nothing(new: Callable[[], Codec], garbage: bytes, greet: bool) -> None:
    codec = new()
    try:
        drain(codec, (STREAM_ID if greet else b"") + garbage)
    except ValueError:
        pass


def test_codecs_by_name() -> None:
    assert isinstance(new_codec("snappy", 6), Snappy)
    assert isinstance(new_codec("deflate", 1), Deflate)
