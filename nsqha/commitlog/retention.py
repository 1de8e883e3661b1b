"""Which files of a log may go: pure policy. Time and bytes propose, channels decide.

A partition keeps finished messages for replay as long as `keep_ns` says and at most `keep_bytes` of them. What that
allows to go is capped by `limit_offset`: the lowest committed floor of its channels and the pump offset, or what an
explicit policy for abandoned channels puts in their place. The result is a **log start**, always the border of a file
pair. It becomes true by a log_start event, and files go later still (`PartitionLog.forget_pairs`).

Deferred messages below a new log start are carried: appended again. That is worth it while they are few: a pair goes
only if at most a quarter of its bytes has to be carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nsqha.commitlog.entry import Place
from nsqha.commitlog.reading.lookup import PairInfo

CARRY_SHARE = 4  # a pair goes if at most 1 / CARRY_SHARE of its bytes must be carried
FUTURE_NS = 60 * 10**9  # timestamps further ahead than this are those of a wrong clock


@dataclass(frozen=True, slots=True)
class Retention:
    """None: no limit of that kind."""

    keep_ns: int | None
    keep_bytes: int | None


class PairAges:
    """When the pairs of one log were written, also those with timestamps in the future: a clock was wrong.

    Time in a log never goes back, so such a stamp may be that of all batches for years. What has one counts as written
    when it was first seen as long as it is."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}  # position -> (end log id, when it was first seen to end there)

    def sane(self, pairs: Sequence[PairInfo], now_ns: int) -> list[PairInfo]:
        """The pairs, none newer than now and FUTURE_NS."""
        before, self._seen = self._seen, {}
        return [
            pair if pair.newest_ns <= now_ns + FUTURE_NS else self._first_seen(pair, now_ns, before) for pair in pairs
        ]

    def _first_seen(self, pair: PairInfo, now_ns: int, before: dict[int, tuple[int, int]]) -> PairInfo:
        end, at = before.get(pair.first.position, (-1, now_ns))
        at = min(at, now_ns) if end == pair.end.log_id else now_ns
        self._seen[pair.first.position] = pair.end.log_id, at
        return replace(pair, newest_ns=at)


def expired(pair: PairInfo, retention: Retention, now_ns: int) -> bool:
    """Whether every batch of the pair is older than asked for."""
    return retention.keep_ns is not None and pair.newest_ns < now_ns - retention.keep_ns


def wanted_start(pairs: Sequence[PairInfo], retention: Retention, now_ns: int) -> Place:
    """Where the log would start if no channel needed it: in front of the first pair that is to be kept."""
    total = sum(pair.size for pair in pairs)
    for pair in pairs[:-1]:
        too_much = retention.keep_bytes is not None and total > retention.keep_bytes
        if not too_much and not expired(pair, retention, now_ns):
            return pair.first
        total -= pair.size
    return pairs[-1].first


def log_start(pairs: Sequence[PairInfo], retention: Retention, now_ns: int, *, limit_offset: int) -> Place:
    """The log start to propose: the last pair border that retention wants and `limit_offset` allows."""
    wanted = wanted_start(pairs, retention, now_ns)
    start = pairs[0].first
    for pair in pairs:
        if pair.first.position <= wanted.position and pair.first.offset <= limit_offset:
            start = pair.first
    return start


def roll_due(active: PairInfo, retention: Retention, now_ns: int) -> bool:
    """Whether the pair that is being written should be closed only so that it can go: a topic fell silent.

    Not for channel events alone: what makes a pair go writes some itself, so a silent topic would write for ever."""
    return active.end.offset > active.first.offset and expired(active, retention, now_ns)
