"""An operator who moves a channel again and again: back by messages, by time or to the start, and undoes that; who
empties it, and undoes that. Nothing may be lost by it for good: he only goes back, and what is emptied is undone.

He asks any node over gRPC, one request at a time, and writes down what each partition answered. An error says nothing
certain, so his next move begins by looking where the channel is.

Another one has a channel skip what comes, and not, again and again; in the end not.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.terminal.exits import Exit
from nsqha.errors import NsqhaError
from tests.jepsen.history import AdminEnded, Place, SeekEnded
from tests.jepsen.load.recorder import Recorder

BETWEEN_SECONDS = (1.0, 4.0)
ANSWER_SECONDS = 12.0
BACK_SECONDS = 5.0  # at most, of a seek to a time
BACK_MESSAGES = 300  # at most, of a seek to an offset
NS = 1_000_000_000

SKIPS_SECONDS = (0.5, 3.0)  # for which a channel skips
READS_SECONDS = (3.0, 9.0)
OFF_SECONDS = 40.0  # in which a channel at the end has to be told


class Operator:
    """Of one channel."""

    def __init__(
        self, load: Recorder, address: Callable[[], str], topic: str, channel: str, rng: random.Random
    ) -> None:
        """`address`: of a node's gRPC, another one each time."""
        self._load = load
        self._address = address
        self._topic = topic
        self._channel = channel
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self.moves = 0  # that were answered

    async def run(self) -> None:
        while self._load.publishing:
            await asyncio.sleep(self._rng.uniform(*BETWEEN_SECONDS))
            await self.once()

    async def once(self) -> None:
        kind = self._rng.choices(("offset", "time", "start", "empty"), (4, 4, 1, 2))[0]
        if kind == "empty":
            await self._empty()
            await self._seek("undo")
            return
        if kind == "time":
            await self._seek("time", value=time.time_ns() - int(self._rng.uniform(0, BACK_SECONDS) * NS))
        elif kind == "start":
            await self._seek("start")
        else:
            await self._back_by_messages()
        if self._rng.random() < 0.4:
            await asyncio.sleep(self._rng.uniform(0, 0.5))
            await self._seek("undo")

    async def _back_by_messages(self) -> None:
        """In one partition, from where it is."""
        plan = await self._ask("Seek", target={"end": True}, plan_only=True)
        places = [place for place in ([] if plan is None else plan.partitions) if not place.error]
        if places:
            place = self._rng.choice(places)
            offset = max(0, place.from_offset - self._rng.randint(1, BACK_MESSAGES))
            await self._seek("offset", value=offset, partition=place.partition)

    async def _seek(self, to: str, *, value: int = 0, partition: int = -1) -> None:
        load = self._load
        only = {} if partition < 0 else {"partition": partition}
        op = load.seek_sent(self._topic, self._channel, to, value=value, partition=partition)
        if to == "undo":
            answer = await self._ask("UndoSeek", **only)
        else:
            fields = {"time": {"timestamp_ns": value, "clock_skew_ns": 0}, "offset": {"offset": value}}
            answer = await self._ask("Seek", target=fields.get(to, {to: True}), **only)
        places = [] if answer is None else list(map(place_of, answer.partitions))
        done = answer is not None and answer.done and bool(places)
        load.record(SeekEnded(load.now(), op, "ok" if done else "info", places))
        self.moves += done

    async def _empty(self) -> None:
        load = self._load
        op = load.admin_sent("empty", self._topic, self._channel)
        answer = await self._ask("EmptyChannel")
        load.record(AdminEnded(load.now(), op, "info" if answer is None else "ok"))

    async def _ask(self, rpc: str, **fields: Any) -> Any:
        """The answer; None if there was none, whatever that means."""
        return await self._loop.run_in_executor(None, self._call, rpc, fields)

    def _call(self, rpc: str, fields: dict[str, Any]) -> Any:
        try:
            with Admin(self._address(), ANSWER_SECONDS) as admin:
                if "target" in fields:
                    fields = {**fields, "target": admin.messages.SeekTarget(**fields["target"])}
                if "set" in fields:
                    fields = {**fields, "set": admin.messages.ChannelPolicy(**fields["set"])}
                return admin.call(rpc, topic=self._topic, channel=self._channel, **fields)
        except (Exit, NsqhaError, OSError):
            return None


class Switcher(Operator):
    """Of a channel that skips at times."""

    async def once(self) -> None:
        await self._skip(True)
        await asyncio.sleep(self._rng.uniform(*SKIPS_SECONDS))
        deadline = self._loop.time() + OFF_SECONDS
        while not await self._skip(False) and self._loop.time() < deadline:
            await asyncio.sleep(0.2)
        await asyncio.sleep(self._rng.uniform(*READS_SECONDS) if self._load.publishing else 0)

    async def _skip(self, skip: bool) -> bool:
        load = self._load
        said = {"skip": skip}
        op = load.admin_sent("policy", self._topic, self._channel, json.dumps(said))
        answer = await self._ask("UpdateChannelPolicy", set=said)
        load.record(AdminEnded(load.now(), op, "info" if answer is None else "ok"))
        return answer is not None


def place_of(answer: Any) -> Place:
    """What a partition answered. An undo that leaves something emptied is one that did not do what it is for."""
    error = answer.error or (f"{answer.deferred_lost} deferred are lost" if answer.deferred_lost else "")
    return Place(answer.partition, answer.from_offset, answer.to_offset, answer.to_timestamp_ns, answer.clamped, error)
