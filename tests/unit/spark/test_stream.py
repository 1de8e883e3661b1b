"""What a stream plans, what it refuses to read over, and what it keeps from retention."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pyspark.sql.types import StructType

from pyspark_nsqha.model import CutPoint, Gone, PinnedPartition, ReadFailed
from pyspark_nsqha.options import OptionError
from pyspark_nsqha.streams.offsets import PartitionOffset
from pyspark_nsqha.streams.stream import Plans, StreamReader, stream_options, stream_reader
from pyspark_nsqha.streams.witnesses import Witnesses
from tests.unit.spark.stream_rig import MESSAGE_BYTES, Query, Service, log

# ---- what is read


def test_a_query_reads_everything_once_and_then_nothing():
    service = Service(a=log(10), b=log(3))
    query = Query(service)
    assert query.batch() == {"a": range(10), "b": range(3)}
    assert query.batch() == {}
    service.logs["a", 0].append(5)
    assert query.batch() == {"a": range(10, 15)}


def test_a_new_query_begins_at_the_latest_unless_it_is_told_otherwise():
    assert Query(Service(a=log(10)), startingOffsets="latest").batch() == {}
    parsed = stream_options({"brokers": "b:1", "subscribe": "a"})
    assert parsed.bounds.start.place == -1


def test_where_a_query_begins_is_decided_once_however_often_spark_asks():
    service = Service(a=log(10))
    plans = Query(service, startingOffsets="latest").plans
    first = plans.initial()
    service.logs["a", 0].append(5)
    assert plans.initial() == first
    assert first["a", 0].offset == 10


def test_entries_without_messages_make_no_micro_batch():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    grown = service.logs["a", 0]
    pin_before = grown.pin

    def with_events(topic: str, partition: int, cuts: tuple[CutPoint, ...]) -> PinnedPartition:
        from dataclasses import replace

        pin = pin_before(topic, partition, cuts)
        return replace(pin, end=pin.end._replace(log_id=pin.end.log_id + 3), chain=99)

    grown.pin = with_events  # type: ignore[method-assign]
    assert query.batch() == {}


def test_a_new_topic_is_read_from_its_first_message_and_the_same_after_a_restart():
    service = Service(a=log(10))
    query = Query(service, startingOffsets="latest")
    service.logs["new", 0] = log(20, start=5)
    assert query.batch() == {"new": range(5, 20)}
    service.logs["new", 0].append(5)
    assert Query(service, query.checkpoint).replay() == {"new": range(5, 20)}


def test_a_new_topic_without_messages_is_known_from_then_on():
    service = Service(a=log(10))
    query = Query(service, startingOffsets="latest")
    service.logs["new", 0] = log(0)
    assert query.batch() == {}
    assert query.at["new", 0].offset == 0
    service.logs["new", 0].append(3)
    service.logs["new", 0].start = 2
    with pytest.raises(Gone, match=r"new/0: asked for \[0, 3\), there is \[2, 3\)"):
        query.batch()


def test_partitions_that_are_not_assigned_are_not_read():
    service = Service(a=log(3), b=log(3))
    parsed = {"assign": '{"a":[0]}'}
    given = {"brokers": "b:1", "startingOffsets": "earliest", **parsed}
    plans = Plans(stream_options(given), service, Witnesses(service.entry_at))  # type: ignore[arg-type]
    assert set(plans.initial()) == {("a", 0)}
    assert set(plans.latest(plans.initial(), everything=False)) == {("a", 0)}


def test_a_micro_batch_is_planned_the_same_after_a_restart():
    service = Service(a=log(10))
    query = Query(service, maxOffsetsPerTrigger=4)
    assert query.batch() == {"a": range(4)}
    service.logs["a", 0].append(10)
    assert Query(service, query.checkpoint).replay() == {"a": range(4)}


# ---- limits


def test_a_limit_is_shared_by_what_waits():
    query = Query(Service(a=log(90), b=log(9), c=log(1)), maxOffsetsPerTrigger=10)
    sizes = {topic: len(found) for topic, found in query.batch().items()}
    assert sum(sizes.values()) == 10
    assert sizes["c"] == 1
    assert sizes["a"] > sizes["b"]


def test_everything_means_everything():
    assert Query(Service(a=log(90)), maxOffsetsPerTrigger=10).batch(everything=True) == {"a": range(90)}


def test_bytes_limit_a_micro_batch_too():
    query = Query(Service(a=log(100)), maxBytesPerTrigger=10 * MESSAGE_BYTES)
    assert query.batch() == {"a": range(10)}
    assert query.batch() == {"a": range(10, 20)}


def test_the_smaller_one_of_both_limits_counts():
    both = {"maxBytesPerTrigger": 10 * MESSAGE_BYTES, "maxOffsetsPerTrigger": 7}
    assert Query(Service(a=log(100)), **both).batch() == {"a": range(7)}
    both["maxOffsetsPerTrigger"] = 70
    assert Query(Service(a=log(100)), **both).batch() == {"a": range(10)}


def test_a_message_larger_than_the_limit_is_a_micro_batch():
    assert Query(Service(a=log(3)), maxBytesPerTrigger=1).batch() == {"a": range(1)}


def test_too_few_messages_wait_for_others_but_not_for_ever():
    service = Service(a=log(10))
    query = Query(service, minOffsetsPerTrigger=10, maxTriggerDelay="60s")
    assert query.batch() == {"a": range(10)}
    service.logs["a", 0].append(9)
    assert query.batch() == {}
    query.now += 59
    assert query.batch() == {}
    query.now += 1
    assert query.batch() == {"a": range(10, 19)}
    service.logs["a", 0].append(10)
    assert query.batch() == {"a": range(19, 29)}


def test_the_time_without_any_message_counts_as_waiting():
    service = Service(a=log(10))
    query = Query(service, minOffsetsPerTrigger=10, maxTriggerDelay="60s")
    query.batch()
    query.now += 61
    assert query.batch() == {}
    service.logs["a", 0].append(1)
    assert query.batch() == {"a": range(10, 11)}


def test_available_now_ends_at_what_was_there_when_it_began():
    service = Service(a=log(10))
    query = Query(service, maxOffsetsPerTrigger=6, minOffsetsPerTrigger=6, maxTriggerDelay="1h")
    query.plans.stop_at_now()
    service.logs["a", 0].append(10)
    service.logs["late", 0] = log(10)
    assert query.batch() == {"a": range(6)}
    assert query.batch() == {"a": range(6, 10)}  # though these are fewer than the least
    assert query.batch() == {}
    assert ("late", 0) not in query.at


def test_spark_4_1_says_no_start_and_the_limit_counts_from_what_was_handed_out():
    service = Service(a=log(10))
    plans = Query(service, maxOffsetsPerTrigger=4).plans
    assert [plans.latest(None, everything=False)["a", 0].offset for _ in range(3)] == [4, 8, 10]


def test_spark_4_1_after_a_restart_has_no_limit_in_its_first_micro_batch(caplog: pytest.LogCaptureFixture):
    service = Service(a=log(10))
    query = Query(service, ["{}"], maxOffsetsPerTrigger=4)
    assert query.plans.latest(None, everything=False)["a", 0].offset == 10
    assert "first micro-batch has no limit" in caplog.text


def test_what_is_committed_is_reported_beside_what_is_read():
    query = Query(Service(a=log(10)), maxOffsetsPerTrigger=4)
    query.batch()
    assert query.plans.committed["a", 0].offset == 10


# ---- the same log


def restarted(service: Service, query: Query, **options: object) -> Query:
    return Query(service, query.checkpoint, **options)


def test_a_log_is_compared_once_after_a_start_and_once_per_leader():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    service.logs["a", 0].append(5)
    query.batch()
    assert service.entries_asked == []
    again = restarted(service, query)
    service.logs["a", 0].append(5)
    again.batch()
    assert service.entries_asked == [15]
    service.logs["a", 0].append(5)
    again.batch()
    assert service.entries_asked == [15]
    service.logs["a", 0].epoch = 2
    service.logs["a", 0].append(5)
    again.batch()
    assert service.entries_asked == [15, 25]


@pytest.mark.parametrize("restart", [False, True])
def test_a_log_that_was_exchanged_behind_a_leader_change_is_not_read_over(restart: bool):
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    other = log(6, epoch=2)
    other.append(20, writer=2)
    service.logs["a", 0] = other
    if restart:
        query = restarted(service, query)
    with pytest.raises(Gone, match=r"a/0: entry 10 of the log has chain [0-9a-f]{16}, .* unclean") as lost:
        query.batch()
    assert "failOnDataLoss false continues with what is left" in str(lost.value)
    assert "\n" not in str(lost.value)


def test_an_exchanged_log_is_noticed_in_a_micro_batch_that_is_planned_again():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    other = log(6, epoch=2)
    other.append(20, writer=2)
    service.logs["a", 0] = other
    with pytest.raises(Gone, match="a/0: entry 10 of the log has chain"):
        restarted(service, query).replay()


def test_a_start_that_spark_4_1_did_not_show_is_compared_before_it_is_read_from():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    other = log(6, epoch=2)
    other.append(20, writer=2)
    service.logs["a", 0] = other
    again = restarted(service, query)
    end = again.plans.latest(None, everything=False)
    with pytest.raises(Gone, match="a/0: entry 10 of the log has chain"):
        again.plans.tasks(query.at, end)


def test_a_shorter_log_is_waited_for_and_then_not_read_over():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    service.logs["a", 0] = log(6)
    began = query.now
    with pytest.raises(Gone, match="a/0: the log ends at offset 6, log id 6, before offset 10, log id 10"):
        query.batch()
    assert query.now - began >= 30  # timeoutMs


def test_a_leader_that_does_not_know_yet_what_is_committed_is_waited_for():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    whole, service.logs["a", 0] = service.logs["a", 0], log(6)
    sleep = query.plans._sleep

    def grows(seconds: float) -> None:
        sleep(seconds)
        whole.append(1)
        service.logs["a", 0] = whole

    query.plans._sleep = grows
    assert query.batch() == {"a": range(10, 11)}


def test_a_topic_that_was_made_anew_is_noticed():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    service.logs["a", 0] = log(20, uid=8)
    expected = r"a/0: the topic was deleted and created again: .* 0{15}7, the topic now has 0{15}8"
    with pytest.raises(Gone, match=expected):
        restarted(service, query).batch()


def test_a_topic_that_is_gone_is_noticed():
    service = Service(a=log(10), b=log(1))
    query = Query(service)
    query.batch()
    del service.logs["a", 0]
    with pytest.raises(Gone, match="a/0 does not exist any more: the topic was deleted"):
        query.batch()


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ({"subscribe": "a"}, {"subscribe": "b"}, "reads a, but subscribe does not name it any more: name it, or"),
        ({"assign": '{"a":[0]}'}, {"assign": '{"b":[0]}'}, "reads a/0, but assign does not name it"),
        ({"subscribePattern": "a|b"}, {"subscribePattern": "b"}, "reads a, but subscribePattern does not name it"),
    ],
)
def test_a_topic_that_is_not_subscribed_to_any_more_is_not_called_deleted(
    before: dict[str, str], now: dict[str, str], text: str, caplog: pytest.LogCaptureFixture
):
    service = Service(a=log(10), b=log(3))
    query = Query(service, **before)
    query.batch()
    service.logs["a", 0].append(1)
    with pytest.raises(ReadFailed, match=text):
        restarted(service, query, **now).batch()
    went_on = restarted(service, query, failOnDataLoss="false", **now)
    assert went_on.batch() == ({"b": range(3)} if "subscribePattern" not in now else {})
    assert text.split(":")[0] in caplog.text


def test_what_retention_took_unread_is_noticed():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    service.logs["a", 0].append(20)
    service.logs["a", 0].start = 15
    with pytest.raises(Gone, match=r"a/0: asked for \[10, 30\), there is \[15, 30\)"):
        query.batch()


def test_a_witness_that_retention_took_is_no_loss_if_nothing_unread_went_with_it():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    service.logs["a", 0].append(5)
    service.logs["a", 0].start = 10
    assert restarted(service, query).batch() == {"a": range(10, 15)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda logs: logs.update({("a", 0): log(20, uid=8)}), {"a": range(20)}),
        (lambda logs: logs.pop(("a", 0)), {}),
        (lambda logs: logs.update({("a", 0): log(6)}), {}),
        (lambda logs: setattr(logs["a", 0], "start", 10) or logs["a", 0].append(5), {"a": range(10, 15)}),
    ],
)
def test_without_fail_on_data_loss_what_is_there_is_read_on(change: Any, expected: dict[str, range]):
    service = Service(a=log(10))
    query = Query(service, failOnDataLoss="false")
    query.batch()
    change(service.logs)
    assert query.batch() == expected
    assert query.batch() == {}
    if ("a", 0) in service.logs:
        before = service.logs["a", 0].end
        service.logs["a", 0].append(2)
        assert query.batch() == {"a": range(before, before + 2)}


def test_without_fail_on_data_loss_the_rest_of_a_planned_micro_batch_is_read():
    service = Service(a=log(10))
    query = Query(service, failOnDataLoss="false")
    query.batch()
    service.logs["a", 0] = log(6)
    assert restarted(service, query, failOnDataLoss="false").replay() == {"a": range(6)}


def test_without_fail_on_data_loss_a_micro_batch_that_is_gone_is_empty():
    service = Service(a=log(10))
    query = Query(service, failOnDataLoss="false", maxOffsetsPerTrigger=8)
    query.batch()
    query.batch()
    service.logs["a", 0] = log(6)
    assert restarted(service, query, failOnDataLoss="false").replay() == {}


# ---- what keeps messages


def test_a_hold_protects_a_micro_batch_and_is_made_anew_before_it_ends():
    service = Service(a=log(10))
    query = Query(service, holdMs=90_000, maxOffsetsPerTrigger=2)
    query.batch()
    assert len(service.holds) == 1
    query.now += 29
    query.batch()
    assert (len(service.holds), service.released) == (1, [])
    query.now += 2
    tasks_before = service.holds[-1]
    query.batch()
    assert (len(service.holds), service.released) == (2, [tasks_before])


def test_a_new_topic_is_held_at_once():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    service.logs["new", 0] = log(10)
    query.batch()
    assert len(service.holds) == 2


def test_waiting_for_a_leader_makes_one_hold():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    service.logs["a", 0] = log(6)
    with pytest.raises(Gone):
        restarted(service, query).replay()
    assert len(service.holds) == 2


def test_a_hold_is_named_by_the_tasks_so_that_reading_renews_it():
    service = Service(a=log(10))
    query = Query(service)
    query.batch()
    [task] = query.plans.tasks(query.plans.initial(), query.at)
    assert task[0].split.hold_id == service.holds[-1]
    query.plans.stop()
    assert service.released == [service.holds[-1]]


def test_without_a_time_nothing_is_held():
    service = Service(a=log(10))
    Query(service, holdMs=0).batch()
    assert service.holds == []


# ---- the reader that Spark sees


SCHEMA = StructType.fromJson(
    {"type": "struct", "fields": [{"name": "offset", "type": "long", "nullable": True, "metadata": {}}]}
)


def reader(**options: object) -> StreamReader:
    given = {"brokers": "b:1", "subscribe": "a", **{name: str(value) for name, value in options.items()}}
    return stream_reader(given, None, SCHEMA)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "ReadAllAvailable"),
        ({"minOffsetsPerTrigger": 3}, "ReadMinRows"),
        ({"maxBytesPerTrigger": "3m"}, "ReadMaxBytes"),
        ({"maxOffsetsPerTrigger": 3, "maxBytesPerTrigger": "3m"}, "ReadMaxRows"),
    ],
)
def test_spark_hears_one_limit_and_all_are_heeded(options: dict[str, object], kind: str):
    assert type(reader(**options).getDefaultReadLimit()).__name__ == kind


def test_tasks_get_no_plans():
    sent = pickle.loads(pickle.dumps(reader()))
    assert sent._plans is None
    assert list(sent.read(type("Partition", (), {"value": None})())) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay: 'soon' is not a duration such as 90s, 15m or 500ms"),
        (
            {"minOffsetsPerTrigger": 5, "maxOffsetsPerTrigger": 4},
            "minOffsetsPerTrigger: 5 is more than maxOffsetsPerTrigger, 4",
        ),
        ({"maxOffsetsPerTrigger": 0}, "maxOffsetsPerTrigger: '0' is not a whole number from 1 to"),
        ({"endingOffsets": "latest"}, "option endingOffsets is not for readStream but for read: leave it out"),
        ({"commitChannel": "a b"}, "commitChannel: 'a b' is not a channel name"),
        ({"commitChannel": "x#ephemeral"}, "commitChannel: x#ephemeral is ephemeral: it would keep nothing"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], text: str):
    with pytest.raises(OptionError) as refused:
        reader(**options)
    assert str(refused.value).startswith(text)


def test_a_witness_is_an_entry_that_was_committed_when_the_offset_was_chosen():
    service = Service(a=log(10))
    query = Query(service, maxOffsetsPerTrigger=4)
    query.batch()
    assert query.at["a", 0] == PartitionOffset(4, 7, 10, 1, service.logs["a", 0].chains[10], first=0)
