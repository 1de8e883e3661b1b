"""What the HTTP side may ask of the broker: the contract between `server.node.broker` and everything that only watches
or administers it (`api`, `statsd`, `metrics`, `registrar`).

Calls that change something are coroutines: they return when the change is committed and raise `errors.NotFound`,
`errors.Unavailable` (nothing was done), `errors.StorageError` or `errors.OutcomeUnknown`. Questions are plain calls and
answer from memory, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.options import Options
    from nsqha.server.http.stats import BrokerStats


@dataclass(frozen=True, slots=True)
class BoundPorts:
    """The ports really bound; -1 for a Unix socket, 0 for a listener that is off."""

    tcp: int = 0
    http: int = 0
    https: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of /readyz, and of /healthz if `live`: a reason why this node may not serve."""

    name: str
    ok: bool
    detail: str = ""
    live: bool = False


class PublishingApi(Protocol):
    """Publishes that do not come from a V2 client."""

    def patience(self) -> float:
        """Until when a publish that came just now waits for those that are under way; loop time."""

    async def publish(
        self, topic: str, frames: bytes, *, deliver_in_ms: int | None = None, until: float | None = None
    ) -> None:
        """Store blank frames (as hot.frame or hot.mpub_body make them) as one unit; creates the topic."""

    async def room(self, until: float | None = None) -> None:
        """Return when a publish would not have to wait for those that are under way."""


class TopicsApi(Protocol):
    """Which topics there are."""

    async def create_topic(self, topic: str) -> None:
        """Create it, if it is not there."""

    async def delete_topic(self, topic: str) -> None: ...

    # ---- questions

    def __contains__(self, topic: object) -> bool: ...


class ChannelsApi(Protocol):
    """Channels, and what is done to all channels of a topic."""

    async def create(self, topic: str, channel: str) -> None:
        """Create it, if it is not there; the topic must be."""

    async def delete(self, topic: str, channel: str) -> None: ...

    async def pause(self, topic: str, channel: str, paused: bool) -> None: ...

    async def pause_topic(self, topic: str, paused: bool) -> None: ...

    async def empty(self, topic: str, channel: str) -> None: ...

    async def empty_topic(self, topic: str) -> None: ...

    # ---- questions

    def has(self, topic: str, channel: str) -> bool: ...


class BrokerApi(Protocol):
    """The broker as its HTTP API sees it."""

    @property
    def options(self) -> Options: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def ports(self) -> BoundPorts: ...

    @property
    def start_time_ns(self) -> int:
        """When this process began to serve, nanoseconds since 1970."""

    @property
    def exiting(self) -> bool:
        """A stop has begun: publishes are refused."""

    @property
    def topics(self) -> TopicsApi: ...

    @property
    def channels(self) -> ChannelsApi: ...

    @property
    def publishing(self) -> PublishingApi: ...

    def set_lookupds(self, addresses: Sequence[str]) -> None:
        """Announce this node to these lookup daemons from now on, and to no others; `options` shows it afterwards."""

    def set_log_level(self, level: str) -> None:
        """One of debug, info, warn, error, fatal; `options` shows it afterwards."""

    # ---- questions

    def health(self) -> str:
        """`OK`, or `NOK - ` and why the last write to disk failed."""

    def checks(self) -> Sequence[Check]:
        """What /healthz and /readyz report."""

    def snapshot(self, topic: str = "", clients: bool = True) -> BrokerStats:
        """All statistics at this moment. With `topic`, others may be left out; without `clients`, all clients may."""
