"""The news of the records: what the watch names is looked at, and everything that follows from it is begun.

    watch (the store's thread) --name--> loop --> Topics.adopt / vanished / dropped, replicas settle, leaders changed

A record that is missing removes nothing. Only a tombstone does.

When a node that led thousands dies, as many records change at once. LOOKED_AT_ONCE are looked at in a turn of the loop,
so the first partitions begin to serve, and clients are answered, while the last records are still to be looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from nsqha import ids
from nsqha.errors import NsqhaError
from nsqha.nsqlog import Logger
from nsqha.server.node.cluster.registration import REJOIN_SECONDS
from nsqha.server.runtime.tasks import TaskGroup

if TYPE_CHECKING:
    from nsqha.election.model import Tombstone
    from nsqha.election.store import MetadataWatch
    from nsqha.server.node.cluster.leaders import ClusterLeaders
    from nsqha.server.node.cluster.suspects import Suspects
    from nsqha.server.replica.roles import Replicas
    from nsqha.server.topics.topics import Topics

logger = Logger("cluster")

DROP_AGAIN_SECONDS = 10.0  # what is left of a deleted topic is tried again
LOOKED_AT_ONCE = 64  # records in one turn of the loop
EVERYTHING = ""  # instead of the name of a record


class RecordFollower(Protocol):
    """The node that follows the records."""

    topics: Topics
    replicas: Replicas
    leaders: ClusterLeaders
    suspects: Suspects

    @property
    def spawn(self) -> Callable[[Coroutine[Any, Any, None]], object]:
        """Begins a task that no caller waits for."""


class RecordNews:
    """What one node has to do for the records that changed."""

    def __init__(self, node: RecordFollower, watch: MetadataWatch, loop: asyncio.AbstractEventLoop) -> None:
        self._node = node
        self._watch = watch
        self._loop = loop
        self._tasks = TaskGroup(loop)
        self._names: dict[str, None] = {}  # records to look at, the first named first
        self._news = asyncio.Event()
        self._being_made: dict[str, bool] = {}  # topic -> whether its record was named meanwhile
        self._dropping: set[int] = set()  # uids of deleted topics that are being removed here

    def start(self) -> None:
        """Look at all records, and from now on at each that is named."""
        self.named(EVERYTHING)
        self._tasks.spawn(self.follow())

    def stop(self) -> None:
        self._tasks.cancel()

    def named(self, name: str) -> None:
        """This record may have changed; EVERYTHING: any may."""
        self._names[name] = None
        self._news.set()

    @contextmanager
    def being_made(self, topic: str) -> Iterator[None]:
        """This node writes the topic's first record, and plays its roles by that: the watch may bring the record before
        the store has answered, and would have it read again."""
        self._being_made[topic] = False
        try:
            yield
        finally:
            if self._being_made.pop(topic):
                self.named(f"topics/{topic}")

    async def follow(self) -> None:
        while True:
            await self._news.wait()
            names = dict.fromkeys(islice(self._names, LOOKED_AT_ONCE))
            for name in names:
                del self._names[name]
            if not self._names:
                self._news.clear()
            try:
                self.look_at(names)
            except Exception as error:
                # Whatever it was: a node that does not follow the records any more takes no role ever again.
                if isinstance(error, NsqhaError):
                    logger.warning("records_delayed", "%s", error)
                else:
                    logger.error("records_failed", "trying again", error=error)
                self._names |= names
                self._news.clear()
                self._loop.call_later(REJOIN_SECONDS, self._news.set)
            await asyncio.sleep(0)

    def look_at(self, names: Collection[str]) -> None:
        """Have everything done that follows from these records; waits for none of it."""
        node, view = self._node, self._watch.view()
        node.leaders.hints.prune()
        everything = EVERYTHING in names
        if everything or any(name.startswith("nodes/") for name in names):
            node.leaders.members.view()
            node.suspects.forgive(view)
            node.replicas.nodes_changed()
            node.leaders.all_changed()
        for uid, tombstone in view.tombstones.items():
            if everything or f"tombstones/{uid:016x}" in names or f"topics/{tombstone.name}" in names:
                node.spawn(self.drop(tombstone))
        named = [name.removeprefix("topics/") for name in names if name.startswith("topics/")]
        for name in list(view.topics) if everything else named:
            topic = view.topics.get(name)
            if topic is not None:
                node.topics.adopt(topic)
                if name in self._being_made:
                    self._being_made[name] = True
                else:
                    # Roles are taken side by side: one partition that waits for its disk delays no other.
                    node.replicas.begin_to_settle(topic)
            elif ids.is_ephemeral(name):
                self._vanished(name)
            node.leaders.changed(name)
        if everything:
            for name in [name for name in node.topics if ids.is_ephemeral(name) and name not in view.topics]:
                self._vanished(name)

    def _vanished(self, name: str) -> None:
        """The record of an #ephemeral topic went with the node that made it. A change of it may be under way that waits
        for that node: no role waits for that."""
        topic = self._node.topics.get(name)
        if topic is not None:
            self._node.spawn(self._node.topics.vanished(topic))

    async def drop(self, tombstone: Tombstone) -> None:
        """Remove what is left of a deleted topic. What can not go now goes later, and keeps no other from its role."""
        if tombstone.uid in self._dropping:
            return
        self._dropping.add(tombstone.uid)
        try:
            await self._node.topics.dropped(tombstone)
        except Exception as error:
            text = "of the deleted topic %s; trying again: %s: %s"
            logger.warning("files_remain", text, tombstone.name, type(error).__name__, error)
            self._loop.call_later(DROP_AGAIN_SECONDS, self.named, f"tombstones/{tombstone.uid:016x}")
        finally:
            self._dropping.discard(tombstone.uid)
