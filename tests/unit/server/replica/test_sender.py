"""What a leader sends to a follower, when, and how much; and what it makes of the answers."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import patch

import pytest

from nsqha.commitlog import copying
from nsqha.commitlog.copying import batches
from nsqha.commitlog.entry import BatchCorrupt, Place
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.replica.leading import sender as push
from nsqha.server.replica.leading.sender import FollowerProgress, FollowerStreams
from tests.fakes.loop import VirtualLoop
from tests.fakes.peers import FakePeers, FakeStream
from tests.unit.commitlog.logs import drop_pairs, roll
from tests.unit.server.replica_rig import add, copy_of, log_of

NODE = 7
HELLO = pb.PushHello(cluster_id=1, node_uid=2, target_uid=NODE)


class Partition:
    def __init__(self) -> None:
        self.damage: list[tuple[int, int]] = []

    def on_damage(self, first: int, end: int) -> None:
        self.damage.append((first, end))


class Leader:
    """A leadership that remembers what it heard."""

    def __init__(self, log: PartitionLog, *, uid: int = 1, epoch: int = 1) -> None:
        self.log = log
        self.epoch = epoch
        self.key = (uid, 0)
        self.topic = f"t{uid}"
        self.epoch_start = log.end.log_id
        self.wire_key = pb.PartitionKey(topic_uid=uid, partition=0)
        self.committed = 0
        self.waited_end = log.end.log_id
        self.piece: Any = None
        self.partition: Any = Partition()
        self.said: list[Any] = []
        self.fit: list[bool] = []

    def heard(
        self, node: int, *, registration: int, log_uid: int, end: int, durable: int, fit: bool, opened: bool
    ) -> None:
        self.said.append(("opened" if opened else "ack", registration, log_uid, end, durable))
        self.fit.append(fit)

    def lost(self, node: int) -> None:
        self.said.append("lost")

    def fenced(self, node: int, promised: int) -> None:
        self.said.append(("fenced", promised))


class FollowerStreamsRig:
    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.peers = FakePeers(self.loop)
        self.links = FollowerStreams(cast(Any, self.loop), cast(Any, self.peers), HELLO)
        self.link = self.links._link(NODE, "there")

    def turn(self) -> None:
        self.loop.turn()
        for stream in self.peers.streams:
            stream.room()

    def pass_time(self, seconds: float) -> None:
        self.turn()
        self.loop.pass_time(seconds)
        self.turn()

    @property
    def stream(self) -> FakeStream:
        return self.peers.streams[-1]

    def hello(self, registration: int = 5) -> None:
        self.link.on_message(pb.PushReply(hello=pb.PushHello(node_uid=NODE, registration=registration)))
        self.turn()

    def opened(self, leader: Leader, end: int, *, behind: bool = False, chain: int | None = None) -> None:
        reply = pb.PushReply()
        if chain is None:
            chain = leader.log.entry_before(end).chain
        reply.opened.add(
            key=leader.wire_key, epoch=leader.epoch, log_uid=9, end=end, durable=end, chain=chain, behind=behind
        )
        self.link.on_message(reply)
        self.turn()

    def acked(self, leader: Leader, end: int, *, epoch: int | None = None) -> None:
        reply = pb.PushReply()
        reply.acks.add(topic_uid=leader.key[0], epoch=epoch or leader.epoch, log_uid=9, end=end, durable=end)
        self.link.on_message(reply)
        self.turn()

    def refused(self, leader: Leader, refusal: Any, promised: int = 0) -> None:
        reply = pb.PushReply()
        reply.refused.add(key=leader.wire_key, epoch=leader.epoch, refusal=refusal, promised=promised)
        self.link.on_message(reply)
        self.turn()

    def ended(self) -> None:
        self.link.on_closed("gone")
        self.turn()

    def sent_ids(self, stream: FakeStream | None = None, leader: Leader | None = None) -> list[int]:
        """Log ids that were pushed, in order."""
        found = []
        for message in (stream or self.stream).sent:
            for append in message.appends:
                if leader is None or append.topic_uid == leader.key[0]:
                    found += [entry.log_id for entry, _, _ in batches(append.entries, append.data)]
        return found

    def pushing(self, leader: Leader, end: int | None = None) -> Any:
        """A follower that has everything below `end`."""
        pushed = self.link.add(leader)
        if not self.stream.sent or not self.link.registration:
            self.hello()
        self.opened(leader, end or leader.log.end.log_id)
        return pushed


def test_it_says_hello_then_asks_then_pushes_from_where_the_follower_is() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of(1, 1, 1))
    rig.link.add(leader)
    assert rig.stream.sent[0].hello == HELLO and len(rig.stream.sent) == 1
    rig.hello()
    asked = rig.stream.sent[1].opens[0]
    assert (asked.epoch, asked.start, asked.first) == (1, 4, 1)
    assert asked.chain == leader.log.entry_before(4).chain
    rig.opened(leader, 2)
    assert rig.sent_ids() == [2, 3]
    assert leader.said == [("opened", 5, 9, 2, 2)]


def test_the_first_batch_leaves_at_once_and_what_comes_behind_it_together() -> None:
    rig = FollowerStreamsRig()
    leaders = [Leader(log_of(), uid=uid) for uid in (1, 2)]
    pushed = [rig.pushing(leader) for leader in leaders]
    before = len(rig.stream.sent)
    for one, leader in zip(pushed, leaders, strict=True):
        add(leader.log, 1, b"a")
        one.wake()
        add(leader.log, 1, b"b")
        one.wake()
    assert rig.sent_ids() == [1], "nothing is awaited from the follower, so it is not gathered for"
    rig.turn()
    assert len(rig.stream.sent) == before + 2
    assert rig.sent_ids(leader=leaders[0]) == rig.sent_ids(leader=leaders[1]) == [1, 2]
    add(leaders[0].log, 1, b"c")
    pushed[0].wake()
    assert len(rig.stream.sent) == before + 2, "the follower has not answered"
    rig.turn()
    rig.acked(leaders[0], 4)
    add(leaders[1].log, 1, b"c")
    pushed[1].wake()
    assert rig.sent_ids(leader=leaders[1]) == [1, 2, 3], "it has answered, whatever it was about"


def paced(rig: FollowerStreamsRig, leader: Leader, rests: list[float]) -> tuple[Any, list[int]]:
    """A follower that has nothing, and what its rests were asked for; they end with `rests`."""
    costs: list[int] = []

    def rest_after(cost: int) -> float:
        costs.append(cost)
        return rests.pop(0) if rests else 0.0

    pushed = rig.link.add(leader, rest_after)
    rig.hello()
    rig.opened(leader, 1)
    return pushed, costs


def test_who_is_far_behind_is_pushed_to_at_a_rate_and_nothing_hurries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "MESSAGE_BYTES", 40)  # a message has one batch
    rig, leader = FollowerStreamsRig(), Leader(log_of(1, 1, 1, 1))
    pushed, costs = paced(rig, leader, [2.0, 3.0])
    assert rig.sent_ids() == [1] and costs == [4096], "a small batch counts for more than it has"
    rig.acked(leader, 2)
    pushed.wake()
    rig.pass_time(1.9)
    assert rig.sent_ids() == [1]
    rig.pass_time(0.2)
    assert rig.sent_ids() == [1, 2]
    rig.pass_time(3.1)
    assert rig.sent_ids() == [1, 2, 3, 4] and len(costs) == 3, "who lacks no more than one message does not rest"


def test_a_rest_ends_where_the_log_grows_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "MESSAGE_BYTES", 40)  # a message has one batch
    rig, leader = FollowerStreamsRig(), Leader(log_of(1, 1, 1, 1))
    _, costs = paced(rig, leader, [2.0, 9.0, 9.0])
    add(leader.log, 1, b"y")
    rig.pass_time(2.1)
    assert rig.sent_ids() == [1, 2, 3] and len(costs) == 2, "once, as the log grew once: else it would never be near"


def test_a_stream_that_opens_again_has_no_rest_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "MESSAGE_BYTES", 40)  # a message has one batch
    rig, leader = FollowerStreamsRig(), Leader(log_of(1, 1, 1))
    pushed, _ = paced(rig, leader, [100.0])
    rig.opened(leader, 2)
    assert rig.sent_ids() == [1, 2, 3]
    pushed.stop()
    assert pushed.resting is None


def test_nothing_leaves_at_once_while_something_is_pending() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of())
    pushed = rig.pushing(leader)
    rig.stream.stuck = True
    for end in (2, 3):
        add(leader.log, 1, b"a")
        pushed.wake()
        rig.acked(leader, end)
        assert rig.stream.pending == 1, "more would wait there without a bound"
    rig.stream.stuck = False
    rig.turn()
    assert rig.sent_ids() == [1, 2]


def test_a_window_is_filled_and_goes_on_with_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "WINDOW_BYTES", 100)
    rig, leader = FollowerStreamsRig(), Leader(log_of())
    pushed = rig.pushing(leader)
    for _ in range(6):
        add(leader.log, 1, b"x" * 20)  # 54 bytes each
    pushed.wake()
    rig.turn()
    assert rig.sent_ids() == [1, 2]
    rig.acked(leader, 2)
    assert rig.sent_ids() == [1, 2, 3]
    rig.acked(leader, 4)
    assert rig.sent_ids() == [1, 2, 3, 4, 5]


def test_one_full_window_holds_up_no_other_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "WINDOW_BYTES", 100)
    rig = FollowerStreamsRig()
    slow, quick = Leader(log_of(), uid=1), Leader(log_of(), uid=2)
    first, second = rig.pushing(slow), rig.pushing(quick)
    for _ in range(6):
        add(slow.log, 1, b"x" * 20)
    first.wake()
    rig.turn()
    add(quick.log, 1, b"y")
    second.wake()
    rig.turn()
    assert rig.sent_ids(leader=quick) == [1]


def test_a_full_stream_is_given_one_message_and_then_all_the_rest() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of())
    pushed = rig.pushing(leader)
    rig.stream.stuck = True
    before = len(rig.stream.sent)
    for _ in range(3):
        add(leader.log, 1, b"x")
        pushed.wake()
        rig.turn()
    assert rig.sent_ids() == []
    rig.stream.stuck = False
    rig.turn()
    assert rig.sent_ids() == [1, 2, 3]
    assert len(rig.stream.sent) == before + 2
    assert not rig.loop.armed, "nothing is polled"


def test_more_than_one_message_takes_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "MESSAGE_BYTES", 100)
    rig = FollowerStreamsRig()
    leaders = [Leader(log_of(), uid=uid) for uid in (1, 2)]
    pushed = [rig.pushing(leader) for leader in leaders]
    before = len(rig.stream.sent)
    for one, leader in zip(pushed, leaders, strict=True):
        for _ in range(3):
            add(leader.log, 1, b"x" * 20)  # 54 bytes each
        one.wake()
    rig.turn()
    assert rig.sent_ids(leader=leaders[0]) == rig.sent_ids(leader=leaders[1]) == [1, 2, 3]
    assert all(sum(len(append.data) for append in message.appends) <= 108 for message in rig.stream.sent[before:])


def test_a_large_batch_shares_its_message_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest that clients may send just fits one: with another partition's batches before it the stream would end,
    and end again with each attempt."""
    monkeypatch.setattr(push, "MESSAGE_BYTES", 100)
    rig = FollowerStreamsRig()
    leaders = [Leader(log_of(), uid=uid) for uid in (1, 2)]
    pushed = [rig.pushing(leader) for leader in leaders]
    before = len(rig.stream.sent)
    for one, leader, size in zip(pushed, leaders, (20, 500), strict=True):
        add(leader.log, 1, b"x" * size)
        one.wake()
    rig.turn()
    assert rig.sent_ids(leader=leaders[0]) == rig.sent_ids(leader=leaders[1]) == [1]
    assert [len(message.appends) for message in rig.stream.sent[before:]] == [1, 1]


def test_followers_that_are_equally_far_share_one_message() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of())
    first = rig.pushing(leader)
    other = rig.links.add(cast(Any, leader), NODE + 1, "elsewhere")
    link = rig.links._link(NODE + 1, "elsewhere")
    link.on_message(pb.PushReply(hello=pb.PushHello(node_uid=NODE + 1, registration=6)))
    reply = pb.PushReply()
    reply.opened.add(key=leader.wire_key, epoch=1, log_uid=8, end=1, chain=leader.log.entry_before(1).chain)
    link.on_message(reply)
    rig.turn()
    reads = []
    original = copying.read_run

    def read_run(*given: Any, **more: Any) -> Any:
        reads.append(given)
        return original(*given, **more)

    with patch.object(copying, "read_run", read_run):
        add(leader.log, 1, b"x")
        for one in (first, other):
            one.wake()
        rig.turn()
        assert len(reads) == 1
        leader.committed = 2  # and is told with what comes
        add(leader.log, 1, b"y")
        first.wake()
        rig.turn()
        leader.committed = 3
        other.wake()
        rig.turn()
    assert len(reads) == 3
    sent = [[(a.entries, a.data, a.committed) for m in stream.sent for a in m.appends] for stream in rig.peers.streams]
    assert sent[0][0] == sent[1][0]
    assert [[committed for _, _, committed in appends] for appends in sent] == [[0, 2], [0, 3]]
    assert [rig.sent_ids(stream) for stream in rig.peers.streams] == [[1, 2], [1, 2]]


def test_what_is_shared_fits_the_window_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "WINDOW_BYTES", 120)
    rig, leader = FollowerStreamsRig(), Leader(log_of())
    pushed = rig.pushing(leader)
    for _ in range(2):
        add(leader.log, 1, b"x" * 20)  # 54 bytes each
    other = FollowerProgress(cast(Any, leader), rig.link)
    other.state, other.next = push.PushState.PUSHING, 1
    assert other.take(push.MESSAGE_BYTES) is leader.piece and leader.piece.end == 3
    piece = pushed.take(60)
    assert piece is not None and piece.end == 2


def test_after_a_lost_stream_it_asks_again_and_sends_from_the_end_it_is_told() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of())
    pushed = rig.pushing(leader)
    for _ in range(3):
        add(leader.log, 1, b"x")
    pushed.wake()
    rig.turn()
    assert rig.sent_ids() == [1, 2, 3]
    rig.ended()
    assert leader.said[-1] == "lost"
    rig.acked(leader, 4)
    assert leader.said[-1] == "lost", "an answer of a stream that is over"
    rig.pass_time(push.RETRY_SECONDS)
    assert len(rig.peers.streams) == 2
    rig.hello(6)
    rig.opened(leader, 2)
    assert rig.sent_ids() == [2, 3]
    assert leader.said[-1] == ("opened", 6, 9, 2, 2)


def test_there_is_never_a_second_stream_beside_the_first() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of())
    rig.pushing(leader)
    rig.ended()
    rig.link.add(Leader(log_of(), uid=2))
    assert len(rig.peers.streams) == 2
    rig.pass_time(10)
    assert len(rig.peers.streams) == 2


def test_an_answer_of_another_epoch_counts_for_nothing() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of(1))
    rig.pushing(leader)
    before = list(leader.said)
    rig.acked(leader, 2, epoch=2)
    assert leader.said == before


def test_a_follower_that_is_behind_is_sent_nothing_until_it_is_near() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of(1, 1))
    pushed = rig.link.add(leader)
    rig.hello()
    rig.opened(leader, 2, behind=True)
    pushed.wake()
    rig.turn()
    rig.acked(leader, 3)
    assert rig.sent_ids() == [] and leader.said == [("opened", 5, 9, 0, 0)]
    rig.opened(leader, 2)
    assert rig.sent_ids() == [2]


def test_a_follower_whose_past_is_another_counts_for_nothing_and_is_asked_again() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of(1, 1))
    rig.link.add(leader)
    rig.hello()
    rig.opened(leader, 2, chain=12345)
    assert leader.said == [("opened", 5, 9, 0, 0)] and rig.sent_ids() == []
    rig.pass_time(0.1)
    assert sum(len(message.opens) for message in rig.stream.sent) == 2


def test_a_follower_that_can_not_write_is_asked_less_often_until_it_can() -> None:
    """It opens the stream each time: that it answers is no success."""
    rig, leader = FollowerStreamsRig(), Leader(log_of(1))
    pushed = rig.pushing(leader)
    for _ in range(12):
        rig.refused(leader, pb.REFUSAL_NO_SPACE)
        rig.pass_time(2.0)
        rig.opened(leader, end=1)
    assert pushed.next_retry() == push.RETRY_SECONDS_MAX
    rig.acked(leader, end=1)
    assert pushed.next_retry() == push.RETRY_SECONDS


def test_a_silent_log_tells_its_committed_point_alone_and_once() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of())
    pushed = rig.pushing(leader)
    add(leader.log, 1, b"x")
    pushed.wake()
    rig.turn()
    leader.committed = 2
    rig.links.committed(cast(Any, leader))
    rig.links.committed(cast(Any, leader))
    rig.pass_time(1)
    told = [c.committed for message in rig.stream.sent for c in message.committed]
    assert told == [2]


def test_a_stream_that_takes_nothing_is_told_once_what_is_committed_by_then() -> None:
    """Others commit without a follower that hangs: what it is to be told must not pile up here."""
    rig = FollowerStreamsRig()
    leaders = [Leader(log_of(1, 1, 1, 1), uid=uid) for uid in (1, 2)]
    for leader in leaders:
        rig.pushing(leader)
    rig.stream.stuck = True
    rig.stream.sent.clear()
    for committed in (2, 3, 4):
        for leader in leaders:
            leader.committed = committed
            rig.links.committed(cast(Any, leader))
        rig.pass_time(push.COMMITTED_SECONDS)
    assert not rig.stream.sent
    rig.stream.stuck = False
    rig.turn()
    (message,) = rig.stream.sent
    assert [(told.topic_uid, told.committed) for told in message.committed] == [(1, 4), (2, 4)]


def test_an_append_tells_it_and_then_it_is_not_told_alone() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of())
    pushed = rig.pushing(leader)
    leader.committed = 1
    rig.links.committed(cast(Any, leader))
    add(leader.log, 1, b"x")
    pushed.wake()
    rig.pass_time(1)
    assert [a.committed for m in rig.stream.sent for a in m.appends] == [1]
    assert not [c for m in rig.stream.sent for c in m.committed]


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (pb.REFUSAL_FENCED, [("fenced", 4)]),
        (pb.REFUSAL_NO_SPACE, ["lost"]),
        (pb.REFUSAL_FAILED, ["lost"]),
        (pb.REFUSAL_UNKNOWN, []),
        (pb.REFUSAL_MISMATCH, []),
    ],
)
def test_a_refusal_is_told_and_tried_again(refusal: Any, said: list[Any]) -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of(1))
    pushed = rig.pushing(leader)
    leader.said.clear()
    rig.refused(leader, refusal, promised=4)
    assert leader.said == said
    add(leader.log, 1, b"x")
    pushed.wake()
    rig.turn()
    assert rig.sent_ids() == []
    rig.pass_time(0.1)
    assert sum(len(message.opens) for message in rig.stream.sent) == 2


def test_a_follower_that_retention_left_behind_is_asked_again_and_others_go_on() -> None:
    rig = FollowerStreamsRig()
    left, other = Leader(log_of(limits=LogLimits(segment_bytes=100)), uid=1), Leader(log_of(), uid=2)
    first, second = rig.pushing(left), rig.pushing(other)
    for _ in range(3):
        add(left.log, 1, b"x")
        roll(left.log)
    drop_pairs(left.log, left.log.pairs[1].end)
    assert left.log.start.log_id == 3
    add(left.log, 1, b"y")
    add(other.log, 1, b"z")
    first.wake()
    second.wake()
    rig.turn()
    assert rig.sent_ids(leader=other) == [1] and rig.sent_ids(leader=left) == []
    rig.pass_time(0.1)
    assert rig.stream.sent[-1].opens[0].first == 3


def test_an_entry_of_ours_that_can_not_be_read_ends_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = FollowerStreamsRig()
    bad, good = Leader(log_of(1), uid=1), Leader(log_of(), uid=2)
    rig.pushing(good)
    rig.link.add(bad)

    def corrupt(log_id: int) -> Any:
        raise BatchCorrupt(Place(1, 0, 0), Place(2, 1, 36), "an entry does not verify")

    monkeypatch.setattr(bad.log, "entry_before", corrupt)
    rig.opened(bad, 2, chain=1)
    assert bad.said == ["lost"] and bad.partition.damage == [(1, 2)], "somebody may have it"
    rig.acked(good, 1)
    assert good.said[-1][0] == "ack"
    rig.pass_time(1.5)  # asking fails too, and is tried again
    monkeypatch.undo()
    rig.pass_time(1.5)
    rig.opened(bad, 2)
    assert bad.said[-1] == ("opened", 5, 9, 2, 2)


def test_a_partition_that_is_not_led_any_more_is_pushed_no_more() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of())
    pushed = rig.pushing(leader)
    for _ in range(2):
        add(leader.log, 1, b"x")
        pushed.wake()
    pushed.stop()
    rig.pass_time(1)
    rig.acked(leader, 2)
    assert rig.sent_ids() == [1] and all(said[0] != "ack" for said in leader.said)


def test_a_copy_that_is_a_beginning_of_ours_is_near() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of(1, 1, 2, 2))
    rig.link.add(leader)
    rig.hello()
    copy = copy_of(leader.log, 4)
    rig.opened(leader, 4, chain=copy.entry_before(4).chain)
    assert rig.sent_ids() == [4]


def test_a_stream_is_there_before_a_partition_is_pushed() -> None:
    rig = FollowerStreamsRig()
    links = FollowerStreams(cast(Any, rig.loop), cast(Any, rig.peers), HELLO)
    links.prepare(NODE, "there")
    links.prepare(NODE, "there")
    (stream,) = rig.peers.streams
    stream.handler.on_message(pb.PushReply(hello=pb.PushHello(node_uid=NODE, registration=5)))
    assert [message.hello.target_uid for message in stream.sent] == [NODE]
    for uid in (1, 2, 3):
        links.add(Leader(log_of(1), uid=uid), NODE, "there")
    stream.room()
    assert len(rig.peers.streams) == 1 and len(stream.sent) == 2
    assert [opened.key.topic_uid for opened in stream.sent[-1].opens] == [1, 2, 3], "those of one turn go together"


def test_a_leader_that_ended_before_its_question_left_asks_nothing() -> None:
    rig = FollowerStreamsRig()
    links = FollowerStreams(cast(Any, rig.loop), cast(Any, rig.peers), HELLO)
    links.prepare(NODE, "there")
    (stream,) = rig.peers.streams
    stream.handler.on_message(pb.PushReply(hello=pb.PushHello(node_uid=NODE, registration=5)))
    links.add(Leader(log_of(1)), NODE, "there").stop()
    stream.room()
    assert len(stream.sent) == 1


def test_a_leader_hears_once_that_a_node_is_gone_however_often_it_is_dialled() -> None:
    rig = FollowerStreamsRig()
    leader = Leader(log_of(1))
    link = rig.links.add(leader, NODE, "there").link
    for _ in range(3):
        link.on_closed("nobody listens")
        link.connect()
    assert leader.said == ["lost"]
    rig.peers.streams[-1].handler.on_message(pb.PushReply(hello=pb.PushHello(node_uid=NODE, registration=5)))
    link.on_closed("gone again")
    assert leader.said == ["lost", "lost"]


def test_a_stream_that_nobody_uses_is_not_opened_again_before_it_is_asked_for() -> None:
    rig = FollowerStreamsRig()
    links = FollowerStreams(cast(Any, rig.loop), cast(Any, rig.peers), HELLO)
    links.prepare(NODE, "there")
    rig.stream.handler.on_closed("gone")
    rig.pass_time(10)
    assert len(rig.peers.streams) == 1
    links.prepare(NODE, "there")
    assert len(rig.peers.streams) == 2


def test_the_leader_hears_who_could_lead() -> None:
    rig = FollowerStreamsRig()
    leader = Leader(log_of(1, 1))
    rig.link.add(leader)  # type: ignore[arg-type]
    rig.hello()
    opened = {"key": leader.wire_key, "epoch": 1, "log_uid": 9, "end": 2, "chain": leader.log.entry_before(2).chain}
    acked = {"topic_uid": leader.key[0], "epoch": 1, "log_uid": 9, "end": 3}
    for reply in (
        pb.PushReply(opened=[pb.Opened(**opened, behind=True)]),  # it catches up, perhaps as its log is damaged
        pb.PushReply(opened=[pb.Opened(**opened, unfit=True)]),
        pb.PushReply(opened=[pb.Opened(**opened)]),
        pb.PushReply(acks=[pb.Ack(**acked, unfit=True)]),
        pb.PushReply(acks=[pb.Ack(**acked)]),
    ):
        rig.link.on_message(reply)
    assert leader.fit == [False, False, True, False, True]


def test_how_long_acknowledgements_take_and_how_long_one_is_waited_for() -> None:
    rig, leader = FollowerStreamsRig(), Leader(log_of(1))
    pushed = rig.pushing(leader)
    assert rig.link.lag_seconds() == 0
    add(leader.log, 1, b"a")
    pushed.wake()
    rig.turn()
    rig.pass_time(2)
    assert rig.link.lag_seconds() == pytest.approx(2, abs=0.1)
    rig.acked(leader, leader.log.end.log_id)
    assert rig.link.lag_seconds() == 0
    data = rig.link.times.seconds.data()
    assert sum(data.counts) == 1 and data.sum == pytest.approx(2, abs=0.1)


# ---- the node registered anew


def test_a_stream_that_does_not_answer_once_its_node_registered_anew_is_opened_again() -> None:
    """The host lost its power, and pings have not told yet."""
    rig = FollowerStreamsRig()
    leader = Leader(log_of(1, 1))
    rig.links.registered(NODE, "there", 5)
    rig.pushing(leader)
    silent = rig.stream
    rig.links.registered(NODE, "elsewhere", 6)
    assert silent.pings == 1 and not silent.closed
    rig.pass_time(push.ANSWER_SECONDS + 1.0)
    assert silent.closed and leader.said[-1] == "lost"
    assert rig.stream is not silent and len(rig.peers.streams) == 2
    rig.hello(6)
    assert len(rig.stream.sent[-1].opens) == 1


def test_one_that_answers_is_of_the_process_that_registered() -> None:
    rig = FollowerStreamsRig()
    rig.links.registered(NODE, "there", 5)
    rig.pushing(Leader(log_of(1)))
    rig.links.registered(NODE, "there", 6)
    rig.stream.heard = rig.loop.time()  # its hello may take longer: it has to hear first that it is registered
    rig.pass_time(10)
    assert len(rig.peers.streams) == 1 and not rig.stream.closed


def test_a_node_whose_registration_is_known_is_not_asked() -> None:
    rig = FollowerStreamsRig()
    rig.links.registered(NODE, "there", 5)
    rig.pushing(Leader(log_of(1)))
    rig.links.registered(NODE, "there", 5)
    rig.hello(6)  # before the watch brings it
    rig.links.registered(NODE, "there", 6)
    rig.pass_time(10)
    assert rig.stream.pings == 0 and len(rig.peers.streams) == 1


def test_a_stream_that_ends_by_itself_meanwhile_is_opened_once() -> None:
    rig = FollowerStreamsRig()
    rig.links.registered(NODE, "there", 5)
    rig.pushing(Leader(log_of(1)))
    rig.links.registered(NODE, "there", 6)
    rig.ended()
    rig.pass_time(10)
    assert len(rig.peers.streams) == 2 and not rig.stream.closed


def test_a_stream_for_who_may_lead_next_is_there_again_as_well() -> None:
    rig = FollowerStreamsRig()
    rig.links.registered(NODE, "there", 5)
    rig.links.prepare(NODE, "there")
    rig.hello(5)
    rig.links.registered(NODE, "there", 6)
    rig.pass_time(10)
    assert len(rig.peers.streams) == 2 and not rig.stream.closed
    rig.link.on_closed("gone")
    rig.pass_time(10)
    assert len(rig.peers.streams) == 2, "that is no news of the node"
