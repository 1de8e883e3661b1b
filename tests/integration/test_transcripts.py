"""Whose turn it is, and death, as conversations: the bytes on the wire, however the client's are cut.

A line of a script is what the client sends (>), a frame that must come next, and nothing else (<), or a command of an
operator ($). Ids are those that the messages came with first; a delivery again has the same bytes but for its attempts.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Iterator

import pytest

from tests.integration.devnode import DevNode

QUIET_SECONDS = 0.4

REQUEUED = """
> SUB {topic} c
< OK
> RDY 1
< m0 1
> REQ m0 0
< m1 1
> FIN m1
< m2 1
> FIN m2
< m0 2
> FIN m0
< nothing
> CLS
< CLOSE_WAIT
"""

TIMED_OUT = """
> IDENTIFY {{"msg_timeout": 3000}}
< OK
> SUB {topic} c
< OK
> RDY 1
< m0 1
< m1 1
> FIN m1
< m2 1
> FIN m2
< m0 2
> FIN m0
> FIN m0
< E_FIN_FAILED FIN m0 failed ID not in flight
"""

DIES = """
$ channel set {topic} c --max-attempts 3
> SUB {topic} c
< OK
> RDY 1
< m0 1
> REQ m0 0
< m1 1
> REQ m1 0
< m2 1
> FIN m2
< m0 2
> REQ m0 0
< m0 3
> REQ m0 0
< m1 2
> FIN m1
< nothing
> REQ m0 0
< E_REQ_FAILED REQ m0 failed ID not in flight
> FIN m0
< E_FIN_FAILED FIN m0 failed ID not in flight
$ dead requeue {topic} c --all --yes
< m0 1
> REQ m0 0
< m0 2
> TOUCH m0
> FIN m0
< nothing
$ dead requeue {topic} c --all --yes
< nothing
"""


class Conversation:
    """A connection whose commands leave cut at random."""

    def __init__(self, node: DevNode, topic: str, seed: int | None) -> None:
        host, port = node.tcp.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._node = node
        self._topic = topic
        self._cuts = random.Random(seed) if seed is not None else None
        self._came = b""
        self._first: dict[bytes, bytes] = {}  # body -> its frame, as it came first

    def play(self, script: str) -> None:
        self._send(b"  V2")
        for line in script.format(topic=self._topic).strip().splitlines():
            kind, _, rest = line.partition(" ")
            {">": self._say, "<": self._expect, "$": self._operate}[kind](rest)
        self._socket.close()

    def _operate(self, command: str) -> None:
        self._node.ok(*command.split())

    def _say(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "IDENTIFY":
            self._send(b"IDENTIFY\n" + len(rest).to_bytes(4, "big") + rest.encode())
        else:
            self._send(self._with_ids(line) + b"\n")

    def _with_ids(self, line: str) -> bytes:
        return re.sub(rb"\bm\d\b", lambda found: self._first[found[0]][18:34], line.encode())

    def _send(self, data: bytes) -> None:
        while data:
            size = len(data) if self._cuts is None else self._cuts.randint(1, 5)
            self._socket.sendall(data[:size])
            data = data[size:]

    def _expect(self, what: str) -> None:
        if what == "nothing":
            self._socket.settimeout(QUIET_SECONDS)
            with pytest.raises(TimeoutError):
                self._came += self._socket.recv(1)
            self._socket.settimeout(20)
            return
        frame = self._frame()
        if (found := re.fullmatch(r"(m\d) (\d)", what)) is None:
            kind = 1 if what.startswith("E_") else 0
            text = self._with_ids(what)
            assert frame == (len(text) + 4).to_bytes(4, "big") + kind.to_bytes(4, "big") + text
            return
        body, attempts = found[1].encode(), int(found[2])
        first = self._first.setdefault(body, frame)
        assert frame == first[:16] + attempts.to_bytes(2, "big") + first[18:]
        assert (first[:8], first[34:]) == ((30 + len(body)).to_bytes(4, "big") + b"\0\0\0\2", body)
        assert re.fullmatch(rb"[0-9a-f]{16}", first[18:34])

    def _frame(self) -> bytes:
        while len(self._came) < 4 or len(self._came) < 4 + int.from_bytes(self._came[:4], "big"):
            data = self._socket.recv(4096)
            assert data, "the connection is closed"
            self._came += data
        end = 4 + int.from_bytes(self._came[:4], "big")
        frame, self._came = self._came[:end], self._came[end:]
        return self._frame() if frame[4:] == b"\0\0\0\0_heartbeat_" else frame


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("transcripts"))
    try:
        yield node
    finally:
        node.stop()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("script", [REQUEUED, TIMED_OUT, DIES], ids=["requeued", "timed_out", "dies"])
def test_a_conversation(node: DevNode, script: str, seed: int | None, request: pytest.FixtureRequest) -> None:
    topic = re.sub(r"\W", "_", request.node.name)[-40:]
    node.create(topic, "c")
    node.publish(topic, "m0", "m1", "m2")
    Conversation(node, topic, seed).play(script)
    assert json.loads(node.ok("channel", "show", topic, "c", "--json"))["depth"] == 0
