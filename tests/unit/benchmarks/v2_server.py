"""A throw-away NSQ V2 server: just enough to measure the benchmark itself.

Everything lives in memory and in one thread: IDENTIFY (answers what was asked for), PUB, MPUB, SUB, RDY, FIN, REQ,
NOP, and GET /ping. `--fault NAME` makes it wrong on purpose, for the checks that must notice:
`lose`, `repeat`, `alter`, `swap` (every hundredth message) and `error` (refuses every PUB from the hundredth on).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import sys
import time
from collections import deque
from typing import cast

import uvloop

OK = struct.pack(">II", 6, 0) + b"OK"


class Broker:
    def __init__(self, fault: str | None) -> None:
        self.fault = fault
        self.count = 0
        self.topics: dict[str, dict[str, Channel]] = {}

    def publish(self, topic: str, body: bytes) -> None:
        self.count += 1
        frame = bytearray(struct.pack(">IIqH16s", 30 + len(body), 2, time.time_ns(), 1, b"%016x" % self.count) + body)
        hundredth = self.count % 100 == 0
        if hundredth and self.fault == "alter":
            frame[-1] ^= 1
        for channel in self.topics.setdefault(topic, {}).values():
            if hundredth and self.fault == "lose":
                continue
            channel.ready.append(frame)
            if hundredth and self.fault == "repeat":
                channel.ready.append(frame)
            if hundredth and self.fault == "swap" and len(channel.ready) > 1:
                channel.ready[-1], channel.ready[-2] = channel.ready[-2], channel.ready[-1]

    def pump(self, topic: str) -> None:
        for channel in self.topics[topic].values():
            channel.pump()


class Channel:
    def __init__(self) -> None:
        self.ready: deque[bytearray] = deque()
        self.consumers: list[Connection] = []

    def pump(self) -> None:
        for consumer in self.consumers:
            out = []
            while self.ready and len(consumer.in_flight) < consumer.rdy:
                frame = self.ready.popleft()
                consumer.in_flight[bytes(frame[18:34])] = frame
                out.append(bytes(frame))
            if out:
                consumer.transport.write(b"".join(out))


class Connection(asyncio.Protocol):
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.left = b""
        self.begun = False
        self.channel: Channel | None = None
        self.rdy = 0
        self.in_flight: dict[bytes, bytearray] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, _error: Exception | None) -> None:
        if self.channel:
            self.channel.consumers.remove(self)
            self.channel.ready.extendleft(reversed(self.in_flight.values()))
            self.channel.pump()

    def data_received(self, data: bytes) -> None:
        data, at = self.left + data, 0
        out: list[bytes] = []
        topics: set[str] = set()
        if not self.begun:
            if len(data) < 4:
                self.left = data
                return
            self.begun, at = True, 4
        while (end := data.find(b"\n", at)) >= 0:
            words = data[at:end].decode().split(" ")
            at_body = end + 1
            body = b""
            if words[0] in ("PUB", "MPUB", "IDENTIFY"):
                if len(data) < at_body + 4:
                    break
                size = int.from_bytes(data[at_body : at_body + 4])
                if len(data) < at_body + 4 + size:
                    break
                body = data[at_body + 4 : at_body + 4 + size]
                at_body += 4 + size
            at = at_body
            self.command(words, body, out, topics)
        self.left = data[at:]
        for topic in topics:
            self.broker.pump(topic)
        if self.channel:
            self.channel.pump()
        if out:
            self.transport.write(b"".join(out))

    def command(self, words: list[str], body: bytes, out: list[bytes], topics: set[str]) -> None:
        match words:
            case ["PUB", topic]:
                self.broker.publish(topic, body)
                topics.add(topic)
                if self.broker.fault == "error" and self.broker.count >= 100:
                    out.append(struct.pack(">II", 4 + 17, 1) + b"E_PUB_FAILED full")
                    return
                out.append(OK)
            case ["MPUB", topic]:
                at = 4
                while at < len(body):
                    size = int.from_bytes(body[at : at + 4])
                    self.broker.publish(topic, body[at + 4 : at + 4 + size])
                    at += 4 + size
                topics.add(topic)
                out.append(OK)
            case ["IDENTIFY"]:
                out.append(struct.pack(">II", 4 + len(body), 0) + json.dumps(json.loads(body)).encode())
            case ["SUB", topic, channel]:
                self.channel = self.broker.topics.setdefault(topic, {}).setdefault(channel, Channel())
                self.channel.consumers.append(self)
                out.append(OK)
            case ["RDY", count]:
                self.rdy = int(count)
            case ["FIN", message_id]:
                self.in_flight.pop(message_id.encode(), None)
            case ["REQ", message_id, delay]:
                assert self.channel
                frame = bytearray(self.in_flight.pop(message_id.encode()))
                frame[17] += 1
                if delay == "0":
                    self.channel.ready.append(frame)


async def _http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nOK")
    await writer.drain()
    writer.close()


async def serve(fault: str | None) -> None:
    broker = Broker(fault)
    loop = asyncio.get_running_loop()
    tcp = await loop.create_server(lambda: Connection(broker), "127.0.0.1", 0)
    web = await asyncio.start_server(_http, "127.0.0.1", 0)
    for name, server in (("TCP", tcp), ("HTTP", web)):
        host, port = server.sockets[0].getsockname()
        print(f"{name}: listening on {host}:{port}", file=sys.stderr, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault")
    options, _ = parser.parse_known_args()
    uvloop.run(serve(options.fault))
