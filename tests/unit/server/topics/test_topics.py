"""The topics of a node in a cluster: which of them lookup daemons hear of, who was faster."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.clock import ManualClock
from nsqha.election.model import ChannelList, NodeInfo, PartitionMeta, Tombstone, TopicRecord, TopicSettings, Versioned
from nsqha.election.moves import hidden_intent, hidden_name
from nsqha.election.session import View
from nsqha.errors import Conflict, NotFound, OutcomeUnknown, Unavailable
from nsqha.options import Options
from nsqha.server.node.cluster import placement as cluster_placement
from nsqha.server.node.cluster.placement import ClusterPlacement
from nsqha.server.runtime.tasks import Changes
from nsqha.server.topics import topics
from nsqha.server.topics.channel_leaders import ClusterChannelLeaders
from nsqha.server.topics.channels import Channels
from nsqha.server.topics.placement import TopicContext
from nsqha.server.topics.topics import Topics
from tests.fakes.disk import FakeDisk
from tests.unit.server.replica_rig import pause, run


class Metadata:
    """Records as they are now; `races`: what somebody else makes just before we do."""

    def __init__(self) -> None:
        self.records = self
        self.stored: dict[str, Versioned[TopicRecord]] = {}
        self.races: list[Versioned[TopicRecord]] = []
        self.tombstones: dict[int, Tombstone] = {}

    async def read(self, read: Callable[[], Any]) -> Any:
        return read()

    write = read

    def topic(self, name: str) -> Versioned[TopicRecord] | None:
        return self.stored.get(name)

    def create_topic(
        self, name: str, settings: TopicSettings, *, partitions: Any, channels: ChannelList
    ) -> Versioned[TopicRecord]:
        if self.races:
            self.stored[name] = self.races.pop()
        if name in self.stored:
            raise Conflict(f"topic {name} exists already")
        self.stored[name] = Versioned(TopicRecord(name, 7, 3, settings, channels), 1)
        return self.stored[name]

    def replace_partition(self, name: str, uid: int, number: int, meta: PartitionMeta) -> None:
        if self.races:
            self.stored[name] = self.races.pop()
            raise Conflict(f"partition {number} of {name} was changed")
        known = self.stored[name]
        changed = replace(known.record, partitions={**known.record.partitions, number: meta})
        self.stored[name] = Versioned(changed, known.version + 1)

    def delete_topic(self, name: str) -> None:
        self.tombstones[7] = Tombstone(name, 7, 1, (1,))

    def forget_tombstone(self, uid: int, *, node: int) -> None:
        del self.tombstones[uid]


class Registrar:
    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.known: dict[str, list[str]] = {}

    async def known_channels(self, topic: str) -> list[str]:
        return self.known.get(topic, [])

    def changed(self, topic: str, channels: Any) -> None:
        self.told.append((topic, channels))

    def channels_changed(self, topic: str, channels: Any) -> None:
        before = {channel for channel in self.told[-1][1] if channel not in channels}
        self.told.append((topic, sorted(before | {channel for channel, there in channels.items() if there})))


class ReplicaLogs:
    def __init__(self) -> None:
        self.drawn: set[int] = set()

    def draw_log_uid(self) -> int:
        self.drawn.add(1)
        return 1

    def forget_log_uid(self, log_uid: int) -> None:
        self.drawn.remove(log_uid)


class Replicas:
    """Nobody is led or followed."""

    def __init__(self) -> None:
        self.logs = ReplicaLogs()
        self.removal = self

    async def settle(self, topic: Any, *, written: bool = False) -> None: ...

    async def drop(self, uid: int, numbers: Any) -> None: ...


class Leaders:
    """Every partition is led, but for these."""

    def __init__(self) -> None:
        self.without: set[int] = set()
        self.callbacks: list[Callable[[str], None]] = []

    def recorded(self, topic: str, number: int) -> object | None:
        return None if number in self.without else topic

    def when_changed(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def elected(self, number: int) -> None:
        self.without.discard(number)
        for callback in self.callbacks:
            callback("t")


class TopicsRig:
    def __init__(self, **options: Any) -> None:
        self.metadata = Metadata()
        nothing = cast(Any, None)
        context = TopicContext(
            Options(**options),
            node_uid=1,
            rng=random.Random(1),
            metadata=cast(Any, self.metadata),
            disk=nothing,
            journal_writer=nothing,
            opener=nothing,
            changes=Changes(asyncio.get_running_loop()),
            new_delivery=nothing,
            spawn=nothing,
            forget_targets=lambda: None,
        )
        self.topics: Any = Topics(context, ending=lambda: False)
        self.topics.settings = SimpleNamespace(apply=lambda topic: None)
        self.topics.announcer = self.registrar = Registrar()
        self.intents: dict[str, Versioned[Any]] = {}
        self.alive = {uid: NodeInfo(uid, f"n{uid}", host=f"host{uid}") for uid in (1, 2, 3)}
        store = SimpleNamespace(intents=SimpleNamespace(all=lambda: self.intents))
        self.leaders, self.view = Leaders(), View()
        self.cluster: Any = SimpleNamespace(
            registration=SimpleNamespace(info=None),
            news=SimpleNamespace(being_made=lambda name: contextlib.nullcontext()),
            node=1,
            replicas=Replicas(),
            store=store,
            nodes=lambda: self.alive,
            view=lambda: self.view,
            leaders=self.leaders,
        )
        self.clock = ManualClock()
        self.placement: Any = ClusterPlacement(self.topics, context, self.cluster, self.clock)
        self.placement.placed = lambda *_, **__: {0: PartitionMeta(leader=1)}
        self.placement.has_seen_end_of = lambda _: False
        self.topics.placement = self.placement


def record(*channels: str, version: int = 1, **fields: Any) -> Versioned[TopicRecord]:
    known = ChannelList()
    for uid, channel in enumerate(channels, 1):
        known = known.with_channel(channel, uid)
    return Versioned(replace(TopicRecord("t", 7, 3, channels=known), **fields), version)


MINE = SimpleNamespace(committed=SimpleNamespace(reader=False))
LED: Any = SimpleNamespace(serving=False, cursors=SimpleNamespace(channels={"mine#ephemeral": MINE}))


# ---- deleted topics


class Files:
    """A node's folders and what its journal knows of them; `stays`: they can not be removed now."""

    def __init__(self, *keys: tuple[int, int]) -> None:
        self.uids = {key[0] for key in keys}  # of topics that have a folder
        self.folders = self
        self.journal = set(keys)
        self.stays = False

    def remove(self, name: str, uid: int) -> None:
        if self.stays:
            raise OSError(5, "Input/output error")
        self.uids.discard(uid)

    def knows(self, key: tuple[int, int]) -> bool:
        return key in self.journal

    def forget_partition(self, key: tuple[int, int]) -> None:
        self.journal.discard(key)

    def forget(self, record: TopicRecord) -> None:
        for number in record.partitions:
            self.forget_partition((record.uid, number))


def test_a_tombstone_is_forgotten_only_when_it_was_seen_and_the_files_are_gone() -> None:
    """Also by the node that has deleted the topic itself: a view from before may bring it back there once more."""

    async def scenario() -> None:
        rig = TopicsRig()
        files, disk = Files((7, 0)), FakeDisk(asyncio.get_running_loop(), pytest.fail)
        rig.topics._context = replace(rig.topics._context, disk=disk, opener=files)
        rig.topics.adopt(record(partitions={0: PartitionMeta()}))
        await rig.topics.delete_topic("t")
        assert "t" not in rig.topics and rig.metadata.tombstones
        rig.topics.adopt(record(partitions={0: PartitionMeta()}))  # its log is made anew
        files.stays = True
        with pytest.raises(OSError, match="Input/output"):
            await rig.topics.dropped(rig.metadata.tombstones[7])
        assert "t" not in rig.topics and rig.metadata.tombstones and files.uids
        files.stays = False
        await rig.topics.dropped(rig.metadata.tombstones[7])
        assert not files.uids and not files.journal and not rig.metadata.tombstones

    run(scenario)


class Led:
    """A partition that is led here, without followers."""

    number = 0

    def __init__(self) -> None:
        self.committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abandon(self, why: str) -> None:
        self.committed.set_exception(Unavailable(why))

    async def end(self, why: str) -> None:
        assert self.committed.done()


def test_a_deleted_topic_ends_although_a_change_of_it_waits_for_a_commit() -> None:
    """Its followers are gone: the change would wait for ever, and whoever makes the topic anew for the change."""

    async def scenario() -> None:
        rig = TopicsRig()
        disk = FakeDisk(asyncio.get_running_loop(), pytest.fail)
        rig.topics._context = replace(rig.topics._context, disk=disk, opener=Files())
        topic = rig.topics.adopt(record(partitions={0: PartitionMeta()}))
        topic.led = (cast(Any, led := Led()),)

        async def change() -> None:
            async with rig.topics._context.changes.of("t"):
                await led.committed

        changing = asyncio.create_task(change())
        await asyncio.sleep(0)
        await asyncio.wait_for(rig.topics.dropped(Tombstone("t", 7, 1, ())), 5)
        assert "t" not in rig.topics
        with pytest.raises(Unavailable, match="the topic was deleted"):
            await changing

    run(scenario)


# ---- lookup daemons


def test_a_topic_of_the_cluster_is_announced_while_a_part_of_it_is_led_here() -> None:
    async def scenario() -> None:
        rig = TopicsRig()
        topic = rig.topics.adopt(record("c"))
        assert rig.registrar.told == [("t", None)] and rig.topics.registrations() == {}
        topic.led = (LED,)
        rig.topics.announce("t")
        assert rig.registrar.told[-1] == ("t", ["c", "mine#ephemeral"])
        assert rig.topics.registrations() == {"t": ["c", "mine#ephemeral"]}
        topic.led = ()
        rig.topics.announce("t")
        assert rig.registrar.told[-1] == ("t", None) and rig.topics.registrations() == {}

    run(scenario)


def test_channels_that_another_node_made_or_deleted_are_announced() -> None:
    async def scenario() -> None:
        rig = TopicsRig()
        rig.topics.adopt(record("c")).led = (LED,)
        rig.topics.adopt(record("c", "d", version=2))
        assert rig.registrar.told[-1] == ("t", ["c", "d", "mine#ephemeral"])
        rig.topics.adopt(record("d", version=3))
        assert rig.registrar.told[-1] == ("t", ["d", "mine#ephemeral"])

    run(scenario)


def test_a_channel_that_is_gone_is_not_announced_whatever_logs_still_say() -> None:
    """Its event is committed later, which is no news for lookup daemons."""

    async def scenario() -> None:
        rig = TopicsRig()
        led = SimpleNamespace(serving=False, cursors=SimpleNamespace(channels={"c": MINE, "mine#ephemeral": MINE}))
        rig.topics.adopt(record("c")).led = (led,)
        rig.topics.adopt(record("c", "d", version=2))
        rig.topics.adopt(record("d", version=3))
        assert rig.registrar.told[-1] == ("t", ["d", "mine#ephemeral"])
        rig.topics["t"].led = (led, LED)
        rig.topics.announce("t")
        assert rig.registrar.told[-1] == ("t", ["d", "mine#ephemeral"])

    run(scenario)


def test_only_channels_that_changed_are_looked_at_until_something_else_is_led(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    announces = topics.announces
    monkeypatch.setattr(topics, "announces", lambda topic, name: looked_at.append(name) or announces(topic, name))

    async def scenario() -> None:
        rig = TopicsRig()
        rig.topics.adopt(record("c", "d")).led = (LED,)
        rig.topics.announce("t")
        assert looked_at == ["c", "d", "mine#ephemeral"]
        rig.topics.adopt(record("c", "e", version=2))
        assert sorted(looked_at[3:]) == ["d", "e"]
        rig.topics.announce("t", ["other#ephemeral"])
        assert looked_at[5:] == ["other#ephemeral"]
        rig.topics["t"].led = (LED, LED)
        rig.topics.announce("t")
        assert looked_at[6:] == ["c", "e", "mine#ephemeral"]

    run(scenario)


def test_a_topic_of_the_same_name_takes_no_announcement_over() -> None:
    async def scenario() -> None:
        rig = TopicsRig()
        rig.topics.adopt(record("c")).led = (LED,)
        rig.topics.adopt(record("e", version=4, uid=8))
        assert rig.registrar.told[-1] == ("t", None)

    run(scenario)


# ---- two who make a topic at once


EIGHT = TopicSettings(partitions=8)


def test_a_topic_begins_with_the_channels_that_lookup_daemons_of_others_know() -> None:
    async def scenario() -> None:
        rig = TopicsRig()
        rig.registrar.known = {"t": ["archive", "metrics"]}
        topic = await asyncio.wait_for(rig.topics.ensure_topic("t"), 5)
        found = topic.record.channels
        assert sorted(found.channels) == ["archive", "metrics"] and found.version > 0
        assert len({info.uid for info in found.channels.values()}) == 2
        assert rig.metadata.stored["t"].record.channels == found, "in the record that makes it, not later"

    run(scenario)


def test_a_topic_made_with_other_settings_is_not_taken_for_the_wanted_one() -> None:
    async def scenario() -> None:
        rig = TopicsRig()
        rig.metadata.races = [record(settings=TopicSettings(partitions=3, min_isr=1))]
        with pytest.raises(Conflict, match=r"made by another request just now, with partitions=3, min_isr=1$"):
            await rig.topics.create_topic("t", EIGHT)
        assert rig.topics.topic("t").record.settings.partitions == 3, "it is there and can be used"

    run(scenario)


def test_a_topic_that_is_just_being_made_here_is_compared_too() -> None:
    async def scenario() -> None:
        rig = TopicsRig()
        first = asyncio.ensure_future(rig.topics.create_topic("t", EIGHT))
        second = asyncio.ensure_future(rig.topics.create_topic("t", replace(EIGHT, sync="none")))
        await first
        with pytest.raises(Conflict, match=r"with sync=default$"):
            await second

    run(scenario)


@pytest.mark.parametrize("wanted", [None, EIGHT, replace(EIGHT, replicas=2)])
def test_whoever_wanted_just_that_or_nothing_special_has_it(wanted: TopicSettings | None) -> None:
    async def scenario() -> None:
        rig = TopicsRig(topic_replicas=2)
        rig.metadata.races = [record(settings=replace(EIGHT, replicas=2, unknown={"newer": 1}))]
        await rig.topics.create_topic("t", wanted)
        assert rig.topics.topic("t").record.uid == 7

    run(scenario)


def test_a_creation_is_answered_when_every_partition_is_led() -> None:
    async def scenario() -> None:
        rig = TopicsRig()
        partitions = {number: PartitionMeta(replicas=(1, 2), min_isr=1) for number in range(3)}
        rig.metadata.races = [record(settings=EIGHT, partitions=partitions)]
        rig.leaders.without = {1, 2}
        made = asyncio.ensure_future(rig.topics.create_topic("t"))
        for number in (2, 1):
            await pause()
            assert not made.done()
            rig.leaders.elected(number)
        await made
        assert not rig.leaders.callbacks

    run(scenario)


def test_a_creation_without_leaders_says_which_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = TopicsRig()
        partitions = {number: PartitionMeta(replicas=(1, 2), min_isr=1) for number in range(3)}
        rig.metadata.races = [record(settings=EIGHT, partitions=partitions)]
        rig.leaders.without = {0, 2}
        monkeypatch.setattr(cluster_placement, "LED_SECONDS", 0.01)
        with pytest.raises(OutcomeUnknown, match=r"topic t is there, but .* no leader: 0, 2; they get one as soon as"):
            await rig.topics.create_topic("t")
        assert (await rig.topics.topic_for_client("t")).name == "t", "a publish waits for the partition that it needs"

    run(scenario)


def test_more_replicas_than_nodes_are_refused_before_anything_is_made() -> None:
    async def scenario() -> None:
        rig = TopicsRig()
        with pytest.raises(ValueError, match=r"replicas is 4, and the cluster has 3 nodes: .* start more nodes first"):
            await rig.topics.create_topic("t", TopicSettings(replicas=4))
        assert not rig.metadata.stored
        away = PartitionMeta(replicas=(1, 9), min_isr=1)
        rig.view = View(topics={"other": replace(record(partitions={0: away}))})
        await rig.topics.create_topic("t", TopicSettings(replicas=4))

    run(scenario)


@pytest.mark.parametrize(("error", "kept"), [(Unavailable("away"), set()), (OutcomeUnknown("perhaps"), {1})])
def test_a_topic_that_was_certainly_not_made_leaves_no_name_of_a_log_behind(error: Exception, kept: set[int]) -> None:
    """While the metadata are away clients publish to it again and again; one that may have been made needs its log."""

    async def scenario() -> None:
        rig = TopicsRig()

        def create_topic(*_: Any, **__: Any) -> None:
            raise error

        rig.metadata.create_topic = create_topic  # type: ignore[method-assign, assignment]
        with pytest.raises(type(error)):
            await rig.topics.create_topic("t")
        assert rig.cluster.replicas.logs.drawn == kept

    run(scenario)


# ---- changed by several at once


def test_a_record_that_was_read_before_its_topic_went_does_not_bring_it_back() -> None:
    """Nobody would delete it a second time: it would be there, with no partitions, until somebody made it anew."""

    async def scenario() -> None:
        rig = TopicsRig()
        rig.placement.has_seen_end_of = lambda versioned: versioned.version < 5
        with pytest.raises(NotFound):
            rig.topics.take(record())
        assert "t" not in rig.topics
        topic = rig.topics.take(record(version=6))
        assert rig.topics.take(record()) is topic, "of one that is here nothing is doubted"
        rig.metadata.races = [record(version=3, uid=8, name="u")]
        with pytest.raises(Unavailable, match="comes and goes"):
            await rig.topics.create_topic("u")
        assert "u" not in rig.topics

    run(scenario)


@pytest.mark.parametrize("seen_first", [False, True])
def test_settings_changed_elsewhere_just_before_a_channel_is_made_are_followed(seen_first: bool) -> None:
    """The watch brings both changes as one record, which is not newer than the one that the channel was put into."""

    async def scenario() -> None:
        rig = TopicsRig()
        applied: list[str | None] = []
        rig.topics.settings = SimpleNamespace(apply=lambda topic: applied.append(topic.record.settings.sync))
        rig.topics.adopt(record())
        both = record("c", version=3, settings=TopicSettings(sync="always"))
        later = record("c", "d", version=4, settings=TopicSettings(sync="none"))

        async def change_channels(known: Any, change: Any) -> Versioned[TopicRecord]:
            if seen_first:
                rig.topics.adopt(later)  # before the answer to ours
            return both

        rig.metadata.change_channels = change_channels  # type: ignore[attr-defined]
        channels = Channels(
            rig.topics,
            Options(),
            node_uid=1,
            rng=random.Random(1),
            metadata=cast(Any, rig.metadata),
            changes=Changes(asyncio.get_running_loop()),
        )
        others = cast(Any, SimpleNamespace(others_follow=lambda topic: asyncio.sleep(0)))
        channels.leaders = ClusterChannelLeaders(rig.topics, channels.led, others)
        await channels.create("t", "c")
        rig.topics.adopt(both)
        assert applied == (["none"] if seen_first else ["always"])
        assert rig.topics["t"].versioned is (later if seen_first else both)

    run(scenario)


def hidden(rig: TopicsRig, seconds_ago: float = 0) -> None:
    """A lookup daemon hides this node for topic 7."""
    rig.intents[hidden_name(7, 1)] = Versioned(hidden_intent(7, 1, rig.clock.wall_ns() - int(seconds_ago * 1e9)), 3)


def two_led(**isr_of: Any) -> dict[int, PartitionMeta]:
    """This node leads partition 0, another one partition 1."""
    mine = PartitionMeta(replicas=(1, 2, 3), leader=1, isr=isr_of.get("mine", {1: 9, 3: 8}))
    return {0: mine, 1: PartitionMeta(replicas=(2, 1, 3), leader=2, isr={2: 9, 1: 8})}


def test_a_node_that_is_hidden_for_a_topic_gives_its_lead_away_and_keeps_the_data() -> None:
    async def story() -> None:
        rig = TopicsRig()
        rig.metadata.stored["t"] = record(partitions=two_led())
        rig.topics.adopt(rig.metadata.stored["t"])
        hidden(rig)
        rig.metadata.races = [record(partitions=two_led(), version=5)]
        await rig.topics.delete_topic("t", unless_hidden=True)
        now = rig.metadata.stored["t"].record.partitions
        assert (now[0].successor, now[0].replicas) == (3, (3, 2, 1)), "the first that is in sync, now and later"
        assert now[1] == two_led()[1], "another node leads it"
        assert "t" in rig.topics and not rig.metadata.tombstones
        await rig.topics.delete_topic("t", unless_hidden=True)
        assert rig.metadata.stored["t"].record.partitions == now

    run(story)


def test_a_hidden_node_with_the_only_replica_in_sync_deletes_nothing_and_says_so() -> None:
    async def story() -> None:
        rig = TopicsRig()
        rig.metadata.stored["t"] = record(partitions=two_led(mine={1: 9}))
        rig.topics.adopt(rig.metadata.stored["t"])
        hidden(rig)
        with pytest.raises(Conflict, match="only replica of partition 0 that is in sync"):
            await rig.topics.delete_topic("t", unless_hidden=True)
        assert "t" in rig.topics and not rig.metadata.tombstones

    run(story)


@pytest.mark.parametrize("seconds_ago", [None, 601, -601])
def test_a_topic_is_deleted_where_no_lookup_daemon_hides_the_node(seconds_ago: float | None) -> None:
    async def story() -> None:
        rig = TopicsRig()
        rig.metadata.stored["t"] = record(partitions=two_led())
        rig.topics.adopt(rig.metadata.stored["t"])
        rig.intents[hidden_name(7, 2)] = Versioned(hidden_intent(7, 2, rig.clock.wall_ns()), 3)
        if seconds_ago is not None:
            hidden(rig, seconds_ago)
        await rig.topics.delete_topic("t", unless_hidden=True)
        assert rig.metadata.tombstones and "t" not in rig.topics

    run(story)
