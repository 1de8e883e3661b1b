"""Bytes that were received and not consumed."""

from __future__ import annotations

from nsqha.wire.mpub import MpubReader
from nsqha.wire.unread import UnreadBytes


def test_bytes_are_enough_when_all_that_is_needed_is_there() -> None:
    unread = UnreadBytes(4)
    assert unread.busy and not unread.enough
    unread.add(b"  ")
    assert not unread.enough
    unread.add(b"V2rest")
    assert unread.enough and unread.have == 8
    assert unread.take() == b"  V2rest"
    assert (unread.busy, unread.have, unread.need) == (False, 0, 0)


def test_what_follows_a_consumed_command_is_kept_and_asked_for_again() -> None:
    unread = UnreadBytes(0)
    unread.keep(b"doneREST", 4)
    unread.need, unread.eof_error = 6, b"cut"
    assert (unread.busy, unread.have, unread.enough, unread.text_at_eof) == (True, 4, False, b"cut")
    unread.add(b"..")
    assert unread.enough and unread.take() == b"REST.."
    assert unread.text_at_eof is None


def test_nothing_left_is_not_kept() -> None:
    unread = UnreadBytes(0)
    unread.take()
    unread.keep(b"done", 4)
    assert not unread.busy and not unread.have


def test_the_reader_of_an_mpub_says_when_there_is_enough() -> None:
    unread = UnreadBytes(0)
    unread.reader = MpubReader(msg_bytes_max=10, body_bytes_max=100)
    unread.add(b"\0\0\0\1\0\0\0\1")
    assert not unread.enough
    unread.add(b"x")
    assert unread.enough


def test_a_dead_session_keeps_nothing_and_stays_busy() -> None:
    unread = UnreadBytes(0)
    unread.add(b"x")
    unread.kill()
    assert unread.take() == b"" and unread.busy and unread.dead
