"""What a change of the metadata may do, whichever store makes it: checks, and the records that follow from others."""

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
    """Epoch + 1, led by `leader` alone if it is given."""
    led = meta if leader is None else meta.led_by(leader, log_uid=meta.isr.get(leader, 0))
    return replace(led, epoch=meta.epoch + 1)


def tombstone_of(record: TopicRecord) -> Tombstone:
    """It names all that may have files: replicas, and who was one and may have been down since."""
    partitions = record.partitions.values()
    nodes = tuple(sorted({node for meta in partitions for node in (*meta.replicas, *meta.moved_from)}))
    return Tombstone(record.name, record.uid, len(partitions), nodes)


def without_node(tombstone: Tombstone, node: int | None) -> Tombstone | None:
    """What is left of a tombstone when this node (None: every node) has no file of the topic any more."""
    left = () if node is None else tuple(uid for uid in tombstone.nodes if uid != node)
    return replace(tombstone, nodes=left) if left else None


def new_partitions(
    name: str, settings: TopicSettings, partitions: Mapping[int, PartitionMeta] | None
) -> Mapping[int, PartitionMeta]:
    """Of a topic that is to be created. ValueError if the name or the partitions do not fit."""
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
    """The partitions that a `replace` has to write. Conflict, ValueError."""
    name = old.record.name
    if old.version != expected_version:
        raise Conflict(f"topic {name} was changed meanwhile (version {old.version}, not {expected_version})")
    if (name, old.record.uid, old.record.salt) != (new.name, new.uid, new.salt):
        raise ValueError(f"name, uid and salt of topic {name} can not be changed")
    if missing := sorted(set(old.record.partitions) - set(new.partitions)):
        raise ValueError(f"partitions {missing} of topic {name} can not be taken away")
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
    """ValueError unless there is a record for each partition that the settings ask for."""
    wanted: Iterable[int] = range(record.settings.partitions)
    if set(record.partitions) != set(wanted):
        raise ValueError(
            f"topic {record.name} has settings for {record.settings.partitions} partitions and records of "
            f"{sorted(record.partitions)}"
        )


def changed_settings(record: TopicRecord, changes: Mapping[str, Any]) -> TopicSettings:
    """ValueError if they do not fit each other or what is there."""
    settings = replace(record.settings, **changes)
    there = len(record.partitions)
    if settings.partitions < there:
        raise ValueError(
            f"topic {record.name} has {there} partitions; they can not become {settings.partitions}, only more"
        )
    check_settings(settings)
    return settings


def check_settings(settings: TopicSettings) -> None:
    """ValueError for what the record alone does not refuse: min_isr against replicas that are not said."""
    if settings.replicas is None and (settings.min_isr or 0) > DEFAULT_REPLICAS:
        raise ValueError(
            f"min_isr is {settings.min_isr}; it can not be more than replicas, {DEFAULT_REPLICAS} unless they are set"
        )


def with_settings(record: TopicRecord, changes: Mapping[str, Any]) -> TopicRecord:
    """The record with these settings and what follows for its partitions; new ones are the controller's to place.

    ValueError if they do not fit each other or what is there."""
    if is_ephemeral(record.name) and (fixed := sorted({"partitions", "replicas", "min_isr"} & changes.keys())):
        raise ValueError(f"{record.name} is kept by one node only, in one partition: {fixed[0]} can not be changed")
    settings = changed_settings(record, changes)
    metas = with_min_isr(record, settings) if changes.keys() & {"min_isr", "replicas"} else record.partitions
    new = {number: PartitionMeta() for number in range(len(metas), settings.partitions)}
    return replace(record, settings=settings, partitions={**metas, **new})


def with_min_isr(record: TopicRecord, settings: TopicSettings) -> dict[int, PartitionMeta]:
    """The partitions' records with the floor that the settings say, as far as there are replicas.

    Where more replicas are yet to come it rises with the move that brings them, so that nothing stands still meanwhile.
    """
    metas = {}
    for number, meta in record.partitions.items():
        there = max(len(meta.replicas), 1)
        metas[number] = replace(meta, min_isr=min(min_isr_of(settings, there), there))
    return metas


def check_intent_name(name: str) -> None:
    if not _INTENT.fullmatch(name):
        raise ValueError(f"{name!r} is not a name for an intent: 1 to 200 letters, digits, . _ - # /")
