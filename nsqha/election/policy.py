"""What an operator asks of a channel: the part of the topic's record that says so.

A field that is None is not said here. What is in force is looked up field by field:

    the channel's own policy  ->  that of `*`, for channels that say nothing themselves  ->  as nsqd does it

A policy decides what a leader does from now on; what was written because of an older one stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from nsqha.election.codec import SparseRecord
from nsqha.ids import is_ephemeral, valid_name

EVERY_CHANNEL = "*"  # as the name of a channel: those that say nothing themselves
HOURS_MAX = 8760
DELAY_MS_MAX = HOURS_MAX * 3_600_000
FACTOR_MAX = 10.0
DEPTH_MAX = 1 << 40
ATTEMPTS_MAX = 65_535
DEAD_MAX = 1_000_000  # per partition
KEEP, DROP, TO_TOPIC = "keep", "drop", "topic:"  # what becomes of the dead


def _check(name: str, value: float | None, lowest: float, highest: float) -> None:
    if value is None:
        return
    whole = isinstance(lowest, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ValueError(f"{name} is {value!r}; it must be a {'whole ' if whole else ''}number")
    if not lowest <= value <= highest:  # nan is refused, too
        raise ValueError(f"{name} is {value}; it must be {lowest} to {highest}")


def target_topic(changes: Mapping[str, object]) -> str | None:
    """The topic to which these changes of a policy move dead letters; None: they name none."""
    fate = changes.get("dead_letter")
    return fate.removeprefix(TO_TOPIC) if isinstance(fate, str) and fate.startswith(TO_TOPIC) else None


def _check_fate(value: object) -> None:
    if value is None or value in (KEEP, DROP):
        return
    if not isinstance(value, str) or not value.startswith(TO_TOPIC):
        raise ValueError(f"dead_letter is {value!r}; it must be {KEEP}, {DROP} or {TO_TOPIC}NAME")
    topic = value.removeprefix(TO_TOPIC)
    if not valid_name(topic) or is_ephemeral(topic):
        raise ValueError(f"dead_letter is {value!r}; {topic!r} is not the name of a topic that keeps what it gets")


@dataclass(frozen=True)
class ChannelPolicy(SparseRecord):
    """What a channel says, or `*` does; see docs/policies.md. ValueError for what is out of range."""

    retry_ms: int | None = None  # how long a message waits after its first failure
    retry_max_ms: int | None = None  # ... and at most, however often it failed
    retry_factor: float | None = None  # by how much each further failure makes the delay longer
    retry_jitter: float | None = None  # the delay is multiplied by a draw from [1 - jitter, 1 + jitter]
    retry_instead: bool | None = None  # in place of the delay that a client asks for; else the longer one counts
    max_attempts: int | None = None  # who fails at this delivery is dead
    dead_letter: str | None = None  # what becomes of the dead: `keep`, `drop`, `topic:NAME`
    dead_max: int | None = None  # per partition: with so many dead letters nothing dies any more, what fails waits
    ttl_ms: int | None = None  # unread messages older than this are passed over, retries expire at their turn
    max_depth: int | None = None  # per partition: the oldest unread messages beyond so many are passed over
    skip: bool | None = None  # everything is passed over as it is committed

    def __post_init__(self) -> None:
        _check("retry_ms", self.retry_ms, 0, DELAY_MS_MAX)
        _check("retry_max_ms", self.retry_max_ms, 0, DELAY_MS_MAX)
        _check("retry_factor", self.retry_factor, 1.0, FACTOR_MAX)
        _check("retry_jitter", self.retry_jitter, 0.0, 1.0)
        _check("max_attempts", self.max_attempts, 1, ATTEMPTS_MAX)
        _check_fate(self.dead_letter)
        _check("dead_max", self.dead_max, 1, DEAD_MAX)
        _check("ttl_ms", self.ttl_ms, 1000, DELAY_MS_MAX)
        _check("max_depth", self.max_depth, 1, DEPTH_MAX)
        for name in ("retry_instead", "skip"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise ValueError(f"{name} is {value!r}; it must be true or false")

    @property
    def said(self) -> dict[str, Any]:
        """The fields that have a value here."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    def with_changes(self, changes: Mapping[str, Any]) -> ChannelPolicy:
        """With these fields; None clears one. ValueError: an unknown field, or values that do not fit each other."""
        for name in changes:
            if name not in FIELDS:
                raise ValueError(f"a policy has no field {name}; there are {', '.join(FIELDS)}")
        changed = replace(self, **changes)
        first, most = changed.retry_ms, changed.retry_max_ms
        if first is not None and most is not None and most < first:
            raise ValueError(f"retry_max_ms is {most}; it cannot be less than retry_ms, {first}")
        return changed


FIELDS = tuple(field.name for field in fields(ChannelPolicy) if field.name != "unknown")

SILENT = ChannelPolicy()
"""Says nothing. Most channels have this very object."""

AS_NSQD = ChannelPolicy(
    retry_ms=0,
    retry_max_ms=DELAY_MS_MAX,
    retry_factor=2.0,
    retry_jitter=0.2,
    retry_instead=False,
    dead_letter=KEEP,
    dead_max=100_000,
    skip=False,
)
"""What holds where nothing is said: a delay is what the client asks for, nothing dies, a channel has no bound and
skips nothing."""


class PoliciesSaid(NamedTuple):
    """What is said of the channels of a topic: by those that say something, and by `*`."""

    own: Mapping[str, ChannelPolicy]
    defaults: ChannelPolicy


class InForce(NamedTuple):
    """The value of one field, and where it comes from: `channel`, `*` or `default`."""

    value: Any
    origin: str


def in_force(own: ChannelPolicy, defaults: ChannelPolicy) -> dict[str, InForce]:
    """What a channel follows, for every field."""
    origins = (("channel", own), (EVERY_CHANNEL, defaults), ("default", AS_NSQD))
    return {name: next(_said(name, origins), InForce(None, "default")) for name in FIELDS}


def _said(name: str, origins: Sequence[tuple[str, ChannelPolicy]]) -> Iterator[InForce]:
    for origin, policy in origins:
        if (value := getattr(policy, name)) is not None:
            yield InForce(value, origin)
