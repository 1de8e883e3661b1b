"""The data source "nsqha" for Spark 4.1 and newer: `spark.read.format("nsqha")`, `readStream`, `write`, `writeStream`.

    driver    load(): DefaultSource.__init__ --Snapshot--> what is committed, pinned; pickled into every later plan
    planner   reader() -> partitions(): ranges -> tasks        a Python process beside the driver, once per DataFrame
    task      read(): fetch -> verify -> scan -> Arrow batches

Spark imports every package whose name begins with `pyspark_` when it looks up its first data source, in every
application: this module imports nothing, and everything else when it is asked for. So modules that need no Spark, as
those that `nsqha spark lag` is made of, work where pyspark is not installed.

How Spark treats the object decides what is pinned where: what __init__ made is in every plan of one load() (a join of a
DataFrame with itself sees the same messages), and with a schema given by the user nothing but __init__ is called. So
the snapshot is taken there, once. It is not pickled into tasks.

Downwards:

    source            one class that reads and writes, for `format("nsqha")`
    stream            the stream source
    stream_witnesses  whether the log is the one that a checkpoint was made with
    stream_offsets    what a stream has read, as the checkpoint keeps it
    replay            messages of the log to another topic once more
    replay_task       what a task of a replay does
    batch             the batch source: pin, plan, read
    sink              rows become messages
    replay_state      what a replay has sent
    publisher         publishing from one task
    lag               how far readers are behind
    jobs              Spark sessions for commands
    lake              Parquet files of the messages
    rows              the messages of a split as Arrow batches
    scan              verified batches to Arrow
    lanes             where frames begin
    columns           names and types of columns
    entries           entries of the commitlog, verified
    fetch             runs over HTTP
    files             runs from files
    runs              the batches of a split, some at a time
    planner           what is read, and how tasks share it
    snapshot          the client of the segment service
    options           what a user may say
    model             what a job knows of the log: plain values
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_nsqha.source import DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> Any:
    """Spark asks for DefaultSource, and whoever registers it."""
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyspark_nsqha.source import DefaultSource

    return DefaultSource
