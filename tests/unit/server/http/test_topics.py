"""Topics and channels over nsqd's HTTP API."""

from __future__ import annotations

import pytest

from nsqha.errors import NotFound, Unavailable
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
