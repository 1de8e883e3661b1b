"""A broker over real files and threads, without sockets; what runs on its disk thread can be held and made to fail."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

from nsqha.clock import SystemClock
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.storage import OsStorage
from nsqha.election.embedded import EmbeddedStore
from nsqha.options import Options
from nsqha.replication.clocks import BoundedClock
from nsqha.server.node.broker import Broker
from nsqha.server.node.parts import NodeParts
from nsqha.server.opening.opener import PartitionOpener
from nsqha.server.partition.delivery import Consumer
from nsqha.server.partition.partition import Partition
from nsqha.server.runtime.disk import DiskRounds
from tests.unit.server.shell_rig import FakeWire


class Gate:
    """Holds a function that runs on the disk thread until `open`; or lets it fail."""

    def __init__(self, function: Callable[..., Any], *, error: Exception | None = None, after: bool = False) -> None:
        self._function = function
        self._error = error
        self._after = after
        self._open = threading.Event()
        self.reached = threading.Event()
        if error is not None:
            self._open.set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self._open.wait(10)
        if self._error is not None and not self._after:
            raise self._error
        result = self._function(*args, **kwargs)
        if self._error is not None:
            raise self._error
        return result

    @classmethod
    def at(cls, owner: object, name: str, **how: Any) -> Gate:
        """In the place of a method."""
        gate = cls(getattr(owner, name), **how)
        setattr(owner, name, gate)
        return gate

    def open(self) -> None:
        self._open.set()

    def hold(self) -> None:
        """Also a call that is to fail waits for `open`."""
        self._open.clear()

    async def until_reached(self) -> None:
        while not self.reached.is_set():
            await asyncio.sleep(0.001)


async def start(folder: Path, **options: Any) -> Broker:
    """A broker that has opened its topics."""
    opts = Options(data_path=str(folder), disk_low_bytes=0, **options)
    loop, clock, rng = asyncio.get_running_loop(), BoundedClock(SystemClock(), 0), random.Random(1)
    journal = NodeJournal.open(OsStorage(), str(folder), rng)
    store = EmbeddedStore(OsStorage(), f"{folder}/metadata", rng, cluster_id=journal.identity.cluster_id)
    journal.node.join(store.records.cluster().record.cluster_id)
    broker: Broker
    disk = DiskRounds(loop, clock, lambda error: broker.fail(error))
    opener = PartitionOpener(
        opts, loop=loop, clock=clock, disk=disk, journal=journal, rng=rng, fail=lambda error: broker.fail(error)
    )
    broker = Broker(opts, NodeParts(loop, clock, rng, journal, store, disk, opener))
    await broker.open_topics()
    return broker


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[Broker]:
    """A broker, stopped at the end."""
    async with asyncio.timeout(20):
        broker = await start(folder, **options)
        try:
            yield broker
        finally:
            await broker.stop()


def on_a_broker(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a test of what one broker lives through; what the story takes beside it are fixtures."""

    def test(tmp_path: Path, **fixtures: Any) -> None:
        async def life() -> None:
            async with running(tmp_path) as broker:
                await story(broker, **fixtures)

        asyncio.run(life())

    wanted = [Parameter(name, Parameter.KEYWORD_ONLY) for name in signature(story).parameters if name != "broker"]
    test = functools.wraps(story)(test)
    test.__signature__ = Signature([Parameter("tmp_path", Parameter.KEYWORD_ONLY), *wanted])  # type: ignore[attr-defined]
    return test


def consumer(topic: str, channel: str) -> Consumer:
    return Consumer(FakeWire(), topic=topic, channel=channel, msg_timeout=60, sample_rate=0)


async def subscribed(broker: Broker, topic: str, channel: str, rdy: int = 0) -> Consumer:
    found = consumer(topic, channel)
    await broker.subscriptions.subscribe(found)
    found.rdy = rdy
    found.wake()
    return found


def led(broker: Broker, topic: str = "t") -> Partition:
    """The only partition of a topic."""
    (partition,) = broker.topics.topic(topic).led
    return partition


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
