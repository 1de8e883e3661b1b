"""ChangeMessages and CommitReader with ids and offsets of several partitions: each leader gets its own, and the answer
says of each what became of it. Leaders are real channels over logs in memory, one at each of three nodes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.admin import messages
from nsqha.admin.fan_out import FanOut
from nsqha.admin.topic_request import for_leader
from nsqha.errors import NotFound, OutcomeUnknown, Unavailable
from nsqha.ids import OFFSET_MAX, id_base
from nsqha.pb.v1 import admin_pb2 as pb
from nsqha.pb.v1 import segments_pb2
from tests.unit.admin.leaders_rig import UID, leaders_of, topic_of
from tests.unit.cursor.tiny import Leader

SALT = 7
DEFERRED = 4  # in each partition
KILL, FINISH, REQUEUE = pb.MESSAGE_ACTION_KILL, pb.MESSAGE_ACTION_FINISH, pb.MESSAGE_ACTION_REQUEUE
UNPUBLISHED = "channel c has not got it yet"


def id_of(partition: int, offset: int) -> str:
    return f"{id_base(partition, SALT) + offset:016x}"


class Node:
    """A node that leads one partition of topic "t", with deferred messages in channel "c"."""

    def __init__(self, number: int) -> None:
        self.leader = Leader()
        self.channel = self.leader.create("c")
        self.leader.publish(DEFERRED, deliver_at=self.leader.clock.wall_ns() + 10**12)
        delivery = SimpleNamespace(channel=self.channel, forgotten=lambda owners: None)
        partition: Any = SimpleNamespace(
            number=number,
            id_base=id_base(number, SALT),
            serving=True,
            begins="",
            now=lambda: self.leader.now,
            deliveries=_Deliveries(c=delivery),
            commit_events=self._commit,
        )
        topic = topic_of([number], 3)
        topic.led[:] = [partition]
        topic.has_channel = lambda name: name == "c"
        self.commits = True
        self.broker: Any = SimpleNamespace(cluster=None, topics=SimpleNamespace(topic=lambda name: topic))
        self.requests: list[Any] = []

    async def _commit(self) -> None:
        self.leader.flush()
        if not self.commits:
            raise OutcomeUnknown("cut off")

    async def change(self, request: Any, leaders: Any, others: Any) -> Any:
        return await messages.change_messages(self.broker, request, FanOut(leaders, others, seconds=0.0))

    @property
    def deferred(self) -> list[int]:
        """What is still deferred, the dead among them."""
        return [ref.offset for ref in self.channel.cursor.deferred_overlay.items(0)]


class Others:
    """How they call each other."""

    def __init__(self, **nodes: Node) -> None:
        self.nodes = nodes

    async def call(self, address: str, rpc: str, request: Any, *, seconds: float) -> Any:
        if address not in self.nodes:
            raise Unavailable(f"{address} is not there")
        node = self.nodes[address]
        node.requests.append(request)
        return await node.change(request, None, None)


class _Deliveries(dict[str, Any]):
    def arm(self, mono: float) -> None:
        pass


class Nodes:
    """Node 1 leads partition 0, node 2 partition 1, node 3 partition 2; whoever asks asks node 1."""

    def __init__(self) -> None:
        self.nodes = [Node(number) for number in range(3)]
        self.others = Others(n2=self.nodes[1], n3=self.nodes[2])

    def change(self, *ids: str, action: Any = FINISH, **fields: Any) -> dict[int, Any]:
        request = pb.ChangeMessagesRequest(topic="t", channel="c", message_ids=ids, action=action, **fields)
        leaders = leaders_of({0: 1, 1: 2, 2: 3})
        response = asyncio.run(self.nodes[0].change(request, leaders, self.others))
        return {answer.partition: answer for answer in response.partitions}


def test_each_leader_gets_its_own_ids() -> None:
    nodes = Nodes()
    ids = [id_of(partition, offset) for offset in (0, 2) for partition in range(3)]
    answers = nodes.change(*ids)
    for number, answer in answers.items():
        assert (answer.changed, list(answer.failed), answer.error) == (2, [], "")
        assert list(answer.done) == [id_of(number, 0), id_of(number, 2)]
    assert [node.deferred for node in nodes.nodes] == [[1, 3]] * 3
    for number in (1, 2):
        (asked,) = nodes.nodes[number].requests
        assert list(asked.message_ids) == [id_of(number, 0), id_of(number, 2)]
        assert list(asked.here.partitions) == [number]


@pytest.mark.parametrize("action", [FINISH, REQUEUE, KILL, pb.MESSAGE_ACTION_DEFER])
@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (1, 2), (2, 0, 1), (2,)])
def test_every_action_in_any_order_of_partitions(action: Any, numbers: tuple[int, ...]) -> None:
    nodes = Nodes()
    due = {"due_ns": 2**61} if action == pb.MESSAGE_ACTION_DEFER else {}
    answers = nodes.change(*[id_of(n, 1) for n in numbers], action=action, **due)
    assert {n: list(answer.done) for n, answer in answers.items()} == {n: [id_of(n, 1)] for n in numbers}


def test_the_answer_says_of_each_what_became_of_it() -> None:
    nodes = Nodes()
    nodes.change(id_of(2, 0))
    answers = nodes.change(id_of(0, 1), id_of(0, 9), id_of(2, 0), id_of(2, 1))
    assert list(answers[0].done) == [id_of(0, 1)]
    assert [(one.message_id, one.error) for one in answers[0].failed] == [(id_of(0, 9), UNPUBLISHED)]
    assert list(answers[2].done) == [id_of(2, 1)]
    assert [one.message_id for one in answers[2].failed] == [id_of(2, 0)]
    assert "finished already" in answers[2].failed[0].error
    assert 1 not in answers


def test_of_a_leader_that_gives_no_answer_each_id_is_named() -> None:
    nodes = Nodes()
    del nodes.others.nodes["n3"]
    nodes.nodes[1].commits = False
    answers = nodes.change(id_of(0, 1), id_of(1, 1), id_of(2, 0), id_of(2, 1))
    assert list(answers[0].done) == [id_of(0, 1)]
    assert not answers[1].done
    assert [one.message_id for one in answers[1].failed] == [id_of(1, 1)]
    assert "not known to be committed" in answers[1].failed[0].error
    assert [(one.message_id, one.error) for one in answers[2].failed] == [
        (id_of(2, 0), "n3 is not there"),
        (id_of(2, 1), "n3 is not there"),
    ]


def test_an_id_that_is_given_twice_is_one_message() -> None:
    nodes = Nodes()
    (answer,) = nodes.change(id_of(1, 0), id_of(1, 0)).values()
    assert (answer.changed, list(answer.done), list(answer.failed)) == (1, [id_of(1, 0)], [])


@pytest.mark.parametrize(("wrong", "error"), [(id_of(3, 0), NotFound), ("x", ValueError)])
def test_with_an_id_of_no_partition_nothing_is_done(wrong: str, error: type[Exception]) -> None:
    nodes = Nodes()
    with pytest.raises(error):
        nodes.change(id_of(0, 0), id_of(1, 0), wrong)
    assert [node.deferred for node in nodes.nodes] == [[0, 1, 2, 3]] * 3


def test_ids_of_another_partition_than_the_one_named_are_refused() -> None:
    nodes = Nodes()
    with pytest.raises(NotFound, match="is one of partition 1, which is not meant"):
        nodes.change(id_of(0, 0), id_of(1, 0), partition=0)
    assert nodes.nodes[0].deferred == [0, 1, 2, 3]


@pytest.mark.parametrize("fields", [{"older_than_ms": 5}, {"reason": pb.DEATH_REASON_EXPIRED}, {"after": [{}]}])
def test_what_narrows_a_selection_is_not_ignored_beside_ids(fields: dict[str, Any]) -> None:
    nodes = Nodes()
    with pytest.raises(ValueError, match="not both"):
        nodes.change(id_of(0, 0), **fields)
    assert nodes.nodes[0].deferred == [0, 1, 2, 3]


def test_a_node_of_an_older_version_sends_the_ids_of_all() -> None:
    nodes = Nodes()
    request = pb.ChangeMessagesRequest(topic="t", channel="c", action=FINISH)
    request.message_ids.extend([id_of(0, 0), id_of(1, 0), id_of(2, 0)])
    request.here.topic_uid = UID
    request.here.partitions.append(1)
    (answer,) = asyncio.run(nodes.nodes[1].change(request, None, nodes.others)).partitions
    assert (answer.partition, answer.changed, answer.error) == (1, 1, "")


def test_a_page_ends_where_so_many_of_a_narrowed_selection_are_found() -> None:
    nodes = Nodes()
    node = nodes.nodes[0]
    nodes.change(id_of(0, 0), id_of(0, 1), id_of(0, 3), action=KILL)
    request = pb.ChangeMessagesRequest(topic="t", channel="c", action=FINISH, partition=0, limit=2)
    request.state, request.reason = pb.MESSAGE_STATE_DEAD, pb.DEATH_REASON_OPERATOR
    (answer,) = asyncio.run(node.change(request, leaders_of({0: 1}), nodes.others)).partitions
    assert (answer.changed, node.deferred, answer.HasField("next")) == (2, [2, 3], True)
    request.after.append(answer.next)
    (answer,) = asyncio.run(node.change(request, leaders_of({0: 1}), nodes.others)).partitions
    assert (answer.changed, node.deferred, answer.HasField("next")) == (1, [2], False)


def test_a_reader_commits_at_each_leader_what_it_leads() -> None:
    request = segments_pb2.CommitReaderRequest(topic="t", channel="c", offsets={0: 1, 1: 0, 2: OFFSET_MAX})
    asked = for_leader(topic_of([], 3), request, [1, 2])
    assert dict(asked.offsets) == {1: 0, 2: OFFSET_MAX}
    assert dict(request.offsets) == {0: 1, 1: 0, 2: OFFSET_MAX}


def test_places_of_pages_go_to_their_leaders() -> None:
    request = pb.ListMessagesRequest(topic="t", after=[pb.MessagePlace(partition=n, offset=n) for n in range(3)])
    assert [place.partition for place in for_leader(topic_of([], 3), request, [0, 2]).after] == [0, 2]
