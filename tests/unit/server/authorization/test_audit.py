"""The record of a change, and its way into a topic."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from nsqha.errors import Unavailable
from nsqha.server.authorization.audit import REFUSED_PER_SECOND, AdminAction, Audit
from nsqha.server.authorization.audit_topic import AT_ONCE, WAITING_MAX, AuditTopic
from tests.unit.server.fake_broker import bodies_of

ACTION = AdminAction("ops", "admin", "10.0.0.7:1", "http", "POST /topic/delete", "topic=t", False, "done", 0.01234567)


def test_a_record_is_one_event_with_all_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nsqha")
    published: list[bytes] = []
    audit = Audit()
    audit.record(ACTION)
    audit.publish = published.append
    audit.record(replace(ACTION, plan=True, target="t" * 1000, method="PUT /config/" + "x" * 1000))
    first, second = caplog.records
    assert (first.event, first.levelname) == ("admin_action", "INFO")  # type: ignore[attr-defined]
    assert first.fields == {  # type: ignore[attr-defined]
        "who": "ops",
        "role": "admin",
        "from": "10.0.0.7:1",
        "surface": "http",
        "method": "POST /topic/delete",
        "target": "topic=t",
        "plan": False,
        "outcome": "done",
        "took": 0.012346,
    }
    assert first.getMessage() == "AUDIT: ops (10.0.0.7:1) http POST /topic/delete topic=t: done"
    (shown,) = map(json.loads, published)
    assert shown == second.fields and shown["plan"] and len(published[0]) < 1000  # type: ignore[attr-defined]


def test_refusals_that_strangers_cause_have_a_bound_and_changes_have_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nsqha")
    second = 5.0
    audit, published = Audit(lambda: second), []
    audit.publish = published.append
    for _ in range(REFUSED_PER_SECOND + 50):
        audit.record(replace(ACTION, outcome="refused: 401 UNAUTHORIZED"))
    for _ in range(30):
        audit.record(ACTION)
    assert len(published) == REFUSED_PER_SECOND + 30
    events = [record.event for record in caplog.records]  # type: ignore[attr-defined]
    assert events.count("audit_refusals_unrecorded") == 1
    second = 6.0
    audit.record(replace(ACTION, outcome="refused: 401 UNAUTHORIZED"))
    assert len(published) == REFUSED_PER_SECOND + 31


def test_an_action_never_waits_and_what_is_not_taken_is_counted() -> None:
    stored: list[list[bytes]] = []
    refuses = True

    async def publish(topic: str, frames: bytes) -> None:
        assert topic == "audit"
        if refuses:
            raise Unavailable("the disk is full")
        stored.append(bodies_of(frames))

    async def main() -> None:
        nonlocal refuses
        topic = AuditTopic("audit", publish)
        for n in range(WAITING_MAX + 3):
            topic.put(b"%d" % n)
        assert topic.lost == 3
        task = asyncio.get_running_loop().create_task(topic.run())
        while topic.lost < WAITING_MAX + 3:
            await asyncio.sleep(0)
        refuses = False
        for n in range(AT_ONCE + 1):
            topic.put(b"%d" % n)
        while sum(map(len, stored)) <= AT_ONCE:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    assert [len(some) for some in stored] == [AT_ONCE, 1] and stored[1] == [b"%d" % AT_ONCE]


def test_changes_of_the_audit_topic_go_to_other_nodes_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nsqha")
    audit, copied = Audit(), list[bytes]()
    audit.copied, audit.topic = copied.append, "audit"
    for target, outcome in (
        ("topic=audit channel=c", "done"),
        ("topic=audit", "failed: X"),
        ("topic=audit2", "done"),
        ("topic=t channel=topic=audit", "done"),
        ("topic=audit", "refused: FORBIDDEN"),
    ):
        audit.record(replace(ACTION, target=target, outcome=outcome))
    found = list(map(json.loads, copied))
    assert [(record["target"], record["outcome"]) for record in found] == [
        ("topic=audit channel=c", "done"),
        ("topic=audit", "failed: X"),
    ]
    other = Audit()
    other.publish = lambda _: pytest.fail("the node that was asked publishes it")
    del caplog.records[:]
    other.take(found[0] | {"more": 1}, "node-1")
    (record,) = caplog.records
    assert record.fields == found[0] | {"node": "node-1"}  # type: ignore[attr-defined]
    assert record.getMessage() == (
        "AUDIT: ops (10.0.0.7:1) http POST /topic/delete topic=audit channel=c: done (at node node-1)"
    )
