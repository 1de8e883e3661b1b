"""What the judgement of a cluster's history and the comparison of its logs must notice, and what it must not."""

from __future__ import annotations

import zlib

import pytest

from tests.jepsen.checkers.judgement import Report, judge
from tests.jepsen.checkers.storage import compare
from tests.jepsen.history import (
    Answered,
    AnyEvent,
    ChannelMade,
    Drained,
    Message,
    Outcome,
    Publish,
    Received,
    Result,
    Run,
    Started,
)

TOPIC = "orders"
BEGIN: list[AnyEvent] = [Run(1, "", 0.0), Started(0.0, 1), ChannelMade(0.0, 0.0, 0, 0, TOPIC, "steady", "ok")]
END: list[AnyEvent] = [Drained(9.0, TOPIC)]


def publish(op: int, first: int, count: int = 1, result: Result = "ok", process: int = 1) -> list[AnyEvent]:
    crcs = [zlib.crc32(b"%d" % (first + n)) for n in range(count)]
    return [Publish(1.0, op, 1, 0, process, TOPIC, "MPUB", first, crcs, 0.0), Outcome(1.1, op, result)]


def subscribed(conn: int) -> list[AnyEvent]:
    return [ChannelMade(0.5, 0.6, conn, conn, TOPIC, "steady", "ok")]


def got(
    conn: int, counter: int, *, at: int | None = None, attempts: int = 1, body: bytes = b"", process: int = 1
) -> list[AnyEvent]:
    """A message delivered and finished; `at` is its place in the log."""
    id_ = f"{counter if at is None else at:016x}"
    crc = zlib.crc32(body or b"%d" % counter)
    message = Message(process, counter, crc, id_, attempts, 1_000 + counter)
    return [Received(2.0, conn, [message]), Answered(2.0, conn, "FIN", [id_], 0)]


def judged(*parts: list[AnyEvent]) -> Report:
    return judge([*BEGIN, *(event for part in parts for event in part), *END])


def test_what_comes_out_once_is_fine() -> None:
    report = judged(publish(1, 0), subscribed(1), got(1, 0))
    assert report.ok, report
    assert report.figures.ok == 1


def test_another_leader_may_deliver_again_and_count_attempts_anew() -> None:
    report = judged(
        publish(1, 0), subscribed(1), got(1, 0, attempts=2), subscribed(2), got(2, 0, attempts=1), got(2, 0)
    )
    assert report.ok, report
    assert report.figures.repeated == 2


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("lost", [publish(1, 0), subscribed(1)]),
        ("torn", [publish(1, 0, 2, "info"), subscribed(1), got(1, 0)]),
        ("altered", [publish(1, 0), subscribed(1), got(1, 0, body=b"other")]),
        ("altered", [publish(1, 0), subscribed(1), got(1, 0), got(1, 0, at=7)]),
        ("unexpected", [subscribed(1), got(1, 5)]),
        ("unexpected", [publish(1, 0, result="fail"), subscribed(1), got(1, 0)]),
        ("disorder", [publish(1, 0), publish(2, 1), subscribed(1), got(1, 0, at=9), got(1, 1, at=8)]),
        ("reused", [publish(1, 0), publish(2, 0, process=2), subscribed(1), got(1, 0), got(1, 0, process=2)]),
    ],
)
def test_what_a_cluster_must_not_do_is_noticed(kind: str, parts: list[list[AnyEvent]]) -> None:
    report = judged(*parts)
    assert report.problems[kind], report


def log(*batches: bytes, first: int = 1) -> dict[int, tuple[bytes, bytes]]:
    return {log_id: (b"entry of " + data, data) for log_id, data in enumerate(batches, first)}


def test_logs_are_compared_where_both_have_something_and_below_the_end() -> None:
    a = log(b"one", b"two", b"three")
    assert compare({"a": a, "b": log(b"two", b"three", first=2)}, end=4) == [], "its beginning was unlinked"
    assert compare({"a": a, "b": log(b"one", b"two", b"other")}, end=3) == [], "not committed"


def test_logs_that_differ_are_named() -> None:
    a = log(b"one", b"two", b"three")
    assert "log id 3" in compare({"a": a, "b": log(b"one", b"two", b"other")}, end=4)[0]
    assert "b ends at 3" in compare({"a": a, "b": log(b"one", b"two")}, end=4)[0]
    flipped = {**a, 2: (a[2][0], b"twO")}
    assert "other bytes from log id 2" in compare({"a": a, "b": flipped}, end=4)[0]
