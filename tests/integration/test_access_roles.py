"""Every role at every route, method and command of real daemons, as the tables of `nsqha.access.surfaces` say."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from nsqha.access.roles import GRANTED, Need, Role, granted
from nsqha.access.surfaces import BROKER_HTTP, GRPC, HEALTH, LOOKUPD_HTTP, NODES, V2
from nsqha.access.tokens import entry
from nsqha.nsqlog import one_line
from nsqha.pb.v1 import admin_pb2, replication_pb2, routing_pb2, segments_pb2
from tests.integration.servers import Lookupd, Node, free_port, wait_until

TOKENS: Mapping[str, str] = {role.value: f"token-of-{role}" for role in GRANTED}
CALLERS = (*TOKENS, "")  # without a token
SERVED_ALONE = {name for name in LOOKUPD_HTTP if not name.split()[1].startswith(("/cluster", "/listlookup"))} - {
    "GET /controller", "GET /metrics", "PUT /topic/create", "POST /topic/partition/expand",
    "POST /topic/partition/move", "POST /topic/meta/update",
}  # fmt: skip
"""What a lookup daemon without a cluster serves; tests/unit/lookupd has the rest."""


def write_access(path: Path, text: str = "") -> Path:
    """The file with one token of each role."""
    path.write_text(text + "".join(entry(role, TOKENS[role], [Role(role)]) for role in TOKENS))
    path.chmod(0o600)
    return path


def may(caller: str, need: Need) -> bool:
    return granted(caller, [Role(caller)] if caller else []).may(need, "t")


def headers_of(caller: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[caller]}"} if caller else {}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    ports = [f"--grpc-address=127.0.0.1:{free_port()}", f"--metrics-address=127.0.0.1:{free_port()}"]
    flags = [f"--access-file={write_access(folder / 'access.toml')}", *ports]
    with Node(folder / "node", flags=flags) as node:
        wait_until(lambda: "gRPC: listening" in node.log(), "gRPC listens")
        yield node


def flag(node: Node, name: str) -> str:
    return next(text.partition("=")[2] for text in node.flags if text.startswith(f"--{name}="))


def asked(address: str, name: str, caller: str) -> int:
    """The status of one request that does no harm if it is allowed."""
    method, path = name.split(" ")
    path = path.replace(":opt", "no_such_option")
    query = "?seconds=none" if path.endswith("/profile") else "?topic=t&channel=/" if "/channel" in path else "?topic=t"
    if path.startswith("/topic") or path == "/mpub":
        query += "&node=x&partition_num=-1"
    body = b"x" if path in ("/pub", "/mpub") or method == "PUT" else None
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request(method, path + query, body, headers_of(caller))
        return connection.getresponse().status
    finally:
        connection.close()


def test_each_role_at_each_route_of_a_broker(node: Node) -> None:
    wrong = []
    for name, caller in product(BROKER_HTTP, CALLERS):
        status = asked(node.http, name, caller)
        expected = may(caller, BROKER_HTTP[name])
        if (status not in (401, 403)) is not expected or (not expected and status != (403 if caller else 401)):
            wrong.append((name, caller, status))
    assert not wrong


def test_each_role_at_the_listener_for_metrics(node: Node) -> None:
    observed = {*HEALTH, "GET /metrics"}
    wrong = []
    for name, caller in product(BROKER_HTTP, CALLERS):
        status = asked(flag(node, "metrics-address"), name, caller)
        if name not in observed:
            expected = 404 if name.split()[1] not in {other.split()[1] for other in observed} else 405
            wrong += [(name, caller, status)] if status != expected else []
        elif (status == 200) is not may(caller, BROKER_HTTP[name]):
            wrong.append((name, caller, status))
    assert not wrong


def test_each_role_at_each_route_of_a_lookup_daemon(tmp_path: Path) -> None:
    path = write_access(tmp_path / "access.toml")
    wrong = []
    with Lookupd(tmp_path / "lookupd", [f"--access-file={path}"]) as lookupd:
        for name, caller in product(sorted(SERVED_ALONE), CALLERS):
            status = asked(lookupd.http, name, caller)
            if (status not in (401, 403)) is not may(caller, LOOKUPD_HTTP[name]) or status == 405:
                wrong.append((name, caller, status))
    assert not wrong


REFUSAL = {False: grpc.StatusCode.UNAUTHENTICATED, True: grpc.StatusCode.PERMISSION_DENIED}
"""How a call is refused, with a token and without."""


def called(channel: grpc.Channel, method: str, caller: str, request: bytes = b"") -> grpc.StatusCode:
    """How a call ends. An empty request does no harm."""
    metadata = [("authorization", f"Bearer {TOKENS[caller]}")] if caller else []
    service, _, name = method.partition("/")
    descriptor = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    path, reply = f"/{method}", GetMessageClass(descriptor.output_type).FromString
    try:
        if descriptor.client_streaming:
            stream = channel.stream_stream(path, response_deserializer=reply)
            next(iter(stream(iter([request]), timeout=20, metadata=metadata)), None)
        elif descriptor.server_streaming:
            answers = channel.unary_stream(path, response_deserializer=reply)(request, timeout=20, metadata=metadata)
            next(iter(answers), None)
            answers.cancel()
        else:
            channel.unary_unary(path, response_deserializer=reply)(request, timeout=20, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_each_role_at_each_grpc_method(node: Node) -> None:
    denied = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
    wrong = []
    with grpc.insecure_channel(flag(node, "grpc-address")) as channel:
        for method, caller in product(GRPC, CALLERS):
            code = called(channel, method, caller)
            if GRPC[method] == NODES:  # not served without a cluster
                wrong += [] if code is grpc.StatusCode.UNIMPLEMENTED else [(method, caller, code)]
                continue
            right = {REFUSAL[bool(caller)]} if not may(caller, GRPC[method]) else set(grpc.StatusCode) - denied
            wrong += [] if code in right else [(method, caller, code)]
        bodies = admin_pb2.ListMessagesRequest(topic="t", channel="c", bodies=True).SerializeToString()
        for caller in CALLERS:
            code = called(channel, "nsqha.v1.Admin/ListMessages", caller, bodies)
            if (code not in denied) is not (caller in ("reader", "admin")):
                wrong.append(("ListMessages with bodies", caller, code))
    assert not wrong


class RawClient:
    """A V2 client that says exactly what it is told."""

    def __init__(self, node: Node) -> None:
        self.socket = socket.create_connection(("127.0.0.1", node.tcp_port), 20)
        self.socket.sendall(b"  V2")
        self.socket.settimeout(20)

    def say(self, line: bytes, body: bytes | None = None) -> bytes:
        """The answer's text."""
        sized = b"" if body is None else len(body).to_bytes(4, "big") + body
        self.socket.sendall(line + b"\n" + sized)
        return self.heard()

    def heard(self) -> bytes:
        size = int.from_bytes(self._read(4), "big")
        return self._read(size)[4:]

    def _read(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            more = self.socket.recv(n - len(data))
            if not more:
                raise EOFError(one_line(data.decode("latin-1")))
            data += more
        return data

    def close(self) -> None:
        self.socket.close()


COMMANDS: Mapping[str, tuple[bytes, bytes | None]] = {
    "IDENTIFY": (b"IDENTIFY", b"{}"),
    "PUB": (b"PUB t", b"x"),
    "MPUB": (b"MPUB t", b"\x00\x00\x00\x01\x00\x00\x00\x01x"),
    "DPUB": (b"DPUB t 1", b"x"),
    "SUB": (b"SUB t c", None),
    "FIN": (b"FIN 0123456789abcdef", None),
    "REQ": (b"REQ 0123456789abcdef 0", None),
    "TOUCH": (b"TOUCH 0123456789abcdef", None),
    "RDY": (b"RDY 1\nTOUCH 0123456789abcdef", None),
    "CLS": (b"CLS", None),
    "NOP": (b"NOP\nTOUCH 0123456789abcdef", None),
}


def test_each_role_at_each_v2_command(node: Node) -> None:
    assert {*COMMANDS, "AUTH"} == V2.keys()
    wrong = []
    for command, caller in product(COMMANDS, CALLERS):
        client = RawClient(node)
        answer = b""
        if caller:
            answer = client.say(b"AUTH", TOKENS[caller].encode())
            allowed = caller in ("publisher", "consumer")
            if allowed is not answer.startswith(b'{"identity":"' + caller.encode()):
                wrong.append(("AUTH", caller, answer))
            if not allowed:
                wrong += [] if answer == b"E_UNAUTHORIZED AUTH no authorizations found" else [("AUTH", caller, answer)]
                client.close()
                continue
        answer = client.say(*COMMANDS[command])
        denied = answer.startswith(b"E_UNAUTHORIZED" if caller else b"E_AUTH_FIRST")
        if denied is may(caller, V2[command]):
            wrong.append((command, caller, answer))
        client.close()
    assert not wrong


def test_a_wrong_token_fails_as_nsqd_has_it(node: Node) -> None:
    client = RawClient(node)
    assert json.loads(client.say(b"IDENTIFY", b'{"feature_negotiation":true}'))["auth_required"] is True
    assert client.say(b"AUTH", b"nobody's") == b"E_AUTH_FAILED AUTH failed"
    with pytest.raises(EOFError):
        client.heard()
    connection = http.client.HTTPConnection(node.http, timeout=20)
    connection.request("GET", "/stats", headers={"Authorization": "Bearer nobody's"})
    answer = connection.getresponse()
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, 'Bearer realm="nsqha"')
    assert json.loads(answer.read())["message"] == "UNAUTHORIZED"
    connection.close()


def test_tables_and_services_agree() -> None:
    files = (admin_pb2, segments_pb2, replication_pb2, routing_pb2, health_pb2, reflection_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    assert {f"{service.full_name}/{method.name}" for service in services for method in service.methods} == GRPC.keys()
