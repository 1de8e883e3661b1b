"""The registration of this node in the metadata store, under a lease that the others count on.

    join -> registered --the lease ends--> lost --again and again--> registered, in another life

What is said by a session that was given up concerns nothing any more: only the last one counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nsqha.election.model import NodeInfo
from nsqha.errors import ConfigError, OutcomeUnknown, StaleMetadata, Unavailable
from nsqha.nsqlog import Logger
from nsqha.quantile import SECONDS_BOUNDS, Histogram

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.election.session import ClusterSession
    from nsqha.election.store import MetadataStore
    from nsqha.server.node.cluster.folder_life import FolderLife

logger = Logger("cluster")

T = TypeVar("T")

WORKERS = 8  # calls to the metadata store at a time
REJOIN_SECONDS = 1.0


class RegisteredNode(Protocol):
    """The node, as far as its registration concerns it."""

    on_fatal: Callable[[str], None]

    @property
    def spawn(self) -> Callable[[Coroutine[Any, Any, None]], object]:
        """Begins a task that no caller waits for."""

    def registered(self, registration: int) -> None:
        """In this life."""

    def lease_lost(self) -> None:
        """The others may take this node for dead."""

    def joined_again(self) -> None:
        """Every role has to be looked at again."""


class NodeRegistration:
    """The registration of one node."""

    def __init__(
        self,
        node: RegisteredNode,
        store: MetadataStore,
        folder: FolderLife,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        ttl_s: float,
    ) -> None:
        self.info: NodeInfo | None = None  # what this node says of itself
        self.folder = folder
        self._node = node
        self._store = store
        self._loop = loop
        self._clock = clock
        self._ttl_s = ttl_s
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="metadata")
        self._session: ClusterSession | None = None
        self._updating = asyncio.Lock()  # what one change says, the next one keeps
        self._life: object = None  # which session counts
        self._registering = False
        self._closed = False
        self.request_seconds = Histogram(SECONDS_BOUNDS)  # of calls to the store, with all their attempts
        self.requests_failed = 0

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Carry out a blocking call to the store."""
        began = self._clock.monotonic()
        done = self._loop.run_in_executor(self._pool, call)
        done.add_done_callback(lambda done: self._measure(done, began))
        return done

    def _measure(self, done: asyncio.Future[Any], began: float) -> None:
        self.request_seconds.observe(self._clock.monotonic() - began)
        # A Conflict and the like are answers.
        if not done.cancelled() and isinstance(done.exception(), (Unavailable, OutcomeUnknown, StaleMetadata)):
            self.requests_failed += 1

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        """On any of the store's threads: call this on the loop."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            pass  # the loop is closed: the process ends

    @property
    def is_open(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    @property
    def has_lease(self) -> bool:
        """Whether the others count on this node being there."""
        return self._session is not None and self._session.fresh(self._clock.monotonic())

    @property
    def lease_seconds(self) -> float:
        """How long the lease lasts if it is not renewed any more."""
        return 0.0 if self._session is None else self._session.seconds_left(self._clock.monotonic())

    async def register(self) -> None:
        """Announce this node. ConfigError: another process is this node."""
        assert self.info is not None
        life = self._life = object()
        lost = lambda: self.call_soon(self._session_lost, life)  # noqa: E731
        self._registering = True
        try:
            session = self._session = await self.run(lambda: self._store.sessions.open(ttl_s=self._ttl_s, lost=lost))
            info = self.info
            try:
                self.info = await self.run(lambda: session.register(info))
                if self._session is not session:
                    raise Unavailable("the lease ended while this node registered")
            except BaseException:
                self._session = self._life = None
                await self.run(session.close)
                raise
        finally:
            self._registering = False
        self._node.registered(self.info.registration)
        logger.info("registered", "node %016x (%s), life %d", self.info.node_uid, info.name, self.info.registration)

    def _session_lost(self, life: object) -> None:
        """The lease is gone."""
        if not self._closed and life is self._life:
            logger.warning("lease_lost", "the others may take this node for dead; joining again")
            self._session = None
            self._node.lease_lost()
            if not self._registering:  # else that fails, and is tried again
                self._node.spawn(self.rejoin())

    async def rejoin(self) -> None:
        """Register until it succeeds."""
        while not self._closed:
            try:
                await self.register()
            except ConfigError as error:
                self._node.on_fatal(str(error))
                return
            except Exception as error:
                logger.info("join_delayed", "%s: %s", type(error).__name__, error)
                await asyncio.sleep(REJOIN_SECONDS)
            else:
                self._node.joined_again()
                return

    async def update(self, **changes: Any) -> None:
        """Change what this node says of itself."""
        async with self._updating:
            if self._session is not None and self.info is not None:
                session, info = self._session, replace(self.info, **changes)
                self.info = await self.run(lambda: session.update(info))

    async def announce_failure(self, why: str) -> None:
        """The data directory is closed: say so to the others, and to the next start. Unavailable, OutcomeUnknown."""
        await self.update(poisoned=why)  # first: others are to lead
        await self.run(lambda: self.folder.failed(why))

    def tick(self) -> None:
        """The loop runs."""
        if self._session is not None:
            self._session.ticked()

    def end(self) -> None:
        """This node stops: a lease that ends now is no news."""
        self._closed = True

    async def close(self) -> None:
        """Give the lease back, and close the store."""
        if self._session is not None:
            await self.run(self._session.close)
        await self.run(self._store.close)
        self._pool.shutdown(wait=False)
