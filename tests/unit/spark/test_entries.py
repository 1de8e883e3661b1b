"""A run is verified, or the line says what does not fit; what the broker's own code says of entries decides."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha import frames
from nsqha.commitlog.entry import ENTRY_BYTES, FAULTY, REBUILT, Entry, decode, genesis, next_chain
from pyspark_nsqha.model import FetchedRun, NotVerified, ReadFailed
from pyspark_nsqha.reading import entries as module
from pyspark_nsqha.reading.entries import ENTRY, verify
from tests.unit.spark.logs import IDENTITY, PARTITION, SECOND, TOPIC_UID, Writer, messages


def small_log(begin: int = 0) -> Writer:
    """Seven batches of 1 to 3 messages in two epochs."""
    log = Writer(genesis(TOPIC_UID, PARTITION)._replace(log_id=begin, first_offset=begin, position=begin * 50))
    for n in range(7):
        log.batch(messages(*(b"%d" % n * size for size in range(1 + n % 3))), epoch=1 + n // 4)
    return log


def decoded(log: Writer) -> list[Entry]:
    return [decode(raw) for raw in log.entries]  # type: ignore[misc]


def failure(run: FetchedRun, before: bytes | None = None, **how: Any) -> NotVerified:
    with pytest.raises(NotVerified) as failed:
        verify(run, IDENTITY, before, **how)
    assert "\n" not in str(failed.value)
    return failed.value


def test_fields_are_those_of_the_brokers_entry():
    log = small_log()
    table = np.frombuffer(log.run().entries, ENTRY)
    assert [tuple(map(int, row))[:-1] for row in table.tolist()] == [tuple(entry) for entry in decoded(log)]
    assert table.dtype.itemsize == ENTRY_BYTES


@pytest.mark.parametrize("level", ["full", "crc", "none"])
def test_what_a_broker_writes_verifies(level):
    log = small_log()
    got = verify(log.run(), IDENTITY, None, level=level)
    whole = decoded(log)
    assert got.first_offsets.tolist() == [entry.first_offset for entry in whole]
    assert got.counts.tolist() == [entry.count for entry in whole]
    assert got.timestamps.tolist() == [entry.timestamp_ns for entry in whole]
    assert np.diff(got.starts).tolist() == [entry.size for entry in whole]
    assert got.last == log.entries[-1]
    assert (got.end_offset, len(got), got.log_id(2)) == (log.offset, 7, 3)
    assert not got.bad.any()


@pytest.mark.parametrize("level", ["full", "crc", "none"])
def test_runs_are_verified_one_behind_the_other(level):
    log = small_log()
    before = None
    for n, raw in enumerate(log.entries):
        before = verify(FetchedRun(n + 1, raw, log.frames[n]), IDENTITY, before, level=level).last


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0, 9000]), st.booleans())
def test_no_bit_may_differ(which, begin, known):
    """With the entry before, or without: nothing here depends on it."""
    log = small_log(begin)
    run = log.run()
    data = bytearray(run.entries + run.frames)
    bit = which % (len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    n = len(run.entries)
    before = genesis(TOPIC_UID, PARTITION)._replace(log_id=begin, first_offset=begin, position=begin * 50).encode()
    verify(run, IDENTITY, before if known else None)
    failure(FetchedRun(begin + 1, bytes(data[:n]), bytes(data[n:])), before if known else None)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([name for name in Entry._fields if name not in ("durable", "crc_kind", "version")]),
    st.integers(0, 6),
    st.integers(1, 3),
)
def test_an_entry_that_was_written_anew_does_not_fit_its_neighbours(field, index, by):
    """Its own CRC is right again, as if somebody had meant it."""
    log = small_log()
    entry = decoded(log)[index]
    other = entry._replace(**{field: getattr(entry, field) + by})
    if other.flags & (REBUILT | FAULTY):
        return
    log.entries[index] = other.encode()
    failure(log.run())


def test_what_is_durable_is_no_part_of_the_log():
    log = small_log()
    log.entries[3] = decoded(log)[3]._replace(durable=99).encode()
    verify(log.run(), IDENTITY, None)


def test_without_the_chain_an_entry_with_its_own_crc_is_believed():
    log = small_log()
    log.entries[3] = decoded(log)[3]._replace(flags=frames.HAS_EVENTS).encode()
    verify(log.run(), IDENTITY, None, level="crc")
    text = str(failure(log.run()))
    assert text == (
        "orders/3: log id 4, offsets [6, 7): the chain does not match: the entry, or the one before, belongs to "
        "another log; read it from another replica, and run `nsqha log verify` on this one"
    )


def test_without_crcs_structure_is_left():
    log = small_log()
    torn = bytearray(b"".join(log.frames))
    torn[40] ^= 1
    log.entries[3] = log.entries[3][:-1] + b"?"
    run = FetchedRun(1, b"".join(log.entries), bytes(torn))
    verify(run, IDENTITY, None, level="none")
    assert "[6, 7): the entry does not have its own CRC" in str(failure(run, level="crc"))
    log = small_log()
    log.entries[3] = decoded(log)[3]._replace(position=1).encode()
    assert "its position is not where the entry before ends" in str(failure(log.run(), level="none"))


# ---- the beginning and the end


def test_the_first_batch_of_a_partition_is_chained_to_its_identity():
    log = small_log()
    for other in (IDENTITY._replace(topic_uid=7), IDENTITY._replace(partition=4)):
        with pytest.raises(NotVerified, match=r"offsets \[0, 1\): the chain does not match"):
            verify(log.run(), other, None)


def test_a_run_follows_the_entry_before_it():
    log = small_log()
    tail = FetchedRun(4, b"".join(log.entries[3:]), b"".join(log.frames[3:]))
    verify(tail, IDENTITY, None)
    verify(tail, IDENTITY, log.entries[2])
    assert "does not follow the entry before, whose log id is 2" in str(failure(tail, log.entries[1]))
    before = decode(log.entries[2])
    assert before is not None
    for field in ("position", "first_offset"):
        wrong = before._replace(**{field: getattr(before, field) + 1}).encode()
        assert f"its {field} is not where the entry before ends" in str(failure(tail, wrong))
    assert "chain" in str(failure(tail, before._replace(chain=5).encode()))
    assert "the entry before does not have its own CRC" in str(failure(tail, log.entries[2][:-1] + b"?"))


def test_a_run_of_nothing_hands_on_what_was_before_it():
    log = small_log()
    assert verify(FetchedRun(4, b"", b""), IDENTITY, log.entries[2]).last == log.entries[2]
    nothing = verify(FetchedRun(4, b"", b""), IDENTITY, None)
    verify(FetchedRun(4, b"".join(log.entries[3:]), b"".join(log.frames[3:])), IDENTITY, nothing.last)
    assert (len(nothing), nothing.end_offset) == (0, 0)


def test_log_ids_are_those_that_were_asked_for():
    log = small_log()
    assert "log ids are not dense" in str(failure(FetchedRun(2, b"".join(log.entries), b"".join(log.frames))))
    del log.entries[3], log.frames[3]
    assert failure(log.run()).planned == (6, 9)


def test_the_snapshots_entry_has_the_snapshots_chain():
    log = small_log()
    chain = decoded(log)[4].chain
    verify(log.run(), IDENTITY, None, at=(5, chain))
    verify(log.run(), IDENTITY, None, at=(99, 1))
    failed = failure(log.run(), at=(5, 1))
    assert f"its chain is {chain:016x}, but the snapshot has 0000000000000001: this is another log" in str(failed)


# ---- entries without frames, and behind them


@pytest.mark.parametrize("flag", [FAULTY, REBUILT])
def test_behind_an_entry_that_was_made_up_the_chain_is_not_expected_to_fit(flag):
    log = small_log()
    entry = decoded(log)[3]
    made_up = entry._replace(flags=flag)
    log.entries[3] = made_up._replace(chain=next_chain(decoded(log)[2].chain, made_up)).encode()
    if flag == FAULTY:
        log.frames[3] = b""
    verify(log.run(), IDENTITY, None)
    tail = FetchedRun(5, b"".join(log.entries[4:]), b"".join(log.frames[4:]))
    verify(tail, IDENTITY, log.entries[3])


def test_what_was_given_up_is_the_same_log():
    log = small_log()
    log.entries[3] = decoded(log)[3]._replace(flags=frames.LOST).encode()
    log.frames[3] = b""
    got = verify(log.run(), IDENTITY, None)
    assert got.starts[3] == got.starts[4]
    assert got.flags.tolist() == [0, 0, 0, frames.LOST, 0, 0, 0]


# ---- sizes, versions


@pytest.mark.parametrize("change", [b"", b"x"])
def test_frames_are_as_long_as_the_entries_say(change):
    log = small_log()
    whole = b"".join(log.frames)
    run = log.run()._replace(frames=whole + change if change else whole[:-1])
    assert f"the entries announce {len(whole)} bytes of frames, {len(run.frames)} were sent" in str(failure(run))
    assert "bytes of frames were sent without an entry" in str(failure(FetchedRun(1, b"", b"x")))


def test_entries_are_whole():
    log = small_log()
    run = log.run()
    cut = run._replace(entries=run.entries[:-1])
    assert "the entries end in the middle of one, after 559 bytes" in str(failure(cut))


def test_no_number_is_beyond_63_bits():
    log = Writer(genesis(0, 0)._replace(log_id=5, first_offset=2**63 - 2, position=2**63 - 200))
    log.batch(messages(b"", b""))
    assert "its first_offset is beyond 2^63" in str(failure(log.run()))
    log = Writer(genesis(0, 0)._replace(log_id=5, position=2**63 - 20))
    log.batch(messages(b""))
    assert "its position is beyond 2^63" in str(failure(log.run()))


def test_time_and_epoch_never_fall():
    for field, value in {"timestamp_ns": 5, "epoch": 1}.items():
        log = Writer()
        log.batch(messages(b"1"), epoch=2)
        log.last = log.last._replace(**{field: value - 1})
        log.raw(log.frames[0], count=1, timestamp_ns=5 if field == "timestamp_ns" else 9 * SECOND, epoch=1)
        assert f"log id 2, offsets [1, 2): its {field} is lower than that of the entry before" in str(
            failure(log.run(), level="crc")
        )
        second = FetchedRun(2, log.entries[1], log.frames[1])
        assert f"its {field} is lower" in str(failure(second, log.entries[0]))
        verify(second, IDENTITY, None)


@pytest.mark.parametrize("field", ["version", "crc_kind"])
def test_what_a_newer_broker_wrote_is_not_called_damage(field):
    log = small_log()
    log.entries[3] = decoded(log)[3]._replace(**{field: 2}).encode()
    with pytest.raises(ReadFailed, match="a newer broker wrote it; update pyspark_nsqha") as failed:
        verify(log.run(), IDENTITY, None)
    assert not isinstance(failed.value, NotVerified)


# ---- frames


def test_the_first_batch_whose_frames_do_not_verify_is_named():
    log = small_log()
    log.frames[4] = log.frames[4][:-1] + b"?"
    log.frames[5] = log.frames[5][:-1] + b"?"
    failed = failure(log.run())
    assert failed.planned == (7, 9)
    assert "log id 5, offsets [7, 9): the frames do not have the CRC of their entry" in str(failed)


def test_batches_whose_frames_do_not_verify_may_be_marked_instead():
    log = small_log()
    log.frames[4] = log.frames[4][:-1] + b"?"
    assert verify(log.run(), IDENTITY, None, mark_bad=True).bad.tolist() == [n == 4 for n in range(7)]


def test_any_crc32_does(monkeypatch):
    import zlib

    monkeypatch.setattr(module, "crc32", zlib.crc32)
    log = small_log()
    verify(log.run(), IDENTITY, None)
    failure(log.run()._replace(frames=random.Random(1).randbytes(len(log.run().frames))))


def test_neither_broker_nor_spark_is_imported():
    """By these modules; the package itself is a data source, and Spark's."""
    script = (
        "import sys, types; package = types.ModuleType('pyspark_nsqha'); package.__path__ = ['pyspark_nsqha']; "
        "sys.modules['pyspark_nsqha'] = package; import pyspark_nsqha.reading.scan; "
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'pyspark', 'grpc', 'asyncio', 'aiohttp'}))"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_without_the_broker_zlib_serves():
    script = (
        "import sys, types, zlib; sys.modules['nsqha'] = None; package = types.ModuleType('pyspark_nsqha'); "
        "package.__path__ = ['pyspark_nsqha']; sys.modules['pyspark_nsqha'] = package; "
        "import pyspark_nsqha.reading.scan; from pyspark_nsqha.reading import entries; "
        "print(entries.crc32 is zlib.crc32)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "True"
