"""The access file of a real broker: what a change of it does, what the command line shows, and the audit."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from nsqha.access.roles import Role
from nsqha.access.tokens import entry
from nsqha.cli.brokers.v2client import V2Connection
from nsqha.cli.brokers.v2security import Security
from nsqha.pb.v1 import admin_pb2
from nsqha.pb.v1.admin_pb2_grpc import AdminStub
from pyspark_nsqha.model import ReadFailed, Split
from pyspark_nsqha.options import ConnectOptions
from pyspark_nsqha.reading.fetch import runs
from pyspark_nsqha.snapshot import Segments, SnapshotRequest
from tests.integration.servers import BIN, Lookupd, Node, free_port, wait_until
from tests.integration.test_access_roles import TOKENS, RawClient, flag, headers_of, write_access

GO_TOOLS = os.environ.get("NSQ_GO_TOOLS", os.environ["PATH"])
NSQADMIN, NSQ_STAT, NSQ_TAIL = (
    shutil.which(tool, path=GO_TOOLS) or "" for tool in ("nsqadmin", "nsq_stat", "nsq_tail")
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    write_access(tmp_path / "access.toml")
    flags = [f"--access-file={tmp_path / 'access.toml'}", f"--grpc-address=127.0.0.1:{free_port()}"]
    with Node(tmp_path / "node", flags=flags) as node:
        wait_until(lambda: "gRPC: listening" in node.log(), "gRPC listens")
        yield node


def ask(
    node: Node, method: str, path: str, caller: str = "", body: bytes | None = None, **more: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(node.http, timeout=20)
    try:
        connection.request(method, path, body, headers_of(caller) | more)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def replaced(node: Node, text: str) -> None:
    path = Path(flag(node, "access-file"))
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)


def audited(node: Node) -> list[str]:
    return [line.partition("AUDIT: ")[2] for line in node.log().splitlines() if "AUDIT: " in line]


def test_a_change_counts_and_clients_that_may_not_any_more_are_dropped(node: Node) -> None:
    publisher, consumer, anonymous = RawClient(node), RawClient(node), RawClient(node)
    assert publisher.say(b"AUTH", b"token-of-publisher").startswith(b'{"identity":"publisher"')
    assert consumer.say(b"AUTH", b"token-of-consumer").startswith(b'{"identity":"consumer"')
    assert publisher.say(b"PUB t", b"x") == b"OK" and consumer.say(b"SUB t c") == b"OK"
    text = entry("publisher", "token-of-publisher", [Role.PUBLISHER], ["other"])
    replaced(node, text + entry("consumer", "token-of-consumer", [Role.CONSUMER]) + 'anonymous = ["viewer"')
    wait_until(lambda: "stays in use" in node.log(), "a broken file is said")
    assert publisher.say(b"PUB t", b"x") == b"OK" and ask(node, "GET", "/stats")[0] == 401
    replaced(node, 'anonymous = ["viewer"]\n' + text)
    assert consumer.heard() == b"E_AUTH_FAILED AUTH failed", "its token is gone"
    with pytest.raises(EOFError):
        consumer.heard()
    assert publisher.say(b"PUB other", b"x") == b"OK"
    assert publisher.say(b"PUB t", b"x") == b'E_UNAUTHORIZED AUTH failed for PUB on "t" ""'
    assert anonymous.say(b"PUB t", b"x") == b"E_AUTH_FIRST AUTH required before PUB"
    assert ask(node, "GET", "/stats")[0] == 200
    assert ask(node, "GET", "/stats", "admin")[0] == 401, "a token that is gone is refused where nobody needs one"


def test_who_lost_its_topic_is_dropped_too(node: Node) -> None:
    consumer, other = RawClient(node), RawClient(node)
    for client, topic in ((consumer, b"t"), (other, b"u")):
        client.say(b"AUTH", b"token-of-consumer")
        assert client.say(b"SUB %b c" % topic) == b"OK"
    replaced(node, entry("consumer", "token-of-consumer", [Role.CONSUMER], ["u"]))
    assert consumer.heard() == b'E_UNAUTHORIZED AUTH failed for SUB on "t" "c"'
    assert other.say(b"CLS") == b"CLOSE_WAIT"


def test_anonymous_clients_need_no_auth(node: Node) -> None:
    replaced(node, 'anonymous = ["publisher", "consumer"]\n')
    wait_until(lambda: "was read again" in node.log(), "the file is read")
    client = RawClient(node)
    assert json.loads(client.say(b"IDENTIFY", b'{"feature_negotiation":true}'))["auth_required"] is False
    assert client.say(b"PUB t", b"x") == b"OK" and client.say(b"SUB t c") == b"OK"


def test_the_command_line_shows_its_token(node: Node, tmp_path: Path) -> None:
    def run(caller: str, *words: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "token"
        path.write_text(f"token-of-{caller}\n" if caller else "")
        plain = {key: value for key, value in os.environ.items() if not key.startswith("NSQHA_")}
        command = [str(BIN / "nsqha"), *words, "--token-file", str(path)]
        return subprocess.run(command, capture_output=True, text=True, env=plain, timeout=60)

    grpc, tcp = ("--grpc-address", flag(node, "grpc-address")), ("--nsqd-tcp-address", node.tcp)
    made = run("operator", "topic", "create", "orders", *grpc)
    assert made.returncode == 0, made.stderr
    refused = run("viewer", "topic", "delete", "orders", "--yes", *grpc)
    assert refused.returncode == 5 and "this needs the role admin, which viewer does not have" in refused.stderr
    for where in (grpc, ("--address", node.http)):
        nobody = run("", "topic", "list", *where)
        assert nobody.returncode == 5 and "give a token: --token-file, or $NSQHA_TOKEN_FILE" in nobody.stderr
    assert run("viewer", "topic", "list", "--address", node.http).returncode == 0, "found by way of HTTP"
    found = run("publisher", "pub", "orders", "hello", "--address", node.http)
    assert found.returncode == 5 and "needs the port itself: --nsqd-tcp-address" in found.stderr
    assert run("", "pub", "orders", "hello", *tcp).stderr.count("--token-file") == 1
    sent = run("publisher", "pub", "orders", "hello", *tcp)
    assert sent.returncode == 0, sent.stderr
    assert run("viewer", "pub", "orders", "hello", *tcp).returncode == 5
    heard = run("consumer", "sub", "orders", "c", "-n", "1", *tcp)
    assert heard.returncode == 0 and "hello" in heard.stdout
    assert run("reader", "peek", "orders", *grpc).returncode == 0
    assert run("operator", "peek", "orders", *grpc).returncode == 5


def test_an_address_tries_twenty_wrong_tokens_a_second_whatever_the_surface(node: Node) -> None:
    def over_http(token: str, source: str = "127.0.0.1") -> int:
        connection = http.client.HTTPConnection(node.http, timeout=20, source_address=(source, 0))
        connection.request("GET", "/stats", headers={"Authorization": f"Bearer {token}"})
        try:
            return connection.getresponse().status
        finally:
            connection.close()

    began = time.monotonic()
    answers: list[int | str] = []
    with grpc.insecure_channel(flag(node, "grpc-address")) as channel:
        topics = AdminStub(channel).ListTopics
        while not {429, "RESOURCE_EXHAUSTED"} <= set(answers):
            answers += [over_http("wrong") for _ in range(30)]
            try:
                topics(admin_pb2.ListTopicsRequest(), metadata=[("authorization", "Bearer wrong")], timeout=20)
            except grpc.RpcError as error:
                answers.append(error.code().name)
            assert time.monotonic() < began + 60
    tried = sum(answer in (401, "UNAUTHENTICATED") for answer in answers)
    assert tried <= 20 * (int(time.monotonic()) - int(began) + 1), "of each second of the clock that the broker has too"
    assert over_http("wrong", "127.0.0.2") == 401, "another address has its own"
    assert over_http(TOKENS["viewer"]) == 200, "a right one is nobody's guess"
    client = RawClient(node)
    assert client.say(b"AUTH", b"wrong") == b"E_AUTH_FAILED AUTH failed", "as ever, and then the connection ends"


def test_health_is_checked_without_a_token(node: Node) -> None:
    """An image's health check has none."""
    for address in (node.http, node.tcp):
        plain = {key: value for key, value in os.environ.items() if not key.startswith("NSQHA_")}
        command = [str(BIN / "nsqha"), "check", "node", "--address", address]
        ended = subprocess.run(command, capture_output=True, text=True, env=plain, timeout=60)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_one_record_for_each_change(node: Node, tmp_path: Path) -> None:
    assert ask(node, "POST", "/topic/create?topic=t", "operator")[0] == 200
    assert ask(node, "POST", "/channel/create?topic=t&channel=c", "admin")[0] == 200
    assert ask(node, "POST", "/topic/delete?topic=t", "operator")[0] == 403
    assert ask(node, "POST", "/topic/pause?topic=none", "operator")[0] == 404
    assert ask(node, "POST", "/topic/pause?topic=t")[0] == 401
    cross = {"Sec-Fetch-Site": "cross-site"}
    assert ask(node, "POST", "/topic/empty?topic=t", "admin", None, **cross)[0] == 403
    assert ask(node, "POST", "/pub?topic=t", "publisher", b"a body")[0] == 200
    assert ask(node, "GET", "/stats", "admin")[0] == 200
    assert ask(node, "PUT", "/config/log_level", "admin", b"info")[0] == 200
    shown = [line.split(" ", 1)[0] + " " + line.split(") ", 1)[1] for line in audited(node)]
    assert shown == [
        "operator http POST /topic/create topic=t: done",
        "admin http POST /channel/create topic=t channel=c: done",
        "operator http POST /topic/delete topic=t: refused: FORBIDDEN",
        "operator http POST /topic/pause topic=none: failed: TOPIC_NOT_FOUND",
        "anonymous http POST /topic/pause topic=t: refused: UNAUTHORIZED",
        "anonymous http POST /topic/empty topic=t: refused: CROSS_SITE",
        "admin http PUT /config/log_level : done",
    ]
    plain = {**os.environ, "NSQHA_GRPC_ADDRESS": flag(node, "grpc-address")}
    for caller, *words in (
        ("operator", "channel", "pause", "t", "c"),
        ("viewer", "channel", "pause", "t", "c"),
        ("operator", "seek", "t", "c", "start", "--plan"),
    ):
        env = {**plain, "NSQHA_TOKEN": TOKENS[caller]}
        subprocess.run([str(BIN / "nsqha"), *words], capture_output=True, env=env, timeout=60)
    shown = [line.split(" ", 1)[0] + " " + line.split(") ", 1)[1] for line in audited(node)][7:]
    assert shown == [
        "operator grpc nsqha.v1.Admin/PauseChannel topic=t channel=c paused=true: done",
        "viewer grpc nsqha.v1.Admin/PauseChannel topic=t channel=c paused=true: refused: PERMISSION_DENIED",
        "operator grpc nsqha.v1.Admin/Seek topic=t channel=c: plan, done",
    ]
    assert "token-of-" not in node.log() and "a body" not in node.log()


def test_records_are_messages_of_the_audit_topic_too(tmp_path: Path) -> None:
    with Node(tmp_path / "node", flags=["--audit-topic=audit"]) as node:
        assert ask(node, "POST", "/topic/create?topic=t")[0] == 200
        assert ask(node, "POST", "/topic/delete?topic=none")[0] == 404
        consumer = RawClient(node)
        assert consumer.say(b"SUB audit c") == b"OK"
        consumer.socket.sendall(b"RDY 10\n")
        shown = [json.loads(consumer.heard()[26:]) for _ in range(2)]
        assert [(each["target"], each["outcome"]) for each in shown] == [
            ("topic=t", "done"),
            ("topic=none", "failed: TOPIC_NOT_FOUND"),
        ]
        assert "nsqha_audit_lost_records_total 0" in ask(node, "GET", "/metrics")[1]


OTHER = {200, 400, 404, 409, 410}
"""What a reader hears that may ask, of a range that is not there."""


def test_readers_of_segments_show_a_token(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("one", "two"):
        assert ask(node, "POST", "/pub?topic=t", "publisher", word.encode())[0] == 200
    asked = SnapshotRequest(("t",))
    segments = Segments(ConnectOptions((flag(node, "grpc-address"),), retries=0))
    monkeypatch.setenv("NSQHA_TOKEN", TOKENS["viewer"])
    with pytest.raises(ReadFailed, match="refuses this token: this needs the role reader, which viewer does not have"):
        segments.snapshot(asked)
    monkeypatch.setenv("NSQHA_TOKEN", TOKENS["reader"])
    (partition,) = segments.snapshot(asked).pins
    of, first, end = partition.identity, partition.start, partition.end
    split = Split(
        of, first.offset, end.offset, first.log_id, end.log_id, first.offset, end.offset, end.log_id - 1,
        partition.chain, partition.replicas,
    )  # fmt: skip
    stored = b"".join(bytes(run.frames) for run in runs(split, retries=0))
    assert b"one" in stored and b"two" in stored
    monkeypatch.setenv("NSQHA_TOKEN", TOKENS["viewer"])
    with pytest.raises(ReadFailed, match="403 this needs the role reader"):
        list(runs(split, retries=0))
    target = f"/segments/{of.topic_uid:016x}/0?first=1&end=2&at=1&chain={0:016x}"
    for caller, statuses in (("", {401}), ("viewer", {403}), ("operator", {403}), ("reader", OTHER), ("admin", OTHER)):
        connection = http.client.HTTPConnection(partition.replicas[0].address, timeout=20)
        connection.request("GET", target, headers=headers_of(caller))
        assert connection.getresponse().status in statuses, caller
        connection.close()


@pytest.mark.skipif(
    not (NSQADMIN and NSQ_STAT), reason="nsqadmin and nsq_stat are not here: NSQ_GO_TOOLS names a folder"
)
def test_stock_tools_work_with_anonymous(node: Node) -> None:
    replaced(node, 'anonymous = ["viewer"]\n' + entry("p", "token-of-publisher", [Role.PUBLISHER, Role.CONSUMER]))
    wait_until(lambda: "was read again" in node.log(), "the file is read")
    client = RawClient(node)
    client.say(b"AUTH", b"token-of-publisher")
    assert client.say(b"PUB t", b"x") == b"OK" and client.say(b"SUB t c") == b"OK"
    tool = [NSQ_STAT, "--topic=t", "--channel=c", f"--nsqd-http-address={node.http}", "--interval=1s"]
    found = subprocess.run([*tool, "--count=1"], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and "1" in found.stdout.splitlines()[-1], found.stderr
    port = free_port()
    command = [NSQADMIN, f"--nsqd-http-address={node.http}", f"--http-address=127.0.0.1:{port}"]
    admin = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: listening(port), "nsqadmin listens")
        assert "t" in json.loads(get(port, "/api/topics"))["topics"]
        assert json.loads(get(port, "/api/topics/t"))["message_count"] == 1
        answer = posted(port, "/api/topics/t", {"action": "pause"})
        assert b"401" in answer, "for a change it has no token to show"
        assert [line.partition(") ")[2] for line in audited(node)] == [
            "http POST /topic/pause topic=t: refused: UNAUTHORIZED"
        ]
    finally:
        admin.terminate()
        admin.wait(20)


@pytest.mark.skipif(not NSQADMIN, reason="nsqadmin is not here: NSQ_GO_TOOLS names a folder")
def test_stock_nsqadmin_finds_nodes_at_a_lookup_daemon_and_changes_nothing(tmp_path: Path) -> None:
    access = write_access(tmp_path / "access.toml", 'anonymous = ["viewer"]\n')
    token = tmp_path / "token"
    token.write_text(TOKENS["broker"])
    token.chmod(0o600)
    port, flags = free_port(), [f"--access-file={access}"]
    with Lookupd(tmp_path / "lookupd", flags) as lookupd:
        known = [f"--lookupd-tcp-address={lookupd.tcp}", f"--lookupd-token-file={token}"]
        with Node(tmp_path / "node", flags=[*flags, *known, "--broadcast-address=127.0.0.1"]) as node:
            assert ask(node, "POST", "/topic/create?topic=t", "operator")[0] == 200
            wait_until(lambda: b'"t"' in get(int(lookupd.http.rpartition(":")[2]), "/topics"), "it is registered")
            command = [NSQADMIN, f"--lookupd-http-address={lookupd.http}", f"--http-address=127.0.0.1:{port}"]
            tool = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                wait_until(lambda: listening(port), "nsqadmin listens")
                assert json.loads(get(port, "/api/topics"))["topics"] == ["t"]
                assert len(json.loads(get(port, "/api/nodes"))["nodes"]) == 1
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                connection.request("DELETE", "/api/topics/t")
                assert b"401" in connection.getresponse().read()
                assert ask(node, "GET", "/stats?format=json", "viewer")[1].count('"t"'), "it is still there"
                said = [line for daemon in (lookupd, node) for line in daemon.log().splitlines() if "AUDIT" in line]
                refused = [line for line in said if "POST /topic/delete topic=t: refused: UNAUTHORIZED" in line]
                assert len(refused) == 2, "one at each that was asked"
            finally:
                tool.terminate()
                tool.wait(20)


@pytest.mark.skipif(not NSQ_TAIL, reason="nsq_tail is not here: NSQ_GO_TOOLS names a folder")
def test_stock_nsq_tail_shows_a_token_as_its_secret(node: Node, tmp_path: Path) -> None:
    producer = RawClient(node)
    producer.say(b"AUTH", b"token-of-publisher")
    command = [NSQ_TAIL, f"--nsqd-tcp-address={node.tcp}", "--topic=t", "--channel=tail", "-n=1"]
    for secret, refusal in (
        ("", "Auth Required"),
        ("token-of-viewer", "E_UNAUTHORIZED AUTH no authorizations found"),
        ("token-of-nobody", "E_AUTH_FAILED AUTH failed"),
    ):
        option = [f"--consumer-opt=auth_secret,{secret}"] if secret else []
        refused = subprocess.run([*command, *option], capture_output=True, text=True, timeout=60)
        assert refused.returncode != 0 and refusal in refused.stderr
    assert '"tail"' not in ask(node, "GET", "/stats?format=json", "admin")[1], "nothing was subscribed"
    told = tmp_path / "told"
    with told.open("w") as out:
        tail = subprocess.Popen([*command, "--consumer-opt=auth_secret,token-of-consumer"], stdout=out, stderr=out)
        try:
            wait_until(lambda: '"tail"' in ask(node, "GET", "/stats?format=json", "admin")[1], "it has subscribed")
            assert producer.say(b"PUB t", b"tailed") == b"OK"
            assert tail.wait(30) == 0, "it ends after one message"
        finally:
            tail.kill()
            tail.wait(20)
    assert "tailed" in told.read_text()


def listening(port: int) -> bool:
    try:
        return bool(get(port, "/ping"))
    except OSError:
        return False


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    return connection.getresponse().read()


def posted(port: int, path: str, body: dict[str, str]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse().read()


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (None, 0, "No such file or directory"),
        ("", 0o644, "every user of this host may use it; do `chmod o= "),
        ('anonymous = ["viwer"]', 0o600, "did you mean viewer?"),
    ],
)
def test_a_broker_does_not_start_with_a_file_it_can_not_use(
    tmp_path: Path, text: str | None, mode: int, why: str
) -> None:
    path = tmp_path / "access.toml"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    for command, extra in (("nsqd", [f"--data-path={tmp_path / 'data'}"]), ("nsqlookupd", [])):
        ports = ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
        words = [str(BIN / command), *ports, *extra, f"--access-file={path}"]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 1
        said = [line for line in ended.stderr.splitlines() if "FATAL" in line]
        assert len(said) == 1 and f"--access-file={path}: " in said[0] and why in said[0]


def test_without_a_file_it_is_said_that_everybody_may(tmp_path: Path) -> None:
    with Node(tmp_path / "closed") as node:
        assert "everybody who reaches" not in node.log()
        assert ask(node, "POST", "/topic/create?topic=t")[0] == 200
        assert len(audited(node)) == 1, "changes are recorded all the same"
    with Node(tmp_path / "open", flags=["--segments-address=0.0.0.0:0", "--grpc-address=0.0.0.0:0"]) as node:
        wait_until(lambda: "gRPC: listening" in node.log(), "gRPC listens")
        (line,) = [line for line in node.log().splitlines() if "everybody who reaches" in line]
        assert "gRPC at 0.0.0.0:0, segments at 0.0.0.0:0" in line and "TCP" not in line


def test_our_own_client_uses_a_token_as_the_secret(node: Node) -> None:
    connection = V2Connection(node.tcp, 20, security=Security(token=b"token-of-publisher"))
    assert connection.ask(b"PUB t\n\x00\x00\x00\x01x") == b"OK"
    connection.close()
