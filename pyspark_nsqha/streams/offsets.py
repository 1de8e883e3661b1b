"""What a stream has read, in the form of Spark's checkpoint, and how much the next micro-batch takes.

Everything here is pure.

    {"orders/0": {"offset": 1200, "uid": "00c0ffee00c0ffee", "log_id": 57, "epoch": 3, "chain": "0123456789abcdef"}}

    offset    of the next message to read
    uid       of the topic: one that was created again under the same name has another
    log_id, epoch, chain    the witness: an entry that was committed when the offset was chosen, at or after the
              batch of the last message that was read. A log that has this entry has everything before it, too; one
              without it has lost or replaced committed messages, by an unclean election or a restored backup
    first     only in the micro-batch in which a partition, or the query, begins: the offset where reading begins

A record for the same offset as the last one is the last one: Spark compares JSON, and would run micro-batches without
messages while entries without messages arrive.

Limits. A micro-batch takes from each partition a share of the limit in proportion to what waits there, and at least one
message, so that a small partition beside a large one makes progress: with more partitions than the limit has messages,
it takes one of each. Bytes are counted in the log, between borders that are at most 8 MiB apart, and within them as if
all messages were equally large.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pyspark_nsqha.model import CutPoint, PinnedPartition, ReadFailed

Key = tuple[str, int]
"""Topic and partition."""

_HEX = re.compile(r"[0-9a-f]{16}")
_KEY = re.compile(r"([^/]{1,64})/(0|[1-9][0-9]{0,5})")
_MOST = (1 << 64) - 1

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class PartitionOffset:
    """How far one partition is read, with its witness."""

    offset: int
    uid: int
    log_id: int
    epoch: int
    chain: int
    first: int | None = None

    @classmethod
    def at(cls, pin: PinnedPartition, offset: int, first: int | None = None) -> PartitionOffset:
        """A record with the last committed entry of `pin` as the witness."""
        return cls(offset, pin.identity.topic_uid, pin.end.log_id - 1, pin.epoch, pin.chain, first)

    def moved(self, pin: PinnedPartition, offset: int) -> PartitionOffset:
        """The record for `offset`; this one if the offset is the same."""
        if offset == self.offset and pin.identity.topic_uid == self.uid:
            return self
        return PartitionOffset.at(pin, offset)


Records = dict[Key, PartitionOffset]


def to_json(records: Mapping[Key, PartitionOffset]) -> dict[str, dict[str, int | str]]:
    """The JSON for Spark's checkpoint; equal records give equal text."""
    found: dict[str, dict[str, int | str]] = {}
    for (topic, partition), record in sorted(records.items()):
        said: dict[str, int | str] = {
            "offset": record.offset,
            "uid": f"{record.uid:016x}",
            "log_id": record.log_id,
            "epoch": record.epoch,
            "chain": f"{record.chain:016x}",
        }
        if record.first is not None:
            said["first"] = record.first
        found[f"{topic}/{partition}"] = said
    return found


def from_json(said: object) -> Records:
    """Parse the JSON of a checkpoint. ReadFailed: it is not of this source."""
    if not isinstance(said, Mapping):
        raise _foreign(said)
    found: Records = {}
    for name, one in said.items():
        key = _KEY.fullmatch(name) if isinstance(name, str) else None
        if key is None or not isinstance(one, Mapping):
            raise _foreign({name: one})
        if one.keys() - {"first"} != {"offset", "uid", "log_id", "epoch", "chain"}:
            raise _foreign({name: one})
        first = _number(one, "first") if "first" in one else None
        found[key[1], int(key[2])] = PartitionOffset(
            _number(one, "offset"), _hex(one, "uid"), _number(one, "log_id"), _number(one, "epoch"),
            _hex(one, "chain"), first,
        )  # fmt: skip
    return found


def _number(one: Mapping[str, Any], name: str) -> int:
    value = one[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise _foreign({name: value})
    return value


def _hex(one: Mapping[str, Any], name: str) -> int:
    value = one[name]
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise _foreign({name: value})
    return int(value, 16)


def _foreign(said: object) -> ReadFailed:
    text = json.dumps(said, default=str)[:120]
    return ReadFailed(
        f"the checkpoint has offsets of another source: {text}; give the query a checkpointLocation of its own"
    )


# ---- how much


def shares(waiting: Mapping[K, int], limit: int) -> dict[K, int]:
    """The share of each in `limit`: min(limit, all that waits) in sum, but at least 1 for each with something waiting.

    Shares are in proportion to what waits; the rest of rounding goes to the largest fractions, of equals to the first.
    """
    some = {key: count for key, count in waiting.items() if count > 0}
    total = sum(some.values())
    if total <= limit:
        return dict(some)
    if limit <= len(some):
        return dict.fromkeys(some, 1)
    # One for each, and the rest in proportion to what each has beyond that.
    left, beyond = limit - len(some), total - len(some)
    taken = {key: 1 + left * (count - 1) // beyond for key, count in some.items()}
    fractions = sorted(some, key=lambda key: -(left * (some[key] - 1) % beyond))
    for key in fractions[: limit - sum(taken.values())]:
        taken[key] += 1
    return taken


def position_at(cuts: Sequence[CutPoint], offset: int) -> int:
    """The position of message `offset` in the log: exact at a border, else interpolated."""
    at = bisect_right(cuts, offset, key=lambda cut: cut.offset) - 1
    if at < 0:
        return cuts[0].position
    low = cuts[at]
    if at + 1 == len(cuts) or offset == low.offset:
        return low.position
    high = cuts[at + 1]
    return low.position + (high.position - low.position) * (offset - low.offset) // (high.offset - low.offset)


def end_within(cuts: Sequence[CutPoint], first: int, end: int, bytes_max: int) -> int:
    """The end of about `bytes_max` bytes of messages from `first` on: at least one message, and `end` at most."""
    position = position_at(cuts, first) + bytes_max
    at = bisect_right(cuts, position, key=lambda cut: cut.position) - 1
    if at + 1 >= len(cuts):
        return end
    low, high = cuts[max(at, 0)], cuts[max(at, 0) + 1]
    gap = high.position - low.position
    found = low.offset + ((high.offset - low.offset) * (position - low.position) // gap if gap else 0)
    return max(first + 1, min(found, end))


@dataclass(frozen=True)
class BatchLimits:
    """How much a micro-batch may take, and when one starts. 0: no limit."""

    max_offsets: int = 0
    max_bytes: int = 0
    min_offsets: int = 0
    max_delay_s: float = 900.0

    @property
    def any(self) -> bool:
        """Whether there is a limit that makes a micro-batch smaller."""
        return bool(self.max_offsets or self.max_bytes)

    def too_few(self, waiting: int, since_last_s: float) -> bool:
        """Whether the next micro-batch waits for more messages."""
        return bool(self.min_offsets) and waiting < self.min_offsets and since_last_s < self.max_delay_s
