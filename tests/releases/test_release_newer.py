"""What a later version left is refused at the start: one line that says so, and nothing of it is changed."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from nsqha.commitlog.entry import ENTRY_BYTES, decode
from nsqha.commitlog.journal import inspect
from nsqha.commitlog.storage import OsStorage
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from tests.integration.build_of_level import ROOT
from tests.integration.cluster import Cluster
from tests.integration.servers import CannotStart, Daemon, Node, wait_until
from tests.releases.make import unpack
from tests.releases.test_release_folders import FOUND, check_state, expected, put

pytestmark = pytest.mark.timeout(120)

_LATER = """#!{python}
import sys

sys.path.insert(0, {root!r})
import {module} as module

module.FORMAT = 2
from nsqha.cli.nsqd import main

main()
"""


def a_later_build_ran(node: Node, module: str) -> None:
    """It differs from this one in the format that this module writes."""
    path = node.directory / "later"
    path.write_text(_LATER.format(python=sys.executable, root=str(ROOT), module=module))
    path.chmod(0o755)
    node.command, this_one = str(path), node.command
    node.start()
    assert node.stop() == 0
    node.command = this_one


def refusal(daemon: Daemon) -> str:
    """The only line with which it ends."""
    with pytest.raises(CannotStart):
        daemon.start()
    status = daemon.wait()
    said = [line for line in daemon.log().splitlines() if "FATAL" in line or "ERROR" in line or "WARNING" in line]
    assert status != 0 and len(said) == 1 and "Traceback" not in daemon.log(), daemon.log()
    return said[0]


def kept(folder: Path) -> dict[str, object]:
    """What may not change: the bytes of all files but the journal, which counts starts, and what that has promised."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "lock.mdb", "journal")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def promised(folder: Path) -> object:
    return inspect(OsStorage(), str(folder)).partitions


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """On the folder that the last release left."""
    unpack(FOUND[-1] / "alone.tar.xz", tmp_path / "node")
    return Node(tmp_path / "node")


def check_refused(node: Node) -> None:
    line = refusal(node)
    assert "reads up to 1" in line and line.rstrip().endswith("start a newer version"), line


def test_a_journal_that_a_later_version_wrote(node: Node) -> None:
    a_later_build_ran(node, "nsqha.commitlog.journal_record")
    journal, before = (node.data / "journal").read_bytes(), kept(node.data)
    check_refused(node)
    assert ((node.data / "journal").read_bytes(), kept(node.data)) == (journal, before)


def test_metadata_that_a_later_version_wrote(node: Node) -> None:
    a_later_build_ran(node, "nsqha.election.embedded")
    before = kept(node.data), promised(node.data)
    check_refused(node)
    assert (kept(node.data), promised(node.data)) == before


def test_a_batch_that_a_later_version_wrote(node: Node) -> None:
    path = max((node.data / "topics").glob("orders-*/0/*.commitlog"))
    raw = path.read_bytes()
    entry = decode(raw[-ENTRY_BYTES:])
    assert entry is not None
    path.write_bytes(raw[:-ENTRY_BYTES] + entry._replace(version=2).encode())
    before = kept(node.data), promised(node.data)
    check_refused(node)
    assert (kept(node.data), promised(node.data)) == before
    path.write_bytes(raw)  # the refusal cost nothing: what can be read again is there
    with node:
        check_state(node, expected(FOUND[-1], "alone"), due=True)


def test_a_record_in_etcd_that_a_later_version_wrote_is_left_alone(tmp_path: Path) -> None:
    """It may be of one topic of many; a node that is told so goes on with the others."""
    with Cluster.running(tmp_path / "cluster", nodes=1) as cluster, cluster.another("n2") as node:
        for topic in ("orders", "others"):
            cluster.create(topic, "billing", isr=1)
        ((key, value),) = records(cluster, "/nsqha/nsqha/topics/orders")
        later = value.replace('"format":1', '"format":2')
        put(cluster.etcd, {key: later})
        node.start()
        wait_until(lambda: node.joined, "it is a member")
        (line,) = [line for line in node.log().splitlines() if "WARNING" in line and "format" in line]
        assert f"{key}: TopicRecord has format 2, this version reads up to 1; use a newer version" in line
        assert node.request("/pub?topic=others", b"x") == b"OK"
        assert records(cluster, key) == [(key, later)]


def records(cluster: Cluster, prefix: str) -> list[tuple[str, str]]:
    client = EtcdClient(EtcdOptions((cluster.etcd.endpoint,)))
    request = rpc.RangeRequest(key=prefix.encode(), range_end=prefix.encode() + b"\xff")
    found = client.read(lambda stubs: stubs.kv.Range, request).kvs
    client.close()
    return [(kv.key.decode(), kv.value.decode()) for kv in found]
