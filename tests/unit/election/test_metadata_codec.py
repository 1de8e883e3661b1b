from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.election import codec
from nsqha.election.codec import FORMAT, decode, encode, from_plain, to_plain
from nsqha.election.model import (
    ChannelInfo,
    ChannelList,
    ClusterRecord,
    NodeInfo,
    PartitionMeta,
    StoredRecord,
    Tombstone,
    TopicRecord,
    TopicSettings,
)
from nsqha.errors import ConfigError, LogCorrupt

UIDS = st.integers(1, (1 << 64) - 1)
NAMES = st.from_regex(r"[.a-zA-Z0-9_-]{1,64}", fullmatch=True)
SETTINGS = st.builds(
    TopicSettings,
    sync=st.sampled_from([None, "always", "interval", "none"]),
    retention_ms=st.none() | st.integers(-1, 1 << 60),
    ordered=st.booleans(),
    partitions=st.integers(1, 1023),
)
CHANNELS = st.builds(
    ChannelList,
    version=st.integers(0, 1 << 60),
    paused=st.booleans(),
    channels=st.dictionaries(NAMES, st.builds(ChannelInfo, UIDS, st.booleans(), st.booleans()), max_size=3),
)
PARTITION = st.builds(
    PartitionMeta,
    leader=UIDS,
    epoch=st.integers(0, 1 << 40),
    isr=st.dictionaries(UIDS, UIDS, max_size=3),
    replicas=st.lists(UIDS, max_size=3).map(tuple),
    version=st.integers(0, 1 << 60),
    nothing_acked=st.booleans(),
    moved_from=st.lists(UIDS, max_size=3).map(tuple),
)
RECORDS: st.SearchStrategy[StoredRecord] = st.one_of(
    st.builds(
        TopicRecord,
        NAMES,
        UIDS,
        st.integers(0, 1 << 19),
        SETTINGS,
        CHANNELS,
        st.dictionaries(st.integers(0, 1022), PARTITION, max_size=3),
    ),
    st.builds(Tombstone, NAMES, UIDS, st.integers(0, 1023), st.lists(UIDS, max_size=3).map(tuple)),
    st.builds(ClusterRecord, UIDS, st.integers(0, 1 << 40)),
    st.builds(NodeInfo, UIDS, st.text(max_size=20), poisoned=st.text(max_size=20)),
)

TOPIC = TopicRecord(
    "orders",
    0xFFFF_FFFF_FFFF_FFFF,
    5,
    TopicSettings(sync="none", partitions=2),
    ChannelList(3, True, {"a": ChannelInfo(9, True)}),
    {n: PartitionMeta(7, 2, {7: 70}, (7, 8), 1, None, registration=3, version=4) for n in range(2)},
)


@given(RECORDS)
def test_records_survive(record: StoredRecord) -> None:
    data = encode(record)
    assert b"\0" not in data
    assert decode(type(record), data) == record


def outcome(kind: type[StoredRecord], data: bytes, **set_by_store: object) -> StoredRecord | str:
    try:
        return decode(kind, data, **set_by_store)
    except (LogCorrupt, ConfigError) as error:
        return f"{type(error).__name__}: {error}"


FLAT = st.one_of(
    PARTITION,
    st.builds(NodeInfo, UIDS, name=NAMES, declines=NAMES, leaving=st.booleans()),
    st.builds(Tombstone, NAMES, UIDS, st.integers(1, 9), st.lists(UIDS, max_size=3).map(tuple)),
)


@given(FLAT, st.data())
def test_the_shorter_way_of_flat_records_does_not_show(record: StoredRecord, more: st.DataObject) -> None:
    kind, unknown = type(record), more.draw(st.sampled_from([{}, {"zone9": 3}]))
    record = replace(record, unknown=unknown)
    data = encode(record)
    plain = json.loads(data)
    for name in more.draw(st.lists(st.sampled_from(sorted(plain)), min_size=1, max_size=2, unique=True)):
        odd = st.sampled_from([None, True, -1, 1 << 70, 1.5, "7", "always", [], [1, "x"], {}, {"07": 1}, {"x": 2}])
        value = more.draw(odd | st.just(plain[name]))
        if more.draw(st.booleans()):
            plain[name] = value
        else:
            del plain[name]
    newer = json.dumps({**plain, "format": FORMAT + 1}).encode()
    read = [data, json.dumps(plain).encode(), newer, data[:-1]]
    assert codec._flat(kind) is not None
    shorter = [encode(record), *(outcome(kind, each) for each in read)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_flat", lambda kind: None)
        longer = [encode(record), *(outcome(kind, each) for each in read)]
    assert shorter == longer


def test_a_partition_as_this_version_writes_it_goes_the_shorter_way(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = PartitionMeta(leader=1, isr={1: 2}, replicas=(1, 3), sync="always", version=4)
    monkeypatch.setattr(codec, "_converted", None)
    monkeypatch.setattr(codec, "_of_texts", None)
    assert decode(PartitionMeta, encode(meta, version=0), version=9) == replace(meta, version=9)
    assert b'"version":0' in encode(meta, version=0)


def test_the_form_is_stable() -> None:
    assert json.loads(encode(TOPIC)) == {
        "format": 1,
        "name": "orders",
        "uid": 18446744073709551615,
        "salt": 5,
        "settings": {
            "sync": "none",
            "retention_ms": None,
            "retention_bytes": None,
            "abandoned_after_ms": None,
            "abandoned_over_bytes": None,
            "ordered": False,
            "partitions": 2,
            "replicas": None,
            "min_isr": None,
        },
        "channels": {
            "version": 3,
            "paused": True,
            "channels": {"a": {"uid": 9, "paused": True, "reader": False}},
            "unasked": False,
        },
        "partitions": {
            str(n): {
                "leader": 7,
                "epoch": 2,
                "isr": {"7": 70},
                "replicas": [7, 8],
                "min_isr": 1,
                "sync": None,
                "registration": 3,
                "successor": 0,
                "version": 4,
                "damage_accepted": 0,
                "nothing_acked": False,
                "moved_from": [],
            }
            for n in range(2)
        },
    }


def test_what_a_newer_version_wrote_is_carried_along() -> None:
    plain = to_plain(TOPIC)
    plain["color"] = "red"
    plain["settings"]["compression"] = {"level": 3}
    plain["channels"]["channels"]["a"]["ordered_by"] = ["key"]
    plain["partitions"]["1"]["zone"] = 4
    record = from_plain(TopicRecord, plain)
    changed = replace(record, channels=record.channels.with_channel("b", 10).with_channel_paused("a", False))
    again = to_plain(from_plain(TopicRecord, to_plain(changed)))
    assert again["color"] == "red"
    assert again["settings"]["compression"] == {"level": 3}
    assert again["channels"]["channels"]["a"]["ordered_by"] == ["key"]
    assert again["partitions"]["1"]["zone"] == 4
    assert again["channels"]["version"] == 5


def test_what_an_older_version_did_not_write_has_its_default() -> None:
    assert from_plain(TopicRecord, {"name": "a", "uid": 1, "salt": 2}) == TopicRecord("a", 1, 2)


def damaged(**changes: Any) -> bytes:
    return json.dumps({**json.loads(encode(TOPIC)), **changes}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        encode(TOPIC)[:-1],
        b'{"name": "a", "uid": 1, "salt": 2}',
        b'{"format": 1, "name": "a", "uid": 1}',
        damaged(uid="7"),
        damaged(uid=None),
        damaged(settings=[]),
        damaged(settings={"partitions": 0}),
        damaged(settings={"sync": "never"}),
        damaged(channels={"channels": {"a": 5}}),
        damaged(partitions={"x": {}}),
        damaged(partitions={"0": {"replicas": [1, "2"]}}),
        damaged(format="1"),
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(LogCorrupt, match="this is not a TopicRecord: "):
        decode(TopicRecord, data)


def test_another_form_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="newer version"):
        decode(TopicRecord, damaged(format=FORMAT + 1))


def test_what_a_type_asks_for_is_found_out_once_and_not_for_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a node that led thousands is gone, each other node reads as many records."""
    meta = PartitionMeta(leader=7, epoch=3, isr={7: 1, 8: 2}, replicas=(7, 8), min_isr=2)
    data = encode(meta)
    assert decode(PartitionMeta, data) == meta
    examined: list[object] = []

    def counted(hint: object) -> object:
        examined.append(hint)
        return get_origin(hint)

    monkeypatch.setattr(codec, "get_origin", counted)
    assert decode(PartitionMeta, data) == meta and not examined


def test_fields_that_the_store_sets_are_not_those_of_the_bytes() -> None:
    assert decode(PartitionMeta, encode(PartitionMeta(leader=7, version=3)), version=9) == PartitionMeta(7, version=9)


def test_values_that_are_as_their_type_asks_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads thousands of records; what is not as it should be is refused as ever."""
    settings = TopicSettings(retention_ms=5)
    topic = TopicRecord("t", 1, 2, settings, partitions={0: PartitionMeta().led_by(5, log_uid=7)})
    plain = json.loads(json.dumps(to_plain(topic)))
    converted: list[object] = []
    convert = codec.msgspec.convert

    def counting(value: object, hint: Any) -> Any:
        converted.append(value)
        return convert(value, hint)

    monkeypatch.setattr(codec.msgspec, "convert", counting)
    assert from_plain(TopicRecord, plain) == topic
    values = [value for value in converted if not isinstance(value, dict)]
    assert len(values) <= 2, "only what has no plain type"
    for name, wrong in (("salt", True), ("salt", "2"), ("name", 1), ("name", None)):
        with pytest.raises(LogCorrupt):
            from_plain(TopicRecord, {**plain, name: wrong})
    with pytest.raises(LogCorrupt):
        from_plain(TopicRecord, {**plain, "settings": {**plain["settings"], "ordered": 1}})


MANY_CHANNELS = st.lists(st.dictionaries(NAMES, st.builds(ChannelInfo, UIDS, st.booleans()), max_size=4), max_size=4)


@given(MANY_CHANNELS)
def test_a_mapping_is_read_beside_others_as_without_them(more: list[dict[str, ChannelInfo]]) -> None:
    """One is the beginning of the next, the same again, or another one."""
    read = codec._Items(str, ChannelInfo)
    together: dict[str, ChannelInfo] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "MAPPING_BYTES", 0)
        for channels in [*more, *more]:
            together = {**together, **channels}
            for some in (together, channels, together):
                text = msgspec.Raw(msgspec.json.encode({name: to_plain(info) for name, info in some.items()}))
                assert read(text) == some and list(read(text)) == list(some)


def test_of_a_large_mapping_that_was_read_before_only_the_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def text_of(count: int) -> bytes:
        return encode(ChannelList(channels={f"c{n}": ChannelInfo(n + 1) for n in range(count)}))

    decode(ChannelList, text_of(1000))
    looked_at = []
    original = codec._item
    monkeypatch.setattr(codec, "_item", lambda kind, text: looked_at.append(text) or original(kind, text))
    assert len(decode(ChannelList, text_of(1002)).channels) == 1002
    assert [json.loads(text)["uid"] for text in looked_at] == [1001, 1002]
    assert decode(ChannelList, text_of(1002)).channels is decode(ChannelList, text_of(1002)).channels
    assert len(looked_at) == 2
    with pytest.raises(LogCorrupt):
        decode(ChannelList, text_of(1002).replace(b"}}", b"},0}"))
