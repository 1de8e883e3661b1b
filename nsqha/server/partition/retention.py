"""What a partition's log may forget, and how it goes.

Four steps, each waiting for the one before to be committed, looked at once a second:

    retention wants a start -> deferred messages below it are carried -> a log_start event -> a checkpoint above the
    files -> everything of that durable here -> the file pairs are unlinked

Retention never passes the live hold of a batch reader, nor the lowest committed floor of a channel nor the pump. Only
an explicit policy of the topic lets it pass abandoned channels: those without a consumer whose oldest unread message is
too old, or who hold back too many bytes. What such a channel loses is named in the event, counted and logged; what a
hold or a reader's channel keeps anyway it does not lose, and a reader's channel never counts as abandoned. Holds are
judged by the timestamp that a batch would have now, so that nothing is proposed which they would cap.

Nothing goes because of its age while clocks disagree (`replication.clocks`); what is too much still goes.

A batch that can not be read and has to be, because a deferred message is in it, is reported for repair; the files stay
until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from nsqha.clock import Now
from nsqha.commitlog.entry import BatchCorrupt, Place
from nsqha.commitlog.reading.lookup import PairInfo
from nsqha.commitlog.retention import CARRY_SHARE, PairAges, Retention, log_start, roll_due
from nsqha.cursor.events import Abandoned
from nsqha.errors import LogCorrupt, NotInLog
from nsqha.nsqlog import Logger

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.cursor.partition import PartitionCursors
    from nsqha.server.partition.context import PartitionLifecycle
    from nsqha.server.partition.delivery import Deliveries
    from nsqha.server.partition.file_jobs import FileJobs

# Per second and partition: carrying shares the log with publishers, and one batch has what is carried at once.
CARRY_AT_ONCE = 1000  # messages
CARRY_BYTES = 1 << 20  # of them; at least one
SAMPLES = 30  # messages that are read to know how large they are
REFUSED_SECONDS = 60.0  # counting what would have to be carried is not free

logger = Logger("retention")


@dataclass(frozen=True, slots=True)
class AbandonedPolicy:
    """When retention may pass what a channel has not read; None: never."""

    after_ns: int | None = None
    over_bytes: int | None = None


class RetainedLog(Protocol):
    """The partition whose log start moves: its log, its channels, and the jobs on its files."""

    log: PartitionLog
    cursors: PartitionCursors
    deliveries: Deliveries
    files: FileJobs
    on_damage: Callable[[int, int], object]
    life: PartitionLifecycle

    def write_events(self) -> None:
        """Write the channel events that were queued soon; the caller does not wait."""


class RetentionRunner:
    """Moves one partition's log start."""

    def __init__(self, retention: Retention, abandoned: AbandonedPolicy, removed: Callable[[int], object]) -> None:
        """`removed`: so many bytes of files go."""
        self.retention = retention
        self._removed = removed
        self.abandoned = abandoned
        self._ages = PairAges()
        self._by_age = True  # clocks are trusted
        self._asked = -1  # the log start event that was applied when another one was asked for
        self._worthwhile = 0  # position of the log start whose deferred messages are being carried
        self._carried = (-1, 0)  # offset and position of the reference whose carrying was asked for last
        self._refused = (0, 0.0)  # position of the log start that is not worth it, and until when not to look again
        self._damaged = -1  # the batch, or the message, that was reported last

    def step(self, partition: RetainedLog, now: Now, *, by_age: bool = True) -> None:
        """Take the next step, if one is due; not `by_age`: nothing goes because it is old."""
        self._by_age = by_age
        try:
            self._step(partition, now)
        except BatchCorrupt as error:
            if self._damaged != error.first.log_id:
                self._damaged = error.first.log_id
                logger.warning("retention_delayed", "%s keeps its files: %s", partition.log.directory, error)
            partition.on_damage(error.first.log_id, error.end.log_id)
        except NotInLog as error:
            if not partition.life.wrong_state(partition, error) and self._damaged != error.offset:
                self._damaged = error.offset
                logger.warning("retention_delayed", "%s keeps its files: %s", partition.log.directory, error)

    def _step(self, partition: RetainedLog, now: Now) -> None:
        pairs, retention = self._ages.sane(partition.log.pairs, now.wall_ns), self._retention_now()
        if partition.log.forgotten_files:
            partition.files.drop(None)
        if len(pairs) == 1:
            if roll_due(pairs[0], retention, now.wall_ns) and self._all_read(partition, pairs[0], now):
                partition.files.roll()
            return
        self._unlink(partition, pairs)
        given_up = self._give_up(partition, pairs, now)
        limit = max([self._limit(partition, now), *(a.end for a in given_up)])
        start = log_start(pairs, retention, now.wall_ns, limit_offset=limit)
        state = partition.cursors.state
        moves = start.offset > state.log_start[0] or start.position > state.log_start[1]
        if moves and self._asked != state.log_start_log_id:
            self._propose(partition, pairs, start, given_up, now)

    def _retention_now(self) -> Retention:
        """That of the settings, without ages while clocks are not trusted; what is kept for no time is not old."""
        retention = self.retention
        return retention if self._by_age or not retention.keep_ns else replace(retention, keep_ns=None)

    def _limit(self, partition: RetainedLog, now: Now) -> int:
        return partition.cursors.retention.log_start_limit(partition.log.next_timestamp(now.wall_ns))

    def _all_read(self, partition: RetainedLog, pair: PairInfo, now: Now) -> bool:
        return self._limit(partition, now) >= pair.end.offset

    def _propose(
        self, partition: RetainedLog, pairs: list[PairInfo], start: Place, given_up: list[Abandoned], now: Now
    ) -> None:
        cursors = partition.cursors
        if self._refused[0] == start.position and now.mono < self._refused[1]:
            return
        # One more than are carried at once tells whether there are more; a million of them would fill memory.
        references = cursors.retention.to_carry(start.offset, start.position, CARRY_AT_ONCE + 1)
        frames: list[tuple[int, bytes]] = []
        if references:
            first = references[0].offset, references[0].position
            if first == self._carried:
                return  # it is on its way; who knows when that is committed
            if self._worthwhile != start.position:
                going = sum(pair.size for pair in pairs if pair.end.position <= start.position)
                samples = references[:: len(references) // SAMPLES + 1]
                average = sum(len(partition.log.message(r.offset, r.position)) for r in samples) / len(samples)
                affordable = int(going / average / CARRY_SHARE)
                if cursors.retention.must_carry_more(start.offset, start.position, than=affordable):
                    # Mostly deferred messages: appending them again would free little.
                    self._refused = (start.position, now.mono + REFUSED_SECONDS)
                    return
                self._worthwhile = start.position
            size = 0
            while len(frames) < min(len(references), CARRY_AT_ONCE) and size < CARRY_BYTES:
                reference = references[len(frames)]
                frames.append((reference.offset, partition.log.message(reference.offset, reference.position)))
                size += len(frames[-1][1])
            for offset, frame in frames:
                cursors.retention.carry(offset, frame)
            self._carried = first
        if len(frames) == len(references):
            for abandoned in given_up:
                count = abandoned.end - abandoned.first
                logger.warning("abandoned", "%d unread messages of an abandoned channel are given up", count)
            cursors.retention.propose_log_start(start.offset, start.position, tuple(given_up))
            self._asked = cursors.state.log_start_log_id
        partition.write_events()

    def _unlink(self, partition: RetainedLog, pairs: list[PairInfo]) -> None:
        cursors = partition.cursors
        up_to: Place | None = None
        for pair in pairs[:-1]:
            end = pair.end
            if end.offset > cursors.state.log_start[0] or end.position > cursors.state.log_start[1]:
                break
            if not cursors.retention.may_unlink(
                end_offset=end.offset, end_position=end.position, end_log_id=end.log_id
            ):
                if cursors.state.checkpoint.as_of < end.log_id and not cursors.checkpoints.unfinished:
                    cursors.checkpoints.begin(cursors.state.snapshot())
                    partition.write_events()
                break
            up_to = end
        if up_to is None:
            return
        if partition.log.local_durable > cursors.retention.needed_durable:
            logger.info("unlinked", "%s: files below offset %d go", partition.log.directory, up_to.offset)
            self._removed(up_to.position - pairs[0].first.position)
            partition.files.drop(up_to)
        else:
            partition.files.sync()  # with sync=none nothing else does, and a full disk would stay full

    def _give_up(self, partition: RetainedLog, pairs: list[PairInfo], now: Now) -> list[Abandoned]:
        """What the policy takes from channels without consumers, so that the log start can pass it."""
        policy = self.abandoned
        if policy.after_ns is None and policy.over_bytes is None:
            return []
        kept_from = partition.cursors.retention.kept_from(partition.log.next_timestamp(now.wall_ns))
        wanted = log_start(pairs, self._retention_now(), now.wall_ns, limit_offset=kept_from)
        found = []
        for name, channel in partition.cursors.channels.items():
            delivery = partition.deliveries.get(name)
            if channel.ephemeral or channel.committed.floor >= wanted.offset or delivery is None or delivery.consumers:
                continue
            entry = partition.log.entry_for_offset(max(channel.committed.floor, partition.log.start.offset))
            if entry is None:
                continue
            old = self._by_age and policy.after_ns is not None and entry.timestamp_ns < now.wall_ns - policy.after_ns
            much = policy.over_bytes is not None and partition.log.end.position - entry.position > policy.over_bytes
            if old or much:
                found.append(Abandoned(channel.uid, channel.committed.floor, wanted.offset))
        return found

    def change(self, *, retention: Retention, abandoned: AbandonedPolicy) -> None:
        """The topic's settings changed."""
        self.retention = retention
        self.abandoned = abandoned


def pass_over_old(cursors: PartitionCursors, log: PartitionLog, now: Now) -> bool:
    """Have channels pass over what their policies do not allow to be so old; whether there may have been any."""

    def first_since(time_ns: int) -> int:
        entry = log.entry_for_time(time_ns)
        return log.end.offset if entry is None else entry.first_offset

    try:
        return bool(cursors.passing) and cursors.passing.expire(now.wall_ns, first_since)
    except (LogCorrupt, OSError):
        return False  # what is damaged is found, and told, by those that read it
