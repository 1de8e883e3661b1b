"""Keys as they were read, and records that the watch has brought already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.view import join_all, join_newer
from nsqha.election.model import PartitionMeta, TopicRecord

KEYS = etcd_keys.Keys("c")


def topic_kv(name: str, uid: int, revision: int) -> Any:
    value = etcd_keys.topic_value(TopicRecord(name, uid, uid))
    return SimpleNamespace(key=KEYS.topic(name), value=value, mod_revision=revision)


def partition_kv(uid: int, revision: int, epoch: int = 1) -> Any:
    value = etcd_keys.partition_value(PartitionMeta(epoch=epoch))
    return SimpleNamespace(key=KEYS.partition(uid, 0), value=value, mod_revision=revision)


def test_only_records_that_changed_since_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    record_of = etcd_keys.record_of

    def counted(kind: Any, kv: Any, **set_by_store: object) -> Any:
        decoded.append(KEYS.short(kv.key))
        return record_of(kind, kv, **set_by_store)

    monkeypatch.setattr(etcd_keys, "record_of", counted)
    topics = {f"t{n}": topic_kv(f"t{n}", n, n) for n in range(1, 300)}
    partitions = {n: partition_kv(n, n) for n in range(1, 300)}
    known = join_all(KEYS, topics.values(), partitions.values(), known={})
    assert len(decoded) == 2 * 299
    decoded.clear()
    partitions[7] = partition_kv(7, 1000, epoch=2)
    topics["new"], partitions[500] = topic_kv("new", 500, 1001), partition_kv(500, 1001)
    topics["t9"], partitions[509] = topic_kv("t9", 509, 1002), partition_kv(509, 1002)  # deleted, and made again
    del topics["t20"], partitions[20], partitions[9]
    now = join_all(KEYS, topics.values(), partitions.values(), known=known)
    assert sorted(decoded) == sorted(
        KEYS.short(kv.key) for kv in (partitions[7], topics["new"], partitions[500], topics["t9"], partitions[509])
    )
    monkeypatch.undo()
    assert now == join_all(KEYS, topics.values(), partitions.values(), known={})


def test_what_was_put_since_takes_the_place_of_what_is_known() -> None:
    topics = {f"t{n}": topic_kv(f"t{n}", n, n) for n in range(1, 20)}
    partitions = {n: partition_kv(n, n) for n in range(1, 20)}
    known = join_all(KEYS, topics.values(), partitions.values(), known={})
    topics["t3"] = topic_kv("t3", 3, 100)
    partitions[7] = partition_kv(7, 101, epoch=2)
    topics["new"], partitions[500] = topic_kv("new", 500, 102), partition_kv(500, 102)
    newer = join_newer(KEYS, (topics["t3"], topics["new"]), (partitions[7], partitions[500]), known=known)
    assert newer == join_all(KEYS, topics.values(), partitions.values(), known={})
    assert all(newer[name] is known[name] for name in known if name not in ("t3", "t7"))
