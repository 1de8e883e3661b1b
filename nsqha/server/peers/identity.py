"""Who may ask what, once the certificate of the one who asks has been verified.

    a node of this cluster                   everything, as itself: a hello that claims to be another one is refused
    a lookup daemon: a DNS name, no uid      what changes nothing and shows no message: MAY_ASK
    an administrator: ADMINISTRATOR_URI      administration, segments
    a reader: READER_URI                     segments
    anybody else                             nothing, even with a certificate of the cluster's CA

A node belongs to the cluster if it is registered, or if a record names it: one that has lost its lease still catches
up, and serves its clients. Records name nodes by uid. What a certificate without a uid calls a node is in its
registration, which goes with the lease, so that is remembered (`Members`). Without TLS no peer is verified, and
every claim is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from nsqha.errors import Unavailable
from nsqha.nsqlog import Logger
from nsqha.server.peers.api import Accept, Answer, Message, PeerIdentity, PeerServer, PeerStream, StreamHandler
from nsqha.server.runtime.rare_warnings import RareWarnings

if TYPE_CHECKING:
    from nsqha.election.model import NodeInfo
    from nsqha.election.session import View

MAY_ASK = frozenset({"Status", "Live", "Evidence", "KnownChannels"})

logger = Logger("peers")


class Members:
    """The view of the records with those nodes besides that this process has seen registered and records still name."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view
        self._seen: Mapping[int, NodeInfo] = {}
        self._looked_at: View | None = None
        self._found: View

    def view(self) -> View:
        """To be asked for whenever registrations have changed, or a name may never be seen."""
        view = self._view()
        if view is not self._looked_at:
            self._looked_at, self._found = view, self._with_former(view)
        return self._found

    def _with_former(self, view: View) -> View:
        former = {uid: node for uid, node in self._seen.items() if uid not in view.nodes}
        if former:
            named = _named(view)
            former = {uid: node for uid, node in former.items() if uid in named}
        self._seen = {**former, **view.nodes}
        return replace(view, nodes=self._seen) if former else view

    def name_of(self, node: int) -> str:
        """What the node's certificate may call it, see `PeerIdentity.may_be`; empty: unknown."""
        info = self.view().nodes.get(node)
        return "" if info is None else info.broadcast_address


def _named(view: View) -> set[int]:
    """All nodes that have, or are to have, a replica."""
    metas = (meta for topic in view.topics.values() for meta in topic.record.partitions.values())
    return {uid for meta in metas for uid in (*meta.isr, *meta.replicas)}


def is_member(view: View, peer: PeerIdentity) -> bool:
    """Whether a verified peer may speak for some node of the cluster."""
    if any(peer.may_be(uid, node.broadcast_address) for uid, node in view.nodes.items()):
        return True
    return peer.node_uid != 0 and peer.node_uid in _named(view)


def may_call(view: View, peer: PeerIdentity, method: str) -> bool:
    """Whether a method between nodes is for this peer."""
    if not peer.verified or is_member(view, peer):
        return True
    return method in MAY_ASK and bool(peer.names) and not peer.node_uid


def may_administrate(view: View, peer: PeerIdentity) -> bool:
    """Administrators, and nodes, which pass on what administrators ask."""
    return not peer.verified or peer.administrator or is_member(view, peer)


def may_read(view: View | None, peer: PeerIdentity) -> bool:
    """Whether segments are for this peer: readers, administrators, and nodes of the cluster, if there is one."""
    if not peer.verified or peer.reader or peer.administrator:
        return True
    return view is not None and is_member(view, peer)


class MembersOnly:
    """A `PeerServer` that refuses strangers before a method sees them."""

    def __init__(self, server: PeerServer, view: Callable[[], View]) -> None:
        self._server = server
        self._view = view
        self._refused = RareWarnings(logger, "stranger_refused")

    def on_stream(self, method: str, accept: Accept) -> None:
        def checked(stream: PeerStream) -> StreamHandler:
            self._check(stream.peer, method)
            return accept(stream)

        self._server.on_stream(method, checked)

    def on_call(self, method: str, answer: Answer) -> None:
        async def checked(peer: PeerIdentity, request: Message) -> Message:
            self._check(peer, method)
            return await answer(peer, request)

        self._server.on_call(method, checked)

    def _check(self, peer: PeerIdentity, method: str) -> None:
        # Unavailable: a node that has only just registered is not in our view yet, and tries again.
        if not may_call(self._view(), peer, method):
            self._refused.warning("%s from %s: no node of this cluster", method, peer)
            raise Unavailable(f"{method} is for nodes of this cluster, and {peer} is none that is known here")
