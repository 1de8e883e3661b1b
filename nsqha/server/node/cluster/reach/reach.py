"""A node that registers connects with the others before it gets replicas that it never held.

    joins: Live stream to the peer port, Reach to the gRPC port of each broker  ->  that broker connects to this one's
    Live stream of the controller  ->  it reaches the peer port
    -> `replication.contacts` decides -> `joining` in the record of this node

A record without `joining` is of a node that has joined, so a node of an older build, which does not know the field, is
treated as it always was; one that does not serve Reach counts when it is reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from nsqha.election.model import JUST_REGISTERED, TRIED_SECONDS
from nsqha.errors import NsqhaError
from nsqha.nsqlog import Logger
from nsqha.replication.contacts import Contacts
from nsqha.server.runtime.backoff import Backoff

if TYPE_CHECKING:
    from nsqha.election.model import NodeInfo
    from nsqha.election.session import View
    from nsqha.server.node.cluster.reach.dialler import Dialler

AGAIN_SECONDS = (0.05, 5.0)  # pauses between two attempts with one broker
ANNOUNCE_AGAIN_SECONDS = 1.0  # after the record could not be changed
SAID_AGAIN_SECONDS = 10.0  # between two lines that say what is missing

logger = Logger("cluster")


class Registered(Protocol):
    """The registration of this node."""

    info: NodeInfo | None

    @property
    def is_open(self) -> bool: ...

    async def update(self, **changes: Any) -> None: ...


class Reach:
    """Tries the connections of one node."""

    def __init__(
        self,
        registration: Registered,
        view: Callable[[], View],
        dialler: Dialler,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.missing = JUST_REGISTERED  # connections; empty: this node has joined
        self.joined = asyncio.Event()
        self._contacts = Contacts(dialler.node)
        self._registration = registration
        self._view = view
        self.dialler = dialler
        self._spawn = spawn
        self._trying: set[int] = set()
        self._again: dict[int, tuple[Backoff, float]] = {}  # node -> pauses, and when it is tried next
        self._began = 0.0  # loop time; 0: not yet
        self._said, self._said_at = JUST_REGISTERED, 0.0
        self._announcing = False

    def look(self) -> None:
        """Several times a second from the registration on; costs nothing once all is there."""
        info = self._registration.info
        if info is None or not info.registration or (self._contacts.complete and self._announced):
            return
        now, alive = asyncio.get_running_loop().time(), self._alive(info)
        self._began = self._began or now
        for uid, other in alive.items():
            due = self._again[uid][1] if uid in self._again else 0.0
            if uid not in self._contacts.reached and uid not in self._trying and now >= due:
                self._trying.add(uid)
                self._spawn(self._try(info, other))
        self._judge()

    def controller_came(self) -> None:
        """The controller's stream to this node is open: each side has accepted the other."""
        self._contacts.controller_came()
        self._judge()

    def _alive(self, info: NodeInfo) -> dict[int, NodeInfo]:
        return {**self._view().nodes, self.dialler.node: info}

    async def _try(self, info: NodeInfo, other: NodeInfo) -> None:
        uid = other.node_uid
        try:
            why = await self.dialler.connect(other, info.registration)
        finally:
            self._trying.discard(uid)
        if why:
            backoff = self._again[uid][0] if uid in self._again else Backoff(*AGAIN_SECONDS)
            self._again[uid] = backoff, asyncio.get_running_loop().time() + backoff.next_pause()
            self._contacts.failed(uid, why)
        else:
            self._contacts.connected(uid)
        self._judge()

    def _judge(self) -> None:
        info = self._registration.info
        if info is None or not info.registration:
            return
        view = self._view()
        names = {uid: other.name for uid, other in self._alive(info).items()}
        controller = (view.controller.name or "without a name") if view.controller is not None else ""
        self.missing = self._contacts.look(names, controller)
        if not self.missing:
            self.joined.set()
        self._tell(asyncio.get_running_loop().time())
        if not self._announced and not self._announcing and self._registration.is_open and self._worth_a_write:
            self._announcing = True
            self._spawn(self._announce(self.missing))

    def _tell(self, now: float) -> None:
        if self.missing == self._said:
            return
        if not self.missing:
            text = "connected with a majority of the brokers: this node may get replicas, and is ready"
            logger.info("joined", text)
        elif now - self._began < TRIED_SECONDS or (self._said_at and now - self._said_at < SAID_AGAIN_SECONDS):
            return
        else:
            self._said_at = now
            text = (
                "this node gets no new replicas and is not ready: %s; check the addresses, certificates and secret of "
                "the side that is named"
            )
            logger.warning("join_incomplete", text, self.missing)
        self._said = self.missing

    @property
    def _announced(self) -> bool:
        info = self._registration.info
        return info is not None and info.joining == self.missing

    @property
    def _worth_a_write(self) -> bool:
        """The record says that all is there at once, and what is missing when the log does."""
        return not self.missing or self.missing == self._said

    async def _announce(self, missing: str) -> None:
        try:
            await self._registration.update(joining=missing)
        except NsqhaError as error:
            logger.info("not_announced", "%s; trying again", error)
            await asyncio.sleep(ANNOUNCE_AGAIN_SECONDS)
        finally:
            self._announcing = False
