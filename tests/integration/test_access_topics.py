"""Topics that a role must not reach in a roundabout way: dead letters of another one, and the audit's own."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from nsqha.access.roles import Role
from nsqha.access.tokens import entry
from nsqha.pb.v1 import admin_pb2 as admin
from tests.integration.servers import Node, free_port, wait_until
from tests.integration.test_access import ask, audited, replaced
from tests.integration.test_access_roles import RawClient, called, flag, headers_of, write_access

BOTH = {"Authorization": "Bearer token-of-both"}
OK, REFUSED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    more = entry("both", "token-of-both", [Role.OPERATOR, Role.READER])
    flags = [
        f"--access-file={write_access(tmp_path / 'access.toml', more)}",
        f"--grpc-address=127.0.0.1:{free_port()}",
        "--audit-topic=audit",
    ]
    with Node(tmp_path / "node", flags=flags) as node:
        wait_until(lambda: "gRPC: listening" in node.log(), "gRPC listens")
        for topic in ("orders", "audit"):
            ask(node, "POST", f"/topic/create?topic={topic}", "admin")
            ask(node, "POST", f"/channel/create?topic={topic}&channel=c", "admin")
        yield node


def policy(node: Node, caller: str, target: str, **headers: str) -> int:
    body = json.dumps({"dead_letter": target}).encode()
    return ask(node, "POST", "/channel/policy?topic=orders&channel=c", caller, body, **headers)[0]


def test_dead_letters_go_to_a_topic_for_those_who_may_read_them(node: Node) -> None:
    assert policy(node, "operator", "drop") == 200
    assert policy(node, "operator", "topic:mine") == 403
    assert policy(node, "", "topic:mine", **BOTH) == 200
    assert policy(node, "operator", "keep") == 200, "back to where nobody reads them"
    assert policy(node, "admin", "topic:mine") == 200
    assert policy(node, "", "topic:audit", **BOTH) == 403, "records are written by the daemons"
    assert policy(node, "admin", "topic:audit") == 200
    refused = [line for line in audited(node) if "refused" in line]
    assert [line.split(" ")[0] for line in refused] == ["operator", "both"]
    with grpc.insecure_channel(flag(node, "grpc-address")) as channel:
        for caller, target, status in (
            ("operator", "topic:mine", REFUSED),
            ("operator", "keep", OK),
            ("admin", "topic:mine", OK),
        ):
            change = admin.UpdateChannelPolicyRequest(topic="orders", channel="c")
            change.set.dead_letter = target
            request = change.SerializeToString()
            assert called(channel, "nsqha.v1.Admin/UpdateChannelPolicy", caller, request) == status, (caller, target)


def test_the_audit_topic_is_changed_by_administrators_only(node: Node) -> None:
    for path in ("/topic/empty", "/topic/pause", "/topic/unpause", "/topic/create"):
        assert ask(node, "POST", f"{path}?topic=audit", "operator")[0] == 403, path
        assert ask(node, "POST", f"{path}?topic=orders", "operator")[0] == 200, path
        assert ask(node, "POST", f"{path}?topic=audit", "admin")[0] == 200, path
    assert ask(node, "POST", "/channel/empty?topic=audit&channel=c", "operator")[0] == 403
    assert ask(node, "POST", "/pub?topic=audit", "publisher", b"forged")[0] == 403
    assert ask(node, "POST", "/pub?topic=orders", "publisher", b"x")[0] == 200
    for command, body in ((b"PUB audit", b"x"), (b"MPUB audit", b"\0\0\0\1\0\0\0\1x"), (b"DPUB audit 9", b"x")):
        client = RawClient(node)
        client.say(b"AUTH", b"token-of-publisher")
        assert client.say(command, body).startswith(b"E_UNAUTHORIZED AUTH failed for"), command
        client.close()
    with grpc.insecure_channel(flag(node, "grpc-address")) as channel:
        requests = {
            "EmptyTopic": admin.EmptyTopicRequest(topic="audit"),
            "PauseTopic": admin.PauseTopicRequest(topic="audit"),
            "EmptyChannel": admin.EmptyChannelRequest(topic="audit", channel="c"),
            "Seek": admin.SeekRequest(topic="audit", channel="c", target=admin.SeekTarget(end=True)),
        }
        for name, request in requests.items():
            found = {
                caller: called(channel, f"nsqha.v1.Admin/{name}", caller, request.SerializeToString())
                for caller in ("operator", "admin")
            }
            assert found == {"operator": REFUSED, "admin": OK}, name
    records = ask(node, "GET", "/stats?format=json&topic=audit", "viewer")[1]
    assert json.loads(records)["topics"][0]["message_count"] > 4, "the daemon goes on writing it"


def test_a_body_that_comes_after_its_token_was_revoked_is_not_published(node: Node) -> None:
    connection = http.client.HTTPConnection(node.http, timeout=20)
    connection.putrequest("POST", "/pub?topic=orders")
    for name, value in (headers_of("publisher") | {"Content-Length": "2"}).items():
        connection.putheader(name, value)
    connection.endheaders(b"x")
    wait_until(lambda: ask(node, "GET", "/ping")[0] == 200, "the request is there")
    replaced(node, 'anonymous = ["viewer"]\n')
    wait_until(lambda: "was read again" in node.log(), "the file is read")
    connection.send(b"y")
    assert connection.getresponse().status == 401
    connection.close()
    assert json.loads(ask(node, "GET", "/stats?format=json&topic=orders")[1])["topics"][0]["message_count"] == 0
