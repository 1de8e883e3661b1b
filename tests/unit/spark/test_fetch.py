"""Fetching ranges: from which replica, what is done when one fails, and how little of an answer is believed."""

from __future__ import annotations

import gc
import os
import re
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsqha.commitlog.entry import ENTRY_BYTES
from pyspark_nsqha.model import Gone, ReadFailed, ReplicaAddress, Split
from pyspark_nsqha.options import Tls
from pyspark_nsqha.reading import fetch
from tests.certificates import Certificates
from tests.unit.spark.scripted_broker import (
    Reply,
    ScriptedBroker,
    hang_up,
    http,
    lying,
    ok,
    refuse,
    short,
    silence,
)
from tests.unit.spark.stored import IDENTITY, Stored, joined


@pytest.fixture
def log(tmp_path: Path) -> Stored:
    log = Stored(tmp_path)
    log.write(20)
    return log


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses take no time here; those of other threads of the process do."""
    pauses: list[float] = []
    monkeypatch.setattr(fetch, "sleep", pauses.append)
    return pauses


@pytest.fixture(autouse=True)
def no_connection_is_left() -> Iterator[None]:
    yield
    for connection in [*fetch._idle]:
        connection.close()
    fetch._idle.clear()


def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are asked in the order in which they are given."""
    monkeypatch.setattr(fetch, "in_order", lambda split, host: split.replicas)


def read(split: Split, **options: Any) -> tuple[bytes, bytes]:
    return joined(fetch.runs(split, **{"timeout_seconds": 10.0, "retries": 1} | options))


def dead() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"127.0.0.1:{closed.getsockname()[1]}"


# ---- runs


@pytest.mark.parametrize("run_bytes", [1, 3000, 1 << 20])
def test_answers_that_end_early_are_gone_on_with(log: Stored, run_bytes: int) -> None:
    log.lose(6)
    with ScriptedBroker(ok(log, 4), ok(log, 5), ok(log)) as broker:
        assert read(log.split(broker.address), run_bytes=run_bytes) == log.content()
        assert [asked["first"] for asked in broker.asked] == ["1", "4", "5"]
        assert broker.connections == 1
        assert {asked["end"] for asked in broker.asked} == {"21"}


def test_a_request_names_the_snapshot_and_the_hold(log: Stored) -> None:
    with ScriptedBroker(ok(log)) as broker:
        split = log.split(broker.address, first=3, end=5, hold_id=f"{7:016x}")
        assert read(split) == log.content(3, 5)
        assert broker.asked == [
            {"first": "3", "end": "5", "at": "20", "chain": f"{split.chain:016x}", "hold": f"{7:016x}"}
        ]


def test_runs_have_whole_batches_of_about_the_bytes_asked_for(log: Stored) -> None:
    size = log.log.entry(1).size
    with ScriptedBroker(ok(log)) as broker:
        runs = fetch.runs(log.split(broker.address), run_bytes=6 * size + 1)
        assert [len(run.entries) // ENTRY_BYTES for run in runs] == [6, 6, 6, 2]


def test_a_batch_larger_than_a_run_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark_nsqha.reading.runs.RUN_BYTES", 1000)
    monkeypatch.setattr("pyspark_nsqha.reading.runs.GROW_BYTES", 10_000)
    log = Stored(tmp_path, body_bytes=100_000)
    log.write(3, messages=1)
    with ScriptedBroker(ok(log)) as broker:
        runs = fetch.runs(log.split(broker.address), run_bytes=1000)
        sizes = []
        entries, frames = bytearray(), bytearray()
        for run in runs:
            sizes.append(len(run.frames))
            entries, frames = entries + run.entries, frames + run.frames
        assert len(sizes) == 3 and (bytes(entries), bytes(frames)) == log.content()


def test_the_frames_of_all_runs_lie_in_the_same_memory(log: Stored) -> None:
    with ScriptedBroker(ok(log)) as broker:
        runs = fetch.runs(log.split(broker.address), run_bytes=1000)
        assert len({id(run.frames.obj) for run in runs if isinstance(run.frames, memoryview)}) == 1


def test_a_connection_is_kept_for_the_next_split(log: Stored) -> None:
    with ScriptedBroker(ok(log)) as broker:
        for first in 1, 5, 9:
            assert read(log.split(broker.address, first=first)) == log.content(first)
        assert broker.connections == 1


def test_a_kept_connection_that_the_broker_closed_is_no_failure(log: Stored, slept: list[float]) -> None:
    with ScriptedBroker(ok(log), hang_up, ok(log)) as broker:
        for _ in range(2):
            assert read(log.split(broker.address), retries=0) == log.content()
        assert broker.connections == 2 and slept == []


def test_a_child_process_makes_connections_of_its_own(log: Stored) -> None:
    with ScriptedBroker(ok(log)) as broker:
        read(log.split(broker.address))
        assert len(fetch._idle) == 1
        child = os.fork()
        if not child:
            os._exit(len(fetch._idle))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_few_connections_are_kept(log: Stored) -> None:
    brokers = [ScriptedBroker(ok(log)) for _ in range(fetch.IDLE_MAX + 2)]
    try:
        for broker in brokers:
            read(log.split(broker.address))
        assert len(fetch._idle) == fetch.IDLE_MAX
    finally:
        for broker in brokers:
            broker.__exit__()


def test_a_reader_that_stops_keeps_no_half_answer(log: Stored) -> None:
    with ScriptedBroker(ok(log)) as broker:
        runs = fetch.runs(log.split(broker.address), run_bytes=1)
        next(runs)
        runs.close()
        assert fetch._idle == []


# ---- which replica


def test_one_on_this_host_goes_first_then_followers() -> None:
    replicas = (
        ReplicaAddress("leader:1", "h1", True),
        ReplicaAddress("near:1", "h2"),
        ReplicaAddress("far:1", "h3"),
        ReplicaAddress("farther:1", "h4"),
    )
    for first in range(1, 50):
        split = Split(IDENTITY, 0, 1, first, first + 1, 0, 1, 1, 1, replicas)
        order = [replica.address for replica in fetch.in_order(split, "h2")]
        assert order[0] == "near:1" and order[-1] == "leader:1"
        assert fetch.in_order(split, "h1")[0].address == "leader:1"


def test_splits_are_spread_over_replicas() -> None:
    replicas = tuple(ReplicaAddress(f"n{n}:1") for n in range(3))
    firsts = [fetch.in_order(Split(IDENTITY, 0, 1, n, n + 1, 0, 1, 1, 1, replicas), "")[0].address for n in range(90)]
    assert min(firsts.count(replica.address) for replica in replicas) > 15


@pytest.mark.parametrize(
    "failing",
    [
        refuse(409, "this replica is behind"),
        refuse(404, "no such replica"),
        refuse(410, "gone", Nsqha_Log_Start=11),
        refuse(500),
        refuse(503, "later", Retry_After=2),
        hang_up,
    ],
)
def test_the_next_replica_serves_what_one_does_not(
    log: Stored, failing: Any, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    in_turn(monkeypatch)
    with ScriptedBroker(failing) as bad, ScriptedBroker(ok(log)) as good:
        assert read(log.split(bad.address, good.address), retries=0) == log.content()
        assert len(bad.asked) == 1 and slept == []


def test_an_answer_that_breaks_off_is_gone_on_with_elsewhere(log: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn(monkeypatch)
    size = log.log.entry(1).size
    for missing in 1, size + 1, 7 * size, 20 * size + 5:
        with ScriptedBroker(short(log, missing)) as bad, ScriptedBroker(ok(log)) as good:
            assert read(log.split(bad.address, good.address), run_bytes=1, retries=0) == log.content()
            had = max((20 * size - missing) // size, 0)
            assert good.asked[0]["first"] == str(1 + had), "no batch comes twice"


def test_one_that_is_silent_is_left_after_the_time(log: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn(monkeypatch)
    with ScriptedBroker(silence) as bad, ScriptedBroker(ok(log)) as good:
        assert read(log.split(bad.address, good.address), timeout_seconds=2) == log.content()


def test_after_all_rounds_each_replica_and_its_reason_is_named(log: Stored, slept: list[float]) -> None:
    nobody = dead()
    with ScriptedBroker(refuse(409, "this replica is behind")) as behind:
        with pytest.raises(ReadFailed) as failed:
            read(log.split(behind.address, nobody), retries=3)
        assert len(behind.asked) == 4 and slept == [0.5, 1.0, 2.0]
    text = str(failed.value)
    assert text.startswith("orders/3 offsets [0, 40), from log id 1 cannot be read from any replica: ")
    assert f"{behind.address}: 409 this replica is behind" in text and f"{nobody}: Connection refused" in text
    assert failed.value.planned == (0, 40) and "\n" not in text


def test_rounds_are_counted_anew_behind_each_good_run(log: Stored, slept: list[float]) -> None:
    steps = [step for upto in range(3, 21, 2) for step in (refuse(500), ok(log, upto))]
    with ScriptedBroker(*steps, ok(log)) as broker:
        assert read(log.split(broker.address), retries=1) == log.content()
        assert slept == [0.5] * 9


def test_busy_replicas_are_waited_for_longer_than_failing_ones(log: Stored, slept: list[float]) -> None:
    with ScriptedBroker(*[refuse(503, "too many readers", Retry_After=2)] * 10, ok(log)) as broker:
        assert read(log.split(broker.address), retries=1, timeout_seconds=60) == log.content()
        assert len(slept) == 10
    with ScriptedBroker(refuse(503, "too many readers")) as broker, pytest.raises(ReadFailed, match="503 too many"):
        read(log.split(broker.address), retries=1, timeout_seconds=2)


def test_a_split_without_replicas_says_so(log: Stored) -> None:
    with pytest.raises(ReadFailed, match="the snapshot names no replica"):
        read(log.split())


def test_what_all_replicas_have_lost_to_retention_is_gone(log: Stored, slept: list[float]) -> None:
    start = {"Nsqha_Log_Start": 11, "Nsqha_Start_Offset": 20}
    with ScriptedBroker(refuse(410, "gone", **start)) as a, ScriptedBroker(refuse(410, "gone", **start)) as b:
        with pytest.raises(Gone, match=r"the log starts at log id 11, there is \[20, 40\)") as gone:
            read(log.split(a.address, b.address), retries=3)
        assert (gone.value.planned, gone.value.available) == ((0, 40), (20, 40))
        assert slept == []


def test_what_one_of_them_may_have_is_not_gone(log: Stored) -> None:
    with ScriptedBroker(refuse(410, "gone", Nsqha_Log_Start=11)) as a:
        with pytest.raises(ReadFailed) as failed:
            read(log.split(a.address, dead()), retries=1)
        assert not isinstance(failed.value, Gone)


@pytest.mark.parametrize("other", [refuse(409, "this replica is behind"), refuse(404, "no such replica")])
def test_what_one_lost_to_retention_and_the_others_do_not_have_is_gone(
    log: Stored, slept: list[float], other: Any
) -> None:
    start = {"Nsqha_Log_Start": 11, "Nsqha_Start_Offset": 20}
    with ScriptedBroker(refuse(410, "gone", **start)) as a, ScriptedBroker(other) as b:
        with pytest.raises(Gone, match=r"the log starts at log id 11, there is \[20, 40\)") as gone:
            read(log.split(a.address, b.address), retries=2)
        assert (gone.value.planned, gone.value.available) == ((0, 40), (20, 40))
        assert len(b.asked) == 3 and slept == [0.5, 1.0], "the other one may have it a moment later"


def test_what_the_leader_lost_to_retention_is_gone_although_another_does_not_answer(log: Stored) -> None:
    with ScriptedBroker(refuse(410, "gone", Nsqha_Log_Start=11)) as leader:
        split = replace(log.split(), replicas=(ReplicaAddress(dead()), ReplicaAddress(leader.address, leader=True)))
        with pytest.raises(Gone, match="the log starts at log id 11"):
            read(split, retries=1)


def test_what_no_node_knows_was_deleted_or_moved(log: Stored, slept: list[float]) -> None:
    with ScriptedBroker(refuse(404, "no such replica")) as a, ScriptedBroker(refuse(404, "no such replica")) as b:
        expected = r"orders/3 .*: no node has it any more: .* created again .* load it again"
        with pytest.raises(ReadFailed, match=expected):
            read(log.split(a.address, b.address), retries=2)
        assert slept == [0.5, 1.0], "a node that is starting has it a moment later"


# ---- TLS


def test_a_file_of_no_use_is_named_with_its_option_before_anybody_is_asked(
    log: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    certificates = Certificates(tmp_path)
    for name in ("reader", "other"):
        certificates.issue(name, "URI:nsqha:reader")
    monkeypatch.chdir(tmp_path)
    Path("empty.pem").touch()
    cert, key, ca = (os.path.relpath(file) for file in (
        certificates.cert("reader"), certificates.key("reader"), certificates.cert("ca")
    ))  # fmt: skip
    other = os.path.relpath(certificates.key("other"))

    def refused(*files: str) -> str:
        with ScriptedBroker(ok(log)) as broker, pytest.raises(ReadFailed) as failed:
            read(log.split(broker.address, broker.address), tls=Tls(*files), retries=3)
        assert (broker.connections, slept) == (0, [])
        return str(failed.value)

    gone = "cannot be read on this machine: No such file or directory"
    assert refused("no.pem", key, ca) == f"nsqha.tls.cert: no.pem {gone}"
    assert refused(cert, "no.pem", ca) == f"nsqha.tls.key: no.pem {gone}"
    assert refused(cert, key, "no.pem") == f"nsqha.tls.ca: no.pem {gone}"
    assert refused(cert, key, "empty.pem") == "nsqha.tls.ca: empty.pem on this machine has no certificate (PEM)"
    for files in ((cert, other), (cert, "empty.pem"), ("empty.pem", key)):
        text = refused(*files, ca)
        named = f"nsqha.tls.cert and nsqha.tls.key: {files[0]} and {files[1]}"
        assert text.startswith(f"{named} on this machine are not a ")


def test_a_broker_without_tls_is_told_with_the_options_names(log: Stored, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.issue("reader", "URI:nsqha:reader")
    tls = Tls(certificates.cert("reader"), certificates.key("reader"), certificates.cert("ca"))
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            peer, _ = plain.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answered = threading.Thread(target=answer)
        answered.start()
        with pytest.raises(ReadFailed, match=r"TLS: .*; a reader needs nsqha\.tls\.cert, nsqha\.tls\.key and nsqha"):
            read(log.split(f"127.0.0.1:{plain.getsockname()[1]}"), tls=tls, retries=0)
        answered.join(5)


# ---- a run that does not verify


def test_it_comes_again_from_another_replica(log: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn(monkeypatch)
    with ScriptedBroker(ok(log)) as a, ScriptedBroker(ok(log)) as b:
        runs = fetch.runs(log.split(a.address, b.address), run_bytes=1)
        assert [next(runs).first_log_id for _ in range(3)] == [1, 2, 3]
        assert runs.retry_other("its CRC is wrong")
        assert [next(runs).first_log_id for _ in range(2)] == [3, 4]
        assert b.asked[0]["first"] == "3"
        assert [run.first_log_id for run in runs] == [*range(5, 21)]


def test_also_the_last_run(log: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn(monkeypatch)
    with ScriptedBroker(ok(log)) as a, ScriptedBroker(ok(log)) as b:
        runs = fetch.runs(log.split(a.address, b.address))
        assert next(runs).first_log_id == 1
        assert runs.retry_other("its CRC is wrong")
        assert next(runs).first_log_id == 1
        assert list(runs) == []
        assert len(a.asked) == len(b.asked) == 1


@pytest.mark.parametrize(("replicas", "tries"), [(1, 2), (2, 2), (3, 3)])
def test_no_more_often_than_there_are_replicas_and_once_more_from_a_single_one(
    log: Stored, replicas: int, tries: int
) -> None:
    brokers = [ScriptedBroker(ok(log)) for _ in range(replicas)]
    try:
        runs = fetch.runs(log.split(*(broker.address for broker in brokers)), run_bytes=1)
        next(runs)
        for _ in range(tries - 1):
            assert runs.retry_other("bad")
            kept = next(runs)
            assert kept.first_log_id == 1
        before = bytes(kept.frames)
        assert not runs.retry_other("bad")
        assert bytes(kept.frames) == before, "it stays as it is"
        assert next(runs).first_log_id == 2
        assert runs.retry_other("bad"), "the next run has its own tries"
    finally:
        runs.close()
        for broker in brokers:
            broker.__exit__()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("others", [1, 2])
def test_one_that_does_not_answer_is_not_among_those_that_sent_it(
    log: Stored, order: int, others: int, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    in_turn(monkeypatch)
    brokers = [ScriptedBroker(ok(log)), *[ScriptedBroker(refuse(500, "not now")) for _ in range(others)]]
    try:
        addresses = [broker.address for broker in brokers][::order]
        runs = fetch.runs(log.split(*addresses), run_bytes=1, retries=2)
        with pytest.raises(ReadFailed) as failed:
            for _ in range(50):
                next(runs)
                assert runs.retry_other("it is faulty there")
        assert f"{brokers[0].address}: it is faulty there" in str(failed.value)
        assert f"{brokers[1].address}: 500 not now" in str(failed.value)
        assert [len(broker.asked) for broker in brokers] == [3] * (others + 1) and slept == [0.5, 1.0]
    finally:
        for broker in brokers:
            broker.__exit__()


def test_one_that_was_busy_for_a_while_has_it_right(log: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn(monkeypatch)
    busy = refuse(503, "too many readers")
    with ScriptedBroker(ok(log)) as bad, ScriptedBroker(busy, busy, busy, ok(log)) as good:
        runs = fetch.runs(log.split(bad.address, good.address), run_bytes=1, retries=2, timeout_seconds=60)
        next(runs)
        for _ in range(3):
            assert runs.retry_other("it is faulty there") and len(good.asked) < 4
            next(runs)
        assert runs.retry_other("it is faulty there")
        assert next(runs).first_log_id == 1 and len(good.asked) == 4
        assert not runs.retry_other("it is faulty here too")
        runs.close()


def test_before_the_first_run_there_is_nothing_to_retry(log: Stored) -> None:
    assert not fetch.runs(log.split("127.0.0.1:1")).retry_other("bad")


# ---- answers that lie


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Nsqha_First": None}, "no Nsqha-First: it is not a segment service"),
        ({"Nsqha_End": "x"}, "no Nsqha-End: it is not a segment service"),
        ({"Nsqha_First": 2}, r"it sent \[2, 21\) instead of \[1, 21\)"),
        ({"Nsqha_End": 22}, r"it sent \[1, 22\) instead of \[1, 21\)"),
        ({"Nsqha_End": 1}, r"it sent \[1, 1\) instead of \[1, 21\)"),
        ({"Nsqha_End": 5}, "its entries announce"),
        ({"Content_Length": 1 << 62}, "its entries announce .* bytes of frames, but its head 4611686018427387904"),
        ({"Content_Length": 100}, "it announced 1600 bytes of entries in an answer of 100"),
        ({"Content_Length": None, "Transfer_Encoding": "chunked"}, "no Content-Length|IncompleteRead|ValueError"),
        ({"Content_Length": "9" * 100}, "no Content-Length"),
    ],
)
def test_an_answer_whose_parts_do_not_fit_is_not_taken(log: Stored, headers: dict[str, Any], why: str) -> None:
    with ScriptedBroker(lying(log, **headers)) as broker:
        with pytest.raises(ReadFailed) as failed:
            read(log.split(broker.address), retries=0, timeout_seconds=20)
        assert re.search(why.replace("4611686018427387904", r"\d+"), str(failed.value)), failed.value


def test_entries_of_an_answer_are_bounded(log: Stored) -> None:
    end = 1 << 40

    def step(asked: dict[str, str]) -> Reply:
        return http(200, b"", Content_Length=1 << 60, Nsqha_First=1, Nsqha_End=end)

    with ScriptedBroker(step) as broker:
        split = log.split(broker.address)
        with pytest.raises(ReadFailed, match="bytes of entries in an answer of"):
            read(Split(**{**split.__dict__, "end_log_id": end}), retries=0)


def test_memory_is_taken_for_what_has_come_and_not_for_what_is_announced(log: Stored) -> None:
    huge = log.log.entry(1)._replace(size=(1 << 32) - 1).encode()

    def step(asked: dict[str, str]) -> Reply:
        body = huge + b"x" * (3 << 20)
        return http(200, body, ends=True, Content_Length=80 + (1 << 32) - 1, Nsqha_First=1, Nsqha_End=2)

    with ScriptedBroker(step) as broker:
        gc.collect()
        tracemalloc.start()
        try:
            with pytest.raises(ReadFailed, match="it ended in the middle of an answer"):
                read(log.split(broker.address), retries=0)
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()


def test_a_long_refusal_is_one_short_line(log: Stored) -> None:
    with ScriptedBroker(refuse(500, "no\n" * 100_000)) as broker:
        with pytest.raises(ReadFailed) as failed:
            read(log.split(broker.address), retries=0)
        assert len(str(failed.value)) < 500 and "\n" not in str(failed.value)


def test_an_address_that_is_none_is_named(log: Stored) -> None:
    with pytest.raises(ReadFailed, match=r"nothing: .*'nothing' is not host:port"):
        read(log.split("nothing"), retries=0)
