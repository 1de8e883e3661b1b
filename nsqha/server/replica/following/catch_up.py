"""A follower's way back to its leader's log: find where the two part, cut what is ours alone, pull what is missing.

    EpochEnd(our last epoch) .. -> common end -> cut (intent journalled) -> Fetch .. -> near the end: the leader pushes
    the leader's files begin behind our end -> our log begins again at its oldest file: all channel state is in the log

Only what was never committed is cut. A log whose name (log_uid) the ISR does not hold may have been given up by an
operator or after a lost page cache; then what its leader has is the truth, and the cut is logged as an alarm.

Runs while the follower's files are taken (`FollowerJobs.take`), so no batch and no roll comes between. Clients go
first: what is pulled is stored in slices, and not faster than the node's `SharedRate`,
unless the leader waits for this replica or its log grows more than half as fast as this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from nsqha.commitlog import copying
from nsqha.commitlog.entry import ENTRY_BYTES, Entry, decode
from nsqha.errors import LogCorrupt, Unavailable
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.acceptance import check_cut, check_replacement
from nsqha.replication.divergence import Divergence, EpochEndAnswer, InSync, RangeGone, Truncate
from nsqha.replication.pace import BATCH_COST_MIN, SharedRate
from nsqha.server.runtime.tasks import awaited

if TYPE_CHECKING:
    from nsqha.commitlog.reading.lookup import LogReader
    from nsqha.server.replica.following.follower import Follower, Port

logger = Logger("catchup")

FETCH_BYTES = 1 << 20
NEAR_BYTES = 256 << 10  # so close to the end that the leader may push the rest
CALL_SECONDS = 5.0
SLICE_COST = 128 << 10  # stored at once, before everything else on this node has its turn

Call = Callable[[str, Any], Awaitable[Any]]
"""`await call("Fetch", request)`: ask the leader."""


class Files(Protocol):
    """What catch-up does to a partition's files and its records in the journal and the cache; slow, off the loop."""

    async def cut(self, follower: Follower, log_id: int) -> None:
        """End the log before `log_id`, durably, the intent in the journal first. What is known of the batches that are
        cut is forgotten in the same step, which no cancellation divides."""

    async def replace_log(self, follower: Follower, anchor: Entry) -> None:
        """An empty log under a new log_uid that goes on behind `anchor`."""

    async def roll(self, follower: Follower) -> None:
        """A new pair of files."""

    async def reload(self, follower: Follower) -> None:
        """The channel state that the log says, up to what is known to be committed; later, if that says nothing yet."""

    def may_lose_committed(self, follower: Follower) -> bool:
        """Whether the ISR does not hold this log by its name."""

    def waited_for(self, follower: Follower) -> bool:
        """Whether messages may have to wait for this replica before they are acknowledged."""


class CatchUp:
    """One catching up, with the leader of one epoch."""

    def __init__(
        self, follower: Follower, port: Port, files: Files, call: Call, cluster_id: int, pace: SharedRate | None = None
    ) -> None:
        self._follower = follower
        self._port = port
        self._files = files
        self._call = call
        self._cluster_id = cluster_id
        self._pace = pace or SharedRate(0)

    async def run(self) -> None:
        """Come near the leader's end. Unavailable: it is not our leader any more, or can not be reached."""
        follower = self._follower
        follower.behind = True
        if follower.log.end.log_id == follower.log.start.log_id:
            follower.leader_log.rebuilding = True
        await self._agree()
        await self._pull()
        if follower.applier.state is None:
            await self._files.reload(follower)
            self._check()
        follower.caught_up()

    def _check(self) -> None:
        if self._follower.port is not self._port or self._follower.closed:
            raise Unavailable("another leader, or none")

    # ---- where the two part

    async def _agree(self) -> None:
        """Cut what the leader does not have."""
        follower, applier = self._follower, self._follower.applier
        common = await self._common_end()
        if common is None or common >= follower.log.end.log_id:
            follower.leader_log.differs_at = None
            return
        committed = max(applier.applied_end, applier.committed)
        if common < committed:
            text = f"{follower.log.directory}: the leader's log parts from this one at {common}, not at {committed}"
            if not self._files.may_lose_committed(follower):
                check_cut(common, committed=committed)
            logger.error("committed_cut", "%s; this log was given up, the leader's counts", text)
        removed = follower.log.end.log_id - common
        logger.info("log_cut", "%s: %d batches that were not committed are cut", follower.log.directory, removed)
        await self._files.cut(follower, common)

    async def _common_end(self) -> int | None:
        """The end of what both logs have. None: the leader's files begin behind it, and ours began again."""
        log = self._follower.log
        search = Divergence(
            own=lambda epoch: _epoch_end(log, epoch),
            chain_before=lambda log_id: log.entry_before(log_id).chain,
            differs_at=self._follower.leader_log.differs_at,
        )
        while search.outcome is None:
            reply = await self._call("EpochEnd", self._request(pb.EpochEndRequest(asked_epoch=search.asked)))
            self._check()
            search.answered(EpochEndAnswer(reply.epoch, reply.end, reply.chain, reply.start))
        match search.outcome:
            case InSync(end) | Truncate(end):
                return end
            case RangeGone(start):
                await self._replace_log(start)
        return None

    async def _replace_log(self, start: int) -> None:
        reply = await self._call("Fetch", self._request(pb.FetchRequest(first=start - 1, max_bytes=1)))
        self._check()
        anchor = decode(reply.anchor) if reply.anchor else None
        if anchor is None:
            raise Unavailable("this log cannot begin again from the leader's")
        if not self._files.may_lose_committed(self._follower):
            check_replacement(anchor.log_id + 1, committed=self._follower.applier.committed)
        self._follower.leader_log.rebuilding = True
        logger.warning("log_replaced", "%s: begins at batch %d", self._follower.log.directory, anchor.log_id + 1)
        await self._files.replace_log(self._follower, anchor)

    # ---- what is missing

    async def _pull(self) -> None:
        ahead = _Ahead(self._fetch)
        try:
            await self._pull_with(ahead)
        finally:
            ahead.drop()

    async def _fetch(self, first: int) -> pb.FetchReply:
        request = self._request(pb.FetchRequest(first=first, max_bytes=FETCH_BYTES))
        reply: pb.FetchReply = await self._call("Fetch", request)
        return reply

    async def _pull_with(self, ahead: _Ahead) -> None:
        follower, applier = self._follower, self._follower.applier
        end = 0  # of the leader's log when it was last asked
        while True:
            log = follower.log
            first = log.end.log_id
            reply = await ahead.reply(first)
            self._check()
            follower.leader_log.end_position = reply.end_position
            if reply.anchor:
                await self._replace_log(first)
                continue
            then = first + len(reply.entries) // ENTRY_BYTES
            if first < then < reply.end:
                ahead.ask(then)
                await asyncio.sleep(0)  # so that it is under way before anything is stored
                self._check()
            cost = await self._store(reply)
            applier.committed = max(applier.committed, min(reply.committed, log.end.log_id))
            if log.end.log_id >= reply.end and len(reply.data) < NEAR_BYTES:
                return
            grown, end = reply.end - (end or reply.end), reply.end
            await self._rest(cost, gains=log.end.log_id - first >= 2 * grown)

    async def _store(self, reply: pb.FetchReply) -> int:
        """Append what came; what it cost, in bytes."""
        follower, log = self._follower, self._follower.log
        cost = turn = 0
        for entry, data, raw in copying.batches(reply.entries, reply.data):
            last = log.last
            try:
                log.append_copy(entry, data, raw)
            except LogCorrupt:
                follower.leader_log.compare([entry], log, last)
                raise
            if entry.lost:
                follower.applier.on_damage(entry.log_id, entry.log_id + 1)  # a replica that has more may give it
            if log.needs_roll:
                await self._files.roll(follower)
                self._check()
            cost += max(entry.size, BATCH_COST_MIN)
            if cost - turn >= SLICE_COST:
                turn = cost
                await asyncio.sleep(0)
                self._check()
        return cost

    async def _rest(self, cost: int, *, gains: bool) -> None:
        """`gains`: we come nearer although we rest."""
        if not gains or self._files.waited_for(self._follower):
            return
        if seconds := self._pace.done(cost, asyncio.get_running_loop().time()):
            await asyncio.sleep(seconds)
            self._check()

    # ---- asking

    def _request(self, request: Any) -> Any:
        request.cluster_id = self._cluster_id
        request.key.CopyFrom(self._follower.wire_key)
        request.epoch = self._follower.epoch
        return request


def _epoch_end(log: LogReader, epoch: int) -> EpochEndAnswer:
    found = copying.epoch_end(log, epoch)
    return EpochEndAnswer(found.epoch, found.end, found.chain, log.start.log_id)


class _Ahead:
    """The question to the leader that is asked while the answer to the one before is stored: the leader reads and sends
    meanwhile. At most one is under way."""

    def __init__(self, fetch: Callable[[int], Coroutine[Any, Any, pb.FetchReply]]) -> None:
        self._fetch = fetch
        self._first = -1
        self._asked: asyncio.Task[pb.FetchReply] | None = None

    def ask(self, first: int) -> None:
        self._first, self._asked = first, awaited(asyncio.get_running_loop(), self._fetch(first))

    async def reply(self, first: int) -> pb.FetchReply:
        """The answer for the batches from `first` on, whether it was asked for before or not."""
        if self._first != first:
            self.drop()
        asked, self._asked, self._first = self._asked, None, -1
        if asked is None:
            return await self._fetch(first)
        try:
            return await asked
        except asyncio.CancelledError:
            asked.cancel()
            raise

    def drop(self) -> None:
        """No answer is wanted any more."""
        asked, self._asked, self._first = self._asked, None, -1
        if asked is not None:
            asked.cancel()
