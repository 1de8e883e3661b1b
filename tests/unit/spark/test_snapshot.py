"""The client of the segment service: brokers in turn, one line when none can, and nothing believed that cannot be."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from nsqha.admin import segments as service
from nsqha.pb.v1 import segments_pb2 as pb
from nsqha.pb.v1 import segments_pb2_grpc
from pyspark_nsqha import snapshot
from pyspark_nsqha.model import CutPoint, NoBroker, NotThere, PartitionLife, ReadFailed, ReplicaAddress
from pyspark_nsqha.options import ConnectOptions, Tls, TopicSelection
from pyspark_nsqha.snapshot import Segments, SnapshotRequest, checked, of_subscription
from tests.certificates import Certificates

ASKED = SnapshotRequest(topics=("orders",))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PAUSE_S", 0.0)


def partition(number: int = 0, *, topic: str = "orders", start: tuple[int, ...] = (0, 1, 0), **more: Any) -> Any:
    end = more.pop("end", (230, 31, 18_000))
    said = pb.PartitionSnapshot(topic=topic, topic_uid=77, partition=number, id_base=5 << 30, epoch=3, chain=9, **more)
    for field, cut in ((said.start, start), (said.end, end)):
        field.offset, field.log_id, field.position = cut
        field.timestamp_ns = 10**18
    return said


def answer(*partitions: Any, **more: Any) -> Any:
    return pb.SnapshotResponse(partitions=partitions, **more)


class Scripted(segments_pb2_grpc.SegmentsServicer):
    """Says what the test wrote down, call by call; the last of it again and again."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.requests: list[Any] = []

    def _next(self, request: Any, context: Any) -> Any:
        self.requests.append(type(request).FromString(request.SerializeToString()))
        step = self.script[0] if len(self.script) == 1 else self.script.pop(0)
        if isinstance(step, tuple):
            context.abort(*step)
        return step

    Snapshot = RenewHold = ReleaseHold = CommitReader = _next


@contextmanager
def serving(*script: Any, credentials: Any = None) -> Iterator[tuple[str, Scripted]]:
    scripted = Scripted(*script)
    with futures.ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, options=[("grpc.max_send_message_length", -1)])
        segments_pb2_grpc.add_SegmentsServicer_to_server(scripted, server)
        here = "127.0.0.1:0"
        port = server.add_secure_port(here, credentials) if credentials else server.add_insecure_port(here)
        server.start()
        try:
            yield f"127.0.0.1:{port}", scripted
        finally:
            server.stop(0).wait()


def segments(*brokers: str, retries: int = 2, timeout_ms: int = 5000) -> Segments:
    return Segments(ConnectOptions(brokers, None, timeout_ms, retries))


def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ReadFailed) as failed:
        call()
    assert "\n" not in str(failed.value)
    return str(failed.value)


def test_a_snapshot_is_plain_values() -> None:
    said = partition(replicas=[pb.SegmentReplica(address="h:1", host="rack", leader=True), pb.SegmentReplica(node=2)])
    said.offsets_for_times.extend([0, 17])
    said.channel_floor = 0
    asked = of_subscription(
        TopicSelection(topics=("orders",)), times_ns=(5, 6), channel="audit", hold_ms=9, hold_id="h0"
    )
    with serving(answer(said, hold_id="h1")) as (address, scripted):
        found = segments(address).snapshot(asked)
    [pin] = found.pins
    assert pin.identity == PartitionLife("orders", 77, 0, 5 << 30)
    assert (pin.start, pin.end) == (CutPoint(0, 1, 0, 10**18), CutPoint(230, 31, 18_000, 10**18))
    assert (pin.epoch, pin.chain, pin.replicas) == (3, 9, (ReplicaAddress("h:1", "rack", True),))
    assert (found.times, found.floors) == ({("orders", 0): {5: 0, 6: 17}}, {("orders", 0): 0})
    assert found.hold_id == "h1"
    [request] = scripted.requests
    assert (list(request.topics), list(request.timestamps_ns), request.channel) == (["orders"], [5, 6], "audit")
    assert (request.hold_ms, request.hold_id, request.cut_points) == (9, "h0", False)


def test_a_partial_snapshot_has_what_could_be_had_and_says_why_not_the_rest() -> None:
    away = pb.PartitionSnapshot(topic="orders", topic_uid=77, partition=1, error="no leader\nnow")
    with serving(answer(partition(), away, hold_id="h1", cluster_id="c1")) as (address, scripted):
        found = segments(address).snapshot(ASKED, partial=True)
        assert [pin.identity.partition for pin in found.pins] == [0]
        assert (found.failed, found.hold_id, found.cluster) == ({("orders", 1): "no leader now"}, "h1", "c1")
        assert len(scripted.requests) == 3, "it is waited for as long as retries last"
        assert "no snapshot of orders/1" in refusal(lambda: segments(address).snapshot(ASKED))
    with serving(answer(away), answer(away), answer(partition(), partition(1))) as (address, _):
        whole = segments(address).snapshot(ASKED, partial=True)
        assert (len(whole.pins), whole.failed) == (2, {})


def test_many_times_are_asked_for_in_parts_and_none_is_behind_the_first_end() -> None:
    first, second = partition(), partition(end=(900, 90, 99_000))
    first.offsets_for_times.extend(range(16))
    second.offsets_for_times.extend([16, 700])
    asked = SnapshotRequest(topics=("orders",), times_ns=tuple(range(100, 118)), hold_ms=9)
    with serving(answer(first), answer(second)) as (address, scripted):
        found = segments(address).snapshot(asked)
    assert found.times["orders", 0] == {100 + n: n for n in range(17)} | {117: 230}
    assert [(len(one.timestamps_ns), one.hold_ms) for one in scripted.requests] == [(16, 9), (2, 0)]


def test_borders_are_asked_for_in_ranges() -> None:
    with serving(answer(partition())) as (address, scripted):
        segments(address).snapshot(SnapshotRequest(topics=("orders",), ranges=(("orders", 0, 5, 9),)))
    [request] = scripted.requests
    assert request.cut_points
    assert [(one.topic, one.partition, one.first, one.end) for one in request.ranges] == [("orders", 0, 5, 9)]


def test_brokers_are_asked_in_turn() -> None:
    with serving(answer(partition())) as (address, _):
        assert len(segments(nobody(), address, retries=0).snapshot(ASKED).pins) == 1


def test_when_no_broker_answers_all_are_named_with_the_reason() -> None:
    first, second = nobody(), nobody()
    assert refusal(lambda: segments(first, second).snapshot(ASKED)) == (
        f"no broker answers: {first} refused the connection, {second} refused the connection; "
        "brokers takes addresses of --grpc-address"
    )


def test_a_broker_that_cannot_now_is_asked_again() -> None:
    with serving((grpc.StatusCode.UNAVAILABLE, "no leader"), answer(partition())) as (address, scripted):
        assert len(segments(address).snapshot(ASKED).pins) == 1
    assert len(scripted.requests) == 2


def test_silence_ends_with_the_time_that_was_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        said = refusal(lambda: segments(address, retries=0, timeout_ms=100).snapshot(ASKED))
    assert f"no broker answers: {address} did not answer within 100 ms (timeoutMs)" in said


def test_the_time_of_a_call_does_not_grow_with_the_brokers_that_are_silent() -> None:
    with ExitStack() as stack:
        deaf = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        brokers = [f"127.0.0.1:{one.getsockname()[1]}" for one in deaf]
        said = refusal(lambda: segments(*brokers, retries=1, timeout_ms=2000).snapshot(ASKED))
    silent = "did not answer within 2000 ms (timeoutMs)"
    assert f"{brokers[0]} {silent}, {brokers[1]} {silent}, " in said
    assert said.count("was not tried") == 2


def test_a_broker_that_was_silent_is_asked_last() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,
        serving((grpc.StatusCode.UNAVAILABLE, "no leader"), answer(partition())) as (address, scripted),
    ):
        silent = f"127.0.0.1:{deaf.getsockname()[1]}"
        assert len(segments(silent, address, retries=9, timeout_ms=4000).snapshot(ASKED).pins) == 1
        assert len(scripted.requests) == 2
        deaf.settimeout(0)
        deaf.accept()
        with pytest.raises(BlockingIOError):
            deaf.accept()


def test_what_was_missing_is_said_although_other_brokers_are_away() -> None:
    failed = partition()
    failed.error = "no leader"
    with serving(answer(failed)) as (address, _):
        assert "no snapshot of orders/0 (no leader)" in refusal(lambda: segments(address, nobody()).snapshot(ASKED))


@pytest.mark.parametrize(
    ("code", "details", "text"),
    [
        ("NOT_FOUND", "no topic 'orders'", "no topic 'orders'; `nsqha topic list` shows what there is"),
        ("INVALID_ARGUMENT", "pattern: missing )", "pattern: missing )"),
        (
            "PERMISSION_DENIED",
            "not\nthis one",
            "{address} refuses this certificate: not this one; a reader's has URI:nsqha:reader",
        ),
        (
            "UNIMPLEMENTED",
            "",
            "{address} has no segment service: it is another program, or a broker older than this package",
        ),
        (
            "RESOURCE_EXHAUSTED",
            "more than 9 borders",
            "{address} cannot answer: more than 9 borders; ask for fewer topics, or fewer offsets of them",
        ),
    ],
)
def test_what_no_other_broker_would_answer_better_is_final(code: str, details: str, text: str) -> None:
    with serving((grpc.StatusCode[code], details)) as (address, scripted):
        assert refusal(lambda: segments(address).snapshot(ASKED)) == text.format(address=address)
    assert len(scripted.requests) == 1


def test_partitions_without_a_leader_are_waited_for_under_the_same_hold() -> None:
    failed = answer(partition(0), partition(1, error="no leader"))
    away = (grpc.StatusCode.UNAVAILABLE, "32 snapshots are being made here")
    with serving(away, failed, answer(partition(0), partition(1), hold_id="h1")) as (address, scripted):
        found = segments(address).snapshot(SnapshotRequest(topics=("orders",), hold_ms=1000))
    assert (len(found.pins), found.hold_id) == (2, "h1")
    [drawn] = {request.hold_id for request in scripted.requests}
    assert len(scripted.requests) == 3 and len(drawn) == 16 and int(drawn, 16), "known before it is asked for"


def test_a_hold_that_nobody_hears_of_is_released() -> None:
    failed = answer(partition(0, error="no leader"))
    with serving(failed, failed, pb.ReleaseHoldResponse(partitions=1)) as (address, scripted):
        asked = SnapshotRequest(topics=("orders",), hold_ms=1000)
        assert "no snapshot of orders/0" in refusal(lambda: segments(address, retries=1).snapshot(asked))
    *held, released = scripted.requests
    assert [type(one) for one in (*held, released)] == [pb.SnapshotRequest] * 2 + [pb.ReleaseHoldRequest]
    assert released.hold_id == held[0].hold_id


def test_partitions_that_do_not_answer_are_named() -> None:
    failed = [partition(number, error="no leader") for number in range(7)]
    with serving(answer(*failed)) as (address, scripted):
        said = refusal(lambda: segments(address, retries=1).snapshot(ASKED))
    assert said == (
        "no snapshot of orders/0 (no leader), orders/1 (no leader), orders/2 (no leader), orders/3 (no leader), "
        "orders/4 (no leader) and 2 more; `nsqha topic show` shows their leaders"
    )
    assert len(scripted.requests) == 2


def test_answers_may_be_larger_than_what_grpc_takes_by_default() -> None:
    said = partition()
    for at in range(250_000):
        said.cuts.add(offset=at, log_id=at + 1, position=at << 20, timestamp_ns=10**18)
    said.end.offset, said.end.log_id, said.end.position = 250_000, 250_001, 250_000 << 20
    assert said.ByteSize() > 5 << 20
    with serving(answer(said)) as (address, _):
        [pin] = segments(address, timeout_ms=60_000).snapshot(ASKED).pins
    assert len(pin.cuts) == 250_000


def broken(change: Callable[[Any], None]) -> Any:
    said = partition()
    for cut in ((0, 1, 0), (100, 11, 8_000), (230, 31, 18_000)):
        said.cuts.add(offset=cut[0], log_id=cut[1], position=cut[2])
    change(said)
    return said


def put(place: str, **values: int) -> Callable[[Any], None]:
    """Changes one border."""

    def change(said: Any) -> None:
        cut = getattr(said, place) if place in ("start", "end") else said.cuts[int(place)]
        for name, value in values.items():
            setattr(cut, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put("start", offset=231), "has borders that do not ascend"),
        (put("end", log_id=0), "has borders that do not ascend"),
        (put("1", log_id=31), "has borders that do not ascend"),
        (put("1", offset=231), "has borders that do not ascend"),
        (put("1", position=18_001), "has borders that do not ascend"),
        (put("2", log_id=32), "has borders outside of what is committed"),
        (put("0", log_id=0), "has borders outside of what is committed"),
        (lambda said: said.ClearField("topic_uid"), "is not of a valid partition"),
        (lambda said: setattr(said, "topic", "a b"), "is not of a valid partition"),
        (lambda said: setattr(said, "partition", 1023), "is not of a valid partition"),
        (lambda said: said.offsets_for_times.append(1), "answers 1 of 0 times"),
    ],
)
def test_an_answer_that_contradicts_itself_is_not_believed(change: Callable[[Any], None], text: str) -> None:
    checked(answer(broken(lambda _: None)), ASKED)
    assert text in refusal(lambda: checked(answer(broken(change)), ASKED))


def test_a_partition_comes_once_and_in_order() -> None:
    for twice in ((partition(0), partition(0)), (partition(1), partition(0))):
        assert "is out of order or duplicated" in refusal(lambda twice=twice: checked(answer(*twice), ASKED))


def test_an_empty_log_has_its_border_twice() -> None:
    empty = partition(start=(5, 3, 100), end=(5, 3, 100))
    for _ in range(2):
        empty.cuts.add(offset=5, log_id=3, position=100)
    [pin] = checked(answer(empty), ASKED).pins
    assert pin.start.offset == pin.end.offset == 5


def test_a_topic_that_did_not_come_is_missing() -> None:
    asked = SnapshotRequest(topics=("orders", "payments"))
    text = "there is no topic payments; `nsqha topic list` shows what there is"
    assert refusal(lambda: checked(answer(partition()), asked)) == text


def test_ephemeral_topics_that_a_pattern_matches_are_passed_over() -> None:
    found = checked(answer(partition(topic="a#ephemeral"), partition()), SnapshotRequest(pattern=".*"))
    assert [pin.identity.topic for pin in found.pins] == ["orders"]


def test_times_are_within_the_log() -> None:
    said = partition(start=(40, 5, 0))
    said.offsets_for_times.extend([0, 999])
    found = checked(answer(said), SnapshotRequest(topics=("orders",), times_ns=(1, 2)))
    assert found.times == {("orders", 0): {1: 40, 2: 230}}


def test_holds_and_floors_of_readers_are_moved() -> None:
    with serving(pb.RenewHoldResponse(partitions=3)) as (address, _):
        assert segments(address).renew_hold("h1") == 3
    with serving(pb.ReleaseHoldResponse(partitions=2)) as (address, _):
        assert segments(address).release_hold("h1") == 2
    floors = [pb.CommittedFloor(partition=0, offset=7), pb.CommittedFloor(partition=1, offset=9)]
    with serving(pb.CommitReaderResponse(floors=floors)) as (address, scripted):
        assert segments(address).commit_reader("orders", "lake", {0: 7, 1: 9}, back=True, topic_uid=5) == {0: 7, 1: 9}
    [request] = scripted.requests
    assert (request.topic, request.channel, request.back, request.topic_uid) == ("orders", "lake", True, 5)
    assert dict(request.offsets) == {0: 7, 1: 9}


def test_a_floor_that_was_not_moved_is_named() -> None:
    floors = [pb.CommittedFloor(partition=1, error="no leader")]
    with serving(pb.CommitReaderResponse(floors=floors)) as (address, _):
        said = refusal(lambda: segments(address).commit_reader("orders", "lake", {1: 9}))
    assert said == "the floor of channel lake was not moved in orders/1 (no leader)"


def test_a_reader_without_certificate_hears_which_options_to_give(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.issue("node", "IP:127.0.0.1")
    certificates.issue("reader", "URI:nsqha:reader")
    tls = Tls(certificates.cert("reader"), certificates.key("reader"), certificates.cert("ca"))
    own = [(Path(certificates.key("node")).read_bytes(), Path(certificates.cert("node")).read_bytes())]
    authority = Path(certificates.cert("ca")).read_bytes()
    credentials = grpc.ssl_server_credentials(own, authority, require_client_auth=True)
    with serving(answer(partition()), credentials=credentials) as (address, _):
        assert len(Segments(ConnectOptions((address,), tls)).snapshot(ASKED).pins) == 1
        said = refusal(lambda: segments(address, retries=0).snapshot(ASKED))
        by_name = address.replace("127.0.0.1", "localhost")
        other = refusal(lambda: Segments(ConnectOptions((by_name,), tls, retries=0)).snapshot(ASKED))
    closed = f"no broker answers: {address} closed the connection"
    assert said.startswith(f"{closed} (if it requires a certificate: nsqha.tls.")
    assert other.startswith(f"no broker answers: {by_name} has a certificate without this name; give the name in ")


def test_a_certificate_that_is_not_on_this_machine_is_named_by_its_option() -> None:
    connection = ConnectOptions(("127.0.0.1:1",), Tls("/nowhere/cert", "/nowhere/key", "/nowhere/ca"))
    said = refusal(lambda: Segments(connection).snapshot(ASKED))
    assert said == "nsqha.tls.ca: the file cannot be read on this machine: No such file or directory"


# ---- whom to ask first


class Brokers:
    """Some brokers and the time; those in `silent` let each call wait as long as it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *silent: str) -> None:
        self.silent = {*silent}
        self.now = 0.0
        self.asked: list[str] = []
        self.pauses: list[float] = []
        monkeypatch.setattr(snapshot, "_orders", {})
        monkeypatch.setattr(snapshot, "_stub", self.stub)
        monkeypatch.setattr(snapshot, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    @contextmanager
    def stub(self, _: ConnectOptions, broker: str) -> Iterator[Any]:
        class Stub:
            def ReleaseHold(stub, request: Any, timeout: float) -> Any:
                self.asked.append(broker)
                if broker in self.silent:
                    self.now += timeout
                    raise Silence
                return pb.ReleaseHoldResponse(partitions=1)

        yield Stub()


class Silence(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"


def test_a_broker_that_was_silent_is_asked_last_by_later_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch, "a:1")
    for _ in range(3):
        segments("a:1", "b:1", "c:1").release_hold("h")
    assert brokers.asked == ["a:1", "b:1", "b:1", "b:1"]
    brokers.silent = {"b:1", "c:1"}
    segments("a:1", "b:1", "c:1").release_hold("h")
    segments("a:1", "b:1", "c:1").release_hold("h")
    assert brokers.asked[4:] == ["b:1", "c:1", "a:1", "a:1"]


def test_the_order_of_one_set_of_brokers_says_nothing_about_another(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch, "a:1")
    segments("a:1", "b:1").release_hold("h")
    brokers.silent.clear()
    segments("a:1", "c:1").release_hold("h")
    assert brokers.asked == ["a:1", "b:1", "a:1"]


def test_few_orders_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch, "a:1")
    for port in range(snapshot.ORDERS_MAX + 5):
        segments("a:1", f"b:{port}").release_hold("h")
        assert 0 < len(snapshot._orders) <= snapshot.ORDERS_MAX
    assert brokers.now == 5 * (snapshot.ORDERS_MAX + 5)


def test_a_call_whose_time_is_up_does_not_wait_for_rounds_that_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch, "a:1", "b:1")
    monkeypatch.setattr(snapshot, "PAUSE_S", 0.5)
    said = refusal(lambda: segments("a:1", "b:1", retries=3, timeout_ms=1000).release_hold("h"))
    assert said.startswith("no broker answers: a:1 did not answer within 1000 ms (timeoutMs), b:1 did not answer")
    assert (brokers.asked, brokers.pauses, brokers.now) == (["a:1", "b:1", "a:1", "b:1"], [0.5], 4.0)


def test_what_is_not_there_is_told_from_what_fails() -> None:
    """By which a stream tells what is not there any more."""
    for asked in (ASKED, SnapshotRequest(topics=("orders",), hold_ms=9)):
        refused = (grpc.StatusCode.NOT_FOUND, "no topic 'orders'")
        with serving(refused) as (address, _), pytest.raises(ReadFailed) as failed:
            segments(address).snapshot(asked)
        assert isinstance(failed.value, NotThere)
    refused = (grpc.StatusCode.INVALID_ARGUMENT, "pattern: missing )")
    with serving(refused) as (address, _), pytest.raises(ReadFailed) as failed:
        segments(address).snapshot(ASKED)
    assert not isinstance(failed.value, NotThere)
    with serving(answer()) as (address, _), pytest.raises(NotThere):
        segments(address).snapshot(ASKED)
    with pytest.raises(NoBroker):
        segments(nobody(), retries=0).snapshot(ASKED)


def test_a_broker_that_waits_for_another_one_answers_before_it_is_called_silent() -> None:
    """The error of the partition arrives, and the broker stays among the first to be asked."""
    assert ConnectOptions(("h:1",)).timeout_ms - 5000 > service.CALL_SECONDS * 1000
