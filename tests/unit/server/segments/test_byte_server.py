"""Bytes over HTTP: what a reader gets, and what a stranger does not."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nsqha.commitlog.entry import ENTRY_BYTES, FAULTY
from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT
from nsqha.server.runtime import listen
from nsqha.server.segments import byte_server, ranges
from nsqha.server.segments import turns as turns_module
from nsqha.server.segments.byte_server import ReaderLimits
from nsqha.server.segments.ranges import Refusal
from nsqha.server.segments.turns import Turns
from tests.unit.server.segments.byte_rig import ByteServerRig, Response, running
from tests.unit.spark.stored import Stored


@pytest.fixture
def log(tmp_path: Path) -> Stored:
    """Batches 1 to 10, 11 to 20 and 21 to 30, in a pair of files each."""
    log = Stored(tmp_path)
    for _ in range(3):
        log.write(10)
        if log.log.end.log_id < 30:
            log.roll()
    return log


@pytest.fixture
def rig(log: Stored) -> Iterator[ByteServerRig]:
    with running(log) as rig:
        yield rig


def content(response: Response) -> tuple[int, int, bytes, bytes]:
    assert response.status == 200, response.text
    first, end = int(response.headers["Nsqha-First"]), int(response.headers["Nsqha-End"])
    size = (end - first) * ENTRY_BYTES
    return first, end, response.body[:size], response.body[size:]


# ---- what a reader gets


def test_a_range_is_its_entries_and_then_their_frames(rig: ByteServerRig) -> None:
    assert content(rig.ask(3, 8)) == (3, 8, *rig.stored.content(3, 8))
    assert content(rig.ask(1, 2)) == (1, 2, *rig.stored.content(1, 2))


def test_an_answer_ends_where_its_file_ends(rig: ByteServerRig) -> None:
    assert content(rig.ask(8, 25)) == (8, 11, *rig.stored.content(8, 11))
    assert content(rig.ask(11, 31)) == (11, 21, *rig.stored.content(11, 21))
    assert content(rig.ask(21, 31)) == (21, 31, *rig.stored.content(21, 31))


def test_an_answer_ends_at_max_bytes_between_two_batches(rig: ByteServerRig) -> None:
    size = rig.stored.log.entry(1).size
    for wanted, end in (0, 2), (1, 2), (2 * size - 1, 2), (2 * size, 3), (3 * size + 1, 4), (1 << 60, 11):
        assert content(rig.ask(1, 31, max=wanted)) == (1, end, *rig.stored.content(1, end)), wanted


def test_entries_are_read_in_blocks_as_many_as_an_answer_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Stored(tmp_path, body_bytes=10)
    log.write(100, messages=1)
    monkeypatch.setattr(ranges, "FIRST_SLOTS", 3)
    with running(log) as rig:
        assert content(rig.ask(2, 101)) == (2, 101, *log.content(2, 101))
        monkeypatch.setattr(ranges, "ENTRIES_BYTES_MAX", 20 * ENTRY_BYTES)
        assert content(rig.ask(2, 101)) == (2, 22, *log.content(2, 22))
        size = log.log.entry(1).size
        assert content(rig.ask(1, 101, max=10 * size)) == (1, 11, *log.content(1, 11))


@pytest.mark.parametrize("lost", [(1,), (10,), (4, 5, 6), (2, 9), tuple(range(1, 11))])
def test_lost_batches_come_without_frames(rig: ByteServerRig, lost: tuple[int, ...]) -> None:
    for log_id in lost:
        rig.stored.lose(log_id)
    _, _, entries, frames = content(rig.ask(1, 11))
    assert (entries, frames) == rig.stored.content(1, 11)
    assert b"\xee\xee" not in frames and len(entries) == 10 * ENTRY_BYTES


def test_faulty_entries_come_without_frames(rig: ByteServerRig) -> None:
    rig.stored.set_flags(5, FAULTY)
    size = rig.stored.log.entry(1).size
    assert len(content(rig.ask(4, 7))[3]) == 2 * size


def test_a_connection_serves_one_request_after_another(rig: ByteServerRig) -> None:
    with rig.connect() as reader:
        for first in 1, 8, 30, 11:
            assert content(reader.get(rig.target(first, 31)))[0] == first
        assert reader.get(rig.target(1, 2, at=99)).status == 409
        assert content(reader.get(rig.target(2, 3)))[:2] == (2, 3)
        both = [f"GET {rig.target(n, n + 1)} HTTP/1.1\r\n\r\n".encode() for n in (5, 6)]
        reader.send(both[0] + both[1])
        assert [content(reader.response())[0] for _ in both] == [5, 6]


def test_the_hold_is_told_to_the_loop(rig: ByteServerRig) -> None:
    rig.ask(1, 2, hold=f"{0xABC:016x}")
    rig.ask(1, 2)
    assert [ask.hold for ask in rig.asked] == [0xABC, 0]


def test_requests_bytes_and_connections_are_counted(rig: ByteServerRig) -> None:
    with rig.connect() as reader:
        n = len(reader.get(rig.target(1, 11)).body)
        reader.get(rig.target(1, 2, at=99))
        assert rig.server.figures.connections == 1 and rig.server.figures.bytes == n
        wait_until(lambda: dict(rig.server.figures.requests) == {"200": 1, "409": 1})


# ---- what is refused


def test_another_chain_is_refused_whoever_has_the_entry(rig: ByteServerRig) -> None:
    for at in 30, 15, 20:
        entry = rig.stored.log.entry(at)
        assert rig.ask(1, 5, at=at, chain=f"{entry.chain:016x}").status == 200
        response = rig.ask(1, 5, at=at, chain=f"{entry.chain ^ 1:016x}")
        assert response.status == 409 and "another chain" in response.text


def test_a_replica_that_is_behind_says_so(rig: ByteServerRig) -> None:
    response = rig.ask(1, 5, at=31)
    assert response.status == 409
    assert response.text == "this replica is behind: it ends before log id 31, and 31 is asked for\n"


def test_an_entry_that_does_not_verify_answers_nothing(rig: ByteServerRig) -> None:
    pair = rig.stored.log.files.pair_of(15)
    chain = f"{rig.stored.log.entry(15).chain:016x}"
    pair.commitlog.pwrite(b"\xee", pair.slot(15) + 3)
    for ask in rig.ask(1, 5, at=15, chain=chain), rig.ask(15, 16), rig.ask(12, 16):
        assert ask.status == 409 and "entry 15 of this replica does not verify" in ask.text
    assert rig.ask(12, 20).status == 200, "the reader verifies what is in between"


def test_an_entry_of_another_batch_is_not_taken_for_it(rig: ByteServerRig) -> None:
    pair, other = rig.stored.log.files.pair_of(15), rig.stored.log.entry(14)
    pair.commitlog.pwrite(other.encode(), pair.slot(15))
    for first, end in (15, 17), (12, 16):
        assert rig.ask(first, end).status == 409
    assert rig.ask(1, 5, at=15, chain=f"{other.chain:016x}").status == 409


def test_below_the_log_start_it_is_gone(rig: ByteServerRig) -> None:
    rig.stored.log.forget_pairs(rig.stored.log.pairs[1].first)
    response = rig.ask(10, 12)
    assert response.status == 410 and "the log starts at log id 11, offset 20" in response.text
    assert response.headers["Nsqha-Log-Start"] == "11" and response.headers["Nsqha-Start-Offset"] == "20"
    assert rig.ask(11, 12).status == 200


def test_files_that_go_meanwhile_are_gone_or_asked_for_elsewhere(rig: ByteServerRig) -> None:
    pair = rig.stored.log.files.pair_of(1)
    os.unlink(pair.path(SEGMENT))
    response = rig.ask(1, 2)
    assert response.status == 503 and response.headers["Retry-After"]
    os.unlink(pair.path(COMMITLOG))
    assert rig.ask(1, 2).status == 503
    assert rig.ask(11, 12).status == 200


def test_a_segment_that_is_too_short_is_not_begun_with(rig: ByteServerRig) -> None:
    pair = rig.stored.log.files.pair_of(21)
    pair.segment.truncate(pair.segment.size() - 1)
    assert rig.ask(21, 31).status == 409
    assert content(rig.ask(21, 30))[:2] == (21, 30)


def test_entries_that_lie_about_their_place_are_not_followed(rig: ByteServerRig) -> None:
    pair, entry = rig.stored.log.files.pair_of(11), rig.stored.log.entry(15)
    for lie in (
        entry._replace(position=0),  # before the pair
        entry._replace(position=(1 << 64) - 1),
        entry._replace(size=(1 << 32) - 1),
        entry._replace(position=(1 << 63) + 5, size=1),
    ):
        pair.commitlog.pwrite(lie.encode(), pair.slot(15))
        for first, end in (15, 17), (12, 16), (12, 20):
            response = rig.ask(first, end)
            assert response.status in (200, 409)
            assert len(response.body) <= pair.segment.size() + 10 * ENTRY_BYTES
        pair.commitlog.pwrite(lie._replace(flags=FAULTY).encode(), pair.slot(15))
        assert rig.ask(12, 20).status == 409, lie


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/segments/0000000000abcdef/3x?first=1",
        "/segments/0000000000ABCDEF/3?first=1",
        "/segments/0000000000abcdef?first=1",
        "/segments/0000000000abcdef/../3?first=1",
        "http://[/",
    ],
)
def test_another_path_is_nothing(rig: ByteServerRig, target: str) -> None:
    with rig.connect() as reader:
        assert reader.get(target).status in (400, 404)
        assert reader.ended(), "no reader asks for that"
    assert rig.asked == []


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"first": "x"}, "first has to be a number from 0"),
        ({"first": ""}, "first has to be a number from 0"),
        ({"first": "01"}, "first has to be a number from 0"),
        ({"first": "1_0"}, "first has to be a number from 0"),
        ({"end": 1 << 64}, "end has to be a number from 0"),
        ({"end": "9" * 5000}, ""),
        ({"first": 0}, "it has to be 1 <= first < end <= at \\+ 1"),
        ({"first": 5, "end": 5}, "it has to be 1 <= first < end <= at \\+ 1"),
        ({"end": 32}, "it has to be 1 <= first < end <= at \\+ 1"),
        ({"chain": "abc"}, "chain has to be 16 hex digits"),
        ({"hold": "x"}, "hold has to be 16 hex digits"),
        ({"max": -1}, "max has to be a number from 0"),
        ({"other": 1}, "unknown: 'other'"),
        ({str(n): n for n in range(20)}, "the query has to be a list of at most 8"),
    ],
)
def test_wrong_parameters_are_refused_by_name(rig: ByteServerRig, more: dict[str, object], why: str) -> None:
    import re

    response = rig.ask(**({"first": 1, "end": 5} | more))  # type: ignore[arg-type]
    assert response.status == 400 and re.search(why, response.text) and response.text.count("\n") == 1
    assert rig.asked == []


def test_a_parameter_that_is_there_twice_is_refused(rig: ByteServerRig) -> None:
    response = rig.get(rig.target(1, 5) + "&first=2")
    assert response.status == 400 and "twice" in response.text


# ---- strangers


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/9.1\r\n\r\n", 505),
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 2000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 9000 + b"\r\n\r\n", 431),
    ],
)
def test_what_is_no_request_is_refused_and_ends_the_connection(rig: ByteServerRig, head: bytes, status: int) -> None:
    with rig.connect() as reader:
        reader.send(head)
        assert reader.response().status == status
        assert reader.ended()
    assert rig.asked == []


def test_half_a_request_ends_after_its_time(log: Stored) -> None:
    with running(log, limits=ReaderLimits(head_seconds=0.2)) as rig:
        for head in b"", b"GET /", b"GET / HTTP/1.1\r\nHost: x\r\n":
            with rig.connect() as reader:
                reader.send(head)
                assert reader.ended()


def test_an_idle_connection_ends_after_its_time(log: Stored) -> None:
    with running(log, limits=ReaderLimits(idle_seconds=0.2)) as rig, rig.connect() as reader:
        assert reader.get(rig.target(1, 2)).status == 200
        assert reader.ended()


def test_a_reader_that_takes_nothing_is_cut_off(tmp_path: Path) -> None:
    log = Stored(tmp_path, body_bytes=1 << 20)
    log.write(12, messages=1)
    with running(log, limits=ReaderLimits(stalled_seconds=0.5)) as rig, rig.connect(receive_bytes=4096) as reader:
        reader.send(f"GET {rig.target(1, 13)} HTTP/1.1\r\n\r\n".encode())
        assert reader.file.readline().startswith(b"HTTP/1.1 200")
        wait_until(lambda: rig.server.figures.connections == 0)
        with suppress(ConnectionError):
            assert len(reader.file.read()) < 12 << 20


def test_a_reader_that_does_not_end_with_an_answer_is_cut_off(tmp_path: Path) -> None:
    log = Stored(tmp_path, body_bytes=1 << 20)
    log.write(12, messages=1)
    with running(log, limits=ReaderLimits(answer_seconds=0.5)) as rig, rig.connect(receive_bytes=4096) as reader:
        reader.send(f"GET {rig.target(1, 13)} HTTP/1.1\r\n\r\n".encode())
        assert reader.file.readline().startswith(b"HTTP/1.1 200")
        wait_until(lambda: rig.server.figures.connections == 0)


def test_a_connection_too_many_takes_the_place_of_the_one_that_waits_longest(log: Stored) -> None:
    with running(log, limits=ReaderLimits(connections=2)) as rig, rig.connect() as first, rig.connect() as second:
        for reader in (first, second):
            assert reader.get(rig.target(1, 2)).status == 200
            wait_until(lambda: all(connection.waiting_since is not None for connection in rig.server._now()))
        with rig.connect() as third:
            assert third.get(rig.target(1, 2)).status == 200
            assert first.ended()
            assert second.get(rig.target(1, 2)).status == 200


def test_where_all_are_being_served_one_more_is_told_to_come_later(tmp_path: Path) -> None:
    log = Stored(tmp_path, body_bytes=1 << 20)
    log.write(20, messages=1)
    with running(log, limits=ReaderLimits(connections=1)) as rig, rig.connect(receive_bytes=4096) as slow:
        slow.send(f"GET {rig.target(1, 21)} HTTP/1.1\r\n\r\n".encode())
        assert slow.file.readline().startswith(b"HTTP/1.1 200")
        with rig.connect() as reader:
            refused = reader.response()  # before it has asked
            assert refused.status == 503 and refused.headers["Retry-After"] == "2"
            assert reader.ended()


def of(*, waits_since: float | None = None, taken: float | None = None) -> Any:
    return Mock(waiting_since=waits_since, pace=Mock(bytes_per_second=taken))


def test_the_slowest_reader_loses_its_place_and_never_one_that_reads_well() -> None:
    good, new, slow, slowest = of(taken=2000.0), of(), of(taken=900.0), of(taken=10.0)
    waiting, longest = of(waits_since=7.0, taken=5.0), of(waits_since=3.0)
    unasked = Mock(waiting_since=None, pace=None)
    assert byte_server.replaceable([good, new, unasked], 1000) is None
    assert byte_server.replaceable([good, waiting, longest, new], 1000) is longest
    assert byte_server.replaceable([good, waiting, slow, slowest, longest], 1000) is slowest


def test_a_new_reader_takes_the_place_of_a_slow_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqha.server.segments.sending.PACE_SECONDS", 0.2)
    log = Stored(tmp_path, body_bytes=1 << 20)
    log.write(20, messages=1)
    limits = ReaderLimits(connections=1, slow_bytes_per_second=1 << 40)
    with running(log, limits=limits) as rig, rig.connect(receive_bytes=4096) as slow:
        slow.send(f"GET {rig.target(1, 21)} HTTP/1.1\r\n\r\n".encode())
        assert slow.file.readline().startswith(b"HTTP/1.1 200")
        (served,) = rig.server._now()
        wait_until(lambda: served.pace is not None and served.pace.bytes_per_second is not None)
        with rig.connect() as new:
            assert new.get(rig.target(1, 2)).status == 200
            with suppress(ConnectionError):
                assert len(slow.file.read()) < 20 << 20, "its answer breaks off"


def test_without_spare_descriptors_nobody_is_served(rig: ByteServerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "is_spare", lambda descriptor: True)
    with rig.connect() as reader:
        assert reader.response().status == 503


def test_a_loop_that_does_not_answer_makes_readers_go_elsewhere(log: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_server, "LOOK_UP_SECONDS", 0.1)
    go_on = threading.Event()
    with running(log, check=lambda ask, peer: go_on.wait(10)) as rig:
        response = rig.ask(1, 2)
        go_on.set()
        assert response.status == 503 and "take another replica" in response.text


# ---- one turn at a time


def test_requests_are_parsed_one_at_a_time(rig: ByteServerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads at once would keep the loop from running."""
    inside, most = [0], [0]
    parse = byte_server.Ask.parse

    def watched(target: str) -> byte_server.Ask:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1
        return parse(target)

    monkeypatch.setattr(byte_server.Ask, "parse", watched)
    with ExitStack() as readers:
        there = [readers.enter_context(rig.connect()) for _ in range(8)]
        for reader in there:
            reader.send(f"GET {rig.target(1, 3)} HTTP/1.1\r\n\r\n".encode())
        assert [content(reader.response())[:2] for reader in there] == [(1, 3)] * 8
    assert most == [1]


def test_who_waits_for_a_head_or_a_disk_keeps_nobody_else(rig: ByteServerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, reached, go_on = byte_server.read_once, threading.Event(), threading.Event()

    def stuck(fd: int, n: int, position: int) -> bytes:
        if threading.current_thread().name.endswith(name):
            reached.set()
            assert go_on.wait(10)
        return reads(fd, n, position)

    monkeypatch.setattr(byte_server, "read_once", stuck)
    with rig.connect() as late, rig.connect() as slow:
        late.send(b"GET /x HTTP/1.1\r\nHost: ")
        name = listen.address_text(slow.sock.getsockname())
        slow.send(f"GET {rig.target(1, 3)} HTTP/1.1\r\n\r\n".encode())
        assert reached.wait(10)
        assert content(rig.ask(4, 8))[:2] == (4, 8)
        go_on.set()
        assert content(slow.response())[:2] == (1, 3)
        late.send(b"x\r\n\r\n")
        assert late.response().status == 404


def test_turns_come_in_order_and_who_waits_too_long_is_sent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, order, there = Turns(), list[int](), threading.Semaphore(0)

    def one(n: int) -> None:
        with turns.turn():
            order.append(n)

    with turns.turn():
        threads = []
        for n in range(4):
            threads.append(threading.Thread(target=one, args=(n,)))
            threads[-1].start()
            wait_until(lambda wanted=n + 1: len(turns._waiting) == wanted)
        monkeypatch.setattr(turns_module, "TURN_SECONDS", 0.01)
        with pytest.raises(Refusal, match="too busy"), turns.turn():
            there.release()
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3] and not there.acquire(blocking=False)
    with turns.turn():
        pass  # nobody has it


# ---- no readers


def test_the_watcher_wakes_by_itself_only_while_there_is_a_reader(log: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []

    class Poll:
        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, milliseconds: float | None) -> list[tuple[int, int]]:
            waits.append(milliseconds)
            return self._poll.poll(milliseconds)

    monkeypatch.setattr(byte_server, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
    with running(log) as rig:
        wait_until(lambda: waits)
        with rig.connect() as reader:
            assert reader.get(rig.target(1, 2)).status == 200
            wait_until(lambda: len(waits) > 1)
        wait_until(lambda: waits[-1] is None)
    assert waits[0] is None and waits[1] == 1000 * byte_server.WATCH_SECONDS


# ---- the end


def test_a_stop_ends_connections_and_leaves_no_thread(tmp_path: Path) -> None:
    log = Stored(tmp_path, body_bytes=1 << 20)
    log.write(20, messages=1)
    rig = ByteServerRig(log)
    with rig.connect(receive_bytes=4096) as slow, rig.connect() as idle:
        slow.send(f"GET {rig.target(1, 21)} HTTP/1.1\r\n\r\n".encode())
        assert slow.file.readline().startswith(b"HTTP/1.1 200")
        assert idle.get(rig.target(1, 2)).status == 200
        rig.close()
        assert idle.ended()
        with suppress(ConnectionError):
            assert len(slow.file.read()) < 20 << 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("segments")]
    with pytest.raises(ConnectionRefusedError):
        rig.connect()


def wait_until(done: object, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)
