"""What leaders of other nodes are answered: promises first, then the log is brought in line with theirs."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from nsqha.errors import AppendFailed, LogCorrupt
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.ranges import RangeSet
from nsqha.server.integrity.suspect_logs import Doubted
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.replica.follower_service import LOST_SECONDS
from nsqha.server.replica.following import catch_up as catchup
from tests.sim.storage import SimStorage
from tests.unit.server.replica_rig import (
    CLUSTER,
    KEY,
    A,
    B,
    ReplicaRig,
    add,
    copy_of,
    followed,
    log_of,
    pause,
    promised,
    run,
    serving,
)

# ---- Open


def test_for_a_while_a_node_knows_how_many_partitions_lost_their_leader() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig)
        assert rig.replicas.beginning == 0
        stream.close()
        await pause()
        assert rig.replicas.beginning == 1, "it may be elected in a moment"
        rig.clock.advance(LOST_SECONDS)
        assert rig.replicas.beginning == 0

    run(scenario)


def test_the_promise_is_durable_before_the_answer() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        _stream, log = await followed(rig)
        rig.record(leader=B, epoch=2, isr={B: 6})
        other = rig.leader(B)
        rig.disk.hold()
        other.ask(2, log)
        await pause()
        assert not other.opened and promised(rig) == 1
        rig.disk.release()
        await pause()
        assert other.opened[0].epoch == 2 and promised(rig) == 2

    run(scenario)


def test_nothing_of_the_old_leader_is_taken_while_the_promise_is_written() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log = await followed(rig)
        rig.record(leader=B, epoch=2, isr={B: 6})
        other = rig.leader(B)
        rig.disk.hold()
        other.ask(2, log)
        await pause()
        stream.take()
        other.close()  # the new leader is never answered, but the promise stands
        rig.disk.release()
        await pause()
        add(log, 1, b"late")
        stream.push(1, log, 1)
        await pause()
        assert promised(rig) == 2 and not stream.acks
        assert stream.refused[0].refusal == pb.REFUSAL_FENCED and rig.follower.log.end.log_id == 1

    run(scenario)


def test_the_old_leader_hears_of_it_though_it_sends_nothing_more() -> None:
    """It may wait for the ack of its last batch, which never comes now, and keeps the next ones back until then."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log = await followed(rig)
        rig.record(leader=B, epoch=2, isr={B: 6})
        rig.leader(B).ask(2, log)
        await pause()
        assert [(r.epoch, r.refusal, r.promised) for r in stream.refused] == [(1, pb.REFUSAL_FENCED, 2)]

    run(scenario)


def test_a_stream_that_another_one_of_the_same_leader_took_over_from_hears_of_it() -> None:
    """An open that lay in a cut comes after that of the stream which took its place; that then waits for acks."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log = await followed(rig)
        late = rig.leader(A)
        late.ask(1, log)
        await pause()
        late.close()
        assert [(r.epoch, r.refusal) for r in stream.refused] == [(1, pb.REFUSAL_UNKNOWN)], "it asks again, then"
        stream.ask(1, log)
        await pause()
        add(log, 1, b"one")
        stream.push(1, log, 1)
        await pause()
        assert stream.acks[-1].end == 2 and len(stream.refused) == 1

    run(scenario)


def test_a_catch_up_that_was_given_up_for_a_stream_that_ended_is_asked_for_again() -> None:
    """Else nobody pulls, and nobody is followed: the leader waits for a replica that comes no nearer, and a move to it
    is never done."""

    async def scenario() -> None:
        rig = ReplicaRig()
        _stream, log = await followed(rig)
        add(log, 1, b"one")
        renewed, late = rig.leader(A), rig.leader(A)
        rig.peers.serves = serving(log, 1)
        rig.peers.gate.clear()
        rig.follower.leader_log.differs_at = 1
        renewed.ask(1, log)
        await pause()
        assert rig.follower.jobs.running is not None and [each.behind for each in renewed.opened] == [True]
        late.ask(1, log)
        while rig.follower.port is not None:
            await asyncio.sleep(0)
        late.close()
        await pause()
        assert rig.follower.jobs.running is None and not late.opened
        assert [each.refusal for each in renewed.refused] == [pb.REFUSAL_UNKNOWN], "it asks again, then"
        rig.peers.gate.set()
        renewed.take()
        renewed.ask(1, log)
        await pause(1)
        assert [each.behind for each in renewed.opened] == [True, False] and rig.follower.log.end.log_id == 2

    run(scenario)


def test_a_promise_that_could_not_be_written_is_written_before_the_next_answer(monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        _stream, log = await followed(rig)
        rig.record(leader=B, epoch=2, isr={B: 6})
        other = rig.leader(B)
        write = rig.journal._file._store

        def full(*_: Any) -> None:
            raise AppendFailed("disk full")

        monkeypatch.setattr(rig.journal._file, "_store", full)
        refused = await other.open(2, log)
        assert refused.refusal == pb.REFUSAL_UNKNOWN
        refused = await other.open(2, log)
        assert refused.DESCRIPTOR.name == "Refused", "answered on the account of a promise that is not durable"
        monkeypatch.setattr(rig.journal._file, "_store", write)
        opened = await other.open(2, log)
        assert opened.DESCRIPTOR.name == "Opened" and promised(rig) == 2

    run(scenario)


def test_housekeeping_on_the_files_during_a_promise_stops_no_catch_up() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        _stream, log = await followed(rig)
        add(log, 1, b"one")
        rig.record(leader=B, epoch=2, isr={B: 6})
        rig.peers.serves = serving(log, 2)
        other = rig.leader(B)
        rig.disk.hold()
        other.ask(2, log)
        await pause()
        rig.follower.jobs.take(rig.follower._roll)
        rig.disk.release()
        await pause(1)
        assert not rig.errors
        assert [opened.behind for opened in other.opened] == [True, False]

    run(scenario)


def test_a_stale_leader_is_fenced() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log = await followed(rig, epoch=3)
        stale = rig.leader(B)
        refused = await stale.open(2, log)
        assert refused.refusal == pb.REFUSAL_FENCED and refused.promised == 3
        add(log, 3, b"one")
        stream.push(3, log, 1)
        await pause()
        assert stream.acks[-1].end == 2, "the one it follows goes on"

    run(scenario)


def test_an_open_that_the_metadata_does_not_confirm_is_refused() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
        liar = rig.leader(B)
        refused = await liar.open(2, log_of())
        assert refused.refusal == pb.REFUSAL_UNKNOWN
        refused = await liar.open(9, log_of())
        assert refused.refusal == pb.REFUSAL_UNKNOWN
        assert promised(rig) < 9

    run(scenario)


def test_an_open_that_fails_in_any_way_is_answered(monkeypatch: Any) -> None:
    """Its leader would not ask again, and go on without this replica."""

    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
        leader = rig.leader(A)
        monkeypatch.setattr(rig.replicas.table, "record_of", lambda key: 1 / 0)
        assert (await leader.open(2, log_of())).refusal == pb.REFUSAL_UNKNOWN
        monkeypatch.undo()
        assert (await leader.open(2, log_of())).DESCRIPTOR.name == "Opened"

    run(scenario)


# ---- catch-up and its files


async def diverged(rig: ReplicaRig) -> tuple[Any, Any, Any]:
    """A follower with batches of epoch 1 that the leader of epoch 2 does not have."""
    stream, old = await followed(rig)
    for _ in range(4):
        add(old, 1, b"old")
    stream.push(1, old, 1)
    await pause()
    assert rig.follower.log.end.log_id == 5
    new = copy_of(old, 3)
    for _ in range(4):
        add(new, 2, b"new")
    rig.record(leader=B, epoch=2, isr={B: 6})
    rig.peers.serves = serving(new, 2)
    return rig.leader(B), old, new


def test_what_the_leader_does_not_have_is_cut_and_what_is_missing_pulled() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, _, new = await diverged(rig)
        other.ask(2, new, start=3)
        await pause(1)
        log = rig.follower.log
        assert [e.chain for e in log.entries(1, 99)] == [e.chain for e in new.entries(1, 99)]
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is None
        assert [opened.behind for opened in other.opened] == [True, False]
        assert other.opened[-1].end == 7 and not rig.errors

    run(scenario)


def test_what_came_anew_is_not_cut_again_though_the_rest_has_to_wait() -> None:
    """It may be known to be committed by now."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log = await followed(rig)
        for _ in range(4):
            add(log, 1, b"x")
        stream.push(1, log, 1)
        await pause()
        rig.replicas.integrity.suspects._doubted[KEY] = Doubted(2, 0, RangeSet([(2, 3)]))
        rig.follower.log.doubtful_from = 2
        whole, broken = serving(log, 1), True
        fetched: list[int] = []

        def serves(method: str, request: Any) -> Any:
            if method == "Fetch" and request.end:
                return pb.FetchReply()  # nobody has what would mend it where it is
            if method == "Fetch":
                request.max_bytes = 1  # one batch at a time
                fetched.append(request.first)
                if request.first >= 4 and broken:
                    raise LogCorrupt("the leader has damage too")
            return whole(method, request)

        rig.peers.serves = serves
        stream.ask(1, log)
        await pause(0.2)
        assert rig.follower.log.end.log_id == 4 and rig.follower.behind
        await pause(2)
        assert fetched.count(4) > 2 and fetched.count(2) == fetched.count(3) == 1
        broken = False
        await pause(1)
        assert rig.follower.log.end.log_id == 5 and not rig.follower.behind
        assert rig.replicas.integrity.suspects.unsound_from(KEY) is None and not rig.errors

    run(scenario)


def test_a_cut_that_has_begun_ends_though_another_leader_comes() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, old, new = await diverged(rig)
        rig.disk.hold()
        rig.peers.gate.clear()
        other.ask(2, new, start=3)
        await pause()  # the promise waits
        rig.disk.release()
        await pause()
        rig.disk.hold()
        rig.peers.gate.set()
        await pause()  # the intent of the cut is on its way
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is not None
        third = copy_of(old, 5)
        rig.record(leader=A, epoch=3, isr={A: 5})
        stream = rig.leader(A)
        rig.peers.serves = serving(third, 3)
        stream.ask(3, third)
        await pause()
        rig.disk.release()
        await pause(1)
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is None, "the next start would cut what was acknowledged since"
        assert rig.follower.log.end.log_id == 5 and not stream.opened[-1].behind

    run(scenario)


def test_a_log_is_cut_off_the_loop_and_ends_there_at_once() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, _old, new = await diverged(rig)
        jobs: list[Any] = []
        monitored = rig.disk.run
        rig.disk.run = lambda job: (jobs.append(job), monitored(job))[1]  # type: ignore[method-assign]
        cutting = rig.follower.log.cutting
        cuts: list[Any] = []

        def kept(log_id: int) -> Any:
            cuts.append((log_id, cutting(log_id)))
            rig.disk.hold()
            return cuts[-1][1]

        rig.follower.log.cutting = kept  # type: ignore[method-assign]
        other.ask(2, new, start=3)
        await pause()
        log = rig.follower.log
        assert cuts[0][0] == 3 and jobs[-1] is cuts[0][1] and log.end.log_id == 3
        assert log.snapshot().files.pairs[0].commitlog.size() > log.entry_before(3).log_id * 80 + 80, "not cut yet"
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is not None
        reply = await rig.replicas.answers.status(PeerIdentity("x"), pb.StatusRequest(cluster_id=CLUSTER))
        assert reply.replicas[0].end == 3 and reply.replicas[0].chain == log.entry(2).chain
        rig.disk.release()
        await pause(1)
        assert log.end.log_id == 7 and not rig.errors

    run(scenario)


def test_a_cut_whose_intent_can_not_be_written_is_not_left_for_the_next_start(monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, _old, new = await diverged(rig)
        other.ask(2, new, start=3)

        staged = rig.journal.stage_cut

        def stage_and_fill(*args: Any) -> None:
            staged(*args)

            def full(*_: Any) -> None:
                raise AppendFailed("disk full")

            monkeypatch.setattr(rig.journal._file, "_store", full)

        monkeypatch.setattr(rig.journal, "stage_cut", stage_and_fill)
        await pause()
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is None and rig.follower.log.end.log_id == 5
        monkeypatch.undo()
        await pause(2)
        assert rig.follower.log.end.log_id == 7

    run(scenario)


@pytest.mark.parametrize("step", ["_epoch_end", "cutting"])
def test_catching_up_goes_on_when_files_can_be_opened_again(step: str, monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, _old, new = await diverged(rig)

        def too_many(*_: object) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(rig.follower.log if step == "cutting" else catchup, step, too_many)
            rig.peers.serves = serving(new, 2)
            other.ask(2, new, start=3)
            await pause()
            record = rig.journal.record(KEY)
            assert record is not None and record.cut is None and rig.follower.log.end.log_id == 5
        await pause(2)
        assert rig.follower.log.end.log_id == 7 and not rig.failures and not rig.errors

    run(scenario)


def test_a_disk_that_fails_during_catch_up_ends_the_node() -> None:
    async def scenario() -> None:
        rig = ReplicaRig(SimStorage())
        other, _, new = await diverged(rig)
        rig.storage.fail("sync", "segment")
        other.ask(2, new, start=3)
        await pause(1)
        assert len(set(map(str, rig.failures))) == 1, "the disk tells it, and who asked"

    run(scenario)


def test_a_round_of_before_a_cut_acknowledges_nothing_that_came_after() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, old, new = await diverged(rig)
        add(old, 1, b"late")
        rig.disk.rounds_held = True
        rig.follower.log.append_copy(old.entry(5), old.read(old.entry(5)))
        rig.disk.request(rig.follower)
        rig.disk.begin()
        rig.disk.write()
        other.ask(2, new, start=3)
        await pause(1)
        assert rig.follower.log.end.log_id == 7
        rig.disk.end()
        await pause()
        assert other.acks[-1].end == 7 and other.acks[-1].durable <= 3

    run(scenario)


def test_after_catching_up_the_leader_hears_of_durability_without_an_append() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, _, new = await diverged(rig)
        other.ask(2, new, start=3)
        await pause(1)
        assert (other.acks[-1].end, other.acks[-1].durable) == (7, 7)

    run(scenario)
