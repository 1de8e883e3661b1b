"""What a follower answers to a leader, and how a leader judges a follower's log: decided on entries alone.

An Open names an epoch and its leader:

    below the promise, or below what the metadata says     Fenced       the sender does not lead any more
    the promise, with nothing known against the sender     Accepted
    above it, and the metadata names this leader for it    PromiseNeeded    journal it, durably, then answer
    anything else                                          NotConfirmed     read the metadata and ask again

So a promise never rests only on the sender's claim. From the durable promise on, nothing of a lower epoch is accepted:
an old leader cannot collect another ack here (Push in the spec).

An Append is a run of consecutive entries. Entries below the own end are compared with the log, content included: equal
numbers are no proof, as two leaders may have given the same log id to different batches. Entries above it must be the
direct continuation, by ordinals, positions and chain. The log itself checks the frames against their entry when it
stores them.

A log is never cut below what is known to be committed (`check_cut`): a request to do that is wrong, and the partition
stops.

All ends are exclusive log ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias, TypeVar

from nsqha.election.model import PartitionMeta


class ChainedEntry(Protocol):
    """The part of a commitlog entry (`nsqha.commitlog.entry`) used here. Its chain covers it and its whole past."""

    @property
    def log_id(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def crc(self) -> int: ...
    @property
    def chain(self) -> int: ...

    def follows(self, previous: Self) -> bool: ...
    def chained_to(self, previous: Self) -> bool: ...


E = TypeVar("E", bound=ChainedEntry)


# ---- Open


@dataclass(frozen=True, slots=True)
class Accepted:
    """The epoch is promised already: answer with the state of the log."""


@dataclass(frozen=True, slots=True)
class PromiseNeeded:
    """Stop leading, if this node leads, and make the promise of `epoch` durable. Then answer."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """There is a leader of a higher epoch."""

    promised: int


@dataclass(frozen=True, slots=True)
class NotConfirmed:
    """The metadata known here do not confirm it. Read them (linearizably) and decide again."""

    why: str


Opening: TypeAlias = Accepted | PromiseNeeded | Fenced | NotConfirmed


def decide_open(
    *, epoch: int, leader: int, promise: int, meta: PartitionMeta | None, leading: int | None = None
) -> Opening:
    """Decide about the claim "node `leader` leads in `epoch`".

    `promise`: the highest epoch promised here, durably. `meta`: the newest record seen. `leading`: the epoch in which
    this node leads itself.
    """
    known = 0 if meta is None else meta.epoch
    if epoch < max(promise, known):
        return Fenced(max(promise, known))
    if leading is not None and leading >= epoch:
        return NotConfirmed(f"this node leads in epoch {leading} itself")
    if meta is not None and known == epoch and meta.leader != leader:
        return NotConfirmed(f"node {meta.leader} leads in epoch {epoch}, not {leader}")
    if epoch == promise:
        return Accepted()
    if known == epoch:
        return PromiseNeeded(epoch)
    return NotConfirmed(f"the metadata is at epoch {known}, not {epoch}")


# ---- Append


@dataclass(frozen=True, slots=True)
class Append:
    """Store the entries of the run from index `first` on; the log has those before it already."""

    first: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The log has the whole run. Acknowledge again."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Entry `log_id` of the sender does not belong to this log: the two have diverged at or before it."""

    log_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Gap:
    """The run begins above our end: something is missing between."""

    end: int


@dataclass(frozen=True, slots=True)
class NotOpened:
    """The sender's epoch was not promised here: it must send an Open first."""

    promised: int


Verdict: TypeAlias = Append | Duplicate | Mismatch | Gap | Fenced | NotOpened


def decide_append(
    entries: Sequence[E], *, epoch: int, promise: int, last: E, own: Callable[[int], E | None]
) -> Verdict:
    """Decide about a run that the leader of `epoch` sent.

    `last` is the entry before our end (the anchor, or the genesis, if none is left); `own` gives those before it by
    log id, None below the log's start.
    """
    if epoch < promise:
        return Fenced(promise)
    if epoch > promise:
        return NotOpened(promise)
    end = last.log_id + 1
    for i, entry in enumerate(entries):
        if entry.epoch > epoch:
            return Mismatch(entry.log_id, f"entry {entry.log_id} is of epoch {entry.epoch}, the sender of {epoch}")
        if entry.log_id > end:
            return Gap(end) if i == 0 else Mismatch(entry.log_id, f"entry {entry.log_id} follows {end - 1} in one run")
        if entry.log_id == end:
            return _continuation(entries, i, last, epoch)
        here = last if entry.log_id == last.log_id else own(entry.log_id)
        # What retention removed was committed, and what is committed is the same everywhere.
        if here is not None and not same_batch(here, entry):
            return Mismatch(entry.log_id, f"entry {entry.log_id} has another content here: {here}, sent: {entry}")
    return Duplicate()


def _continuation(entries: Sequence[E], first: int, last: E, epoch: int) -> Verdict:
    """Check that the entries from `first` on continue the log after `last`."""
    for entry in entries[first:]:
        if entry.epoch > epoch:
            return Mismatch(entry.log_id, f"entry {entry.log_id} is of epoch {entry.epoch}, the sender of {epoch}")
        if not entry.follows(last):
            return Mismatch(entry.log_id, f"entry {entry.log_id} does not go on where {last.log_id} ends: {entry}")
        if not entry.chained_to(last):
            return Mismatch(entry.log_id, f"entry {entry.log_id} was written behind another {last.log_id}")
        last = entry
    return Append(first)


def same_batch(one: ChainedEntry, other: ChainedEntry) -> bool:
    """Whether two entries describe the same batch with the same past."""
    return one.chain == other.chain and one.crc == other.crc and one.log_id == other.log_id and one.epoch == other.epoch


def first_difference(entries: Sequence[E], *, last: E, own: Callable[[int], E | None]) -> int | None:
    """For a run that was not accepted: our first entry that differs from the sender's, if the run shows one.

    `last` and `own` as for `decide_append`. An error in the run itself says nothing about our log.
    """
    for entry in entries:
        if entry.log_id > last.log_id:
            return last.log_id if entry.log_id == last.log_id + 1 and not entry.chained_to(last) else None
        here = last if entry.log_id == last.log_id else own(entry.log_id)
        if here is not None and not same_batch(here, entry):
            return entry.log_id
    return None


# ---- the leader's side


def same_past(*, end: int, chain: int, own_start: int, own_end: int, before: Callable[[int], ChainedEntry]) -> bool:
    """Whether the log of a follower whose last entry ends at `end` with `chain` is a prefix of our log.

    `before(log_id)`: our entry that `log_id` follows, for log ids in [own_start, own_end]. False also if the follower
    ends before our start, where it cannot be compared any more.
    """
    return own_start <= end <= own_end and before(end).chain == chain


# ---- cutting


def check_cut(to: int, *, committed: int) -> None:
    """Check a cut to `to`: what this node knows to be committed must stay. An AssertionError stops the partition."""
    assert to >= committed, f"asked to cut the log at {to}, and everything below {committed} is committed"


def check_replacement(start: int, *, committed: int) -> None:
    """Check before the log is replaced by a new one from the leader's `start`: no committed entry may be above it."""
    assert start >= committed, f"asked to begin a new log at {start}, and everything below {committed} is committed"
