"""The names of a lake's files.

    <lake>/data/topic=<topic>/day=<UTC day>/<topic uid>-<partition>-<first>-<end>.parquet
    <lake>/data/../..-<end>.<tag>.merged.parquet   several files of a day in one: `compact` made it
    <lake>/manifest/<sequence>.json            what one commit added
    <lake>/manifest/<sequence>.base.json       all that was committed up to there
    <lake>/vote/<sequence>/..                  votes on that sequence, in an object store (lake.agree)
    <lake>/manifest/table                      the name of the Iceberg table that has the commits
    <lake>/plan/<run>-<sequence>.json          what a run was about to commit after that sequence
    <lake>/replaced/<run>-<tag>.json           files that are merged into others, and how long they are kept
    <lake>/tmp/<run>-..                        what is being written

Topic uids are 16 hex digits, partitions 5 digits, offsets and sequences 20: names sort as their numbers do. The name of
a data file says all of its content, so a run that writes these messages again writes the same file. The name of a
merged file has a unique tag: what a dead run left can be removed without harm to a run that merges the same again.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

DATA, MANIFEST, PLAN, REPLACED, TEMPORARY = "data", "manifest", "plan", "replaced", "tmp"
VOTES = "vote"
OF_TABLE = f"{MANIFEST}/table"
DAY_NS = 24 * 3600 * 10**9
_DATA = re.compile(
    r"data/topic=([.a-zA-Z0-9_-]{1,64})/day=(\d{4}-\d\d-\d\d)/([0-9a-f]{16})-(\d{5})-(\d{20})-(\d{20})(?:\.([0-9a-z]{1,32})\.merged)?\.parquet"
)
_MANIFEST = re.compile(r"(?:manifest/)?(\d{20})(\.base)?\.json")


class DataName(NamedTuple):
    """The parsed name of a data file."""

    topic: str
    day: str
    topic_uid: int
    partition: int
    first: int
    end: int
    merged: str = ""  # the tag of a file that was merged from several

    @property
    def path(self) -> str:
        """The path relative to the lake."""
        ours = f"{self.topic_uid:016x}-{self.partition:05d}-{self.first:020d}-{self.end:020d}"
        tag = f".{self.merged}.merged" if self.merged else ""
        return f"{day_folder(self.topic, self.day)}/{ours}{tag}.parquet"


def parse_data(path: str) -> DataName | None:
    """The parsed path; None if it is not that of a data file."""
    found = _DATA.fullmatch(path)
    if found is None:
        return None
    topic, day, uid, partition, first, end, merged = found.groups()
    return DataName(topic, day, int(uid, 16), int(partition), int(first), int(end), merged or "")


def day_folder(topic: str, day: str) -> str:
    return f"{DATA}/topic={topic}/day={day}"


def day_of(timestamp_ns: int) -> str:
    """The UTC day, as 2026-11-23."""
    return datetime.fromtimestamp(timestamp_ns // 10**9, UTC).strftime("%Y-%m-%d")


def day_start(day: str) -> int:
    """The first nanosecond of a day since 1970. ValueError if it is not a day."""
    return int(datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp()) * 10**9


def days_between(first_ns: int, last_ns: int) -> list[str]:
    """The UTC days from that of the first time to that of the last."""
    first, last = first_ns // DAY_NS, last_ns // DAY_NS
    return [day_of(day * DAY_NS) for day in range(first, last + 1)]


def manifest(sequence: int) -> str:
    return f"{MANIFEST}/{sequence:020d}.json"


def base(sequence: int) -> str:
    return f"{MANIFEST}/{sequence:020d}.base.json"


def parse_manifest(name: str) -> tuple[int, bool] | None:
    """The sequence, and whether it is a base; None if the name is not that of a manifest."""
    found = _MANIFEST.fullmatch(name)
    return (int(found[1]), found[2] is not None) if found else None


def votes(path: str) -> str:
    """The folder of the votes about a file."""
    return f"{VOTES}/{path.rpartition('/')[2].removesuffix('.json')}"


def plan(run: str, sequence: int) -> str:
    return f"{PLAN}/{run}-{sequence:020d}.json"


def run_of_plan(path: str) -> str:
    return path.rpartition("/")[2].rpartition("-")[0]


def run_of_temporary(path: str) -> str:
    return path.rpartition("/")[2].partition("-")[0]


def replaced(run: str, tag: str) -> str:
    return f"{REPLACED}/{run}-{tag}.json"
