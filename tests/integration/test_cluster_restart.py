"""Ordinary stops and new beginnings: rolling restarts, the whole cluster at once, lost disks, copied disks."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from nsqha.cli.brokers.v2client import Message, Subscriber, V2Publisher
from tests.integration.cluster import Cluster, UnderLoad, gone, posted
from tests.integration.servers import BIN, wait_until

pytestmark = pytest.mark.timeout(240)


def test_one_after_the_other_is_restarted(cluster: Cluster, topic: str) -> None:
    with UnderLoad(cluster, topic) as load:
        since = load.clients.now()
        for node in cluster.nodes:
            load.clients.avoid = cluster.nodes.index(node)
            load.goes_on()
            assert node.stop() == 0
            node.start()
            cluster.wait_isr(topic, 3)
        until = load.clients.now()
    gap, probe = load.clients.gap(since, until), load.clients.worst_probe(since, until)
    print(f"rolling restart: longest time without an OK {gap:.3f} s, longest publish {probe:.3f} s")
    assert gap < 10


def test_a_stopped_leader_repeats_nothing_finished_and_attempts_go_on(cluster: Cluster, topic: str) -> None:
    leader, follower = cluster.leader(topic), cluster.followers(topic)[0]
    publisher = V2Publisher(follower.tcp, 20)
    reader = Subscriber(follower.tcp, 20, topic, "steady", window=200)
    reader.wait_at_most(0.05)
    publisher.publish(topic, [b"%d" % n for n in range(100)])

    def read(count: int) -> list[Message]:
        found: list[Message] = []

        def more() -> bool:
            found.extend(reader.messages())
            return len(found) >= count

        wait_until(more, f"{count} messages")
        return found

    def in_flight() -> int:
        found = leader.json(f"/stats?format=json&topic={topic}")
        return int(found["topics"][0]["channels"][0]["in_flight_count"])

    messages = read(100)
    held, finished = messages[::20], [message for n, message in enumerate(messages) if n % 20]
    reader.answer(finished, None, None)
    wait_until(lambda: in_flight() == len(held), "the leader has heard of it")
    assert leader.stop() == 0
    publisher.publish(topic, [b"behind"])
    again = read(len(held) + 1)
    assert {m.body: m.attempts for m in again} == {m.body: 2 for m in held} | {b"behind": 1}
    reader.answer(again, None, None)


def test_a_node_whose_disk_was_wiped_takes_the_place_of_its_predecessor(cluster: Cluster, topic: str) -> None:
    before = cluster.wait_isr(topic, 3)
    with UnderLoad(cluster, topic):
        node = cluster.followers(topic)[0]
        lost = cluster.uid(node)
        node.kill()
        cluster.wait_isr(topic, 2)
        node.wipe()
        node.start()
        cluster.wait_registered(3)
        wait_until(lambda: cluster.uid(node) in cluster.wait_isr(topic, 3).isr, "the new node has all of it", 30)
        wait_until(lambda: lost not in cluster.wait_isr(topic, 3).replicas, "the lost one is named no more")
    assert before.leader == cluster.wait_isr(topic, 3).leader


def test_a_node_that_is_forgotten_is_not_waited_for_and_may_come_back(cluster: Cluster, topic: str) -> None:
    cluster.wait_isr(topic, 3)
    node = cluster.followers(topic)[0]
    uid = cluster.uid(node)
    words = [str(BIN / "nsqha"), "cluster", "forget", f"{uid:016x}", "--etcd-endpoint", cluster.etcds.endpoints[0]]
    refused = subprocess.run([*words, "--yes"], capture_output=True, text=True, timeout=30)
    assert refused.returncode == 5 and "is alive" in refused.stderr
    node.kill()
    cluster.wait_registered(2)
    asks = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert asks.returncode == 8 and "given up: no other host has room" in asks.stderr and f"{topic}/0" in asks.stderr
    done = subprocess.run([*words, "--yes", "--wait"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert uid not in cluster.wait_isr(topic, 2).replicas
    node.start()
    wait_until(lambda: (meta := cluster.meta(topic)) is not None and uid in meta.isr, "it is in sync again", 60)


def test_everybody_is_killed_at_once(cluster: Cluster, topic: str) -> None:
    with UnderLoad(cluster, topic):
        for daemon in cluster.daemons:
            daemon.kill()
        cluster.start()
        cluster.wait_isr(topic, 3)


def test_a_copied_data_directory_is_refused(cluster: Cluster, topic: str) -> None:
    original = cluster.followers(topic)[0]
    original.stop()
    with cluster.another("clone") as clone:
        shutil.rmtree(clone.data)
        shutil.copytree(original.data, clone.data)
        original.start()
        isr = cluster.wait_isr(topic, 3).isr
        files = contents(clone.data)
        clone.spawn()
        assert gone(clone, 60) != 0
        assert "is a copy" in clone.log(), clone.log()[-2000:]
        assert contents(clone.data) == files, "a start that is refused changes nothing"
    cluster.wait_registered(3)
    wait_until(lambda: original.json("/stats?format=json"), "the original serves")
    assert original.stop() == 0
    original.start()
    assert cluster.wait_isr(topic, 3).isr == isr, "the original has its logs as before"
    assert "older copy" not in original.log()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_data_directory_that_is_an_older_copy_does_not_lead(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    leader, follower = cluster.leader(topic), cluster.followers(topic)[0]
    assert posted(leader, f"/channel/create?topic={topic}&channel=all")
    publisher = V2Publisher(leader.tcp, 20)
    publisher.publish(topic, [b"before"] * 100)
    assert follower.stop() == 0
    shutil.copytree(follower.data, tmp_path / "copy")
    follower.start()
    cluster.wait_isr(topic, 3)
    publisher.publish(topic, [b"behind"] * 100)
    publisher.close()
    for node in cluster.nodes:
        node.kill()
    shutil.rmtree(follower.data)
    shutil.copytree(tmp_path / "copy", follower.data)
    follower.start()
    assert "is an older copy" in follower.log()
    wait_until(lambda: len(cluster.controller()["nodes"]) == 1, "the others are known to be gone", 30)
    time.sleep(2)  # it would be elected now
    cluster.start()
    cluster.wait_isr(topic, 3)
    depth = lambda node: (node.channel(topic, "all") or {}).get("depth")  # noqa: E731
    wait_until(lambda: 200 in map(depth, cluster.nodes), "the channel has all that was acknowledged")
