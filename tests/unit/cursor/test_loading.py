"""Where the committed state comes from, and how much of the log is read for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nsqha.cursor.committed.checkpoint import digest, write
from nsqha.cursor.committed.loading import (
    CACHE,
    CHECKPOINT,
    LOG_START,
    first_checkpoint_end,
    load,
    newest_checkpoint,
    vouches,
)
from nsqha.cursor.committed.state import PartitionState
from nsqha.cursor.limits import ChannelLimits
from nsqha.errors import LogCorrupt
from nsqha.frames import HAS_CHECKPOINT, LOST
from tests.unit.cursor.tiny import Entry, Leader, TinyLog
from tests.unit.cursor.tiny_cache import CountedLog

SMALL_FRAMES = ChannelLimits(checkpoint_frame_bytes=150, checkpoint_bytes_per_batch=200, checkpoint_every_bytes=1 << 40)


def leader_with_channel() -> Leader:
    leader = Leader(limits=SMALL_FRAMES)
    leader.create("c")
    return leader


def publish_and_finish(leader: Leader, count: int) -> None:
    channel = leader.cursors.channels["c"]
    for offset in leader.publish(count):
        leader.deliver(channel, 1)
        leader.fin(channel, offset)
    leader.flush()


def loaded(leader: Leader, cached: Callable[[], PartitionState | None] = lambda: None):
    log = CountedLog(leader.log)
    result = load(log, log.read, cached)
    assert digest(result.state) == digest(leader.cursors.state)
    return result, log


def test_an_empty_log_gives_an_empty_state():
    log = CountedLog(leader_with_channel().log)
    log.log.batches.clear()
    log.log.log_id = log.log.end_offset = log.log.end_position = 0
    result = load(log, log.read)
    assert (result.source, result.batches) == (LOG_START, 0)
    assert digest(result.state) == digest(PartitionState())


def test_without_anything_else_the_log_is_read_from_its_start():
    leader = leader_with_channel()
    publish_and_finish(leader, 3)
    result, _ = loaded(leader)
    assert (result.source, result.batches) == (LOG_START, leader.log.log_id)


def test_the_cached_state_saves_reading_what_it_has_applied():
    leader = leader_with_channel()
    publish_and_finish(leader, 5)
    kept = leader.cursors.state.snapshot()
    before = leader.log.log_id
    for _ in range(3):
        leader.publish(1)
    result, log = loaded(leader, lambda: kept)
    assert (result.source, result.batches) == (CACHE, 3)
    assert log.entries_read == 1 + leader.log.log_id - before


@pytest.mark.parametrize("what", ["epoch", "chain"])
def test_a_state_of_another_log_is_not_taken(what):
    leader = leader_with_channel()
    publish_and_finish(leader, 5)
    kept = leader.cursors.state.snapshot()
    kept.applied = kept.applied._replace(**{what: getattr(kept.applied, what) + 1})
    result, _ = loaded(leader, lambda: kept)
    assert result.source == LOG_START


def test_a_state_ahead_of_the_log_is_not_taken():
    leader = leader_with_channel()
    publish_and_finish(leader, 5)
    kept = leader.cursors.state.snapshot()
    end = leader.log.log_id
    log = CountedLog(leader.log)
    assert vouches(log, kept.applied, end + 1) and not vouches(log, kept.applied, end)
    leader.log.batches.pop()
    leader.log.log_id -= 1
    result = load(log, log.read, lambda: kept)
    assert result.source == LOG_START and result.state.applied.log_id == end - 1


def test_a_state_from_before_the_first_file_is_not_taken():
    leader = leader_with_channel()
    publish_and_finish(leader, 5)
    kept = leader.cursors.state.snapshot()
    write_checkpoint(leader)
    leader.publish(1)
    del leader.log.batches[: kept.applied.log_id]
    log = CountedLog(leader.log)
    assert load(log, log.read, lambda: kept).source == CHECKPOINT


def write_checkpoint(leader: Leader) -> int:
    """A checkpoint of several batches; the log_id it is as of."""
    as_of = leader.cursors.state.applied.log_id
    leader.cursors.checkpoints.begin(leader.cursors.state.snapshot())
    leader.flush()
    return as_of


def test_the_newest_checkpoint_is_found_from_the_end():
    leader = leader_with_channel()
    publish_and_finish(leader, 50)
    write_checkpoint(leader)
    publish_and_finish(leader, 20)
    as_of = write_checkpoint(leader)
    publish_and_finish(leader, 5)
    result, log = loaded(leader)
    assert result.source == CHECKPOINT
    assert result.batches == leader.log.log_id - as_of
    assert log.batches_read < 2 * (leader.log.log_id - as_of) + 20


@pytest.mark.parametrize("begins", ["at the beginning", "later"])
def test_a_state_that_is_not_trusted_is_made_of_what_was_before_the_fault(begins: str):
    leader = leader_with_channel()
    as_ofs = []
    for _ in range(3):
        publish_and_finish(leader, 10)
        as_ofs.append(write_checkpoint(leader))
    publish_and_finish(leader, 10)
    if begins == "later":
        del leader.log.batches[: as_ofs[0] - 1]
    plain = CountedLog(leader.log)
    right = digest(load(plain, plain.read).state)

    def made(distrusted: int):
        log = CountedLog(leader.log)
        result = load(log, log.read, lambda: pytest.fail("the cache is not asked"), distrusted=distrusted)
        assert digest(result.state) == right and result.state.rebuilt == leader.log.log_id
        return result.source, leader.log.log_id - result.batches

    assert made(leader.log.log_id + 1) == (CHECKPOINT, as_ofs[2])
    assert made(as_ofs[2]) == (CHECKPOINT, as_ofs[1])
    assert made(0) == ((LOG_START, 0) if begins == "at the beginning" else (CHECKPOINT, as_ofs[0]))


class DamagedLog(CountedLog):
    """One batch of it can not be read."""

    def __init__(self, log: TinyLog, bad: int) -> None:
        super().__init__(log)
        self.bad = bad

    def entries(self, first_log_id: int, end_log_id: int) -> Iterator[Entry]:
        for entry in super().entries(first_log_id, end_log_id):
            if entry.log_id == self.bad:
                raise LogCorrupt(f"a hole at {self.bad}")
            yield entry


def test_damage_in_front_of_a_checkpoint_is_in_nobodys_way():
    leader = leader_with_channel()
    publish_and_finish(leader, 20)
    as_of = write_checkpoint(leader)
    publish_and_finish(leader, 5)
    log = DamagedLog(leader.log, as_of - 3)
    result = load(log, log.read)
    assert result.source == CHECKPOINT and digest(result.state) == digest(leader.cursors.state)
    for bad in (as_of + 1, leader.log.log_id):  # of the checkpoint, and behind it
        log = DamagedLog(leader.log, bad)
        with pytest.raises(LogCorrupt, match=f"a hole at {bad}"):
            load(log, log.read)


def test_a_checkpoint_that_was_not_finished_is_passed_over():
    leader = leader_with_channel()
    for _ in range(30):
        leader.publish(1)
        leader.create(f"d{leader.log.log_id}")  # many channels: the checkpoint takes several batches
    as_of = write_checkpoint(leader)
    leader.cursors.checkpoints.begin(leader.cursors.state.snapshot())
    leader.publish(1, force=True)
    assert leader.cursors.state.partial is not None
    result, _ = loaded(leader)
    assert (result.source, result.batches) == (CHECKPOINT, leader.log.log_id - as_of)
    after = leader.restart()  # what it had written is of nobody now
    after.publish(2)
    result, _ = loaded(after)
    assert (result.source, result.batches) == (CHECKPOINT, after.log.log_id - as_of)


def test_a_checkpoint_whose_beginning_is_gone_is_none():
    leader = leader_with_channel()
    for _ in range(30):
        leader.create(f"d{leader.log.log_id}")
    as_of = write_checkpoint(leader)
    del leader.log.batches[: as_of + 1]
    log = CountedLog(leader.log)
    with pytest.raises(LogCorrupt, match="no complete checkpoint"):
        load(log, log.read)


def test_a_log_was_trimmed_for_its_first_checkpoint_of_all_that_it_lacks():
    leader = leader_with_channel()
    for _ in range(30):
        leader.create(f"d{leader.log.log_id}")  # many channels: a checkpoint takes several batches
    ends = []
    for _ in range(3):
        publish_and_finish(leader, 10)
        write_checkpoint(leader)
        ends.append(leader.log.log_id + 1)
    as_of = newest_checkpoint(CountedLog(leader.log), CountedLog(leader.log).read, ends[1]).applied.log_id
    log = CountedLog(leader.log)
    assert first_checkpoint_end(log, log.read) == ends[0]
    del leader.log.batches[: as_of - 1]  # for the second one; the first one lacks some of that
    assert first_checkpoint_end(log, log.read) == ends[1]
    entry, _ = leader.log.batches[1]
    leader.log.batches[1] = entry._replace(flags=entry.flags | LOST), b""
    assert first_checkpoint_end(log, log.read) == 0


def test_a_checkpoint_in_pieces_that_another_one_interrupts_is_none():
    leader = leader_with_channel()
    for _ in range(30):
        leader.create(f"d{leader.log.log_id}")
    log = TinyLog()
    one = list(write(leader.cursors.state, 200))
    leader.publish(1)
    other = list(write(leader.cursors.state, 200))
    assert len(one) > 3
    for frame in [*one[:2], other[1], *one[2:]]:
        log.append(frame, count=0, flags=HAS_CHECKPOINT, epoch=1)
    assert newest_checkpoint(CountedLog(log), CountedLog(log).read, log.log_id + 1) is None
    for frame in one:
        log.append(frame, count=0, flags=HAS_CHECKPOINT, epoch=1)
    assert newest_checkpoint(CountedLog(log), CountedLog(log).read, log.log_id + 1) is not None


def test_a_log_whose_first_file_begins_above_its_log_start_begins_there():
    leader = leader_with_channel()
    publish_and_finish(leader, 5)
    leader.publish(5)
    kept = leader.cursors.state.snapshot()
    leader.publish(5)
    write_checkpoint(leader)
    entry = next(entry for entry, _ in leader.log.batches if entry.first_offset == 8 or entry.end_offset > 8)
    del leader.log.batches[: entry.log_id]
    for cached in (lambda: None, lambda: kept):
        log = CountedLog(leader.log)
        state = load(log, log.read, cached).state
        assert state.log_start == (log.start.offset, log.start.position) != (0, 0)
        assert state.channels["c"].floor == log.start.offset
        assert digest(state) == digest(leader.log.rebuild())


def test_files_that_went_for_an_event_that_is_applied_later_end_nothing_before_it():
    """A replica that does not know yet that the log start is committed keeps what was deferred and carried for it."""
    leader = leader_with_channel()
    channel = leader.cursors.channels["c"]
    leader.publish(9)
    last = leader.log.batches[-1][0]
    leader.publish(1)
    leader.deliver(channel)
    write_checkpoint(leader)
    known = leader.log.log_id + 1
    assert channel.req(7, 1, 3_600_000, leader.now) is None
    leader.fin(channel, *(offset for offset in range(10) if offset != 7))
    leader.flush()
    leader.cursors.retention.carry(7, leader.log.frame_of(7))
    leader.cursors.retention.propose_log_start(last.end_offset, last.end_position)
    leader.flush()
    assert leader.cursors.retention.may_unlink(
        end_offset=last.end_offset, end_position=last.end_position, end_log_id=last.log_id + 1
    )
    del leader.log.batches[: last.log_id]
    log = CountedLog(leader.log)
    state = load(log, log.read, committed=known).state
    assert state.applied.log_id + 1 == known
    for entry in log.entries(known, log.end.log_id):
        state.apply(entry, log.read(entry))
    assert digest(state) == digest(leader.cursors.state)
    assert [ref.offset for ref in state.channels["c"].deferred.items()] == [7]


def test_a_checkpoint_that_does_not_match_its_digest_is_passed_over():
    leader = leader_with_channel()
    publish_and_finish(leader, 5)
    good = write_checkpoint(leader)
    bad = write_checkpoint(leader)
    log = CountedLog(leader.log)

    def read(entry: Entry) -> bytes:
        data = log.read(entry)
        return data[:-1] + bytes([data[-1] ^ 1]) if entry.log_id > bad else data

    # The state is rebuilt from the older one; what cannot be told apart by contents is told by how much was read.
    assert load(log, read).batches == leader.log.log_id - good


def test_a_state_of_some_batch_ago():
    leader = leader_with_channel()
    publish_and_finish(leader, 5)
    then, expected = leader.log.log_id, digest(leader.cursors.state)
    write_checkpoint(leader)
    publish_and_finish(leader, 5)
    log = CountedLog(leader.log)
    result = load(log, log.read, end_log_id=then + 1)
    assert digest(result.state) == expected
