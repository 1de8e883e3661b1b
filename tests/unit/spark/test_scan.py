"""The scan gives the rows that a plain struct reader gives, or says what does not verify."""

from __future__ import annotations

import gc
import struct
import tracemalloc
from mmap import mmap
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nsqha import frames, hot
from nsqha.commitlog.entry import FAULTY, REBUILT, genesis
from nsqha.cursor import events
from pyspark_nsqha.model import FetchedRun, NotVerified, ReadFailed, Unreadable
from pyspark_nsqha.reading import lanes
from pyspark_nsqha.reading.columns import DEFAULT, arrow_schema
from pyspark_nsqha.reading.entries import verify
from pyspark_nsqha.reading.scan import MissingRange, record_batches
from tests.unit.spark.logs import ID_BASE, IDENTITY, SECOND, Row, Writer, messages, read_rows

EVERYTHING = 1 << 62
EMPTY = hot.frame(b"")


def scan(
    run: FetchedRun, first: int = 0, end: int = EVERYTHING, columns: Any = DEFAULT, **how: Any
) -> list[pa.RecordBatch]:
    """Verified, and scanned."""
    entries = verify(run, IDENTITY, None)
    return list(record_batches(run, entries, IDENTITY, columns=columns, first=first, end=end, **how))


def rows(batches: list[pa.RecordBatch]) -> list[Row]:
    """Record batches of all columns, as the struct reader has their rows."""
    return [row for batch in batches for row in _rows(batch)]


def _rows(batch: pa.RecordBatch) -> list[Row]:
    batch.validate(full=True)
    of = {name: batch.column(name) for name in batch.schema.names}
    n = batch.num_rows
    assert of["key"].null_count == of["headers"].null_count == n
    assert of["topic"].to_pylist() == ["orders"] * n
    assert of["partition"].to_pylist() == [3] * n
    assert of["timestampType"].to_pylist() == [0] * n
    times = of["timestamp_ns"].to_pylist()
    assert of["timestamp"].cast(pa.int64()).to_pylist() == [time // 1000 for time in times]
    due = [0 if time is None else time * 1000 for time in of["deliver_at"].cast(pa.int64()).to_pylist()]
    others = (of[name].to_pylist() for name in ("attempts", "id", "value", "leader_epoch"))
    return list(map(Row, of["offset"].to_pylist(), times, *others, due))


# ---- logs of all kinds

control = st.sampled_from([
    frames.control_frame(frames.TOPIC_EMPTY, b""),
    frames.control_frame(frames.PROGRESS, bytes(41)),
    frames.control_frame(frames.CHECKPOINT, b"state" * 50),
    frames.control_frame(40, b""),
    events.Carry(1, hot.frame(b"carried")).encode(),
    events.Carry(0, hot.frame(b"")).encode(),
])  # fmt: skip
attributes = st.builds(
    lambda covers, micros: events.Attributes(covers, micros * 1000).encode(),
    st.sampled_from([1, 1, 2, 50, 2**32 - 1]),
    st.sampled_from([0, 1_800_000_000_000_000]),
)
body = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", hot.frame(b"a frame in a body"), b"\0" * 40, b"\0\0\0\2" * 9, bytes(30) + b"\2" * 40]),
)
message = body.map(hot.frame)
part = st.one_of(message, message, message, attributes, control)
batches = st.lists(
    st.tuples(st.lists(part, min_size=1, max_size=12), st.sampled_from([1, 1, 1, 7, 40])), min_size=1, max_size=8
)


def written(batches: list[tuple[list[bytes], int]], begin: int = 0) -> FetchedRun:
    """A log of these batches, in which message and control frames stand as given, some times over."""
    log = Writer(genesis(0, 0)._replace(log_id=begin, first_offset=begin, position=begin << 8))
    for parts, times in batches:
        log.batch(parts * times, flags=frames.HAS_EVENTS)
    return log.run()


@settings(max_examples=200, deadline=None)
@given(batches, st.sampled_from([1, 700, 1 << 40]), st.integers(0, 60), st.integers(0, 200), st.data())
def test_the_rows_are_those_of_a_struct_reader(batches, begin, skip, wanted, data):
    run = written(batches, begin)
    first, end = begin + skip, begin + skip + wanted
    rows_max = data.draw(st.sampled_from([13, 100, 16384]))
    bytes_max = data.draw(st.sampled_from([1000, 1 << 20]))
    got = scan(run, first, end, rows_max=rows_max, bytes_max=bytes_max)
    assert rows(got) == read_rows(run, first, end)
    for batch in got:
        assert 1 <= batch.num_rows <= rows_max
        assert batch.num_rows == 1 or sum(map(len, batch.column("value").to_pylist())) <= bytes_max


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(-20, 20), st.sampled_from([2, 3, 16])), max_size=20),
    st.integers(32, 400),
)
@example([(0, 0, 2)], 64)
def test_bodies_that_hold_frames_of_their_own_batch_are_bodies(forged, count):
    """With the batch's own time, which a publisher cannot know: what lanes guess by is in there, with any size."""
    log = Writer()
    now = SECOND + 1
    forgeries = [
        bytes(filler) + struct.pack(">IIqH16s", max(30 + longer, 0), kind, now, 1, b"0" * 16) + bytes(max(longer, 0))
        for filler, longer, kind in forged
    ]
    bodies = [forgeries[n % len(forgeries)] if forgeries and n % 3 else b"m%d" % n for n in range(count)]
    log.batch(messages(*bodies))
    log.batch(messages(b"behind"))
    run = log.run()
    assert log.last.first_offset == count
    assert rows(scan(run)) == read_rows(run)


def test_a_batch_of_nothing_but_forged_frames_is_read_from_its_beginning():
    log = Writer()
    forged = struct.pack(">IIqH16s", 31, 2, SECOND + 1, 1, b"f" * 16) + b"!"
    log.batch(messages(*([forged * 20] * 100)))
    run = log.run()
    assert [row.value for row in rows(scan(run))] == [forged * 20] * 100


def test_a_batch_of_events_has_no_rows():
    log = Writer()
    log.batch(messages(b"one"))
    log.batch([events.TopicEmpty().encode(), events.EpochStart(1).encode()], flags=frames.HAS_EVENTS)
    log.batch(messages(b"two"))
    run = log.run()
    assert [(row.offset, row.value) for row in rows(scan(run))] == [(0, b"one"), (1, b"two")]
    assert scan(FetchedRun(2, log.entries[1], log.frames[1])) == []


def test_nothing_is_made_of_a_range_that_the_run_does_not_have():
    log = Writer()
    log.batch(messages(b"one", b"two"))
    assert scan(log.run(), 2, 9) == scan(log.run(), 1, 1) == []
    assert scan(FetchedRun(1, b"", b"")) == []


@pytest.mark.parametrize("bound", [{"rows_max": 1}, {"bytes_max": 1}])
def test_one_message_is_always_whole(bound):
    log = Writer()
    log.batch(messages(b"", b"one", b"two" * 9))
    run = log.run()
    got = scan(run, **bound)
    assert [batch.num_rows for batch in got] == [1, 1, 1]
    assert rows(got) == read_rows(run)


def test_positions_beyond_31_bits():
    log = Writer(genesis(0, 0)._replace(log_id=1 << 40, first_offset=1 << 45, position=1 << 60))
    log.batch(messages(b"far", b"away"))
    run = log.run()
    assert [(row.offset, row.id) for row in rows(scan(run))] == [
        ((1 << 45) + n, f"{ID_BASE + (1 << 45) + n:016x}") for n in range(2)
    ]


def test_runs_beyond_31_bits():
    """Most of it is a hole that nobody looks at: the CRCs are switched off."""
    hole = 2**31 + 100
    frames_bytes = 2 * 35 + 8 + hole
    with mmap(-1, frames_bytes) as data:
        data[:35] = stamped(b"1", first=0)
        data[35:43] = struct.pack(">II", 4 + hole, frames.CHECKPOINT)
        data[-35:] = stamped(b"2", first=1)
        log = Writer()
        entry = log.raw(b"", count=2, timestamp_ns=2 * SECOND + 1)._replace(size=frames_bytes)
        with memoryview(data) as view:
            run = FetchedRun(1, entry.encode(), view)
            entries = verify(run, IDENTITY, None, level="none")
            for bytes_max in (1 << 20, 1 << 40):
                got = list(
                    record_batches(
                        run, entries, IDENTITY, columns=DEFAULT, first=0, end=EVERYTHING, bytes_max=bytes_max
                    )
                )  # fmt: skip
                assert [(row.offset, row.value) for row in rows(got)] == [(0, b"1"), (1, b"2")]
                assert len(got) == 2
            del run, entries
            gc.collect()


@pytest.mark.parametrize("kind", sorted(events._DECODERS))
def test_every_control_frame_that_a_broker_writes_is_passed_over(kind):
    payload = events.Attributes().encode()[8:] if kind == frames.ATTRIBUTES else b"payload"
    log = Writer()
    log.batch([frames.control_frame(kind, payload), *messages(b"one")], flags=frames.HAS_EVENTS)
    assert [row.value for row in rows(scan(log.run()))] == [b"one"]


@pytest.mark.parametrize("kind", sorted(set(range(16, 32)) - set(events._DECODERS)))
def test_control_frames_that_have_to_be_understood_and_are_not_stop_the_scan(kind):
    log = Writer()
    log.batch(messages(b"one"))
    log.batch([frames.control_frame(kind, b""), *messages(b"two")])
    with pytest.raises(ReadFailed) as failed:
        scan(log.run())
    assert str(failed.value) == (
        f"orders/3: log id 2 has a frame of type {kind}, which this reader does not know: a newer broker wrote it; "
        "update pyspark_nsqha"
    )
    assert not isinstance(failed.value, NotVerified)


# ---- deferred publishes


def test_deferred_messages_say_when_and_others_do_not():
    log = Writer()
    deferred = events.Attributes(1, 5_000_000).encode()
    log.batch([deferred, *messages(b"later"), *messages(b"now")], flags=frames.HAS_ATTRIBUTES)
    got = scan(log.run(), columns=["value", "deliver_at"])
    assert pa.Table.from_batches(got).to_pylist() == [
        {"value": b"later", "deliver_at": pa.scalar(5000, pa.timestamp("us", "UTC")).as_py()},
        {"value": b"now", "deliver_at": None},
    ]


def test_attributes_end_with_their_batch():
    log = Writer()
    log.batch([events.Attributes(2**32 - 1, 5000).encode(), *messages(b"1", b"2")], flags=frames.HAS_ATTRIBUTES)
    log.batch(messages(b"3"))
    assert [row.deliver_at_ns for row in rows(scan(log.run()))] == [5000, 5000, 0]


def test_attributes_that_all_cover_everything_take_no_more_memory_than_others():
    """n of them speak of n * n/2 messages, and the last one counts."""
    log = Writer()
    n = 5000
    log.batch([part for time in range(1, n + 1) for part in (events.Attributes(n, time * 1000).encode(), EMPTY)])
    run = log.run()
    tracemalloc.start()
    try:
        (only,) = scan(run, columns=["deliver_at"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert only.column(0).cast(pa.int64()).to_pylist() == list(range(1, n + 1))
    assert peak < 20 * len(run.frames)


def test_attributes_that_are_cut_short_do_not_verify():
    log = Writer()
    log.batch([frames.control_frame(frames.ATTRIBUTES, bytes(13)), *messages(b"1")])
    with pytest.raises(NotVerified, match="attributes are cut off"):
        scan(log.run())


# ---- what nobody has any more


def gap(flags: int) -> Writer:
    """Offsets 1 and 2 are gone."""
    log = Writer()
    log.batch(messages(b"0"))
    log.batch(messages(b"1", b"2"), flags=flags, with_frames=False)
    log.batch(messages(b"3", b"4"))
    return log


@pytest.mark.parametrize(("flags", "why"), [(frames.LOST, "lost"), (FAULTY, "faulty"), (FAULTY | REBUILT, "faulty")])
def test_lost_messages_are_unreadable_or_told(flags, why):
    run = gap(flags).run()
    with pytest.raises(Unreadable) as failed:
        scan(run, 2, 9)
    assert failed.value.planned == (2, 3)
    assert str(failed.value).startswith("orders/3: offsets [2, 3) are lost: ")
    told: list[MissingRange] = []
    got = rows(scan(run, 0, 9, skip_unreadable=True, missing=told.append))
    assert [(row.offset, row.value) for row in got] == [(0, b"0"), (3, b"3"), (4, b"4")]
    assert told == [MissingRange(1, 3, why)]


def test_lost_messages_that_nobody_wants_do_not_matter():
    run = gap(frames.LOST).run()
    assert [row.offset for row in rows(scan(run, 0, 1))] == [0]
    assert [row.offset for row in rows(scan(run, 3, 5))] == [3, 4]


def test_a_run_of_nothing_but_lost_messages_has_no_rows():
    log = Writer()
    log.batch(messages(b"1", b"2"), flags=frames.LOST, with_frames=False)
    told: list[MissingRange] = []
    assert scan(log.run(), skip_unreadable=True, missing=told.append) == []
    assert told == [MissingRange(0, 2, "lost")]


# ---- entries and frames that lie


def good_then(*data: bytes, count: int, behind: bool = True) -> FetchedRun:
    """A good batch of 40 messages, a batch of these bytes that has their CRC, and another good one."""
    log = Writer()
    log.batch(messages(*(b"good %d" % n for n in range(40))))
    log.raw(b"".join(data), count=count, timestamp_ns=log.last.timestamp_ns + SECOND)
    if behind:
        log.batch(messages(b"behind"))
    return log.run()


def stamped(*bodies: bytes, first: int = 40, seconds: int = 2) -> bytes:
    """What `good_then` expects."""
    data = bytearray(b"".join(messages(*bodies)))
    hot.stamp(data, 0, ID_BASE + first, seconds * SECOND + 1)
    return bytes(data)


LIES = {
    "more messages than announced": ([stamped(b"a", b"b")], 1),
    "fewer messages than announced": ([stamped(b"a", b"b")], 3),
    "messages and none announced": ([stamped(b"a")], 0),
    "the last frame is cut off": ([stamped(b"a", b"bcd")[:-1]], 2),
    "a header that is cut off": ([stamped(b"a", b"")[:-1]], 2),
    "a byte too many": ([stamped(b"a"), b"\0"], 1),
    "seven bytes too many": ([stamped(b"a"), bytes(7)], 1),
    "zeros": ([bytes(400)], 1),
    "a long stretch of zeros": ([bytes(100_000)], 40),
    "less than a frame": ([b"\0\0\0"], 1),
    "a frame without a type": ([struct.pack(">I", 0)], 1),
    "a frame that is longer than everything": ([struct.pack(">II", 2**32 - 1, 2), bytes(100)], 1),
    "a message without a header": ([struct.pack(">II", 4, 2)], 1),
    "half a header that is not announced": ([stamped(b"a"), struct.pack(">II", 4, 2)], 1),
    "a message that is longer than any": ([struct.pack(">II", 2**31 + 30, 2), bytes(100)], 1),
    "a message that is one byte short": ([struct.pack(">II", 29, 2), bytes(25)], 1),
    "a type that frames do not have": ([struct.pack(">II", 34, 3), bytes(30)], 1),
    "a type that frames do not have, and no message": ([struct.pack(">II", 34, 3), bytes(30)], 0),
    "a control frame without a type, within another": ([struct.pack(">III", 0, 40, 40), bytes(36)], 0),
    "a control frame that the batch cuts off": ([struct.pack(">II", 4, 40), struct.pack(">I", 0)], 0),
    "another time": ([stamped(b"a", b"b", seconds=3)], 2),
    "the id of another offset": ([stamped(b"a", b"b", first=41)], 2),
    "a later id that is wrong": ([stamped(b"a"), stamped(b"b")], 2),
    "capitals in an id": ([stamped(b"a")[:18] + stamped(b"a")[18:34].upper() + b"a"], 1),
}


@pytest.mark.parametrize("behind", [True, False], ids=["between", "last"])
@pytest.mark.parametrize("lie", LIES)
def test_frames_that_are_not_what_their_entry_says_do_not_verify(lie, behind):
    parts, count = LIES[lie]
    run = good_then(*parts, count=count, behind=behind)
    with pytest.raises(NotVerified) as failed:
        scan(run)
    assert str(failed.value).startswith(f"orders/3: log id 2, offsets [40, {40 + count}): ")
    assert "\n" not in str(failed.value)
    assert failed.value.planned == (40, 40 + count)


@pytest.mark.parametrize("lie", LIES)
def test_a_run_of_nothing_but_lies_does_not_verify(lie):
    parts, count = LIES[lie]
    log = Writer(genesis(0, 0)._replace(log_id=7, first_offset=40, timestamp_ns=SECOND))
    log.raw(b"".join(parts), count=count or 2, timestamp_ns=2 * SECOND + 1)
    with pytest.raises(NotVerified):
        scan(log.run())


@pytest.mark.parametrize("behind", [True, False], ids=["between", "last"])
@pytest.mark.parametrize("lie", LIES)
def test_batches_that_do_not_verify_are_left_out_whole_where_that_is_allowed(lie, behind):
    parts, count = LIES[lie]
    run = good_then(*parts, count=count, behind=behind)
    told: list[MissingRange] = []
    got = rows(scan(run, on_bad="drop", missing=told.append))
    assert [row.offset for row in got] == [*range(40), *([40 + count] if behind else [])]
    assert got == read_rows(without_second(run))
    assert told == ([MissingRange(40, 40 + count, "corrupt")] if count else [])


@settings(max_examples=200, deadline=None)
@given(
    batches,
    st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.sampled_from([b"\0", b"\xff" * 4, b"\0\0\0\x10", b"\0" * 40, b"\0\0\0\x28", b"\0\0\0\4", b"\0\0\0\x1e"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["fail", "drop", "corrupt"]),
)
def test_whatever_bytes_come_unverified_become_rows_or_one_line(batches, damage, on_bad):
    """With the CRCs switched off. What is right is still there, and every row has the id of its offset."""
    run = written(batches)
    data = bytearray(run.frames)
    for at, span in damage:
        at %= len(data)
        data[at : at + len(span)] = span[: len(data) - at]
    run = run._replace(frames=bytes(data))
    entries = verify(run, IDENTITY, None, level="none")
    told: list[MissingRange] = []
    try:
        got = list(
            record_batches(
                run, entries, IDENTITY, columns=[*DEFAULT, "_corrupt"], first=0, end=EVERYTHING, on_bad=on_bad,
                missing=told.append,
            )
        )  # fmt: skip
    except ReadFailed as error:
        assert "\n" not in str(error)
        assert on_bad == "fail" or not isinstance(error, NotVerified)
        return
    good = [row for row in rows(got) if row.id is not None]
    assert all(int(row.id, 16) == ID_BASE + row.offset for row in good)
    assert len(good) + sum(gap.end - gap.first for gap in told) == entries.end_offset


def without_second(run: FetchedRun) -> FetchedRun:
    first, second = (struct.unpack_from(">I", run.entries, 80 * n + 44)[0] for n in range(2))
    return FetchedRun(1, run.entries[:80] + run.entries[160:], run.frames[:first] + run.frames[first + second :])


def torn_run() -> FetchedRun:
    """Of three batches with two messages each, a byte of the second one's frames is wrong."""
    log = Writer()
    for n in range(3):
        log.batch(messages(b"a%d" % n, b"b%d" % n))
    data = bytearray(b"".join(log.frames))
    data[len(log.frames[0]) + 40] ^= 1
    return FetchedRun(1, b"".join(log.entries), bytes(data))


def permissive(run: FetchedRun, first: int, end: int, on_bad: Any) -> tuple[list[dict[str, Any]], list[MissingRange]]:
    told: list[MissingRange] = []
    entries = verify(run, IDENTITY, None, mark_bad=True)
    names = [*DEFAULT, "_corrupt"]
    got = record_batches(
        run, entries, IDENTITY, columns=names, first=first, end=end, on_bad=on_bad, missing=told.append
    )
    table = pa.Table.from_batches(got, arrow_schema(names))
    table.validate(full=True)
    return table.to_pylist(), told


def test_a_batch_that_does_not_verify_is_one_row_with_its_bytes():
    run = torn_run()
    got, told = permissive(run, 1, 5, "corrupt")
    assert [(row["offset"], row["value"]) for row in got] == [(1, b"b0"), (2, None), (4, b"a2")]
    size = len(run.frames) // 3
    assert [row["_corrupt"] for row in got] == [None, run.frames[size : 2 * size], None]
    assert told == [MissingRange(2, 4, "corrupt")]
    bad = got[1]
    assert (bad["topic"], bad["partition"], bad["id"], bad["leader_epoch"]) == ("orders", 3, None, 1)
    assert bad["timestamp_ns"] == 2 * SECOND + 2


def test_the_row_of_a_corrupt_batch_is_within_the_range():
    got, told = permissive(torn_run(), 3, 4, "corrupt")
    assert [(row["offset"], row["value"]) for row in got] == [(3, None)]
    assert told == [MissingRange(3, 4, "corrupt")]
    assert permissive(torn_run(), 0, 2, "corrupt")[1] == []


def test_nothing_is_believed_of_a_batch_that_does_not_verify():
    """Not even that a newer broker wrote it."""
    run = torn_run()
    data = bytearray(run.frames)
    data[len(data) // 3 + 7] = 28
    got, _ = permissive(run._replace(frames=bytes(data)), 0, 6, "corrupt")
    assert [row["offset"] for row in got] == [0, 1, 2, 4, 5]


def test_corrupt_batches_may_be_dropped():
    got, told = permissive(torn_run(), 0, 6, "drop")
    assert [row["offset"] for row in got] == [0, 1, 4, 5]
    assert told == [MissingRange(2, 4, "corrupt")]


def test_deferred_messages_behind_a_corrupt_batch_keep_their_time():
    log = Writer()
    log.batch(messages(b"1", b"2"))
    log.batch([events.Attributes(1, 5000).encode(), *messages(b"3", b"4")], flags=frames.HAS_ATTRIBUTES)
    run = log.run()
    torn = run._replace(frames=b"\1" + run.frames[1:])
    entries = verify(torn, IDENTITY, None, mark_bad=True)
    got = record_batches(torn, entries, IDENTITY, columns=DEFAULT, first=0, end=9, on_bad="drop")
    assert [(row.offset, row.deliver_at_ns) for row in rows(list(got))] == [(2, 5000), (3, 0)]


def test_the_first_of_several_lies_is_named():
    log = Writer()
    log.batch(messages(b"a"), count=2)
    log.batch(messages(b"b"), count=3)
    with pytest.raises(NotVerified, match=r"log id 1, offsets \[0, 2\): 1 messages are in it, but 2 are announced"):
        scan(log.run())


# ---- buffers and columns


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(b"xyz" + data))[3:]])
def test_bytes_may_come_in_any_buffer(kind):
    log = Writer()
    log.batch(messages(*(b"%d" % n * 20 for n in range(200))))
    run = log.run()
    there = FetchedRun(run.first_log_id, kind(run.entries), kind(run.frames))
    assert rows(scan(there)) == read_rows(run)


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda data: memoryview(bytearray(b"xyz" + data + b"!"))[3:-1]])
def test_lanes_find_their_guesses_in_any_buffer(kind):
    """Without them nothing is wrong, and everything slow."""
    log = Writer()
    log.batch(messages(*(b"%d" % n * 20 for n in range(200))))
    run = log.run()
    there = FetchedRun(1, run.entries, kind(run.frames))
    entries = verify(there, IDENTITY, None)
    batch_of, begins = lanes._lanes(
        there.frames, entries.starts, entries.counts, entries.timestamps, np.arange(len(entries))
    )
    assert len(begins) > 8 and set(batch_of) == {0}
    assert {run.frames[at + 4 : at + 8] for at in begins} == {b"\0\0\0\2"}


def test_a_chase_that_gets_nowhere_is_given_up():
    """Zeros are sizes, too: four bytes a step, for gigabytes."""

    class Looked:
        times = 0

        def __len__(self):
            return 100_000

        def __getitem__(self, places):
            self.times += 1
            return np.zeros(len(places), np.int64)

    sizes = Looked()
    _, unmet = lanes._chase(sizes, np.array([0]), np.array([100_003]), 3)
    assert unmet.tolist() == [True] and sizes.times == 3


def test_the_buffer_may_be_used_again_for_the_next_run():
    log = Writer()
    log.batch(messages(*(b"%d" % n for n in range(100))))
    run = log.run()
    buffer, slots = bytearray(run.frames), bytearray(run.entries)
    got = scan(FetchedRun(1, slots, memoryview(buffer)))
    buffer[:] = bytes(len(buffer))
    slots[:] = bytes(len(slots))
    buffer += b"it may be resized, too"
    assert rows(got) == read_rows(run)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([*DEFAULT, "_corrupt"]), min_size=1, unique=True))
def test_columns_come_as_they_are_asked_for(names):
    log = Writer()
    log.batch([events.Attributes(1, 7000).encode(), *messages(b"1", b"2")])
    (whole,), (some,) = scan(log.run(), columns=[*DEFAULT, "_corrupt"]), scan(log.run(), columns=names)
    assert some.schema.equals(arrow_schema(names), check_metadata=True)
    assert some.equals(whole.select(names))
