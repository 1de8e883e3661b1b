"""A node that follows the records of its cluster goes on doing so, whatever one of them did to it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from nsqha.clock import ManualClock
from nsqha.errors import Unavailable
from nsqha.server.cluster import REJOIN_SECONDS, Cluster
from tests.unit.server.replica_rig import FakePeers, pause, run


def cluster() -> Cluster:
    return Cluster(
        cast(Any, SimpleNamespace()),
        loop=asyncio.get_running_loop(),
        clock=ManualClock(),
        node=1,
        cluster_id=9,
        peers=cast(Any, FakePeers()),
        routing_peers=cast(Any, FakePeers()),
        ttl_s=5.0,
    )


def test_a_record_that_can_not_be_dealt_with_is_tried_again_and_others_are_looked_at() -> None:
    async def scenario() -> None:
        made = cluster()
        looked: list[set[str]] = []
        errors: list[Exception] = [OSError("a folder that can not be removed"), Unavailable("not now")]

        async def look_at(names: set[str]) -> None:
            looked.append(set(names))
            if errors:
                raise errors.pop(0)

        made._look_at = look_at  # type: ignore[method-assign]
        task = asyncio.ensure_future(made._follow_records())
        made._hinted("topics/a")
        await pause(REJOIN_SECONDS * 2.5)
        assert looked == [{"topics/a"}] * 3
        made._hinted("topics/b")
        await pause()
        assert looked[-1] == {"topics/b"} and not task.done()

    run(scenario)


def test_a_node_that_lost_its_lease_joins_again_though_an_attempt_fails_in_any_way() -> None:
    async def scenario() -> None:
        made = cluster()
        errors: list[Exception] = [RuntimeError("of a library"), Unavailable("etcd is away")]
        tries: list[int] = []

        async def register() -> None:
            tries.append(1)
            if errors:
                raise errors.pop(0)

        made._register = register  # type: ignore[method-assign]
        await made._rejoin()
        assert len(tries) == 3 and made._news.is_set()

    run(scenario)
