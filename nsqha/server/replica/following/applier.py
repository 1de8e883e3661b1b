"""What is committed of a log that is followed, and the channel state that it makes.

    a batch is appended  --wrote-->  pending
    more is committed    --apply-->  from pending, or else from the files  -->  PartitionState

The state is the same pure function of the committed log that the leader has, so a follower that becomes leader begins
with it. A batch that does not verify stops it (`damage`) until others have mended that batch; the log itself goes on.

A cut replaces the log's `past`. Pending batches count for one `past` only, so a batch that was cut is never applied,
whatever was cancelled around the cut. And each batch must continue the chain of the batch applied before it. If it does
not, the state was made from another log (`StateDiverged`): nothing more is applied, and the state is rebuilt.

Invariants: what is applied is committed, in the order of the log, each batch once. (epoch, log id, chain) of the last
batch in the state are those of the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsqha.commitlog.entry import BatchCorrupt, Entry, next_chain
from nsqha.cursor.committed.state import PartitionState
from nsqha.errors import StateDiverged
from nsqha.nsqlog import Logger
from nsqha.server.opening.state_loader import MUST_READ

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog

logger = Logger("follower")

APPLY_SLICE = 2000  # entries read and applied at once when the high watermark jumps


class PendingBatches:
    """Batches that were appended and are not applied yet, the tail of them at least; of one past of the log."""

    __slots__ = ("_past", "batches")

    def __init__(self, log: PartitionLog) -> None:
        self.batches: deque[tuple[Entry, Any]] = deque()
        self._past = log.past

    def of(self, log: PartitionLog) -> deque[tuple[Entry, Any]]:
        """None are left of before a cut, or of another log."""
        if self._past is not log.past:
            self.batches.clear()
            self._past = log.past
        return self.batches


class Applier:
    """Applies the committed batches of one log to its channel state."""

    def __init__(
        self,
        log: PartitionLog,
        state: PartitionState | None,
        *,
        loop: asyncio.AbstractEventLoop,
        may_apply: Callable[[], bool],
        on_damage: Callable[[int, int], object],
        on_fit: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`state` None: the log begins in the middle and its checkpoint has not come yet. `may_apply`: asked before it
        goes on in a later turn of the loop. `on_damage`: log ids that do not verify. `on_fit`: whether the replica
        could lead has changed. `on_failure`: something happened that must not; StateDiverged: the state is not of this
        log."""
        self.log = log
        self.state = state
        self.committed = self.applied_end  # the high watermark, as far as known
        self.damage: tuple[int, int] | None = None  # log ids that are committed and can not be read here
        self.tried: object = self.known  # when the state was looked for in vain; None: look again
        self.distrusted: int | None = None  # checkpoints from this log id on may hold a wrong state
        self.on_damage = on_damage
        self._loop = loop
        self._may_apply = may_apply
        self._on_fit = on_fit
        self._on_failure = on_failure
        self._damage_logged: tuple[int, int] | None = None
        self._scheduled = False  # the rest is applied in the next turns of the loop
        self._pending = PendingBatches(log)
        # Takes the entry of a batch that was appended, and its data if that holds events. No call more for each batch.
        self.wrote: Callable[[tuple[Entry, Any]], None] = self._pending.batches.append

    @property
    def fit(self) -> bool:
        """Whether the replica could lead, as far as is known. Its leader hears it with each ack, for when it names the
        next one."""
        return self.state is not None and self.damage is None

    @property
    def applied_end(self) -> int:
        """The end of the batches in the state; 0: there is no state."""
        return self.state.applied.log_id + 1 if self.state is not None else 0

    @property
    def known(self) -> tuple[int, int]:
        """What the channel state may be found by: what is committed, and the end of the log, which says so, too."""
        return self.committed, self.log.end.log_id

    # ---- going on

    def apply(self, committed: int = 0) -> None:
        """Apply what is committed; `committed`: the high watermark, if it has moved."""
        if committed > self.committed:
            self.committed = committed
        state = self.state
        if state is None or self._scheduled or self.damage is not None:
            return
        left, pending = APPLY_SLICE, self._pending.of(self.log)
        try:
            while (log_id := state.applied.log_id + 1) < self.committed:
                if not left:
                    self._scheduled = True  # everything else on this node has its turn
                    self._loop.call_soon(self._apply_rest)
                    return
                if pending and pending[0][0].log_id == log_id:
                    entry, data = pending.popleft()
                    if next_chain(state.applied.chain, entry) != entry.chain:
                        self._vouch(state)  # a chain is broken where recovery rebuilt an entry, too
                    if data is None:
                        data = self.log.events(entry) if entry.flags & MUST_READ else b""
                    state.apply(entry, data)
                    left -= 1
                else:
                    self._read_pending(log_id)
        except BatchCorrupt as error:
            self.found(error)
        except OSError as error:
            self._delayed(error)
        except Exception as error:
            self._on_failure(error)

    def _vouch(self, state: PartitionState) -> None:
        """StateDiverged unless the last batch in the state is a batch of the log."""
        log, applied = self.log, state.applied
        after = applied.log_id + 1
        if after == 1 == log.start.log_id:
            return
        if not log.start.log_id <= after <= log.end.log_id:
            why = f"batch {applied.log_id} is applied, and the log has [{log.start.log_id}, {log.end.log_id})"
            raise StateDiverged(applied.log_id, why)
        entry = log.entry_before(after)
        if (entry.epoch, entry.chain) != (applied.epoch, applied.chain):
            mine, here = (f"epoch {one.epoch}, chain {one.chain:016x}" for one in (applied, entry))
            raise StateDiverged(applied.log_id, f"batch {applied.log_id} is applied with {mine}; the log has {here}")

    @property
    def vouched_for(self) -> bool:
        """Whether there is a channel state, and the log has the last batch in it. A leader must begin with no other."""
        state = self.state
        if state is None:
            return False
        try:
            self._vouch(state)
        except BatchCorrupt as error:
            self.found(error)
        except StateDiverged as error:
            self._on_failure(error)
        except OSError as error:
            self._delayed(error)
            return False
        return self.state is not None

    def _apply_rest(self) -> None:
        self._scheduled = False
        if self._may_apply():
            self.apply()

    def _read_pending(self, log_id: int) -> None:
        """Batches that were here before, or are too many to keep: from the files."""
        pending = self._pending.of(self.log)
        pending.clear()
        for entry in self.log.entries(log_id, min(self.log.end.log_id, log_id + APPLY_SLICE)):
            pending.append((entry, None))
        if not pending or pending[0][0].log_id != log_id:
            raise StateDiverged(log_id - 1, f"batch {log_id} is committed, not applied, and not in the log any more")

    def _delayed(self, error: OSError) -> None:
        """Too many open files and the like say nothing about the log. `Follower.keep_house` tries again."""
        logger.warning("apply_delayed", "%s: trying again: %s", self.log.directory, error)

    # ---- damage

    def found(self, damage: BatchCorrupt) -> None:
        """What is to be applied does not verify: others have it, and this replica follows on meanwhile."""
        self.damage = (damage.first.log_id, damage.end.log_id)
        if self.damage != self._damage_logged:
            self._damage_logged = self.damage
            logger.warning("apply_delayed", "%s: the channels wait for a repair: %s", self.log.directory, damage)
        self._pending.batches.clear()
        self._on_fit()
        self.on_damage(*self.damage)

    @property
    def readable(self) -> bool:
        """Whether what a leader begins with can be read: batches that are not applied yet."""
        self._look_ahead()
        return self.damage is None

    def _look_ahead(self) -> None:
        state = self.state
        if state is not None and self.damage is None:
            try:
                for entry in self.log.entries(state.applied.log_id + 1, self.log.end.log_id):
                    if entry.flags & MUST_READ:
                        self.log.events(entry)
            except BatchCorrupt as error:
                self.found(error)

    def mended(self) -> None:
        """What could not be read can be read again, perhaps. Else it is found again at once: a node that is asked
        meanwhile must not say that it could lead."""
        if self.damage is not None:
            self.damage = None
            self.tried = None  # also if there is no leader, which could say more
            if self._may_apply():
                self.apply()
            try:
                self._look_ahead()
            except OSError as error:
                self._delayed(error)
            self._on_fit()

    def look_again(self) -> None:
        """A repair may not have been possible when damage was found."""
        if self.damage is None:
            return
        if self.state is None:
            self.on_damage(*self.damage)
        else:
            self.mended()

    # ---- another log, another state

    def distrust(self, log_id: int) -> None:
        """The state is wrong: forget it. It is rebuilt from the log and a checkpoint that ended below `log_id`."""
        self.state = None
        self.distrusted = log_id
        self.tried = None
        self._pending.batches.clear()
        self._on_fit()

    def was_cut(self, log_id: int) -> None:
        """The log ends before `log_id` now."""
        self.committed = min(self.committed, log_id)

    def know(self, state: PartitionState) -> None:
        """The channel state was found in the log; what is committed behind it is applied."""
        self.state = state
        self.damage = None
        self.distrusted = None
        self._pending.batches.clear()
        self._on_fit()
        self.apply(state.applied.log_id + 1)

    def restart_with(self, log: PartitionLog) -> None:
        """Another log, or an end of it before what is applied, is in the place of this one."""
        self.log = log
        self.state = None
        self.committed = 0
        self.damage = None
        self.distrusted = None
        self._pending.batches.clear()
