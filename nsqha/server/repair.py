"""Ranges of a log that do not verify any more are written anew from another replica.

Who finds damage (the scrub, a reader, a push) tells `damaged`; what is committed is the same everywhere, so any replica
may give it. Nothing is cut and nothing moves: the bytes go where they were, and only if the chain says that they
are the ones that were there (`PartitionLog.mend`). Channels that stopped in front of the range go on.

One repair of a partition at a time; one that finds nobody who has the range is tried again as long as it is damaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from nsqha.commitlog import copying
from nsqha.errors import LogCorrupt, NsqhaError
from nsqha.nsqlog import Log
from nsqha.pb.v1 import replication_pb2 as pb

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.server.peers import Peers

log = Log("repair")

Key = tuple[int, int]

CALL_SECONDS = 10.0
FETCH_BYTES = 4 << 20
RETRY_SECONDS = 30.0


class Repairer:
    """Mends the logs of one node."""

    def __init__(
        self,
        peers: Peers,
        *,
        cluster_id: int,
        log_of: Callable[[Key], PartitionLog | None],
        others: Callable[[Key], Iterable[str]],
        mended: Callable[[Key], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`others`: where the other replicas are, the best first. `mended`: readers may go on."""
        self._peers = peers
        self._cluster_id = cluster_id
        self._log_of = log_of
        self._others = others
        self._mended = mended
        self._spawn = spawn
        self._running: set[Key] = set()

    def damaged(self, key: Key, first: int, end: int) -> None:
        """The batches [first, end) of a partition that is committed there do not verify."""
        if key not in self._running:
            self._running.add(key)
            self._spawn(self._repair(key, first, end))

    async def _repair(self, key: Key, first: int, end: int) -> None:
        try:
            while (log_ := self._log_of(key)) is not None:
                for address in self._others(key):
                    try:
                        await self._fetch(key, log_, address, first, end)
                    except (NsqhaError, ValueError) as error:
                        log.info("repair_delayed", "%s: %s", log_.directory, error)
                    else:
                        log.warning("repaired", "%s: log ids [%d, %d) from %s", log_.directory, first, end, address)
                        self._mended(key)
                        return
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._running.discard(key)

    async def _fetch(self, key: Key, log_: PartitionLog, address: str, first: int, end: int) -> None:
        batches = []
        at = first
        while at < end:
            request = pb.FetchRequest(
                cluster_id=self._cluster_id,
                key=pb.PartitionKey(topic_uid=key[0], partition=key[1]),
                first=at,
                end=end,
                max_bytes=FETCH_BYTES,
            )
            reply = await self._peers.call(address, "Fetch", request, timeout=CALL_SECONDS)
            run = list(copying.batches(reply.entries, reply.data))
            if not run or run[0][0].log_id != at:
                raise LogCorrupt(f"{address} does not have log id {at} either")
            batches += run
            at = run[-1][0].log_id + 1
        if self._log_of(key) is log_:
            log_.mend(batches)
