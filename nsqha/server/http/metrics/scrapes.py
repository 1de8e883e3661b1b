"""Scrapes of /metrics: one at a time, and no more of them than leave the loop to the clients.

    asked -> the scrape before has ended -> a pause of REST times what that took, a second at most -> figures -> text

Those who waited for the same get the same answer: it was begun after all of them had asked. So several Prometheus
servers cost little more than one, and one that asks without end gets a tenth of the loop. Which topics and channels
have series of their own follows from the scrape before; the last FILTERS_MAX values of ?topic= have a bound each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from nsqha.server.http.metrics.series import SeriesBound
from nsqha.server.http.metrics.turns import in_turns
from nsqha.server.runtime.measures import open_files, open_files_told

if TYPE_CHECKING:
    from nsqha.server.http.broker_api import BrokerApi
    from nsqha.server.http.metrics.families import Scrape

FILTERS_MAX = 20
REST = 9
REST_SECONDS_MAX = 1.0


class _Made(NamedTuple):
    topic: str
    accept: str
    began: float
    scrape: Scrape


class Scrapes:
    """Answers of one listener."""

    def __init__(self, broker: BrokerApi, requests: Mapping[tuple[str, int], int]) -> None:
        self._broker = broker
        self._requests = requests
        self._bounds: dict[str, SeriesBound] = {}  # by the topic that was asked for; the last one asked for is last
        self._one = asyncio.Lock()
        self._asking = 0
        self._last: _Made | None = None  # as long as others wait
        self._not_before = 0.0

    async def scrape(self, topic: str, accept: str) -> Scrape:
        """`topic`: empty for all; `accept`: the header."""
        asked = time.monotonic()
        self._asking += 1
        try:
            async with self._one:
                last = self._last
                if last is None or (last.topic, last.accept) != (topic, accept) or last.began <= asked:
                    last = self._last = await self._made(topic, accept)
                return last.scrape
        finally:
            self._asking -= 1
            if not self._asking:
                self._last = None

    async def _made(self, topic: str, accept: str) -> _Made:
        from nsqha.server.http.metrics import families  # not needed before the first scrape

        if (pause := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(pause)
        began = time.monotonic()
        try:
            # To list them is one step, which takes long where there are many. But a thread, too, holds up the loop: it
            # keeps the interpreter for five milliseconds, unless it waits for something.
            files = open_files_told() or await asyncio.to_thread(open_files)
            stats = await self._broker.snapshot_in_turns(topic)
            work = families.rendered(stats, accept, self._bound(topic), dict(self._requests), files)
            return _Made(topic, accept, began, await in_turns(work))
        finally:
            ended = time.monotonic()
            self._not_before = ended + min(REST * (ended - began), REST_SECONDS_MAX)

    def _bound(self, topic: str) -> SeriesBound:
        bound = self._bounds.pop(topic, None) or SeriesBound()
        if len(self._bounds) >= FILTERS_MAX:
            del self._bounds[next(name for name in self._bounds if name)]
        self._bounds[topic] = bound
        return bound
