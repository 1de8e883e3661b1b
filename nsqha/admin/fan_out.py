"""Sends a request about a topic to the leader of each of its partitions, and returns one answer for each partition.

    partitions --led here--> carried out here
               --led elsewhere--> one call to each leader, all at once; that node asks no other
               --no leader, the leader has changed, it cannot be reached--> retried after a moment, for `seconds`
               --still not--> `TopicRequest.failed`, for each partition by itself

A call whose outcome is unknown is not repeated: an undo that is carried out twice goes back and forth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from nsqha.admin.topic_request import NOT_LED, TopicRequest, meant_here, why_silent
from nsqha.errors import NotFound, NsqhaError, Unavailable

if TYPE_CHECKING:
    from nsqha.admin.peer_admins import PeerAdmins
    from nsqha.server.routing.leaders import Leaders

LEADER_SECONDS = 2.0  # for a leader to be found, while one is elected
RETRY_SECONDS = 0.05
NO_LEADER = "no node leads it at the moment"

T = TypeVar("T")


def leads_not(address: str) -> str:
    """Why the node at this address gave no answer for a partition."""
    return f"{address}, which is known as its leader, does not lead it, or not yet"


class FanOut:
    """Sends requests of one node to the leaders."""

    def __init__(self, leaders: Leaders | None, peers: PeerAdmins | None, *, seconds: float = LEADER_SECONDS) -> None:
        """`leaders` and `peers`: None for a single node, which leads every partition."""
        self._leaders = leaders
        self._peers = peers
        self._seconds = seconds

    async def answers(self, request: TopicRequest[T], numbers: Collection[int]) -> dict[int, T]:
        """Return an answer for each of these partitions. Raises NotFound, ValueError if the request is invalid for
        every partition, or if there is only one partition and its leader raises it."""
        if self._leaders is None or request.message.HasField("here"):
            return await _here_alone(request, numbers)
        topic, loop = request.topic, asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        answers: dict[int, T] = {}
        why: dict[int, str] = {}
        while waiting := [n for n in numbers if n not in answers]:
            mine = [n for n in waiting if topic.leads(n) is not None]
            theirs: dict[str, list[int]] = {}
            for number in set(waiting).difference(mine):
                leader = self._leaders.leader(topic.name, number)
                if leader is None or leader.node == self._leaders.node:
                    why[number] = NO_LEADER
                else:
                    why[number] = leads_not(leader.address)
                    theirs.setdefault(leader.address, []).append(number)
            works = [_here(request, mine, why)] if mine else []
            works += [self._ask(request, at, sorted(asked), why, len(numbers)) for at, asked in theirs.items()]
            for found in await asyncio.gather(*works):
                answers.update(found)
            if len(answers) < len(numbers):
                if loop.time() >= deadline:
                    return answers | {n: request.failed(n, why[n]) for n in numbers if n not in answers}
                await asyncio.sleep(RETRY_SECONDS)
        return answers

    async def _ask(
        self, request: TopicRequest[T], address: str, numbers: list[int], why: dict[int, str], count: int
    ) -> Mapping[int, T]:
        assert self._peers is not None, "this node is alone"
        try:
            return await request.ask(self._peers, address, numbers)
        except Unavailable as error:
            why.update(dict.fromkeys(numbers, str(error)))
            return {}
        except (NsqhaError, ValueError) as error:
            if count == 1 and isinstance(error, NotFound | ValueError):
                raise
            return {n: request.failed(n, str(error) or type(error).__name__) for n in numbers}


async def _here_alone(request: TopicRequest[T], numbers: Collection[int]) -> dict[int, T]:
    mine = meant_here(request.topic, request.message)
    found: dict[int, Any] = dict(await request.here([n for n in numbers if n in mine]))
    why = {n: why_silent(request.topic, n) if n in mine else NOT_LED for n in numbers}
    return found | {n: request.failed(n, why[n]) for n in numbers if n not in found}


async def _here(request: TopicRequest[T], numbers: list[int], why: dict[int, str]) -> Mapping[int, T]:
    found = await request.here(numbers)
    why.update((number, why_silent(request.topic, number)) for number in numbers if number not in found)
    return found
