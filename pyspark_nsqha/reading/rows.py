"""The messages of a split as Arrow batches: fetched, verified, counted.

    fetch.runs --Run--> entries.verify --Entries--> scan.record_batches --> count --> (wanted ones) --> Spark
         ^                    |                            |
         +--- another replica, where something does not verify or is missing -----+

Every run is first read in the strictest way. What does not verify, or is marked lost, is requested from another
replica; only when no other one has it right, the user's `mode` and `failOnDataLoss` decide what happens.

Invariant: rows + messages counted as missing = `end - first` of the split, or an error. No row is outside of the split.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa

from pyspark_nsqha.model import FetchedRun, Gone, NotVerified, PinnedPartition, ReadFailed, Split, Unreadable
from pyspark_nsqha.options import ConnectOptions, Reading
from pyspark_nsqha.planner import SplitPart, left_of
from pyspark_nsqha.reading.columns import CORRUPT
from pyspark_nsqha.reading.entries import Entries, verify
from pyspark_nsqha.reading.fetch import runs
from pyspark_nsqha.reading.runs import Runs
from pyspark_nsqha.reading.scan import MissingRange, OnBad, record_batches
from pyspark_nsqha.snapshot import Segments, SnapshotRequest

logger = logging.getLogger(__name__)

ON_BAD: Final[dict[str, OnBad]] = {"FAILFAST": "fail", "PERMISSIVE": "corrupt", "DROPMALFORMED": "drop"}
REPLANS_MAX: Final = 3  # of one split, after retention has removed a part of it


@dataclass(frozen=True)
class Recipe:
    """How a task makes rows: small, as every task gets it."""

    columns: tuple[str, ...]
    reading: Reading
    connection: ConnectOptions | None  # None: files


def part_batches(part: SplitPart, recipe: Recipe) -> Iterator[pa.RecordBatch]:
    """The rows of a part. ReadFailed and its kinds, with one line."""
    if part.wanted is None:
        yield from SplitRows(part.split, recipe).batches()
        return
    columns = tuple(dict.fromkeys((*recipe.columns, "offset")))
    wanted = np.array(part.wanted, np.int64)
    for batch in SplitRows(part.split, replace(recipe, columns=columns)).batches():
        kept = np.isin(batch.column("offset").to_numpy(), wanted, assume_unique=True)
        if CORRUPT in columns:
            kept |= batch.column(CORRUPT).is_valid().to_numpy(zero_copy_only=False)
        if kept.any():
            yield batch.filter(pa.array(kept)).select(list(recipe.columns))


class SplitRows:
    """Turns one split into rows, once."""

    def __init__(self, split: Split, recipe: Recipe) -> None:
        self._split = split
        self._recipe = recipe
        self._next = split.first  # all messages before are rows, or counted as missing
        self._rows = 0
        self._missing: Counter[str] = Counter()  # messages, by reason
        self._corrupt_rows = 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows of the split, in order of offsets."""
        split: Split | None = self._split
        replans = 0
        while split is not None:
            try:
                yield from self._through(split)
                break
            except Gone as gone:
                if self._recipe.reading.fail_on_data_loss or self._recipe.connection is None or replans == REPLANS_MAX:
                    raise
                replans += 1
                split = self._after(gone, split, self._recipe.connection)
        self._account()

    def _through(self, split: Split) -> Iterator[pa.RecordBatch]:
        connection = self._recipe.connection
        reading = self._recipe.reading
        if connection is None:
            source = runs(split, run_bytes=reading.batch_bytes)
        else:
            source = runs(
                split,
                run_bytes=reading.batch_bytes,
                tls=connection.tls,
                timeout_seconds=connection.timeout_ms / 1000,
                retries=connection.retries,
                host=connection.host,
            )
        before: bytes | None = None
        try:
            for run in source:
                found = self._verified(split, run, before, source)
                if found is None:
                    continue
                entries, batches, missing = found
                before = entries.last
                for batch in batches:
                    self._rows += batch.num_rows
                    yield batch
                for gap in missing:
                    self._miss(gap)
                self._next = max(self._next, min(entries.end_offset, split.end))
        finally:
            # Spark's LIMIT closes the generator before its end.
            source.close()

    def _verified(
        self, split: Split, run: FetchedRun, before: bytes | None, source: Runs
    ) -> tuple[Entries, Iterator[pa.RecordBatch], list[MissingRange]] | None:
        """A run as rows; None if another replica sends it again."""
        try:
            return self._read(split, run, before, strict=True)
        except (NotVerified, Unreadable) as error:
            if source.retry_other(str(error)):
                logger.warning("%s; trying another replica", error)
                return None
            lenient = ON_BAD[self._recipe.reading.mode] != "fail" or not self._recipe.reading.fail_on_data_loss
            if not lenient:
                raise
        return self._read(split, run, before, strict=False)

    def _read(
        self, split: Split, run: FetchedRun, before: bytes | None, *, strict: bool
    ) -> tuple[Entries, Iterator[pa.RecordBatch], list[MissingRange]]:
        """Verify and scan a run: every error is raised before the first batch is returned."""
        reading = self._recipe.reading
        on_bad = "fail" if strict else ON_BAD[reading.mode]
        entries = verify(
            run,
            split.identity,
            before,
            level=reading.verify,
            at=(split.at_log_id, split.chain),
            mark_bad=on_bad != "fail",
        )
        missing: list[MissingRange] = []
        batches = record_batches(
            run,
            entries,
            split.identity,
            columns=self._recipe.columns,
            first=split.first,
            end=split.end,
            bytes_max=reading.batch_bytes,
            on_bad=on_bad,
            skip_unreadable=not strict and not reading.fail_on_data_loss,
            missing=missing.append,
        )
        first = next(batches, None)
        return entries, batches if first is None else chain((first,), batches), missing

    def _miss(self, gap: MissingRange) -> None:
        self._missing[gap.why] += gap.end - gap.first
        if gap.why == "corrupt" and self._recipe.reading.mode == "PERMISSIVE":
            self._corrupt_rows += 1

    def _after(self, gone: Gone, split: Split, connection: ConnectOptions) -> Split | None:
        """What retention has left of a split; None: nothing. The same Gone if the topic was created again."""
        topic, _, partition, _ = split.identity
        asked = SnapshotRequest(
            topics=(topic,),
            ranges=((topic, partition, self._next, split.end),),
            hold_id=split.hold_id,
        )
        pins = Segments(connection).snapshot(asked).pins
        now: PinnedPartition | None = next((pin for pin in pins if pin.identity == split.identity), None)
        if now is None or now.start.offset <= self._next:
            raise gone
        self._missing["gone"] += min(now.start.offset, split.end) - self._next
        self._next = min(now.start.offset, split.end)
        return left_of(split, now, self._next)

    def _account(self) -> None:
        """Check that every message is a row or counted as missing. ReadFailed otherwise."""
        split = self._split
        where = f"{split.identity.topic}/{split.identity.partition}"
        planned = split.end - split.first
        missing = sum(self._missing.values())
        if self._rows - self._corrupt_rows + missing != planned:
            raise ReadFailed(
                f"{where}: offsets [{split.first}, {split.end}) are {planned} messages, but {self._rows} rows were "
                "read; this is a bug, please report it",
                planned=(split.first, split.end),
            )
        if missing:
            reasons = ", ".join(f"{count} {WHY[why]}" for why, count in sorted(self._missing.items()))
            logger.warning(
                "%s: of offsets [%d, %d) %d messages are left out: %s", where, split.first, split.end, missing, reasons
            )


WHY: Final = {
    "lost": "marked as lost by an operator",
    "faulty": "marked as lost by recovery",
    "corrupt": "in batches that do not verify",
    "gone": "removed by retention",
}
