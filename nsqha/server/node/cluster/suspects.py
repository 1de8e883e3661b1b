"""Leaders whose streams to this node ended, or are silent: the controllers hear of them on the streams that they have
with it.

A controller's stream to this node is news to both by its end. Until then this node names on it, each time that changes,
the nodes that it lost: perhaps they are gone, and the controller looks. It names apart the leaders that it does not
hear, though nothing ended: they are frozen, or cut off, and with enough such witnesses the controller replaces them.
What makes a witness is in `nsqha.replication.silence`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.silence import LookTimes

if TYPE_CHECKING:
    from nsqha.election.session import View
    from nsqha.election.store import MetadataWatch
    from nsqha.server.peers.api import PeerStream


logger = Logger("cluster")


class LeaderStream(Protocol):
    """A stream on which another node pushes to this one."""

    leader: int  # node uid

    def silent(self, *, late: bool) -> bool | None:
        """Look whether it is silent; None: this node follows nothing on it."""


class Suspects:
    """The nodes that one node suspects to be gone, and the controllers that it informs."""

    def __init__(self, watch: MetadataWatch, *, node: int, cluster_id: int) -> None:
        self._watch = watch
        self._node = node
        self._cluster_id = cluster_id
        self._registration = 0  # of this node; 0: not registered yet
        self._streams: dict[PeerStream, None] = {}  # in the order in which they came
        self._lost: dict[int, int] = {}  # nodes whose stream to us ended -> the life in which it did
        self._unheard: frozenset[int] = frozenset()  # leaders that are silent, on streams that are open
        self._look_times = LookTimes()
        self._closed = False

    def informs(self, stream: PeerStream) -> None:
        """A controller has come."""
        self._streams[stream] = None
        self._inform(stream)

    def stream_closed(self, stream: PeerStream) -> None:
        self._streams.pop(stream, None)

    def registered(self, registration: int) -> None:
        """This node is in another life."""
        self._registration = registration
        self._inform_all()

    def lost(self, node: int) -> None:
        """A leader's stream to this node ended; 0: the leader is not known."""
        if not self._closed and node:
            info = self._watch.view().nodes.get(node)
            self._lost[node] = info.registration if info is not None else 0
            self._inform_all()

    def found(self, node: int) -> None:
        """The node is there."""
        if node in self._lost:
            del self._lost[node]
            self._inform_all()

    def look(self, streams: Iterable[LeaderStream], now: float) -> None:
        """Look which leaders are heard, on the streams that nodes have opened; each LOOK_SECONDS."""
        late = self._look_times.late(now)
        looks = [(stream.leader, stream.silent(late=late)) for stream in streams]
        heard = {node for node, silent in looks if silent is False}
        unheard = frozenset(node for node, silent in looks if silent) - heard
        if unheard == self._unheard or self._closed:
            return
        for node in sorted(unheard - self._unheard):
            logger.warning("leader_unheard", "nothing is heard of node %016x, which leads partitions here", node)
        for node in sorted(self._unheard - unheard):
            logger.info("leader_heard", "node %016x is heard again, or leads nothing here any more", node)
        self._unheard = unheard
        self._inform_all()

    def forgive(self, view: View) -> None:
        """A node that is back, or gone for good, is suspected no more: in another life it may never push to us."""
        for node, registration in list(self._lost.items()):
            info = view.nodes.get(node)
            if info is None or info.registration != registration:
                self.found(node)

    def close(self) -> None:
        """This node stops: streams end on both sides."""
        self._closed = True

    def _inform_all(self) -> None:
        for stream in self._streams:
            self._inform(stream)

    def _inform(self, stream: PeerStream) -> None:
        message = self.signed()
        message.takes_questions = True
        message.suspects.extend(sorted(self._lost))
        message.unheard.extend(sorted(self._unheard))
        stream.send(message)

    def signed(self) -> pb.LiveMessage:
        """A message that says who sends it."""
        return pb.LiveMessage(cluster_id=self._cluster_id, node_uid=self._node, registration=self._registration)
