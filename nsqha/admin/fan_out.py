"""One request for many partitions, taken to whoever leads each of them; one answer for each of them.

    partitions --led here--> done here
               --led elsewhere--> one call to each leader, all at once: it answers for what it leads, and asks nobody
               --nobody leads, the leader has changed, can not be reached--> again in a moment, for `seconds`
               --still not--> `failed` says so, for each partition by itself

A call whose outcome is unknown is not repeated: an undo that is carried out twice goes back and forth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from nsqha.errors import NotFound, NsqhaError, Unavailable

RETRY_SECONDS = 0.05
NOBODY = "nobody leads it at the moment"

T = TypeVar("T")


class PartitionLeader(Protocol):
    """Where a partition is led."""

    @property
    def node(self) -> int: ...

    @property
    def address(self) -> str: ...


@dataclass(frozen=True)
class FanOut(Generic[T]):
    """How one kind of request is carried out."""

    here: Callable[[list[int]], Awaitable[Mapping[int, T]]]  # in what this node leads; no answer: not, or not yet
    ask: Callable[[str, list[int]], Awaitable[Mapping[int, T]]]  # of the node at an address; likewise
    leads: Callable[[int], bool]  # whether this node leads it
    waits: Callable[[int], str]  # why it gives no answer all the same
    leader: Callable[[int], PartitionLeader | None]  # as far as it is known here
    failed: Callable[[int, str], T]  # the answer for a partition where nothing can be said but this
    seconds: float  # leaders may take so long to be found

    async def over(self, numbers: Collection[int]) -> dict[int, T]:
        """An answer for each. NotFound, ValueError if there is only one partition and it says so."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.seconds
        answers: dict[int, T] = {}
        why: dict[int, str] = {}
        while waiting := [n for n in numbers if n not in answers]:
            mine = [n for n in waiting if self.leads(n)]
            theirs: dict[str, list[int]] = {}
            for number in waiting:
                if number not in mine:
                    leader = self.leader(number)
                    if leader is None:
                        why[number] = NOBODY
                    else:
                        why[number] = f"{leader.address}, which is known as its leader, does not lead it, or not yet"
                        theirs.setdefault(leader.address, []).append(number)
            works = [self._here(mine, why)] if mine else []
            works += [self._ask(address, asked, why, alone=len(numbers) == 1) for address, asked in theirs.items()]
            for found in await asyncio.gather(*works):
                answers.update(found)
            if len(answers) < len(numbers):
                if loop.time() >= deadline:
                    return answers | {n: self.failed(n, why[n]) for n in numbers if n not in answers}
                await asyncio.sleep(RETRY_SECONDS)
        return answers

    async def _here(self, numbers: list[int], why: dict[int, str]) -> Mapping[int, T]:
        found = await self.here(numbers)
        why.update((number, self.waits(number)) for number in numbers if number not in found)
        return found

    async def _ask(self, address: str, numbers: list[int], why: dict[int, str], *, alone: bool) -> Mapping[int, T]:
        try:
            return await self.ask(address, numbers)
        except Unavailable as error:
            why.update(dict.fromkeys(numbers, str(error)))
            return {}
        except (NsqhaError, ValueError) as error:
            if alone and isinstance(error, NotFound | ValueError):
                raise
            return {n: self.failed(n, str(error) or type(error).__name__) for n in numbers}
