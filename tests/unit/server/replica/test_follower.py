"""A follower's log: what it takes, what it refuses, when it acknowledges, and what it applies."""

from __future__ import annotations

import errno
from collections.abc import Awaitable
from typing import Any, cast

import pytest

from nsqha.commitlog.copying import read_run
from nsqha.commitlog.entry import ENTRY_BYTES, FAULTY, BatchCorrupt
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.cursor.committed.state import CheckpointMark, PartitionState
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.replica.following import applier as applier_module
from nsqha.server.replica.following.follower import Follower, FollowerRuntime, LeaderLog
from tests.fakes.disk import FakeDisk
from tests.fakes.loop import VirtualLoop
from tests.sim.storage import SimStorage
from tests.unit.server.replica_rig import KEY, UID, add, log_of


class Port:
    """The leader's stream; what it was told."""

    leader = 1

    def __init__(self) -> None:
        self.acks: list[tuple[int, int]] = []
        self.fit: list[bool] = []  # as said with each ack
        self.refusals: list[Any] = []

    def opened(self, follower: Follower, *, behind: bool) -> None: ...

    def ack(self, follower: Follower) -> None:
        end = follower.log.end.log_id
        self.acks.append((end, min(follower.log.local_durable, end)))
        self.fit.append(follower.applier.fit)

    def refused(self, key: Any, epoch: int, refusal: Any, promised: int, why: str) -> None:
        self.refusals.append(refusal)


class FollowerRig:
    """A follower in sync with `leader`, an empty log of epoch 1."""

    def __init__(self, *, sync: str = "always", limits: LogLimits | None = None) -> None:
        self.loop = VirtualLoop()
        self.failures: list[BaseException] = []
        self.disk = FakeDisk(self.loop, self.failures.append, held=True)
        self.storage = SimStorage()
        self.damage: list[tuple[int, int]] = []
        runtime = FollowerRuntime(
            cast(Any, self.loop),
            cast(Any, self.disk),
            self.failures.append,
            on_damage=lambda key, first, end: self.damage.append((first, end)),
            distrust=lambda follower, log_id: follower.applier.distrust(log_id),
            sync_every=100,
            sync_seconds=2.0,
        )
        self.leader = log_of()
        self.log = log_of(storage=self.storage, limits=limits)
        self.state = PartitionState()
        self.follower: Any = Follower(runtime, key=KEY, log=self.log, log_uid=9, state=self.state, sync=sync, epoch=1)
        self.port = Port()
        self.follower.follow(self.port, 1, 1)
        self.follower.caught_up()

    def write(self, *bodies: bytes) -> None:
        for body in bodies:
            add(self.leader, 1, body)

    def push(
        self,
        first: int,
        end: int | None = None,
        *,
        committed: int = 0,
        epoch: int = 1,
        log: PartitionLog | None = None,
        patient: bool = False,
    ) -> None:
        source = log or self.leader
        run = read_run(source, first, end or source.end.log_id, 1 << 30)
        message = pb.Append(topic_uid=UID, epoch=epoch, entries=run.entries, data=run.data, committed=committed)
        message.patient = patient
        self.follower.append(self.port, message)
        self.loop.turn()


def test_with_sync_always_nothing_is_acknowledged_before_a_disk_round() -> None:
    rig = FollowerRig()
    rig.write(b"a", b"b")
    rig.push(1)
    assert rig.port.acks == []
    rig.disk.sync()
    assert rig.port.acks == [(3, 3)]


def test_what_no_caller_waits_for_is_acknowledged_at_once_and_synced_later() -> None:
    rig = FollowerRig()
    rig.write(b"a")
    rig.push(1, patient=True)
    assert rig.port.acks == [(2, 1)]
    assert not rig.disk.wanting
    rig.loop.pass_time(0.6)
    rig.disk.sync()
    assert rig.port.acks[-1] == (2, 2)


def test_what_is_waited_for_brings_the_round_for_what_came_before() -> None:
    rig = FollowerRig()
    rig.write(b"a", b"b", b"c")
    rig.push(1, 2, patient=True)
    rig.push(2, 3)
    rig.disk.begin()
    rig.push(3, patient=True)
    rig.disk.end()
    assert rig.port.acks[-1] == (4, 3)
    assert not rig.disk.wanting, "no caller waits for what came during the round"


def test_what_came_during_a_round_is_durable_after_the_next() -> None:
    rig = FollowerRig()
    rig.write(b"a", b"b")
    rig.push(1, 2)
    rig.disk.begin()
    rig.push(2)
    rig.disk.end()
    assert rig.port.acks == [(3, 2)]
    rig.disk.sync()
    assert rig.port.acks[-1] == (3, 3)


@pytest.mark.parametrize("sync", ["interval", "none"])
def test_without_it_the_end_is_acknowledged_at_once(sync: str) -> None:
    rig = FollowerRig(sync=sync)
    rig.write(b"a")
    rig.push(1)
    assert rig.port.acks == [(2, 1)]
    rig.loop.pass_time(3)
    assert bool(rig.disk.wanting) == (sync == "interval")


@pytest.mark.parametrize("sync", ["always", "interval"])
def test_what_is_here_already_is_acknowledged_again_and_stored_once(sync: str) -> None:
    rig = FollowerRig(sync=sync)
    rig.write(b"a", b"b")
    rig.push(1)
    rig.disk.sync()
    rig.port.acks.clear()
    rig.push(1)
    assert rig.port.acks == [(3, 3 if sync == "always" else 1)] and rig.log.end.log_id == 3


def test_a_run_that_overlaps_is_taken_from_the_end_on() -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a", b"b", b"c")
    rig.push(1, 3)
    rig.push(2)
    assert rig.log.end.log_id == 4 and rig.port.acks[-1][0] == 4


def test_a_gap_is_refused() -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a", b"b", b"c")
    rig.push(1, 2)
    rig.port.acks.clear()
    rig.push(3)
    assert rig.port.refusals == [pb.REFUSAL_MISMATCH] and not rig.port.acks and rig.log.end.log_id == 2


def test_the_same_log_id_with_another_content_is_refused_and_not_acknowledged() -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a", b"b")
    rig.push(1)
    other = log_of()
    add(other, 1, b"a")
    add(other, 1, b"other")
    add(other, 1, b"more")
    rig.port.acks.clear()
    rig.push(2, log=other)
    assert rig.port.refusals == [pb.REFUSAL_MISMATCH] and not rig.port.acks and rig.log.end.log_id == 3


def test_another_epoch_or_stream_is_fenced() -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a")
    rig.push(1, epoch=2)
    stranger = Port()
    run = read_run(rig.leader, 1, 2, 1000)
    rig.follower.append(stranger, pb.Append(topic_uid=UID, epoch=1, entries=run.entries, data=run.data))
    rig.follower.fence(1)
    assert len(rig.port.refusals) == 1, "the same leader comes with another stream"
    rig.push(1)
    assert rig.port.refusals == [pb.REFUSAL_FENCED] * 2 and stranger.refusals == [pb.REFUSAL_FENCED]
    assert rig.log.end.log_id == 1


def test_a_full_disk_is_told_and_nothing_is_acknowledged() -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a")
    rig.storage.fail("pwrite", "segment", code=errno.ENOSPC)
    rig.push(1)
    assert rig.port.refusals == [pb.REFUSAL_NO_SPACE] and not rig.port.acks and rig.log.end.log_id == 1
    rig.push(1)
    assert rig.port.acks == [(2, 1)]


def test_a_failed_round_ends_the_node_and_acknowledges_nothing() -> None:
    rig = FollowerRig()
    rig.write(b"a")
    rig.push(1)
    rig.storage.fail("sync", "segment")
    rig.disk.sync()
    assert len(rig.failures) == 1 and not rig.port.acks


def test_only_what_is_committed_is_applied() -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a", b"b", b"c")
    rig.push(1, committed=2)
    assert rig.state.applied.log_id == 1
    rig.follower.committed_to(99)  # more than is here
    assert rig.state.applied.log_id == 3


def test_damage_in_front_of_what_is_to_be_applied_is_told_and_waited_for() -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a", b"b", b"c")
    rig.push(1)
    rig.follower.applier._pending.batches.clear()  # as after a restart: it is read from the files
    bit = 8 * (2 * ENTRY_BYTES + 10)
    commitlog = next(path for path in rig.storage.contents() if path.endswith(".commitlog"))
    rig.storage.flip(commitlog, bit)
    assert rig.port.fit == [True]
    rig.follower.committed_to(4)
    assert rig.damage == [(2, 3)] and rig.state.applied.log_id < 2 and not rig.follower.applier.readable
    assert rig.port.fit == [True, False], "its leader hears of it, though nothing is published"
    assert rig.follower.stopped is None and not rig.failures
    rig.write(b"d")
    rig.push(4)
    assert rig.log.end.log_id == 5, "it follows on meanwhile"
    rig.storage.flip(commitlog, bit)
    rig.follower.applier.mended()
    assert rig.state.applied.log_id == 3 and rig.follower.applier.readable
    assert rig.port.fit == [True, False, False, True]


def test_a_follower_whose_channels_are_not_known_says_that_it_could_not_lead() -> None:
    rig = FollowerRig(sync="interval")
    rig.follower.applier.state = None
    rig.write(b"a")
    rig.push(1)
    assert rig.port.fit == [False]
    rig.follower.applier.know(rig.state)
    assert rig.port.fit == [False, True]


def test_a_repair_that_was_not_possible_is_asked_for_again() -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a", b"b")
    rig.push(1)
    rig.follower.applier._pending.batches.clear()
    rig.storage.flip(next(path for path in rig.storage.contents() if path.endswith(".commitlog")), 8 * ENTRY_BYTES)
    rig.follower.committed_to(3)
    rig.follower.keep_house()
    assert rig.damage == [(1, 2), (1, 2)]


def test_what_recovery_marked_as_lost_is_not_passed_over() -> None:
    """There may have been channel events in it, and the other replicas have them."""
    rig = FollowerRig(sync="interval")
    rig.write(b"a", b"b")
    rig.push(1)
    rig.follower.applier._pending.batches.clear()  # as after a restart
    lost = rig.log.entry(2)
    commitlog = rig.storage.open(next(path for path in rig.storage.contents() if path.endswith(".commitlog")))
    commitlog.pwrite(lost._replace(flags=FAULTY).encode(), 2 * ENTRY_BYTES)
    rig.follower.committed_to(3)
    assert rig.damage == [(2, 3)] and rig.state.applied.log_id == 1 and not rig.follower.applier.readable
    commitlog.pwrite(lost.encode(), 2 * ENTRY_BYTES)
    rig.follower.applier.mended()
    assert rig.state.applied.log_id == 2


def test_a_damaged_end_is_not_forgotten_while_nobody_says_that_it_is_committed() -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a", b"b")
    rig.push(1, committed=2)
    rig.storage.flip(next(path for path in rig.storage.contents() if path.endswith(".commitlog")), 16 * ENTRY_BYTES)
    assert not rig.follower.applier.readable
    rig.follower.keep_house()
    assert rig.follower.applier.damage == (2, 3)
    rig.follower.applier.mended()  # something else was
    assert rig.follower.applier.damage == (2, 3), "else it is elected, and can not lead"


def too_many_files(*_: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def test_what_can_not_be_opened_just_now_is_applied_later(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a", b"b")
    rig.push(1)
    rig.follower.applier._pending.batches.clear()  # as after a restart
    with monkeypatch.context() as patched:
        patched.setattr(rig.log, "entries", too_many_files)
        rig.follower.committed_to(3)
        rig.follower.keep_house()
        rig.follower.applier.found(BatchCorrupt(rig.log.start, rig.log.end, "as somebody found"))
        rig.follower.applier.mended()
        assert rig.state.applied.log_id == 0 and rig.follower.stopped is None
    rig.follower.keep_house()
    assert rig.state.applied.log_id == 2 and not rig.port.refusals and not rig.failures


def test_a_run_that_can_not_be_compared_just_now_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = FollowerRig(sync="interval")
    rig.write(b"a", b"b", b"c")
    rig.push(1, 3)
    with monkeypatch.context() as patched:
        patched.setattr(rig.log, "entry", too_many_files)
        rig.push(1)
        assert rig.port.refusals == [pb.REFUSAL_UNKNOWN] and rig.follower.stopped is None
    rig.push(1)
    assert rig.log.end.log_id == 4 and rig.port.acks[-1][0] == 4


def test_batches_wait_while_new_files_are_made_and_are_not_acknowledged_before() -> None:
    rig = FollowerRig(limits=LogLimits(segment_bytes=72))
    rig.write(b"x" * 40, b"y", b"z")
    rig.push(1, 2)
    assert rig.follower.jobs.running is not None
    rig.push(2)
    rig.follower.committed_to(4)
    assert rig.log.end.log_id == 2 and rig.state.applied.log_id == 1
    rig.disk.work()
    rig.loop.turn()
    assert rig.follower.jobs.running is None and rig.log.end.log_id == 4 and len(rig.log.pairs) == 2
    assert rig.state.applied.log_id == 3, "what was told meanwhile is not told again"
    assert all(durable <= 2 for _, durable in rig.port.acks)
    rig.disk.sync()
    assert rig.port.acks[-1] == (4, 4)


def rig_with_three_pairs(missing: str = "nothing") -> FollowerRig:
    """All of it is committed and the first pair may go, but for what is missing."""
    rig = FollowerRig(sync="none", limits=LogLimits(segment_bytes=72))
    rig.write(b"x" * 40, b"y" * 40, b"z")
    for first in (1, 2, 3):
        rig.push(first, first + 1)
        rig.disk.work()
        rig.loop.turn()
    rig.follower.committed_to(4)
    assert len(rig.log.pairs) == 3
    gone = rig.log.pairs[0].end
    if missing != "on its disk":
        rig.disk.request(rig.follower)
        rig.disk.sync()
    if missing != "log start":
        held_back = missing == "a channel"  # which moves the offset of a log start alone
        rig.state.log_start = gone.offset - held_back, gone.position
        rig.state.log_start_log_id = 3
    if missing != "checkpoint":
        rig.state.checkpoint = CheckpointMark(as_of=gone.log_id, end_log_id=3)
    return rig


@pytest.mark.parametrize("missing", ["nothing", "log start", "a channel", "checkpoint", "on its disk"])
def test_files_go_when_log_start_and_checkpoint_are_past_them_and_durable_here(missing: str) -> None:
    rig = rig_with_three_pairs(missing)
    assert rig.log.local_durable == (3 if missing == "on its disk" else 4)
    rig.follower.keep_house()
    rig.loop.turn()
    rig.disk.work()
    rig.loop.turn()
    assert (len(rig.log.pairs) == 2) == (missing == "nothing") and rig.follower.jobs.running is None
    if missing == "on its disk":  # it has asked for a disk round, which nothing else does with sync=none
        rig.disk.sync()
        rig.follower.keep_house()
        rig.loop.turn()
        rig.disk.work()
        assert len(rig.log.pairs) == 2


def test_batches_go_on_while_files_are_unlinked_and_another_role_waits_for_that() -> None:
    rig = rig_with_three_pairs()
    rig.write(b"more")
    segment = f"{rig.log.directory}/{rig.log.pairs[0].first.position:020}.segment"
    rig.follower.keep_house()
    rig.loop.turn()
    rig.push(4)
    assert rig.storage.exists(segment) and rig.port.acks[-1][0] == 5, "it is appended and acknowledged meanwhile"
    free = rig.loop.create_task(rig.follower.jobs.finish())
    rig.disk.work(removals=False)
    assert not free.done()
    rig.disk.work()
    rig.loop.turn()
    assert free.done() and not rig.storage.exists(segment)


def test_files_that_can_not_be_unlinked_are_tried_again() -> None:
    rig = rig_with_three_pairs()
    rig.storage.fail("remove", code=errno.EROFS)
    rig.follower.keep_house()
    rig.disk.work()
    assert len(rig.log.pairs) == 2 and not rig.failures and len(rig.storage.list_dir(rig.log.directory)) == 6
    rig.loop.pass_time(60)
    rig.follower.keep_house()
    rig.disk.work()
    assert len(rig.storage.list_dir(rig.log.directory)) == 4


def test_much_that_is_committed_at_once_is_applied_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier_module, "APPLY_SLICE", 3)
    rig = FollowerRig(sync="interval")
    rig.write(*[b"m"] * 10)
    rig.push(1)
    rig.follower.committed_to(11)
    assert rig.state.applied.log_id == 3
    rig.loop.turn()
    assert rig.state.applied.log_id == 10


def test_who_leads_with_the_state_is_not_disturbed_by_what_was_left_to_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier_module, "APPLY_SLICE", 3)
    rig = FollowerRig(sync="interval")
    rig.write(*[b"m"] * 10)
    rig.push(1)
    rig.follower.committed_to(11)
    rig.loop.create_task(rig.follower.release())
    rig.follower._close()
    rig.loop.turn()
    assert rig.state.applied.log_id == 3


def test_a_job_that_is_given_up_before_it_began_leaves_the_files_free() -> None:
    rig = FollowerRig()

    async def never() -> None:
        raise AssertionError("it was given up")

    made: list[object] = []

    def job() -> Awaitable[None]:
        made.append(work := never())
        return work

    rig.follower.jobs.take(job, interruptible=True)
    freeing = rig.loop.create_task(rig.follower.jobs.finish())
    task = rig.follower.jobs.running
    assert task is not None
    task.cancel()
    rig.loop.turn(most=100)
    assert freeing.done() and rig.follower.jobs.running is None
    assert not made, "a coroutine that nothing awaits is a warning"


def test_what_was_pulled_is_synced_though_nothing_more_comes() -> None:
    rig = FollowerRig()
    rig.write(b"a")
    rig.follower.behind = True
    rig.log.append_copy(rig.leader.entry(1), rig.leader.read(rig.leader.entry(1)))
    rig.follower.caught_up()
    rig.disk.sync()
    assert rig.port.acks == [(2, 2)]


# ---- what is known of the leader's log


@pytest.mark.parametrize(
    ("committed", "start", "end", "complete"),
    [
        (0, 1, 9, False),  # the leader has said nothing yet
        (5, 1, 4, False),
        (5, 1, 5, True),
        (5, 7, 6, False),  # what was committed before its epoch is missing
        (5, 7, 7, True),
    ],
)
def test_a_log_is_complete_when_it_has_what_was_committed(committed: int, start: int, end: int, complete: bool) -> None:
    leader = LeaderLog()
    leader.begin(start, new_epoch=True)
    leader.committed = committed
    assert leader.is_complete(end) is complete


@pytest.mark.parametrize("new_epoch", [False, True])
def test_where_the_logs_part_is_known_for_one_epoch(new_epoch: bool) -> None:
    ours, theirs = log_of(1, 1, 1), log_of(1, 1, 2)
    leader = LeaderLog()
    leader.compare(list(theirs.entries(2, 4)), ours, ours.last)
    assert leader.differs_at == 3
    leader.committed = 3
    leader.begin(4, new_epoch=new_epoch)
    assert leader.differs_at == (None if new_epoch else 3) and leader.committed == 0


def test_entries_that_are_the_same_say_nothing() -> None:
    ours = log_of(1, 1)
    leader = LeaderLog()
    leader.compare(list(log_of(1, 1, 1).entries(2, 3)), ours, ours.last)
    assert leader.differs_at is None


def test_it_is_idle_once_all_it_has_is_committed_and_durable() -> None:
    """Many idle followers are looked at in turn (`IdleTurns`): nothing may be left to do in one."""
    rig = FollowerRig()
    rig.follower.keep_house()
    assert rig.log.idle_at is rig.log.end
    rig.write(b"a")
    rig.push(1)
    rig.follower.keep_house()
    assert rig.log.idle_at is None  # not durable
    rig.disk.sync()
    rig.follower.keep_house()
    assert rig.log.idle_at is None  # not committed
    rig.follower.committed_to(2)
    rig.follower.keep_house()
    assert rig.log.idle_at is rig.log.end
    rig.write(b"b")
    rig.push(2)
    assert rig.log.idle_at is not rig.log.end
