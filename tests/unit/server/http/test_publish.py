"""Publishing over nsqd's HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.clock import ManualClock
from nsqha.errors import AppendFailed, NotFound, OutcomeUnknown, Poisoned, Unavailable
from nsqha.options import Options
from nsqha.server.clients.publish import Publishing, SingleNodePublishRoutes
from nsqha.server.http import server as http_envelope
from nsqha.server.http.publishing import PIECE_BYTES, HttpPublishRoutes, frames_of_lines
from nsqha.server.http.server import ApiError, Query
from nsqha.server.runtime.budget import PublishBudget
from tests.fakes.loop import VirtualLoop
from tests.unit.server.fake_broker import SECOND, BrokerTopic, FakeBroker, bodies_of
from tests.unit.server.http_rig import NSQ, TEXT, ask, refusals, talk
from tests.unit.server.raw_http import Connection


def test_pub_stores_the_body_as_it_is() -> None:
    broker = FakeBroker()
    body = bytes(range(256)) + b"\n\r\n"
    answer = ask(broker, "POST", "/pub?topic=t", body)
    assert answer.status == 200
    assert answer.body == b"OK"
    assert answer.headers["content-type"] == TEXT
    assert answer.headers["x-nsq-content-type"] == NSQ
    assert answer.headers["content-length"] == "2"
    assert broker.topics["t"].bodies == [body]
    assert broker.publishing.delays == [None]


def test_pub_checks_the_body_before_the_topic() -> None:
    broker = FakeBroker(max_msg_size=100)
    assert refusals(
        broker,
        ("POST", "/pub", b"x" * 101),
        ("POST", "/pub?topic=a*b", b""),
        ("POST", "/pub", b"x"),
        ("POST", "/pub?topic=", b"x"),
        ("POST", "/pub?topic=a*b", b"x"),
        ("POST", "/pub?topic=" + "n" * 65, b"x"),
        ("POST", "/pub?topic=%zz", b"x"),
    ) == [
        (413, "MSG_TOO_BIG"),
        (400, "MSG_EMPTY"),
        (400, "MISSING_ARG_TOPIC"),
        (400, "INVALID_TOPIC"),
        (400, "INVALID_TOPIC"),
        (400, "INVALID_TOPIC"),
        (400, "INVALID_REQUEST"),
    ]
    assert broker.topics == {}


def test_pub_takes_a_message_of_exactly_the_limit_also_chunked() -> None:
    broker = FakeBroker(max_msg_size=100)
    assert ask(broker, "POST", "/pub?topic=t", b"x" * 100).status == 200
    assert ask(broker, "POST", "/pub?topic=t", b"x" * 100, chunked=True).status == 200
    assert ask(broker, "POST", "/pub?topic=t", b"x" * 101, chunked=True).refusal == (413, "MSG_TOO_BIG")
    assert len(broker.topics["t"].bodies) == 2


def test_pub_refuses_an_announced_size_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_envelope, "LINGER_S", 0.01)

    async def conversation(connection: Connection) -> None:
        connection.writer.write(b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert (await connection.answer()).refusal == (413, "MSG_TOO_BIG")

    talk(FakeBroker(), conversation)


def test_pub_answers_expect_100_continue() -> None:
    broker = FakeBroker()

    async def conversation(connection: Connection) -> None:
        connection.writer.write(
            b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
        )
        assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.writer.write(b"hello")
        assert (await connection.answer()).body == b"OK"

    talk(broker, conversation)
    assert broker.topics["t"].bodies == [b"hello"]


@pytest.mark.parametrize("delay", ["-1", "x", "", "1.5", "31536000001", "18446744073709551616", "9" * 30, "1_0", " 1"])
def test_defer_must_be_milliseconds_within_max_req_timeout(delay: str) -> None:
    broker = FakeBroker()
    answer = ask(broker, "POST", f"/pub?topic=t&defer={delay.replace(' ', '%20')}", b"x")
    assert answer.refusal == (400, "INVALID_DEFER")
    assert broker.publishing.delays == []


def test_defer_is_handed_on() -> None:
    broker = FakeBroker()
    for delay in ("0", "700", "3600000"):
        assert ask(broker, "POST", f"/pub?topic=t&defer={delay}", b"x").status == 200
    assert ask(broker, "POST", "/mpub?topic=t&defer=5", b"a\nb").status == 200
    assert broker.publishing.delays == [None, 700, 3_600_000, 5]


def test_max_req_timeout_bounds_delays() -> None:
    year, hour = "31536000000", "3600000"
    assert ask(FakeBroker(), "POST", f"/pub?topic=t&defer={year}", b"x").status == 200
    broker = FakeBroker(max_req_timeout_ns=3600 * SECOND)
    assert ask(broker, "POST", f"/pub?topic=t&defer={hour}", b"x").status == 200
    assert ask(broker, "POST", f"/pub?topic=t&defer={year}", b"x").refusal == (400, "INVALID_DEFER")


def test_a_form_is_a_message() -> None:
    assert ask(FakeBroker(), "POST", "/pub", b"topic=abc").refusal == (400, "MISSING_ARG_TOPIC")


def test_mpub_takes_one_message_per_line_and_skips_empty_ones() -> None:
    broker = FakeBroker()
    assert ask(broker, "POST", "/mpub?topic=t", b"\n\none\r\n\n\ntwo\n").body == b"OK"
    assert broker.topics["t"].bodies == [b"one\r", b"two"]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_large_body_of_short_lines_is_made_into_frames_in_pieces(end: bytes) -> None:
    """Half a second of work for 5 MiB: heartbeats and leases can not wait for it."""

    async def story() -> None:
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(turn)

        loop = asyncio.get_running_loop()
        loop.call_soon(turn)
        lines = [b"%d" % n for n in range(20_000)] + [b"x" * 3 * PIECE_BYTES, b"last"]
        body = b"\n".join(lines) + end
        assert bodies_of(await frames_of_lines(body, len(body))) == lines
        assert turns >= (len(body) - 3 * PIECE_BYTES) // PIECE_BYTES - 1

    asyncio.run(story())


def test_a_large_body_is_not_made_into_frames_while_too_many_publishes_wait() -> None:
    broker = FakeBroker()
    broker.publishing.crowded = True
    for query in ("", "&binary=true"):
        answer = ask(broker, "POST", f"/mpub?topic=t{query}", b"x\n" * PIECE_BYTES)
        assert answer.refusal == (503, "UNAVAILABLE")


class Crowd:
    """Large /mpub requests at times of a virtual clock, on a node whose budget is full; what became of each."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.broker = FakeBroker()
        self.broker.topics["t"] = BrokerTopic()
        self.budget = PublishBudget(loop, 1000)
        self.budget.take(1001)
        self.published: list[bytes] = []
        self.ended: dict[str, tuple[float, object]] = {}
        self._loop = loop
        partition = SimpleNamespace(publish=self._publish)
        topic = SimpleNamespace(deleting=False, partition_for=lambda number: partition)
        topics: Any = SimpleNamespace(get=lambda name: topic, topic_for_client=self._made)
        self.broker.publishing = Publishing(  # type: ignore[assignment]
            topics,
            Options(),
            loop=loop,
            budget=self.budget,
            routes=SingleNodePublishRoutes(topics),
            refusal=lambda: None,
            next_number=lambda: 0,
        )
        self._http = HttpPublishRoutes(self.broker)

    async def _made(self, topic: str) -> None:
        pass

    def _publish(self, frames: bytes, waiter: Any, delay_ms: int | None) -> None:
        self.published.append(bodies_of(frames)[0])
        self.budget.take(1001)  # the disk has enough for now
        waiter.stored()

    def room(self) -> None:
        """The disk took what it had."""
        self.budget.give(self.budget.used)

    async def ask(self, at: float, name: str, *, pieces: int = 2) -> None:
        body = name.encode() + b"\n" + b"x\n" * (pieces * PIECE_BYTES // 2)

        async def read(limit: int) -> bytes:
            return body

        await asyncio.sleep(at - self._loop.time())
        request: Any = SimpleNamespace(query=Query("topic=t"), content_length=len(body), body=read)
        try:
            outcome = await self._http.mpub(request)
        except ApiError as error:
            outcome = (error.status, error.code, error.extra["detail"])
        self.ended[name] = (round(self._loop.time(), 3), outcome)


REFUSED = (503, "UNAVAILABLE", "too many publishes are waiting for the disk")


def in_virtual_time(story: Callable[[VirtualLoop], Awaitable[None]]) -> None:
    loop = VirtualLoop(ManualClock(mono=0.0))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(story(loop))


def test_large_bodies_that_wait_for_the_disk_wait_side_by_side() -> None:
    async def story(loop: VirtualLoop) -> None:
        crowd = Crowd(loop)
        await asyncio.gather(*[crowd.ask(at, str(at)) for at in (1, 2, 3, 4)])
        assert crowd.ended == {"1": (6, REFUSED), "2": (7, REFUSED), "3": (8, REFUSED), "4": (9, REFUSED)}
        assert crowd.published == []

    in_virtual_time(story)


def test_when_the_disk_is_back_only_bodies_with_a_waiting_client_are_published() -> None:
    async def story(loop: VirtualLoop) -> None:
        crowd = Crowd(loop)
        for at in (7.5, 8.5):
            loop.call_at(at, crowd.room)
        await asyncio.gather(*[crowd.ask(at, str(at)) for at in (1, 2, 3, 4)])
        assert crowd.ended == {"1": (6, REFUSED), "2": (7, REFUSED), "3": (7.5, "OK"), "4": (8.5, "OK")}
        assert crowd.published == [b"3", b"4"]

    in_virtual_time(story)


def test_a_large_body_does_not_begin_to_wait_anew_when_it_is_framed() -> None:
    async def story(loop: VirtualLoop) -> None:
        crowd = Crowd(loop)
        loop.call_at(4, crowd.room)
        asked = asyncio.create_task(crowd.ask(1, "1", pieces=20))
        await asyncio.sleep(4)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not crowd.budget.full
        crowd.budget.take(1001)  # somebody else's
        await asked
        assert crowd.ended == {"1": (6, REFUSED)}

    in_virtual_time(story)


@pytest.mark.parametrize("body", [b"", b"\n\n"])
def test_mpub_without_a_message_is_ok_and_makes_the_topic(body: bytes) -> None:
    broker = FakeBroker()
    assert ask(broker, "POST", "/mpub?topic=t", body).body == b"OK"
    assert broker.topics["t"].bodies == []
    assert broker.publishing.delays == []


COUNTED = b"\0\0\0\2" + b"\0\0\0\3a\nb" + b"\0\0\0\1c"


@pytest.mark.parametrize("word", ["true", "1", "yes", ""])
def test_mpub_binary_takes_counted_messages(word: str) -> None:
    broker = FakeBroker()
    assert ask(broker, "POST", f"/mpub?topic=t&binary={word}", COUNTED).body == b"OK"
    assert broker.topics["t"].bodies == [b"a\nb", b"c"]


@pytest.mark.parametrize("word", ["false", "0"])
def test_mpub_binary_false_means_lines(word: str) -> None:
    broker = FakeBroker()
    ask(broker, "POST", f"/mpub?topic=t&binary={word}", b"a\nb")
    assert broker.topics["t"].bodies == [b"a", b"b"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "BAD_BODY"),
        (b"\0\0\0", "BAD_BODY"),
        (b"\0\0\0\0", "BAD_BODY"),
        (b"\xff\xff\xff\xff", "BAD_BODY"),
        (b"\x7f\xff\xff\xff" + b"\0\0\0\1a", "BAD_BODY"),
        (b"\0\0\0\2" + b"\0\0\0\1a", "BAD_MESSAGE"),
        (b"\0\0\0\2" + b"\0\0\0\1a" + b"\0\0\0\0", "BAD_MESSAGE"),
        (b"\0\0\0\1" + b"\xff\xff\xff\xff", "BAD_MESSAGE"),
        (b"\0\0\0\1" + b"\0\0\0\xc9" + b"x" * 201, "BAD_MESSAGE"),
    ],
)
def test_a_broken_counted_body_is_refused_whole_but_makes_the_topic(body: bytes, code: str) -> None:
    broker = FakeBroker(max_msg_size=200)
    assert ask(broker, "POST", "/mpub?topic=t&binary=true", body).refusal == (413, code)
    assert broker.topics["t"].bodies == []


def test_mpub_limits() -> None:
    broker = FakeBroker(max_msg_size=10, max_body_size=50)
    assert refusals(
        broker,
        ("POST", "/mpub", b"x" * 51),
        ("POST", "/mpub", b"x"),
        ("POST", "/mpub?topic=a*b", b"x"),
        ("POST", "/mpub?topic=t", b"ok\n" + b"x" * 11),
        ("POST", "/mpub?topic=t", b"y\n" * 25 + b"y"),
    ) == [
        (413, "BODY_TOO_BIG"),
        (400, "MISSING_ARG_TOPIC"),
        (400, "INVALID_TOPIC"),
        (413, "MSG_TOO_BIG"),
        (413, "BODY_TOO_BIG"),
    ]
    assert ask(broker, "POST", "/mpub?topic=t", b"y\n" * 26, chunked=True).refusal == (413, "BODY_TOO_BIG")
    assert ask(broker, "POST", "/mpub?topic=t", b"y\n" * 25).status == 200
    assert len(broker.topics["t"].bodies) == 25


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (Unavailable("disk low"), (503, "UNAVAILABLE")),
        (AppendFailed("no space"), (503, "UNAVAILABLE")),
        (OutcomeUnknown("no answer"), (504, "OUTCOME_UNKNOWN")),
        (Poisoned("fsync failed"), (500, "INTERNAL_ERROR")),
        (NotFound("t"), (404, "TOPIC_NOT_FOUND")),
        (RuntimeError("a bug"), (500, "INTERNAL_ERROR")),
    ],
)
def test_a_failed_publish_says_whether_it_may_be_stored(error: Exception, refusal: tuple[int, str]) -> None:
    broker = FakeBroker()
    broker.topics["t"] = BrokerTopic()
    broker.topics.refusal = error
    answer = ask(broker, "POST", "/pub?topic=t", b"x")
    assert answer.refusal == refusal
    assert answer.json.get("detail", str(error)) == str(error)
    assert ask(broker, "POST", "/mpub?topic=t", b"x").refusal == refusal


def test_a_stopping_broker_says_so() -> None:
    broker = FakeBroker()
    broker.exiting = True
    assert refusals(broker, ("POST", "/pub?topic=t", b"x"), ("POST", "/mpub?topic=t", b"x")) == [(503, "EXITING")] * 2


def test_a_publish_that_the_stop_overtakes_says_so() -> None:
    broker = FakeBroker()

    async def publish(*_args: object, **_fields: object) -> None:
        broker.exiting = True
        raise Unavailable("exiting")

    broker.publishing.publish = publish  # type: ignore[method-assign]
    assert ask(broker, "POST", "/pub?topic=t", b"x").refusal == (503, "EXITING")


def test_without_auto_create_a_publish_needs_its_topic() -> None:
    broker = FakeBroker(auto_create_topics=False)
    assert (
        refusals(broker, ("POST", "/pub?topic=t", b"x"), ("POST", "/mpub?topic=t", b"x"))
        == [(404, "TOPIC_NOT_FOUND")] * 2
    )
    assert ask(broker, "POST", "/topic/create?topic=t").status == 200
    assert ask(broker, "POST", "/pub?topic=t", b"x").status == 200


def test_a_connection_serves_many_requests() -> None:
    broker = FakeBroker()

    async def conversation(connection: Connection) -> None:
        for n in range(20):
            assert (await connection.ask("POST", "/pub?topic=t", b"%d" % n)).body == b"OK"

    talk(broker, conversation)
    assert len(broker.topics["t"].bodies) == 20


def test_a_partition_that_is_named_is_the_one_or_refused() -> None:
    broker = FakeBroker()
    broker.publishing.partitions_of = {"several": 2}
    assert (
        refusals(
            broker,
            ("POST", "/pub?topic=several&partition=2", b"x"),
            ("POST", "/mpub?topic=several&partition=abc", b"x"),
        )
        == [(400, "INVALID_ARG_TOPIC_PARTITION")] * 2
    )
    assert "several" not in broker.topics
    targets = "/pub?topic=t&partition=1", "/mpub?topic=t&partition=0", "/pub?topic=several"
    named = "/pub?topic=several&partition=1", "/mpub?topic=several&partition=0", "/pub?topic=several&partition=-1"
    for target in [*targets, *named]:
        assert ask(broker, "POST", target, b"x").status == 200
    assert broker.publishing.chosen == [None, None, None, 1, 0, None]


@pytest.mark.parametrize("clustered", [False, True])
def test_partitions_are_named_where_there_is_a_choice_and_always_in_a_cluster(clustered: bool) -> None:
    two, one = [SimpleNamespace(record=SimpleNamespace(partitions=dict.fromkeys(range(n)))) for n in (2, 1)]
    nothing: Any = None
    publishing = Publishing(
        {"two": two, "one": one},  # type: ignore[dict-item]
        Options(topic_partitions=3),
        loop=nothing,
        budget=nothing,
        routes=SimpleNamespace(clustered=clustered),  # type: ignore[arg-type]
        refusal=nothing,
        next_number=nothing,
    )
    found = [publishing.named_partitions(name) for name in ("two", "new", "one")]
    assert found == [2, 3, 1 if clustered else 0]
