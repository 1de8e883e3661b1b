"""pynsq behind the lines of README.md."""

from __future__ import annotations

import ssl
from typing import Any

import nsq
import tornado.ioloop
from lines import follow, tell

CONNECTED_POLL_MS = 20


class Client:
    def __init__(self) -> None:
        self.loop = tornado.ioloop.IOLoop.current()
        self.writer: nsq.Writer | None = None
        self.reader: nsq.Reader | None = None
        self.messages: dict[int, nsq.Message] = {}
        self.connected = False

    def act(self, command: dict[str, Any] | None) -> None:
        if command is None:
            self.loop.stop()
        else:
            getattr(self, command["do"])(command)

    def options(self, command: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if command["compression"]:
            options[command["compression"]] = True
        if command["tls"]:
            options |= {"tls_v1": True, "tls_options": {"cert_reqs": ssl.CERT_NONE}}
        return options

    def producer(self, command: dict[str, Any]) -> None:
        self.writer = nsq.Writer([command["nsqd"]], reconnect_interval=0.1, **self.options(command))
        tornado.ioloop.PeriodicCallback(self.watch, CONNECTED_POLL_MS).start()

    def watch(self) -> None:
        assert self.writer is not None
        connected = any(conn.connected() for conn in self.writer.conns.values())
        if connected != self.connected:
            self.connected = connected
            tell("connected" if connected else "gone")

    def publish(self, command: dict[str, Any]) -> None:
        assert self.writer is not None
        n, topic, bodies = command["n"], command["topic"], command["bodies"]

        def done(conn: Any, data: Any) -> None:
            if isinstance(data, nsq.Error):
                tell("failed", n=n, why=repr(data))
            else:
                assert data == b"OK", data
                tell("published", n=n)

        if command["how"] == "PUB":
            self.writer.pub(topic, bodies[0], callback=done)
        elif command["how"] == "MPUB":
            self.writer.mpub(topic, bodies, callback=done)
        else:
            self.writer.dpub(topic, command["delay_ms"], bodies[0], callback=done)

    def consumer(self, command: dict[str, Any]) -> None:
        self.reader = nsq.Reader(
            command["topic"],
            command["channel"],
            message_handler=self.received,
            nsqd_tcp_addresses=[command["nsqd"]] if command["nsqd"] else None,
            lookupd_http_addresses=[command["lookupd"]] if command["lookupd"] else None,
            lookupd_poll_interval=1,
            max_in_flight=command["max_in_flight"],
            msg_timeout=command["msg_timeout_ms"] / 1000,
            **({} if command["gives_up"] else {"max_tries": 0}),
            **self.options(command),
        )

    def received(self, message: nsq.Message) -> None:
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
    follow(lambda command: client.loop.add_callback(client.act, command))
    nsq.run()


if __name__ == "__main__":
    main()
