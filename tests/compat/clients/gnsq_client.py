"""gnsq behind the lines of README.md. It can not ask for a message timeout; the broker's default holds."""

from __future__ import annotations

import contextlib
import ssl
from typing import Any

import gevent
import gevent.threadpool
import gnsq
from lines import commands, tell


class Reader(gnsq.Consumer):
    """gnsq 1.0.2 shares RDY out every five seconds, also to a connection that is only being made, which fails; the
    greenlet ends then, and no connection gets RDY any more."""

    def _redistribute_ready_state(self) -> None:
        with contextlib.suppress(AttributeError):
            super()._redistribute_ready_state()


class Client:
    def __init__(self) -> None:
        self.sender: gnsq.Producer | None = None
        self.reader: gnsq.Consumer | None = None
        self.messages: dict[int, gnsq.Message] = {}

    def options(self, command: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if command["compression"]:
            options[command["compression"]] = True
        if command["tls"]:
            options |= {"tls_v1": True, "tls_options": {"cert_reqs": ssl.CERT_NONE}}
        return options

    def producer(self, command: dict[str, Any]) -> None:
        self.sender = gnsq.Producer([command["nsqd"]], max_backoff_duration=0.5, **self.options(command))
        self.sender.start()
        tell("connected")

    def publish(self, command: dict[str, Any]) -> None:
        assert self.sender is not None
        topic, bodies = command["topic"], command["bodies"]
        try:
            if command["how"] == "PUB":
                self.sender.publish(topic, bodies[0], timeout=10)
            elif command["how"] == "MPUB":
                self.sender.multipublish(topic, bodies, timeout=10)
            else:
                self.sender.publish(topic, bodies[0], defer=command["delay_ms"], timeout=10)
            tell("published", n=command["n"])
        except (gnsq.errors.NSQException, KeyError) as error:  # KeyError: a connection that ended a moment ago
            tell("failed", n=command["n"], why=repr(error))

    def consumer(self, command: dict[str, Any]) -> None:
        self.reader = Reader(
            command["topic"],
            command["channel"],
            nsqd_tcp_addresses=[command["nsqd"]] if command["nsqd"] else [],
            lookupd_http_addresses=[command["lookupd"]] if command["lookupd"] else [],
            lookupd_poll_interval=1,
            max_in_flight=command["max_in_flight"],
            **({} if command["gives_up"] else {"max_tries": 0}),
            max_backoff_duration=0.5,
            message_handler=self.received,
            **self.options(command),
        )
        self.reader.start(block=False)

    def received(self, consumer: gnsq.Consumer, message: gnsq.Message) -> None:
        message.enable_async()
        number = len(self.messages) + 1
        self.messages[number] = message
        tell(
            "message",
            message=number,
            id=message.id,
            body=message.body,
            attempts=message.attempts,
            timestamp=message.timestamp,
        )

    def fin(self, command: dict[str, Any]) -> None:
        self.messages[command["message"]].finish()

    def req(self, command: dict[str, Any]) -> None:
        self.messages[command["message"]].requeue(time_ms=command["delay_ms"], backoff=False)

    def touch(self, command: dict[str, Any]) -> None:
        self.messages[command["message"]].touch()


def main() -> None:
    client = Client()
    lines = commands()
    pool = gevent.threadpool.ThreadPool(1)
    while (command := pool.apply(next, (lines, None))) is not None:
        gevent.spawn(getattr(client, command["do"]), command)


if __name__ == "__main__":
    main()
