"""Bugs that only a real process can have, or that no other body of mutants has: files of the operating system, clocks.

Those of replication, damage, operations and channels are where they were planted first, in `tests.sim.planted_*` and
`tests.unit.cursor.mutants`; `tests.jepsen.planted.bugs` names each in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.storage import OsDirectory, OsFile, OsStorage
from nsqha.cursor.committed.state import Undo
from nsqha.cursor.live.unread import UnreadLog
from nsqha.cursor.partition import PartitionCursors
from nsqha.cursor.passing import PassingChannels
from nsqha.election.controller.failed_leaders import FailedLeaders
from nsqha.replication.silence import LookTimes
from nsqha.server.node.cluster.folder_life import FolderLife
from nsqha.server.replica.leader_roles import LeaderRoles
from tests.mutation import Mutant, Patch, Suite, instead

Make = Callable[[], list[Patch]]


def _attempt(mutant: Mutant[None], seed: int) -> str | None:
    raise NotImplementedError("python -m tests.jepsen.planted looks for it")


SUITE: Suite[None] = Suite("tests.jepsen.planted.plants", _attempt, runs=1)


def plant(rule: str) -> Callable[[Make], Make]:
    """Break this rule."""
    return lambda make: SUITE.add(make, rule, None)


# ---- files

ROUNDS_CALL_SYNC = instead(OsFile, "synced", lambda self: None)  # else threads without Python sync the files of a round


@plant("names are durable when their directory is")
def directories_not_synced_by_the_process() -> list[Patch]:
    return [
        instead(OsDirectory, "sync", lambda self: None),
        instead(OsStorage, "sync_dir", lambda self, path: None),
    ]


@plant("what is written is durable when the disk says so")
def nothing_is_synced() -> list[Patch]:
    return [instead(OsFile, "sync", lambda self: None), ROUNDS_CALL_SYNC]


@plant("a data directory that was put back is not trusted")
def older_copy_trusted() -> list[Patch]:
    def begin(self: FolderLife) -> None:
        stored = self._uses.read(self._node)
        uses = max(self._journal.identity.uses, 0 if stored is None else stored.uses) + 1
        self._journal.node.stage_uses(uses)
        self._store(uses)

    return [instead(FolderLife, "begin", begin)]


# ---- clocks


@plant("time in a log never goes back")
def clock_unclamped() -> list[Patch]:
    append = PartitionLog.append

    def wrong(self: PartitionLog, *arguments: Any, timestamp_ns: int, **fields: Any) -> Any:
        # The log's own assertion is off, so that what is found is the harm.
        last = self.files.last
        allowed = max(timestamp_ns, last.timestamp_ns)
        return append(self, *arguments, timestamp_ns=allowed, **fields)

    return [
        instead(PartitionLog, "next_timestamp", lambda self, wall_ns: wall_ns),
        instead(PartitionLog, "append", wrong),
    ]


@plant("a witness that ran late counts anew")
def own_stall_counted() -> list[Patch]:
    return [instead(LookTimes, "late", lambda self, now: False)]


# ---- records and elections


@plant("a leader reads its record linearizably before it leads")
def watch_trusted() -> list[Patch]:
    lead = LeaderRoles.lead

    async def wrong(self: LeaderRoles, known: Any, number: int, *, written: bool = False) -> None:
        await lead(self, known, number, written=True)

    return [instead(LeaderRoles, "lead", wrong)]


@plant("who was elected and did not lead comes last")
def failed_candidate_forgotten() -> list[Patch]:
    return [instead(FailedLeaders, "last", lambda self, name, nodes, now: frozenset())]


# ---- channels


@plant("a FIN is in the log")
def fin_forgotten_at_failover() -> list[Patch]:
    take = PartitionCursors._take_progress

    def wrong(self: PartitionCursors, parts: list[bytes], now: Any) -> Any:
        aside: list[bytes] = []  # what is deferred is forgotten with it, and comes again likewise
        return take(self, aside, now)

    return [instead(PartitionCursors, "_take_progress", wrong)]


@plant("a message goes by its ttl when it is older than that")
def ttl_drops_everything_at_once() -> list[Patch]:
    expire = PassingChannels.expire

    def wrong(self: PassingChannels, wall_ns: int, first_since: Callable[[int], int]) -> bool:
        return expire(self, wall_ns, lambda time_ns: first_since(1 << 62))

    return [instead(PassingChannels, "expire", wrong)]


@plant("a channel keeps as many unread messages as its policy says")
def depth_is_half_of_what_was_said() -> list[Patch]:
    beyond = UnreadLog.beyond
    return [instead(UnreadLog, "beyond", lambda self, end, most: beyond(self, end, most // 2))]


@plant("an undo defers again what the seek dropped")
def undo_without_deferred() -> list[Patch]:
    return [instead(Undo, "returning", lambda self, log_start: [])]
