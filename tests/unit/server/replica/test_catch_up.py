"""The way back to a leader's log: where two part, what is pulled, and a log that begins in the middle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.cursor.committed.checkpoint import write
from nsqha.errors import LogCorrupt
from nsqha.frames import HAS_CHECKPOINT, HAS_EVENTS
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.pace import BURST_SECONDS, SharedRate
from nsqha.server.replica.following.catch_up import SLICE_COST
from tests.sim.storage import Crashed, SimStorage
from tests.unit.commitlog.logs import drop_pairs, roll
from tests.unit.server.replica_rig import KEY, A, B, ReplicaRig, add, copy_of, followed, log_of, pause, run, serving

SMALL = LogLimits(segment_bytes=300)


def trimmed() -> PartitionLog:
    """A leader's log whose first files are gone."""
    log = log_of(limits=SMALL)
    for _ in range(4):
        for _ in range(3):
            add(log, 1, b"x" * 50)
        roll(log)
    drop_pairs(log, log.pairs[1].end)
    add(log, 1, b"last")
    assert log.start.log_id == 7
    return log


async def begins_anew(rig: ReplicaRig, log: PartitionLog, committed: int = 0) -> Any:
    """A replica that has nothing follows a leader whose log begins in the middle."""
    await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
    rig.peers.serves = serving(log, 1, committed)
    stream = rig.leader(A)
    stream.ask(1, log)
    await pause(1)
    return stream


def same(one: PartitionLog, other: PartitionLog) -> bool:
    chains = [[entry.chain for entry in log.entries(1, 999)] for log in (one, other)]
    return chains[0] == chains[1] and one.start.log_id == other.start.log_id


def test_a_range_that_is_gone_begins_the_log_anew_under_another_name() -> None:
    async def scenario() -> None:
        rig, log = ReplicaRig(), trimmed()
        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
        before = rig.follower.log_uid
        await begins_anew(rig, log)
        assert same(rig.follower.log, log)
        record = rig.journal.record(KEY)
        assert record is not None and record.log_uid == rig.follower.log_uid != before

    run(scenario)


def test_a_leader_that_committed_nothing_yet_hears_from_a_replica_that_begins_anew() -> None:
    """It may need just this one before it can commit anything."""

    async def scenario() -> None:
        rig, log = ReplicaRig(), trimmed()
        stream = await begins_anew(rig, log)
        assert [opened.behind for opened in stream.opened] == [True, False]
        assert (stream.acks[-1].end, stream.acks[-1].durable) == (14, 14)
        add(log, 1, b"more")
        stream.push(1, log, 14)
        await pause()
        assert stream.acks[-1].durable == 15 and not rig.errors

    run(scenario)


def checkpoint(log: PartitionLog, as_of: int = 6) -> None:
    """A complete one; as of the last batch that is gone: for that nothing would have been taken away."""
    from nsqha.cursor.committed.state import AppliedEntry, PartitionState

    last, applied = log.last, log.entry_before(as_of + 1)
    assert last is not None
    state = PartitionState()
    state.applied = AppliedEntry(applied.log_id, applied.epoch, applied.chain, applied.end_offset, applied.end_position)
    data = b"".join(write(state))
    log.append(
        bytearray(data), count=0, flags=HAS_CHECKPOINT | HAS_EVENTS, timestamp_ns=last.timestamp_ns, epoch=1, durable=0
    )


def test_its_channels_are_known_as_soon_as_a_checkpoint_is_committed() -> None:
    async def scenario() -> None:
        rig, log = ReplicaRig(), trimmed()
        checkpoint(log)
        stream = await begins_anew(rig, log)
        assert not rig.follower.applier.state
        status = await rig.replicas.answers.status(stream.peer, pb.StatusRequest(cluster_id=9))
        assert status.replicas[0].corrupt, "it can not lead yet"
        add(log, 1, b"more")
        stream.push(1, log, 15, committed=15)
        await pause()
        rig.disk.hold()
        rig.replicas.keep_house()
        await pause()
        rig.replicas.keep_house()
        assert rig.follower.applier.state is None, "it is looked for off the loop"
        rig.disk.release()
        await pause()
        state: Any = rig.follower.applier.state
        assert state is not None and state.applied.log_id == 14
        stream.push(1, log, 15, committed=16)
        assert state.applied.log_id == 15
        status = await rig.replicas.answers.status(stream.peer, pb.StatusRequest(cluster_id=9))
        assert not status.replicas[0].corrupt

    run(scenario)


def test_the_checkpoint_that_a_log_was_trimmed_for_is_committed() -> None:
    async def scenario() -> None:
        rig, log = ReplicaRig(), trimmed()
        checkpoint(log, as_of=7)
        add(log, 1, b"more")
        await begins_anew(rig, log)
        assert rig.follower.applier.state is not None and rig.follower.applier.state.applied.log_id == 14

    run(scenario)


def test_channels_are_known_though_the_leader_died_before_saying_what_is_committed() -> None:
    """What came last says what was durable everywhere; nobody else may be left to lead."""

    async def scenario() -> None:
        rig, log = ReplicaRig(), trimmed()
        checkpoint(log)
        stream = await begins_anew(rig, log)
        rig.replicas.keep_house()
        await pause()
        add(log, 1, b"more", durable=15)
        stream.push(1, log, 15)
        await pause()
        stream.close()
        assert not rig.follower.applier.state
        rig.replicas.keep_house()
        await pause()
        assert rig.follower.applier.state is not None and rig.follower.applier.state.applied.log_id == 14

    run(scenario)


def is_cut(follower: Any) -> None:
    follower.log.cutting(10)  # the files come later


def catches_up(follower: Any) -> None:
    follower.behind = True  # which may cut below it, and takes it for unknown


@pytest.mark.parametrize("meanwhile", [is_cut, catches_up])
def test_a_state_that_was_found_too_late_is_dropped(meanwhile: Callable[[Any], None]) -> None:
    async def scenario() -> None:
        rig, log = ReplicaRig(), trimmed()
        checkpoint(log)
        stream = await begins_anew(rig, log)
        add(log, 1, b"more")
        stream.push(1, log, 15, committed=15)
        await pause()
        rig.disk.hold()
        rig.replicas.keep_house()
        await pause()
        meanwhile(rig.follower)
        rig.disk.release()
        await pause()
        assert rig.follower.applier.state is None and not rig.opener.cursor_cache._partitions and not rig.errors

    run(scenario)


def test_a_catch_up_given_up_behind_a_cut_of_applied_batches_leaves_no_state() -> None:
    """Only a log that was given up is cut there; its channels are read anew from what comes then."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig)
        mine = log_of(1, 1, 1)
        stream.push(1, mine, 1, committed=4)
        await pause()
        state: Any = rig.follower.applier.state
        assert state.applied.log_id == 3
        other = copy_of(mine, 2)
        add(other, 2, b"x")
        rig.record(leader=B, epoch=2, isr={B: 6})
        rig.peers.serves = serving(other, 2, committed=3)
        winner = rig.leader(B)
        cut = rig.replicas.files.cut

        async def cut_and_lose_the_leader(*args: Any) -> None:
            await cut(*args)
            winner.close()

        rig.replicas.files.cut = cut_and_lose_the_leader  # type: ignore[method-assign]
        winner.ask(2, other, start=2)
        await pause(1)
        assert rig.follower.log.end.log_id == 2 and rig.follower.applier.state is None
        again = rig.leader(B)
        again.ask(2, other, start=2)
        await pause(1)
        assert same(rig.follower.log, other)
        found: Any = rig.follower.applier.state
        assert found is not None and found.applied.log_id == 2 and not rig.errors

    run(scenario)


def test_a_node_starts_with_a_log_that_was_begun_anew_a_moment_ago() -> None:
    async def scenario() -> None:
        rig, log = ReplicaRig(), trimmed()
        await begins_anew(rig, log)
        log_uid = rig.follower.log_uid
        await rig.replicas.close()
        rig.journal.stop()
        again = ReplicaRig(rig.storage)
        await again.replicas.recover(again.record(leader=A, epoch=1, isr={A: 5}, replicas=(A, B, again.node)))
        assert again.follower.applier.state is None and again.follower.log_uid == log_uid
        assert again.follower.log.start.log_id == 7

    run(scenario)


@pytest.mark.parametrize("seed", range(12))
def test_whenever_it_dies_while_a_log_begins_anew_the_next_start_opens_a_log(seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        for steps in range(1, 60):
            storage = SimStorage(rng)
            rig = ReplicaRig(storage)
            rig.opener._limits = SMALL
            short = log_of(limits=SMALL)
            await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
            stream = rig.leader(A)
            await stream.open(1, short)
            for _ in range(8):
                add(short, 1, b"y" * 90)
                stream.push(1, short, short.end.log_id - 1)
                await pause(0.01)
            assert len(rig.follower.log.pairs) > 2
            anchor = trimmed().entry_before(7)
            storage.crash_after(steps)
            try:
                await rig.replicas.files.replace_log(rig.follower, anchor)
            except Crashed:
                pass
            else:
                break
            again = ReplicaRig(storage.crash(rng))
            again.opener._limits = SMALL
            await again.replicas.recover(again.record(leader=A, epoch=1, isr={A: 5}, replicas=(A, B, again.node)))
            assert KEY in again.replicas.followers, f"after {steps} steps nothing can be opened"
        else:
            raise AssertionError("it never ended")

    run(scenario)


def test_a_member_with_committed_batches_never_begins_anew_behind_them() -> None:
    """Then the leader is wrong, or the metadata; a log that counts is not thrown away for it."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, mine = await followed(rig)
        for _ in range(20):
            add(mine, 1, b"mine")
        stream.push(1, mine, 1, committed=21)
        await pause()
        other = trimmed()  # of the same epoch, and yet another past
        add(other, 2, b"z")
        rig.record(leader=B, epoch=2, isr={B: 6, rig.node: rig.follower.log_uid})
        rig.peers.serves = serving(other, 2)
        usurper = rig.leader(B)
        usurper.ask(2, other)
        await pause(1)
        assert rig.follower.stopped and rig.follower.log.end.log_id == 21
        assert usurper.refused[-1].refusal == pb.REFUSAL_FAILED

    run(scenario)


def test_of_a_log_that_was_given_up_nothing_counts_as_committed_behind_the_cut() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig)
        mine = log_of(1, 1, 1)
        rig.follower.applier.damage = (1, 2)  # it applies nothing for the time being
        stream.push(1, mine, 1, committed=4)
        await pause()
        assert rig.follower.applier.committed == 4
        other = copy_of(mine, 2)
        add(other, 2, b"x")
        add(other, 2, b"y")
        rig.record(leader=B, epoch=2, isr={B: 6})
        rig.peers.serves = serving(other, 2)
        rig.leader(B).ask(2, other, start=2)
        await pause(1)
        assert same(rig.follower.log, other) and rig.follower.applier.committed == 2
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is None and not rig.journal.dirty

    run(scenario)


def test_the_journal_forgets_a_cut_before_anything_is_appended_again() -> None:
    """What is pulled may be the very batch that was cut: the next start would cut it once more."""

    async def scenario() -> None:
        rig = ReplicaRig()
        await another_past(rig)
        await rig.replicas.files.cut(rig.follower, 2)
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is None and not rig.journal.dirty

    run(scenario)


def test_a_member_never_cuts_what_is_committed() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig)
        mine = log_of(1, 1, 1)
        stream.push(1, mine, 1, committed=4)
        await pause()
        other = copy_of(mine, 2)
        add(other, 2, b"x")
        rig.record(leader=B, epoch=2, isr={B: 6, rig.node: rig.follower.log_uid})
        rig.peers.serves = serving(other, 2, committed=3)
        rig.leader(B).ask(2, other, start=2)
        await pause(1)
        assert rig.follower.stopped and rig.follower.log.end.log_id == 4

    run(scenario)


async def another_past(rig: ReplicaRig) -> tuple[Any, PartitionLog]:
    """A follower with a batch of epoch 2 for which the next leader has another one, and more behind it."""
    await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
    mine = log_of(1, 2)
    stream = rig.leader(A)
    await stream.open(2, log_of())
    stream.push(2, mine, 1)
    await pause()
    assert rig.follower.log.end.log_id == 3
    other = copy_of(mine, 2)
    add(other, 2, b"x")
    add(other, 2, b"y")
    return stream, other


def test_a_shorter_part_of_another_epoch_is_cut_when_the_first_batch_shows_it() -> None:
    """Where an epoch ends can not show it: the chain behind our shorter part is nobody's but ours."""

    async def scenario() -> None:
        rig = ReplicaRig()
        _, other = await another_past(rig)
        add(other, 3, b"z")
        rig.record(leader=B, epoch=3, isr={B: 6})
        rig.peers.serves = serving(other, 3)
        stream = rig.leader(B)
        stream.ask(3, other, start=4)
        await pause(5)
        assert same(rig.follower.log, other) and rig.follower.leader_log.differs_at is None
        assert not stream.opened[-1].behind and not rig.errors

    run(scenario)


def test_a_batch_that_is_refused_as_another_one_is_looked_for_at_the_next_open() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, other = await another_past(rig)
        rig.peers.serves = serving(other, 2)
        stream.push(2, other, 3)
        await pause()
        assert stream.refused[-1].refusal == pb.REFUSAL_MISMATCH
        stream.ask(2, other, start=1)
        await pause(1)
        assert same(rig.follower.log, other)

    run(scenario)


def test_a_log_of_which_nothing_can_be_read_is_fetched_again_under_another_name() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
        directory, log_uid = rig.follower.log.directory, rig.follower.log_uid
        await rig.replicas.close()
        rig.journal.stop()
        for name in rig.storage.list_dir(directory):
            rig.storage.remove(f"{directory}/{name}")
        file = rig.storage.open(f"{directory}/00000000000000000900.segment", create=True)
        file.pwrite(b"what nobody can read", 0)
        again = ReplicaRig(rig.storage)
        await again.replicas.recover(again.record(leader=A, epoch=1, isr={A: 5}, replicas=(A, B, again.node)))
        assert again.follower.log_uid != log_uid and again.follower.log.end.log_id == 1

    run(scenario)


def test_a_log_that_can_not_be_opened_hinders_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()

        def corrupt(*_: Any) -> Any:
            raise LogCorrupt("restore the files")

        monkeypatch.setattr(rig.opener, "recover", corrupt)
        record = rig.record(leader=A, epoch=1, isr={A: 5})
        await rig.replicas.recover(record)
        await rig.settle(record)
        assert not rig.replicas.followers
        refused = await rig.leader(A).open(1, log_of())
        assert refused.refusal == pb.REFUSAL_UNKNOWN and not rig.errors

    run(scenario)


# ---- who goes first


def long_log(batches: int = 60, size: int = 100_000) -> PartitionLog:
    log = log_of()
    for _ in range(batches):
        add(log, 1, b"x" * size)
    return log


async def pulled(rig: ReplicaRig, log: PartitionLog, serves: Any = None, **meta: Any) -> float:
    """Seconds until a new replica has the leader's log."""
    await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}, **meta))
    if "member" in rig.__dict__:
        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5, rig.node: rig.follower.log_uid}, **meta))
    rig.peers.serves = serves or serving(log, 1)
    stream = rig.leader(A)
    begun = asyncio.get_running_loop().time()
    stream.ask(1, log)
    while not any(not opened.behind for opened in stream.opened):
        await asyncio.sleep(0.01)
        assert not rig.errors and asyncio.get_running_loop().time() < begun + 1000
    assert same(rig.follower.log, log)
    return asyncio.get_running_loop().time() - begun


def test_a_replica_that_nobody_waits_for_pulls_no_faster_than_it_may() -> None:
    async def scenario() -> None:
        seconds = await pulled(ReplicaRig(catch_up_bytes_per_second=1 << 20), long_log(), min_isr=1)
        assert 3.0 < seconds < 6.0  # six megabytes, of which one at once and the last one without a rest

    run(scenario)


def test_small_batches_count_for_more_than_their_bytes() -> None:
    async def scenario() -> None:
        log = long_log(2000, 400)
        seconds = await pulled(ReplicaRig(catch_up_bytes_per_second=1 << 20), log, min_isr=1)
        assert log.end.position < 1 << 20 and seconds > 3.0

    run(scenario)


@pytest.mark.parametrize("why", ["it is in the ISR", "too few others live", "the leader's log grows"])
def test_a_replica_that_is_waited_for_or_would_never_arrive_does_not_rest(why: str) -> None:
    async def scenario() -> None:
        rig, log = ReplicaRig(catch_up_bytes_per_second=1 << 20), long_log()
        serves = None
        if why == "it is in the ISR":
            rig.__dict__["member"] = True
        elif why == "too few others live":
            del rig.nodes[B]
        else:
            answer = serving(log, 1)

            def serves(method: str, request: Any) -> Any:
                for _ in range(6 if log.end.log_id < 150 else 0):  # while ten come
                    add(log, 1, b"y" * 100_000)
                return answer(method, request)

        floor = 2 if why == "too few others live" else 1
        seconds = await pulled(rig, log, serves, min_isr=floor)
        assert seconds < (log.end.position >> 20) / 2

    run(scenario)


def test_the_next_part_is_asked_for_while_one_is_stored() -> None:
    """Otherwise the leader's disk and the link would wait for the follower's."""

    async def scenario() -> None:
        rig, log = ReplicaRig(), long_log()
        asked, call = [], rig.peers.call

        def noted(address: str, method: str, request: Any, *, timeout: float) -> Any:
            if method == "Fetch":
                asked.append((request.first, rig.follower.log.end.log_id))
            return call(address, method, request, timeout=timeout)

        rig.peers.call = noted
        await pulled(rig, log, min_isr=1)
        firsts = [first for first, _ in asked]
        assert len(firsts) > 3 and firsts == sorted(set(firsts)), "nothing is asked for twice"
        assert all(first > end for first, end in asked[1:-1]), asked

    run(scenario)


def lacked(rig: ReplicaRig) -> int:
    """What the statistics say."""
    return rig.follower.leader_log.lacked_from(rig.follower.log.end.position)


async def lacking(rig: ReplicaRig, log: PartitionLog) -> list[tuple[int, int, bool]]:
    """(what it lacked, what it really lacked, rebuilding) each time that it asked for batches."""
    asked, serves = [], serving(log, 1)

    def noted(method: str, request: Any) -> Any:
        if method == "Fetch":
            follower = rig.follower
            really = log.end.position - follower.log.end.position
            asked.append((lacked(rig), really, follower.leader_log.rebuilding))
        return serves(method, request)

    await pulled(rig, log, noted, min_isr=1)
    return asked


def test_what_is_left_to_fetch_is_known_from_the_first_answer_on() -> None:
    async def scenario() -> None:
        rig, log = ReplicaRig(), long_log()
        asked = await lacking(rig, log)
        assert asked[0][0] == 0, "the leader has not said yet where its log ends"
        assert len(asked) > 3 and all(lacks == really > 0 for lacks, really, _ in asked[1:-1]), asked
        assert all(rebuilding for *_, rebuilding in asked)
        assert (lacked(rig), rig.follower.leader_log.rebuilding) == (0, False), "it has caught up"

    run(scenario)


def test_a_replica_that_has_something_is_no_rebuild() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log = await followed(rig)
        add(log, 1, b"pushed")
        stream.push(1, log, 1)
        await pause(0.1)
        for _ in range(40):
            add(log, 2, b"z" * 100_000)
        await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
        seen = []

        def noted(method: str, request: Any) -> Any:
            seen.append(rig.follower.leader_log.rebuilding)
            return serving(log, 2)(method, request)

        rig.peers.serves = noted
        rig.leader(A).ask(2, log)
        await pause(1)
        assert same(rig.follower.log, log) and len(seen) > 2 and not any(seen)

    run(scenario)


def test_a_leader_that_does_not_say_where_its_log_ends_leaves_it_unknown() -> None:
    """One of an older build."""

    async def scenario() -> None:
        rig, log, found = ReplicaRig(), long_log(), []
        serves = serving(log, 1)

        def older(method: str, request: Any) -> Any:
            found.append(lacked(rig))
            reply = serves(method, request)
            if method == "Fetch":
                reply.ClearField("end_position")
            return reply

        await pulled(rig, log, older, min_isr=1)
        assert set(found) == {0}

    run(scenario)


def test_everybody_else_has_a_turn_while_a_long_answer_is_stored() -> None:
    async def scenario() -> None:
        rig, log = ReplicaRig(), long_log(200, 8_000)
        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
        stored = [0]  # bytes, in each turn of the loop

        def append_copy(entry: Any, data: bytes, raw: bytes) -> None:
            if not stored[-1]:
                asyncio.get_running_loop().call_soon(stored.append, 0)
            stored[-1] += entry.size
            append(entry, data, raw)

        append = rig.follower.log.append_copy
        rig.follower.log.append_copy = append_copy  # type: ignore[method-assign]
        rig.peers.serves = serving(log, 1)
        rig.leader(A).ask(1, log)
        await pause(1)
        assert same(rig.follower.log, log)
        assert max(stored) <= SLICE_COST + 8_100 and sum(stored) > 10 * SLICE_COST

    run(scenario)


def test_a_short_answer_that_is_not_all_there_is_does_not_end_it() -> None:
    """As at the end of a pair of files: what is behind would be pushed from the leader's loop."""

    async def scenario() -> None:
        rig, log = ReplicaRig(), long_log()
        roll(log)
        add(log, 1, b"more")
        whole, end = serving(log, 1), log.end.log_id

        def by_one(method: str, request: Any) -> Any:
            if method == "Fetch":
                request.max_bytes = 1
            return whole(method, request)

        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
        rig.peers.serves = by_one
        stream = rig.leader(A)
        stream.ask(1, log)
        await pause(1)
        assert [(opened.behind, opened.end) for opened in stream.opened] == [(True, 1), (False, end)]

    run(scenario)


# ---- the rate that all share: short work is not slowed down, long work keeps to it, whoever does it


def test_long_work_keeps_to_the_rate_after_a_burst() -> None:
    pace, now = SharedRate(100), 1000.0
    for _ in range(50):
        now += pace.done(40, now)
    assert now - 1000.0 == pytest.approx(50 * 40 / 100 - BURST_SECONDS)


def test_jobs_share_the_rate() -> None:
    pace = SharedRate(100)
    assert pace.done(100, 0.0) == 0.0
    assert [pace.done(50, 0.0), pace.done(50, 0.0)] == [0.5, 1.0]


def test_who_rested_long_has_no_more_than_a_burst() -> None:
    pace = SharedRate(100)
    pace.done(100, 0.0)
    assert pace.done(100, 1e6) == 0.0
    assert pace.done(100, 1e6) == 1.0


def test_without_a_rate_nobody_rests() -> None:
    assert SharedRate(0).done(1 << 60, 0.0) == 0.0
