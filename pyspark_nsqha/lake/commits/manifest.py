"""The contents of one manifest, and of all manifests of a lake together.

    {"crc": "<crc32 of the canonical JSON of "manifest">",
     "manifest": {"format": 1, "sequence": 7, "written_ns": .., "run": "..",
                  "files": [LakeFile..], "missing": [Missing..], "replaced": [path..], "cluster": "..."}}

A file has all messages [first, end) of one partition: where some could not be read, the file ends before them, a
`Missing` says why, and the next file begins after them. Nothing overlaps, and nothing is taken back: a file that
replaces others has all of their messages.

    batches      .. | b 41 | b 42 | b 43 | b 44 | ..
    log ids            [first_log_id .. end_log_id)
    chains     chain_before               chain        of b 40 and of b 43

(log id, chain) identifies the whole log up to there, and a file's entries were verified from the one chain to the other
when it was written. So files whose chains meet are one unbroken part of one log, whichever nodes led it.

Numbers that are identifiers (uids, chains, checksums) are hex digits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any, NamedTuple

from pyspark_nsqha.lake import names
from pyspark_nsqha.model import PartitionLife

FORMAT = 1
RETENTION, UNREADABLE = "retention", "unreadable"
_HEX = {"topic_uid": 16, "chain": 16, "chain_before": 16, "crc": 8, "file_crc": 8}


class BadManifest(Exception):
    """A manifest is damaged, missing or of another format; the message names it."""


class Overlap(Exception):
    """Messages were about to be committed that the lake already has."""


class Life(NamedTuple):
    """One partition of one topic uid: a topic that was created again has another one."""

    topic: str
    topic_uid: int
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True)
class LakeFile:
    """One Parquet file."""

    topic: str
    topic_uid: int
    partition: int
    day: str
    first: int
    end: int
    rows: int
    bytes: int  # of the file
    first_timestamp_ns: int
    last_timestamp_ns: int
    id_base: int
    first_log_id: int
    end_log_id: int
    epoch: int  # of the last entry
    chain: int  # of the last entry
    flags: int  # of the last entry: after one that recovery wrote the chain is not expected to match
    chain_before: int | None  # of the entry before the first; None if it was not known
    crc: int  # of the values, by row groups (lake.parquet)
    file_crc: int  # crc32 of the file
    merged: str = ""  # the tag of a file that was merged from several

    @property
    def life(self) -> Life:
        return Life(self.topic, self.topic_uid, self.partition)

    @property
    def identity(self) -> PartitionLife:
        return PartitionLife(self.topic, self.topic_uid, self.partition, self.id_base)

    @property
    def path(self) -> str:
        """The path relative to the lake."""
        return names.DataName(
            self.topic, self.day, self.topic_uid, self.partition, self.first, self.end, self.merged
        ).path


@dataclass(frozen=True)
class Missing:
    """Messages [first, end) that could not be archived."""

    topic: str
    topic_uid: int
    partition: int
    first: int
    end: int
    reason: str

    @property
    def life(self) -> Life:
        return Life(self.topic, self.topic_uid, self.partition)


@dataclass(frozen=True)
class Addition:
    """What one commit adds."""

    files: tuple[LakeFile, ...] = ()
    missing: tuple[Missing, ...] = ()
    replaced: tuple[str, ...] = ()  # paths of files that these replace from now on
    cluster: str = ""  # whose log it is, if no manifest said so before; 16 hex digits

    def __bool__(self) -> bool:
        return bool(self.files or self.missing)


class OffsetRange(NamedTuple):
    """Offsets [first, end)."""

    first: int
    end: int


@dataclass(frozen=True)
class LakeState:
    """The content of the lake after a commit. Files and gaps of each life ascend."""

    sequence: int = 0
    files: dict[Life, tuple[LakeFile, ...]] = field(default_factory=dict)
    missing: dict[Life, tuple[Missing, ...]] = field(default_factory=dict)
    cluster: str = ""  # whose log it is, if a manifest says so

    def with_added(self, addition: Addition, sequence: int) -> LakeState:
        """The state after a commit. Overlap if a message would be recorded twice, in files or as missing, or if one
        would be lost."""
        files, missing = dict(self.files), dict(self.missing)
        if addition.replaced:
            self._take_out(addition, files)
        for life, new_files in _by_life(addition.files).items():
            files[life] = tuple(sorted((*files.get(life, ()), *new_files), key=_first))
        for life, new_gaps in _by_life(addition.missing).items():
            missing[life] = tuple(sorted((*missing.get(life, ()), *new_gaps), key=_first))
        for life in {*_by_life(addition.files), *_by_life(addition.missing)}:
            listed: list[LakeFile | Missing] = [*files.get(life, ()), *missing.get(life, ())]
            for a, b in pairwise(sorted(listed, key=_first)):
                if b.first < a.end:
                    raise Overlap(f"{life}: [{a.first}, {a.end}) and [{b.first}, {b.end}) overlap")
        return LakeState(sequence, files, missing, self.cluster or addition.cluster)

    def _take_out(self, addition: Addition, files: dict[Life, tuple[LakeFile, ...]]) -> None:
        """Remove the files that are replaced. Overlap if the new files do not have the same messages."""
        out = set(addition.replaced)
        for life in _by_life(addition.files):
            gone = [file for file in files.get(life, ()) if file.path in out]
            out -= {file.path for file in gone}
            mine = [file for file in addition.files if file.life == life]
            if not all(_covers(mine, file) for file in gone) or not all(_covers(gone, file) for file in mine):
                raise Overlap(f"{life}: the files that replace others do not have the same messages")
            files[life] = tuple(file for file in files.get(life, ()) if file not in gone)
        if out:
            raise Overlap(f"{min(out)} cannot be replaced: it is not in the lake any more")

    def covered(self, life: Life) -> list[OffsetRange]:
        """The ranges in files or recorded as missing: ascending, adjacent ones joined."""
        files = [OffsetRange(file.first, file.end) for file in self.files.get(life, ())]
        return joined([*files, *(OffsetRange(gap.first, gap.end) for gap in self.missing.get(life, ()))])

    def covered_from(self, life: Life, offset: int) -> int:
        """The end of what is covered without a gap from `offset` on; `offset` if nothing is."""
        for first, end in self.covered(life):
            if first <= offset < end:
                return end
        return offset

    def end(self, life: Life) -> int | None:
        """One past the last message of this life; None if there is none."""
        covered = self.covered(life)
        return covered[-1].end if covered else None

    def addition(self) -> Addition:
        """The whole state as one commit."""
        return Addition(
            tuple(file for files in self.files.values() for file in files),
            tuple(gap for gaps in self.missing.values() for gap in gaps),
            cluster=self.cluster,
        )


def joined(ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    """The union, ascending, in as few ranges as possible."""
    found: list[OffsetRange] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1].end:
            found[-1] = OffsetRange(found[-1].first, max(found[-1].end, end))
        elif first < end:
            found.append(OffsetRange(first, end))
    return found


def without(whole: OffsetRange, taken: Iterable[OffsetRange]) -> Iterator[OffsetRange]:
    """What is left of `whole`; `taken` is joined."""
    at = whole.first
    for first, end in taken:
        if first > at and at < whole.end:
            yield OffsetRange(at, min(first, whole.end))
        at = max(at, end)
    if at < whole.end:
        yield OffsetRange(at, whole.end)


def _by_life(items: Iterable[Any]) -> dict[Life, list[Any]]:
    found: dict[Life, list[Any]] = {}
    for item in items:
        found.setdefault(item.life, []).append(item)
    return found


def _first(row: LakeFile | Missing) -> int:
    return row.first


def _covers(files: Iterable[LakeFile], one: LakeFile) -> bool:
    """Whether these files have all messages of `one`."""
    return not list(
        without(OffsetRange(one.first, one.end), joined(OffsetRange(file.first, file.end) for file in files))
    )


# ---- as JSON


def encode(sequence: int, addition: Addition, *, written_ns: int, run: str) -> bytes:
    """The bytes of a manifest."""
    content = {
        "format": FORMAT,
        "sequence": sequence,
        "written_ns": written_ns,
        "run": run,
        "files": [record(file) for file in addition.files],
        "missing": [record(gap) for gap in addition.missing],
        "replaced": list(addition.replaced),
        "cluster": addition.cluster,
    }
    return json.dumps({"crc": _crc(content), "manifest": content}, separators=(",", ":")).encode() + b"\n"


def decode(raw: bytes, path: str) -> tuple[int, str, Addition]:
    """Sequence, run and what was added. BadManifest names `path`."""
    try:
        outer = json.loads(raw)
        content = outer["manifest"]
        if outer["crc"] != _crc(content):
            raise BadManifest(f"{path} does not verify (its checksum is wrong): restore it from a copy of the lake")
        if content["format"] != FORMAT:
            raise BadManifest(f"{path} has format {content['format']}; this program reads {FORMAT}: use a newer one")
        files = tuple(_read(LakeFile, row) for row in content["files"])
        missing = tuple(_read(Missing, row) for row in content["missing"])
        replaced = tuple(map(str, content["replaced"]))
        cluster = str(content.get("cluster", ""))
        return int(content["sequence"]), str(content["run"]), Addition(files, missing, replaced, cluster)
    except (ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise BadManifest(f"{path} is not a manifest ({why}): restore it from a copy of the lake") from None


def record(row: LakeFile | Missing) -> dict[str, Any]:
    """A row in its JSON form."""
    shown = asdict(row)
    return {
        name: f"{value:0{_HEX[name]}x}" if name in _HEX and value is not None else value
        for name, value in shown.items()
    }


def _read(kind: type[Any], row: dict[str, Any]) -> Any:
    values = {}
    for one in fields(kind):
        value = row[one.name]
        if one.name in _HEX and value is not None:
            value = int(value, 16)
        kind_of = str if one.name in ("topic", "day", "reason", "merged") else int
        if not isinstance(value, kind_of) and not (value is None and one.name == "chain_before"):
            raise TypeError(f"{one.name} is {value!r}")
        values[one.name] = value
    found = kind(**values)
    if not 0 <= found.first < found.end:
        raise ValueError(f"[{found.first}, {found.end}) is not a range")
    if kind is LakeFile and (found.rows != found.end - found.first or names.parse_data(found.path) is None):
        raise ValueError(f"{found.path} with {found.rows} rows is not a file of a lake")
    return found


def _crc(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"
