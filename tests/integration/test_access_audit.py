"""One audit record for each change, on every surface: all that the tables of `nsqha.access.surfaces` call a change, and
all verbs of the command line that make one, done and refused. What is no change has no record."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest

from nsqha.access.surfaces import BROKER_HTTP, GRPC, LOOKUPD_HTTP, NODES
from nsqha.cli import build_parser
from nsqha.cli.terminal.parser import Parser
from nsqha.pb.v1 import admin_pb2 as admin
from nsqha.pb.v1 import segments_pb2 as segments
from tests.integration.cluster import Cluster
from tests.integration.servers import BIN, Daemon, Node, free_port, wait_until
from tests.integration.test_access_roles import CALLERS, TOKENS, asked, called, flag, headers_of, may, write_access

pytestmark = pytest.mark.timeout(300)


class AuditLog:
    """The records of some daemons, those that a step made apart from those before it."""

    def __init__(self, *daemons: Daemon) -> None:
        self._daemons = daemons
        self._seen = 0

    def _all(self) -> list[str]:
        return [line for daemon in self._daemons for line in daemon.log().splitlines() if "AUDIT: " in line]

    def fresh(self, wanted: int = 0) -> list[str]:
        """What came since the last call, as soon as it is so much: a call may be answered before its record is written.
        One too many is seen by the next call."""
        with suppress(AssertionError):
            wait_until(lambda: len(self._all()) >= self._seen + wanted, "they come", 10)
        found = self._all()
        fresh, self._seen = found[self._seen :], len(found)
        return fresh


class Pace:
    """Refusals beyond 20 a second have no record: this walk has fewer."""

    def __init__(self) -> None:
        self._left = 0

    def __call__(self) -> None:
        if self._left == 0:
            time.sleep(1.01)
            self._left = 15
        self._left -= 1


def outcome(line: str) -> str:
    """`plan, done`, `refused: FORBIDDEN` and the like."""
    return re.sub(r"^.*?((plan, )?(done|(refused|failed|unknown): .*))$", r"\1", line)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    flags = [f"--access-file={write_access(folder / 'access.toml')}", f"--grpc-address=127.0.0.1:{free_port()}"]
    with Node(folder / "node", flags=flags) as node:
        wait_until(lambda: "gRPC: listening" in node.log(), "gRPC listens")
        yield node


def send(address: str, name: str, query: str, body: bytes | None, caller: str = "admin") -> int:
    method, path = name.split(" ")
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path.replace(":opt", "log_level") + query, body, headers_of(caller))
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


# ---- HTTP of a broker

BROKER_CHANGES: Mapping[str, tuple[str, bytes | None]] = {
    "PUT /config/:opt": ("", b"info"),
    "POST /topic/create": ("?topic=h", None),
    "POST /channel/create": ("?topic=h&channel=c", None),
    "POST /topic/pause": ("?topic=h", None),
    "POST /topic/unpause": ("?topic=h", None),
    "POST /channel/pause": ("?topic=h&channel=c", None),
    "POST /channel/unpause": ("?topic=h&channel=c", None),
    "POST /channel/policy": ("?topic=h&channel=c", b'{"max_attempts": 9}'),
    "POST /channel/skip": ("?topic=h&channel=c", None),
    "POST /channel/unskip": ("?topic=h&channel=c", None),
    "POST /message/finish": ("?topic=h&channel=c&messageid=0123456789abcdef", None),
    "POST /channel/empty": ("?topic=h&channel=c", None),
    "POST /topic/empty": ("?topic=h", None),
    "POST /channel/delete": ("?topic=h&channel=c", None),
    "POST /topic/delete": ("?topic=h", None),
}
"""In an order in which they are all done; but for the message, which is not there."""


def test_one_record_for_each_change_over_http(node: Node) -> None:
    changes = {name for name, need in BROKER_HTTP.items() if need.change}
    assert changes == BROKER_CHANGES.keys()
    log, pace = AuditLog(node), Pace()
    wrong: list[Any] = []
    log.fresh()
    for name, (query, body) in BROKER_CHANGES.items():
        status = send(node.http, name, query, body)
        made = log.fresh(1)
        right = "done" if status == 200 else "failed: "
        if len(made) != 1 or not outcome(made[0]).startswith(right) or (status != 200) is not ("finish" in name):
            wrong.append((name, status, made))
        for caller, refusal in (("viewer", "FORBIDDEN"), ("", "UNAUTHORIZED")):
            pace()
            send(node.http, name, query, body, caller)
            made = log.fresh(1)
            if [outcome(line) for line in made] != [f"refused: {refusal}"]:
                wrong.append((name, caller, made))
    for name in sorted(BROKER_HTTP.keys() - changes):
        asked(node.http, name, "admin")
        asked(node.http, name, "")
        wrong += [(name, line) for line in log.fresh()]
    assert not wrong


# ---- gRPC

HOLD = f"{7:016x}"
GRPC_CHANGES: Mapping[str, Any] = {
    "nsqha.v1.Admin/CreateTopic": admin.CreateTopicRequest(topic="g"),
    "nsqha.v1.Admin/CreateChannel": admin.CreateChannelRequest(topic="g", channel="c"),
    "nsqha.v1.Admin/PauseTopic": admin.PauseTopicRequest(topic="g", paused=False),
    "nsqha.v1.Admin/PauseChannel": admin.PauseChannelRequest(topic="g", channel="c", paused=True),
    "nsqha.v1.Admin/UpdateTopicSettings": admin.UpdateTopicSettingsRequest(topic="g", retention_ms=60_000),
    "nsqha.v1.Admin/UpdateChannelPolicy": admin.UpdateChannelPolicyRequest(
        topic="g", channel="c", set=admin.ChannelPolicy(max_attempts=9)
    ),
    "nsqha.v1.Admin/ChangeMessages": admin.ChangeMessagesRequest(
        topic="g", channel="c", action=admin.MESSAGE_ACTION_FINISH, state=admin.MESSAGE_STATE_WAITING
    ),
    "nsqha.v1.Admin/Seek": admin.SeekRequest(topic="g", channel="c", target=admin.SeekTarget(end=True)),
    "nsqha.v1.Admin/UndoSeek": admin.UndoSeekRequest(topic="g", channel="c"),
    "nsqha.v1.Admin/SkipDamage": admin.SkipDamageRequest(topic="g"),
    "nsqha.v1.Segments/Snapshot": segments.SnapshotRequest(topics=["g"], hold_ms=60_000, hold_id=HOLD),
    "nsqha.v1.Segments/RenewHold": segments.RenewHoldRequest(hold_id=HOLD),
    "nsqha.v1.Segments/CommitReader": segments.CommitReaderRequest(topic="g", channel="r", offsets={0: 0}),
    "nsqha.v1.Segments/ReleaseHold": segments.ReleaseHoldRequest(hold_id=HOLD),
    "nsqha.v1.Admin/EmptyChannel": admin.EmptyChannelRequest(topic="g", channel="c"),
    "nsqha.v1.Admin/EmptyTopic": admin.EmptyTopicRequest(topic="g"),
    "nsqha.v1.Admin/DeleteChannel": admin.DeleteChannelRequest(topic="g", channel="c"),
    "nsqha.v1.Admin/DeleteTopic": admin.DeleteTopicRequest(topic="g"),
}
"""In an order in which they are all done."""
NAMED: Mapping[str, str] = {
    "nsqha.v1.Admin/PauseTopic": "topic=g paused=false",
    "nsqha.v1.Admin/PauseChannel": "topic=g channel=c paused=true",
    "nsqha.v1.Segments/Snapshot": f"topics=g hold_id={HOLD} hold_ms=60000",
    "nsqha.v1.Segments/CommitReader": "topic=g channel=r",
    "nsqha.v1.Segments/ReleaseHold": f"hold_id={HOLD}",
}
"""What a record of some of them names."""


def test_one_record_for_each_change_over_grpc(node: Node) -> None:
    changes = {name for name, need in GRPC.items() if need.change}
    assert changes == GRPC_CHANGES.keys()
    log, pace = AuditLog(node), Pace()
    wrong: list[Any] = []
    log.fresh()
    with grpc.insecure_channel(flag(node, "grpc-address")) as channel:
        for method, message in GRPC_CHANGES.items():
            request = message.SerializeToString()
            code = called(channel, method, "admin", request)
            made = log.fresh(1)
            if code is not grpc.StatusCode.OK or len(made) != 1 or not made[0].endswith(": done"):
                wrong.append((method, code, made))
            elif (names := NAMED.get(method)) is not None and f" {method} {names}: done" not in made[0]:
                wrong.append((method, names, made))
            for caller, refusal in (("viewer", "PERMISSION_DENIED"), ("", "UNAUTHENTICATED")):
                pace()
                called(channel, method, caller, request)
                made = log.fresh(1)
                if [outcome(line) for line in made] != [f"refused: {refusal}"]:
                    wrong.append((method, caller, made))
        looks = sorted(name for name, need in GRPC.items() if not need.change and need != NODES)
        for method in (*looks, "nsqha.v1.Segments/Snapshot"):
            request = segments.SnapshotRequest(topics=["g"]).SerializeToString() if "Snapshot" in method else b""
            for caller in ("admin", ""):
                called(channel, method, caller, request)
                wrong += [(method, line) for line in log.fresh()]
    assert not wrong


def hold_topic(node: Node, topic: str) -> None:
    request = segments.SnapshotRequest(topics=[topic], hold_ms=60_000, hold_id=HOLD).SerializeToString()
    with grpc.insecure_channel(flag(node, "grpc-address")) as channel:
        assert called(channel, "nsqha.v1.Segments/Snapshot", "reader", request) is grpc.StatusCode.OK


def test_what_a_hold_is_called_that_the_broker_draws(node: Node) -> None:
    assert send(node.http, "POST /topic/create", "?topic=drawn", None) == 200
    log = AuditLog(node)
    log.fresh()
    request = segments.SnapshotRequest(topics=["drawn"], hold_ms=1000).SerializeToString()
    with grpc.insecure_channel(flag(node, "grpc-address")) as channel:
        assert called(channel, "nsqha.v1.Segments/Snapshot", "reader", request) is grpc.StatusCode.OK
    (line,) = log.fresh(1)
    assert re.search(r"AUDIT: reader .* topics=drawn hold_ms=1000 hold_id=[0-9a-f]{16}: done$", line)


# ---- the command line


def leaves(parser: Parser, *path: str) -> Iterator[str]:
    """The verbs that do something, as they are written."""
    verbs = parser.verbs()
    if not verbs:
        yield " ".join(path)
    for name, below in verbs.items():
        yield from leaves(below, *path, name)


LOOK_ONLY = {
    "cluster status", "cluster nodes", "cluster topics", "topic list", "topic show", "channel list", "channel show",
    "dead list", "message list", "message show", "peek", "stats", "spark verify", "spark lag", "access check",
    "log dump", "log verify", "check node", "check cluster", "check channel", "config show", "explain", "completion",
}  # fmt: skip
DAEMONS = {"dev", "broker", "lookupd"}
MESSAGES = {"pub", "sub", "tail"}
"""They publish and consume."""
LOCAL_FILES = {"access token", "generate"}
BY_OTHER_SURFACES = {"spark archive", "spark backfill", "spark replay", "spark compact", "import nsqd"}
"""What they change in a broker goes through what is walked above: the calls of Segments; POST /topic/create and
/channel/create."""
NODE_VERBS: Mapping[str, Sequence[str]] = {
    "topic create": ("v",),
    "topic set": ("v", "--retention", "1h", "--yes"),
    "topic pause": ("v",),
    "topic unpause": ("v",),
    "channel create": ("v", "c"),
    "channel set": ("v", "c", "--max-attempts", "9"),
    "channel pause": ("v", "c"),
    "channel unpause": ("v", "c"),
    "seek": ("v", "c", "start", "--yes"),
    "message finish": ("v", "c", "0123456789abcdef", "--yes"),
    "message requeue": ("v", "c", "0123456789abcdef", "--yes"),
    "message defer": ("v", "c", "0123456789abcdef", "--by", "1h", "--yes"),
    "message kill": ("v", "c", "0123456789abcdef", "--yes"),
    "dead requeue": ("v", "c", "0123456789abcdef", "--yes"),
    "dead purge": ("v", "c", "0123456789abcdef", "--yes"),
    "log skip": ("v", "--yes"),
    "topic release": ("v", HOLD),
    "channel empty": ("v", "c", "--yes"),
    "topic empty": ("v", "--yes"),
    "channel delete": ("v", "c", "--yes"),
    "topic delete": ("v", "--yes"),
}
CLUSTER_VERBS = {
    "cluster move", "cluster decommission", "cluster forget", "cluster balance", "cluster elect", "cluster import",
    "cluster accept-metadata",
}  # fmt: skip
"""They write into etcd."""
FAILING = {"message finish", "message requeue", "message defer", "message kill", "dead requeue", "dead purge"}
"""What they name is not there."""


def nsqha(*words: str, caller: str = "admin", env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("NSQHA_")}
    plain |= {"NSQHA_TOKEN": TOKENS[caller]} | dict(env or {})
    return subprocess.run([str(BIN / "nsqha"), *words], capture_output=True, text=True, env=plain, timeout=60)


def test_each_verb_is_known_here() -> None:
    """A new one belongs into one of these sets; one that changes something is walked below."""
    known = [LOOK_ONLY, DAEMONS, MESSAGES, LOCAL_FILES, BY_OTHER_SURFACES, set(NODE_VERBS), CLUSTER_VERBS]
    assert sum(map(len, known)) == len(set().union(*known))
    assert set(leaves(build_parser())) == set().union(*known)


def changes(log: AuditLog) -> list[str]:
    """The next records up to one of a change; plans are asked for before it."""
    found = log.fresh(1)
    while found and outcome(found[-1]).startswith("plan, ") and (more := log.fresh(1)):
        found += more
    return [line for line in found if not outcome(line).startswith("plan, ")]


def test_one_record_for_each_verb_that_changes_a_broker(node: Node) -> None:
    log = AuditLog(node)
    wrong: list[Any] = []
    log.fresh()
    for verb, words in NODE_VERBS.items():
        if verb == "topic release":
            hold_topic(node, "v")
            log.fresh(1)
        ended = nsqha(*verb.split(), *words, "--grpc-address", flag(node, "grpc-address"))
        made = changes(log)
        done = [line for line in made if line.endswith(": done")]
        if len(made) != 1 or (not done and verb not in FAILING) or (ended.returncode and verb not in FAILING):
            wrong.append((verb, ended.returncode, ended.stderr, made))
    assert not wrong


def test_a_record_says_how_many_messages_were_skipped(node: Node) -> None:
    log = AuditLog(node)
    log.fresh()
    at = ("--grpc-address", flag(node, "grpc-address"))
    for topic in ("s1", "s2", "s3", "s4"):
        nsqha("topic", "create", topic, *at)
        nsqha("channel", "create", topic, "c", *at)
        assert send(node.http, "POST /mpub", f"?topic={topic}", b"a\nb", "publisher") == 200
    log.fresh(8)
    for words in (("seek", "s1", "c", "end"), ("channel", "empty", "s2", "c"), ("channel", "delete", "s3", "c")):
        nsqha(*words, "--yes", *at)
        assert changes(log)[-1].endswith(": done; skips 2 never finished")
    assert send(node.http, "POST /channel/empty", "?topic=s4&channel=c", b"") == 200
    assert log.fresh(1)[-1].endswith(": done; skips 2 never finished")


# ---- a cluster: its lookup daemon, and the verbs that write into etcd

LOOKUPD_CHANGES: Mapping[str, str] = {
    "POST /topic/create": "?topic=l",
    "PUT /topic/create": "?topic=l2",
    "POST /channel/create": "?topic=l&channel=c",
    "POST /cluster/balance": "?paused=true",
    "POST /cluster/spread": "?limit=1",
    "POST /cluster/move": "?topic=l&partition=0&replicas=n1,n2",
    "POST /cluster/decommission": "?node=n3",
    "POST /cluster/recommission": "?node=n3",
    "POST /topic/partition/expand": "?topic=l&partition_num=2",
    "POST /topic/meta/update": "?topic=l&retention=1",
    "POST /topic/partition/move": "?topic=l&partition=0&move_from=n1&move_to=n3",
    "POST /cluster/node/remove": "?remove_node=n3",
    "POST /topic/tombstone": "?topic=l&node=nowhere:1",
    "POST /channel/delete": "?topic=l&channel=c",
    "POST /topic/delete": "?topic=l",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    secret, access = folder / "secret", write_access(folder / "access.toml")
    secret.write_text("s" * 40)
    secret.chmod(0o600)
    anybody_looks = write_access(folder / "lookupd.toml", 'anonymous = ["viewer"]\n')
    known = f"--cluster-secret-file={secret}"
    flags, lookupd_flags = [known, f"--access-file={access}"], [known, f"--access-file={anybody_looks}"]
    with Cluster.running(folder, flags=flags, lookupd_flags=lookupd_flags, sync="none") as cluster:
        yield cluster


def test_one_record_for_each_change_at_a_lookup_daemon(cluster: Cluster) -> None:
    changes = {name for name, need in LOOKUPD_HTTP.items() if need.change}
    assert changes == LOOKUPD_CHANGES.keys()
    (lookupd,) = cluster.lookupds
    log, pace = AuditLog(lookupd), Pace()
    wrong: list[Any] = []
    log.fresh()
    for name, query in LOOKUPD_CHANGES.items():
        if "topic=l" in query and "create" not in name:
            wait_until(lambda: send(lookupd.http, "GET /lookup", "?topic=l", None) == 200, "it is known here")
        status = send(lookupd.http, name, query, None)
        made = log.fresh(1)
        if len(made) != 1 or (status == 200) is not made[0].endswith(": done"):
            wrong.append((name, status, made))
        for caller, refusal in (("viewer", "FORBIDDEN"), ("", "UNAUTHORIZED")):
            pace()
            send(lookupd.http, name, query, None, caller)
            made = log.fresh(1)
            if [outcome(line) for line in made] != [f"refused: {refusal}"]:
                wrong.append((name, caller, made))
    for name in sorted(LOOKUPD_HTTP.keys() - changes):
        send(lookupd.http, name, "?topic=l", None)
        wrong += [(name, line) for line in log.fresh()]
    assert not wrong


def test_each_role_at_each_route_of_a_clusters_lookup_daemon(cluster: Cluster) -> None:
    (lookupd,) = cluster.lookupds
    wrong = []
    for name, caller in product(sorted(LOOKUPD_HTTP), CALLERS):
        status = asked(lookupd.http, name, caller)
        allowed = may(caller or "viewer", LOOKUPD_HTTP[name])  # as `anonymous` may there
        if status == 405 or (status not in (401, 403)) is not allowed:
            wrong.append((name, caller, status))
    assert not wrong


def test_no_token_makes_a_node_at_any_method_between_them(cluster: Cluster) -> None:
    wrong, codes = [], set()
    with grpc.insecure_channel(cluster.nodes[0].grpc) as channel:
        for method, caller in product(sorted(name for name, need in GRPC.items() if need == NODES), CALLERS):
            code = called(channel, method, caller)
            codes.add(code)
            # What only the peer port has is not served here at all.
            if code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED):
                wrong.append((method, caller, code))
    assert not wrong and grpc.StatusCode.UNAUTHENTICATED in codes


def test_what_a_node_passes_on_to_leaders_has_one_record(cluster: Cluster) -> None:
    made = nsqha("topic", "create", "wide", "--partitions", "6", *where(cluster))
    assert made.returncode == 0, made.stderr
    wait_until(lambda: all((meta := cluster.meta("wide", n)) and meta.leader for n in range(6)), "all are led")
    leaders = {meta.leader for n in range(6) if (meta := cluster.meta("wide", n))}
    assert len(leaders) > 1, "some are led elsewhere"
    log = AuditLog(*cluster.nodes)
    log.fresh()
    offsets = dict.fromkeys(range(6), 0)
    requests = {
        "Snapshot": segments.SnapshotRequest(topics=["wide"], hold_ms=60_000, hold_id=HOLD),
        "RenewHold": segments.RenewHoldRequest(hold_id=HOLD),
        "CommitReader": segments.CommitReaderRequest(topic="wide", channel="r", offsets=offsets),
        "ReleaseHold": segments.ReleaseHoldRequest(hold_id=HOLD),
    }
    with grpc.insecure_channel(cluster.nodes[0].grpc) as channel:
        for name, request in requests.items():
            code = called(channel, f"nsqha.v1.Segments/{name}", "reader", request.SerializeToString())
            found = log.fresh(1)
            assert code is grpc.StatusCode.OK and len(found) == 1 and found[0].endswith(": done"), (name, code, found)


def test_one_record_for_each_verb_that_writes_into_etcd(cluster: Cluster, tmp_path: Path) -> None:
    """A verb that goes through leaves one, also one that plans, and one that is refused."""
    (lookupd,) = cluster.lookupds
    send(lookupd.http, "POST /cluster/recommission", "?node=n3", None)
    made = nsqha("topic", "create", "e", *where(cluster))
    assert made.returncode == 0, made.stderr
    leader = wait_until(lambda: (meta := cluster.meta("e")) and meta.leader, "it is led")
    nodes = [json.loads(line) for line in etcd(cluster, "nodes", "--json").stdout.splitlines()]
    follower = next(info["name"] for info in nodes if info["uid"] != f"{leader:016x}")
    single = stopped_node(tmp_path)
    steps: list[tuple[int, str, str, Sequence[str]]] = [
        (0, "cluster move topic=e partition=0 replicas=n3,n1,n2: done", "move", ("e", "n3,n1,n2")),
        (0, "cluster balance limit=4: plan, done", "balance", ("--dry-run",)),
        (0, "cluster balance --pause limit=4: done", "balance", ("--pause",)),
        (0, "cluster balance --resume limit=4: done", "balance", ("--resume",)),
        (0, f"cluster elect topic=e partition=0 node={follower}: done", "elect", ("e", "--node", follower, "--wait")),
        (0, "cluster decommission node=n2: done", "decommission", ("n2", "--yes")),
        (0, "cluster decommission --undo node=n2: done", "decommission", ("n2", "--undo", "--yes")),
        (3, "cluster decommission --undo node=n2: refused: NOT_FOUND", "decommission", ("n2", "--undo", "--yes")),
        (5, "cluster forget node=n2: refused: NOT_ALLOWED", "forget", ("n2", "--yes")),
        (0, "topics=imported: done", "import", (str(single), "--yes")),
        (0, "", "accept-metadata", ("--yes",)),  # no node waits: nothing changes
    ]
    log = AuditLog(lookupd)
    wrong: list[Any] = []
    log.fresh()
    for status, said, verb, words in steps:
        ended = etcd(cluster, verb, *words)
        wait_until(lambda: not recorded(cluster), "the controller has taken the record")
        found = [line for line in log.fresh() if " etcd cluster " in line]
        if ended.returncode != status or len(found) != bool(said) or not "".join(found).endswith(said):
            wrong.append((verb, words, ended.returncode, ended.stderr, found))
    assert not wrong
    assert {verb for _, _, verb, _ in steps} == {verb.removeprefix("cluster ") for verb in CLUSTER_VERBS}
    assert "token-of-" not in lookupd.log()


def where(cluster: Cluster) -> list[str]:
    secret = next(text for text in cluster.nodes[0].flags if text.startswith("--cluster-secret-file"))
    return ["--grpc-address", cluster.nodes[0].grpc, secret]


def etcd(cluster: Cluster, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    return nsqha("cluster", verb, *words, env={"NSQHA_ETCD_ENDPOINT": cluster.etcd.endpoint})


def recorded(cluster: Cluster) -> list[str]:
    return [name for name in cluster.store.intents.all() if name.startswith("recorded/")]


def stopped_node(folder: Path) -> Path:
    """The data folder of a single node that has a topic."""
    with Node(folder / "single") as node:
        send(node.http, "POST /topic/create", "?topic=imported", None)
        node.stop()
    return node.data
