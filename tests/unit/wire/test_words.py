"""Numbers and names as nsqd reads and prints them."""

from __future__ import annotations

import pytest

from nsqha.wire.words import as_int64, name, quote, uint64


@pytest.mark.parametrize(
    ("word", "number"),
    [
        (b"", 0),
        (b"0", 0),
        (b"007", 7),
        (b"18446744073709551615", (1 << 64) - 1),
        (b"18446744073709551616", (1 << 64) - 1),
        (b"18446744073709551623", (1 << 64) - 1),
        (b"1" + b"0" * 5000, (1 << 64) - 1),  # a multiple of 2^64
        (b"9" * 16000, (1 << 64) - 1),
        (b"0" * 16000 + b"7", 7),
        (b"0" * 16000, 0),
        (b"-1", None),
        (b"+1", None),
        (b"1.5", None),
        (b"1e3", None),
        (b"1_000", None),
        (b" 1", None),
        ("\u0661".encode(), None),
    ],
)
def test_uint64(word: bytes, number: int | None) -> None:
    assert uint64(word) == number


def test_as_int64() -> None:
    assert as_int64((1 << 64) - 1) == -1
    assert as_int64(1 << 63) == -(1 << 63)
    assert as_int64((1 << 63) - 1) == (1 << 63) - 1


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        (b"", '""'),
        (b"a b", '"a b"'),
        (b'a"b\\c', '"a\\"b\\\\c"'),
        (b"\a\b\f\n\r\t\v\x00\x1f\x7f", '"\\a\\b\\f\\n\\r\\t\\v\\x00\\x1f\\x7f"'),
        (b"a\xffb", '"a\\xffb"'),
        ("\u00e9\u4e2d\U0001f600".encode(), '"\u00e9\u4e2d\U0001f600"'),
        ("\u00a0\u200b\u2028\ufeff".encode(), '"\\u00a0\\u200b\\u2028\\ufeff"'),
        ("\U000e0001".encode(), '"\\U000e0001"'),
        ("\ufffd".encode(), '"\ufffd"'),
        (b"\xed\xa0\x80", '"\\xed\\xa0\\x80"'),  # half of a surrogate pair is not UTF-8
        ("\u00e9".encode()[:1], '"\\xc3"'),
    ],
)
def test_quote(word: bytes, quoted: str) -> None:
    assert quote(word) == quoted.encode()


def test_names_are_measured_in_bytes() -> None:
    assert name(b"a" * 64) == "a" * 64
    assert name(b"a" * 65) is None
    assert name(b"t#ephemeral") == "t#ephemeral"
    assert name("\u00e9".encode()) is None
    assert name(b"a\n") is None
