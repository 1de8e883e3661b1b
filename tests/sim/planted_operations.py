"""Planted bugs: what operators ask for, replicas and topics that go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.storage import Storage
from nsqha.cursor.committed.holds import NEVER_PASSED, Holds
from nsqha.cursor.committed.state import LogStartMoved, PartitionState
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.deferred.overlay import DeferredOverlay
from nsqha.cursor.events import EpochStart
from nsqha.cursor.live.ordered import OrderedChannel
from nsqha.cursor.partition import PartitionCursors
from nsqha.cursor.retention import ChannelRetention
from nsqha.election import moves
from nsqha.errors import NsqhaError
from nsqha.server.opening.log_folders import LogFolders
from nsqha.server.partition.partition import Partition
from nsqha.server.topics.channel_leaders import ClusterChannelLeaders
from nsqha.server.topics.channels import Channels, in_steps
from tests.sim.planting import batch_readers, carried, in_order, mutant, topics_go

# ---- operators


@mutant(scene=("test_cluster.test_a_seek_is_not_answered_while_a_failover_could_undo_it",))
def seek_answered_before_it_is_committed() -> Iterator[None]:
    """A seek that a failover can undo."""

    async def move(self: Channels, partition: Partition, channel: str, target: int | None) -> Any:
        cursors = partition.cursors
        try:
            if target is None:
                plan = await in_steps(cursors.requests.planning_undo(channel))
                cursors.requests.undo(channel)
            else:
                plan = await in_steps(cursors.requests.planning_seek(channel, target))
                cursors.requests.seek(channel, target)
        except NsqhaError as error:
            return error
        partition.write_events()
        return plan

    with patch.object(Channels, "_move", move):
        yield


@mutant()
def seek_forgets_what_was_finished_behind_it() -> Iterator[None]:
    """A seek back that skips what had been finished out of order."""

    def seek(self: PartitionState, event: Any, log_id: int, effects: Any) -> None:
        channel = self.channels.by_uid(event.uid)
        ranges = None if channel is None else channel.ranges
        original(self, event, log_id, effects)
        if channel is not None and ranges is not None and not event.undo:
            channel.ranges = ranges
            channel.raise_floor(channel.floor)

    original = PartitionState._seek
    with patch.object(PartitionState, "_seek", seek):
        yield


@mutant()
def pause_lost_at_failover() -> Iterator[None]:
    """A leader begins with all channels going."""

    def open_(self: PartitionCursors, committed: Any) -> None:
        original(self, committed)
        self.channels[committed.name].paused = False

    original = PartitionCursors._open
    with patch.object(PartitionCursors, "_open", open_):
        yield


@mutant()
def pause_answered_from_the_record() -> Iterator[None]:
    """Leaders follow a change by their watch, whenever that tells them."""

    async def follow(self: ClusterChannelLeaders, topic: Any) -> None:
        pass

    with patch.object(ClusterChannelLeaders, "follow", follow):
        yield


@mutant()
def topic_pause_ignored() -> Iterator[None]:
    """What is published to a paused topic goes to its channels."""

    def channels(self: PartitionState, event: Any, effects: Any) -> None:
        original(self, event, effects)
        self.paused = False

    original = PartitionState._channels
    with patch.object(PartitionState, "_channels", channels):
        yield


@mutant()
def log_start_passes_slow_channels() -> Iterator[None]:
    """Retention takes what a channel has not read."""
    with patch.object(PartitionState, "log_start_limit", lambda self: self.pump):
        yield


# ---- replicas and topics


@mutant()
def page_cache_trusted_after_a_power_loss() -> Iterator[None]:
    """With sync=interval a machine that lost its page cache goes by the old name of its log."""
    with patch.object(NodeJournal, "page_cache_lost", lambda self, key: False):
        yield


@mutant()
def moved_before_they_joined() -> Iterator[None]:
    """Replicas are given up for others that have nothing yet."""

    def next_step(meta: Any, wanted: Any, settings: Any) -> Any:
        step = original(meta, wanted, settings)
        if isinstance(step, moves.Joining) and meta.leader in wanted:
            isr = {uid: log_uid for uid, log_uid in meta.isr.items() if uid in wanted}
            return moves.Put(replace(meta, replicas=wanted, isr=isr), "replicas_moved")
        return step

    original = moves.next_step
    with patch.object(moves, "next_step", next_step):
        yield


@mutant(topics_go)
def removal_not_synced() -> Iterator[None]:
    """Files of a deleted topic are left to chance, its tombstone is not."""

    def remove(self: LogFolders, folder: str, *, within: bool) -> bool:
        storage: Storage = self.storage
        storage.remove_tree(folder)
        return False

    with patch.object(LogFolders, "_remove", remove):
        yield


@mutant(batch_readers)
def log_start_passes_holds() -> Iterator[None]:
    """Retention takes what a batch reader holds."""
    with patch.object(Holds, "lowest", lambda self, timestamp_ns: NEVER_PASSED):
        yield


@mutant(batch_readers)
def holds_end_with_their_leader() -> Iterator[None]:
    """A new leader begins without any."""

    def apply_event(self: PartitionState, event: Any, *rest: Any) -> None:
        original(self, event, *rest)
        if isinstance(event, EpochStart):
            self.holds = Holds()

    original = PartitionState._apply_event
    with patch.object(PartitionState, "_apply_event", apply_event):
        yield


# ---- order and delays


@mutant(in_order)
def ordered_before_the_fin_is_committed() -> Iterator[None]:
    """The next message goes out when the one before is finished in memory, which a failover forgets."""

    def all_committed(self: OrderedChannel) -> bool:
        return not self.in_flight and self.cursor.floor == self.cursor.next_read

    with patch.object(OrderedChannel, "_all_committed", all_committed):
        yield


@mutant(scene=("test_cluster.test_what_is_deferred_for_longer_than_files_stay_comes_all_the_same",))
def deferred_not_carried() -> Iterator[None]:
    """The log start passes what is deferred. Whoever applies it would keep the frame all the same: that goes too."""

    def log_start(self: PartitionState, event: Any, entry: Any, effects: Any) -> None:
        offset = min(event.offset, self.log_start_limit())
        self.log_start = (max(self.log_start[0], offset), max(self.log_start[1], event.position))
        self.log_start_log_id = entry.log_id
        effects.append(LogStartMoved(*self.log_start))

    with (
        patch.object(ChannelRetention, "to_carry", lambda self, offset, position, limit=None: []),
        patch.object(PartitionState, "_log_start", log_start),
    ):
        yield


@mutant(carried)
def carried_position_is_forgotten() -> Iterator[None]:
    """What was changed of a deferred message says where its frame was, and not where it was carried to."""

    def get(self: DeferredOverlay, offset: int) -> Deferred | None:
        change = self._changes.get(offset)
        return self.committed.get(offset) if change is None else change.ref

    with patch.object(DeferredOverlay, "get", get):
        yield
