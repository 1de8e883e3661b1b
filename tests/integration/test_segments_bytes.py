"""Bytes of stored segments from real nodes are the bytes in their files, whichever replica is asked."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.cli.log import folders
from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.reading.lookup import LogIdentity, LogReader
from nsqha.commitlog.storage import OsStorage
from pyspark_nsqha.model import PartitionLife, ReadFailed, ReplicaAddress, Split
from pyspark_nsqha.options import Tls
from pyspark_nsqha.reading import fetch
from tests.certificates import Certificates
from tests.integration.cluster import Cluster
from tests.integration.devnode import DevNode
from tests.integration.servers import Node, wait_until


def log_in(data: Path, topic: str) -> LogReader:
    """Of the topic's partition 0."""
    (folder,) = folders(str(data), topic, 0)
    return LogReader.open(OsStorage(), folder.path, LogIdentity(folder.topic_uid, folder.partition))


def split_of(log: LogReader, *addresses: str, end: int | None = None, **more: Any) -> Split:
    """All that is in a log, or up to `end`."""
    last, identity = log.entry((end or log.end.log_id) - 1), log.identity
    return Split(
        PartitionLife("orders", identity.topic_uid, identity.partition, 0),
        first=log.start.offset,
        end=last.end_offset,
        first_log_id=log.start.log_id,
        end_log_id=last.log_id + 1,
        first_offset=log.start.offset,
        end_offset=last.end_offset,
        at_log_id=last.log_id,
        chain=last.chain,
        replicas=tuple(ReplicaAddress(address) for address in addresses),
        **more,
    )


def served(split: Split, **options: Any) -> tuple[bytes, bytes, int]:
    """Entries, frames, and in how many runs they came."""
    entries, frames, n = bytearray(), bytearray(), 0
    for run in fetch.runs(split, **{"retries": 0, **options}):
        assert run.first_log_id == split.first_log_id + len(entries) // ENTRY_BYTES
        entries += run.entries
        frames += run.frames
        n += 1
    return bytes(entries), bytes(frames), n


def in_files(log: LogReader, split: Split) -> tuple[bytes, bytes]:
    entries = list(log.entries(split.first_log_id, split.end_log_id))
    frames = b"".join(log.files.pair_of(e.log_id).read_data(e.position, e.size) for e in entries)
    return b"".join(e.encode() for e in entries), frames


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("node"), "--sync=none")
    node.create("orders", "billing")
    for n in range(50):
        node.publish("orders", *(f"{n} {i} ".ljust(400, "x") for i in range(100)))
    yield node
    node.stop()


def test_a_node_serves_what_is_in_its_files(node: DevNode) -> None:
    log = log_in(node.folder / "data", "orders")
    split = split_of(log, node.segments)
    entries, frames, n = served(split, run_bytes=100_000)
    assert (entries, frames) == in_files(log, split)
    assert n > 5

    def counted() -> bool:  # once the last byte has left
        return metrics(node)["nsqha_segments_sent_bytes_total"] == len(entries + frames)

    wait_until(counted, "the bytes are counted")
    assert metrics(node)['nsqha_segments_requests_total{status="200"}'] == 1


def metrics(node: DevNode) -> dict[str, float]:
    lines = urllib.request.urlopen(f"http://{node.http}/metrics").read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_with_cluster_tls_a_reader_needs_a_certificate_that_says_so(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.issue("node", "IP:127.0.0.1", f"URI:nsqha:node/{0xAB:016x}")
    certificates.issue("reader", "URI:nsqha:reader")
    certificates.issue("other", "URI:nsqha:node/00000000000000cd")
    files = {"cert": certificates.cert("node"), "key": certificates.key("node"), "ca": certificates.cert("ca")}
    with Node(tmp_path / "n", sync="none", flags=[f"--cluster-tls-{name}={path}" for name, path in files.items()]) as n:
        publisher = V2Publisher(n.tcp, 30)
        publisher.publish("orders", [b"one", b"two"])
        publisher.close()
        found = wait_until(lambda: re.search(r"segments: listening on (\S+)", n.log()), "it serves segments")
        log = log_in(n.data, "orders")
        split = split_of(log, found[1])

        def tls(name: str) -> Tls:
            return Tls(certificates.cert(name), certificates.key(name), certificates.cert("ca"))

        assert served(split, tls=tls("reader"))[:2] == in_files(log, split)
        with pytest.raises(ReadFailed, match=r"403 the certificate of .* is not a reader's"):
            served(split, tls=tls("other"))
        with pytest.raises(ReadFailed):
            served(split)


def test_each_replica_of_a_cluster_serves_the_same(tmp_path: Path) -> None:
    with Cluster.running(tmp_path, nodes=3, sync="none") as cluster:
        cluster.create("orders", "billing")
        leader = cluster.leader("orders")
        publisher = V2Publisher(leader.tcp, 30)
        for n in range(20):
            publisher.publish("orders", [f"{n} {i} ".ljust(300, "x").encode() for i in range(50)])
        publisher.close()
        infos = {info.name: info for info in cluster.store.watch.view().nodes.values()}
        log = log_in(leader.data, "orders")
        split = split_of(log)
        wanted = in_files(log, split)
        for member in cluster.nodes:
            address = infos[member.name].segments_address

            def same(address: str = address) -> bool:
                try:
                    return served(split_of(log, address, end=split.end_log_id))[:2] == wanted
                except ReadFailed as error:
                    assert "409" in str(error) or "404" in str(error)
                    return False

            wait_until(same, f"{member} serves it")
