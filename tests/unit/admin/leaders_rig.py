"""Several nodes that lead parts of one topic, as their Admin services see each other; no sockets, no logs.

A `FakeNode` answers for the partitions that it leads; a `FakeOthers` is how one node calls the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, TopicSettings
from nsqha.errors import Unavailable
from tests.fakes.partitions import FakeLeaders

UID = 77


def leaders_of(known: dict[int, int]) -> FakeLeaders:
    """What node 1 thinks of who leads; `known`: a node for each partition of topic "t" that has a leader."""
    leaders = FakeLeaders(1)
    for number, node in known.items():
        leaders.appoint("t", number, node)
    return leaders


def topic_of(leads: list[int], partitions: int) -> Any:
    """A `Topic` of a node that leads these partitions."""
    metas = {n: PartitionMeta() for n in range(partitions)}
    record = TopicRecord("t", UID, 3, TopicSettings(partitions=partitions), partitions=metas)
    led = [SimpleNamespace(number=n, begins=f"{n} has only begun") for n in leads]
    return SimpleNamespace(
        name="t", record=record, led=led, leads=lambda n: next((p for p in led if p.number == n), None)
    )


class FakeOthers:
    """Answers by address; a call to an address without one is refused before it is sent."""

    def __init__(self, **answers: Callable[[str, Any], Any]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, str, list[int]]] = []

    async def call(self, address: str, rpc: str, request: Any, *, seconds: float) -> Any:
        self.calls.append((address, rpc, list(request.here.partitions)))
        assert request.HasField("here"), "a second hop"
        return self._answer(address)(rpc, request)

    async def stream(self, address: str, rpc: str, request: Any, *, seconds: float) -> AsyncIterator[Any]:
        self.calls.append((address, rpc, list(request.here.partitions)))
        for message in self._answer(address)(rpc, request):
            if isinstance(message, Exception):
                raise message
            yield message

    def _answer(self, address: str) -> Callable[[str, Any], Any]:
        if address not in self.answers:
            raise Unavailable(f"{address} is not there")
        return self.answers[address]


def info(node: int) -> NodeInfo:
    return NodeInfo(node, name=f"n{node}", grpc_address=f"n{node}", peer_address=f"n{node}")
