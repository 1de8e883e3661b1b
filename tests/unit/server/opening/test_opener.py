"""What is said of a log when it is opened."""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress

import pytest

from nsqha.commitlog.corruption.verify import verify
from nsqha.commitlog.entry import ENTRY_BYTES, BatchCorrupt
from nsqha.commitlog.log import PartitionLog
from nsqha.election.model import TopicRecord
from nsqha.errors import LogCorrupt, StorageError
from nsqha.frames import EPOCH_START
from tests.sim.storage import SimStorage
from tests.unit.commitlog.logs import add, contents, drop_pairs, event, roll
from tests.unit.server.replica_rig import UID, A, B, ReplicaRig

KEY = (UID, 0)


@pytest.mark.parametrize("others", [(), (A, B)], ids=["alone", "with other replicas"])
def test_a_log_that_the_disk_forgot_is_told_of(others: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        replicas = (*others, rig.node)
        record = rig.record(replicas=replicas, isr=dict.fromkeys(replicas, 9), leader=rig.node, epoch=1).record
        opened = rig.opener.create(record, {0: 9})[0]
        opened.log.close()
        rig.journal.stage(KEY, promise=1, log_uid=9, local_durable=5)
        rig.storage.remove_tree(f"{rig.opener.folders.topic(record.name, UID)}/0")
        assert rig.opener.recover(record)[0].log_uid != 9
        assert rig.opener.measures.log_events == {"log_damaged": 1}
        assert "from log id 1 on" in caplog.text

    asyncio.run(scenario())


def filled(rig: ReplicaRig, record: TopicRecord) -> PartitionLog:
    """Four pairs, three batches in each but the last."""
    log = rig.opener.create(record, {0: 9})[0].log
    for n in range(3):
        for body in (b"a", b"b", b"c"):
            add(log, body * (n + 1), events=event(frame_type=EPOCH_START, payload=bytes(16)) if n == 0 else b"")
        roll(log)
    rig.journal.stage(KEY, promise=1, log_uid=9, local_durable=log.local_durable)
    return log


def of_one_replica(rig: ReplicaRig) -> TopicRecord:
    return rig.record(replicas=(rig.node,), isr={rig.node: 9}, leader=rig.node, epoch=1).record


@pytest.mark.parametrize("lost", ["anchor", "pair"])
def test_files_that_could_not_be_used_as_they_were_are_told_of(lost: str, caplog: pytest.LogCaptureFixture) -> None:
    """What can not be used is set aside: without a word nobody would look for it."""

    async def scenario() -> None:
        rig = ReplicaRig()
        record = of_one_replica(rig)
        log = filled(rig, record)
        if lost == "anchor":
            log.files.pairs[1].commitlog.pwrite(bytes(ENTRY_BYTES), 0)
        else:
            drop_pairs(log, log.pairs[1].first)
            position = log.files.pairs[0].position
            rig.storage.open(log.files.pairs[0].path(".commitlog")).truncate(0)
        log.close()
        with suppress(LogCorrupt):  # of a log whose beginning is lost nothing says what its channels did
            rig.opener.recover(record)
        assert rig.opener.measures.log_events == {"log_damaged": 1}
        said = "anchors that were lost are written again: 1" if lost == "anchor" else f"{position} can not be used"
        assert said in caplog.text

    asyncio.run(scenario())


@pytest.mark.parametrize("lost", [(1, 3), (2, 4), (1, 4), (3, 4), (0, 4)])
def test_a_single_node_starts_although_old_entries_are_lost(
    lost: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Recovery looks at the last two pairs only; whoever needs the state of the channels may look at all of them."""

    async def scenario() -> None:
        rig = ReplicaRig()
        record = of_one_replica(rig)
        log = filled(rig, record)
        was = contents(log)
        first, end = lost
        log.files.pairs[0].commitlog.pwrite(bytes((end - first) * ENTRY_BYTES), first * ENTRY_BYTES)
        log.close()
        rig.opener.cursor_cache.forget(KEY)
        opened = rig.opener.recover(record)[0]
        assert opened.state is not None and opened.state.applied.log_id == 9
        assert [data for _, data in contents(opened.log)] == [data for _, data in was]
        assert not verify(opened.log).problems
        assert f"offsets [{max(first, 1) - 1}, {end - 1}) did not verify: proven" in caplog.text

    asyncio.run(scenario())


def test_a_single_node_starts_although_old_batches_are_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Entries and frames: channels stop in front of them, and everything else is served."""

    async def scenario() -> None:
        rig = ReplicaRig()
        record = of_one_replica(rig)
        log = filled(rig, record)
        was = contents(log)
        log.files.pairs[0].commitlog.pwrite(bytes(2 * ENTRY_BYTES), ENTRY_BYTES)
        log.files.pairs[0].segment.pwrite(b"\xff" * 9, 0)
        log.close()
        opened = rig.opener.recover(record)[0]
        assert opened.state is not None and opened.state.applied.log_id == 9
        assert [opened.log.read(opened.log.entry(n)) for n in range(3, 10)] == [data for _, data in was[2:]]
        with pytest.raises(BatchCorrupt) as caught:
            opened.log.batch_at(0)
        assert (caught.value.first.offset, caught.value.end.offset) == (0, 2)
        assert "offsets [0, 2) did not verify: faulty" in caplog.text

    asyncio.run(scenario())


def test_a_single_node_starts_although_an_old_file_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        record = of_one_replica(rig)
        log = filled(rig, record)
        log.files.pairs[0].commitlog.pwrite(bytes(ENTRY_BYTES), ENTRY_BYTES)
        log.close()
        rig.storage.remove(log.files.pairs[0].path(".segment"))
        opened = rig.opener.recover(record)[0]
        assert opened.state is not None and opened.state.applied.log_id == 9
        assert "did not verify: faulty" in caplog.text

    asyncio.run(scenario())


def test_a_single_node_whose_disk_refuses_what_a_start_needs_says_so() -> None:
    async def scenario() -> None:
        storage = SimStorage()
        rig = ReplicaRig(storage)
        record = of_one_replica(rig)
        log = filled(rig, record)
        log.files.pairs[0].commitlog.pwrite(bytes(ENTRY_BYTES), ENTRY_BYTES)
        log.close()
        storage.fail("pwrite", log.files.pairs[0].path(".commitlog"), code=errno.ENOSPC)
        with pytest.raises(StorageError, match=r"/0: log ids \[1, 2\) cannot be written again: .*ENOSPC"):
            rig.opener.recover(record)
        assert rig.opener.recover(record)[0].state is not None

    asyncio.run(scenario())
