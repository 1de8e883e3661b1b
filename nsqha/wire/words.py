"""The words of a command line: numbers and names as nsqd reads and prints them."""

from __future__ import annotations

from nsqha import ids

_UINT64 = (1 << 64) - 1
_DIGITS = frozenset(b"0123456789")
_ESCAPES = {
    "\a": "\\a",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\v": "\\v",
    '"': '\\"',
    "\\": "\\\\",
}


def name(word: bytes) -> str | None:
    """The topic or channel that `word` names; None if it is not a valid name."""
    text = word.decode("latin-1")
    return text if ids.valid_name(text) else None


def uint64(word: bytes) -> int | None:
    """A decimal number; one that has no room in 64 bits counts as the largest that has, so that it is out of range
    where it is used. An empty word is 0; None if anything but digits is in it."""
    if not _DIGITS.issuperset(word):
        return None
    if len(word) < 20:
        return int(word or b"0")
    digits = word.lstrip(b"0")
    # A line may hold 16,000 digits, more than int() takes.
    return min(int(digits or b"0"), _UINT64) if len(digits) <= 20 else _UINT64


def as_int64(number: int) -> int:
    """What an unsigned 64-bit number reads as when it is taken for a signed one."""
    return number - (1 << 64) if number >= 1 << 63 else number


def quote(word: bytes) -> bytes:
    """`word` in double quotes with escapes, as Go's %q prints it; what is not UTF-8 becomes \\xNN."""
    return ('"' + "".join(map(_quoted, word.decode("utf-8", "surrogateescape"))) + '"').encode()


def _quoted(char: str) -> str:
    escape = _ESCAPES.get(char)
    if escape is not None:
        return escape
    if char.isprintable():
        return char
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not part of valid UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
