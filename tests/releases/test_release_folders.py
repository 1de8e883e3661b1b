"""This build opens what each release left on disk, and finds what was there; also what this build then leaves."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsqha import __version__
from nsqha.cli.brokers.v2client import Subscriber, V2Publisher
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from tests.etcd_server import EtcdServer
from tests.integration.cluster import Cluster
from tests.integration.restorable import Restorable
from tests.integration.servers import BIN, Node, wait_until
from tests.jepsen.program import command
from tests.jepsen.switches.clock import ClockFile
from tests.releases.make import BYTES_MAX, RELEASES, padded, unpack, unpadded

pytestmark = pytest.mark.timeout(180)

FOUND = sorted(path.parent for path in RELEASES.glob("*/expected.json"))
each_release = pytest.mark.parametrize("release", FOUND, ids=lambda path: path.name)


def expected(release: Path, which: str) -> dict[str, Any]:
    return dict(json.loads((release / "expected.json").read_text())[which])


def test_each_release_has_its_fixtures() -> None:
    changes = (RELEASES.parents[1] / "CHANGELOG.md").read_text()
    released = {found[1] for found in re.finditer(r"^## (\d+\.\d+\.\d+)(?! \(not released)", changes, re.MULTILINE)}
    assert released | {__version__} <= {path.name for path in FOUND}, "python -m tests.releases.make"
    assert sum(path.stat().st_size for release in FOUND for path in release.iterdir()) <= BYTES_MAX


# ---- a node that is alone


def received(address: str, topic: str, channel: str, count: int) -> list[str]:
    """So many messages of a channel, finished."""
    found: list[str] = []
    with contextlib.closing(Subscriber(address, 20, topic, channel, window=10)) as reader:
        reader.wait_at_most(0.2)

        def all_came() -> bool:
            messages = reader.messages()
            found.extend(unpadded(message.body) for message in messages)
            if messages:
                reader.answer(messages, None, None)
            return len(found) >= count

        wait_until(all_came, f"{count} messages of {topic}/{channel} come", 30)
    return found


def check_state(node: Node, wanted: dict[str, Any], *, due: bool = False) -> None:
    """Depths, deferred and dead messages, pauses and policies, as the release left them. `due`: the clock is right, and
    what was deferred back then waits for a consumer alone."""
    for name, depth in wanted["depths"].items():
        topic, channel = name.split("/")
        found = node.channel(topic, channel)
        deferred = len(wanted["deferred"].get(name, []))
        held = (depth + deferred, 0) if due else (depth, deferred)
        assert found is not None and (found["depth"], found["deferred_count"]) == held, (name, found)
        assert found["paused"] == (name in wanted["paused"]), name
        assert f"{dead(node, topic, channel)}" == f"{len(wanted['died'].get(name, []))}", name
        policy = json.loads(node.request(f"/channel/policy?topic={topic}&channel={channel}"))["policy"]
        assert policy == wanted["policies"].get(name, {}), name
    topics = {topic["topic_name"]: topic for topic in node.json("/stats?format=json")["topics"]}
    assert {name: topics[name]["depth"] for name in wanted["unhanded"]} == wanted["unhanded"]


def dead(node: Node, topic: str, channel: str) -> int:
    text = node.request(f"/metrics?topic={topic}").decode()
    found = re.search(rf'^nsqha_channel_dead{{channel="{channel}",partition="0",topic="{topic}"}} (\S+)', text, re.M)
    assert found, text[-2000:]
    return int(float(found[1]))


def verified(data: Path) -> None:
    done = subprocess.run([BIN / "nsqha", "log", "verify", data], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@each_release
@pytest.mark.parametrize("cache", ["its cache", "no cache"])
def test_a_folder_of_a_node_that_was_alone(release: Path, cache: str, tmp_path: Path) -> None:
    wanted = expected(release, "alone")
    unpack(release / "alone.tar.xz", tmp_path / "node")
    if cache == "no cache":
        shutil.rmtree(tmp_path / "node" / "data" / "cursors.lmdb")
    verified(tmp_path / "node" / "data")
    clock = ClockFile(tmp_path / "clock")
    clock.set(offset_ns=round((wanted["at"] - time.time()) * 1e9))
    node = Node(tmp_path / "node")
    node.program = command("nsqd", clock_file=clock.path)
    with node:
        check_state(node, wanted)
        assert "nsqha_log_events_total{" not in node.request("/metrics").decode(), "nothing is cut or damaged"
        for name, bodies in wanted["left"].items():
            assert received(node.tcp, *name.split("/"), len(bodies)) == bodies
        node.request("/channel/unpause?topic=orders&channel=audit", b"")
        with contextlib.closing(V2Publisher(node.tcp, 20)) as publisher:
            publisher.publish("orders", [padded("new")])
        count = wanted["depths"]["orders/audit"] + 1
        assert received(node.tcp, "orders", "audit", count)[-1] == "new"
        wait_until(lambda: left(node) == (1, 0, 0), "all is finished but the new message of one channel")
        node.restart()
        assert left(node) == (1, 0, 0)
        deferred, died = wanted["deferred"]["orders/billing"], wanted["died"]["orders/billing"]
        found = node.channel("orders", "billing")
        assert found is not None and found["deferred_count"] == len(deferred)
        assert dead(node, "orders", "billing") == len(died)
    verified(node.data)


def left(node: Node) -> tuple[int, ...]:
    names = (("orders", "billing"), ("orders", "audit"), ("trimmed", "reader"))
    channels = [node.channel(*name) or {} for name in names]
    return tuple(channel["depth"] + channel["in_flight_count"] for channel in channels)


# ---- a cluster


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    (tmp_path / "cluster" / "etcd").mkdir(parents=True)
    with EtcdServer.running(tmp_path / "cluster" / "etcd") as server:
        yield server


def put(etcd: EtcdServer, records: dict[str, str]) -> None:
    client = EtcdClient(EtcdOptions((etcd.endpoint,)))
    for key, value in records.items():
        request = rpc.PutRequest(key=key.encode(), value=value.encode())
        client.change(lambda stubs: stubs.kv.Put, request)
    client.close()


@each_release
def test_folders_of_a_cluster_and_what_its_etcd_had(release: Path, etcd: EtcdServer, tmp_path: Path) -> None:
    """In another etcd, as when a backup is restored: the nodes are asked, and have everything."""
    wanted = expected(release, "cluster")
    put(etcd, json.loads((release / "etcd.json").read_text())["kept"])
    cluster = Cluster(tmp_path / "cluster", etcd)
    for node in cluster.nodes:
        unpack(release / "cluster.tar.xz", tmp_path / "all")
        shutil.rmtree(node.data)
        shutil.move(tmp_path / "all" / node.name, node.data)
    restored = Restorable(cluster, tmp_path)
    try:
        for daemon in cluster.daemons:
            daemon.spawn()
        restored.wait_waiting(held=True)
        shown = restored.accept("--yes")
        assert shown["partitions"] and all(partition["loss"] == "" for partition in shown["partitions"])
        restored.wait_believed()
        cluster.wait_isr(wanted["topic"], 3)
        cluster.wait_level(wanted["topic"])
        leader = cluster.leader(wanted["topic"])
        bodies = received(leader.tcp, wanted["topic"], wanted["channel"], len(wanted["bodies"]))
        assert sorted(bodies) == sorted(wanted["bodies"])
        for node in cluster.nodes:
            node.request(f"/pub?topic={wanted['topic']}", b"new")
        cluster.check_replicas()
    except BaseException:
        cluster.show_logs()
        raise
    finally:
        cluster.close()
