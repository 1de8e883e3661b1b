"""One node's way to the metadata store: to a file over the disk's thread, and the one of tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.clock import SystemClock
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.storage import MemStorage, OsStorage
from nsqha.election.embedded import EmbeddedStore
from nsqha.election.model import PartitionMeta, TopicSettings
from nsqha.election.store import PartitionChange
from nsqha.errors import Conflict, NotFound, Unavailable
from nsqha.server.runtime.disk import DiskRounds
from nsqha.server.runtime.metadata import NodeMetadata
from tests.fakes.loop import VirtualLoop
from tests.fakes.metadata import FakeMetadata

Story = Callable[[NodeMetadata, list[int]], Awaitable[None]]


def journal(revisions: list[int]) -> Any:
    """A journal that shows which revisions of the store it was given."""
    made = NodeJournal.open(MemStorage(), "data", random.Random(1), page_cache="boot")
    made.node.stage_revision = revisions.append  # type: ignore[method-assign]
    return made


@pytest.fixture(params=["file", "fake"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    async def on_file(story: Story) -> None:
        disk = DiskRounds(asyncio.get_running_loop(), SystemClock(), pytest.fail)  # type: ignore[arg-type]
        store = EmbeddedStore(OsStorage(), f"{tmp_path}/metadata", random.Random(1))
        revisions: list[int] = []
        try:
            await story(NodeMetadata(store.records, disk.run, journal(revisions), pytest.fail), revisions)  # type: ignore[arg-type]
        finally:
            store.close()
            disk.close()

    async def on_fake(story: Story) -> None:
        revisions: list[int] = []
        await story(FakeMetadata(journal(revisions), pytest.fail).node, revisions)  # type: ignore[arg-type]

    def run(story: Story) -> None:
        if request.param == "file":
            asyncio.run(on_file(story))
        else:
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                runner.run(on_fake(story))

    return run


def test_what_is_written_is_read_and_its_revision_is_staged(run: Callable[[Story], None]) -> None:
    async def story(metadata: NodeMetadata, revisions: list[int]) -> None:
        store = metadata.records
        assert await metadata.read(lambda: store.topic("t")) is None
        created = await metadata.write(lambda: store.create_topic("t", TopicSettings()))
        assert await metadata.read(lambda: store.topic("t")) == created
        assert revisions[-2:] == [created.version] * 2 and revisions[0] < created.version

    run(story)


def test_other_work_goes_on_while_a_call_is_under_way(run: Callable[[Story], None]) -> None:
    async def story(metadata: NodeMetadata, revisions: list[int]) -> None:
        done: list[str] = []
        for call in (metadata.read, metadata.write):
            asyncio.get_running_loop().call_soon(done.append, "other")
            await call(lambda: done.append("call"))
        assert sorted(done) == ["call", "call", "other", "other"]

    run(story)


def test_a_write_to_an_older_version_is_refused_and_changes_nothing(run: Callable[[Story], None]) -> None:
    async def story(metadata: NodeMetadata, revisions: list[int]) -> None:
        store = metadata.records
        old = await metadata.write(lambda: store.create_topic("t", TopicSettings()))
        newer = replace(old.record, channels=old.record.channels.with_channel("c", 5))
        new = await metadata.write(lambda: store.replace("t", old.version, newer))
        with pytest.raises(Conflict):
            await metadata.write(lambda: store.replace("t", old.version, old.record))
        assert await metadata.read(lambda: store.topic("t")) == new

    run(story)


def test_a_change_that_lost_a_race_is_made_on_the_current_record(run: Callable[[Story], None]) -> None:
    async def story(metadata: NodeMetadata, revisions: list[int]) -> None:
        store = metadata.records
        old = await metadata.write(lambda: store.create_topic("t", TopicSettings()))
        await metadata.change_channels(old, lambda channels: channels.with_channel("a", 5))
        both = await metadata.change_channels(old, lambda channels: channels.with_channel("b", 6))
        assert sorted(both.record.channels.channels) == ["a", "b"]
        await metadata.write(lambda: store.delete_topic("t"))
        with pytest.raises(NotFound):
            await metadata.change_channels(both, lambda channels: channels.with_channel("c", 7))

    run(story)


def test_a_store_that_is_away_answers_nothing_and_takes_nothing() -> None:
    async def scenario() -> None:
        metadata = FakeMetadata(journal([]), pytest.fail)  # type: ignore[arg-type]
        store = metadata.node.records
        created = await metadata.node.write(lambda: store.create_topic("t", TopicSettings()))
        metadata.away = True
        with pytest.raises(Unavailable):
            await metadata.node.read(lambda: store.topic("t"))
        with pytest.raises(Unavailable):
            await metadata.node.write(lambda: store.delete_topic("t"))
        metadata.away = False
        assert await metadata.node.read(lambda: store.topic("t")) == created

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario())


def test_a_record_that_another_node_changed_is_found_and_guards_writes() -> None:
    async def scenario() -> None:
        metadata = FakeMetadata(journal([]), pytest.fail)  # type: ignore[arg-type]
        store = metadata.node.records
        old = await metadata.node.write(lambda: store.create_topic("t", TopicSettings()))
        newer = replace(old, version=old.version + 5)
        metadata.put(newer)
        assert await metadata.node.read(lambda: store.topic("t")) == newer and store.revision == newer.version
        with pytest.raises(Conflict):
            await metadata.node.write(lambda: store.replace("t", old.version, old.record))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario())


def test_changes_of_many_partitions_are_few_calls_and_each_has_its_own_outcome(run: Callable[[Story], None]):
    async def story(metadata: NodeMetadata, revisions: list[int]) -> None:
        records = metadata.records
        topic = await metadata.write(lambda: records.create_topic("t", TopicSettings(partitions=40)))
        metas = topic.record.partitions
        calls: list[int] = []
        replace_partitions = records.replace_partitions

        def counted(changes: Any, **more: Any) -> Any:
            calls.append(len(changes))
            return replace_partitions(changes, **more)

        metadata.records = cast(Any, SimpleNamespace(replace_partitions=counted, revision=records.revision))
        changes = [
            PartitionChange("t", topic.record.uid, number, replace(meta, epoch=meta.epoch + 1, version=version))
            for number, meta in metas.items()
            for version in ((meta.version + 77) if number == 7 else meta.version,)
        ]
        done = await asyncio.gather(*map(metadata.replace_partition, changes), return_exceptions=True)
        assert calls == [40]
        assert isinstance(done.pop(7), Conflict)
        assert [m.epoch if isinstance(m, PartitionMeta) else m for m in done] == [metas[0].epoch + 1] * 39
        assert records.topic("t").record.partitions[7] == metas[7]  # type: ignore[union-attr]

    run(story)
