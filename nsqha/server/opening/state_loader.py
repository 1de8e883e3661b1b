"""The channel state that a log says, by way of the cache of states: up to its end, or to what is known to be committed.

All of it blocks, and runs in worker threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from nsqha.commitlog.entry import FAULTY, BatchCorrupt, Entry
from nsqha.cursor.committed.loading import first_checkpoint_end
from nsqha.cursor.committed.state import NEEDS_LOOK, PartitionState
from nsqha.errors import LogCorrupt
from nsqha.nsqlog import Logger

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.commitlog.reading.lookup import LogReader
    from nsqha.cursor.cache.lmdb_cache import LmdbCache

DURABLE_ENTRIES = 512  # of a log's end that are asked what is durable everywhere: a leader's first know little
MUST_READ = NEEDS_LOOK | FAULTY  # what was lost here other replicas have, and only they know which events were in it

logger = Logger("opening")


class StateLoader:
    """Loads the channel states of one node's logs."""

    def __init__(self, cache: LmdbCache) -> None:
        self.cache = cache

    def load(
        self,
        key: tuple[int, int],
        log: PartitionLog,
        *,
        committed: int | None = None,
        seen_as: LogReader | None = None,
        must_read: int = NEEDS_LOOK,
        alone: bool = False,
        distrusted: int | None = None,
    ) -> PartitionState:
        """The channel state that a log says, up to `committed` if that is not its end. `alone`: without what can not be
        read, as no other node has more. `distrusted`: as `committed.loading.load`. LogCorrupt."""
        read = lambda entry: _events(log, cast(Entry, entry), alone)  # noqa: E731
        if seen_as is None:
            return self.cache.load(
                key, log, read, committed=committed, must_read=must_read, distrusted=distrusted
            ).state
        see = lambda entry: _events(seen_as, cast(Entry, entry), alone)  # noqa: E731
        later = (log, read)
        return self.cache.load(
            key, seen_as, see, committed=committed, later=later, must_read=must_read, distrusted=distrusted
        ).state

    def vouched_for(
        self,
        key: tuple[int, int],
        log: PartitionLog,
        *,
        committed: int = 0,
        below: int | None = None,
        seen_as: LogReader | None = None,
        alone: bool = False,
        distrusted: int | None = None,
    ) -> tuple[PartitionState | None, BatchCorrupt | None]:
        """The channel state up to what is known to be committed: `committed`, or what the batches say of all replicas.

        `seen_as`: a snapshot of a log that is in use; only that is looked at, and not what the cache has of an earlier
        one. `alone`: no other replica has more, so what is lost is passed over. `distrusted`: as
        `committed.loading.load`. None: nothing that is known to be committed says it, as in a log that was begun a
        moment ago; or a batch does not verify, which is returned.
        """
        committed = max(committed, durable_everywhere(seen_as or log))
        committed = committed if below is None else min(committed, below)
        must_read = NEEDS_LOOK if alone else MUST_READ

        def load(committed: int) -> PartitionState:
            return self.load(
                key, log, committed=committed, seen_as=seen_as, must_read=must_read, distrusted=distrusted
            )

        try:
            try:
                return load(committed), None
            except BatchCorrupt:
                raise
            except LogCorrupt:
                # It was trimmed, and fell silent: no batch behind the checkpoint says that this is committed.
                end = trimmed_for(seen_as or log, must_read)
                if end <= committed or (below is not None and below < end):
                    raise
                return load(end), None
        except LogCorrupt as error:
            logger.warning("state_unknown", "%s: the channels are not known yet: %s", log.directory, error)
            return None, error if isinstance(error, BatchCorrupt) else None

    def without_history(self, key: tuple[int, int], log: LogReader, *, committed: int) -> PartitionState:
        """The channel state that is left when nothing says what it was: every channel will begin where the log does."""
        self.cache.forget(key)
        state = PartitionState()
        for entry in log.entries(log.start.log_id, committed):
            state.apply(entry, log.events(entry) if entry.flags & NEEDS_LOOK else b"")
        return state


def _events(log: LogReader, entry: Entry, alone: bool) -> bytes | bytearray:
    try:
        return log.events(entry)
    except BatchCorrupt as error:
        if not alone:
            raise
        text = "%s: what its channels did in a batch is lost: %s; messages may come again, deferred ones may not"
        logger.error("events_lost", text, log.directory, error)
        return b""


def durable_everywhere(log: LogReader) -> int:
    """The end of what the last batches call durable on every replica that was in sync: it is committed."""
    end = log.end.log_id
    try:
        return max((entry.durable for entry in log.entries(end - DURABLE_ENTRIES, end)), default=0)
    except LogCorrupt:
        return 0


def trimmed_for(log: LogReader, must_read: int) -> int:
    """The end of the checkpoint that a log which begins in the middle begins there for; 0: none is known."""
    return first_checkpoint_end(log, lambda entry: log.events(cast(Entry, entry)), must_read)
