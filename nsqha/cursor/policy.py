"""What an operator asked of channels, in the form in which their leader follows it.

    delay after failure n:  min(retry_max, retry * factor^(n - 1)) * a draw from [1 - jitter, 1 + jitter]

A failure is a REQ, a time-out, or a lost connection; n is the number of deliveries so far, as each of them failed. The
draw is a hash of channel, message and n, so that it is the same wherever it is computed, and messages that failed
together do not come back together.

`ChannelPolicies` is what one partition follows. It is taken from the metadata record whenever the channel list is, and
before the first acknowledgement of an epoch; it is never in the log. What a leader wrote because of it (deferrals) is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

_MASK = (1 << 64) - 1
_EXPONENT_MAX = 400  # of the factor: 10^400 overflows a float; the bound is reached long before


class FieldInForce(Protocol):
    """The value of one field of a policy."""

    @property
    def value(self) -> Any: ...
    @property
    def origin(self) -> str: ...


class SaidPolicies(Protocol):
    """What a record says: equal to what another one says, or not."""

    @property
    def own(self) -> Mapping[str, Any]:
        """Of channels that say something themselves."""


class PolicySource(Protocol):
    """The metadata record of a topic's channels, as far as policies are concerned."""

    @property
    def version(self) -> int: ...
    @property
    def policies(self) -> SaidPolicies: ...

    def policy_in_force(self, name: str) -> Mapping[str, FieldInForce]:
        """What the channel follows, by the names of the fields."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a message waits that failed; times in seconds."""

    first_s: float
    most_s: float
    factor: float = 2.0
    jitter: float = 0.0
    instead: bool = False  # whatever delay the client asks for; else the longer one counts

    @classmethod
    def of(cls, fields: Mapping[str, FieldInForce]) -> RetryPolicy | None:
        """None: nothing but the delay that the client asks for."""
        value = {name: field.value for name, field in fields.items()}
        if not (value["retry_ms"] or value["retry_instead"]):
            return None
        return cls(
            first_s=value["retry_ms"] / 1000,
            most_s=value["retry_max_ms"] / 1000,
            factor=value["retry_factor"],
            jitter=value["retry_jitter"],
            instead=value["retry_instead"],
        )

    def delay(self, asked_s: float, *, failures: int, draw: float) -> float:
        """After this failure, counted from 1. `asked_s`: by the client. `draw`: from [0, 1)."""
        try:
            grown = self.first_s * self.factor ** min(failures - 1, _EXPONENT_MAX)
        except OverflowError:
            grown = self.most_s
        own = min(grown, self.most_s) * (1 + self.jitter * (2 * draw - 1))
        return own if self.instead else max(own, asked_s)


@dataclass(frozen=True, slots=True)
class PassingPolicy:
    """What consumers of a channel do not get."""

    skip: bool = False  # all of it
    ttl_ns: int | None = None  # unread messages that were published longer ago
    max_depth: int | None = None  # the oldest unread messages beyond so many

    @classmethod
    def of(cls, fields: Mapping[str, FieldInForce]) -> PassingPolicy | None:
        """None: they get everything."""
        skip, ttl_ms, most = fields["skip"].value, fields["ttl_ms"].value, fields["max_depth"].value
        if not skip and ttl_ms is None and most is None:
            return None
        return cls(skip, None if ttl_ms is None else ttl_ms * 1_000_000, most)


@dataclass(frozen=True, slots=True)
class DeathPolicy:
    """When a message is given up, and what becomes of it."""

    max_attempts: int | None = None  # who fails at this delivery is dead; None: only what expires, or is killed
    drop: bool = False  # the dead are finished; else they are kept
    topic: str | None = None  # ... until they are moved there
    most: int = 100_000  # so many are kept; beyond it nothing dies
    breaker_s: float = 60.0  # what fails then waits so long

    @classmethod
    def of(cls, fields: Mapping[str, FieldInForce]) -> DeathPolicy | None:
        """None: nothing dies by itself. A channel that says nothing of dead letters, nor of attempts, has none: what
        expires there is finished."""
        fate, most = fields["dead_letter"], fields["retry_max_ms"]
        said = [name for name in ("dead_letter", "dead_max") if fields[name].origin != "default"]
        if fields["max_attempts"].value is None and not said:
            return None
        return cls(
            max_attempts=fields["max_attempts"].value,
            drop=fate.value == "drop",
            topic=fate.value.removeprefix("topic:") if fate.value.startswith("topic:") else None,
            most=fields["dead_max"].value,
            # The default of retry_max is a year: it bounds a growing delay, and is not meant as one.
            breaker_s=max(60.0, 0.0 if most.origin == "default" else most.value / 1000),
        )


def draw(uid: int, offset: int, failures: int) -> float:
    """A number from [0, 1) that looks random, for this failure of this message (the mixing steps of SplitMix64)."""
    mixed = (uid ^ offset * 0x9E3779B97F4A7C15 ^ failures * 0xD1B54A32D192ED03) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return ((mixed ^ mixed >> 31) >> 11) / (1 << 53)


class _InForce(NamedTuple):
    """The three sides of a channel's policy."""

    retry: RetryPolicy | None = None
    death: DeathPolicy | None = None
    passing: PassingPolicy | None = None

    @classmethod
    def of(cls, fields: Mapping[str, FieldInForce]) -> _InForce:
        return cls(RetryPolicy.of(fields), DeathPolicy.of(fields), PassingPolicy.of(fields))


_NOTHING = _InForce()
_SILENT = ""  # stands for the channels that say nothing themselves: one answer holds for all of them


class ChannelPolicies:
    """What the channels of one partition follow. A record that says the same of policies as the one before, as when a
    channel was made, costs a comparison of what is said, whatever the number of channels."""

    __slots__ = ("_found", "_own", "_source", "changes")

    def __init__(self) -> None:
        self.changes = 0  # counts the records that said something new
        self._source: PolicySource | None = None
        self._own: Mapping[str, Any] = {}
        self._found: dict[str, _InForce] = {}

    def follow(self, source: PolicySource) -> None:
        """Go by this record from now on, unless a newer one is known."""
        before = self._source
        if before is None or source.version >= before.version:
            said = source.policies
            self._source = source
            if before is None or said != before.policies:
                self._own = said.own
                self._found = {}
                self.changes += 1

    def retry(self, channel: str) -> RetryPolicy | None:
        """How messages of this channel come again; None: after the delay that the client asks for."""
        return self._in_force(channel).retry

    def death(self, channel: str) -> DeathPolicy | None:
        """When messages of this channel are given up; None: never."""
        return self._in_force(channel).death

    def passing(self, channel: str) -> PassingPolicy | None:
        """What consumers of this channel do not get; None: they get everything."""
        return self._in_force(channel).passing

    def _in_force(self, channel: str) -> _InForce:
        if self._source is None:
            return _NOTHING
        key = channel if channel in self._own else _SILENT
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _InForce.of(self._source.policy_in_force(channel))
        return found
