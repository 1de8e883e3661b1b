"""Who leads what, by the records as the watch last brought them and by what other nodes say of a later epoch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from nsqha.nsqlog import Logger
from nsqha.server.peers.identity import Members
from nsqha.server.routing.hints import Hints
from nsqha.server.routing.leaders import LeaderAt

if TYPE_CHECKING:
    from nsqha.election.store import MetadataWatch
    from nsqha.server.peers.api import Peers

logger = Logger("cluster")


class ClusterLeaders:
    """The leaders of a cluster as one node knows them: a `Leaders`."""

    def __init__(
        self,
        watch: MetadataWatch,
        *,
        node: int,
        cluster_id: int,
        peers: Peers,
        cut_off: Callable[[], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`cut_off`: whether this node can not know what the records are."""
        self.node = node
        self.cluster_id = cluster_id
        self.members = Members(lambda: watch.view())
        self._watch = watch
        self._cut_off = cut_off
        self._watchers: list[Callable[[str], None]] = []
        self.hints = Hints(
            self,
            peers,
            epoch_of=self._epoch_of,
            addresses=lambda: {uid: info.grpc_address for uid, info in watch.view().nodes.items()},
            cut_off=cut_off,
            spawn=spawn,
        )

    @property
    def cut_off(self) -> bool:
        """Whether this node can not know what the records are."""
        return self._cut_off()

    def name_of(self, node: int) -> str:
        """What the node's certificate may call it; empty: unknown."""
        return self.members.name_of(node)

    def alive(self, node: int) -> bool:
        """Whether a node is registered, as far as is known."""
        return node in self._watch.view().nodes or self.hints.names(node)

    def registration(self, node: int) -> int:
        """Which life of a node is registered, as far as is known; 0: none."""
        info = self._watch.view().nodes.get(node)
        return 0 if info is None else info.registration

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has; 0: it is not known."""
        found = self._watch.view().topics.get(topic)
        return 0 if found is None else len(found.record.partitions)

    def leader(self, topic: str, number: int) -> LeaderAt | None:
        """Who leads a partition; None: no node at the moment."""
        found = self._watch.view().topics.get(topic)
        meta = None if found is None else found.record.partitions.get(number)
        if found is None or meta is None:
            return None
        return self.hints.leader((found.record.uid, number), meta.epoch) or self.recorded(topic, number)

    def recorded(self, topic: str, number: int) -> LeaderAt | None:
        """Who leads a partition, by the record alone."""
        view = self._watch.view()
        found = view.topics.get(topic)
        meta = None if found is None else found.record.partitions.get(number)
        info = None if meta is None else view.nodes.get(meta.leader)
        if found is None or meta is None or info is None or meta.successor:
            return None
        return LeaderAt(meta.leader, info.grpc_address, info.peer_address, meta.epoch, found.record.uid)

    def not_led(self, topic: str, number: int, *, by: int = 0, hint: LeaderAt | None = None) -> bool:
        """A node takes nothing for a partition: it does not lead, and says perhaps who does, or it is not there."""
        found = self._watch.view().topics.get(topic)
        return found is not None and self.hints.not_led(topic, (found.record.uid, number), by, hint)

    def _epoch_of(self, topic: str, key: tuple[int, int]) -> int | None:
        found = self._watch.view().topics.get(topic)
        meta = None if found is None or found.record.uid != key[0] else found.record.partitions.get(key[1])
        return None if meta is None else meta.epoch

    def when_changed(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call with the name of each topic whose leaders may have changed; the result ends it."""
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    def changed(self, topic: str) -> None:
        """The leaders of a topic may be others now."""
        for callback in list(self._watchers):
            try:
                callback(topic)
            except Exception as error:
                # The others have to know, and the record is still to be followed.
                logger.error("change_not_delivered", "topic %s", topic, error=error)

    def all_changed(self) -> None:
        """The leaders of every topic may be others now."""
        for topic in self._watch.view().topics:
            self.changed(topic)
