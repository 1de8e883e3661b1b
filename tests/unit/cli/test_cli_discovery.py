"""What `--address` finds out about a port, against scripted servers."""

from __future__ import annotations

import argparse
import json
import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from nsqha.cli import build_parser
from nsqha.cli.brokers.discovery import BrokerPorts, LookupDaemon, discover, given, grpc_port
from nsqha.cli.brokers.producers import tcp_addresses
from nsqha.cli.terminal import exits
from tests.unit.cli.test_cli_v2client import frame


class ScriptedPort:
    """Answers each connection by the beginning of what it receives."""

    def __init__(self, answers: dict[bytes, bytes], greeting: bytes = b"") -> None:
        self._answers = answers
        self._greeting = greeting
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                peer.settimeout(5)
                peer.sendall(self._greeting)
                received = b""
                while not (fits := [a for start, a in self._answers.items() if received.startswith(start)]):
                    more = peer.recv(65536)
                    if not more:
                        break
                    received += more
                if fits:
                    while select.select([peer], [], [], 0.05)[0]:  # a reset would take the answer with it
                        if not peer.recv(65536):
                            break
                    peer.sendall(fits[0])

    def close(self) -> None:
        self._listener.close()


def http(body: object, status: str = "200 OK") -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status.encode(), len(data), data)


PING = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nOK"
BAD_PROTOCOL = frame(1, b"E_BAD_PROTOCOL")


def identify_answer(**ports: object) -> bytes:
    return frame(0, json.dumps({"max_rdy_count": 2500, **ports}).encode())


@pytest.fixture
def ports() -> Iterator[list[ScriptedPort]]:
    opened: list[ScriptedPort] = []
    yield opened
    for port in opened:
        port.close()


@pytest.fixture
def scripted(ports: list[ScriptedPort]):  # type: ignore[no-untyped-def]
    def script(answers: dict[bytes, bytes], greeting: bytes = b"") -> ScriptedPort:
        ports.append(ScriptedPort(answers, greeting))
        return ports[-1]

    return script


NSQHA_PORTS = {"tcp_port": 4150, "http_port": 4151, "grpc_address": "0.0.0.0:4152"}


def test_a_tcp_port_names_the_others(scripted) -> None:  # type: ignore[no-untyped-def]
    port = scripted({b"GET ": BAD_PROTOCOL, b"  V2IDENTIFY\n": identify_answer(nsqha_ports=NSQHA_PORTS)})
    assert discover(port.address, 5) == BrokerPorts(port.address, "127.0.0.1:4151", "127.0.0.1:4152")


def test_a_plain_nsqd_has_no_grpc_port(scripted) -> None:  # type: ignore[no-untyped-def]
    port = scripted({b"GET ": BAD_PROTOCOL, b"  V2IDENTIFY\n": identify_answer()})
    assert discover(port.address, 5) == BrokerPorts(port.address)
    with pytest.raises(exits.Exit, match="an nsqd without nsqha's administration"):
        grpc_port(port.address, 5)


@pytest.mark.parametrize(
    ("bound", "grpc"),
    [
        ("0.0.0.0:7", "127.0.0.1:7"),
        ("[::]:7", "127.0.0.1:7"),
        ("127.0.0.5:7", "127.0.0.1:7"),
        ("10.0.0.9:7", "10.0.0.9:7"),
        ("", ""),
    ],
)
def test_http_names_the_others_at_the_host_that_was_asked(scripted, bound: str, grpc: str) -> None:  # type: ignore[no-untyped-def]
    info = http({"version": "1.3.0", "http_port": 80, "tcp_port": 4150, "grpc_address": bound})
    port = scripted({b"GET /ping": PING, b"GET /info?include_nsqha=true": info})
    assert discover(port.address, 5) == BrokerPorts("127.0.0.1:4150", port.address, grpc)


def test_a_port_that_greets_with_http2_is_the_grpc_port(scripted) -> None:  # type: ignore[no-untyped-def]
    port = scripted({}, greeting=b"\0\0\x12\x04\0\0\0\0\0" + bytes(18))
    assert grpc_port(port.address, 5) == port.address


def test_a_port_that_wants_tls_is_taken_for_grpc_with_a_certificate(scripted) -> None:  # type: ignore[no-untyped-def]
    port = scripted({b"GET ": b"\x15\x03\x01\0\x02\x02\x46\0\0"})
    assert grpc_port(port.address, 5, certified=True) == port.address
    with pytest.raises(exits.Exit, match="speaks TLS: give its TCP port, or --cluster-tls-cert"):
        grpc_port(port.address, 5)


def test_the_tcp_port_of_a_lookup_daemon_is_refused_with_advice(scripted) -> None:  # type: ignore[no-untyped-def]
    port = scripted({b"GET ": struct.pack(">I", 14) + b"E_BAD_PROTOCOL"})
    with pytest.raises(exits.Exit, match=r"TCP port of a lookup daemon.*give its HTTP port"):
        discover(port.address, 5)


def test_other_programs_are_not_taken_for_ours(scripted) -> None:  # type: ignore[no-untyped-def]
    ssh = scripted({}, greeting=b"SSH-2.0-OpenSSH_9.6\r\n")
    with pytest.raises(exits.Exit, match="is neither a broker nor a lookup daemon"):
        discover(ssh.address, 5)
    web = scripted({b"GET /ping": PING, b"GET /info": PING})
    with pytest.raises(exits.Exit, match="is neither a broker's HTTP port nor a lookup daemon's"):
        discover(web.address, 5)


def producer(port: int) -> dict[str, object]:
    return {"broadcast_address": "127.0.0.1", "tcp_port": port, "http_port": port}


def lookup_daemon(scripted, topics: dict[str, list[int]], nodes: list[int]) -> ScriptedPort:  # type: ignore[no-untyped-def]
    answers = {b"GET /ping": PING, b"GET /info": http({"version": "1.3.0"})}
    for topic, found in topics.items():
        answers[b"GET /lookup?topic=%b " % topic.encode()] = http({"producers": [producer(port) for port in found]})
    answers[b"GET /lookup"] = http({"message": "TOPIC_NOT_FOUND"}, "404 Not Found")
    answers[b"GET /nodes"] = http({"producers": [producer(port) for port in nodes]})
    port: ScriptedPort = scripted(answers)
    return port


def test_a_lookup_daemon_names_the_producers_else_a_broker(scripted) -> None:  # type: ignore[no-untyped-def]
    daemon = lookup_daemon(scripted, {"t": [11, 12]}, [11, 12, 13])
    assert discover(daemon.address, 5) == LookupDaemon(daemon.address)
    args = build_parser("sub").parse_args(["sub", "t", "c", "--address", daemon.address])
    assert tcp_addresses(args, "t") == ["127.0.0.1:11", "127.0.0.1:12"]
    assert tcp_addresses(args, "new") == ["127.0.0.1:11"]


def test_a_lookup_daemon_leads_to_a_broker_that_answers(scripted) -> None:  # type: ignore[no-untyped-def]
    info = http({"http_port": 80, "tcp_port": 4150, "grpc_address": "127.0.0.1:4152"})
    broker = scripted({b"GET /ping": PING, b"GET /info": info})
    assert grpc_port(lookup_daemon(scripted, {}, [1, broker.port]).address, 5) == "127.0.0.1:4152"
    with pytest.raises(exits.Exit, match=r"no broker that the lookup daemon .* knows can be asked: cannot reach"):
        grpc_port(lookup_daemon(scripted, {}, [1]).address, 5)
    with pytest.raises(exits.Exit, match="knows no broker now"):
        grpc_port(lookup_daemon(scripted, {}, []).address, 5)


def test_flags_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*flags: str) -> tuple[str, bool]:
        args: argparse.Namespace = build_parser("topic").parse_args(["topic", "list", *flags])
        return given(args, "--grpc-address", "default:1")

    monkeypatch.delenv("NSQHA_GRPC_ADDRESS", raising=False)
    monkeypatch.delenv("NSQHA_ADDRESS", raising=False)
    assert chosen() == ("default:1", False)
    monkeypatch.setenv("NSQHA_ADDRESS", "any:1")
    assert chosen() == ("any:1", True)
    monkeypatch.setenv("NSQHA_GRPC_ADDRESS", "grpc:1")
    assert chosen() == ("grpc:1", False), "the one for this port"
    assert chosen("--address=a:1") == ("a:1", True)
    assert chosen("--address=a:1", "--grpc-address=g:1") == ("g:1", False)
