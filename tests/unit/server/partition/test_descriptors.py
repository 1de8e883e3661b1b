"""More logs are written to than may have files open, and the disk is slow: who writes waits, and nothing is refused."""

from __future__ import annotations

import asyncio
from typing import Any

from nsqha import hot
from nsqha.commitlog.files.open_logs import OpenLogs
from nsqha.server.partition.file_jobs import descriptors
from tests.unit.server.replica.test_follower import FollowerRig
from tests.unit.server.shell_rig import Outcome, PartitionRig


class BusyLog:
    """A log that another partition writes to."""

    files: Any = None

    def close_idle_files(self) -> bool:
        return False


class Others:
    """So many other logs are open that one more may not be."""

    def __init__(self) -> None:
        self.open_logs = OpenLogs(1)
        self._logs = BusyLog(), BusyLog()
        for log in self._logs:
            self.open_logs.opened(log)

    def are_synced(self) -> None:
        for log in self._logs:
            self.open_logs.closed(log)


def with_others(rig: PartitionRig) -> Others:
    """Its log is durable, and its files are closed."""
    others = Others()
    rig.partition.files.sync()
    rig.disk.sync()
    rig.log.share_descriptors(others.open_logs)
    assert rig.log.share.shut
    return others


def test_a_publish_waits_for_a_descriptor() -> None:
    rig = PartitionRig(sync="interval")
    others, end = with_others(rig), rig.log.end
    one, two = rig.publish(b"one"), rig.publish(b"two")
    rig.turn()
    assert one.answers == [] and rig.log.end == end
    others.are_synced()
    rig.turn()
    assert one.answers == two.answers == ["OK"]


def test_a_publisher_who_was_alone_waits_too() -> None:
    rig = PartitionRig(sync="interval")
    others, outcome = with_others(rig), Outcome()
    assert not rig.partition.batches.write_lone(hot.frame(b"one"), outcome)
    others.are_synced()
    rig.turn()
    assert rig.partition.batches.write_lone(hot.frame(b"one"), outcome) and outcome.answers == ["OK"]


def test_progress_waits_for_a_descriptor() -> None:
    rig = PartitionRig(sync="interval")
    rig.publish(b"one")
    consumer = rig.consume(10)
    others, end = with_others(rig), rig.log.end
    rig.finish(consumer)
    rig.pass_time(1)
    assert rig.log.end == end
    others.are_synced()
    rig.pass_time(1)
    assert rig.log.end.log_id == end.log_id + 1 and rig.floor == 1


def test_what_a_leader_sends_waits_for_a_descriptor_in_its_order() -> None:
    rig, others = FollowerRig(sync="interval"), Others()
    rig.log.share_descriptors(others.open_logs)
    rig.write(b"a", b"b")
    rig.push(1, 2)
    rig.push(2, 3)
    assert rig.port.acks == [] and not rig.port.refusals
    others.are_synced()
    rig.loop.turn()
    assert [end for end, _ in rig.port.acks[:2]] == [2, 3] and not rig.port.refusals


def test_a_new_log_waits_for_a_descriptor() -> None:
    async def story() -> None:
        others = Others()
        made = asyncio.ensure_future(descriptors(others.open_logs))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not made.done()
        others.are_synced()
        await made

    asyncio.run(story())
