"""A snapshot of the whole cluster: each leader is asked once, what nobody answers for says why; who renews holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.admin import segments
from nsqha.admin.segments import SegmentsService
from nsqha.cursor.committed.holds import Holds, LiveHold
from nsqha.errors import LimitReached, OutcomeUnknown
from nsqha.pb.v1 import segments_pb2 as pb
from nsqha.server.segments.log_source import reachable
from nsqha.server.segments.renewals import GUESSES_MAX, LIST_SECONDS, LOOK_SECONDS, HoldRenewals
from tests.fakes.partitions import FakeLeaders
from tests.unit.admin.leaders_rig import UID, FakeOthers, info, leaders_of, topic_of


class Refused(Exception):
    """What a context was told."""


class Context:
    async def abort(self, code: Any, text: str, trailing_metadata: Any = ()) -> None:
        raise Refused(f"{code.name}: {text}")


def pinned(*numbers: int, end: int = 7, uid: int = UID) -> Callable[[str, Any], Any]:
    """A node that leads these partitions."""

    def answer(rpc: str, request: Any) -> Any:
        response = pb.SnapshotResponse()
        for number in numbers:
            pin = response.partitions.add(topic="t", topic_uid=uid, partition=number)
            pin.end.offset = end
        return response

    return answer


def snapshot(
    others: FakeOthers, leaders: dict[int, int] | FakeLeaders, partitions: int = 3, **fields: Any
) -> dict[int, Any]:
    """What node 1, which leads nothing, answers."""
    topic = topic_of([], partitions)
    cluster: Any = leaders_of(leaders) if isinstance(leaders, dict) else leaders
    cluster.leaders = cluster
    cluster.nodes = lambda: {n: info(n) for n in (1, 2, 3)}

    async def story() -> Any:
        topics: Any = SimpleNamespace(topic=lambda name: topic)
        clock = SimpleNamespace(wall_ns=lambda: 1)
        journal = SimpleNamespace(identity=SimpleNamespace(cluster_id=0xC1, node_uid=1))
        loop = asyncio.get_running_loop()
        broker: Any = SimpleNamespace(
            topics=topics,
            cluster=cluster,
            clock=clock,
            parts=SimpleNamespace(loop=loop, journal=journal),
            log_source=None,
        )
        service = SegmentsService(broker, others)
        try:
            return await service.Snapshot(pb.SnapshotRequest(topics=["t"], **fields), Context())
        finally:
            service.close()

    reply = asyncio.run(story())
    assert reply.cluster_id == "00000000000000c1"
    return {pin.partition: pin for pin in reply.partitions}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LEADER_SECONDS", 0.1)
    monkeypatch.setattr(segments, "AGAIN_SECONDS", 0.005)


def test_each_leader_is_asked_once_for_all_that_it_leads() -> None:
    others = FakeOthers(n2=pinned(0, 2), n3=pinned(1))
    assert {n: pin.end.offset for n, pin in snapshot(others, {0: 2, 1: 3, 2: 2}).items()} == {0: 7, 1: 7, 2: 7}
    assert sorted((address, rpc) for address, rpc, _ in others.calls) == [("n2", "Snapshot"), ("n3", "Snapshot")]


def test_a_partition_that_nobody_answers_for_says_why_and_keeps_no_other_back() -> None:
    found = snapshot(FakeOthers(n2=pinned(0)), {0: 2, 1: 3})
    assert found[0].end.offset == 7
    assert not found[0].error
    assert "n3 is not there" in found[1].error
    assert "no node leads it" in found[2].error
    assert found[1].topic_uid == UID


def test_a_leader_that_comes_late_is_waited_for() -> None:
    answers = iter([pb.SnapshotResponse(), pinned(0)("", None)])
    others = FakeOthers(n2=lambda rpc, request: next(answers))
    assert snapshot(others, {0: 2}, partitions=1)[0].end.offset == 7


@pytest.mark.parametrize(("successor", "answered"), [(3, True), (2, False)])
def test_who_leads_since_a_leader_froze_is_asked_once_however_late_it_is(
    monkeypatch: pytest.MonkeyPatch, successor: int, answered: bool
) -> None:
    monkeypatch.setattr(segments, "LEADER_SECONDS", 0.0)
    leaders = leaders_of({0: 2})

    def frozen(rpc: str, request: Any) -> Any:
        leaders.appoint("t", 0, successor)
        raise OutcomeUnknown("n2 did not answer")

    others = FakeOthers(n2=frozen, n3=pinned(0))
    [found] = snapshot(others, leaders, partitions=1).values()
    assert [address for address, *_ in others.calls] == ["n2", "n3"][: 1 + answered]
    assert found.error == ("" if answered else "n2 did not answer")


def test_leaders_that_change_for_ever_are_not_followed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LEADER_SECONDS", 0.0)
    leaders = leaders_of({0: 2})

    def frozen(rpc: str, request: Any) -> Any:
        known = leaders.leader("t", 0)
        assert known is not None
        leaders.appoint("t", 0, 5 - known.node)
        raise OutcomeUnknown("silence")

    others = FakeOthers(n2=frozen, n3=frozen)
    assert snapshot(others, leaders, partitions=1)[0].error == "silence"
    assert [address for address, *_ in others.calls] == ["n2", "n3"]


def test_what_is_too_much_for_one_node_is_too_much() -> None:
    def refuses(rpc: str, request: Any) -> Any:
        raise LimitReached("more than 9 borders")

    others = FakeOthers(n2=refuses)
    with pytest.raises(Refused, match="RESOURCE_EXHAUSTED: more than 9 borders"):
        snapshot(others, {0: 2}, partitions=1)
    assert len(others.calls) == 1


def test_another_life_of_the_topic_is_no_answer() -> None:
    found = snapshot(FakeOthers(n2=pinned(0, uid=UID + 1)), {0: 2}, partitions=1)
    assert "does not lead it" in found[0].error


def test_with_ranges_only_their_partitions_are_asked_for() -> None:
    seen: list[Any] = []

    def answer(rpc: str, request: Any) -> Any:
        seen.append(request)
        return pinned(1)(rpc, request)

    asked = [pb.OffsetRange(topic="t", partition=1, first=3, end=5)]
    assert list(snapshot(FakeOthers(n2=answer), {0: 2, 1: 2}, ranges=asked)) == [1]
    assert [one.first for one in seen[0].ranges] == [3]
    assert not seen[0].pattern


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hold_ms": 7 * 3_600_000}, "hold_ms is 25200000; it can be at most"),
        ({"hold_id": "abc", "hold_ms": 1}, "not the id of a hold"),
        ({"timestamps_ns": range(17)}, "17 timestamps; at most 16"),
        ({"ranges": [pb.OffsetRange(topic="t", partition=1, first=3, end=2)]}, "[3, 2) of t/1 is reversed"),
        ({"ranges": [pb.OffsetRange(topic="t", partition=9, first=3, end=4)]}, "no partition 9 of topic t"),
        ({"pattern": "x"}, "one of the two"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anybody_is_asked(fields: dict[str, Any], text: str) -> None:
    others = FakeOthers()
    with pytest.raises(Refused) as caught:
        snapshot(others, {0: 2}, **fields)
    assert text in str(caught.value)
    assert not others.calls


# ---- holds


class Held:
    """The logs of a node that leads partitions with some holds, and a loop whose time stands still."""

    def __init__(self, *holds: int) -> None:
        self.now = 100.0
        self.spawned: list[Awaitable[None]] = []
        held = {hold: LiveHold(0, 1, 0) for hold in holds}
        cursors = SimpleNamespace(state=SimpleNamespace(holds=Holds(held)))
        self.partitions = [SimpleNamespace(cursors=cursors)]
        self.followers: list[Any] = []
        self.loop = SimpleNamespace(time=lambda: self.now)

    def spawn(self, work: Any) -> None:
        work.close()
        self.spawned.append(work)

    def led(self) -> Any:
        return self.partitions

    def followed(self) -> Any:
        return [follower.state for follower in self.followers]


async def nobody(hold: int) -> None:
    raise AssertionError


def test_a_hold_is_looked_at_once_in_a_while_however_often_it_is_named() -> None:
    source: Any = Held(0xAB)
    renewals = HoldRenewals(source, nobody)
    for _ in range(5):
        renewals.read(0xAB)
    assert len(source.spawned) == 1
    source.now += LOOK_SECONDS
    renewals.read(0xAB)
    assert len(source.spawned) == 2


def test_nobody_is_asked_about_a_hold_that_a_reader_made_up() -> None:
    source: Any = Held(0xAB)
    renewals = HoldRenewals(source, nobody)
    for n in range(1, 20):
        renewals.read(n)
    assert not source.spawned


def test_made_up_holds_are_not_looked_for_one_by_one() -> None:
    source: Any = Held(0xAB)
    renewals, looks = HoldRenewals(source, nobody), []
    held = source.partitions[0].cursors.state.holds

    class Watched(Holds):
        def ids(self) -> Any:
            looks.append(self)
            return held.ids()

        def get(self, id_: int) -> Any:
            raise AssertionError("each partition is asked for each of them")

    source.partitions[0].cursors.state.holds = Watched()
    for n in range(0x1000, 0x1400):
        renewals.read(n)
    renewals.read(0xAB)
    assert (len(looks), len(source.spawned)) == (1, 1)
    held.put(0xCD, LiveHold(0, 1, 0))
    source.now += LIST_SECONDS
    renewals.read(0xCD)
    assert (len(looks), len(source.spawned)) == (2, 2)


def test_a_hold_may_be_in_a_log_whose_state_has_not_come_yet() -> None:
    source: Any = Held()
    followed = SimpleNamespace(state=None)
    source.followers = [followed]
    renewals = HoldRenewals(source, nobody)
    for _ in range(3):
        renewals.read(0xAB)
    assert len(source.spawned) == 1
    for n in range(0x1000, 0x1400):
        renewals.read(n)
    assert len(source.spawned) == GUESSES_MAX, "any of them may be made up"
    followed.state = SimpleNamespace(holds=Holds())
    source.now += LOOK_SECONDS
    renewals.read(0xAB)
    assert len(source.spawned) == GUESSES_MAX


def test_an_address_on_all_interfaces_is_dialled_by_the_nodes_name() -> None:
    assert reachable("0.0.0.0:4154", "broker-1") == "broker-1:4154"
    assert reachable("[::]:4154", "broker-1") == "broker-1:4154"
    assert reachable("127.0.0.1:4154", "broker-1") == "127.0.0.1:4154"
    assert reachable("", "broker-1") == ""
