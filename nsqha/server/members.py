"""Who may ask what, once the certificate of the one who asks has been verified.

    a node of this cluster        everything, as itself: a hello that claims to be another one is refused
    a lookup daemon: a DNS name   what changes nothing and shows no message: MAY_ASK
    an administrator: no name     administration
    anybody else                  nothing, even with a certificate of the cluster's CA

A node belongs to the cluster if it is registered, or if a record names it by the uid in its certificate: one that has
lost its lease still catches up. Without TLS nobody is verified, and everybody is believed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.errors import Unavailable
from nsqha.nsqlog import Log
from nsqha.server.peers import Accept, Answer, Message, PeerIdentity, PeerServer, PeerStream, StreamHandler

if TYPE_CHECKING:
    from nsqha.election.session import View

MAY_ASK = frozenset({"Status", "Live", "Evidence", "KnownChannels"})

log = Log("peers")


def is_member(view: View, peer: PeerIdentity) -> bool:
    """Whether a verified peer may speak for some node of the cluster."""
    if any(peer.may_be(uid, node.broadcast_address) for uid, node in view.nodes.items()):
        return True
    uid = peer.node_uid
    metas = (meta for topic in view.topics.values() for meta in topic.record.partitions.values())
    return uid != 0 and any(uid in meta.isr or uid in meta.replicas for meta in metas)


def may_call(view: View, peer: PeerIdentity, method: str) -> bool:
    """Whether a method between nodes is for this peer."""
    if not peer.verified or is_member(view, peer):
        return True
    return method in MAY_ASK and not peer.node_uid


def may_administrate(view: View, peer: PeerIdentity) -> bool:
    """Nodes pass on what administrators ask. Whoever has neither uid nor name is an administrator."""
    return not peer.verified or is_member(view, peer)


class MembersOnly:
    """A `PeerServer` that refuses strangers before a method sees them."""

    def __init__(self, server: PeerServer, view: Callable[[], View]) -> None:
        self._server = server
        self._view = view

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
            log.warning("stranger_refused", "%s from %s: no node of this cluster", method, peer)
            raise Unavailable(f"{method} is for nodes of this cluster, and {peer} is none that is known here")
