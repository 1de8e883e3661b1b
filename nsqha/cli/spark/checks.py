"""Checks of `nsqha spark` before Spark starts: is this a lake, may it become one, does the topic exist."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nsqha.cli.spark.flags import connection
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import did_you_mean

if TYPE_CHECKING:
    from pyspark_nsqha.model import ReadFailed


def check_lake(uri: str) -> None:
    """Raise Exit if there is no lake at `uri`, or if it cannot be read."""
    from pyspark_nsqha.lake.store import Store, StoreFailed

    try:
        found = _is_lake(Store(uri))
    except StoreFailed as error:
        raise exits.Exit(exits.FAILED, str(error)) from None
    if not found:
        text = f"{uri} is not a lake: it has no manifest; nsqha spark archive --to makes one"
        raise exits.Exit(exits.NOT_FOUND, text)


def _is_lake(store: Any) -> bool:
    from pyspark_nsqha.lake import names

    paths = (file.path for file in store.list(names.MANIFEST))
    return any(path == names.OF_TABLE or names.parse_manifest(path) is not None for path in paths)


def check_target(store: Any) -> None:
    """Raise Exit if a folder has files and is not a lake: they may be a broker's. Raises StoreFailed."""
    if _is_lake(store):
        return
    folder = store.local
    if folder is None:
        return
    try:
        others = not _only_ours(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise exits.Exit(exits.FAILED, f"{folder} cannot be a lake: {(error.strerror or str(error)).lower()}") from None
    if others:
        raise exits.Exit(exits.FAILED, f"{folder} is not empty and is not a lake; name an empty folder")


def _only_ours(folder: str) -> bool:
    """Whether the folder has only what an interrupted first run leaves there."""
    from pyspark_nsqha.lake import names

    ours = {names.DATA, names.MANIFEST, names.PLAN, names.REPLACED, names.TEMPORARY, names.VOTES}
    if not set(os.listdir(folder)) <= ours:
        return False
    data = os.path.join(folder, names.DATA)
    return not os.path.isdir(data) or all(name.startswith("topic=") for name in os.listdir(data))


def status_of(error: ReadFailed) -> int:
    """The exit status that says why something could not be read."""
    from pyspark_nsqha.model import NoBroker, NotThere

    if isinstance(error, NotThere):
        return exits.NOT_FOUND
    return exits.UNREACHABLE if isinstance(error, NoBroker) else exits.FAILED


@contextmanager
def near_misses(args: argparse.Namespace, topics: Iterable[str]) -> Iterator[None]:
    """Add a suggestion to the error about a topic that does not exist."""
    from pyspark_nsqha.model import ReadFailed
    from pyspark_nsqha.snapshot import Segments, SnapshotRequest

    try:
        yield
    except (exits.Exit, ReadFailed) as error:
        if "there is no topic" not in str(error):
            raise
        try:
            known = {
                pin.identity.topic for pin in Segments(connection(args)).snapshot(SnapshotRequest(pattern=".*")).pins
            }
        except ReadFailed:
            known = set()
        near = [did_you_mean(topic, sorted(known)) for topic in topics if topic not in known]
        raise exits.Exit(exits.NOT_FOUND, str(error) + "".join(near)) from None
