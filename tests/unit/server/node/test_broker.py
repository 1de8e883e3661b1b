"""Topics and channels come and go while others use them, while metadata is slow, and while the disk refuses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nsqha import hot
from nsqha.commitlog.idle_turns import IDLE_LOOKS
from nsqha.commitlog.journal import inspect as inspect_journal
from nsqha.commitlog.recordfile import RecordFile
from nsqha.commitlog.storage import OsDirectory, OsFile, OsStorage
from nsqha.cursor.seek import SeekPlan
from nsqha.election.model import TopicSettings
from nsqha.errors import (
    AppendFailed,
    LimitReached,
    LogCorrupt,
    NotFound,
    OutcomeUnknown,
    Poisoned,
    StorageError,
    Unavailable,
)
from nsqha.server.node.broker import Broker
from nsqha.server.node.cluster.routing import ClusterConsumerRoutes
from nsqha.server.opening.log_folders import LogFolders
from nsqha.server.partition import log_sync
from nsqha.server.partition.delivery import Consumer
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.topic import Topic
from nsqha.server.runtime.disk import DelayedCall
from nsqha.server.topics.channel_leaders import ClusterChannelLeaders
from tests.unit.commitlog.logs import roll
from tests.unit.server.broker_rig import Gate, consumer, led, on_a_broker, running, start, subscribed, until

ONE = hot.frame(b"one")


def test_what_was_published_survives_a_restart(tmp_path: Path):
    async def story() -> None:
        async with running(tmp_path) as broker:
            await broker.publishing.publish("t", ONE)
        async with running(tmp_path) as broker:
            reader = await subscribed(broker, "t", "c", rdy=1)
            await until(lambda: reader.wire.bodies == [b"one"])

    asyncio.run(story())


# ---- a disk that gets full


@on_a_broker
async def test_below_its_watermark_a_disk_takes_no_publishes_until_it_has_room_again(broker: Broker):
    """What consumers do is stored all the same: it is what makes room."""
    await broker.publishing.publish("t", ONE)
    reader = await subscribed(broker, "t", "c", rdy=1)
    await until(lambda: reader.wire.bodies)  # type: ignore[attr-defined]
    partition = led(broker)
    broker.availability.disk_low_bytes = 1 << 62
    broker.housekeeping.look()
    before = partition.log.end.offset
    with pytest.raises(Unavailable, match=f"disk low: [0-9]+ bytes free, {1 << 62} required"):
        await broker.publishing.publish("t", ONE)
    assert [check.ok for check in broker.checks() if check.name == "disk_space"] == [False]
    ((message_id, _, _),) = reader.wire.messages  # type: ignore[attr-defined]
    line = b"FIN %b\n" % message_id
    subscription = reader.subscriptions[0]
    subscription.channel.fin_run(line, 0, len(line), subscription.owner)
    await partition.commit_events()
    assert subscription.channel.committed.floor == 1 and partition.log.end.offset == before
    broker.availability.disk_low_bytes = 0
    broker.housekeeping.look()
    await broker.publishing.publish("t", ONE)
    assert partition.log.end.offset == before + 1


# ---- deleting a topic


def test_a_topic_whose_tombstone_could_not_be_forgotten_can_be_made_again(tmp_path: Path):
    """The deletion is done; before, the next publish to that name hung the whole node."""

    async def story() -> None:
        async with running(tmp_path) as broker:
            await broker.publishing.publish("t", ONE)
            forget = broker.parts.store.records.forget_tombstone
            Gate.at(broker.parts.store.records, "forget_tombstone", error=AppendFailed("disk full"))
            await broker.topics.delete_topic("t")
            assert "t" not in broker.topics
            await broker.publishing.publish("t", ONE)
            broker.parts.store.records.forget_tombstone = forget  # type: ignore[method-assign]
        async with running(tmp_path) as broker:
            assert led(broker).log.end.offset == 1
            assert broker.parts.store.records.tombstones() == {}

    asyncio.run(story())


def test_what_can_not_be_removed_of_a_deleted_topic_hinders_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stays(folders: LogFolders, name: str, uid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    async def story() -> None:
        async with running(tmp_path) as broker:
            await broker.publishing.publish("t", ONE)
            await broker.publishing.publish("gone", ONE)
            with monkeypatch.context() as patch:
                patch.setattr(LogFolders, "remove", stays)
                await broker.topics.delete_topic("gone")
        with monkeypatch.context() as patch:
            patch.setattr(LogFolders, "remove", stays)
            async with running(tmp_path) as broker:
                assert led(broker).log.end.offset == 1
                assert [tombstone.name for tombstone in broker.parts.store.records.tombstones().values()] == ["gone"]
        async with running(tmp_path) as broker:
            assert broker.parts.store.records.tombstones() == {}
            assert [folder.name[:2] for folder in (tmp_path / "topics").iterdir()] == ["t-"]
            assert len(broker.parts.journal.records()) == 1

    asyncio.run(story())


def test_nobody_waits_while_the_files_of_a_large_topic_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each takes a while. Metadata, journal and rolls of all other topics share a thread, which is not theirs."""
    gate, removed = threading.Event(), list[str]()
    remove, remove_tree = OsStorage.remove, OsStorage.remove_tree

    def slowly(storage: OsStorage, path: str) -> None:
        if "/gone-" in path:
            gate.wait(10)
            removed.append(path)
        remove(storage, path)

    def tree(storage: OsStorage, path: str) -> None:
        if os.path.exists(path):
            assert not [name for _, _, names in os.walk(path) for name in names], "one step for any number of files"
        remove_tree(storage, path)

    async def story() -> None:
        async with running(tmp_path) as broker:
            for _ in range(3):
                await broker.publishing.publish("gone", ONE)
                roll(led(broker, "gone").log)
            monkeypatch.setattr(OsStorage, "remove", slowly)
            monkeypatch.setattr(OsStorage, "remove_tree", tree)
            deletion = asyncio.create_task(broker.topics.delete_topic("gone"))
            await until(lambda: "gone" not in broker.topics)
            await broker.publishing.publish("t", ONE)
            assert not deletion.done() and not removed
            gate.set()
            await deletion
            assert len(removed) == 8 + 1 and broker.parts.store.records.tombstones() == {}
            assert [folder.name[:2] for folder in (tmp_path / "topics").iterdir()] == ["t-"]

    asyncio.run(story())


def test_a_deletion_runs_to_its_end_when_its_asker_goes_away(tmp_path: Path):
    """Half of it would acknowledge messages that the next start removes."""

    async def story() -> None:
        async with running(tmp_path) as broker:
            await broker.publishing.publish("t", ONE)
            gate = Gate.at(broker.parts.store.records, "delete_topic")
            asker = asyncio.create_task(broker.topics.delete_topic("t"))
            await gate.until_reached()
            asker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asker
            gate.open()
            await broker.publishing.publish("t", ONE)
        async with running(tmp_path) as broker:
            assert led(broker).log.end.offset == 1

    asyncio.run(story())


@on_a_broker
async def test_a_deletion_that_the_metadata_refused_leaves_the_topic_as_it_was(broker: Broker):
    await broker.publishing.publish("t", ONE)
    Gate.at(broker.parts.store.records, "delete_topic", error=AppendFailed("disk full"))
    with pytest.raises(AppendFailed):
        await broker.topics.delete_topic("t")
    await broker.publishing.publish("t", ONE)
    assert led(broker).log.end.offset == 2


@on_a_broker
async def test_a_deletion_under_load_does_not_poison_the_node(broker: Broker):
    for _ in range(20):
        await broker.publishing.publish("t", ONE)
        publishes = [asyncio.create_task(broker.publishing.publish("t", ONE)) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await broker.topics.delete_topic("t")
        await asyncio.gather(*publishes, return_exceptions=True)
    await broker.publishing.publish("t", ONE)
    assert broker.availability.failure is None


@on_a_broker
async def test_metadata_that_can_not_be_written_closes_the_node(broker: Broker):
    await broker.publishing.publish("t", ONE)
    Gate.at(broker.parts.store.records, "replace", error=Poisoned("fdatasync failed"))
    with pytest.raises(Poisoned):
        await broker.channels.create("t", "c")
    assert broker.availability.failure is not None
    with pytest.raises(Unavailable):
        await broker.publishing.publish("t", ONE)


def test_no_client_waits_for_a_look_at_all_partitions_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They have just begun, and there may be thousands; they are looked at when clients are served."""
    looks: list[Partition] = []
    keep_house = Partition.keep_house
    monkeypatch.setattr(Partition, "keep_house", lambda self, now: looks.append(self) or keep_house(self, now))

    async def story() -> None:
        async with running(tmp_path) as broker:
            await broker.publishing.publish("t", ONE)
        looks.clear()
        async with running(tmp_path) as broker:
            assert looks == []
            await until(lambda: led(broker) in looks)

    asyncio.run(story())


# ---- creating a topic


def test_a_topic_that_could_not_be_made_is_made_at_the_next_try(tmp_path: Path):
    async def story() -> None:
        async with running(tmp_path) as broker:
            create = broker.parts.opener.create
            Gate.at(broker.parts.opener, "create", error=OSError(28, "no space"), after=True)
            with pytest.raises(Unavailable):
                await broker.publishing.publish("t", ONE)
            broker.parts.opener.create = create  # type: ignore[method-assign]
            await broker.publishing.publish("t", ONE)
        async with running(tmp_path) as broker:
            assert led(broker).log.end.offset == 1

    asyncio.run(story())


def promises_written(folder: Path) -> int:
    return len(inspect_journal(OsStorage(), str(folder)).partitions)


def test_the_promise_of_a_new_topic_does_not_wait_for_its_record(tmp_path: Path):
    """With sync=always both are on the disk after one round. A record that never came leaves a promise, which the next
    start forgets."""

    async def story() -> None:
        async with running(tmp_path, sync="always") as broker:
            await broker.publishing.publish("t", ONE)
            gate = Gate.at(broker.parts.store.records, "create_topic", error=AppendFailed("disk full"))
            gate.hold()
            publish = asyncio.create_task(broker.publishing.publish("late", ONE))
            await gate.until_reached()
            await until(lambda: promises_written(tmp_path) == 2)
            shutil.copytree(tmp_path, tmp_path / "copy")
            gate.open()
            with pytest.raises(StorageError):
                await publish
        assert promises_written(tmp_path) == 1, "the record could not be written"
        async with running(tmp_path / "copy") as broker:
            assert list(broker.topics) == ["t"] and led(broker).log.end.offset == 1
        assert promises_written(tmp_path / "copy") == 1

    asyncio.run(story())


def hold_what_is_behind(broker: Broker, patch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Nothing is done behind an answer but by calling these."""
    behind: list[Callable[[], None]] = []
    patch.setattr(broker.parts.disk, "later", lambda _, call: behind.append(call) or DelayedCall(0.0, call))
    return behind


@pytest.mark.parametrize("damaged", [False, True])
def test_a_process_killed_behind_a_first_answer_has_promised_by_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
):
    """The journal has not heard of the log; that it acknowledged what was not synced counts at the next start, whatever
    the setting is then. A damaged journal may have known something else."""
    copy = tmp_path / "copy"

    async def story() -> None:
        async with running(tmp_path, sync="interval") as broker:
            with monkeypatch.context() as patch:
                behind = hold_what_is_behind(broker, patch)
                await broker.publishing.publish("t", ONE)
            shutil.copytree(tmp_path, copy)
            assert promises_written(copy) == 0
            for call in behind:
                call()
            await until(lambda: promises_written(tmp_path) == 1)
        if damaged:
            with (copy / "journal").open("r+b") as journal:
                journal.seek(RecordFile.inspect(OsStorage(), journal.name).end)
                journal.write(b"x" * 600)
        for look in (1, 2):  # the second life has it in the journal
            async with running(copy, sync="always") as broker:
                assert led(broker).log.end.offset == 1 and promises_written(copy) == 1
                lost = broker.parts.opener.measures.log_events
                assert lost["possible_loss"] == (look == 1 and not damaged)

    asyncio.run(story())


def test_the_promise_of_a_topic_with_files_but_no_record_is_kept(tmp_path: Path):
    """Its record is lost with older metadata, which an operator may bring back."""

    async def story() -> None:
        async with running(tmp_path) as broker:
            await broker.publishing.publish("t", ONE)
            topic = broker.topics["t"].record
            for uid in (topic.uid ^ 1, topic.uid ^ 2):
                broker.parts.journal.stage((uid, 0), promise=3, log_uid=9, local_durable=1)
            (tmp_path / "topics" / f"lost-{topic.uid ^ 1:016x}" / "0").mkdir(parents=True)
            (tmp_path / "topics" / "lost+found").mkdir()
        async with running(tmp_path) as broker:
            kept = broker.parts.journal.record((topic.uid ^ 1, 0))
            assert kept is not None and kept.promise == 3
            assert broker.parts.journal.record((topic.uid ^ 2, 0)) is None

    asyncio.run(story())


@pytest.mark.parametrize("sync", ["always", "interval"])
def test_a_new_topic_waits_for_no_sync_of_its_own_files_but_with_sync_always(
    tmp_path: Path, sync: str, monkeypatch: pytest.MonkeyPatch
):
    """Its record is synced, with sync=always its promise, too; its files, and the names of the folders, with its first
    entries."""
    synced: list[str] = []
    sync_file = OsFile.sync

    def note(self: OsFile) -> None:
        synced.append(os.path.relpath(self.path, tmp_path).removesuffix(".new"))
        sync_file(self)

    async def story() -> None:
        async with running(tmp_path, sync=sync) as broker:
            await broker.publishing.publish("first", ONE)  # the folder of all topics is there
            await until(lambda: promises_written(tmp_path) == 1)
            disk = broker.parts.disk
            request, wanting = disk.request, []
            disk.request = lambda log, *, patient=False: wanting.append(log)  # type: ignore[method-assign]
            with monkeypatch.context() as patch:
                patch.setattr(OsFile, "sync", note)
                patch.setattr(OsDirectory, "sync", lambda self: pytest.fail("a folder was synced in its own time"))
                behind = hold_what_is_behind(broker, patch)
                publish = asyncio.create_task(broker.publishing.publish("t", ONE))
                await until(lambda: wanting if sync == "always" else publish.done())
                await asyncio.wait([publish], timeout=0.01)
            assert sorted(synced) == (["journal", "metadata"] if sync == "always" else ["metadata"])
            for call in behind:
                call()
            assert publish.done() == (sync == "interval")
            disk.request = request  # type: ignore[method-assign]
            for log in wanting:
                request(log)
            await publish

    asyncio.run(story())


def test_a_stop_waits_for_a_topic_that_is_being_made(tmp_path: Path):
    async def story() -> None:
        async with asyncio.timeout(20):
            broker = await start(tmp_path)
            for n in range(3):
                await broker.publishing.publish(f"t{n}", ONE)
            gate = Gate.at(broker.parts.store.records, "create_topic")
            publish = asyncio.create_task(broker.publishing.publish("late", ONE))
            await gate.until_reached()
            stop = asyncio.create_task(broker.stop())
            await asyncio.sleep(0.01)
            gate.open()
            await stop
            await asyncio.gather(publish, return_exceptions=True)
            assert broker.availability.failure is None
        async with running(tmp_path) as broker:
            assert broker.parts.journal.found is not None and broker.parts.journal.found.node.clean

    asyncio.run(story())


def test_a_stop_answers_the_publishes_that_are_under_way(tmp_path: Path):
    async def story() -> None:
        async with asyncio.timeout(20):
            broker = await start(tmp_path)
            await broker.publishing.publish("t", ONE)
            order: list[str] = []
            connection = Mock()
            connection.read_no_more = lambda: order.append("unread")
            connection.close = lambda: order.append("closed")
            broker.connections.opened(connection)
            reply = SimpleNamespace(stored=lambda: order.append("OK"), failed=order.append)
            led(broker).publish(ONE, reply)
            await broker.stop()
            assert order == ["unread", "OK", "closed"]

    asyncio.run(story())


def test_a_partition_that_can_not_be_closed_keeps_no_other_from_it(tmp_path: Path):
    async def story() -> None:
        async with asyncio.timeout(20):
            broker = await start(tmp_path)
            await broker.publishing.publish("a", ONE)
            await broker.publishing.publish("b", ONE)

            def broken() -> None:
                raise AssertionError("cannot be")

            led(broker, "a").cursors.prepare_stop = broken  # type: ignore[method-assign]
            await broker.stop()
            assert led(broker, "b").closed
        async with running(tmp_path) as broker:
            assert broker.parts.journal.found is not None and not broker.parts.journal.found.node.clean
            assert [led(broker, name).log.end.offset for name in "ab"] == [1, 1]

    asyncio.run(story())


@on_a_broker
async def test_a_partition_that_stopped_shows_in_the_health_checks(broker: Broker):
    await broker.publishing.publish("t", ONE)
    assert all(check.ok for check in broker.checks())
    led(broker)._stop(AssertionError("cannot be"))
    assert [check.name for check in broker.checks() if not check.ok] == ["partitions"]
    with pytest.raises(Unavailable):
        await broker.publishing.publish("t", ONE)


# ---- consumers


def test_the_limit_of_consumers_holds_for_those_who_come_together(tmp_path: Path):
    async def story() -> None:
        async with running(tmp_path, max_channel_consumers=1) as broker:
            subs = [broker.subscriptions.subscribe(consumer("t", "c")) for _ in range(3)]
            outcomes = await asyncio.gather(*subs, return_exceptions=True)
            assert sorted(type(o).__name__ for o in outcomes) == ["NoneType", "Unavailable", "Unavailable"]

    asyncio.run(story())


@on_a_broker
async def test_who_subscribes_while_the_last_consumer_leaves_stays(broker: Broker):
    for _ in range(10):
        first = await subscribed(broker, "t", "c#ephemeral")
        broker.subscriptions.unsubscribe(first)
        second = await subscribed(broker, "t", "c#ephemeral")
        await asyncio.sleep(0.005)
        assert not second.wire.closed
        broker.subscriptions.unsubscribe(second)
        await until(lambda: not broker.channels.has("t", "c#ephemeral"))


@on_a_broker
async def test_who_subscribes_while_the_channel_is_being_deleted_gets_a_new_one(broker: Broker):
    first = await subscribed(broker, "t", "c")
    gate = Gate.at(broker.parts.store.records, "replace")
    deletion = asyncio.create_task(broker.channels.delete("t", "c"))
    await gate.until_reached()
    late = asyncio.create_task(subscribed(broker, "t", "c"))
    await asyncio.sleep(0.01)
    assert not late.done()
    gate.open()
    await deletion
    second = await late
    assert first.wire.closed and not second.wire.closed
    assert broker.channels.has("t", "c")


@on_a_broker
async def test_a_topic_that_is_deleted_before_a_sub_is_answered_is_made_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
):
    attach, deletions = broker.subscriptions._routes.attach, 1

    async def and_then_it_is_deleted(topic: Topic, reader: Consumer) -> bool:
        nonlocal deletions
        attached = await attach(topic, reader)
        if deletions:
            deletions -= 1
            await broker.topics.delete_topic(topic.name)
        return attached

    monkeypatch.setattr(broker.subscriptions._routes, "attach", and_then_it_is_deleted)
    reader = await subscribed(broker, "t", "c")
    assert not reader.wire.closed and broker.topics["t"].consumers.all() == [reader]
    assert [s.delivery for s in reader.subscriptions.values()] == [led(broker).deliveries["c"]]
    await broker.topics.delete_topic("t")
    assert reader.wire.closed, "its SUB was answered: it ends as with nsqd"

    deletions = 100
    unlucky = consumer("t", "c")
    with pytest.raises(Unavailable, match="deleted topic/channel"):
        await broker.subscriptions.subscribe(unlucky)
    assert not unlucky.wire.closed and not unlucky.subscriptions, "the refusal is for its connection to send"


@on_a_broker
async def test_an_ephemeral_channel_made_for_a_client_that_is_gone_goes_too(broker: Broker):
    await broker.publishing.publish("t", ONE)
    sub = asyncio.create_task(broker.subscriptions.subscribe(consumer("t", "c#ephemeral")))
    await asyncio.sleep(0)
    sub.cancel()
    await asyncio.gather(sub, return_exceptions=True)
    await asyncio.sleep(0.05)
    await until(lambda: not broker.channels.has("t", "c#ephemeral") and not broker.changes)


@on_a_broker
async def test_an_ephemeral_topic_goes_with_its_last_channel(broker: Broker):
    reader = await subscribed(broker, "t#ephemeral", "c#ephemeral")
    broker.subscriptions.unsubscribe(reader)
    await until(lambda: "t#ephemeral" not in broker.topics)
    again = await subscribed(broker, "t#ephemeral", "c#ephemeral")
    assert not again.wire.closed


@on_a_broker
async def test_a_pause_finds_the_topic_that_is_there_when_its_turn_comes(broker: Broker):
    await broker.topics.ensure_topic("t")
    await broker.channels.create("t", "c")
    gate = Gate.at(broker.parts.store.records, "delete_topic")
    deletion = asyncio.create_task(broker.topics.delete_topic("t"))
    await gate.until_reached()
    broker.topics["t"].deleting = False  # as it was when the pause was asked for
    pause = asyncio.create_task(broker.channels.pause("t", "c", True))
    await asyncio.sleep(0)
    gate.open()
    await deletion
    with pytest.raises(NotFound):
        await pause


# ---- bounds and housekeeping


def test_publishes_over_http_wait_for_room(tmp_path: Path):
    async def story() -> None:
        async with running(tmp_path, publish_wait_ns=20_000_000) as broker:
            await broker.publishing.publish("t", ONE)
            budget = broker.parts.opener.budget
            budget.take(budget.bytes_max + 1)
            with pytest.raises(Unavailable):
                await broker.publishing.publish("t", ONE)
            waiting = asyncio.create_task(broker.publishing.publish("t", ONE))
            await asyncio.sleep(0)
            budget.give(budget.bytes_max + 1)
            await waiting
            assert budget.used == 0

    asyncio.run(story())


@on_a_broker
async def test_partitions_without_traffic_are_not_looked_at_each_second(broker: Broker):
    names = [f"t{number}" for number in range(4 * IDLE_LOOKS)]
    for name in names:
        await broker.publishing.publish(name, ONE)
    await until(lambda: all(led(broker, name).log.unsynced() is None for name in names))
    broker.housekeeping.look()
    looked: list[str] = []
    for name in names:
        partition = led(broker, name)
        before = partition.keep_house
        partition.keep_house = lambda now, n=name, b=before: (looked.append(n), b(now))  # type: ignore[method-assign, misc]
    for _ in range(8):  # a round that was begun when there were fewer, and one of all
        broker.housekeeping.look()
    assert sorted(set(looked)) == sorted(names) and len(looked) <= 8 * IDLE_LOOKS  # each had its turn, and no more
    looked.clear()
    await broker.publishing.publish("t7", ONE)
    broker.housekeeping.look()
    assert "t7" in looked and len(looked) <= IDLE_LOOKS + 1


@on_a_broker
async def test_when_the_wall_clock_is_set_all_partitions_are_looked_at(broker: Broker, monkeypatch: pytest.MonkeyPatch):
    names = [f"t{number}" for number in range(2 * IDLE_LOOKS)]
    for name in names:
        await broker.publishing.publish(name, ONE)
    await until(lambda: all(led(broker, name).log.unsynced() is None for name in names))
    broker.housekeeping.look()
    looked: list[str] = []
    for name in names:
        led(broker, name).keep_house = lambda now, n=name: looked.append(n)  # type: ignore[method-assign, misc]
    wall_ns = broker.clock.wall_ns
    monkeypatch.setattr(broker.clock, "wall_ns", lambda: wall_ns() + 3_600 * 10**9)
    broker.housekeeping.look()
    assert sorted(looked) == sorted(names)


@on_a_broker
async def test_a_log_that_can_not_be_read_does_not_keep_the_others_from_housekeeping(broker: Broker):
    await broker.publishing.publish("a", ONE)
    await broker.publishing.publish("b", ONE)
    kept: list[str] = []

    def broken(now: object) -> None:
        raise LogCorrupt("a hole")

    led(broker, "a").keep_house = broken  # type: ignore[method-assign, assignment]
    led(broker, "b").keep_house = lambda now: kept.append("b")  # type: ignore[method-assign]
    broker.housekeeping.look()
    assert kept == ["b"]


@on_a_broker
async def test_a_leader_whose_epoch_has_only_begun_queues_no_seek(broker: Broker):
    """It says that nothing was done; before, the seek was carried out a moment later all the same."""
    await broker.publishing.publish("t", ONE)
    await broker.channels.create("t", "c")
    partition = led(broker)
    partition.life.serving = False
    done = await broker.channels.seek("t", "c", {0: 1})
    assert isinstance(done[0], Unavailable)
    partition.life.serving = True
    await partition.commit_events()
    channel = partition.cursors.channels["c"]
    assert (channel.cursor.floor, channel.committed.floor, channel.committed.undo) == (0, 0, None)


@on_a_broker
async def test_an_ephemeral_channel_that_ended_with_an_epoch_is_made_for_its_reader(broker: Broker):
    await broker.publishing.publish("t", ONE)
    reader = await subscribed(broker, "t", "e#ephemeral", rdy=1)
    topic = broker.topics.topic("t")
    (partition,) = topic.led
    topic.remove_led(partition, "another node leads it")
    partition.cursors.requests.delete_ephemeral("e#ephemeral")  # as an epoch start does
    await partition.commit_events()
    topic.add_led(partition)
    assert topic.places_missing(reader) == [0]
    ClusterConsumerRoutes(broker._routed(), Mock()).leaders_changed("t")
    await until(lambda: not topic.places_missing(reader))


@on_a_broker
async def test_a_consumer_that_can_not_be_detached_keeps_no_other_subscribed(broker: Broker):
    await broker.publishing.publish("t", ONE)
    readers = [await subscribed(broker, "t", "c", rdy=1) for _ in range(3)]
    topic = broker.topics.topic("t")
    (partition,) = topic.led
    channel = partition.deliveries["c"].channel
    owner, detach = readers[0].subscriptions[0].owner, channel.detach

    def broken(gone: int, now: Any) -> int:
        if gone == owner:
            raise RuntimeError("a bug")
        return detach(gone, now)

    channel.detach = broken  # type: ignore[method-assign]
    topic.remove_led(partition, "another node leads it")
    assert not topic.led and not any(reader.subscriptions for reader in readers)
    assert [(reader.direct, reader.wire.closed) for reader in readers] == [(True, True)] * 3


@on_a_broker
async def test_a_seek_tells_where_it_went(broker: Broker):
    await broker.publishing.publish("t", ONE)
    await broker.channels.create("t", "c")
    for target, clamped in ((1000, True), (0, False), (1, False)):
        done = (await broker.channels.seek("t", "c", {0: target}))[0]
        assert isinstance(done, SeekPlan)
        assert (done.target, done.clamped) == (min(target, 1), clamped)


@pytest.mark.parametrize("follow", [True, False])
@on_a_broker
async def test_a_change_is_answered_when_the_leaders_of_other_nodes_have_followed(broker: Broker, follow: bool):
    await broker.publishing.publish("t", ONE)
    asked: list[int] = []
    over = asyncio.Event()

    async def others_follow(topic: Topic) -> None:
        asked.append(topic.record.channels.version)
        await over.wait()
        if not follow:
            raise Unavailable("one of them did not follow in time")

    others: Any = SimpleNamespace(others_follow=others_follow)
    broker.channels.leaders = ClusterChannelLeaders(broker.topics, broker.channels.led, others)
    paused = asyncio.create_task(broker.channels.pause_topic("t", True))
    await until(lambda: asked)
    assert asked == [broker.topics.topic("t").record.channels.version] and not paused.done()
    over.set()
    with contextlib.nullcontext() if follow else pytest.raises(Unavailable):
        await paused


@pytest.mark.parametrize("anew", [False, True])
@on_a_broker
async def test_a_seek_of_a_channel_that_another_node_deletes_meanwhile_says_so(broker: Broker, anew: bool):
    """What another node changes is followed without the lock that changes asked for here take."""
    await broker.publishing.publish("t", ONE)
    await broker.channels.create("t", "c")
    topic = broker.topics.topic("t")
    (partition,) = topic.led
    partition.hand_over(True)
    seek = asyncio.create_task(broker.channels.seek("t", "c", {0: 1}))
    await until(lambda: partition.cursors.urgent)
    changed = topic.record.channels.without_channel("c")
    partition.cursors.requests.reconcile(changed.with_channel("c", 77) if anew else changed)
    partition.hand_over(False)
    done = await seek
    assert isinstance(done[0], NotFound)


# ---- a log that takes nothing


@on_a_broker
async def test_who_waits_for_a_log_that_takes_nothing_is_told_that_nobody_knows(broker: Broker):
    """A full disk, or too small an ISR: a SUB that never ends holds its client for ever, and each try a change."""
    await broker.publishing.publish("t", ONE)
    partition = led(broker)
    partition.hand_over(True)
    patience, broker.changes.wait_seconds = broker.changes.wait_seconds, 0.05
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            await broker.channels.create("t", "c")
        with pytest.raises(OutcomeUnknown):
            await broker.subscriptions.subscribe(consumer("t", "c"))
    with pytest.raises(OutcomeUnknown):
        await broker.channels.pause_topic("t", True)
    assert len(broker.changes) == 2, "the channel, once, and the pause behind it"
    broker.changes.wait_seconds = patience
    partition.hand_over(False)
    await until(lambda: not len(broker.changes))
    assert partition.cursors.state.paused
    await broker.channels.pause_topic("t", False)
    reader = await subscribed(broker, "t", "c", rdy=1)
    await until(lambda: reader.wire.bodies == [b"one"])


def test_a_topic_takes_no_more_channels_than_it_may_have(tmp_path: Path):
    async def story():
        async with running(tmp_path, max_topic_channels=3) as broker:
            await broker.topics.create_topic("t")
            for channel in ("a", "b", "c#ephemeral", "a"):
                await broker.channels.create("t", channel)
            for channel in ("d", "d#ephemeral"):
                with pytest.raises(LimitReached, match="t has 3 channels, as many as --max-topic-channels allows"):
                    await broker.channels.create("t", channel)
                with pytest.raises(LimitReached, match="3 channels"):
                    await broker.subscriptions.subscribe(consumer("t", channel))
            await broker.channels.delete("t", "a")
            await broker.channels.create("t", "d")

    asyncio.run(story())


def test_a_new_topic_gets_the_channels_that_lookup_daemons_know_in_one_change(tmp_path: Path):
    """A change of the list for each of a thousand would take half a minute."""

    class KnowsMany:
        may_know = True

        def changed(self, topic: str, channels: object) -> None: ...

        def channels_changed(self, topic: str, channels: object) -> None: ...

        async def known_channels(self, topic: str, *, patient: bool) -> list[str]:
            return [f"c{n}" for n in range(1000)]

    async def story():
        async with running(tmp_path) as broker:
            broker.topics.announcer = KnowsMany()
            before = broker.parts.store.records.revision
            await broker.topics.create_topic("t")
            topic = broker.topics["t"]
            assert broker.parts.store.records.revision == before + 2
            assert len(topic.channel_names()) == 1000 and topic.serves("c7")

    asyncio.run(story())


@pytest.mark.parametrize("sync", ["always", "interval", "none"])
def test_the_disk_round_of_a_new_log_begins_behind_an_ok_that_waits_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str
):
    async def story():
        async with running(tmp_path, sync=sync) as broker:
            with monkeypatch.context() as patch:
                patch.setattr(log_sync, "BEHIND_SECONDS", 3600.0)
                await broker.publishing.publish("t", ONE)
                assert (broker.parts.disk.signs.rounds > 0) is (sync == "always")
            await broker.publishing.publish("u", ONE)
            await until(lambda: led(broker, "u").log.local_durable > 1)

    asyncio.run(story())


def test_a_new_topic_does_not_cost_what_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def story():
        async with running(tmp_path, max_node_partitions=1000) as broker:
            await broker.topics.ensure_topic("first")
            walks, values = [], broker.topics.values
            monkeypatch.setattr(broker.topics, "values", lambda: walks.append(1) or values())
            for number in range(20):
                await broker.topics.ensure_topic(f"t{number}")
            assert len(walks) < 20, "housekeeping walks, too, about once a second"

    asyncio.run(story())


def test_a_node_takes_no_more_partitions_than_it_may_have(tmp_path: Path):
    async def story():
        async with running(tmp_path, max_node_partitions=4) as broker:
            await broker.topics.create_topic("a", TopicSettings(partitions=2))
            refusal = "has 2 partitions and would have 5, more than the 4 that --max-node-partitions allows"
            with pytest.raises(LimitReached, match=refusal):
                await broker.topics.create_topic("b", TopicSettings(partitions=3))
            together = [broker.topics.ensure_topic(name) for name in ("c", "d", "e")]
            made = await asyncio.gather(*together, return_exceptions=True)
            assert [type(found) for found in made] == [Topic, Topic, LimitReached]
            with pytest.raises(LimitReached, match="--max-node-partitions"):
                await broker.subscriptions.subscribe(consumer("f", "c"))
            with pytest.raises(LimitReached, match="has 4 partitions and would have 5"):
                await broker.topics.change_settings("a", {"partitions": 3})
            assert len(broker.topics) == 3
            await broker.topics.delete_topic("a")
            await broker.topics.create_topic("b", TopicSettings(partitions=2))

    asyncio.run(story())
