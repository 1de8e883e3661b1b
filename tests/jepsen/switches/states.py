"""What a broker knows to be wrong of itself, and does not say on the wire.

    states = StatesFile(path)     the harness; the process is started with --states-file
    states.wrong(seconds)         what is wrong, in words; TimeoutError: it did not answer
    states.errors()               what it logged as an error, in all its lives: (event, line)

To be asked when the cluster is well. Wrong is then

    a channel state that is not what the log beside it says (`tests.states`)
    a channel that stopped
    a channel that has something for a consumer with room, and hands out nothing for IDLE_SECONDS

A thread looks at the file. The loop of the broker only takes what is compared, one partition at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsqha.server.node.broker import Broker
from tests.states import Applied, differences

LOOK_SECONDS = 0.05
ANSWER_SECONDS = 10.0  # of the loop
IDLE_SECONDS = 5.0  # in which a channel hands out something, if there is something and somebody takes it

Name = tuple[str, int, str]  # of a channel in a partition


class StatesFile:
    """What one process found; for whoever starts it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._asked = 0
        path.write_text("0")
        _errors(path).write_text("")

    def wrong(self, seconds: float) -> list[str]:
        self._asked += 1
        _replace(self.path, str(self._asked))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                answer = json.loads(_answer(self.path).read_text())
                if answer["asked"] == str(self._asked):
                    return list(answer["wrong"])
            time.sleep(LOOK_SECONDS)
        raise TimeoutError(f"{self.path}: no answer in {seconds:.0f} s")

    def errors(self) -> list[tuple[str, str]]:
        lines = _errors(self.path).read_text().splitlines()
        return [(event, line) for event, line in map(json.loads, lines)]


class ErrorFile(logging.Handler):
    """Notes errors by their events, which text logs do not have."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info
        cause = error[1] if isinstance(error, tuple) else error
        line = f"{record.getMessage()}{f': {type(cause).__name__}: {cause}' if cause else ''}"
        with self._path.open("a") as file:
            file.write(json.dumps([getattr(record, "event", record.name), line]) + "\n")


def follow(path: Path) -> None:
    """This process says what is wrong with it when the file asks."""
    logging.getLogger().addHandler(ErrorFile(_errors(path)))
    brokers: list[Broker] = []
    init = Broker.__init__

    def remembering(self: Broker, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        brokers.append(self)

    Broker.__init__ = remembering  # type: ignore[method-assign]
    done = path.read_text() if path.exists() else ""  # what an earlier life was asked for

    def look() -> None:
        nonlocal done
        while True:
            time.sleep(LOOK_SECONDS)
            with contextlib.suppress(FileNotFoundError):
                asked = path.read_text()
                if asked != done:
                    done = asked
                    wrong = [text for broker in brokers for text in _wrong(broker)]
                    _replace(_answer(path), json.dumps({"asked": asked, "wrong": wrong}))

    threading.Thread(target=look, name="states", daemon=True).start()


def _wrong(broker: Broker) -> Iterator[str]:
    loop = broker.parts.opener.runtime.loop

    async def called(what: Any, *args: Any) -> Any:
        return what(*args)

    def on_loop(what: Any, *args: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(called(what, *args), loop).result(ANSWER_SECONDS)

    try:
        stopped, before = on_loop(_idle, broker)
        yield from stopped
        if before:
            time.sleep(IDLE_SECONDS)
            stopped, after = on_loop(_idle, broker)
            yield from stopped
            for (name, number, channel), count in before.items():
                if after.get((name, number, channel)) == count:
                    yield f"{name}/{number} {channel}: has something, and handed out nothing for {IDLE_SECONDS:g} s"
        for name, number in on_loop(_partitions, broker):
            taken = on_loop(_taken, broker, name, number)
            if taken is not None and (differ := differences(*taken)):
                yield f"{name}/{number}: the channel state (first) is not of its log: {differ}"
    except Exception as error:
        yield f"not compared: {type(error).__name__}: {error}"


def _idle(broker: Broker) -> tuple[list[str], dict[Name, object]]:
    """The channels that stopped; and how far those are that have something for a consumer with room."""
    stopped, waiting = [], dict[Name, object]()
    for topic in broker.topics.values():
        for partition in topic.led:
            for name, delivery in partition.deliveries.items():
                if delivery.stuck is not None and delivery.damage is None:
                    stopped.append(f"{topic.name}/{partition.number} {name} stopped: {delivery.stuck}")
                ready = any(consumer.room > 0 for consumer in delivery.consumers)
                if ready and not delivery.delayed and delivery.has_backlog(partition.now()):
                    cursor = delivery.channel.cursor
                    counts = [consumer.message_count for consumer in delivery.consumers]
                    waiting[topic.name, partition.number, name] = (cursor.next_read, counts)
    return stopped, waiting


def _partitions(broker: Broker) -> list[tuple[str, int]]:
    return [(topic.name, number) for topic in broker.topics.values() for number in topic.record.partitions]


def _taken(broker: Broker, name: str, number: int) -> tuple[Any, Applied] | None:
    topic = next((topic for topic in broker.topics.values() if topic.name == name), None)
    if topic is None:
        return None
    if (partition := topic.leads(number)) is not None:
        log, state = partition.log, partition.cursors.state
    else:
        replicas = broker.cluster.replicas if broker.cluster is not None else None
        follower = None if replicas is None else replicas.followers.get((topic.record.uid, number))
        if follower is None or follower.applier.state is None:
            return None
        log, state = follower.log, follower.applier.state
    return log.snapshot(), Applied.of(state)


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def _errors(path: Path) -> Path:
    return path.with_name(f"{path.name}.errors")


def _answer(path: Path) -> Path:
    return path.with_name(f"{path.name}.done")
