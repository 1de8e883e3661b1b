"""What the scan of a Spark task costs, without Spark: CPU seconds per GB of frames, verified.

    python -m benchmarks.spark_scan [--mb 300] [--run-mb 2] [--repeat 3]

Messages are half-random JSON of 600 bytes, in batches as a broker writes them from MPUBs of eight connections (770
messages) and from single PUBs of few (2). Runs are copied into one buffer that is used again, as a task that reads from
a socket does; the copy is measured by itself and taken off. Exit 1 if all columns cost more than 1.0 CPU-s per GB in
large batches, 2.0 in small ones.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from nsqha import hot
from nsqha.commitlog.entry import ENTRY_BYTES, genesis, next_entry
from pyspark_nsqha.model import FetchedRun, PartitionLife
from pyspark_nsqha.reading.columns import DEFAULT
from pyspark_nsqha.reading.entries import verify
from pyspark_nsqha.reading.scan import record_batches

GB = 1e9
BODY_BYTES = 600
BOUNDS = {770: 1.0, 2: 2.0}
IDENTITY = PartitionLife("orders", 7, 0, 1 << 30)
COLUMNS = {"all columns": DEFAULT, "value": ("value",), "offset": ("offset",)}


class Borders(NamedTuple):
    """Where a run lies in the two files."""

    first_log_id: int
    entries: slice
    frames: slice


class Log(NamedTuple):
    """A partition in memory."""

    entries: bytes
    frames: bytes
    runs: list[Borders]


def bodies(rng: random.Random) -> Iterator[bytes]:
    """JSON of which half cannot be compressed."""
    number = 0
    while True:
        number += 1
        noise = base64.b64encode(rng.randbytes(225)).decode()
        text = json.dumps({"order": number, "customer": rng.randrange(10**6), "state": "shipped", "noise": noise})
        fill = BODY_BYTES - len(text) - len(', "note": ""')
        yield (text[:-1] + f', "note": "{("all good so far " * 40)[:fill]}"}}').encode()


def make(size: int, per_batch: int, run_bytes: int) -> Log:
    """A log of about so many bytes of frames, divided into runs of whole batches."""
    source = bodies(random.Random(1))
    pool = [hot.frame(next(source)) for _ in range(20000)]
    last = genesis(IDENTITY.topic_uid, IDENTITY.partition)
    entries, frames, runs = bytearray(), bytearray(), []
    first, entries_at, frames_at = 1, 0, 0
    at = 0
    while len(frames) < size:
        data = bytearray(b"".join(pool[(at + n) % len(pool)] for n in range(per_batch)))
        at += per_batch
        timestamp_ns = 1_800_000_000_000_000_000 + last.log_id * 1_000_003
        hot.stamp(data, 0, IDENTITY.id_base + last.end_offset, timestamp_ns)
        last, raw = next_entry(
            last, data, count=per_batch, flags=0, timestamp_ns=timestamp_ns, epoch=1, durable=last.log_id
        )
        if len(frames) + len(data) - frames_at > run_bytes and len(frames) > frames_at:
            runs.append(Borders(first, slice(entries_at, len(entries)), slice(frames_at, len(frames))))
            first, entries_at, frames_at = last.log_id, len(entries), len(frames)
        entries += raw
        frames += data
    runs.append(Borders(first, slice(entries_at, len(entries)), slice(frames_at, len(frames))))
    return Log(bytes(entries), bytes(frames), runs)


def copies(log: Log) -> Iterator[FetchedRun]:
    """The runs, each in the same buffers."""
    frames = bytearray(max(run.frames.stop - run.frames.start for run in log.runs))
    entries = bytearray(max(run.entries.stop - run.entries.start for run in log.runs))
    source_frames, source_entries = memoryview(log.frames), memoryview(log.entries)
    into_frames, into_entries = memoryview(frames), memoryview(entries)
    for run in log.runs:
        size, slots = run.frames.stop - run.frames.start, run.entries.stop - run.entries.start
        into_frames[:size] = source_frames[run.frames]
        into_entries[:slots] = source_entries[run.entries]
        yield FetchedRun(run.first_log_id, into_entries[:slots], into_frames[:size])


def copy(log: Log) -> int:
    """What is not the scan's."""
    return sum(len(run.frames) for run in copies(log))


def scan(log: Log, columns: tuple[str, ...]) -> int:
    """How many rows there are."""
    rows = 0
    before = None
    for run in copies(log):
        entries = verify(run, IDENTITY, before)
        before = entries.last
        for batch in record_batches(run, entries, IDENTITY, columns=columns, first=0, end=1 << 62):
            rows += batch.num_rows
    return rows


def cpu_seconds(work: Callable[[], object], repeat: int) -> float:
    """Of the best of several times."""
    best = float("inf")
    for _ in range(repeat):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(description="CPU seconds per GB of a verified scan")
    parser.add_argument("--mb", type=int, default=300, help="bytes of frames per log, in MB")
    parser.add_argument("--run-mb", type=float, default=2.0, help="bytes of frames per run, in MiB")
    parser.add_argument("--repeat", type=int, default=3, help="times that each scan is done; the best counts")
    asked = parser.parse_args(argv)
    print(f"hot path: {hot.ACTIVE}; load {os.getloadavg()[0]:.1f}; runs of {asked.run_mb} MiB")
    print(f"{'messages per batch':>20}  {'columns':<12} {'CPU-s/GB':>9} {'bound':>6}")
    worse = False
    for per_batch, bound in BOUNDS.items():
        log = make(asked.mb * 1_000_000, per_batch, int(asked.run_mb * (1 << 20)))
        rows = len(log.entries) // ENTRY_BYTES * per_batch
        copying = cpu_seconds(partial(copy, log), asked.repeat)
        for name, columns in COLUMNS.items():
            assert scan(log, columns) == rows
            cost = (cpu_seconds(partial(scan, log, columns), asked.repeat) - copying) / (len(log.frames) / GB)
            over = name == "all columns" and cost > bound
            worse |= over
            limit = f"{bound:.1f}" if name == "all columns" else ""
            print(f"{per_batch:>20}  {name:<12} {cost:>9.2f} {limit:>6}{'  over' if over else ''}", flush=True)
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
