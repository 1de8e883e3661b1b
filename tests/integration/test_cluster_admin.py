"""Administration of a real cluster at any of its nodes: whole answers, seeks, settings that change under load."""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.error
from collections.abc import Iterator
from itertools import count
from typing import Any

import grpc
import pytest

from nsqha.cli.brokers.v2client import Subscriber, V2Publisher
from nsqha.pb.v1 import admin_pb2 as pb
from nsqha.pb.v1 import admin_pb2_grpc, segments_pb2, segments_pb2_grpc
from tests.integration.cluster import Cluster, Member, posted
from tests.integration.servers import BIN, wait_until

pytestmark = pytest.mark.timeout(180)

names = count(1)


class Admin:
    """The Admin service of one member."""

    def __init__(self, member: Member) -> None:
        self._channel = grpc.insecure_channel(member.grpc)
        self._stub: Any = admin_pb2_grpc.AdminStub(self._channel)

    def __call__(self, rpc: str, **fields: Any) -> Any:
        return getattr(self._stub, rpc)(getattr(pb, f"{rpc}Request")(**fields), timeout=15)

    def segments(self, rpc: str, **fields: Any) -> Any:
        stub: Any = segments_pb2_grpc.SegmentsStub(self._channel)
        return getattr(stub, rpc)(getattr(segments_pb2, f"{rpc}Request")(**fields), timeout=15)

    def seek(self, topic: str, *, plan_only: bool = False, **target: Any) -> Any:
        return self("Seek", topic=topic, channel="steady", target=pb.SeekTarget(**target), plan_only=plan_only)

    def peek(self, topic: str, **where: Any) -> list[Any]:
        return list(self("PeekMessages", topic=topic, **where))

    def floors(self, topic: str) -> list[int]:
        channel = self("DescribeChannel", topic=topic, channel="steady").channel
        return [partition.floor for partition in channel.partitions]


@pytest.fixture
def admins(cluster: Cluster) -> Iterator[list[Admin]]:
    admins = [Admin(node) for node in cluster.nodes]
    yield admins
    for admin in admins:
        admin._channel.close()


def wait_led(cluster: Cluster, topic: str, partitions: int) -> set[int]:
    """Until each partition has a leader and a full ISR; who leads."""

    def all_led() -> set[int] | None:
        metas = [cluster.meta(topic, number) for number in range(partitions)]
        full = all(meta is not None and meta.leader and len(meta.isr) == 3 for meta in metas)
        return {meta.leader for meta in metas if meta is not None} if full else None

    leaders: set[int] = wait_until(all_led, f"all {partitions} partitions of {topic} are led", 30)
    return leaders


def publish(node: Member, topic: str, *bodies: bytes) -> None:
    publisher = V2Publisher(node.tcp, 20)
    publisher.publish(topic, list(bodies))
    publisher.close()


def fill(cluster: Cluster, topic: str, per_node: int) -> list[bytes]:
    """Publish at every node until each of the three partitions has something."""
    bodies = [b"%d-%d" % (n, i) for n in range(3) for i in range(per_node)]
    for n, node in enumerate(cluster.nodes):
        publish(node, topic, *bodies[n * per_node : (n + 1) * per_node])
    return bodies


class Drain:
    """A consumer of channel steady that finishes what it gets, in a thread."""

    def __init__(self, node: Member, topic: str, channel: str = "steady") -> None:
        self.bodies: list[bytes] = []
        self._client = Subscriber(node.tcp, 20, topic, channel, window=100)
        self._client.wait_at_most(0.05)
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            messages = self._client.messages()
            self.bodies += [message.body for message in messages]
            if messages:
                self._client.answer(messages, None, None)

    def wait(self, wanted: set[bytes], seconds: float = 30) -> None:
        wait_until(
            lambda: wanted <= set(self.bodies), f"all of {len(wanted)} messages came: {len(self.bodies)}", seconds
        )

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._client.leave()


def spread_topic(cluster: Cluster, admins: list[Admin]) -> str:
    """A topic of three partitions, led by different nodes."""
    name = f"spread-{next(names)}"
    admins[0]("CreateTopic", topic=name, settings=pb.TopicSettings(partitions=3), channels=["steady"])
    leaders = wait_led(cluster, name, 3)
    assert len(leaders) > 1, "placement puts all on one node"
    return name


def test_seek_and_undo_at_a_node_that_leads_nothing(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    other = Admin(cluster.followers(topic)[0])
    bodies = [b"%d" % n for n in range(50)]
    publish(leader, topic, *bodies)
    drain = Drain(leader, topic)
    drain.wait(set(bodies))
    wait_until(lambda: other.floors(topic) == [50], "all is finished")
    plan = other.seek(topic, plan_only=True, offset=20)
    assert not plan.done
    assert [(p.partition, p.from_offset, p.to_offset, p.messages, p.error) for p in plan.partitions] == [
        (0, 50, 20, 30, "")
    ]
    assert other.floors(topic) == [50]
    drain.close()
    done = other.seek(topic, offset=20)
    assert done.done
    assert done.partitions[0].to_offset == 20
    # The seek is in the log: whoever leads next has it too, and can undo it.
    leader.kill()
    wait_until(lambda: other.floors(topic) == [20], "the next leader has the seek", 20)
    undone = other("UndoSeek", topic=topic, channel="steady")
    assert [(p.to_offset, p.error) for p in undone.partitions] == [(50, "")]
    assert other.floors(topic) == [50]
    leader.start()
    cluster.wait_isr(topic, 3)


def test_one_answer_for_partitions_of_several_leaders(cluster: Cluster, admins: list[Admin]) -> None:
    topic = spread_topic(cluster, admins)
    bodies = fill(cluster, topic, 20)
    for admin in admins:
        # A node that has asked another one for nothing yet may find its first connection on a busy machine under way.
        wait_until(lambda: not admin("DescribeTopic", topic=topic).unreachable, "every node reaches every other one")  # noqa: B023
        told = admin("DescribeTopic", topic=topic)
        assert not told.unreachable
        assert [p.partition for p in told.topic.partitions] == [0, 1, 2]
        assert not [p.error for p in told.topic.partitions if p.error]
        assert sum(p.high_watermark for p in told.topic.partitions) == 60
        assert told.topic.message_count == 60
        assert list(told.topic.channels) == ["steady"]
        for partition in told.topic.partitions:
            meta = cluster.meta(topic, partition.partition)
            assert meta is not None
            assert (partition.leader, partition.leader_epoch) == (meta.leader, meta.epoch)
            assert [r.node for r in partition.replicas if r.in_sync] == list(meta.replicas)
            assert (partition.under_replicated, partition.min_isr) == (False, 2)
        channel = admin("DescribeChannel", topic=topic, channel="steady").channel
        assert (channel.depth, len(channel.partitions)) == (60, 3)
        listed = {t.name: t for t in admin("ListTopics").topics}
        assert listed[topic].message_count == 60
        assert [c.depth for c in admin("ListChannels", topic=topic).channels] == [60]
        assert sorted(m.body for m in admin.peek(topic, start=True)) == sorted(bodies)
        newest = admin.peek(topic, last=7)
        assert [m.timestamp_ns for m in newest] == sorted(m.timestamp_ns for m in newest)
        assert len(newest) == 7
        assert {m.body for m in newest} <= set(bodies)
    last = admins[1].peek(topic, last=1)[0]
    assert admins[2].seek(topic, message_id=last.message_id).partitions[0].to_offset == last.offset
    assert admins[0].peek(topic, message_id=last.message_id)[0].body == last.body
    with pytest.raises(grpc.RpcError) as refused:
        admins[0].peek(topic, message_id=f"{int(last.message_id, 16) + 1000:016x}")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_seek_moves_all_partitions_and_undo_goes_back(cluster: Cluster, admins: list[Admin]) -> None:
    topic = spread_topic(cluster, admins)
    bodies = set(fill(cluster, topic, 20))
    drain = Drain(cluster.nodes[0], topic)
    drain.wait(bodies)
    ends = [p.high_watermark for p in admins[0]("DescribeTopic", topic=topic).topic.partitions]
    wait_until(lambda: admins[1].floors(topic) == ends, "all is finished")
    drain.bodies.clear()
    done = admins[2].seek(topic, start=True)
    assert [(p.partition, p.from_offset, p.to_offset, p.error) for p in done.partitions] == [
        (n, end, 0, "") for n, end in enumerate(ends)
    ]
    drain.wait(bodies)
    wait_until(lambda: admins[1].floors(topic) == ends, "all is finished again")
    back = admins[0]("UndoSeek", topic=topic, channel="steady", plan_only=True)
    assert sum(p.error == "" for p in back.partitions) == 3
    drain.close()


def test_answers_are_whole_when_a_leader_has_just_died(cluster: Cluster, admins: list[Admin]) -> None:
    topic = spread_topic(cluster, admins)
    fill(cluster, topic, 10)
    record = cluster.meta(topic, 1)
    assert record is not None
    victim = cluster.member(record.leader)
    assert victim is not None
    asked = next(admin for admin, node in zip(admins, cluster.nodes, strict=True) if node is not victim)
    victim.kill()
    told = asked("DescribeTopic", topic=topic)
    assert [p.partition for p in told.topic.partitions] == [0, 1, 2]
    plan = asked.seek(topic, plan_only=True, start=True)
    assert [p.partition for p in plan.partitions] == [0, 1, 2]
    assert not [p.error for p in plan.partitions if p.error], "new leaders are waited for"
    victim.start()
    wait_led(cluster, topic, 3)


def test_partitions_are_added_under_load(cluster: Cluster, topic: str, admins: list[Admin]) -> None:
    published: list[bytes] = []
    stop = threading.Event()

    def load(node: Member, n: int) -> None:
        serial = count()
        while not stop.is_set():
            # A connection keeps to its partition while it has something under way; new ones choose among all.
            publisher = V2Publisher(node.tcp, 20)
            bodies = [b"%d-%d" % (n, next(serial)) for _ in range(20)]
            publisher.publish(topic, bodies)
            published.extend(bodies)
            publisher.close()

    drains = [Drain(node, topic) for node in cluster.nodes[:2]]
    threads = [threading.Thread(target=load, args=(node, n)) for n, node in enumerate(cluster.nodes)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(published) > 200, "the load runs")
        leader = cluster.leader(topic)
        other = next(a for a, node in zip(admins, cluster.nodes, strict=True) if node is not leader)
        grown = other("UpdateTopicSettings", topic=topic, partitions=3)
        assert grown.topic.settings.partitions == 3
        wait_led(cluster, topic, 3)

        def ends() -> list[int]:
            return [p.high_watermark for p in other("DescribeTopic", topic=topic).topic.partitions]

        wait_until(lambda: len(ends()) == 3 and min(ends()) > 100, "all partitions are published to", 30)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    wanted = set(published)
    wait_until(
        lambda: wanted <= {body for drain in drains for body in drain.bodies},
        f"all of {len(wanted)} messages came",
        30,
    )
    for drain in drains:
        drain.close()
    with pytest.raises(grpc.RpcError, match="cannot become 2, only more"):
        other("UpdateTopicSettings", topic=topic, partitions=2)


def test_min_isr_and_replicas(cluster: Cluster, topic: str, admins: list[Admin]) -> None:
    leader = cluster.leader(topic)
    other = next(a for a, node in zip(admins, cluster.nodes, strict=True) if node is not leader)
    changed = other("UpdateTopicSettings", topic=topic, min_isr=3)
    assert not changed.remarks
    record = cluster.meta(topic)
    assert record is not None
    assert record.min_isr == 3
    publish(leader, topic, b"three have it")
    wait_until(lambda: other("DescribeTopic", topic=topic).topic.partitions[0].min_isr == 3, "the leader knows")
    with pytest.raises(grpc.RpcError, match=r"min_isr is 3; it cannot be more than replicas, 2"):
        other("UpdateTopicSettings", topic=topic, replicas=2)
    said = other("UpdateTopicSettings", topic=topic, replicas=5, min_isr=0)
    assert [remark for remark in said.remarks if "replicas is 5, and there are" in remark]
    assert other("DescribeTopic", topic=topic).topic.partitions[0].under_replicated
    other("UpdateTopicSettings", topic=topic, replicas=2)
    fewer = wait_until(
        lambda: (m := cluster.meta(topic)) and len(m.replicas) == 2 and len(m.isr) == 2 and m, "one goes", 40
    )
    assert fewer.min_isr == 2
    publish(leader, topic, b"two have it")


def test_readiness_and_figures(cluster: Cluster, topic: str) -> None:
    cluster.start()
    leader = cluster.leader(topic)
    follower = cluster.followers(topic)[0]

    def readiness(node: Member) -> str:
        try:
            return node.request("/readyz?verbose").decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()

    for node in cluster.nodes:
        wait_until(lambda n=node: readiness(n).startswith("OK"), f"{node.name} is ready: {readiness(node)}")  # type: ignore[misc]
        assert "[+] registered" in readiness(node)
    metrics = leader.request("/metrics").decode()
    assert "nsqha_cluster_registered 1.0" in metrics
    assert f'nsqha_partition_isr_size{{partition="0",topic="{topic}"}} 3.0' in metrics
    assert f'nsqha_push_lag_bytes{{follower="{follower.name}"}}' in metrics
    figures = leader.json("/stats?format=json&include_nsqha=true")["nsqha"]["cluster"]
    assert figures["nodes"] == 3
    assert figures["leaders"] >= 1
    assert {lag["name"] for lag in figures["push_lag"]} <= {node.name for node in cluster.nodes}
    # Without etcd the lease is over after a while: clients are better off elsewhere.
    follower.kill()
    wait_until(lambda: "nsqha_cluster_nodes 2.0" in leader.request("/metrics").decode(), "its lease is over")
    assert readiness(leader).startswith("OK"), "a follower that is away is no fault of the leader"
    follower.start()
    wait_until(lambda: readiness(follower).startswith("OK"), "it is ready when it has caught up", 30)


def test_the_command_line_shows_who_leads(cluster: Cluster, topic: str) -> None:
    follower = cluster.followers(topic)[0]

    def nsqha(*words: str) -> Any:
        command = [str(BIN / "nsqha"), *words, f"--grpc-address={follower.grpc}", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return json.loads(done.stdout), done.stderr

    shown, _ = nsqha("topic", "show", topic)
    assert shown["partitions"][0]["leader_name"] == cluster.leader(topic).name
    assert all(replica["in_sync"] for replica in shown["partitions"][0]["replicas"])
    _, said = nsqha("topic", "set", topic, "--replicas", "4")
    assert "replicas is 4" in said
    command = [str(BIN / "nsqha"), "topic", "show", topic, f"--grpc-address={follower.grpc}"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "IN SYNC" in text
    assert "under-replicated" in text
    assert posted(follower, f"/topic/delete?topic={topic}")


def ids_and_offsets() -> set[str]:
    """Every place in a request of the Admin and Segments services that names messages by id or by offset."""
    found = set()

    def walk(rpc: str, message: Any, path: str) -> None:
        for field in message.fields:
            name = f"{path}{field.name}"
            edge = field.name in ("first", "end") and field.type == field.TYPE_UINT64
            if edge or field.name.startswith(("message_id", "offset")):
                found.add(f"{rpc}: {name}")
            elif field.message_type is not None:
                walk(rpc, field.message_type, f"{name}.")

    for service in (*pb.DESCRIPTOR.services_by_name.values(), *segments_pb2.DESCRIPTOR.services_by_name.values()):
        for method in service.methods:
            walk(method.name, method.input_type, "")
    return found


class EveryLeader:
    """A topic whose three partitions are led by the three nodes, with deferred messages; asked at any node."""

    def __init__(self, cluster: Cluster, admins: list[Admin]) -> None:
        self.topic = f"spread-{next(names)}"
        admins[0]("CreateTopic", topic=self.topic, settings=pb.TopicSettings(partitions=3), channels=["steady"])
        assert len(wait_led(cluster, self.topic, 3)) == 3, "placement puts two on one node"
        for n in range(3):
            url = f"/pub?topic={self.topic}&partition={n}&defer=3600000"
            for i in range(12):
                cluster.nodes[0].request(url, b"%d.%d" % (n, i))
        held = wait_until(lambda: self.held(admins[0], 36), "all are deferred")
        self.ids = [[one.message_id for one in part.messages] for part in held]  # by partition

    def held(self, admin: Admin, count: int, **fields: Any) -> Any:
        answer = admin("ListMessages", topic=self.topic, channel="steady", state=pb.MESSAGE_STATE_DEFERRED, **fields)
        return answer.partitions if sum(len(one.messages) for one in answer.partitions) == count else None

    def list_messages(self, admin: Admin, n: int) -> None:
        for number in range(3):
            id_ = self.ids[number][11]
            (found,) = admin("ListMessages", topic=self.topic, channel="steady", message_id=id_).partitions
            assert ([one.message_id for one in found.messages], found.error) == ([id_], "")
        first = self.held(admin, 6, limit=2)
        second = self.held(admin, 6, limit=2, after=[part.next for part in first])
        assert len({one.message_id for part in (*first, *second) for one in part.messages}) == 12

    def change_messages(self, admin: Admin, n: int) -> None:
        actions = (pb.MESSAGE_ACTION_DEFER, pb.MESSAGE_ACTION_KILL, pb.MESSAGE_ACTION_FINISH)
        for action in actions:
            ids = [self.ids[number][n] for number in (1, 2, 0)]
            fields = {"message_ids": ids, "action": action, "due_ns": 2**61}
            answers = admin("ChangeMessages", topic=self.topic, channel="steady", **fields).partitions
            assert [(one.error, list(one.failed), list(one.done)) for one in answers] == [
                ("", [], [self.ids[number][n]]) for number in range(3)
            ]
        fields = {"action": pb.MESSAGE_ACTION_DEFER, "due_ns": 2**61, "state": pb.MESSAGE_STATE_DEFERRED, "limit": 1}
        places = [pb.MessagePlace(partition=number, offset=10) for number in (2, 0)]
        answers = admin("ChangeMessages", topic=self.topic, channel="steady", after=places, **fields).partitions
        assert [(one.partition, one.changed, one.error) for one in answers] == [(0, 1, ""), (2, 1, "")]

    def seek(self, admin: Admin, n: int) -> None:
        done = admin.seek(self.topic, offset=n).partitions
        assert [(one.partition, one.to_offset, one.error) for one in done] == [(number, n, "") for number in range(3)]
        for number in range(3):
            (one,) = admin.seek(self.topic, message_id=self.ids[number][n + 1]).partitions
            assert (one.partition, one.to_offset, one.error) == (number, n + 1, "")

    def peek_messages(self, admin: Admin, n: int) -> None:
        for number in range(3):
            found = admin.peek(self.topic, message_id=self.ids[number][10])
            assert [one.message_id for one in found] == self.ids[number][10:]
        assert {one.message_id for one in admin.peek(self.topic, offset=10)} == {
            id_ for ids in self.ids for id_ in ids[10:]
        }

    def snapshot(self, admin: Admin, n: int) -> None:
        ranges = [segments_pb2.OffsetRange(topic=self.topic, partition=number, first=2, end=5) for number in (2, 1)]
        found = admin.segments("Snapshot", topics=[self.topic], ranges=ranges, cut_points=True).partitions
        assert [(one.partition, one.error) for one in found] == [(1, ""), (2, "")]
        assert all(one.cuts[0].offset <= 2 and one.cuts[-1].offset >= 5 for one in found)

    def commit_reader(self, admin: Admin, n: int) -> None:
        offsets = {2: 3 + n, 0: 1 + n}
        floors = admin.segments("CommitReader", topic=self.topic, channel="reader", offsets=offsets, back=True).floors
        assert [(one.partition, one.offset, one.error) for one in floors] == [(0, 1 + n, ""), (2, 3 + n, "")]


def test_every_request_with_ids_or_offsets_reaches_the_leader_of_each(cluster: Cluster, admins: list[Admin]) -> None:
    """At every node, with leaders on all of them."""
    requests = {
        "ListMessages: message_id": EveryLeader.list_messages,
        "ListMessages: after.offset": EveryLeader.list_messages,
        "ChangeMessages: message_ids": EveryLeader.change_messages,
        "ChangeMessages: after.offset": EveryLeader.change_messages,
        "Seek: target.message_id": EveryLeader.seek,
        "Seek: target.offset": EveryLeader.seek,
        "PeekMessages: message_id": EveryLeader.peek_messages,
        "PeekMessages: offset": EveryLeader.peek_messages,
        "Snapshot: ranges.first": EveryLeader.snapshot,
        "Snapshot: ranges.end": EveryLeader.snapshot,
        "CommitReader: offsets": EveryLeader.commit_reader,
    }
    assert ids_and_offsets() == set(requests)
    topic = EveryLeader(cluster, admins)
    for check in dict.fromkeys(requests.values()):
        for n, admin in enumerate(admins):
            check(topic, admin, n)


def test_one_partition_is_emptied_wherever_it_is_led(cluster: Cluster, admins: list[Admin]) -> None:
    """As tools of the Youzan fork ask for it: at any node."""
    topic = spread_topic(cluster, admins)
    for number in range(3):
        cluster.nodes[0].request(f"/pub?topic={topic}&partition={number}", b"x")

    def depths() -> list[int]:
        channel = admins[0]("DescribeChannel", topic=topic, channel="steady").channel
        return [partition.depth for partition in channel.partitions]

    wait_until(lambda: depths() == [1, 1, 1], "each partition has a message")
    for number, node in ((1, cluster.nodes[0]), (0, cluster.nodes[2])):
        node.request(f"/channel/empty?topic={topic}&channel=steady&partition={number}", b"")
    assert depths() == [0, 0, 1]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        cluster.nodes[0].request(f"/channel/empty?topic={topic}&channel=steady&partition=77", b"")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        cluster.nodes[0].request(f"/channel/delete?topic={topic}&channel=steady&partition=2", b"")
    assert depths() == [0, 0, 1]
