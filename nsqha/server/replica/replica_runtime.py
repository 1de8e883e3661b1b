"""What a node lends to its replicas, and they to their parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.commitlog.journal import NodeJournal
    from nsqha.election.model import NodeInfo
    from nsqha.server.opening.opener import PartitionOpener
    from nsqha.server.peers.api import Peers
    from nsqha.server.runtime.disk import DiskRounds
    from nsqha.server.runtime.journal import JournalWriter
    from nsqha.server.runtime.metadata import NodeMetadata


@dataclass(frozen=True, slots=True)
class ReplicaRuntime:
    """The parts and settings that all replicas of the node share."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    node: int  # its uid
    cluster_id: int
    journal: NodeJournal
    journal_writer: JournalWriter
    metadata: NodeMetadata
    opener: PartitionOpener
    disk: DiskRounds
    peers: Peers
    nodes: Callable[[], Mapping[int, NodeInfo]]  # those that are alive
    spawn: Callable[[Coroutine[Any, Any, None]], object]  # begins a task that nothing waits for
    on_failure: Callable[[BaseException], None]  # the disk failed
