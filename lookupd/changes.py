"""What an operator changes through the lookup daemon: topics, channels, and intents for the controller.

Each change is a compare-and-set of the metadata, so any daemon can make it; brokers and the controller see it by their
watch. The calls block and run in the controller shell's worker threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from nsqha.election import moves, rules
from nsqha.election.model import ChannelList, PartitionMeta, TopicSettings
from nsqha.election.placement import ALWAYS, Hours, Move, PartitionName
from nsqha.election.store import Intent, MetadataIntents, MetadataRecords
from nsqha.errors import Conflict, LimitReached, NotFound, too_many_changes
from nsqha.ids import is_ephemeral, new_uid

RETRIES = 100
"""Attempts of a compare-and-set that lost against another change of the same record."""

T = TypeVar("T")


class MetadataChanges:
    """Blocking; raises what the store raises, and Unavailable after too many lost races."""

    def __init__(
        self, records: MetadataRecords, intents: MetadataIntents, rng: random.Random, *, channels_max: int = 0
    ) -> None:
        """`channels_max`: of one topic; 0: no limit."""
        self._channels_max = channels_max
        self._records = records
        self._intents = intents
        self._rng = rng

    def create_topic(self, name: str, settings: TopicSettings, channels: Iterable[str] = ()) -> None:
        """Create a topic with `channels`; the controller places it. Conflict if it exists with other settings."""
        try:
            self._records.create_topic(name, settings, channels=self._listed(channels))
        except Conflict:
            found = self._records.topic(name)
            if found is None or found.record.settings != settings:
                raise

    def ensure_topic(self, name: str, channels: Iterable[str] = ()) -> None:
        """Create it with the defaults, and these channels, unless it is there."""
        if self._records.topic(name) is None:
            try:
                self._records.create_topic(name, TopicSettings(), channels=self._listed(channels))
            except Conflict:
                pass  # another caller was faster

    def change_settings(self, name: str, changes: Mapping[str, Any]) -> bool:
        """Change settings; the controller places new replicas. False: the cluster has no such topic. ValueError if
        they do not fit each other or the topic."""
        for _ in range(RETRIES):
            found = self._records.topic(name)
            if found is None:
                return False
            changed = rules.with_settings(found.record, changes)
            if changed == found.record:
                return True
            try:
                self._records.replace(name, found.version, changed)
            except Conflict:
                continue
            return True
        raise too_many_changes(f"topic {name}")

    def create_channel(self, topic: str, channel: str, channels: Iterable[str] = ()) -> None:
        """Create a channel unless it exists; a missing topic is created too, with `channels`. LimitReached: the topic
        has as many as it may."""
        self.ensure_topic(topic, channels)
        uid = new_uid(self._rng)

        def add(channels: ChannelList) -> ChannelList:
            if channel in channels.channels:
                return channels
            if 0 < self._channels_max <= len(channels.channels):
                raise LimitReached(
                    f"topic {topic} has {len(channels.channels)} channels, as many as this lookup daemon's "
                    "--max-topic-channels allows: delete one that is not used"
                )
            return channels.with_channel(channel, uid)

        self._change_channels(topic, add)

    def _listed(self, channels: Iterable[str]) -> ChannelList:
        listed = ChannelList()
        for channel in islice(channels, self._channels_max or None):
            listed = listed.with_channel(channel, new_uid(self._rng))
        return listed

    def _change_channels(self, topic: str, change: Callable[[ChannelList], ChannelList]) -> None:
        for _ in range(RETRIES):
            found = self._records.topic(topic)
            if found is None:
                raise NotFound(f"there is no topic {topic}")
            channels = change(found.record.channels)
            if channels is found.record.channels:
                return
            try:
                self._records.replace(topic, found.version, replace(found.record, channels=channels))
            except Conflict:
                continue
            return
        raise too_many_changes(f"topic {topic}")

    # ---- intents

    def put_intent(self, name: str, intent: Intent) -> None:
        self._change_intent(name, lambda _: intent)

    def _change_intent(self, name: str, change: Callable[[Intent], Intent]) -> None:
        """Put what `change` makes of the intent that is there, or of an empty one."""
        for _ in range(RETRIES):
            found = self._intents.all().get(name)
            intent = change({} if found is None else found.record)
            if found is not None and found.record == intent:
                return
            try:
                self._intents.put(name, intent, expected_version=found.version if found else 0)
            except Conflict:
                continue
            return
        raise too_many_changes(f"intent {name}")

    def remove_intent(self, name: str) -> bool:
        """Remove an intent. False: there is none."""
        found = self._intents.all().get(name)
        if found is None:
            return False
        self._intents.remove(name, found.version)
        return True

    def decommission(self, node: int) -> None:
        """Move all replicas away from a node, and place no more there. A request that is there already is kept: it
        remembers what the node held at first."""
        name = moves.decommission_name(node)
        if name not in self._intents.all():
            self.put_intent(name, moves.decommission_intent(node, self._metas()))

    def recommission(self, node: int) -> bool:
        """Allow replicas on a node again and, if it is alive, bring back what it held; False if it was not being
        decommissioned."""
        back = self.brought_back(node)
        if not self.remove_intent(moves.decommission_name(node)):
            return False
        self.move(back)
        return True

    def brought_back(self, node: int) -> dict[PartitionName, tuple[int, ...]]:
        """The moves that `recommission` asks for."""
        intents = {name: intent.record for name, intent in self._intents.all().items()}
        intent = intents.get(moves.decommission_name(node), {})
        under_way = moves.read_intents(intents).moves
        return moves.brought_back(node, intent, self._metas(), under_way, self._records.nodes())

    def forget(self, node: int) -> None:
        """Wait for a node that is away no more: the controller takes its replicas out of all records."""
        self.remove_intent(moves.decommission_name(node))
        self.put_intent(moves.forget_name(node), {"node": node})

    def _metas(self) -> dict[PartitionName, PartitionMeta]:
        return {
            PartitionName(name, topic.record.uid, number): meta
            for name, topic in self._records.topics().items()
            if not is_ephemeral(name)
            for number, meta in topic.record.partitions.items()
        }

    def hide(self, topic_uid: int, node: int, wall_ns: int) -> None:
        """Say that a lookup daemon hid the node for this topic now."""
        self.put_intent(moves.hidden_name(topic_uid, node), moves.hidden_intent(topic_uid, node, wall_ns))

    def show_again(self, topic_uid: int, node: int, wall_ns: int) -> None:
        """Take back what `hide` said then, unless another daemon has said it again since."""
        name = moves.hidden_name(topic_uid, node)
        found = self._intents.all().get(name)
        if found is not None and found.record == moves.hidden_intent(topic_uid, node, wall_ns):
            self._intents.remove(name, found.version)

    def change_balance(self, *, paused: bool | None = None, window: str | None = None) -> None:
        """Set whether leaderships go back to the first replica automatically, and in which hours (`ALWAYS`: in
        all). None: as it was. ValueError: these are no hours."""
        if window is not None and window != ALWAYS:
            window = str(Hours.of(window))

        def changed(known: Intent) -> Intent:
            new = {**known, **({} if paused is None else {"paused": paused})}
            if window is not None:
                new.pop("window", None)
            return new if window in (None, ALWAYS) else {**new, "window": window}

        self._change_intent(moves.BALANCE, changed)

    def move(self, wanted: Mapping[PartitionName, tuple[int, ...]]) -> None:
        """Give partitions other replicas, first the one that will lead."""
        for name, replicas in wanted.items():
            self.put_intent(moves.move_name(name), moves.move_intent(Move(name, replicas), "operator"))
