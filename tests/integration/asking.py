"""A client as the pages want it, that asks a lookup daemon where to publish and asks again when that fails; and what
comes out of a channel in the end.

Lookup daemons are `host:port` of their HTTP port, brokers are what they answer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http import HTTPStatus

from nsqha.cli.brokers.v2client import RefusedByServer, Subscriber, V2Publisher
from nsqha.cli.terminal import exits
from tests.integration.servers import wait_until

OKS_BETWEEN = 200  # publishes that are OK'd between two steps


def request(address: str, path: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}", data=body, timeout=20) as answer:
        data: bytes = answer.read()
        return data


def producers(lookup: str, topic: str) -> list[str]:
    """Where a topic is, as a lookup daemon has it; nowhere before a broker has registered it there."""
    try:
        found = json.loads(request(lookup, f"/lookup?topic={urllib.parse.quote(topic)}"))
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            return []
        raise
    return [f"{producer['broadcast_address']}:{producer['tcp_port']}" for producer in found["producers"]]


def received(lookup: str, topic: str, channel: str, wanted: set[bytes]) -> set[bytes]:
    """What comes out of a channel until all that is wanted has come."""
    address = wait_until(lambda: producers(lookup, topic), "a lookup daemon knows who has it")[0]
    reader = Subscriber(address, 30, topic, channel, window=100)
    reader.wait_at_most(0.2)
    found: set[bytes] = set()

    def all_came() -> bool:
        messages = reader.messages()
        found.update(message.body for message in messages)
        if messages:
            reader.answer(messages, None, None)
        return wanted <= found

    with contextlib.closing(reader):
        wait_until(all_came, "everything that was OK'd comes out", 60)
    return found


class AskingPublisher:
    """One client: it asks a lookup daemon, publishes one message after another, and asks again when that fails."""

    def __init__(self, lookups: Sequence[str], topic: str) -> None:
        self.stored: set[bytes] = set()
        self.refused: list[str] = []
        self._lookups, self._topic = lookups, topic
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> AskingPublisher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def goes_on(self) -> None:
        enough = len(self.stored) + OKS_BETWEEN
        wait_until(lambda: len(self.stored) >= enough, "publishes are OK'd", 60)

    def _run(self) -> None:
        number = 0
        while not self._ends.is_set():
            # A lookup daemon that is gone or knows nobody, a broker that closes: the next one is asked, and the
            # message sent again.
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException, exits.Exit):
                (address, *_) = producers(self._lookups[number % len(self._lookups)], self._topic)
                with contextlib.closing(V2Publisher(address, 40)) as publisher:
                    while not self._ends.is_set():
                        body = b"%d" % number
                        try:
                            publisher.publish(self._topic, [body])
                        except RefusedByServer as error:
                            self.refused.append(str(error))
                            raise
                        self.stored.add(body)
                        number += 1
            self._ends.wait(0.05)
