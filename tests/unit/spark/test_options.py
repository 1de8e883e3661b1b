"""What may be said in `.option(..)`, what it means, and the exact words for what may not."""

from __future__ import annotations

import pickle

import pytest

from pyspark_nsqha.options import (
    EARLIEST,
    LATEST,
    MIB,
    BatchOptions,
    Bound,
    Given,
    OptionError,
    Reading,
    Tls,
    TopicSelection,
    batch_options,
    show_size,
)

LEAST = {"brokers": "127.0.0.1:4155", "subscribe": "orders"}
NOON = 1_795_262_005_000
NOON_NS = NOON * 10**6


def parsed(**options: str) -> BatchOptions:
    return batch_options(LEAST | options)


def test_a_read_needs_brokers_and_topics_only() -> None:
    options = parsed()
    assert options.connection is not None
    assert options.connection.brokers == ("127.0.0.1:4155",)
    assert (options.connection.timeout_ms, options.connection.retries) == (30_000, 3)
    assert options.subscription == TopicSelection(topics=("orders",))
    assert options.bounds.start == Bound("startingOffsets", EARLIEST)
    assert options.bounds.end == Bound("endingOffsets", LATEST)
    assert options.reading == Reading()
    assert (options.hold_ms, options.pushdown, options.ids, options.path) == (900_000, False, (), "")


def test_names_are_read_in_any_case() -> None:
    options = batch_options({"BROKERS": "a:1", "subscribe": "orders", "splitbytes": "1m", "FailOnDataLoss": "FALSE"})
    assert options.reading.split_bytes == MIB
    assert not options.reading.fail_on_data_loss


def test_files_need_no_broker() -> None:
    options = batch_options({"path": "/data", "subscribe": "orders"})
    assert (options.connection, options.path) == (None, "/data")


def test_subscriptions_are_by_name_by_pattern_or_by_partition() -> None:
    assert parsed(subscribe="b, a,,a").subscription.topics == ("a", "b")
    assert batch_options({"brokers": "a:1", "subscribePattern": "ord.*"}).subscription.pattern == "ord.*"
    assigned = batch_options({"brokers": "a:1", "assign": '{"b":[1,0],"a":[2]}'}).subscription
    assert assigned.assigned == (("a", (2,)), ("b", (0, 1)))
    assert assigned.names == ("a", "b")
    assert assigned.wants("b", 1)
    assert not assigned.wants("b", 2)


def test_times_go_before_offsets_and_the_one_time_before_those_of_partitions() -> None:
    offsets, times = '{"orders":{"0":5}}', f'{{"orders":{{"0":{NOON}}}}}'
    by_offset = parsed(startingOffsets=offsets, endingOffsets=offsets).bounds
    assert by_offset.start.offsets == by_offset.end.offsets == ((("orders", 0), 5),)
    by_times = parsed(startingOffsets=offsets, startingOffsetsByTimestamp=times).bounds.start
    assert (by_times.offsets, by_times.times_ns) == ((), ((("orders", 0), NOON_NS),))
    by_time = parsed(startingOffsets=offsets, startingOffsetsByTimestamp=times, startingTimestamp="1").bounds.start
    assert (by_time.times_ns, by_time.time_ns) == ((), 10**6)
    ending = parsed(endingOffsets=offsets, endingOffsetsByTimestamp=times, endingTimestamp="2").bounds.end
    assert (ending.offsets, ending.times_ns, ending.time_ns) == ((), (), 2 * 10**6)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (str(NOON), NOON_NS),
        ("0", 0),
        ("978307200000", 978_307_200 * 10**9),
        ("2026-11-21T12:33:25Z", 1_795_264_405 * 10**9),
        ("2026-11-21T13:33:25.000001+01:00", 1_795_264_405 * 10**9 + 1000),
    ],
)
def test_times_are_milliseconds_or_iso_with_a_zone(text: str, ns: int) -> None:
    assert parsed(startingTimestamp=text).bounds.start.time_ns == ns


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("64k", 65536), ("3M", 3 * MIB), ("1g", 1 << 30), ("2 MiB", 2 * MIB), ("5mb", 5 * MIB)],
)
def test_sizes_have_units_of_1024(text: str, size: int) -> None:
    assert parsed(splitBytes=text).reading.split_bytes == size


def test_sizes_are_shown_as_they_are_given() -> None:
    assert [show_size(n) for n in (0, 1000, 1 << 10, 64 * MIB, 3 << 30)] == ["0", "1000", "1k", "64m", "3g"]


def test_choices_are_read_in_any_case_and_kept_in_one() -> None:
    reading = parsed(mode="permissive", verify="CRC", columns=" value , offset", minPartitions="8").reading
    assert (reading.mode, reading.verify, reading.columns) == ("PERMISSIVE", "crc", ("value", "offset"))
    assert reading.min_partitions == 8


def test_where_keys_are_is_in_no_repr_and_goes_with_the_plan() -> None:
    secret = {"nsqha.tls.cert": "/secret/cert", "nsqha.tls.key": "/secret/key", "nsqha.tls.ca": "/secret/ca"}
    options = parsed(**secret)
    assert "secret" not in repr(options)
    assert options.connection is not None
    assert options.connection.tls == Tls("/secret/cert", "/secret/key", "/secret/ca")
    assert pickle.loads(pickle.dumps(options)) == options


REFUSED = [
    ({"brokers": ""}, "brokers is missing: the host:port of a broker's --grpc-address, or several with commas"),
    ({"brokers": "a:1,b"}, "brokers: 'b' is not host:port; give a broker's --grpc-address"),
    ({"brokers": "a:65536"}, "brokers: 'a:65536' is not host:port; give a broker's --grpc-address"),
    ({"brokers": "http://a:1"}, "brokers: 'http://a:1' is not host:port; give a broker's --grpc-address"),
    ({"splitByte": "1"}, "there is no option 'splitbyte'; did you mean splitBytes?"),
    (
        {"kafka.bootstrap.servers": "a"},
        "option kafka.bootstrap.servers is one of Kafka's connector: "
        "write brokers, with the addresses of --grpc-address",
    ),
    (
        {"option.brokers": "a:1"},
        "Spark drops the options of a table of a Python source: write CREATE TEMPORARY VIEW instead of TABLE",
    ),
    ({"maxOffsetsPerTrigger": "1"}, "option maxOffsetsPerTrigger is not for read but for readStream: leave it out"),
    ({"topic": "orders"}, "option topic is not for read but for write and writeStream: leave it out"),
    (
        {"assign": '{"orders":[0]}'},
        "give exactly one of subscribe, subscribePattern or assign; subscribe and assign are given",
    ),
    ({"subscribe": " ,"}, "subscribe is empty; it takes names of topics with commas between them"),
    ({"subscribe": "a b"}, "subscribe: 'a b' is not a topic name"),
    (
        {"subscribe": "a#ephemeral"},
        "subscribe: a#ephemeral is ephemeral: it has no log to read; consume it instead",
    ),
    ({"startingOffsets": "latest"}, "startingOffsets: latest would read nothing in a batch; write earliest or offsets"),
    (
        {"startingOffsets": '{"orders":{"0":-1}}'},
        "startingOffsets: orders/0 begins at -1 (latest), which would read nothing in a batch",
    ),
    ({"endingOffsets": "earliest"}, "endingOffsets: earliest would read nothing; write latest or offsets"),
    (
        {"endingOffsets": '{"orders":{"0":-2}}'},
        "endingOffsets: orders/0 ends at -2 (earliest), which would read nothing",
    ),
    (
        {"startingOffsets": "newest"},
        'startingOffsets: \'newest\' is not earliest, latest or JSON such as {"orders":{"0":23,"1":-2}}',
    ),
    (
        {"startingOffsets": '{"orders":{"0":5}'},
        'startingOffsets: \'{"orders":{"0":5}\' is not JSON such as {"orders":{"0":23,"1":-2}}',
    ),
    (
        {"startingOffsets": '{"orders":[5]}'},
        'startingOffsets: \'orders\' needs partitions, as in {"orders":{"0":23,"1":-2}}',
    ),
    ({"startingOffsets": '{"orders":{"0":5,"0":6}}'}, "startingOffsets: '0' is given twice"),
    (
        {"startingOffsets": '{"orders":{"0":-3}}'},
        "startingOffsets: orders/0 has '-3'; give an offset, -2 (earliest) or -1 (latest)",
    ),
    (
        {"startingOffsets": '{"orders":{"0":true}}'},
        "startingOffsets: orders/0 has 'True'; give an offset, -2 (earliest) or -1 (latest)",
    ),
    (
        {"startingOffsets": '{"orders":{"1023":1}}'},
        "startingOffsets: '1023' is not a partition of orders; partitions are 0 to 1022",
    ),
    ({"startingOffsets": "{}"}, 'startingOffsets is empty; write it as {"orders":{"0":23,"1":-2}}'),
    (
        {"startingTimestamp": "yesterday"},
        "startingTimestamp: 'yesterday' is not a time: give milliseconds since 1970, or 2026-11-20T10:00:00Z",
    ),
    (
        {"startingTimestamp": "2026-11-20T10:00"},
        "startingTimestamp: '2026-11-20T10:00' has no zone; write 2026-11-20T10:00Z for UTC, or 2026-11-20T10:00+01:00",
    ),
    (
        {"endingTimestamp": str(NOON_NS)},
        f"endingTimestamp: '{NOON_NS}' is not a time: give milliseconds since 1970, or 2026-11-20T10:00:00Z",
    ),
    (
        {"endingTimestamp": str(NOON * 1000)},
        f"endingTimestamp: '{NOON * 1000}' is not between 1970 and 2262; numbers are milliseconds",
    ),
    (
        {"startingTimestamp": "1795262005"},
        "startingTimestamp: '1795262005' looks like seconds: write milliseconds since 1970",
    ),
    (
        {"endingOffsetsByTimestamp": '{"orders":{"0":1795262005}}'},
        "endingOffsetsByTimestamp: '1795262005' looks like seconds: write milliseconds since 1970",
    ),
    (
        {"startingTimestamp": str(NOON), "endingTimestamp": "2026-11-20T10:00:00Z"},
        "startingTimestamp is not before endingTimestamp: this would read nothing",
    ),
    (
        {"startingTimestamp": str(NOON), "endingTimestamp": str(NOON)},
        "startingTimestamp is not before endingTimestamp: this would read nothing",
    ),
    (
        {
            "startingOffsetsByTimestamp": f'{{"orders":{{"0":{NOON},"1":{NOON}}}}}',
            "endingOffsetsByTimestamp": f'{{"orders":{{"0":{NOON + 1},"1":{NOON - 1}}}}}',
        },
        "startingOffsetsByTimestamp of orders/1 is not before endingOffsetsByTimestamp: this would read nothing",
    ),
    (
        {"startingTimestamp": str(NOON), "endingOffsetsByTimestamp": f'{{"orders":{{"0":{NOON}}}}}'},
        "startingTimestamp of orders/0 is not before endingOffsetsByTimestamp: this would read nothing",
    ),
    (
        {"startingOffsetsByTimestamp": '{"orders":{"0":"x"}}'},
        "startingOffsetsByTimestamp: 'x' is not a time: give milliseconds since 1970, or 2026-11-20T10:00:00Z",
    ),
    (
        {"startingOffsetsByTimestampStrategy": "earliest"},
        "startingOffsetsByTimestampStrategy: 'earliest' is not one of error, latest",
    ),
    ({"startingChannel": "a b"}, "startingChannel: 'a b' is not a channel name"),
    (
        {"startingChannel": "audit", "startingOffsets": "earliest"},
        "startingChannel and startingOffsets both say where to begin: leave one out",
    ),
    ({"failOnDataLoss": "no"}, "failOnDataLoss: 'no' is neither true nor false"),
    ({"minPartitions": "0"}, "minPartitions: '0' is not a whole number from 1 to 100000"),
    ({"splitBytes": "64 megabytes"}, "splitBytes: '64 megabytes' is not a size such as 64m, 1g or 1048576"),
    ({"splitBytes": "1k"}, "splitBytes: '1k' is not between 64k and 64g"),
    ({"verify": "yes"}, "verify: 'yes' is not one of full, crc, none"),
    ({"mode": "DROP"}, "mode: 'DROP' is not one of FAILFAST, PERMISSIVE, DROPMALFORMED"),
    ({"ids": "0123"}, "ids: '0123' is not a message id of 16 hex digits, 0-9 and a-f"),
    ({"ids": ","}, "ids is empty; it takes message ids of 16 hex digits with commas between them"),
    ({"holdMs": "-1"}, "holdMs: '-1' is not a whole number from 0 to 21600000"),
    ({"timeoutMs": "1s"}, "timeoutMs: '1s' is not a whole number from 100 to 3600000"),
    (
        {"nsqha.tls.cert": "/cert"},
        "TLS needs nsqha.tls.cert, nsqha.tls.key and nsqha.tls.ca; give nsqha.tls.key and nsqha.tls.ca too",
    ),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=[f"{n}-{next(iter(o))}" for n, (o, _) in enumerate(REFUSED)])
def test_what_cannot_be_is_refused_in_one_line_that_says_what_to_write(options: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError) as refusal:
        batch_options(LEAST | options)
    assert str(refusal.value) == text


@pytest.mark.parametrize(
    ("assign", "text"),
    [
        ("[0]", "assign: '[0]' is not JSON such as {\"orders\":[0,1]}"),
        ("{}", 'assign is empty; it names partitions, as in {"orders":[0,1]}'),
        ('{"orders":[]}', 'assign: orders needs a list of partitions, as in {"orders":[0,1]}'),
        ('{"orders":["a"]}', "assign: 'a' is not a partition of orders; partitions are 0 to 1022"),
        (
            '{"a#ephemeral":[0]}',
            "assign: a#ephemeral is ephemeral: it has no log to read; consume it instead",
        ),
    ],
)
def test_assignments_are_refused_with_an_example(assign: str, text: str) -> None:
    with pytest.raises(OptionError) as refusal:
        batch_options({"brokers": "a:1", "assign": assign})
    assert str(refusal.value) == text


def test_no_subscription_at_all_is_refused() -> None:
    with pytest.raises(OptionError, match="give exactly one of subscribe, subscribePattern or assign; none is given"):
        batch_options({"brokers": "a:1"})


def test_deep_json_is_refused_and_no_stack_ends() -> None:
    with pytest.raises(OptionError, match=r"^assign: '\[\[\[.*\.\.\.' is not JSON"):
        batch_options({"brokers": "a:1", "assign": "[" * 100_000})


def test_what_nobody_knows_is_listed() -> None:
    with pytest.raises(OptionError, match=r"no option 'zzz'; those of readStream are .*commitChannel, .*verify"):
        Given({"zzz": "1"}, "readStream")


def test_before_anybody_knows_the_use_options_of_all_uses_are_taken() -> None:
    Given({"maxOffsetsPerTrigger": "1", "endingOffsets": "latest"}, None)
