"""Topics and channels over nsqd's HTTP API."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.errors import NotFound, Unavailable
from nsqha.server.http.api import routes
from nsqha.server.http.server import NARROWING, ApiError, Query, Route, _refuse_narrower
from tests.unit.server.fake_broker import BrokerChannel, BrokerTopic, FakeBroker
from tests.unit.server.http_rig import NSQ, ask, refusals, talk
from tests.unit.server.raw_http import Connection


def test_the_life_of_topics_and_channels() -> None:
    broker = FakeBroker()

    async def conversation(connection: Connection) -> None:
        async def done(target: str) -> None:
            answer = await connection.ask("POST", target)
            assert (answer.status, answer.body) == (200, b"")
            assert "content-type" not in answer.headers
            assert answer.headers["x-nsq-content-type"] == NSQ

        await done("/topic/create?topic=t")
        await done("/topic/create?topic=t")
        await done("/topic/pause?topic=t")
        assert broker.topics["t"].paused
        await done("/topic/unpause?topic=t")
        assert not broker.topics["t"].paused
        await done("/channel/create?topic=t&channel=c%23ephemeral")
        await done("/channel/create?topic=t&channel=c")
        assert set(broker.topics["t"].channels) == {"c", "c#ephemeral"}
        await done("/channel/pause?topic=t&channel=c")
        assert broker.topics["t"].channels["c"].paused
        await done("/channel/unpause?topic=t&channel=c")
        assert not broker.topics["t"].channels["c"].paused
        broker.topics["t"].channels["c"].depth = 5
        await done("/channel/empty?topic=t&channel=c")
        assert broker.topics["t"].channels["c"].depth == 0
        await done("/channel/delete?topic=t&channel=c")
        assert set(broker.topics["t"].channels) == {"c#ephemeral"}
        broker.topics["t"].bodies.append(b"x")
        await done("/topic/empty?topic=t")
        assert broker.topics["t"].bodies == []
        await done("/topic/delete?topic=t")
        assert broker.topics == {}

    talk(broker, conversation)


def test_what_another_node_has_just_deleted_is_deleted() -> None:
    """nsqadmin asks every leader."""
    broker = FakeBroker()
    broker.topics["t"] = BrokerTopic()
    asked = [("POST", "/topic/delete?topic=gone", b""), ("POST", "/channel/delete?topic=t&channel=c", b"")]
    assert refusals(broker, *asked) == [(404, "TOPIC_NOT_FOUND"), (404, "CHANNEL_NOT_FOUND")]
    broker.topics.deleted_elsewhere |= {"gone", ("t", "c")}

    async def conversation(connection: Connection) -> None:
        for method, target, body in asked:
            assert (await connection.ask(method, target, body)).status == 200

    talk(broker, conversation)


@pytest.mark.parametrize("verb", ["create", "delete", "empty", "pause", "unpause"])
def test_channel_calls_check_topic_then_channel(verb: str) -> None:
    broker = FakeBroker()
    broker.topics["t"] = BrokerTopic()
    path = f"/channel/{verb}"
    assert refusals(
        broker,
        ("POST", path, b""),
        ("POST", f"{path}?topic=a*b", b""),
        ("POST", f"{path}?topic=t", b""),
        ("POST", f"{path}?topic=t&channel=a*b", b""),
        ("POST", f"{path}?topic=unknown&channel=c", b""),
        ("GET", f"{path}?topic=t&channel=c", b""),
    ) == [
        (400, "MISSING_ARG_TOPIC"),
        (400, "INVALID_ARG_TOPIC"),
        (400, "MISSING_ARG_CHANNEL"),
        (400, "INVALID_ARG_CHANNEL"),
        (404, "TOPIC_NOT_FOUND"),
        (405, "METHOD_NOT_ALLOWED"),
    ]
    if verb != "create":
        assert ask(broker, "POST", f"{path}?topic=t&channel=c").refusal == (404, "CHANNEL_NOT_FOUND")


def test_only_create_and_empty_look_at_the_name_of_a_topic() -> None:
    found = {}
    for verb in ("create", "delete", "empty", "pause", "unpause"):
        path = f"/topic/{verb}"
        found[verb] = refusals(FakeBroker(), ("POST", path, b""), ("POST", f"{path}?topic=a*b", b""))
    assert {verb: answers[0] for verb, answers in found.items()} == dict.fromkeys(found, (400, "MISSING_ARG_TOPIC"))
    assert {verb: answers[1] for verb, answers in found.items()} == {
        "create": (400, "INVALID_TOPIC"),
        "delete": (404, "TOPIC_NOT_FOUND"),
        "empty": (400, "INVALID_TOPIC"),
        "pause": (404, "TOPIC_NOT_FOUND"),
        "unpause": (404, "TOPIC_NOT_FOUND"),
    }


def test_what_vanishes_while_it_is_changed_is_not_found() -> None:
    broker = FakeBroker()
    broker.topics["t"] = BrokerTopic(channels={"c": BrokerChannel()})
    broker.topics.refusal = NotFound("gone meanwhile")
    assert ask(broker, "POST", "/topic/pause?topic=t").refusal == (404, "TOPIC_NOT_FOUND")
    assert ask(broker, "POST", "/channel/pause?topic=t&channel=c").refusal == (404, "CHANNEL_NOT_FOUND")


def test_a_change_that_can_not_be_made_says_why() -> None:
    broker = FakeBroker()
    broker.topics.refusal = Unavailable("no leader for partition 3")
    answer = ask(broker, "POST", "/topic/create?topic=t")
    assert answer.refusal == (503, "UNAVAILABLE")
    assert answer.json["detail"] == "no leader for partition 3"


# ---- one partition, as clients of the Youzan fork name it


def spread_broker() -> FakeBroker:
    """Topic t has four partitions, topic one has one; both have channel c."""
    broker = FakeBroker()
    broker.topics["t"] = BrokerTopic(partitions=4, channels={"c": BrokerChannel()})
    broker.topics["one"] = BrokerTopic(channels={"c": BrokerChannel()})
    return broker


def statuses(broker: FakeBroker, targets: list[str]) -> dict[str, tuple[int, bytes]]:
    found: dict[str, tuple[int, bytes]] = {}

    async def conversation(connection: Connection) -> None:
        for target in targets:
            answer = await connection.ask("POST", target, b"")
            found[target] = (answer.status, answer.body)

    talk(broker, conversation)
    return found


EVERY_VERB = [
    *(f"/topic/{verb}?topic=TOPIC" for verb in ("create", "delete", "pause", "unpause", "empty")),
    *(f"/channel/{verb}?topic=TOPIC&channel=c" for verb in ("create", "delete", "pause", "unpause", "empty")),
    *(f"/channel/{verb}?topic=TOPIC&channel=c" for verb in ("skip", "unskip", "policy")),
    "/message/finish?topic=TOPIC&channel=c&msgid=0004000000000001",
]


@pytest.mark.parametrize("verb", EVERY_VERB)
def test_no_verb_ignores_a_partition(verb: str) -> None:
    broker = spread_broker()
    target = verb.replace("TOPIC", "t")
    found = statuses(broker, [f"{target}&partition={n}" for n in ("4", "77", "x", "-1", "1.0")])
    assert [status for status, _ in found.values()] == [404, 404, 400, 400, 400]
    topic = broker.topics["t"]
    assert (topic.emptied, topic.paused, set(topic.channels), topic.channels["c"].paused) == ([], False, {"c"}, False)
    assert broker.endpoints.finished == []


@pytest.mark.parametrize("verb", [verb for verb in EVERY_VERB if "/empty" not in verb and "/finish" not in verb])
def test_what_is_done_in_all_partitions_is_refused_for_one_of_them(verb: str) -> None:
    broker = spread_broker()
    ((status, body),) = statuses(broker, [f"{verb.replace('TOPIC', 't')}&partition=0"]).values()
    assert status == 400 and b"INVALID_ARG_TOPIC_PARTITION" in body and b"acts on all partitions" in body
    topic = broker.topics["t"]
    assert (topic.paused, set(topic.channels), topic.channels["c"].paused) == (False, {"c"}, False)


def test_one_partition_is_emptied() -> None:
    broker = spread_broker()
    targets = [
        "/channel/empty?topic=t&channel=c&partition=0", "/topic/empty?topic=t&partition=3",
        "/channel/empty?topic=t&channel=c", "/channel/empty?topic=t&channel=c&partition=**",
    ]  # fmt: skip
    assert [status for status, _ in statuses(broker, targets).values()] == [200] * 4
    assert broker.topics["t"].emptied == [0, 3, None, None]


def test_the_only_partition_is_all_of_them() -> None:
    broker = spread_broker()
    verbs = [verb.replace("TOPIC", "one") for verb in EVERY_VERB if "pause" in verb or "create" in verb]
    verbs = [f"{verb}&partition=0" for verb in verbs]
    assert {status for status, _ in statuses(broker, verbs).values()} == {200}
    assert statuses(broker, ["/topic/create?topic=new&partition=0"]).popitem()[1] == (200, b"")
    assert statuses(broker, ["/topic/create?topic=newer&partition=1"]).popitem()[1][0] == 404
    assert "newer" not in broker.topics


def test_a_message_is_one_of_the_partition_that_is_named() -> None:
    broker = spread_broker()
    target = "/message/finish?topic=t&channel=c&msgid=0004000000000001&partition="
    found = statuses(broker, [target + n for n in ("0", "1", "2")])
    assert [status for status, _ in found.values()] == [404, 200, 404]
    assert broker.endpoints.finished == ["0004000000000001"]


def test_each_route_that_changes_something_takes_or_refuses_what_narrows_it() -> None:
    """A route that is added refuses what it does not name."""
    broker = spread_broker()
    api = routes(broker)
    for name in api.names:
        method, path = name.split()
        need = api.need(method, path.replace(":opt", "log_level"))
        if need is None or not need.change:
            continue
        for parameter in NARROWING:
            request: Any = SimpleNamespace(
                method=method, path=path, query=Query(f"{parameter}=x"), param="", query_text=f"{parameter}=x"
            )
            route = api.find(request)
            assert isinstance(route, Route)
            if parameter not in route.takes:
                with pytest.raises(ApiError, match="INVALID_ARG"):
                    _refuse_narrower(route, request)


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("/topic/delete?topic=t&channel=c", "INVALID_ARG_CHANNEL"),
        ("/topic/empty?topic=t&channel=c", "INVALID_ARG_CHANNEL"),
        ("/topic/pause?topic=t&node=n1", "INVALID_ARG_NODE"),
        ("/channel/delete?topic=t&channel=c&node=n1", "INVALID_ARG_NODE"),
    ],
)
def test_what_a_verb_does_not_narrow_to_is_refused(target: str, code: str) -> None:
    broker = spread_broker()
    assert refusals(broker, ("POST", target, b"")) == [(400, code)]
    assert "t" in broker.topics and not broker.topics["t"].emptied
