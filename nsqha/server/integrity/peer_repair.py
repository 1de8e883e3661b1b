"""Ranges of a log that do not verify any more are written again from another replica.

Recovery, the scrub, a reader, a push or a follower that applies reports damage with `damaged`; any replica may give
the range, led or not. Nothing is cut and nothing moves: the bytes go where they were, and only if the chain says that
they are the ones that were there (`LogRepair.mending`): it comes from the entry behind. So what is not known to be
committed is mended too, without a leader, who could not be elected before. At the very end of a log nothing is behind:
there it has to be the entry that memory has, and what the giver knows to be committed, unless that is the leader which
is followed: it may wait for this replica to commit anything. Channels that stopped in front of the range go on, and the
scrub counts it no longer.

    own entries verify, frames do not    each run that comes is proven by the next entry: written at once
    own entries do not verify            followed up to the next one that does, chains only; then fetched and written

So memory holds one answer, however long the range. What one replica lacks the next one may have: each goes on where the
others ended. One range of a partition at a time; what no replica has now is asked for again as long as the partition is
here, at once when a node comes; what was given up, less and less often.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from nsqha.commitlog import copying
from nsqha.errors import LogCorrupt, NotFound, NsqhaError, Poisoned, Unavailable
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.ranges import RangeSet
from nsqha.server.runtime.backoff import Backoff

if TYPE_CHECKING:
    from nsqha.commitlog.entry import Entry
    from nsqha.commitlog.log import PartitionLog
    from nsqha.commitlog.reading.lookup import LogReader
    from nsqha.server.peers.api import Peers

logger = Logger("repair")

Batches = list[tuple["Entry", bytes]]

CALL_SECONDS = 10.0
FETCH_BYTES = 4 << 20
ENTRIES_AT_ONCE = 4096  # that are read, to find what was given up
RETRY_SECONDS = 30.0
RETRY_SECONDS_MAX = 3600.0  # of what was given up


class Repairer:
    """Mends the logs of one node."""

    def __init__(
        self,
        peers: Peers,
        *,
        cluster_id: int,
        log_of: Callable[[PartitionKey], PartitionLog | None],
        others: Callable[[PartitionKey], Iterable[str]],
        mended: Callable[[PartitionKey, int, int], None],
        missed: Callable[[PartitionKey, int, int], Awaitable[None]],
        run: Callable[[Callable[[], None]], Awaitable[None]],
        on_failure: Callable[[BaseException], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`others`: where the other replicas are, the best first. `mended`: readers may go on; `missed`: no replica
        has the range now. `run`: a blocking job, off the loop. `on_failure`: the disk failed."""
        self._peers = peers
        self._cluster_id = cluster_id
        self._log_of = log_of
        self._others = others
        self._mended = mended
        self._missed = missed
        self._run = run
        self._on_failure = on_failure
        self._spawn = spawn
        self._wanted: dict[PartitionKey, list[tuple[int, int]]] = {}  # ranges to be mended, of partitions under way
        self._early: dict[PartitionKey, asyncio.Event] = {}  # of the same: there is a reason to ask now

    def damaged(self, key: PartitionKey, first: int, end: int) -> None:
        """The batches [first, end) of a partition do not verify; they are committed, or an entry behind them does."""
        ranges = self._wanted.get(key)
        if ranges is None:
            self._wanted[key] = [(first, end)]
            self._early[key] = asyncio.Event()
            self._spawn(self._repair(key))
        elif not any(known_first <= first and end <= known_end for known_first, known_end in ranges):
            ranges.append((first, end))
            self._early[key].set()

    def ask_again(self) -> None:
        """A node has come, and may have what no replica had."""
        for early in self._early.values():
            early.set()

    async def _repair(self, key: PartitionKey) -> None:
        ranges, early = self._wanted[key], self._early[key]
        backoff = Backoff(RETRY_SECONDS, RETRY_SECONDS_MAX)
        loop = asyncio.get_running_loop()
        try:
            while ranges:
                early.clear()
                for first, end in list(ranges):
                    if (log := self._log_of(key)) is None:
                        return
                    if await self.mend(key, log, first, end):
                        ranges.remove((first, end))
                    else:
                        await self._missed(key, first, end)
                if ranges:
                    if not self._given_up(key, ranges):
                        backoff.reset()
                    pause = backoff.next_pause()
                    asked_at, later = loop.time(), loop.call_later(pause, early.set)
                    await early.wait()
                    later.cancel()
                    if loop.time() - asked_at < pause:
                        backoff.reset()
        finally:
            del self._wanted[key], self._early[key]

    def _given_up(self, key: PartitionKey, ranges: list[tuple[int, int]]) -> bool:
        """Whether they are lost, so nothing waits for them. Their ends tell: a look at all of a long one takes
        seconds."""
        log = self._log_of(key)
        return log is not None and all(is_lost(log, at) for first, end in ranges for at in (first, end - 1))

    async def mend(self, key: PartitionKey, log: PartitionLog, first: int, end: int) -> bool:
        """Ask every other replica, once. Whether the range is whole now, or not of this log any more."""
        at, asked_at = first, -1
        while at != asked_at:  # as long as a replica had some of it
            asked_at = at
            for address in self._others(key):
                if not _holds(log, first, end):
                    return True
                try:
                    at = await self._take(key, log, address, at, end)
                except Poisoned as error:
                    self._on_failure(error)  # of our own disk: nothing is synced there twice
                    return True
                if at >= end:
                    self._mended(key, first, end)
                    return True
        return False

    async def mend_as_leader(
        self, key: PartitionKey, log: PartitionLog, address: str, epoch: int, first: int, end: int
    ) -> None:
        """Write what the leader of `epoch` has: also LOST, where that was given up, over what does not verify here.

        LogCorrupt: it has another log there. Unavailable: it does not lead, or has damage there, too."""
        if (first := max(first, log.start.log_id)) >= end:
            return  # retention has gone past it
        if end < log.end.log_id and log.repair.knows(end):
            past = log.past
            run = await self._fetch(key, log, past, address, first, end + 1, epoch)
            if run[-1][0].log_id == end and run[-1][0].chain == log.entry(end).chain:
                # It goes on as ours does, so what it has made of the range is as good as what recovery made of it here.
                await self._run(log.repair.mending(run[:-1], proven=True, lost=True))
                return
        await self._take(key, log, address, first, end, epoch)

    async def _take(
        self, key: PartitionKey, log: PartitionLog, address: str, first: int, end: int, epoch: int = 0
    ) -> int:
        """Write what one replica has of [first, end), from its beginning; up to where."""
        at = first
        try:
            while at < end:
                past = log.past
                run = await self._fetch(key, log, past, address, at, end, epoch)
                while run and not log.repair.knows(run[-1][0].log_id + 1):
                    run.pop()
                if run:
                    log.repair.prove(run[-1][0])
                    await self._run(log.repair.mending(run, proven=True, lost=epoch > 0))
                    at = run[-1][0].log_id + 1
                else:
                    chains = await self._follow(key, log, past, address, at, end, epoch)
                    at = await self._write_followed(key, log, past, address, at, chains, epoch)
        except Poisoned:
            raise
        except (NsqhaError, ValueError, OSError) as error:
            if epoch:
                raise
            logger.info("repair_delayed", "%s: %s", log.directory, error)
        if at > first:
            logger.warning("repaired", "%s: log ids [%d, %d) from %s", log.directory, first, at, address)
        return at

    async def _follow(
        self, key: PartitionKey, log: PartitionLog, past: object, address: str, first: int, end: int, epoch: int
    ) -> array[int]:
        """The chains of what another replica has from `first` on, to the first one that an entry of ours proves."""
        chains: array[int] = array("Q")
        before = log.entry_before(first)
        while first + len(chains) < end:
            for entry, _ in await self._fetch(key, log, past, address, first + len(chains), end, epoch):
                log.repair.check_next(before, entry)
                chains.append(entry.chain)
                before = entry
                if log.repair.knows(entry.log_id + 1):
                    log.repair.prove(entry)
                    return chains
        raise LogCorrupt(f"nothing behind log ids [{first}, {end}) verifies in {log}, so nothing proves them")

    async def _write_followed(
        self,
        key: PartitionKey,
        log: PartitionLog,
        past: object,
        address: str,
        first: int,
        chains: array[int],
        epoch: int,
    ) -> int:
        at, end = first, first + len(chains)
        while at < end:
            run = await self._fetch(key, log, past, address, at, end, epoch)
            if any(entry.chain != chains[entry.log_id - first] for entry, _ in run):
                raise LogCorrupt(f"what {address} has at log id {at} is not what it was")
            await self._run(log.repair.mending(run, proven=True, lost=epoch > 0))
            at = run[-1][0].log_id + 1
        return at

    async def _fetch(
        self, key: PartitionKey, log: PartitionLog, past: object, address: str, first: int, end: int, epoch: int
    ) -> Batches:
        """Batches of [first, end), at least one. The log was not cut since `past`.

        What is written on their account is begun before anything else is waited for: jobs come one after the other, so
        a cut that is decided later is carried out later."""
        request = pb.FetchRequest(
            cluster_id=self._cluster_id,
            key=pb.PartitionKey(topic_uid=key[0], partition=key[1]),
            epoch=epoch,
            first=first,
            end=end,
            max_bytes=FETCH_BYTES,
        )
        try:
            reply = await self._peers.call(address, "Fetch", request, timeout=CALL_SECONDS)
        except LogCorrupt as error:
            raise Unavailable(f"{address} has damage, too: {error}") from error
        run = [(entry, data) for entry, data, _ in copying.batches(reply.entries, reply.data)]
        if not run or [entry.log_id for entry, _ in run] != list(range(first, min(first + len(run), end))):
            raise LogCorrupt(f"{address} does not have log id {first}")
        after = run[-1][0].log_id + 1
        if after == log.end.log_id and after > reply.committed and not epoch:  # what the leader has is what counts
            raise NotFound(f"{address} does not know whether its log id {after - 1} is committed")
        if self._log_of(key) is not log or log.past is not past or not _holds(log, first, after):
            raise NotFound(f"log ids [{first}, {after}) are not in {log} any more")
        return run


def is_lost(log: PartitionLog, log_id: int) -> bool:
    """Whether a batch was given up."""
    try:
        return log.start.log_id <= log_id < log.end.log_id and log.entry(log_id).lost
    except (LogCorrupt, OSError):
        return False


def lost_of(log: LogReader, first: int, end: int) -> RangeSet:
    """What of [first, end) was given up. Blocks, for a range of millions of batches for seconds: in a thread, with a
    snapshot. OSError: nothing can be said now."""
    lost = RangeSet()
    log_id, end = max(first, log.start.log_id), min(end, log.end.log_id)
    while log_id < end:
        pair = log.files.pair_of(log_id)
        block_end = min(end, log.end_of(pair).log_id, log_id + ENTRIES_AT_ONCE)
        for entry in pair.read_entries(log_id, block_end - log_id):
            if entry is not None and entry.lost:
                lost.add(entry.log_id, entry.log_id + 1)
        log_id = block_end
    return lost


def _holds(log: PartitionLog, first: int, end: int) -> bool:
    return log.start.log_id <= first < end <= log.end.log_id
