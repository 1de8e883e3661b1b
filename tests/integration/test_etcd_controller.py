"""The controller's shell with a real etcd below it; how long elections take is printed, not judged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from lookupd.controller import SECONDS
from nsqha.election import moves
from nsqha.election.etcd.calls import transact
from nsqha.election.etcd.keys import put
from nsqha.election.etcd.store import EtcdStore
from nsqha.election.placement import PartitionName
from nsqha.errors import NotFound
from nsqha.quantile import Histogram
from tests.etcd_server import EtcdServer
from tests.integration.etcd_rig import Open
from tests.unit.lookupd.nodes_rig import World


@asynccontextmanager
async def world_on(etcd: EtcdServer, open_store: Open) -> AsyncIterator[World]:
    world = await asyncio.to_thread(lambda: World(3, stores=[open_store(etcd.endpoint) for _ in range(4)]))

    async def tick() -> None:
        while True:
            for node in world.nodes.values():
                if node.up:
                    node.session.ticked()
            await asyncio.sleep(0.2)

    ticking = asyncio.create_task(tick())
    try:
        yield world
    finally:
        ticking.cancel()


def run(etcd: EtcdServer, open_store: Open, story: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with world_on(etcd, open_store) as world:
            await asyncio.wait_for(story(world), 40)

    uvloop.run(main())


def test_topics_are_placed_led_and_led_by_others_when_a_node_dies(etcd: EtcdServer, open_store: Open) -> None:
    async def story(world: World) -> None:
        shell = world.shell()
        await shell.start()
        try:
            await world.until(lambda: shell.term is not None)
            world.create(partitions=20)
            await world.until(lambda: all(world.meta("t", n).leader for n in range(20)))
            await world.until(lambda: shell.counts.elections.total() == 20)
            shell.counts.election_seconds = Histogram(SECONDS)
            world.join_all()
            await world.until(lambda: all(len(world.meta("t", n).isr) == 3 for n in range(20)))
            dead = world.meta().leader
            world.nodes[dead].kill()
            await world.until(lambda: all(world.meta("t", n).leader != dead for n in range(20)))
            metas = [world.meta("t", n) for n in range(20)]
            assert all(dead not in meta.isr and len(meta.isr) == 2 for meta in metas if meta.epoch > 2)
            await world.until(lambda: shell.counts.elections["leader does not answer"] > 0)
            data = shell.counts.election_seconds.data()
            print("elections by seconds", dict(zip([*data.bounds, "more"], data.counts, strict=True)))
        finally:
            await shell.stop()
        assert world.store.records.controller() is None

    run(etcd, open_store, story)


def test_records_that_nobody_can_read_cost_no_other_partition_its_leader(etcd: EtcdServer, open_store: Open) -> None:
    async def story(world: World) -> None:
        store: EtcdStore = world.store
        shell = world.shell()
        world.create()
        world.create("spoilt")
        spoilt = await asyncio.to_thread(lambda: store.records.topic("spoilt"))
        assert spoilt is not None
        keys, moved = store._keys, moves.move_name(PartitionName("t", 5, 0))
        await asyncio.to_thread(lambda: transact(store._client, [], [put(keys.intent(moved), b"?")]))
        await shell.start()
        try:
            await world.led()
            await world.until(lambda: world.meta("spoilt").leader != 0)
            for topic in ("t", "spoilt"):
                world.join_all(topic)
                await world.until(lambda topic=topic: len(world.meta(topic).isr) == 3)
            await asyncio.to_thread(
                lambda: transact(store._client, [], [put(keys.partition(spoilt.record.uid, 0), b"{")])
            )
            asked: list[str] = []
            read = store.records.topic

            def reading(name: str) -> Any:
                asked.append(name)
                return read(name)

            store.records.topic = reading  # type: ignore[method-assign]
            world.nodes[world.meta("spoilt").leader].kill()
            await world.until(lambda: asked.count("spoilt") > 1)
            if (leader := world.nodes[world.meta().leader]).up:
                leader.kill()
            await world.until(lambda: world.nodes[world.meta().leader].up)
            assert shell.counts.terms == 1
            unreadable = sorted(store.watch.view().unreadable)
            assert unreadable == [f"intents/{moved}", f"partitions/{spoilt.record.uid:016x}/0"]
            found = (await asyncio.to_thread(store.intents.all))[moved]
            assert found.record == {}
            await asyncio.to_thread(lambda: store.intents.put(moved, {"a": 1}, expected_version=found.version))
            assert (await asyncio.to_thread(store.intents.all))[moved].record == {"a": 1}
        finally:
            await shell.stop()

    run(etcd, open_store, story)


def test_two_daemons_never_lead_one_term_and_the_second_goes_on(etcd: EtcdServer, open_store: Open) -> None:
    async def story(world: World) -> None:
        first, second = world.shell("l1"), world.shell("l2")
        second.store = await asyncio.to_thread(lambda: open_store(etcd.endpoint))
        await first.start()
        await world.until(lambda: first.term is not None)
        await second.start()
        assert first.term is not None
        epoch = first.term.epoch
        await first.stop()
        try:
            await world.until(lambda: second.term is not None)
            assert second.term is not None and second.term.epoch > epoch
            world.create()
            await world.led()
            topic = world.store.records.topic("t")
            assert topic is not None
        finally:
            await second.stop()

    run(etcd, open_store, story)


def test_a_deleted_topic_is_forgotten_by_the_controller(etcd: EtcdServer, open_store: Open) -> None:
    async def story(world: World) -> None:
        shell = world.shell()
        await shell.start()
        try:
            await world.until(lambda: shell.term is not None)
            world.create()
            await world.led()
            world.store.records.delete_topic("t")
            await world.until(lambda: shell.term is not None and not shell.term.machine.state.parts)
            try:
                world.store.records.delete_topic("t")
            except NotFound:
                pass
            else:
                raise AssertionError("the controller brought it back")
        finally:
            await shell.stop()

    run(etcd, open_store, story)
