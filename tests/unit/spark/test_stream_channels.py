"""The channel of a stream: where it stands, whose it is, and that a query reads the same again whatever it says."""

from __future__ import annotations

import pytest

from pyspark_nsqha.model import ReadFailed
from tests.unit.spark.stream_rig import Query, Service, log, messages
from tests.unit.spark.test_stream import restarted


def test_the_channel_stands_where_the_query_begins_and_follows_what_is_processed():
    service = Service(a=log(10))
    query = Query(service, commitChannel="lake", maxOffsetsPerTrigger=4)
    query.batch()
    assert service.moves == [("a", True, {0: 0})]
    query.batch()
    query.batch()
    assert service.moves[1:] == [("a", False, {0: 4}), ("a", False, {0: 8})]
    assert service.holds == []  # the channel holds
    service.moves.clear()
    service.logs["a", 0].append(1)
    restarted(service, query, commitChannel="lake").batch()
    assert service.moves[0] == ("a", True, {0: 10})


@pytest.mark.parametrize(("floor", "options"), [(9, {"startingOffsets": "latest"}), (9, {}), (12, {})])
def test_a_new_query_leaves_a_channel_that_stands_elsewhere_alone(floor: int, options: dict[str, str]):
    """Forward, retention would take what another reader has not read; backward, that one reads it again."""
    service = Service(a=log(12), b=log(2))
    service.floors["a", 0] = floor
    where = rf"a/0 at {floor} \(the query begins at {12 if options else 0}\);"
    with pytest.raises(ReadFailed, match=f"commitChannel lake is elsewhere: {where}.*startingChannel lake"):
        Query(service, commitChannel="lake", **options).batch()
    assert service.floors == {("a", 0): floor}


def test_a_new_query_takes_a_channel_that_stands_where_it_begins():
    service = Service(a=log(12))
    service.floors["a", 0] = 12
    query = Query(service, commitChannel="lake", startingOffsets="latest")
    for _ in range(2):
        service.logs["a", 0].append(4)
        query.batch()
    assert service.floors == {("a", 0): 16}


def test_the_channel_that_a_query_made_is_its_own_also_if_nothing_came_yet():
    service = Service(a=log(12))
    query = Query(service, commitChannel="lake", startingOffsets="latest")
    for _ in range(2):
        assert query.batch() == {}
    service.logs["a", 0].append(4)
    assert query.batch() == {"a": range(12, 16)} and service.floors == {("a", 0): 12}


@pytest.mark.parametrize("floor", [0, 3, 4, 8, 9])
def test_a_restarted_query_takes_its_channel_along_wherever_that_stands(floor: int):
    """The channel is one micro-batch behind; a checkpoint that was restored is behind it."""
    service = Service(a=log(12))
    query = Query(service, commitChannel="lake", maxOffsetsPerTrigger=4)
    query.batch()
    query.batch()
    service.floors["a", 0] = floor
    again = restarted(service, query, commitChannel="lake", maxOffsetsPerTrigger=4)
    assert again.replay() == {"a": range(4, 8)} and service.floors == {("a", 0): 4}
    assert again.batch() == {"a": range(8, 12)} and service.floors == {("a", 0): 8}


@pytest.mark.parametrize("options", [{}, {"commitChannel": "lake"}])
def test_the_first_micro_batch_is_planned_the_same_though_the_latest_moved(options: dict[str, str]):
    """Spark keeps no initial offset: after a failure in the first micro-batch it asks anew."""
    service = Service(a=log(12), idle=log(3))
    query = Query(service, startingOffsets="latest", **options)
    service.logs["a", 0].append(4)
    assert query.batch() == {"a": range(12, 16)}
    service.logs["a", 0].append(3)
    service.logs["idle", 0].append(1)
    again = restarted(service, query, startingOffsets="latest", **options)
    assert messages(again.plans.tasks(again.plans.initial(), query.at)) == {"a": range(12, 16)}
    assert service.floors == ({("a", 0): 12, ("idle", 0): 3} if options else {})
    assert again.batch() == {"a": range(16, 19), "idle": range(3, 4)}
    service.logs["idle", 0].append(1)
    assert again.batch() == {"idle": range(4, 5)}, "nothing is read twice of what stands"
    assert restarted(service, query, startingOffsets="latest", **options).replay() == {"idle": range(4, 5)}


def test_the_first_micro_batch_is_planned_again_whatever_the_channel_says():
    service = Service(a=log(12))
    query = Query(service, commitChannel="lake", maxOffsetsPerTrigger=4)
    query.batch()
    service.floors["a", 0] = 3
    again = restarted(service, query, commitChannel="lake")
    again.plans.initial()
    assert again.replay() == {"a": range(4)} and again.batch() == {"a": range(4, 12)}


def test_spark_4_1_takes_no_channel_of_others_and_its_own_after_a_restart():
    service = Service(a=log(12))
    service.floors["a", 0] = 9
    query = Query(service, commitChannel="lake")
    with pytest.raises(ReadFailed, match="commitChannel lake is elsewhere"):
        query.plans.latest(None, everything=False)
    query = Query(service, commitChannel="pipeline")
    service.floors.clear()
    query.batch()
    service.logs["a", 0].append(2)
    service.floors["a", 0] = 5
    again = restarted(service, query, commitChannel="pipeline")
    end = again.plans.latest(None, everything=False)
    again.plans.tasks(query.at, end)
    assert service.floors == {("a", 0): 12}


def test_a_new_topic_gets_the_channel_before_it_is_read():
    service = Service(a=log(10))
    query = Query(service, commitChannel="lake")
    query.batch()
    service.logs["new", 0] = log(5, start=2)
    query.batch()
    assert ("new", True, {0: 2}) in service.moves


def test_a_channel_that_is_no_readers_ends_the_query_at_once():
    service = Service(a=log(10))
    query = Query(service, commitChannel="lake")
    service.refuses = "channel lake is no reader's"
    with pytest.raises(ReadFailed, match="channel lake is no reader's"):
        query.batch()


def test_a_floor_that_cannot_be_moved_just_now_ends_nothing(caplog: pytest.LogCaptureFixture):
    service = Service(a=log(10))
    query = Query(service, commitChannel="lake")
    query.batch()
    service.refuses = "no leader"
    query.plans.done(query.at)
    assert "commitChannel lake was not moved: no leader" in caplog.text
