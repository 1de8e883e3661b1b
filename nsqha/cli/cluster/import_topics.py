"""`nsqha cluster import`: the topics of a single node become topics of a cluster.

The node is stopped (its data folder is locked meanwhile). Uids and salts stay, so the logs and the ids in them stay
valid; each partition gets an epoch above everything the node has promised, this node as its only replica, and its log
in the ISR. The controller elects it once it is started with --etcd-endpoint, and then adds replicas.

    checked: no topic of that name, no unfinished deletion, no log that cannot be vouched for
    put      topics into etcd                 a run after a crash leaves topics with the same uid as they are
    journal  belongs to that cluster now      the node refuses any other
    moved    metadata -> metadata.imported    is not used any more
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqha.cli.cluster.access import EtcdArguments
from nsqha.cli.cluster.recording import asked
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.screen import confirm, print_json
from nsqha.clock import SystemClock
from nsqha.commitlog.journal import NodeJournal, PartitionRecord
from nsqha.commitlog.storage import OsStorage
from nsqha.election.embedded import EmbeddedStore
from nsqha.election.model import PartitionMeta, TopicRecord
from nsqha.ids import is_ephemeral

if TYPE_CHECKING:
    from nsqha.election.etcd.store import EtcdStore

METADATA, IMPORTED = "metadata", "metadata.imported"


def run(args: argparse.Namespace) -> int:
    folder = os.path.abspath(args.data_path)
    if not (Path(folder) / "journal").is_file() or not (Path(folder) / METADATA).is_file():
        raise exits.Exit(exits.NOT_FOUND, f"{folder} is not the data folder of a single node")
    rng = random.SystemRandom()
    storage = OsStorage()
    journal = NodeJournal.open(storage, folder, rng)
    try:
        # The highest revision that the journal has seen may be etcd's already, if an earlier import was interrupted.
        single = EmbeddedStore(storage, f"{folder}/{METADATA}", rng)
        try:
            shown = _import(args, folder, journal, single)
        finally:
            single.close()
        os.replace(f"{folder}/{METADATA}", f"{folder}/{IMPORTED}")
        storage.sync_dir(folder)
    finally:
        journal.close()
    if args.json:
        print_json(shown)
    else:
        names = ", ".join(shown["topics"]) or "no topic"
        print(
            f"imported {names}; node {shown['node']} has all of it. Start it as a member, with a name of your choice:"
        )
        etcd = " ".join(f"--etcd-endpoint {endpoint}" for endpoint in EtcdArguments.of(args).etcd_endpoints)
        cluster = "" if shown["cluster"] == "nsqha" else f" --cluster-name {shown['cluster']}"
        print(f"  nsqha broker {etcd}{cluster} --data-path {shlex.quote(folder)} --node-name NAME")
    return exits.OK


def _import(args: argparse.Namespace, folder: str, journal: NodeJournal, single: EmbeddedStore) -> dict[str, Any]:
    from nsqha.election.etcd.access import open_store

    if why := journal.node.poisoned:
        raise exits.Exit(exits.FAILED, f"{folder} was closed after a disk failure: {why}; repair it first")
    if single.records.tombstones():
        raise exits.Exit(exits.FAILED, "some deletions are not finished; start the node once without etcd, and stop it")
    topics = {name: topic.record for name, topic in single.records.topics().items() if not is_ephemeral(name)}
    records = {name: imported(record, journal) for name, record in topics.items()}
    flags = EtcdArguments.of(args)
    question = f"move {len(records):,} topics of {folder} into cluster {flags.cluster_name}?"
    confirm(f"{question} Afterwards this node cannot run without the cluster.", yes=args.yes)
    store = open_store(flags, SystemClock(), random.SystemRandom())
    try:
        target = f"node={journal.identity.node_uid:016x} topics={','.join(sorted(records))}"
        with asked(store.intents, args, "import", target) as change, change.change():
            put_all(store, records)
        identity = store.identity()
        cluster_id = store.records.cluster().record.cluster_id
        journal.node.accept_metadata(
            cluster_id=cluster_id, etcd_cluster_id=identity.etcd_cluster_id, revision_seen=identity.revision
        )
        journal.commit()
    finally:
        store.close()
    return {
        "cluster": flags.cluster_name,
        "cluster_id": f"{cluster_id:016x}",
        "node": f"{journal.identity.node_uid:016x}",
        "topics": sorted(records),
    }


def put_all(store: EtcdStore, records: Mapping[str, TopicRecord]) -> None:
    """Store all records, or none if one is refused; what an interrupted import has stored stays. Exit, Conflict."""
    there = store.records.topics()
    for name, record in records.items():
        if name in there and there[name].record.uid != record.uid:
            raise exits.Exit(exits.CONFLICT, f"the cluster has a topic {name} already; rename or delete one of the two")
    for name, record in records.items():
        if name not in there:
            store.records.put_recovered(record)


def imported(record: TopicRecord, journal: NodeJournal) -> TopicRecord:
    """The record for the cluster: no leader yet, one replica, an epoch above every promise. Raises Exit if a log
    cannot be vouched for."""
    node = journal.identity.node_uid
    partitions = {}
    for number, meta in record.partitions.items():
        found = journal.record((record.uid, number))
        partitions[number] = partition(meta, node, found, f"{record.name}/{number}")
    # Above the copies that the logs have, so that leaders bring the logs in line with this one.
    channels = record.channels.above(record.channels.version)
    return replace(record, partitions=partitions, channels=channels)


def partition(meta: PartitionMeta, node: int, found: PartitionRecord | None, name: str) -> PartitionMeta:
    if found is None or not found.log_uid or not found.log_uid_trusted or found.cut is not None:
        raise exits.Exit(exits.FAILED, f"{name} was not recovered yet; start the node once without etcd, and stop it")
    return PartitionMeta(
        leader=0,
        epoch=max(meta.epoch, found.promise) + 1,
        isr={node: found.log_uid},
        replicas=(node,),
        min_isr=1,
        sync=meta.sync,
        unknown=meta.unknown,
    )
