"""Client libraries as processes that speak lines of JSON (clients/README.md), and how to get hold of them."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
WAIT_SECONDS = 20.0
INSTALL_SECONDS = 240


@dataclass(frozen=True)
class Library:
    """A client library and what it can do."""

    name: str
    command: Callable[[], list[str]]
    tls: bool = True
    compression: tuple[str, ...] = ("snappy", "deflate")
    upgrading_producer: bool = True  # whether its producer can use them, too


@dataclass(frozen=True)
class Message:
    """A delivery."""

    number: int
    id: str
    body: bytes
    attempts: int
    timestamp: int
    at: float  # monotonic time of its arrival


class Client:
    """One running client program."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._process = subprocess.Popen(
            library.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._kept: list[dict[str, Any]] = []
        self._errors: list[str] = []
        self._publishes = 0
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put({**json.loads(line), "at": time.monotonic()})
        self._events.put({"event": "ended"})

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.decode(errors="replace"))

    def say(self, do: str, **fields: Any) -> None:
        if "bodies" in fields:
            fields["bodies"] = [base64.b64encode(body).decode() for body in fields["bodies"]]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self._process.stdin.flush()

    def next(self, *events: str, seconds: float = WAIT_SECONDS) -> dict[str, Any] | None:
        """The next of these events, or None in time; others are kept for who asks for them."""
        for n, kept in enumerate(self._kept):
            if kept["event"] in events:
                return self._kept.pop(n)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                break
            if event["event"] in events:
                return event
            if event["event"] == "ended":
                raise AssertionError(f"{self.library.name} ended:\n{self.errors()}")
            self._kept.append(event)
        return None

    def errors(self) -> str:
        return "".join(self._errors[-40:])

    # ---- the conversation

    def produce(self, nsqd: str, *, tls: bool = False, compression: str = "") -> None:
        self.say("producer", nsqd=nsqd, tls=tls, compression=compression)
        assert self.next("connected"), f"{self.library.name} does not connect:\n{self.errors()}"

    def consume(
        self,
        topic: str,
        channel: str,
        *,
        nsqd: str = "",
        lookupd: str = "",
        tls: bool = False,
        compression: str = "",
        max_in_flight: int = 10,
        msg_timeout_ms: int = 60_000,
        gives_up: bool = False,
    ) -> None:
        """`gives_up`: after as many attempts as the library's default says; else never."""
        self.say(
            "consumer",
            topic=topic,
            channel=channel,
            nsqd=nsqd,
            lookupd=lookupd,
            tls=tls,
            compression=compression,
            max_in_flight=max_in_flight,
            msg_timeout_ms=msg_timeout_ms,
            gives_up=gives_up,
        )

    def try_publish(self, topic: str, bodies: Sequence[bytes], how: str = "PUB", delay_ms: int = 0) -> str:
        """Publish; "" if it was OK'd, else why not."""
        self._publishes += 1
        self.say("publish", n=self._publishes, topic=topic, bodies=bodies, how=how, delay_ms=delay_ms)
        event = self.next("published", "failed")
        if event is None:
            return f"no outcome in {WAIT_SECONDS:.0f} s:\n{self.errors()}"
        assert event["n"] == self._publishes
        return "" if event["event"] == "published" else str(event["why"])

    def publish(self, topic: str, *bodies: bytes, how: str = "PUB", delay_ms: int = 0) -> None:
        why = self.try_publish(topic, bodies, how, delay_ms)
        assert not why, f"{self.library.name} {how}: {why}\n{self.errors()}"

    def message(self, seconds: float = WAIT_SECONDS) -> Message | None:
        """The next delivery, if there is one in time."""
        event = self.next("message", seconds=seconds)
        if event is None:
            return None
        return Message(
            event["message"],
            event["id"],
            base64.b64decode(event["body"]),
            event["attempts"],
            event["timestamp"],
            event["at"],
        )

    def must_get(self, seconds: float = WAIT_SECONDS) -> Message:
        message = self.message(seconds)
        assert message is not None, f"{self.library.name} got no message in {seconds} s:\n{self.errors()}"
        return message

    def fin(self, message: Message) -> None:
        self.say("fin", message=message.number)

    def req(self, message: Message, delay_ms: int) -> None:
        self.say("req", message=message.number, delay_ms=delay_ms)

    def touch(self, message: Message) -> None:
        self.say("touch", message=message.number)

    def close(self) -> None:
        try:
            self.say("close")
            self._process.wait(2)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass  # a line that could not be delivered any more


# ---- where the libraries come from


def _python(name: str) -> Callable[[], list[str]]:
    def command() -> list[str]:
        pytest.importorskip({"pynsq": "nsq"}.get(name, name), reason=f"{name} is not installed: make test installs it")
        return [sys.executable, str(HERE / "clients" / f"{name}_client.py")]

    return command


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time installs."""
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _install(directory: Path, argv: list[str], what: str) -> None:
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if done.returncode:
        pytest.skip(f"{what}: {(done.stderr or done.stdout).strip()[-500:]}")


def _nsqjs() -> list[str]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None:
        pytest.skip("nsqjs needs node, which is not on PATH")
    directory = HERE / "nsqjs"
    with _alone(directory):
        if not (directory / "node_modules" / "nsqjs").exists():
            if npm is None:
                pytest.skip("nsqjs is not installed and npm is not on PATH")
            _install(directory, [npm, "ci", "--no-audit", "--no-fund"], "npm could not install nsqjs")
    return [node, str(directory / "client.js")]


def _gonsq() -> list[str]:
    go = shutil.which("go")
    if go is None:
        pytest.skip("go-nsq needs a Go toolchain, which is not on PATH")
    directory = HERE / "gonsq"
    binary = directory / "build" / "gonsq"
    with _alone(directory):
        newest = max((directory / name).stat().st_mtime for name in ("main.go", "go.mod", "go.sum"))
        if not binary.exists() or binary.stat().st_mtime < newest:
            _install(directory, [go, "build", "-o", str(binary), "."], "go could not build the go-nsq client")
    return [str(binary)]


LIBRARIES = (
    Library("pynsq", _python("pynsq")),
    # gnsq 1.0.2's Producer takes the OK of an upgrade for the answer to a publish (KeyError), with any broker.
    Library("gnsq", _python("gnsq"), upgrading_producer=False),
    Library("ansq", _python("ansq"), tls=False, compression=()),
    Library("nsqjs", _nsqjs),
    Library("go-nsq", _gonsq),
)
