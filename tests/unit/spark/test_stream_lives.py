"""Streams of topics that are deleted or made anew, and the channel of a query that is started again."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from pyspark_nsqha.model import Gone, ReadFailed
from pyspark_nsqha.streams.offsets import Records
from tests.unit.spark.stream_rig import Query, Service, log, messages, refuse

LENIENT = {"failOnDataLoss": "false"}
BY_NAME = {"subscribe": "a,b"}


def restarted(service: Service, query: Query, **options: object) -> Query:
    return Query(service, query.checkpoint, **options)


# ---- topics that are made anew


def test_the_channel_passes_no_unread_message_of_a_topic_that_was_made_anew() -> None:
    service = Service(a=log(10))
    query = Query(service, commitChannel="lake", maxOffsetsPerTrigger=10, **LENIENT)
    query.batch()
    service.make_anew("a", log(20, uid=8))
    service.moves.clear()
    assert query.batch() == {"a": range(10)}
    assert service.moves == [("a", True, {0: 0})]
    assert service.floors["a", 0] == 0
    assert query.batch() == {"a": range(10, 20)}
    assert service.moves[1:] == [("a", False, {0: 10})]


def test_a_floor_of_an_earlier_life_is_refused_by_the_brokers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Service(a=log(10))
    query = Query(service, commitChannel="lake", **LENIENT)
    query.batch()
    service.make_anew("a", log(20, uid=8))
    query.plans.done(query.at)
    assert service.floors == {}
    assert "commitChannel lake was not moved: topic a was deleted and made again" in caplog.text


def test_what_is_processed_of_a_deleted_topic_moves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(a=log(10), b=log(3))
    query = Query(service, commitChannel="lake", **LENIENT)
    query.batch()
    before = query.at
    del service.logs["a", 0]
    service.logs["b", 0].append(1)
    query.batch()
    assert ("b", False, {0: 3}) in service.moves
    query.plans.done(before)
    assert "was not moved" not in caplog.text


def test_a_topic_that_was_made_anew_is_held_anew() -> None:
    service = Service(a=log(10))
    query = Query(service, **LENIENT)
    query.batch()
    service.make_anew("a", log(20, uid=8))
    query.batch()
    assert len(service.holds) == 2


# ---- topics and partitions that are deleted


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING")


@pytest.mark.parametrize("given", [{}, BY_NAME])
def test_a_planned_micro_batch_is_read_without_a_topic_that_was_deleted(
    caplog: pytest.LogCaptureFixture, given: dict[str, str]
) -> None:
    service = Service(a=log(10), b=log(3))
    query = Query(service, **LENIENT, **given)
    query.batch()
    del service.logs["a", 0]
    again = restarted(service, query, **LENIENT, **given)
    assert again.replay() == {"b": range(3)}
    said = warnings(caplog)
    assert "a/0 does not exist any more: the topic was deleted" in said
    assert "a/0: 10 messages [0, 10) of a planned micro-batch are gone, and left out" in said
    service.logs["b", 0].append(2)
    assert again.batch() == {"b": range(3, 5)}
    assert set(again.at) == {("b", 0)}


def test_the_rest_of_a_planned_micro_batch_is_held_and_follows_the_channel() -> None:
    service = Service(a=log(10), b=log(3))
    query = Query(service, **LENIENT)
    query.batch()
    del service.logs["a", 0]
    restarted(service, query, **LENIENT).replay()
    assert len(service.holds) == 2
    restarted(service, query, commitChannel="lake", **LENIENT).replay()
    assert service.moves == [("b", True, {0: 0})]


def test_a_planned_micro_batch_of_which_every_topic_was_deleted_is_empty() -> None:
    service = Service(a=log(10))
    query = Query(service, **LENIENT)
    query.batch()
    service.logs.clear()
    again = restarted(service, query, **LENIENT)
    assert again.replay() == {}
    assert again.batch() == {}


def test_a_partition_that_is_not_there_any_more_is_left_out_and_the_others_are_read() -> None:
    service = Service(a=log(10))
    service.logs["a", 1] = log(5)
    query = Query(service, **LENIENT)
    ends = query.plans.latest(query.at, everything=False)
    del service.logs["a", 1]
    assert messages(query.plans.tasks(query.at, ends)) == {"a": range(10)}


@pytest.mark.parametrize("limit", [{}, {"maxBytesPerTrigger": 400}])
def test_a_query_by_name_reads_on_while_a_topic_is_deleted_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture, limit: dict[str, Any]
) -> None:
    service = Service(a=log(3), b=log(3))
    query = Query(service, **BY_NAME, **LENIENT, **limit)
    while query.batch():
        pass
    del service.logs["a", 0]
    service.logs["b", 0].append(2)
    assert query.batch() == {"b": range(3, 5)}
    assert query.batch() == {}
    assert query.batch() == {}
    assert warnings(caplog).count("there is no topic a; the query continues without it") == 1
    service.logs["a", 0] = log(2, uid=8)
    assert query.batch() == {"a": range(2)}
    query.plans.stop_at_now()


def test_only_topics_that_were_asked_for_are_read_when_one_of_very_many_was_deleted() -> None:
    many = [f"t{n}" for n in range(200)]
    service = Service(**{name: log(1) for name in [*many, "other"]})
    query = Query(service, subscribe=",".join(many), **LENIENT)
    query.batch()
    del service.logs["t7", 0]
    service.logs["t8", 0].append(1)
    assert query.batch() == {"t8": range(1, 2)}
    assert set(query.at) == {(name, 0) for name in many if name != "t7"}


@pytest.mark.parametrize("given", [{}, BY_NAME])
def test_a_deleted_topic_is_named_with_what_to_do_where_losses_count(given: dict[str, str]) -> None:
    service = Service(a=log(10), b=log(3))
    query = Query(service, **given)
    query.batch()
    del service.logs["a", 0]
    again = restarted(service, query, **given)
    expected = r"^a/0 does not exist any more: the topic was deleted.*; failOnDataLoss false continues with"
    with pytest.raises(Gone, match=expected) as planned:
        again.replay()
    with pytest.raises(Gone, match=expected):
        again.batch()
    assert "\n" not in str(planned.value)


def test_a_topic_by_name_that_never_was_there_ends_a_query_where_losses_count() -> None:
    service = Service(a=log(10), b=log(3))
    query = Query(service, **BY_NAME)
    query.batch()
    again = restarted(service, query, subscribe="a,b,c")
    expected = r"^no topic 'c'; .*; leave it out, or set failOnDataLoss to false to continue"
    with pytest.raises(ReadFailed, match=expected):
        again.batch()
    assert restarted(service, query, subscribe="a,b,c", **LENIENT).batch() == {}


def test_what_a_broker_refuses_for_another_reason_is_raised_as_it_is() -> None:
    service = Service(a=log(10), b=log(3))
    query = Query(service, **BY_NAME, **LENIENT)
    query.batch()
    asked = len(service.asked)
    snapshot = service.snapshot

    def refused(one: Any) -> Any:
        service.asked.append(one)
        refuse(grpc.StatusCode.UNAVAILABLE, "no broker answers")

    service.snapshot = refused  # type: ignore[method-assign]
    with pytest.raises(ReadFailed, match=r"^no broker answers$"):
        query.batch()
    assert len(service.asked) == asked + 1
    service.snapshot = snapshot  # type: ignore[method-assign]
    assert query.batch() == {}


def test_brokers_that_disagree_about_what_is_there_lose_nothing() -> None:
    """One has not heard of the topic yet: its answer is no reason to leave out what is there."""
    service = Service(a=log(10))
    query = Query(service, **LENIENT)
    query.batch()
    snapshot = service.snapshot

    def young(one: Any) -> Any:
        if one.topics:
            refuse(grpc.StatusCode.NOT_FOUND, "no topic 'a'")
        return snapshot(one)

    service.snapshot = young  # type: ignore[method-assign]
    with pytest.raises(ReadFailed, match=r"^no topic 'a'$"):
        restarted(service, query, **LENIENT).replay()


# ---- a query of Spark 4.1 that is started again


def planned_by_4_1(service: Service, query: Query, **options: object) -> tuple[Query, Records]:
    again = restarted(service, query, **options)
    return again, again.plans.latest(None, everything=False)


def test_on_4_1_the_channel_stands_where_the_micro_batch_begins() -> None:
    service = Service(a=log(10))
    query = Query(service, commitChannel="lake")
    query.batch()
    query.plans.done(query.at)
    service.logs["a", 0].append(5)
    service.moves.clear()
    again, end = planned_by_4_1(service, query, commitChannel="lake")
    assert service.moves == []
    assert messages(again.plans.tasks(query.at, end)) == {"a": range(10, 15)}
    assert service.moves == [("a", True, {0: 10})]
    again.plans.latest(None, everything=False)
    assert len(service.moves) == 1


def test_on_4_1_the_channel_of_a_query_that_has_read_everything_stays() -> None:
    service = Service(a=log(10))
    query = Query(service, commitChannel="lake")
    query.batch()
    query.plans.done(query.at)
    again, end = planned_by_4_1(service, query, commitChannel="lake")
    assert again.plans.tasks(query.at, end) == []
    assert service.floors["a", 0] == 10


def test_on_4_1_a_partition_that_the_start_lacks_is_read_from_its_beginning() -> None:
    service = Service(a=log(10))
    query = Query(service, commitChannel="lake")
    query.batch()
    service.logs["new", 0] = log(5, start=2)
    service.moves.clear()
    again, end = planned_by_4_1(service, query, commitChannel="lake")
    assert messages(again.plans.tasks(query.at, end)) == {"new": range(2, 5)}
    assert sorted(service.moves) == [("a", True, {0: 10}), ("new", True, {0: 2})]
