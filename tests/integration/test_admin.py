"""Administration over gRPC, against a real node: seek, undo, peek, status codes, health, reflection."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from nsqha.cli.brokers.v2client import Message, RefusedByServer, Subscriber, V2Publisher
from nsqha.pb.v1 import admin_pb2 as pb
from nsqha.pb.v1 import admin_pb2_grpc
from tests.integration.devnode import DevNode

SERVICE, SEGMENTS = "nsqha.v1.Admin", "nsqha.v1.Segments"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("admin"), "--sync=interval")
    yield node
    assert node.stop() == 0


@pytest.fixture(scope="module")
def channel(node: DevNode) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(node.grpc) as channel:
        yield channel


@pytest.fixture
def admin(channel: grpc.Channel) -> Any:
    return admin_pb2_grpc.AdminStub(channel)


@pytest.fixture
def topic(admin: Any, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own, with channel c."""
    name = str(request.node.name)[:60].replace("[", "-").replace("]", "")
    admin.CreateTopic(pb.CreateTopicRequest(topic=name, channels=["c"]))
    return name


def publish(node: DevNode, topic: str, *bodies: bytes) -> None:
    publisher = V2Publisher(node.tcp, 10)
    publisher.publish(topic, bodies)
    publisher.close()


def take(consumer: Subscriber, n: int) -> list[Message]:
    """The next `n` messages, not answered."""
    consumer.wait_at_most(10)
    taken: list[Message] = []
    while len(taken) < n:
        found = consumer.messages()
        assert found, f"only {len(taken)} of {n} messages came"
        taken += found
    return taken


def consume(node: DevNode, topic: str, n: int) -> list[bytes]:
    """Finish `n` messages of channel c."""
    consumer = Subscriber(node.tcp, 10, topic, "c", window=n)
    taken: list[Message] = []
    while len(taken) < n:
        found = take(consumer, 1)
        taken += found
        consumer.answer(found, None, n - len(taken))
    consumer.leave()
    return [message.body for message in taken]


def seek(admin: Any, topic: str, *, plan_only: bool = False, partition: int | None = None, **target: Any) -> Any:
    request = pb.SeekRequest(
        topic=topic, channel="c", target=pb.SeekTarget(**target), plan_only=plan_only, partition=partition
    )
    return admin.Seek(request)


def floor(admin: Any, topic: str) -> int:
    channel = admin.DescribeChannel(pb.DescribeChannelRequest(topic=topic, channel="c")).channel
    return int(channel.partitions[0].floor)


def peek(admin: Any, topic: str, **where: Any) -> list[Any]:
    return list(admin.PeekMessages(pb.PeekMessagesRequest(topic=topic, **where)))


def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details()


# ---- seek


def test_a_plan_changes_nothing(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, *[b"m%d" % n for n in range(10)])
    consume(node, topic, 10)
    answer = seek(admin, topic, plan_only=True, offset=4)
    plan = answer.partitions[0]
    assert not answer.done
    assert (plan.from_offset, plan.to_offset, plan.messages, plan.clamped, plan.error) == (10, 4, 6, False, "")
    assert plan.bytes >= 6 * 36
    assert plan.to_timestamp_ns
    assert floor(admin, topic) == 10


def test_seek_to_the_start_delivers_everything_again(node: DevNode, admin: Any, topic: str) -> None:
    bodies = [b"m%d" % n for n in range(20)]
    publish(node, topic, *bodies)
    assert consume(node, topic, 20) == bodies
    answer = seek(admin, topic, start=True)
    assert answer.done
    assert (answer.partitions[0].to_offset, answer.partitions[0].messages) == (0, 20)
    assert consume(node, topic, 20) == bodies


def test_seek_to_the_end_skips_and_says_how_much(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, *[b"old"] * 5)
    skipped = seek(admin, topic, end=True).partitions[0]
    assert (skipped.messages, skipped.to_offset, skipped.to_timestamp_ns, skipped.clamped) == (-5, 5, 0, False)
    publish(node, topic, b"new")
    assert consume(node, topic, 1) == [b"new"]


def test_seeking_twice_goes_to_the_same_place(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, *[b"m%d" % n for n in range(5)])
    consume(node, topic, 5)
    seek(admin, topic, offset=2)
    again = seek(admin, topic, offset=2).partitions[0]
    assert (again.from_offset, again.to_offset, again.messages) == (2, 2, 0)
    assert consume(node, topic, 3) == [b"m2", b"m3", b"m4"]


def test_a_seek_beyond_the_log_is_clamped_and_says_so(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, *[b"x"] * 3)
    done = seek(admin, topic, offset=2**63).partitions[0]
    assert (done.to_offset, done.clamped) == (3, True)


def test_a_time_means_the_first_batch_at_or_after_it(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, b"early")
    publish(node, topic, b"late")
    early, late = (message.timestamp_ns for message in peek(admin, topic, start=True))
    assert early < late
    exact = seek(admin, topic, plan_only=True, timestamp_ns=late, clock_skew_ns=0).partitions[0]
    assert (exact.to_offset, exact.to_timestamp_ns) == (1, late)
    assert seek(admin, topic, plan_only=True, timestamp_ns=late + 1, clock_skew_ns=0).partitions[0].to_offset == 2


def test_a_time_is_taken_a_second_earlier_unless_told_otherwise(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, b"early")
    publish(node, topic, b"late")
    early, late = (message.timestamp_ns for message in peek(admin, topic, start=True))
    for time_ns, offset in ((early, 0), (early + 1, 1), (late, 1), (late + 1, 2)):
        assert seek(admin, topic, plan_only=True, timestamp_ns=time_ns + 10**9).partitions[0].to_offset == offset


def test_a_message_id_moves_only_its_own_partition(node: DevNode, admin: Any) -> None:
    settings = pb.TopicSettings(partitions=3)
    admin.CreateTopic(pb.CreateTopicRequest(topic="three", channels=["c"], settings=settings))
    for _ in range(6):
        publish(node, "three", b"x", b"y")  # one partition per connection
    third = next(m for m in peek(admin, "three", start=True, partition=2) if m.offset == 1)
    answer = seek(admin, "three", message_id=third.message_id)
    assert [(p.partition, p.to_offset) for p in answer.partitions] == [(2, 1)]
    floors = admin.DescribeChannel(pb.DescribeChannelRequest(topic="three", channel="c")).channel.partitions
    assert [p.floor for p in floors] == [0, 0, 1]


def test_one_partition_can_be_moved_alone(node: DevNode, admin: Any) -> None:
    settings = pb.TopicSettings(partitions=2)
    admin.CreateTopic(pb.CreateTopicRequest(topic="two", channels=["c"], settings=settings))
    for _ in range(4):
        publish(node, "two", b"x")
    assert [p.partition for p in seek(admin, "two", end=True, partition=1).partitions] == [1]
    floors = admin.DescribeChannel(pb.DescribeChannelRequest(topic="two", channel="c")).channel.partitions
    assert [p.floor for p in floors] == [0, 2]
    assert code_of(lambda: seek(admin, "two", end=True, partition=7))[0] is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("stranger", ["ffffffffffffffff", "0000000000000000"])
def test_an_id_of_nobody_is_refused(node: DevNode, admin: Any, stranger: str) -> None:
    admin.CreateTopic(pb.CreateTopicRequest(topic=f"strangers-{stranger[0]}", channels=["c"]))
    code, text = code_of(lambda: seek(admin, f"strangers-{stranger[0]}", message_id=stranger))
    assert code is grpc.StatusCode.NOT_FOUND
    assert stranger in text


def test_the_id_of_the_next_message_is_refused_until_it_exists(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, b"first")
    following = f"{int(peek(admin, topic, start=True)[0].message_id, 16) + 1:016x}"
    assert code_of(lambda: seek(admin, topic, message_id=following))[0] is grpc.StatusCode.NOT_FOUND
    publish(node, topic, b"second")
    assert seek(admin, topic, message_id=following, plan_only=True).partitions[0].to_offset == 1


@pytest.mark.parametrize("bad", ["", "12", "ABCDEF0123456789", "zzzzzzzzzzzzzzzz"])
def test_what_is_no_id_is_an_invalid_argument(admin: Any, bad: str) -> None:
    if not any(t.name == "ids" for t in admin.ListTopics(pb.ListTopicsRequest()).topics):
        admin.CreateTopic(pb.CreateTopicRequest(topic="ids", channels=["c"]))
    assert code_of(lambda: seek(admin, "ids", message_id=bad))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(lambda: peek(admin, "ids", message_id=bad))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_what_is_refused_is_told_however_long_it_is(admin: Any, topic: str) -> None:
    """The error names it; a megabyte of that would end the connection instead."""
    long = "\N{OLD ITALIC LETTER A}" * 300_000
    assert code_of(lambda: seek(admin, long, start=True))[0] is grpc.StatusCode.NOT_FOUND
    assert code_of(lambda: seek(admin, topic, message_id=long))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_seek_without_a_target_or_with_a_negative_skew_is_refused(admin: Any, topic: str) -> None:
    assert code_of(lambda: seek(admin, topic))[0] is grpc.StatusCode.INVALID_ARGUMENT
    code, text = code_of(lambda: seek(admin, topic, timestamp_ns=5, clock_skew_ns=-1))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "clock_skew_ns" in text


def test_an_old_fin_can_not_finish_a_new_delivery(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, b"again")
    consumer = Subscriber(node.tcp, 10, topic, "c", window=1)
    first = take(consumer, 1)
    seek(admin, topic, start=True)
    second = take(consumer, 1)
    assert second[0].id == first[0].id
    consumer.answer(first, None, None)
    ((_, refused),) = consumer.frames()
    assert refused.startswith(b"E_FIN_FAILED")
    assert floor(admin, topic) == 0
    consumer.answer(second, None, None)
    consumer.leave()
    assert floor(admin, topic) == 1


# ---- undo


def test_undo_goes_back_with_what_was_finished_above_the_floor(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, *[b"m%d" % n for n in range(4)])
    consumer = Subscriber(node.tcp, 10, topic, "c", window=4)
    messages = take(consumer, 4)
    consumer.answer([messages[0], messages[2]], None, 0)
    consumer.leave()
    seek(admin, topic, end=True)
    undone = admin.UndoSeek(pb.UndoSeekRequest(topic=topic, channel="c")).partitions[0]
    assert (undone.from_offset, undone.to_offset, undone.undo_repeats) == (4, 1, False)
    assert consume(node, topic, 2) == [b"m1", b"m3"]


def test_undoing_twice_returns(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, *[b"x"] * 4)
    seek(admin, topic, offset=3)
    request = pb.UndoSeekRequest(topic=topic, channel="c")
    assert admin.UndoSeek(request).partitions[0].to_offset == 0
    assert admin.UndoSeek(request).partitions[0].to_offset == 3


def test_emptying_can_be_undone(node: DevNode, admin: Any, topic: str) -> None:
    publish(node, topic, b"kept")
    admin.EmptyChannel(pb.EmptyChannelRequest(topic=topic, channel="c"))
    plan = admin.UndoSeek(pb.UndoSeekRequest(topic=topic, channel="c", plan_only=True))
    assert (plan.done, plan.partitions[0].to_offset, plan.partitions[0].messages) == (False, 0, 1)
    assert floor(admin, topic) == 1
    admin.UndoSeek(pb.UndoSeekRequest(topic=topic, channel="c"))
    assert consume(node, topic, 1) == [b"kept"]


def test_nothing_to_undo_is_said_per_partition(admin: Any, topic: str) -> None:
    answer = admin.UndoSeek(pb.UndoSeekRequest(topic=topic, channel="c"))
    assert "no seek to undo" in answer.partitions[0].error


# ---- peek


def test_peek_reads_without_touching_a_channel(node: DevNode, admin: Any, topic: str) -> None:
    bodies = [b"m%d" % n for n in range(5)]
    publish(node, topic, *bodies)
    found = peek(admin, topic, start=True)
    assert [(m.offset, m.body) for m in found] == list(enumerate(bodies))
    assert all(m.leader_epoch and m.timestamp_ns for m in found)
    assert [m.body for m in peek(admin, topic, offset=3)] == bodies[3:]
    assert [m.body for m in peek(admin, topic, last=2)] == bodies[3:]
    assert [m.body for m in peek(admin, topic, start=True, count_max=2)] == bodies[:2]
    assert [m.body for m in peek(admin, topic, message_id=found[4].message_id)] == bodies[4:]
    assert [m.body for m in peek(admin, topic, timestamp_ns=found[0].timestamp_ns)] == bodies
    assert peek(admin, topic, timestamp_ns=2**62) == []
    assert floor(admin, topic) == 0


def test_peek_merges_partitions_by_time(node: DevNode, admin: Any) -> None:
    settings = pb.TopicSettings(partitions=2)
    admin.CreateTopic(pb.CreateTopicRequest(topic="merged", settings=settings))
    for n in range(8):
        publish(node, "merged", b"%d" % n)
    assert [m.body for m in peek(admin, "merged", start=True)] == [b"%d" % n for n in range(8)]
    assert [m.body for m in peek(admin, "merged", last=3)] == [b"5", b"6", b"7"]
    assert {m.partition for m in peek(admin, "merged", start=True)} == {0, 1}
    assert {m.partition for m in peek(admin, "merged", start=True, partition=1)} == {1}


def test_peek_shows_when_a_deferred_message_is_due(node: DevNode, admin: Any, topic: str) -> None:
    publisher = V2Publisher(node.tcp, 10)
    publisher.publish(topic, [b"now"])
    publisher.publish(topic, [b"in a day"], delay_ms=86_400_000)
    publisher.publish(topic, [b"now again"])
    publisher.close()
    now, later, after = peek(admin, topic, start=True)
    assert (now.deliver_at_ns, after.deliver_at_ns) == (0, 0)
    assert abs(later.deliver_at_ns - later.timestamp_ns - 86_400 * 10**9) < 10**9


def test_peek_reads_far_behind_the_cache(node: DevNode, admin: Any, topic: str) -> None:
    for _ in range(40):
        publish(node, topic, *[b"x" * 100_000] * 5)
    first = peek(admin, topic, start=True, count_max=3)
    assert [m.offset for m in first] == [0, 1, 2]
    assert peek(admin, topic, last=1)[0].offset == 199


def test_peek_is_bounded(admin: Any, topic: str) -> None:
    assert code_of(lambda: peek(admin, topic, start=True, count_max=10_001))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(lambda: peek(admin, topic, last=10_001))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(lambda: peek(admin, "nobody"))[0] is grpc.StatusCode.NOT_FOUND


# ---- topics and channels


def test_errors_have_their_status(admin: Any, topic: str) -> None:
    codes = grpc.StatusCode
    for request, call, code in (
        (pb.DescribeTopicRequest(topic="nobody"), admin.DescribeTopic, codes.NOT_FOUND),
        (pb.DeleteTopicRequest(topic="nobody"), admin.DeleteTopic, codes.NOT_FOUND),
        (pb.CreateTopicRequest(topic=topic), admin.CreateTopic, codes.ALREADY_EXISTS),
        (pb.CreateTopicRequest(topic="no good"), admin.CreateTopic, codes.INVALID_ARGUMENT),
        (pb.CreateTopicRequest(topic="n" * 65), admin.CreateTopic, codes.INVALID_ARGUMENT),
        (
            pb.CreateTopicRequest(topic="many", settings=pb.TopicSettings(partitions=5000)),
            admin.CreateTopic,
            codes.INVALID_ARGUMENT,
        ),
        (pb.CreateChannelRequest(topic=topic, channel="c"), admin.CreateChannel, codes.ALREADY_EXISTS),
        (pb.CreateChannelRequest(topic=topic, channel=""), admin.CreateChannel, codes.INVALID_ARGUMENT),
        (pb.DeleteChannelRequest(topic=topic, channel="d"), admin.DeleteChannel, codes.NOT_FOUND),
        (pb.PauseChannelRequest(topic=topic, channel="d", paused=True), admin.PauseChannel, codes.NOT_FOUND),
        (pb.EmptyChannelRequest(topic="nobody", channel="c"), admin.EmptyChannel, codes.NOT_FOUND),
        (pb.ListChannelsRequest(topic="nobody"), admin.ListChannels, codes.NOT_FOUND),
        (
            pb.UpdateTopicSettingsRequest(topic=topic, retention_ms=-7),
            admin.UpdateTopicSettings,
            codes.INVALID_ARGUMENT,
        ),
    ):
        assert code_of(lambda call=call, request=request: call(request))[0] is code, request


def test_settings_change_and_stay(admin: Any, topic: str) -> None:
    request = pb.UpdateTopicSettingsRequest(topic=topic, sync=pb.SYNC_NONE, retention_ms=60_000, retention_bytes=-1)
    changed = admin.UpdateTopicSettings(request).topic.settings
    assert (changed.sync, changed.retention_ms, changed.retention_bytes) == (pb.SYNC_NONE, 60_000, -1)
    partly = admin.UpdateTopicSettings(pb.UpdateTopicSettingsRequest(topic=topic, retention_ms=0)).topic.settings
    assert (partly.sync, partly.retention_ms, partly.retention_bytes) == (pb.SYNC_NONE, 0, -1)


def test_a_paused_topic_holds_messages_back(node: DevNode, admin: Any, topic: str) -> None:
    admin.PauseTopic(pb.PauseTopicRequest(topic=topic, paused=True))
    publish(node, topic, b"held")
    described = admin.DescribeTopic(pb.DescribeTopicRequest(topic=topic)).topic
    assert described.paused
    assert (described.partitions[0].high_watermark, described.partitions[0].pump_offset) == (1, 0)
    admin.PauseTopic(pb.PauseTopicRequest(topic=topic, paused=False))
    assert consume(node, topic, 1) == [b"held"]


def test_all_channels_can_be_listed_at_once(admin: Any, topic: str) -> None:
    admin.CreateChannel(pb.CreateChannelRequest(topic=topic, channel="b"))
    everything = [(c.topic, c.name) for c in admin.ListChannels(pb.ListChannelsRequest()).channels]
    assert (topic, "b") in everything
    assert everything == sorted(everything)
    assert [c.name for c in admin.ListChannels(pb.ListChannelsRequest(topic=topic)).channels] == ["b", "c"]


def test_a_seek_survives_a_kill(tmp_path: Path) -> None:
    node = DevNode(tmp_path)
    publish(node, "orders", *[b"m%d" % n for n in range(6)])
    with grpc.insecure_channel(node.grpc) as connection:
        stub = admin_pb2_grpc.AdminStub(connection)
        stub.CreateChannel(pb.CreateChannelRequest(topic="orders", channel="c"))
        seek(stub, "orders", offset=4)
    node.process.kill()
    node.process.wait()
    node = DevNode(tmp_path)
    assert consume(node, "orders", 2) == [b"m4", b"m5"]
    with grpc.insecure_channel(node.grpc) as connection:
        undone = admin_pb2_grpc.AdminStub(connection).UndoSeek(pb.UndoSeekRequest(topic="orders", channel="c"))
    assert undone.partitions[0].to_offset == 0
    assert node.stop() == 0


# ---- what is on beside


def test_health_says_serving(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watched = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        watched.cancel()
    code, _ = code_of(lambda: stub.Check(health_pb2.HealthCheckRequest(service="nobody")))
    assert code is grpc.StatusCode.NOT_FOUND
    watched = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watched.cancel()
    statuses = stub.List(health_pb2.HealthListRequest()).statuses
    assert {name: each.status for name, each in statuses.items()} == {"": 1, SERVICE: 1, SEGMENTS: 1}


def test_reflection_lists_the_services(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([asked]))))
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


def test_the_node_describes_itself(node: DevNode, admin: Any) -> None:
    described = admin.GetNode(pb.GetNodeRequest())
    assert described.health == "OK"
    assert described.data_path == str(node.folder / "data")
    assert described.implementation in ("compiled", "pure")
    assert not described.publishes_refused
    assert described.disk_free_bytes > 0
    assert (described.retention_ms, described.retention_bytes) == (24 * 3600 * 1000, 1 << 30)


def test_what_http_creates_grpc_sees(node: DevNode, admin: Any) -> None:
    urllib.request.urlopen(f"http://{node.http}/pub?topic=byhttp", data=b"x").read()
    assert admin.DescribeTopic(pb.DescribeTopicRequest(topic="byhttp")).topic.partitions[0].high_watermark == 1


def test_the_client_says_what_the_broker_refused(node: DevNode) -> None:
    publisher = V2Publisher(node.tcp, 10)
    with pytest.raises(RefusedByServer, match="E_BAD_MESSAGE"):
        publisher.publish("orders", [b"x" * (2 << 20)])
    publisher.close()
