"""Which changes of the metadata are allowed in every store: checks, and the records that follow from others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nsqha.election.model import PartitionMeta, Tombstone, TopicRecord, TopicSettings, Versioned
from nsqha.election.placement import DEFAULT_REPLICAS, min_isr_of
from nsqha.errors import Conflict
from nsqha.ids import is_ephemeral, valid_name

_INTENT = re.compile(r"[a-zA-Z0-9._#/-]{1,200}")


def next_epoch(meta: PartitionMeta, leader: int | None) -> PartitionMeta:
    """The record in the next epoch, led by `leader` alone if it is given."""
    led = meta if leader is None else meta.led_by(leader, log_uid=meta.isr.get(leader, 0))
    return replace(led, epoch=meta.epoch + 1)


def tombstone_of(record: TopicRecord) -> Tombstone:
    """A tombstone with all nodes that may have files: replicas, and former ones that may have been down since."""
    partitions = record.partitions.values()
    nodes = tuple(sorted({node for meta in partitions for node in (*meta.replicas, *meta.moved_from)}))
    return Tombstone(record.name, record.uid, len(partitions), nodes)


def without_node(tombstone: Tombstone, node: int | None) -> Tombstone | None:
    """The tombstone after this node (None: every node) has removed all files of the topic; None: it can be removed."""
    left = () if node is None else tuple(uid for uid in tombstone.nodes if uid != node)
    return replace(tombstone, nodes=left) if left else None


def new_partitions(
    name: str, settings: TopicSettings, partitions: Mapping[int, PartitionMeta] | None
) -> Mapping[int, PartitionMeta]:
    """The partitions of a new topic. ValueError if the name or the partitions do not fit."""
    if not valid_name(name):
        raise ValueError(f"{name!r} is not a topic name")
    if partitions is None:
        return {number: PartitionMeta() for number in range(settings.partitions)}
    if set(partitions) != set(range(settings.partitions)):
        raise ValueError(f"the settings say {settings.partitions} partitions, given are {sorted(partitions)}")
    return partitions


def changed_partitions(
    old: Versioned[TopicRecord], expected_version: int, new: TopicRecord
) -> dict[int, PartitionMeta]:
    """The partitions that a `replace` must write. Raises Conflict, ValueError."""
    name = old.record.name
    if old.version != expected_version:
        raise Conflict(f"topic {name} was changed meanwhile (version {old.version}, not {expected_version})")
    if (name, old.record.uid, old.record.salt) != (new.name, new.uid, new.salt):
        raise ValueError(f"name, uid and salt of topic {name} cannot be changed")
    if missing := sorted(set(old.record.partitions) - set(new.partitions)):
        raise ValueError(f"partitions {missing} of topic {name} cannot be taken away")
    check_partitions(new)
    changed = {}
    for number, meta in new.partitions.items():
        before = old.record.partitions.get(number)
        if meta != before:
            if before is not None and meta.version != before.version:
                raise Conflict(f"partition {number} of topic {name} was changed meanwhile")
            changed[number] = meta
    return changed


def check_partitions(record: TopicRecord) -> None:
    """Raise ValueError unless there is a record for each partition of the settings."""
    wanted: Iterable[int] = range(record.settings.partitions)
    if set(record.partitions) != set(wanted):
        raise ValueError(
            f"topic {record.name} has settings for {record.settings.partitions} partitions and records of "
            f"{sorted(record.partitions)}"
        )


def changed_settings(record: TopicRecord, changes: Mapping[str, Any]) -> TopicSettings:
    """The settings after `changes`. ValueError if they do not fit each other or the present partitions."""
    settings = replace(record.settings, **changes)
    there = len(record.partitions)
    if settings.partitions < there:
        raise ValueError(
            f"topic {record.name} has {there} partitions; they cannot become {settings.partitions}, only more"
        )
    check_settings(settings)
    return settings


def check_settings(settings: TopicSettings) -> None:
    """Raise ValueError for what the record alone does not refuse: min_isr if the number of replicas is not set."""
    if settings.replicas is None and (settings.min_isr or 0) > DEFAULT_REPLICAS:
        raise ValueError(
            f"min_isr is {settings.min_isr}; it cannot be more than replicas, {DEFAULT_REPLICAS} unless they are set"
        )


def with_settings(record: TopicRecord, changes: Mapping[str, Any]) -> TopicRecord:
    """The record with these settings and its partitions changed accordingly; the controller places new ones.

    ValueError if they do not fit each other or the present partitions."""
    if is_ephemeral(record.name) and (fixed := sorted({"partitions", "replicas", "min_isr"} & changes.keys())):
        raise ValueError(f"{record.name} is kept by one node only, in one partition: {fixed[0]} cannot be changed")
    settings = changed_settings(record, changes)
    metas = with_min_isr(record, settings) if changes.keys() & {"min_isr", "replicas"} else record.partitions
    new = {number: PartitionMeta() for number in range(len(metas), settings.partitions)}
    return replace(record, settings=settings, partitions={**metas, **new})


def with_min_isr(record: TopicRecord, settings: TopicSettings) -> dict[int, PartitionMeta]:
    """The partitions' records with the min_isr of the settings, limited by the replicas that they have.

    If replicas are still missing, the move that adds them raises min_isr, so that nothing stops meanwhile.
    """
    metas = {}
    for number, meta in record.partitions.items():
        there = max(len(meta.replicas), 1)
        metas[number] = replace(meta, min_isr=min(min_isr_of(settings, there), there))
    return metas


def check_intent_name(name: str) -> None:
    if not _INTENT.fullmatch(name):
        raise ValueError(f"{name!r} is not a name for an intent: 1 to 200 letters, digits, . _ - # /")
