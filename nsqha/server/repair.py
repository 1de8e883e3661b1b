"""Ranges of a log that do not verify any more are written anew from another replica.

Who finds damage (the scrub, a reader, a push, a follower that applies) tells `damaged`; any replica may give the range.
Nothing is cut and nothing moves: the bytes go where they were, and only if the chain says that they are the ones that
were there (`PartitionLog.mend`): it comes from the entry behind. So what is not known to be committed is mended too,
without a leader, who could not be elected before. At the very end of a log nothing is behind: there it has to be the
entry that memory has, and what the giver knows to be committed. Channels that stopped in front of the range go on, and
the scrub counts it no longer.

One range of a partition at a time; what nobody has now is asked for again as long as the partition is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from nsqha.commitlog import copying
from nsqha.errors import LogCorrupt, NotFound, NsqhaError, Poisoned
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
        mended: Callable[[Key, int, int], None],
        run: Callable[[Callable[[], None]], Awaitable[None]],
        on_failure: Callable[[BaseException], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`others`: where the other replicas are, the best first. `mended`: readers may go on. `run`: a blocking job,
        off the loop. `on_failure`: the disk failed."""
        self._peers = peers
        self._cluster_id = cluster_id
        self._log_of = log_of
        self._others = others
        self._mended = mended
        self._run = run
        self._on_failure = on_failure
        self._spawn = spawn
        self._wanted: dict[Key, list[tuple[int, int]]] = {}  # ranges to be mended, of partitions under way

    def damaged(self, key: Key, first: int, end: int) -> None:
        """The batches [first, end) of a partition do not verify; they are committed, or an entry behind them does."""
        ranges = self._wanted.get(key)
        if ranges is None:
            self._wanted[key] = [(first, end)]
            self._spawn(self._repair(key))
        elif not any(known_first <= first and end <= known_end for known_first, known_end in ranges):
            ranges.append((first, end))

    async def _repair(self, key: Key) -> None:
        ranges = self._wanted[key]
        try:
            while ranges:
                for first, end in list(ranges):
                    if (log_ := self._log_of(key)) is None:
                        return
                    if await self._mend(key, log_, first, end):
                        ranges.remove((first, end))
                if ranges:
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            del self._wanted[key]

    async def _mend(self, key: Key, log_: PartitionLog, first: int, end: int) -> bool:
        """Whether somebody had the range, or it is not of this log any more."""
        if not _holds(log_, first, end):
            return True
        for address in self._others(key):
            try:
                await self._fetch(key, log_, address, first, end)
            except (OSError, Poisoned) as error:
                self._on_failure(error)  # of our own disk: nothing is tried there twice
                return True
            except (NsqhaError, ValueError) as error:
                log.info("repair_delayed", "%s: %s", log_.directory, error)
            else:
                log.warning("repaired", "%s: log ids [%d, %d) from %s", log_.directory, first, end, address)
                self._mended(key, first, end)
                return True
        return False

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
            if end == log_.end.log_id and at > reply.committed:
                raise NotFound(f"{address} does not know whether its log id {at - 1} is committed")
        if self._log_of(key) is not log_ or not _holds(log_, first, end):
            raise NotFound(f"log ids [{first}, {end}) are not in {log_} any more")
        # Jobs come one after the other: a cut that is decided from here on is carried out after this.
        await self._run(log_.mending(batches))


def _holds(log_: PartitionLog, first: int, end: int) -> bool:
    return log_.start.log_id <= first < end <= log_.end.log_id
