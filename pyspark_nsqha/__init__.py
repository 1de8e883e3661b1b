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
