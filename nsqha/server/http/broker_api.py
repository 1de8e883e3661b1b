"""What the HTTP side needs from the broker: the contract between `server.node.broker` and everything that only
observes or administers it (`api`, `statsd`, `metrics`, `registrar`).

Calls that change something are coroutines: they return when the change is committed and raise `errors.NotFound`,
`errors.Unavailable` (nothing was done), `errors.StorageError` or `errors.OutcomeUnknown`. Queries are plain calls and
answer at once, from memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.election.model import ChannelList, TopicRecord
    from nsqha.options import Options
    from nsqha.server.http.stats import BrokerStats


@dataclass(frozen=True, slots=True)
class BoundPorts:
    """The bound ports; -1 for a Unix socket, 0 for a listener that is off."""

    tcp: int = 0
    http: int = 0
    https: int = 0
    grpc_address: str = ""  # of the administration, which starts last


def announced_ports(options: Options, ports: BoundPorts) -> tuple[int, int]:
    """The TCP and HTTP ports that are announced: the bound ones, unless the flags set others."""
    return options.broadcast_tcp_port or ports.tcp, options.broadcast_http_port or ports.http


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
        """Until when (loop time) a publish that arrives now may wait for those under way."""

    async def publish(
        self,
        topic: str,
        frames: bytes,
        *,
        partition: int | None = None,
        deliver_in_ms: int | None = None,
        until: float | None = None,
    ) -> None:
        """Store blank frames (made by hot.frame or hot.mpub_body) as one unit; creates the topic."""

    def named_partitions(self, topic: str) -> int:
        """How many partitions of the topic a publish may name; 0: there is no choice."""

    async def room(self, until: float | None = None) -> None:
        """Return when a publish would not have to wait for those under way."""


class Recorded(Protocol):
    """A topic, as far as it is its record."""

    @property
    def record(self) -> TopicRecord: ...


class TopicsApi(Protocol):
    """The topics of the broker."""

    @property
    def deleted_elsewhere(self) -> Container[str | tuple[str, str]]:
        """Topics, and channels as (topic, channel), that another node deleted a moment ago."""

    async def create_topic(self, topic: str) -> None:
        """Create the topic, unless it exists, and wait until all its partitions are led."""

    async def ensure_topic(self, topic: str) -> object:
        """Create the topic, unless it exists: a publish follows, which waits for the partition that it needs."""

    async def delete_topic(self, topic: str, *, unless_hidden: bool = False) -> None:
        """Delete the topic. `unless_hidden`: if a lookup daemon hid this node for it a moment ago, others lead it
        instead."""

    # ---- queries

    def topic(self, name: str) -> Recorded:
        """NotFound: there is none."""

    def __contains__(self, topic: object) -> bool: ...


class ChannelsApi(Protocol):
    """The channels, and operations on all channels of a topic."""

    async def create(self, topic: str, channel: str) -> None:
        """Create the channel, unless it exists; the topic must exist."""

    async def delete(self, topic: str, channel: str) -> None: ...

    async def pause(self, topic: str, channel: str, paused: bool) -> None: ...

    async def ask(self, topic: str, channel: str, changes: Mapping[str, Any]) -> ChannelList:
        """Change the policy of a channel, or of `*`. ValueError if that does not fit."""

    async def pause_topic(self, topic: str, paused: bool) -> None: ...

    async def empty(self, topic: str, channel: str, partition: int | None = None) -> None: ...

    async def empty_topic(self, topic: str, partition: int | None = None) -> None: ...

    # ---- queries

    def has(self, topic: str, channel: str) -> bool: ...


class MessagesApi(Protocol):
    """What the administration does to single messages, and counts of them in the whole cluster."""

    @property
    def finish_message(self) -> Callable[[str, str, str], Awaitable[None]]:
        """(topic, channel, message id): nobody gets it any more. ValueError: that is no message id. NotFound, Conflict:
        it is not there."""

    @property
    def unfinished(self) -> Callable[[str, str, int | None], Awaitable[int]]:
        """(topic, channel, partition): messages that its consumers still have to do with; channel "": that no channel
        got yet; partition None: of all. NotFound; Unavailable."""


class ClusterPageApi(Protocol):
    """The cluster that this node is one of."""

    async def page(self) -> bytes | None:
        """The cluster as this node sees it, as JSON (`nsqha.election.observed.page`); None: there is no cluster."""


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
        """Whether the stop has begun: publishes are refused."""

    @property
    def side(self) -> ClusterPageApi: ...

    @property
    def topics(self) -> TopicsApi: ...

    @property
    def channels(self) -> ChannelsApi: ...

    @property
    def publishing(self) -> PublishingApi: ...

    @property
    def endpoints(self) -> MessagesApi: ...

    def set_lookupds(self, addresses: Sequence[str]) -> None:
        """Announce this node to these lookup daemons only, from now on; `options` then shows them."""

    def set_log_level(self, level: str) -> None:
        """Set one of debug, info, warn, error, fatal; `options` then shows it."""

    # ---- queries

    def health(self) -> str:
        """`OK`, or `NOK - ` and the reason why the last write to disk failed."""

    def checks(self) -> Sequence[Check]:
        """What /healthz and /readyz report."""

    def snapshot(self, topic: str = "", clients: bool = True) -> BrokerStats:
        """All statistics at this moment. With `topic` other topics may be missing, without `clients` the clients."""

    async def snapshot_in_turns(self, topic: str = "", clients: bool = False) -> BrokerStats:
        """The same partition by partition, so that nobody waits for all of them; clients only if they are asked for."""
