"""A history is lines that anybody can read, in a file that holds what was recorded when it is read."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import msgspec
import pytest

from tests.jepsen import history, sampling
from tests.jepsen.history import (
    AdminEnded,
    AdminSent,
    Answered,
    AnyEvent,
    ChannelMade,
    Deleted,
    Died,
    Drained,
    FaultBegun,
    FaultEnded,
    Healed,
    History,
    Killed,
    Led,
    Letter,
    Message,
    Outcome,
    Paused,
    Place,
    Publish,
    Ready,
    Received,
    Refused,
    Run,
    Sample,
    SeekEnded,
    SeekSent,
    Settled,
    Settling,
    Started,
    Stored,
)

MESSAGE = Message(2, 7, 99, "0000000000000010", 1, 1_700_000_000_000_000_000)
ONE_OF_EACH: list[AnyEvent] = [
    Run(1, "always", 1.1, "N1"),
    Started(0.1, 1),
    Ready(0.2, 1),
    Killed(0.3, 1, "serving"),
    Publish(0.4, 1, 1, 3, 2, "orders", "MPUB", 7, [99, 98], 0.0, "n1", 2, True),
    Outcome(0.5, 1, "ok"),
    ChannelMade(0.1, 0.2, 1, 3, "orders", "steady", "ok", "n1", True, 3.0),
    Paused(0.1, 0.2, "orders", "steady", True, "ok"),
    Deleted(0.1, 0.2, "orders", "info"),
    Received(0.6, 3, [MESSAGE]),
    Answered(0.7, 3, "REQ", [MESSAGE.id], 0.5),
    Refused(0.8, 3, "REQ", MESSAGE.id),
    Drained(0.9, "orders"),
    SeekSent(1.0, 2, "orders", "steady", "time", 5, 1, 0),
    SeekEnded(1.1, 2, "ok", [Place(0, 10, 5, 4)]),
    AdminSent(1.2, 3, "empty", "orders", "steady"),
    AdminEnded(1.3, 3, "fail", "no such channel"),
    FaultBegun(1.4, 4, "N1", "n2 isolated", ["n2"]),
    FaultEnded(1.5, 4, "ok", "413 packets dropped"),
    Healed(1.6, 10.0),
    Sample(1.7, "n1", 5_000_000, 60, [Led("orders", 0, 3, ["n1", "n2"], 3)], {"depth": 4.0}, 4711, ["gone"]),
    Stored(1.8, "n1", "orders", 0, [MESSAGE]),
    Settled(1.8, "n1", "orders", 0, "steady", [Settling(3, 5, 10**18, 7)], [Settling(0, 2, 10**18, 7)]),
    Died(0.85, "orders", "failing", [Letter("0000000000000001", "timed_out", 8.5)]),
]


def test_every_event_survives_its_line_and_says_what_it_is() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(history.AnyEvent.__args__)
    for event in ONE_OF_EACH:
        line = history.line(event)
        assert history.parse_line(line) == event
        fields = json.loads(line)
        assert fields["type"] in ("invoke", "ok", "fail", "info")
        assert fields["f"]


def test_an_act_and_its_outcome_have_the_same_name() -> None:
    begun, ended = (json.loads(history.line(event)) for event in ONE_OF_EACH[17:19])
    assert (begun["f"], begun["type"], begun["op"]) == ("fault", "invoke", 4)
    assert (ended["f"], ended["type"], ended["op"]) == ("fault", "ok", 4)


@pytest.mark.parametrize("in_file", [True, False])
def test_a_history_can_be_read_again_and_while_it_grows(in_file: bool, tmp_path: Path) -> None:
    kept = History(tmp_path / "history.jsonl" if in_file else None)
    for event in ONE_OF_EACH[:5]:
        kept.record(event)
    assert list(kept) == list(kept) == ONE_OF_EACH[:5]
    kept.record(ONE_OF_EACH[5])
    assert list(kept) == ONE_OF_EACH[:6]
    kept.save(tmp_path / "copy.jsonl")
    assert list(history.read(tmp_path / "copy.jsonl")) == ONE_OF_EACH[:6]


def test_threads_lose_no_event_in_a_file(tmp_path: Path) -> None:
    kept = History(tmp_path / "history.jsonl")

    def record(op: int) -> None:
        for n in range(3 * History.WAITING_MAX):
            kept.record(Outcome(float(n), op, "ok"))

    threads = [threading.Thread(target=record, args=(op,)) for op in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [(event.op, event.t) for event in kept if isinstance(event, Outcome)]
    assert len(found) == len(set(found)) == 9 * History.WAITING_MAX


def test_a_reader_stops_before_what_is_being_written(tmp_path: Path) -> None:
    kept = History(tmp_path / "history.jsonl")
    for event in ONE_OF_EACH:
        kept.record(event)
    size = kept.flush()
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b'{"f":"publi')
    assert list(history.read(tmp_path / "history.jsonl", size)) == ONE_OF_EACH
    with pytest.raises(msgspec.DecodeError):
        list(history.read(tmp_path / "history.jsonl"))


def test_a_sample_of_a_process_has_its_memory_and_descriptors() -> None:
    rss, fds = sampling.usage(os.getpid())
    assert rss > 1_000_000
    assert fds >= 3
    assert sampling.usage(None) == (0, 0)
