"""What a node is made from: one disk, one journal, one metadata store; and what it listens on."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nsqha.errors import Unavailable
from nsqha.server.authorization.audit import Audit
from nsqha.server.http.broker_api import BoundPorts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from nsqha.clock import Now
    from nsqha.commitlog.journal import NodeJournal
    from nsqha.election.store import MetadataStore
    from nsqha.options import Options
    from nsqha.replication.clocks import BoundedClock
    from nsqha.server.authorization.audit_topic import AuditTopic
    from nsqha.server.authorization.guard import Guard
    from nsqha.server.clients.publish import PublishRoutes
    from nsqha.server.clients.subscribe import ConsumerRoutes
    from nsqha.server.node.availability import Availability
    from nsqha.server.node.registrar import Registrar
    from nsqha.server.opening.opener import PartitionOpener
    from nsqha.server.runtime.budget import PublishBudget
    from nsqha.server.runtime.disk import DiskRounds
    from nsqha.server.segments.byte_server import ByteServer
    from nsqha.server.topics.channels import Channels
    from nsqha.server.topics.topics import Topics


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The parts that a start opens and that a stop closes last."""

    loop: asyncio.AbstractEventLoop
    clock: BoundedClock
    rng: random.Random
    journal: NodeJournal
    store: MetadataStore
    disk: DiskRounds
    opener: PartitionOpener


async def _starting(topic: str, channel: str, message_id: str) -> None:
    raise Unavailable("the node is starting")


async def _not_counted(topic: str, channel: str, partition: int | None) -> int:
    raise Unavailable("the node is starting")


@dataclass(slots=True)
class Endpoints:
    """Where a node listens and what it announces; filled in while it starts."""

    ports: BoundPorts = field(default_factory=BoundPorts)
    segments_address: str = ""
    segments: ByteServer | None = None
    registrar: Registrar | None = None
    finish_message: Callable[[str, str, str], Awaitable[None]] = _starting  # the administration's, which starts last
    unfinished: Callable[[str, str, int | None], Awaitable[int]] = _not_counted  # likewise
    guard: Guard | None = None  # who may do what; None: everybody everything
    audit: Audit = field(default_factory=Audit)
    audit_topic: AuditTopic | None = None
    grpc_requests: Mapping[tuple[str, str], int] = field(default_factory=dict)  # answered, by method and status
    auth_refused: Mapping[str, int] = field(default_factory=dict)  # logins that auth servers did not allow, by reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedNode:
    """The parts of a node that take part in routing."""

    options: Options
    loop: asyncio.AbstractEventLoop
    budget: PublishBudget
    topics: Topics
    channels: Channels
    availability: Availability
    now: Callable[[], Now]
    spawn: Callable[[Coroutine[Any, Any, Any]], object]


@dataclass(frozen=True, slots=True)
class ClientRoutes:
    """Where publishes and consumers of this node's clients go."""

    publishes: PublishRoutes
    consumers: ConsumerRoutes
    refusal: Callable[[], str | None]  # why no publish is taken here now; None if they are
