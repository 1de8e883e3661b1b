"""Sending leaves the page cache as it was. Needs a file system that has one."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.commitlog.readonce import PAGE_BYTES, cached_pages
from nsqha.server.segments import sending
from nsqha.server.segments.sending import FileShortened, ReadingPace, Sender, opened, read_once

PAGES = 600
CONTENT = os.urandom(PAGES * PAGE_BYTES - 100)


class Taken:
    """The other end of a socket: what a reader takes."""

    def __init__(self) -> None:
        self.sock, self._theirs = socket.socketpair()
        self._parts: list[bytes] = []
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        while data := self._theirs.recv(1 << 16):
            self._parts.append(data)

    def all(self) -> bytes:
        self.sock.close()
        self._thread.join()
        self._theirs.close()
        return b"".join(self._parts)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A file of which nothing is in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    if any(cached_pages(fd, 0, len(CONTENT))):
        pytest.skip("this file system keeps everything cached")
    yield fd
    os.close(fd)


def sent(fd: int, *pieces: tuple[int, int], tls: bool = False) -> bytes:
    taken = Taken()
    with opened(f"/proc/self/fd/{fd}") as own:
        Sender(taken.sock, tls=tls, progress=lambda: None).send(own, pieces)
    return taken.all()


def cached(fd: int) -> list[int]:
    return [page for page, there in enumerate(cached_pages(fd, 0, len(CONTENT))) if there]


@pytest.fixture(params=["around the page cache", "through it"])
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a file system that knows O_DIRECT."""
    if request.param == "through it":
        plain = os.open

        def without(path: str, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here", path)
            return plain(path, flags)

        monkeypatch.setattr(os, "open", without)


@pytest.mark.usefixtures("reads")
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("piece", [(0, len(CONTENT)), (1, 10), (5000, 1_000_000), (len(CONTENT) - 1, 1), (4096, 4096)])
def test_what_was_not_cached_is_not_afterwards(file: int, piece: tuple[int, int], tls: bool) -> None:
    position, size = piece
    assert sent(file, piece, tls=tls) == CONTENT[position : position + size]
    assert cached(file) == []


@pytest.mark.usefixtures("reads")
@pytest.mark.parametrize("tls", [False, True])
def test_what_was_cached_stays(file: int, tls: bool) -> None:
    there = [*range(3, 9), 200, 202, *range(300, 500)]
    for page in there:
        os.pread(file, 1, page * PAGE_BYTES)
    assert cached(file) == there
    pieces = (10, 299 * PAGE_BYTES), (310 * PAGE_BYTES + 1, 250 * PAGE_BYTES)
    assert sent(file, *pieces, tls=tls) == b"".join(CONTENT[first : first + n] for first, n in pieces)
    assert cached(file) == there


@pytest.mark.usefixtures("reads")
@pytest.mark.parametrize("n", [1, 100, PAGE_BYTES, 50 * PAGE_BYTES + 7, 2 * len(CONTENT)])
@pytest.mark.parametrize("position", [0, 1, 10 * PAGE_BYTES - 3, len(CONTENT) - 5, len(CONTENT), 2 * len(CONTENT)])
def test_reading_leaves_it_as_it_was_too(file: int, position: int, n: int) -> None:
    there = [3, 4, 11, *range(30, 40), PAGES - 1]
    for page in there:
        os.pread(file, 1, page * PAGE_BYTES)
    with opened(f"/proc/self/fd/{file}") as own:
        assert read_once(own, n, position) == CONTENT[position : position + n]
    assert cached(file) == there


@pytest.mark.usefixtures("reads")
def test_what_was_read_for_a_reader_that_left_is_not_cached_either(file: int) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(OSError):
        Sender(ours, tls=False, progress=lambda: None).send(file, ((0, len(CONTENT)),))
    assert cached(file) == []


@pytest.mark.parametrize("warm", [False, True])
def test_a_file_that_became_shorter_ends_it(file: int, warm: bool) -> None:
    os.truncate(file, 10 * PAGE_BYTES)
    if warm:
        os.pread(file, 10 * PAGE_BYTES, 0)
    taken = Taken()
    try:
        with pytest.raises(FileShortened):
            Sender(taken.sock, tls=False, progress=lambda: None).send(file, ((0, 20 * PAGE_BYTES),))
    finally:
        assert taken.all() == CONTENT[: 10 * PAGE_BYTES]


def test_each_block_that_the_reader_takes_is_progress(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "TLS_BYTES", 1000)
    taken, blocks = Taken(), []
    Sender(taken.sock, tls=True, progress=lambda: blocks.append(1)).send(file, ((0, 10_000),))
    assert len(taken.all()) == 10_000 and len(blocks) == 10


# ---- how fast a reader is


class Taking:
    """A reader whose time moves when told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pace = ReadingPace(lambda: self.now)

    def take(self, n: int, seconds: float) -> None:
        self.pace.ready()
        self.now += seconds
        self.pace.took(n)


def test_the_pace_of_a_reader_is_known_after_ten_seconds_of_sending() -> None:
    reader = Taking()
    reader.take(1000, 9.0)
    reader.now += 500  # a slow disk, or no request
    assert reader.pace.bytes_per_second is None
    reader.take(1000, 1.0)
    assert reader.pace.bytes_per_second == 200


def test_a_reader_that_takes_nothing_becomes_slower_while_something_is_ready() -> None:
    reader = Taking()
    reader.take(1000, 10.0)
    reader.pace.ready()
    reader.now += 10
    reader.pace.ready()  # again: nothing was taken
    assert reader.pace.bytes_per_second == 50


def test_what_was_long_ago_does_not_count() -> None:
    reader = Taking()
    reader.take(1 << 30, 10.0)
    reader.take(100, 10.0)
    reader.take(10, 5.0)
    assert reader.pace.bytes_per_second == 110 / 15
