"""The cache of channel state is closed when nobody uses it any more."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from nsqha.server.runtime.cache import CacheWriter
from tests.fakes.disk import FakeDisk
from tests.unit.server.replica_rig import pause, run


class FakeCache:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_a_state_that_is_being_looked_for_is_waited_for() -> None:
    async def scenario() -> None:
        loop, cache = asyncio.get_running_loop(), FakeCache()
        disk = FakeDisk(loop, pytest.fail)
        writer = CacheWriter(cast(Any, cache), loop, cast(Any, disk))
        disk.hold()
        loading = asyncio.ensure_future(disk.run(lambda: cache.closed))
        await pause()
        closing = asyncio.ensure_future(writer.close(write=False))
        await pause()
        disk.release()
        assert await loading is False, "its tables would have been taken from under it"
        await closing
        assert cache.closed

    run(scenario)
