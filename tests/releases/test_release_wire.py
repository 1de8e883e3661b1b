"""This build reads what nodes of each release said to each other, and takes the batches that they sent."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from nsqha.commitlog import copying
from nsqha.commitlog.entry import Entry
from nsqha.commitlog.log import LogIdentity, LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import MemStorage
from nsqha.election.codec import decode
from nsqha.election.model import Controller, FolderUse, NodeInfo, PartitionMeta, TopicRecord
from nsqha.server.peers.api import methods_of
from nsqha.server.peers.calls import SERVICES
from nsqha.server.peers.greeting import unlike
from tests.releases.test_release_folders import FOUND, each_release, expected

METHODS = methods_of(SERVICES)
RECORDS = {
    "folders": FolderUse,
    "partitions": PartitionMeta,
    "topics": TopicRecord,
    "controller": Controller,
    "nodes": NodeInfo,
}


def wire(release: Path) -> dict[str, Any]:
    return dict(json.loads(lzma.decompress((release / "wire.json.xz").read_bytes())))


def messages(release: Path) -> Iterator[tuple[str, str, bytes, Any]]:
    for name, sides in wire(release)["methods"].items():
        for side, said in sides.items():
            for message in said:
                yield name, side, bytes.fromhex(message["hex"]), message["says"]


@each_release
def test_every_message_says_what_it_said(release: Path) -> None:
    names = set()
    for name, side, data, says in messages(release):
        method = METHODS[name]
        kind = method.request if side == "requests" else method.reply
        assert MessageToDict(kind.FromString(data), preserving_proto_field_name=True) == says, (name, side)
        names.add(name)
    assert names >= {"Push", "Status", "EpochEnd", "Fetch", "Live", "Forward", "Relay", "Reconcile"}


@each_release
def test_the_batches_that_were_sent_are_a_log(release: Path) -> None:
    """In the order in which they were pushed; each checked against its entry and the chain, as a follower does."""
    sent: dict[int, tuple[Entry, bytes, bytes]] = {}
    uids = set()
    for name, side, data, _ in messages(release):
        if name == "Push" and side == "requests":
            for append in METHODS[name].request.FromString(data).appends:
                uids.add(append.topic_uid)
                sent |= {batch[0].log_id: batch for batch in copying.batches(append.entries, append.data)}
    (uid,) = uids
    log = PartitionLog.create(MemStorage(), "log", LogIdentity(uid, 0), cache=BatchCache(1 << 20), limits=LogLimits())
    for _, batch in sorted(sent.items()):
        log.append_copy(*batch)
    assert log.end.offset == len(expected(release, "cluster")["bodies"])


def test_nodes_of_the_last_release_are_worked_with() -> None:
    assert unlike(wire(FOUND[-1])["introduction"]) == ""


@each_release
def test_every_record_of_the_metadata_is_read(release: Path) -> None:
    found = json.loads((release / "etcd.json").read_text())
    read = set()
    for key, value in {**found["kept"], **found["leased"]}.items():
        name = key.split("/")[3]
        if kind := RECORDS.get(name):
            record = decode(kind, value.encode())
            assert not record.unknown
            read.add(name)
    assert read == set(RECORDS)
