"""The data source "nsqha" for Spark 4.1 and newer: `spark.read.format("nsqha")`, `readStream`, `write`, `writeStream`.

    driver    load(): DefaultSource.__init__ --Snapshot--> what is committed, pinned; pickled into every later plan
    planner   reader() -> partitions(): ranges -> tasks        a Python process beside the driver, once per DataFrame
    task      read(): fetch -> verify -> scan -> Arrow batches

Spark imports every package whose name begins with `pyspark_` when it looks up its first data source, in every
application: this module imports nothing at first, and everything else on demand. So modules that need no Spark, such as
those of `nsqha spark lag`, work where pyspark is not installed.

How Spark treats the object decides where the snapshot is pinned: what __init__ made is in every plan of one load() (a
join of a DataFrame with itself sees the same messages), and with a schema given by the user only __init__ is called. So
the snapshot is taken there, once. It is not pickled into tasks.

Downwards:

    source    one class that reads and writes, for `format("nsqha")`
    streams   the stream source, its offsets, and the check that the log is still the same one
    writing   jobs that publish: the sink, and replays
    batch     the batch source: pin, plan, read
    lag       how far readers are behind
    jobs      Spark sessions for commands
    lake      Parquet files of the messages
    reading   what a task does with a split: fetch, verify, make Arrow batches
    planner   what is read, and how it is divided into tasks
    snapshot  the client of the segment service
    token     what is shown to brokers with an access file
    options   the options that a user may set
    model     the plain values of a job
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_nsqha.source import DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> Any:
    """Import DefaultSource on demand, for Spark or a caller that registers it."""
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyspark_nsqha.source import DefaultSource

    return DefaultSource
