"""Changing messages page by page: by id and as a selection, at a rate that is that of all partitions together."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.cli.message import paging
from nsqha.pb.v1 import admin_pb2 as pb


class FakeAdmin:
    """A channel with so many dead letters in each partition; notes when how many were changed."""

    def __init__(self, time: Any, counts: list[int], *, call_s: float = 0.0) -> None:
        self.time = time
        self.counts = counts
        self.changed: list[tuple[float, int, int]] = []  # (when, partition, how many)
        self._call_s = call_s

    def call(self, rpc: str, **fields: Any) -> Any:
        assert rpc == "ChangeMessages"
        self.time.now += self._call_s
        if ids := fields.get("message_ids"):
            answers = [pb.ChangedMessages(changed=len(ids), done=ids)]
            self.changed.append((self.time.now, 0, len(ids)))
            return SimpleNamespace(partitions=answers)
        places = {place.partition: place.offset for place in fields["after"]}
        numbers = places if places else range(len(self.counts))
        answers = [self._page(n, places.get(n, 0), fields) for n in numbers if fields.get("partition", n) == n]
        return SimpleNamespace(partitions=answers)

    def _page(self, n: int, begin: int, fields: dict[str, Any]) -> Any:
        end = min(begin + fields["limit"], self.counts[n])
        answer = pb.ChangedMessages(partition=n, changed=end - begin)
        if end < self.counts[n]:
            answer.next.CopyFrom(pb.MessagePlace(partition=n, offset=end))
        if not fields.get("plan_only"):
            self.changed.append((self.time.now, n, end - begin))
        return answer

    @property
    def most_in_a_second(self) -> int:
        return max(sum(n for when, _, n in self.changed if at <= when < at + 1) for at, _, _ in self.changed)


def arguments(rate: int | None, partition: int | None = None) -> argparse.Namespace:
    return argparse.Namespace(topic="t", channel="c", partition=partition, rate=rate)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Any:
    time = SimpleNamespace(now=100.0)

    def sleep(seconds: float) -> None:
        time.now += seconds

    pace = paging.ChangeRate
    monkeypatch.setattr(paging, "ChangeRate", lambda rate: pace(rate, now=lambda: time.now, sleep=sleep))
    return time


def change(admin: Any, args: argparse.Namespace) -> paging.Changed:
    planned = paging.change(admin, args, plan=True)
    return paging.change(admin, args, plan=False, planned=planned)


@pytest.mark.parametrize(
    ("counts", "rate"), [([300], 50), ([100, 100, 100], 100), ([50] * 8, 20), ([900, 3, 0], 100), ([5, 5], 3)]
)
@pytest.mark.parametrize("call_s", [0.0, 0.01, 0.2])
def test_a_rate_is_that_of_all_partitions_together(time: Any, counts: list[int], rate: int, call_s: float) -> None:
    admin = FakeAdmin(time, counts, call_s=call_s)
    began = time.now
    assert change(admin, arguments(rate)).messages == sum(counts)
    assert admin.most_in_a_second <= rate + max(1, rate // paging.STEPS_A_SECOND)
    assert time.now - began >= sum(counts) / rate - 1
    if call_s < 0.1 and rate > 10:
        assert time.now - began <= sum(counts) / rate + 1, "no slower than asked for"
    assert max(n for _, _, n in admin.changed) <= max(1, rate // paging.STEPS_A_SECOND), "spread over the second"
    for n, count in enumerate(counts):
        assert sum(changed for _, number, changed in admin.changed if number == n) == count


def test_partitions_take_turns(time: Any) -> None:
    admin = FakeAdmin(time, [4, 2, 3])
    change(admin, arguments(10))
    assert [number for _, number, _ in admin.changed] == [0, 1, 2, 0, 1, 2, 0, 2, 0]


def test_without_a_rate_pages_are_full(time: Any) -> None:
    admin = FakeAdmin(time, [2500, 10])
    assert change(admin, arguments(None)).messages == 2510
    assert [n for _, _, n in admin.changed] == [1000, 10, 1000, 500]
    assert time.now == 100.0


def test_ids_have_the_rate_too(time: Any) -> None:
    admin = FakeAdmin(time, [])
    ids = [f"{n:016x}" for n in range(100)]
    found = paging.change_ids(admin, arguments(20), [*ids, ids[0]], plan=False)
    assert (found.messages, found.ids) == (100, dict.fromkeys(ids, ""))
    assert admin.most_in_a_second <= 21
    assert time.now >= 104.9


def test_one_partition_only(time: Any) -> None:
    admin = FakeAdmin(time, [5, 7])
    assert change(admin, arguments(100, partition=1)).messages == 7
    assert {number for _, number, _ in admin.changed} == {1}
