"""Random histories of a metadata store against a plain model, with restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsqha.election.model import TopicSettings
from nsqha.errors import Conflict
from tests.contract.metadata_stores import EtcdOpener, Opener, changed, embedded_in_memory, in_memory
from tests.etcd_server import EtcdServer

NAMES = ["a", "b", "c", "e#ephemeral"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "delete", "channel", "stale", "pause", "leader", "epochs", "forget", "restart"]),
        st.sampled_from(NAMES),
        st.integers(0, 3),
    ),
    max_size=30,
)


@pytest.mark.parametrize("make", [in_memory, embedded_in_memory])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_random_histories(make: Callable[[], Opener], steps: list[tuple[str, str, int]]) -> None:
    run_history(make(), steps)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
def test_random_histories_in_etcd(etcd: EtcdServer, steps: list[tuple[str, str, int]]) -> None:
    opener = EtcdOpener(etcd)
    try:
        run_history(opener, steps)
    finally:
        opener.close()


def run_history(open_store: Opener, steps: list[tuple[str, str, int]]) -> None:
    store = open_store()
    channels: dict[str, dict[str, bool]] = {}
    epochs: dict[str, int] = {}
    leaders: dict[str, int] = {}
    buried: set[str] = set()
    for action, name, n in steps:
        topic = store.records.topic(name)
        assert (topic is not None) == (name in channels)
        match action:
            case "create" if topic is None:
                store.records.create_topic(name, TopicSettings())
                channels[name], epochs[name], leaders[name] = {}, 1, 0
            case "delete" if topic is not None:
                store.records.delete_topic(name)
                del channels[name]
                if not name.endswith("#ephemeral"):
                    buried.add(name)
            case "channel" if topic is not None and f"c{n}" not in channels[name]:
                store.records.replace(name, topic.version, changed(topic, f"c{n}"))
                channels[name][f"c{n}"] = False
            case "stale" if topic is not None:
                with pytest.raises(Conflict):
                    store.records.replace(name, topic.version - 1, topic.record)
            case "pause" if topic is not None and f"c{n}" in channels[name]:
                paused = topic.record.channels.with_channel_paused(f"c{n}", True)
                store.records.replace(name, topic.version, replace(topic.record, channels=paused))
                channels[name][f"c{n}"] = True
            case "leader" if topic is not None:
                meta = replace(topic.record.partitions[0], leader=n)
                store.records.replace_partition(name, topic.record.uid, 0, meta)
                leaders[name] = n
            case "epochs":
                store.records.raise_epochs()
                epochs = {known: epoch + 1 for known, epoch in epochs.items()}
            case "forget":
                for uid, tombstone in store.records.tombstones().items():
                    if tombstone.name == name:
                        store.records.forget_tombstone(uid)
                buried.discard(name)
            case "restart":
                before = store
                store.close()
                store = open_store()
                if store is not before:
                    channels.pop("e#ephemeral", None)
    got = {
        name: (
            {c: info.paused for c, info in topic.record.channels.channels.items()},
            topic.record.partitions[0].epoch,
            topic.record.partitions[0].leader,
        )
        for name, topic in store.records.topics().items()
    }
    assert got == {name: (channels[name], epochs[name], leaders[name]) for name in channels}
    assert {tombstone.name for tombstone in store.records.tombstones().values()} == buried
