"""The recovery table: what the files of a log, read after a crash, allow to conclude.

Three numbers decide (all ends are exclusive):

    local_durable   from the journal: everything below is on this disk, was fdatasync'ed here
    watermark W     the higher of local_durable and the highest `durable` of any valid entry: everything below is
                    durable on every replica that was in sync then. With R > 1 and the page cache still there it is at
                    least the end of what was written whole
    bad             the lowest log id that does not verify; what is missing below W does not verify

    found                      sync=always                  interval, none
    nothing bad                cut what follows the last entry (bytes that no entry speaks of)
                                                            and page cache lost: new log_uid, possible loss
    bad >= W                   torn: cut                    torn: cut, possible loss; page cache lost: new log_uid
    bad < local_durable        corrupt: never cut, alarm
    local_durable <= bad < W   R = 1: corrupt; else new log_uid, fetch from `bad` on
    corrupt, R > 1             new log_uid; serve nothing at or above `bad`
    corrupt, R = 1             entries are restored (one wrong bit: exactly) or rebuilt from neighbours and frames;
                               frames that do not verify stay: reading them raises BatchCorrupt and says where to go on
    no valid journal record    new log_uid

Corruption below W and a torn end above it are judged apart: the first never hides the second.

An entry is written behind its frames, and behind the entry before it. A process that is killed leaves both in that
order, so if the page cache is still there what is in front of an entry, or belongs to one, was written whole, and may
have been acknowledged, whatever the journal says: of a log that was found damaged it says less than there was. If it
does not verify it is damage, which others mend, or have cut. A single replica has no other one to ask: it cuts
there, as a failed fsync leaves the same behind, of what was never acknowledged.

With R > 1 entries that do not verify in the middle are replaced by FAULTY ones of the same extent, so that the log can
be opened; catch-up fetches them again. Until it has, every recovery finds them bad, and below W: the journal may have
died before it knew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nsqha.commitlog.entry import Place
from nsqha.ranges import RangeSet


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the table depends on besides the files."""

    sync_always: bool
    replicas: int
    page_cache_lost: bool
    known: bool  # the journal has a record with a log_uid that it trusts
    local_durable: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the table says."""

    cut_at: int | None
    bad: int | None  # the lowest log id that does not verify below the watermark
    alarm: bool  # bad < local_durable, or the only replica is damaged: operators have to know
    new_log_uid: bool
    possible_loss: bool


def judge(watermark: int, bad: RangeSet, circumstances: Circumstances) -> Verdict:
    """The recovery table. `bad` holds every log id that does not verify."""
    lowest = next(iter(bad), (watermark, 0))[0]
    below = lowest if lowest < watermark else None
    torn = bad.next_held(watermark)
    lost = not circumstances.sync_always and (torn is not None or circumstances.page_cache_lost)
    alone = circumstances.replicas == 1
    return Verdict(
        cut_at=torn,
        bad=below,
        alarm=below is not None and (alone or below < circumstances.local_durable),
        new_log_uid=(
            not circumstances.known
            or (below is not None and not alone)
            or (not circumstances.sync_always and circumstances.page_cache_lost)
        ),
        possible_loss=lost and alone,
    )


@dataclass(frozen=True, slots=True)
class CorruptRange:
    """A range of the log that did not verify below the watermark."""

    first: Place
    end: Place
    what: str  # "proven", "rebuilt": lost entries that came back; "faulty": entries lost; "data": frames do not verify

    @property
    def readable(self) -> bool:
        return self.what in ("proven", "rebuilt")


@dataclass(frozen=True, slots=True)
class CutTail:
    """What was cut off the end."""

    at: Place
    entries: int  # valid entries among what was cut
    why: str  # "torn", "intent"


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery found and did; the fields are stable, logs and tests use them."""

    created: bool = False  # there were no files
    watermark: int = 0
    verdict: Verdict = field(default=Verdict(None, None, False, False, False))
    cuts: tuple[CutTail, ...] = ()
    trimmed_bytes: int = 0  # followed the last entry and belonged to none
    damage: tuple[CorruptRange, ...] = ()
    serve_end: int | None = None  # R > 1: nothing at or above is served until it was fetched again
    restored_anchors: int = 0  # of pairs whose creation had come to its end
    unreadable: tuple[int, ...] = ()  # positions of pairs that could not be used at all

    @property
    def new_log_uid(self) -> bool:
        """This log cannot be vouched for under its old name."""
        return self.verdict.new_log_uid

    @property
    def possible_loss(self) -> bool:
        """Messages that were acknowledged without a sync may be gone."""
        return self.verdict.possible_loss

    @property
    def clean(self) -> bool:
        noticed = self.cuts or self.damage or self.unreadable or self.restored_anchors
        return not (noticed or self.verdict.alarm or self.possible_loss)
