"""The sink without Spark: from Arrow batches to commands, and what is refused before anything is sent."""

from __future__ import annotations

import pickle
import random

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.types import StructType

from pyspark_nsqha.options import OptionError
from pyspark_nsqha.writing.publisher import Command
from pyspark_nsqha.writing.sink import (
    JOIN_BYTES_MAX,
    NsqhaStreamWriter,
    NsqhaWriter,
    Published,
    SinkColumns,
    SinkOptions,
    SinkRefused,
    commands,
)
from tests.unit.spark.scripted_nsqd import ScriptedNsqd, _mpub


def schema(ddl: str) -> StructType:
    fields = []
    for column in ddl.split(", "):
        name, kind = column.split(" ")
        fields.append({"name": name, "type": kind, "nullable": True, "metadata": {}})
    return StructType.fromJson({"type": "struct", "fields": fields})


def options(**given: object) -> dict[str, str]:
    return {"nsqd": "127.0.0.1:1", **{name: str(value) for name, value in given.items()}}


def decoded(found: list[Command]) -> list[tuple[str, int, bytes]]:
    """(topic, defer ms, body) of each message, and a check of each command's own numbers."""
    messages = []
    for command in found:
        line, _, rest = command.wire.partition(b"\n")
        name, topic, *delay = line.decode().split(" ")
        assert int.from_bytes(rest[:4], "big") == len(rest) - 4
        bodies = _mpub(rest[4:]) if name == "MPUB" else [rest[4:]]
        assert command.messages == len(bodies)
        messages += [(topic, int(delay[0]) if delay else 0, body) for body in bodies]
    return messages


def sent(batch: pa.RecordBatch, ddl: str, first_row: int = 0, **given: object) -> list[Command]:
    parsed = SinkOptions.parse(options(**given))
    return list(commands(batch, SinkColumns.of(schema(ddl), parsed), parsed, first_row=first_row))


def values(*bodies: bytes | str | None, kind: pa.DataType | None = None) -> pa.RecordBatch:
    return pa.record_batch([pa.array(bodies, kind)], names=["value"])


# ---- from rows to commands


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_sent_once_in_order_with_its_topic_and_delay(seed: int):
    chance = random.Random(seed)
    n = chance.randrange(1, 400)
    rows = [
        (
            chance.choice(["a", "b", "c#ephemeral"]) if seed % 2 else "a",
            chance.choice([None, 0, 0, 0, 5, 60_000]) if seed % 3 else None,
            chance.randbytes(chance.choice([1, 2, 30, 900, 5000])),
        )
        for _ in range(n)
    ]
    # A slice, as a batch that Spark cut: its arrays do not begin at 0.
    whole = pa.record_batch(
        [
            pa.array(["z", *[row[0] for row in rows]]),
            pa.array([9, *[row[1] for row in rows]], pa.int32()),
            pa.array([b"zz", *[row[2] for row in rows]], pa.binary()),
        ],
        names=["topic", "defer_ms", "value"],
    )
    found = sent(whole.slice(1), "topic string, defer_ms integer, value binary", batchBytes=4096)
    assert decoded(found) == [(topic, delay or 0, body) for topic, delay, body in rows]
    for command in found:
        assert len(command.wire) <= 4096 + 100 or command.messages == 1


def test_rows_of_one_topic_become_few_commands():
    found = sent(values(*[b"x" * 600] * 10_000, kind=pa.binary()), "value binary", topic="t")
    assert [command.messages for command in found] == [1736] * 5 + [1320]
    assert max(len(command.wire) for command in found) <= (1 << 20) + 20


def test_a_value_larger_than_a_batch_goes_alone():
    found = sent(values(b"a", b"b" * 5000, b"c", kind=pa.binary()), "value binary", topic="t", batchBytes=1024)
    assert [command.messages for command in found] == [1, 1, 1]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()])
def test_binary_and_text_of_any_arrow_kind_are_sent_as_they_are(kind: pa.DataType):
    bodies = ["ä", "b"] if pa.types.is_string(kind) or pa.types.is_large_string(kind) else ["ä".encode(), b"b"]
    found = sent(values(*bodies, kind=kind), "value string", topic="t")
    assert [body for _, _, body in decoded(found)] == ["ä".encode(), b"b"]


def test_memory_beside_a_batch_is_bounded_and_borders_lose_nothing():
    bodies = [bytes([i]) * (JOIN_BYTES_MAX // 10) for i in range(25)]
    found = sent(values(*bodies, kind=pa.binary()), "value binary", topic="t", maxMessageBytes="4m", batchBytes="4m")
    assert [body for _, _, body in decoded(found)] == bodies


def test_an_empty_batch_is_no_command():
    assert sent(values(kind=pa.binary()), "value binary", topic="t") == []


def test_the_option_topic_beats_the_column():
    batch = pa.record_batch([pa.array([b"v"]), pa.array([None], pa.string())], names=["value", "topic"])
    assert decoded(sent(batch, "value binary, topic string", topic="mine")) == [("mine", 0, b"v")]


# ---- rows that cannot be sent


@pytest.mark.parametrize(
    ("rows", "given", "text"),
    [
        ([b"a", None], {}, "row 12: value is null, and NSQ has no null: filter such rows out"),
        ([b"a", b"b", b""], {}, "row 13: value is empty, and NSQ refuses empty messages: filter such rows out"),
        (
            [b"a", b"x" * 11],
            {"maxMessageBytes": 10},
            "row 12: value has 11 bytes, more than 10 (option maxMessageBytes, set it to the broker's --max-msg-size)",
        ),
    ],
)
def test_a_value_that_cannot_be_sent_is_refused_with_its_row(rows: list[bytes], given: dict[str, int], text: str):
    with pytest.raises(SinkRefused) as refused:
        sent(values(*rows, kind=pa.binary()), "value binary", first_row=10, topic="t", **given)
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("topic", "delay", "text"),
    [
        (None, 0, "row 2: topic is null: fill it, or set option topic"),
        ("a b", 0, "row 2: 'a b' is not a topic name"),
        ("", 0, "row 2: '' is not a topic name"),
        ("x" * 65, 0, "row 2: 'xxx"),
        ("a\n", 0, "row 2: 'a\\n' is not a topic name"),
        ("ok", -1, "row 2: defer_ms is -1: it cannot be negative"),
    ],
)
def test_a_row_with_a_bad_topic_or_delay_is_refused_before_any_is_sent(topic: str | None, delay: int, text: str):
    batch = pa.record_batch(
        [pa.array(["good", topic], pa.string()), pa.array([b"v", b"v"]), pa.array([1, delay])],
        names=["topic", "value", "defer_ms"],
    )
    parsed = SinkOptions.parse(options())
    columns = SinkColumns.of(schema("topic string, value binary, defer_ms long"), parsed)
    with pytest.raises(SinkRefused) as refused:
        next(commands(batch, columns, parsed))
    assert str(refused.value).startswith(text)


# ---- columns and options


@pytest.mark.parametrize(
    ("ddl", "given", "text"),
    [
        ("value binary, key binary", {"topic": "t"}, "column 'key' cannot be written: a message has only value, topic"),
        ("value binary, Headers string", {"topic": "t"}, "column 'Headers' cannot be written"),
        ("value binary, partition integer", {"topic": "t"}, "column 'partition' cannot be written"),
        ("topic string", {}, "there is no column 'value' among topic"),
        ("value binary", {}, "no topic is given: set option topic, or add a column 'topic'"),
        ("value integer", {"topic": "t"}, "column 'value' is int: cast it to binary or string"),
        ("value binary, topic binary", {}, "column 'topic' is binary: cast it to string"),
        ("value binary, defer_ms double", {"topic": "t"}, "column 'defer_ms' is double: cast it to bigint"),
        ("value binary, VALUE binary", {"topic": "t"}, "there are two columns 'value'"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(ddl: str, given: dict[str, str], text: str):
    with pytest.raises(SinkRefused) as refused:
        NsqhaWriter(schema(ddl), False, options(**given))
    assert str(refused.value).startswith(text)
    assert "\n" not in str(refused.value)


def test_unknown_columns_are_left_out_if_the_user_says_so():
    batch = pa.record_batch([pa.array([1]), pa.array([b"v"])], names=["offset", "VALUE"])
    found = sent(batch, "offset long, VALUE binary", topic="t", ignoreColumns="true")
    assert decoded(found) == [("t", 0, b"v")]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nsqd": ""}, "nsqd is missing: the host:port of a broker's --tcp-address, or several with commas"),
        ({"nsqd": "a:1,b"}, "nsqd: 'b' is not host:port; give a broker's --tcp-address"),
        ({"topic": "a b"}, "option topic: 'a b' is not a topic name"),
        ({"bathBytes": "1"}, "there is no option 'bathbytes'; did you mean batchBytes?"),
        ({"Brokers": "b:4152"}, "option brokers is for reading: write nsqd, with --tcp-address of brokers"),
        ({"subscribe": "t"}, "option subscribe is not for write but for read and readStream: leave it out"),
        ({"batchBytes": "1q"}, "batchBytes: '1q' is not a size such as"),
        ({"batchBytes": "1"}, "batchBytes: '1' is not between 1k and 1g"),
        ({"timeoutMs": "0"}, "timeoutMs: '0' is not a whole number from 100 to"),
        ({"ignoreColumns": "yes"}, "ignoreColumns: 'yes' is neither true nor false"),
        ({"nsqha.tls.cert": "c.pem"}, "nsqha.tls.cert and nsqha.tls.key go together: one of them is missing"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(given: dict[str, str], text: str):
    with pytest.raises((OptionError, SinkRefused)) as refused:
        SinkOptions.parse(options(**given))
    assert str(refused.value).startswith(text)
    assert "\n" not in str(refused.value)


def test_options_are_read_without_regard_to_case_and_with_units():
    parsed = SinkOptions.parse({"NSQD": "a:1, b:2", "BATCHBYTES": "2m", "checkpointLocation": "x", "NSQHA.TLS": "true"})
    assert (parsed.nsqd, parsed.batch_bytes, parsed.security.tls) == (("a:1", "b:2"), 2 << 20, True)


def test_a_log_is_not_overwritten():
    with pytest.raises(SinkRefused, match="a log cannot be overwritten: use mode"):
        NsqhaWriter(schema("value binary"), True, options(topic="t"))


# ---- a task


def test_a_task_publishes_its_batches_and_says_how_many():
    with ScriptedNsqd(["lose"]) as nsqd:
        writer = NsqhaWriter(schema("value binary"), False, options(topic="t", nsqd=nsqd.address))
        writer = pickle.loads(pickle.dumps(writer))
        message = writer.write(iter([values(b"1", b"2"), values(b"3")]))
        assert message == Published(published=3, possible_duplicates=message.possible_duplicates)
        assert message.possible_duplicates in (2, 3)  # the third may have been on its way
        assert nsqd.bodies[-3:] == [b"1", b"2", b"3"]


@pytest.mark.parametrize(("partition", "attempt"), [(0, 1), (1, 0), (3, 4)])
def test_another_task_and_another_attempt_begin_with_another_broker(
    monkeypatch: pytest.MonkeyPatch, partition: int, attempt: int
):
    class Task:
        def partitionId(self) -> int:
            return partition

        def attemptNumber(self) -> int:
            return attempt

    monkeypatch.setattr(TaskContext, "get", Task)
    with ScriptedNsqd() as first, ScriptedNsqd() as second:
        nsqd = f"{first.address},{second.address}"
        NsqhaWriter(schema("value binary"), False, options(topic="t", nsqd=nsqd)).write(iter([values(b"1")]))
        assert (first.bodies, second.bodies) == ([], [b"1"])


def test_rows_are_counted_over_a_task_and_the_error_says_what_is_published():
    with ScriptedNsqd() as nsqd:
        writer = NsqhaWriter(schema("value binary"), False, options(topic="t", nsqd=nsqd.address))
        with pytest.raises(SinkRefused, match=r"^row 4: value is empty, .*; this task has published [02] messages$"):
            writer.write(iter([values(b"1", b"2"), values(b"3", b"")]))
        assert b"3" not in nsqd.bodies


def test_a_commit_warns_of_possible_duplicates(caplog: pytest.LogCaptureFixture):
    writer = NsqhaStreamWriter(schema("value binary"), False, options(topic="t"))
    writer.commit([Published(5, 0), Published(4, 2), None], 7)
    assert "micro-batch 7 published 9 messages; up to 2 of them may be stored twice" in caplog.text


def test_an_abort_says_what_stays_published(caplog: pytest.LogCaptureFixture):
    writer = NsqhaWriter(schema("value binary"), False, options(topic="t"))
    writer.abort([Published(5, 0), None])
    assert "what is published stays published: 5 messages of the 1 successful tasks" in caplog.text


def test_a_secret_is_not_among_what_goes_to_the_tasks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NSQHA_AUTH_SECRET", "hush-hush")
    writer = NsqhaWriter(schema("value binary"), False, options(topic="t"))
    assert b"hush-hush" not in pickle.dumps(writer)
