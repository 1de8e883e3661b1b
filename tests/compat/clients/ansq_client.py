"""ansq behind the lines of README.md. It has neither TLS nor compression, and a window of one message.

Its consumers come back by themselves. A writer that published into a connection about to end does not (0.3.0 keeps the
unanswered publish at the head of its queue and takes the next life's IDENTIFY reply for it), so a new one is made.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ansq
from ansq.tcp.types import ConnectionFeatures, ConnectionOptions
from lines import follow, tell

ANSWER_SECONDS = 3.0
RECONNECT_SECONDS = 0.2


class Client:
    def __init__(self) -> None:
        self.writer: Any = None
        self.reader: Any = None
        self.messages: dict[int, Any] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def producer(self, command: dict[str, Any]) -> None:
        self.nsqd = command["nsqd"]
        self.writer = await self.new_writer()
        tell("connected")

    async def new_writer(self) -> Any:
        options = ConnectionOptions(auto_reconnect=False)
        return await ansq.create_writer(nsqd_tcp_addresses=[self.nsqd], connection_options=options)

    async def publish(self, command: dict[str, Any]) -> None:
        topic, bodies = command["topic"], command["bodies"]
        try:
            if self.writer is None:
                self.writer = await self.new_writer()
            if command["how"] == "PUB":
                publish = self.writer.pub(topic, bodies[0])
            elif command["how"] == "MPUB":
                publish = self.writer.mpub(topic, *bodies)
            else:
                publish = self.writer.dpub(topic, bodies[0], command["delay_ms"])
            answer = await asyncio.wait_for(publish, ANSWER_SECONDS)
            if not answer.is_ok:
                raise ConnectionError(repr(answer))
            tell("published", n=command["n"])
        except Exception as error:  # without a connection it raises IndexError, among others
            writer, self.writer = self.writer, None
            if writer is not None:
                with contextlib.suppress(Exception):
                    await writer.close()
            await asyncio.sleep(RECONNECT_SECONDS)
            tell("failed", n=command["n"], why=repr(error))

    async def consumer(self, command: dict[str, Any]) -> None:
        self.reader = await ansq.create_reader(
            topic=command["topic"],
            channel=command["channel"],
            nsqd_tcp_addresses=[command["nsqd"]] if command["nsqd"] else None,
            lookupd_http_addresses=[command["lookupd"]] if command["lookupd"] else None,
            lookupd_poll_interval=500,
            connection_options=ConnectionOptions(features=ConnectionFeatures(msg_timeout=command["msg_timeout_ms"])),
        )
        async for message in self.reader.messages():
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

    async def fin(self, command: dict[str, Any]) -> None:
        await self.messages[command["message"]].fin()

    async def req(self, command: dict[str, Any]) -> None:
        await self.messages[command["message"]].req(command["delay_ms"])

    async def touch(self, command: dict[str, Any]) -> None:
        await self.messages[command["message"]].touch()

    def act(self, command: dict[str, Any] | None) -> None:
        if command is None:
            asyncio.get_running_loop().stop()
            return
        task = asyncio.get_running_loop().create_task(getattr(self, command["do"])(command))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def main() -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    client = Client()
    follow(lambda command: loop.call_soon_threadsafe(client.act, command))
    loop.run_forever()


if __name__ == "__main__":
    main()
