"""Where the partitions of topics go: to this single node (`single_node`), or to nodes of a cluster.

What differs between the two is behind `Placement`; what announces topics to lookup daemons is behind `Announcer`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nsqha.election.model import TopicRecord, TopicSettings, Versioned
    from nsqha.options import Options
    from nsqha.server.opening.opener import PartitionOpener
    from nsqha.server.partition.topic import NewDelivery, Topic
    from nsqha.server.runtime.disk import DiskRounds
    from nsqha.server.runtime.journal import JournalWriter
    from nsqha.server.runtime.metadata import NodeMetadata
    from nsqha.server.runtime.tasks import Changes


@dataclass(frozen=True, slots=True)
class TopicContext:
    """What the topics of a node and their placement work with."""

    options: Options
    node_uid: int
    rng: random.Random
    metadata: NodeMetadata
    disk: DiskRounds
    journal_writer: JournalWriter
    opener: PartitionOpener
    changes: Changes
    new_delivery: NewDelivery
    spawn: Callable[[Coroutine[Any, Any, None]], object]  # ends with the broker
    forget_targets: Callable[[], None]  # connections have to ask again where to publish


class Placement(Protocol):
    """How topics get their partitions, and lose them."""

    def settings_for(self, name: str, settings: TopicSettings) -> TopicSettings:
        """The settings that a topic gets if these are asked for."""

    async def create(self, name: str, settings: TopicSettings) -> Topic:
        """Make the topic; the caller does not hold its lock. ValueError if the settings do not fit, Unavailable,
        OutcomeUnknown."""

    async def led(self, topic: Topic) -> None:
        """Return once every partition has a leader. OutcomeUnknown: one has none for long."""

    async def change(self, topic: Topic, changes: Mapping[str, Any]) -> None:
        """Change these settings; the caller holds the topic's lock. ValueError if they do not fit, NotFound,
        Unavailable."""

    async def left_instead(self, topic: Topic) -> bool:
        """Whether a /topic/delete at this node means this node alone, as a lookup daemon has just hidden it for the
        topic; others lead it then, and no message is deleted. Conflict: there is no other that could."""

    def has_seen_end_of(self, topic: Versioned[TopicRecord]) -> bool:
        """Whether the watch has seen the end of a topic whose record was read."""

    async def drop(self, uid: int, numbers: Collection[int]) -> None:
        """Neither lead nor follow these partitions of a topic any more."""

    async def remove_files(self, record: TopicRecord) -> None:
        """Remove what is left of a deleted topic, or leave it to a later moment."""

    def remarks(self, settings: TopicSettings) -> list[str]:
        """Remarks for an operator who has just asked for these settings."""


class Announcer(Protocol):
    """Tells lookup daemons which topics and channels there are."""

    def changed(self, topic: str, channels: Iterable[str] | None) -> None:
        """What this node has of a topic now, None: nothing."""

    def channels_changed(self, topic: str, channels: Mapping[str, bool]) -> None:
        """Which of these channels there are now of a topic that this node has."""

    @property
    def may_know(self) -> bool:
        """Whether a lookup daemon could say which channels a new topic begins with."""

    async def known_channels(self, topic: str, *, patient: bool = False) -> list[str]:
        """The channels of a brand-new topic that lookup daemons know. `patient`: a daemon to which no connection was
        tried yet is waited for."""


class NoLookupd:
    """An `Announcer` without lookup daemons."""

    def changed(self, topic: str, channels: Iterable[str] | None) -> None:
        pass

    def channels_changed(self, topic: str, channels: Mapping[str, bool]) -> None:
        pass

    @property
    def may_know(self) -> bool:
        return False

    async def known_channels(self, topic: str, *, patient: bool = False) -> list[str]:
        return []
