"""What the connections of one node work with."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqha.clock import Clock, Now
    from nsqha.options import Options
    from nsqha.server.clients.auth import AuthClient
    from nsqha.server.clients.publish import Publishing
    from nsqha.server.clients.subscribe import Subscriptions
    from nsqha.server.clients.token_auth import TokenAuth
    from nsqha.server.clients.unfinished import ReadingBudget
    from nsqha.server.runtime.budget import PublishBudget, SharedTurns
    from nsqha.server.runtime.measures import Measures
    from nsqha.server.runtime.rare_warnings import RefusalLog
    from nsqha.server.topics.topics import Topics
    from nsqha.wire.limits import ProtocolLimits


@dataclass(frozen=True, slots=True)
class ClientContext:
    """The parts and settings of the node that a connection uses."""

    options: Options
    limits: ProtocolLimits
    loop: asyncio.AbstractEventLoop
    clock: Clock
    now: Callable[[], Now]
    auth: AuthClient | None
    tls_context: ssl.SSLContext | None
    budget: PublishBudget
    reading: ReadingBudget
    turns: SharedTurns
    measures: Measures
    topics: Topics
    publishing: Publishing
    subscriptions: Subscriptions
    tls_refused: RefusalLog
    tokens: TokenAuth | None = None  # of the access file
