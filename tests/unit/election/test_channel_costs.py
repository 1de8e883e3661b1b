"""One more channel of a topic costs the same work whether it has ten or a thousand; counted, not timed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from nsqha.cursor.events import ChannelsEvent
from nsqha.cursor.listing import ChannelEntry, Listing
from nsqha.cursor.policy import ChannelPolicies
from nsqha.election import codec, policy
from nsqha.election.embedded import EmbeddedStore
from nsqha.election.model import ChannelInfo, ChannelList, TopicRecord, TopicSettings
from tests.fakes.disk import FaultyStorage

FEW, MANY = 10, 1000
NAME_BYTES_MAX = 64


def listed(count: int) -> ChannelList:
    return ChannelList(count, False, {f"c{n}": ChannelInfo(n + 1) for n in range(count)})


class Calls:
    """Counts what the conversion of records and the look-up of policies do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        for module, name in ((codec, "_converted"), (codec, "_record"), (codec, "_item"), (policy, "_said")):
            self._count(monkeypatch, module, name)
        monkeypatch.setattr(codec, "MAPPING_BYTES", 0)

    def _count(self, monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: object) -> object:
            self.counts[name] += 1
            return original(*args)

        monkeypatch.setattr(module, name, counted)

    def taken(self) -> dict[str, int]:
        counts, self.counts = self.counts, Counter()
        return dict(counts)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def work_of_one_more(count: int, calls: Calls) -> tuple[dict[str, int], ...]:
    """What the store of a single node, a reader of a cluster's record, and a partition do for it."""
    store = EmbeddedStore(FaultyStorage("d"), "d/metadata", random.Random(1))
    known = store.records.create_topic("t", TopicSettings(), channels=listed(count))
    policies = ChannelPolicies()
    policies.follow(known.record.channels)
    policies.passing("c0")
    codec.decode(TopicRecord, codec.encode(known.record))
    more = known.record.channels.with_channel("more", 1 << 40 | count)
    calls.taken()

    known = store.records.replace("t", known.version, replace(known.record, channels=more))
    stored = calls.taken()

    again = codec.decode(TopicRecord, codec.encode(known.record))
    read = calls.taken()
    assert again.channels == more

    changes = policies.changes
    policies.follow(more)
    assert (policies.passing("more"), policies.passing("c0"), policies.changes) == (None, None, changes)
    return stored, read, calls.taken()


def test_the_number_of_channels_does_not_count(calls: Calls) -> None:
    assert work_of_one_more(MANY, calls) == work_of_one_more(FEW, calls)


def test_what_is_said_of_policies_is_news_and_the_rest_is_not() -> None:
    policies = ChannelPolicies()
    first = listed(2)
    policies.follow(first)
    assert policies.changes == 1
    policies.follow(first.with_channel("more", 9).with_channel_paused("c0", True))
    assert policies.changes == 1
    said = first.with_policy("c1", {"skip": True})
    policies.follow(said.above(5))
    assert policies.changes == 2
    assert policies.passing("c0") is None
    assert policies.passing("c1") is not None
    policies.follow(said.with_policy("c1", {"skip": None}).above(6))
    assert policies.changes == 3
    assert policies.passing("c1") is None


def test_a_channel_that_is_made_again_is_another_one() -> None:
    first = listed(3)
    once = codec.decode(ChannelList, codec.encode(first))
    again = codec.decode(ChannelList, codec.encode(once.without_channel("c1").with_channel("c1", 77)))
    assert again.channels["c1"].uid == 77
    assert again.channels["c0"] is once.channels["c0"], "records of equal texts are one"
    assert codec.decode(ChannelList, codec.encode(again.with_channel_paused("c0", True))).channels["c0"].paused


def bytes_of_a_change(count: int, name_bytes: int) -> tuple[int, int]:
    """Of one change of the list: what each partition's log gets, and what the metadata get."""
    rng = random.Random(1)
    infos = {f"{n:04}".rjust(name_bytes, "c"): ChannelInfo(rng.getrandbits(63)) for n in range(count)}
    entries = Listing.of(ChannelEntry(name, info.uid) for name, info in infos.items())
    record = TopicRecord("t", 1, 2, channels=ChannelList(count, False, infos))
    return len(ChannelsEvent(count, False, entries).encode()), len(codec.encode(record))


def test_the_bytes_of_a_change_grow_with_the_list_and_have_a_bound() -> None:
    """The list is written whole, so that a log and a record say all by themselves; `--max-topic-channels` ends that."""
    assert [bytes_of_a_change(count, 12) for count in (FEW, MANY)] == [(241, 1_039), (22_021, 73_194)]
    in_logs, in_metadata = bytes_of_a_change(MANY, NAME_BYTES_MAX)
    assert in_logs < 75_000 and in_metadata < 130_000, "a thousand names of the greatest length"
