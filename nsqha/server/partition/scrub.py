"""The slow scrub reads what no consumer reads, so that damage in old files is found before they are needed.

    round:  all file pairs of all durable replicas, shuffled -> a pair, piece by piece -> report -> next pair

A round looks at every committed batch once, with all checks of `commitlog.corruption.verify`; the next one begins no
sooner than `--scrub-interval` after it. Nothing is remembered over a restart, and each round draws its order again, so
a node that restarts often gets everywhere too.

A pair is read through files of its own (`LogReader.part`) in a thread of its own: a disk that takes its time over bad
sectors delays no sync, roll or journal write. The loop only waits, `--scrub-bytes-per-second` at most; a small batch
counts as `BATCH_BYTES_MIN`, because checking it costs more processor than disk. The page cache stays as it was
(`commitlog.readonce`).

What is found is judged on the loop, after the pair was read: if its replica was closed, its log begun anew, or the pair
taken by retention meanwhile, what was missing is no damage. Damage changes nothing here: the event `scrub_damage` is
for people, `on_damage` for the part that can repair the range, `on_bad_anchor` for the one that writes the anchor that
memory has; figures are in /stats and /metrics. A range counts as damaged until it was `mended`, its pair was found
good, or went.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from nsqha.commitlog.corruption.verify import VerifyStep, checks
from nsqha.commitlog.entry import BatchCorrupt, Place
from nsqha.commitlog.files.pairs import file_name
from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.readonce import ReadOnceStorage
from nsqha.commitlog.storage import Storage
from nsqha.nsqlog import Logger
from nsqha.server.runtime.measures import Measures

PIECE_BYTES = 1 << 20  # read at a time, unless one batch is larger
BATCH_BYTES_MIN = 4 << 10  # what a batch counts at least
START_SECONDS = 60.0  # before the first round: a node that has just started has more urgent things to read
PAUSE_SECONDS_MIN = 1.0  # between rounds, and after a pair that could not be read
LINES_MAX = 20  # of the log, per pair
WHAT_NOW = (
    "stop the node and restore both files of this name from a copy; or, once channels have stopped there, "
    "give the messages up with `nsqha log skip`"
)

logger = Logger("scrub")


@dataclass(frozen=True, slots=True)
class ScrubbedReplica:
    """A partition's log on this node, led here or followed."""

    topic: str
    partition: int
    log: PartitionLog
    committed: Callable[[], int]  # end of what is committed now, as a log id
    closed: Callable[[], bool]  # its files may go


class PairKey(NamedTuple):
    """A file pair of a replica."""

    topic: str
    partition: int
    directory: str
    position: int

    @property
    def path(self) -> str:
        """The path of both files, without what their names end in."""
        return f"{self.directory}/{file_name(self.position, '')}"


@dataclass(slots=True)
class BadBatches:
    """Neighbouring batches that do not verify."""

    first: Place
    end: Place
    why: str  # of the first of them


@dataclass(slots=True)
class ScrubVisit:
    """What one visit of the thread found."""

    size: int  # bytes of batches and of what could not be read
    cost: int  # the same, with small batches counted as BATCH_BYTES_MIN
    problems: list[BatchCorrupt]
    ended: bool


class Scrubber:
    """Reads the durable logs of one node, for as long as `run` runs."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[ScrubbedReplica]],
        *,
        bytes_per_second: int,
        interval_seconds: float,
        measures: Measures,
        rng: random.Random,
        storage: Storage | None = None,
        thread: Executor | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`replicas`: those of now. 0 bytes per second: `run` does nothing."""
        self.on_damage: Callable[[ScrubbedReplica, int, int], None] = lambda replica, first_log_id, end_log_id: None
        self.on_bad_anchor: Callable[[ScrubbedReplica, int], None] = lambda replica, first_log_id: None
        self.bytes_read = 0
        self.rounds = 0
        self._replicas = replicas
        self._rate = bytes_per_second
        self._interval = interval_seconds
        self._measures = measures
        self._rng = rng
        self._storage = storage or ReadOnceStorage()
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="scrub")
        self._sleep = sleep
        self._damage: dict[PairKey, list[BadBatches]] = {}

    @property
    def damage(self) -> dict[PairKey, list[BadBatches]]:
        """What the last look at each pair that is still here found; pairs without damage are left out."""
        if self._damage:
            here = {key for key, _ in self._pairs()}
            self._damage = {key: found for key, found in self._damage.items() if key in here}
        return self._damage

    def mended(self, log: PartitionLog, first: int, end: int) -> None:
        """Log ids [first, end) of this log verify again: they are damaged no more."""
        for key in [key for key in self._damage if key.directory == log.directory]:
            left = [part for damage in self._damage[key] for part in _without(damage, log, first, end)]
            if left:
                self._damage[key] = left
            else:
                del self._damage[key]

    def _pairs(self) -> list[tuple[PairKey, ScrubbedReplica]]:
        return [
            (PairKey(replica.topic, replica.partition, replica.log.directory, pair.first.position), replica)
            for replica in self._replicas()
            for pair in replica.log.pairs
        ]

    async def run(self) -> None:
        """Go round, until cancelled."""
        loop = asyncio.get_running_loop()
        if self._rate:
            await self._sleep(min(START_SECONDS, self._interval))
        while self._rate:
            started = loop.time()
            await self._round()
            self.rounds += 1
            await self._sleep(max(started + self._interval - loop.time(), PAUSE_SECONDS_MIN))

    def close(self) -> None:
        """After `run` has ended: wait for the piece that is being read."""
        self._thread.shutdown(wait=True)

    async def _round(self) -> None:
        pairs = self._pairs()
        self._rng.shuffle(pairs)
        for key, replica in pairs:
            try:
                await self._read_pair(key, replica)
            except Exception as error:
                # One pair's trouble is not that of the others; too many open files, for example, will pass.
                logger.warning(
                    "scrub_failed", "SCRUB: %s was not read to its end: %s; the next round tries again", key.path, error
                )
                await self._sleep(PAUSE_SECONDS_MIN)

    async def _read_pair(self, key: PairKey, replica: ScrubbedReplica) -> None:
        found: list[BadBatches] = []
        try:
            if replica.closed():
                return
            part = replica.log.part(key.position, replica.committed(), self._storage)
        except BatchCorrupt as problem:  # there is no saying where the part ends
            part = None
            _join(found, [problem])
        if part is not None:
            steps = checks(part, part.start.log_id, part.end.log_id)
            while True:
                piece = await asyncio.get_running_loop().run_in_executor(self._thread, self._next_piece, steps)
                self.bytes_read += piece.size
                _join(found, piece.problems)
                if _gone(replica, key):
                    return
                await self._sleep(piece.cost / self._rate)
                if piece.ended:
                    break
        if not _gone(replica, key):
            self._judge(key, replica, found)

    def _next_piece(self, steps: Iterator[VerifyStep]) -> ScrubVisit:
        """Check about `PIECE_BYTES`, but not more than a second's worth; in the thread."""
        cost_max = min(PIECE_BYTES, self._rate)
        piece = ScrubVisit(0, 0, [], ended=True)
        for checked in steps:
            size = checked.size
            if checked.problem is not None:
                piece.problems.append(checked.problem)
                size = checked.problem.end.position - checked.problem.first.position
            piece.size += size
            piece.cost += max(size, BATCH_BYTES_MIN)
            if piece.cost >= cost_max:
                piece.ended = False
                break
        return piece

    def _judge(self, key: PairKey, replica: ScrubbedReplica, found: list[BadBatches]) -> None:
        self._damage.pop(key, None)
        if not found:
            return
        self._damage[key] = found
        self._measures.log_events["scrub_damage"] += len(found)
        for damage in found[:LINES_MAX]:
            logger.error(
                "scrub_damage",
                "SCRUB: %s/%d is damaged: log ids [%d, %d), offsets [%d, %d) in %s: %s; %s",
                key.topic, key.partition, damage.first.log_id, damage.end.log_id, damage.first.offset,
                damage.end.offset, key.path, damage.why, WHAT_NOW,
                topic=key.topic, partition=key.partition, directory=key.directory,
                first_log_id=damage.first.log_id, end_log_id=damage.end.log_id,
                first_offset=damage.first.offset, end_offset=damage.end.offset, why=damage.why, what_now=WHAT_NOW,
            )  # fmt: skip
        if len(found) > LINES_MAX:
            text = "SCRUB: %s: %d more damaged ranges; `nsqha log verify` lists them all"
            logger.error("scrub_damage_more", text, key.path, len(found) - LINES_MAX)
        first = next(pair.first.log_id for pair in replica.log.pairs if pair.first.position == key.position)
        if found[0].first.log_id < first:  # what the anchor is a copy of is another pair's, and may be good
            self.on_bad_anchor(replica, first)
        for damage in found:
            if first < damage.end.log_id:
                self.on_damage(replica, max(first, damage.first.log_id), damage.end.log_id)


def _join(found: list[BadBatches], problems: Iterable[BatchCorrupt]) -> None:
    """Add problems, in the order of the log, as ranges that do not touch: a file of zeros is one, not 200,000."""
    for problem in problems:
        if found and problem.first.log_id <= found[-1].end.log_id:
            found[-1].end = max(found[-1].end, problem.end)
        else:
            found.append(BadBatches(problem.first, problem.end, problem.why))


def _without(damage: BadBatches, log: PartitionLog, first: int, end: int) -> list[BadBatches]:
    """What is left of a range when [first, end) of it is good; it ends and begins at batches that verify now."""
    if end <= damage.first.log_id or damage.end.log_id <= first:
        return [damage]
    left = []
    if damage.first.log_id < first:
        entry = log.entry(first)
        left.append(BadBatches(damage.first, Place(first, entry.first_offset, entry.position), damage.why))
    if end < damage.end.log_id:
        entry = log.entry_before(end)
        left.append(BadBatches(Place(end, entry.end_offset, entry.end_position), damage.end, damage.why))
    return left


def _gone(replica: ScrubbedReplica, key: PairKey) -> bool:
    """Whether the pair's files may have been unlinked meanwhile: then what was read of them says nothing."""
    # A follower that is too far behind closes its log and begins another one, in the same folder.
    return replica.closed() or replica.log.closed or key.position < replica.log.start.position
