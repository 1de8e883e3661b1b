"""An nsqd that does what a test wants: each connection has a script, one word per command that publishes.

    ok           store it, answer OK                    not stored   answer that, close
    refuse       answer E_BAD_MESSAGE, close            unknown      store it, answer "outcome unknown", close
    lose         store it, close without an answer      drop         close without storing or answering
    silent       store it, never answer                 early        answer E_BAD_BODY before its body is read, close

Behind the last word everything is ok. `log` has (topic, defer ms, body) in the order in which it was stored, whichever
connection brought it.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Self

OK = struct.pack(">II", 6, 0) + b"OK"


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">II", 4 + len(data), kind) + data


class ScriptedNsqd:
    """Listens on loopback until it is closed."""

    def __init__(self, *scripts: Sequence[str]) -> None:
        self.log: list[tuple[str, int, bytes]] = []
        self.commands: list[tuple[str, int]] = []  # (name, messages) as they were read
        self.identities: list[dict[str, object]] = []
        self.body_bytes_max = 0
        self._scripts = list(scripts)
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.log]

    @property
    def connections(self) -> int:
        return len(self._peers)

    def close(self) -> None:
        self._stopped.set()
        self._end([self._listener], self._threads[:1])
        self._end(self._peers, self._threads[1:])  # nobody is taken in any more

    @staticmethod
    def _end(socks: Sequence[socket.socket], threads: Sequence[threading.Thread]) -> None:
        for each in socks:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._peers.append(peer)
            script = list(self._scripts.pop(0)) if self._scripts else []
            thread = threading.Thread(target=self._serve, args=(peer, script), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket, script: list[str]) -> None:
        try:
            with peer, peer.makefile("rb") as stream:
                assert stream.read(4) == b"  V2"
                while line := stream.readline():
                    name, *words = line.decode().split()
                    if not self._command(peer, stream, name, words, script):
                        # Both ways and at once: a close alone waits for what nobody reads any more.
                        peer.shutdown(socket.SHUT_RDWR)
                        return
        except OSError:
            pass

    def _command(self, peer: socket.socket, stream: object, name: str, words: list[str], script: list[str]) -> bool:
        if name != "IDENTIFY" and script[:1] == ["early"]:
            del script[0]
            peer.sendall(frame(1, b"E_BAD_BODY MPUB body too big 9 > 8"))
            return False
        body = stream.read(struct.unpack(">I", stream.read(4))[0])  # type: ignore[attr-defined]
        if name == "IDENTIFY":
            self.identities.append(json.loads(body))
            peer.sendall(OK)
            return True
        bodies = _mpub(body) if name == "MPUB" else [body]
        self.commands.append((name, len(bodies)))
        self.body_bytes_max = max(self.body_bytes_max, len(body))
        word = script.pop(0) if script else "ok"
        if word in ("ok", "unknown", "lose", "silent"):
            delay = int(words[1]) if name == "DPUB" else 0
            self.log += [(words[0], delay, each) for each in bodies]
        answers = {
            "ok": OK,
            "not stored": frame(1, f"E_{name}_FAILED {name} failed not stored: no leader".encode()),
            "unknown": frame(1, f"E_{name}_FAILED {name} failed outcome unknown: leader lost".encode()),
            "refuse": frame(1, b"E_BAD_MESSAGE MPUB message too big 9 > 8"),
        }
        if word in answers:
            peer.sendall(answers[word])
        return word in ("ok", "silent")


def _mpub(body: bytes) -> list[bytes]:
    (count,) = struct.unpack_from(">I", body)
    bodies, at = [], 4
    for _ in range(count):
        (size,) = struct.unpack_from(">I", body, at)
        bodies.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    assert at == len(body)
    return bodies
