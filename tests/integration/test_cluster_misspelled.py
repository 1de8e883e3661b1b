"""A --cluster-name that etcd does not have, beside clusters that it has."""

from __future__ import annotations

import random
import socket
import subprocess
from pathlib import Path

import pytest

from nsqha.clock import SystemClock
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.storage import OsStorage
from nsqha.election.etcd.access import open_store
from nsqha.errors import ConfigError, NotFound
from nsqha.options import Options
from tests.etcd_server import EtcdServer
from tests.integration.devnode import BIN


def begin(etcd: EtcdServer, name: str, **how: bool | int) -> int:
    """The id of the cluster."""
    flags = Options(etcd_endpoints=(etcd.endpoint,), cluster_name=name)
    store = open_store(flags, SystemClock(), random.Random(), **how)  # type: ignore[arg-type]
    try:
        return store.records.cluster().record.cluster_id
    finally:
        store.close()


def test_another_cluster_is_begun_only_when_it_is_asked_for(etcd: EtcdServer) -> None:
    first = begin(etcd, "orders")  # etcd is empty
    assert begin(etcd, "orders") == first
    with pytest.raises(ConfigError, match=r"has no cluster ordres, but it has orders; correct --cluster-name, or"):
        begin(etcd, "ordres")
    second = begin(etcd, "orders-2", new_cluster=True)
    assert begin(etcd, "orders-2") == second != first
    with pytest.raises(ConfigError, match="no cluster order, but it has orders, orders-2; correct"):
        begin(etcd, "order")
    with pytest.raises(ConfigError, match="no cluster order, but it has orders"):
        begin(etcd, "order", cluster_id=7)  # the id of a node that ran alone
    with pytest.raises(ConfigError, match="of a node that ran alone: `nsqha cluster import` moves its topics"):
        begin(etcd, "orders", cluster_id=7)
    assert begin(etcd, "restored", cluster_id=7, new_cluster=True) == 7
    for n in range(12):
        begin(etcd, f"many-{n:02}", new_cluster=True)
    with pytest.raises(ConfigError, match=r"has many-00, .*, many-09, \.\.; correct"):
        begin(etcd, "order")


def test_a_folder_that_ran_alone_begins_no_cluster_by_a_misspelled_name(etcd: EtcdServer, tmp_path: Path) -> None:
    begin(etcd, "orders")
    journal = NodeJournal.open(OsStorage(), str(tmp_path), random.Random())
    journal.node.join(7)
    journal.commit()
    journal.close()
    for name, refusal in (("ordres", "has no cluster ordres, but it has orders"), ("orders", "nsqha cluster import")):
        words = ["broker", f"--etcd-endpoint={etcd.endpoint}", f"--cluster-name={name}", "--data-path=."]
        words += ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
        done = subprocess.run([str(BIN / "nsqha"), *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        (fatal,) = [line for line in done.stderr.splitlines() if "FATAL" in line]
        assert refusal in fatal


@pytest.mark.parametrize("verb", ["broker", "lookupd"])
def test_daemons_with_a_misspelled_name_end_with_one_line(etcd: EtcdServer, tmp_path: Path, verb: str) -> None:
    begin(etcd, "orders")
    words = [verb, f"--etcd-endpoint={etcd.endpoint}", "--cluster-name=ordres"]
    words += ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    done = subprocess.run([str(BIN / "nsqha"), *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (fatal,) = [line for line in done.stderr.splitlines() if "FATAL" in line]
    assert "has no cluster ordres, but it has orders; correct --cluster-name" in fatal


@pytest.mark.parametrize("verb", ["broker", "lookupd"])
def test_daemons_that_can_not_serve_begin_no_cluster(etcd: EtcdServer, tmp_path: Path, verb: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        words = [verb, f"--etcd-endpoint={etcd.endpoint}", "--cluster-name=fresh", "--new-cluster"]
        words += ["--tcp-address=127.0.0.1:0", f"--http-address={taken}"]
        done = subprocess.run([str(BIN / "nsqha"), *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"--http-address={taken}: cannot listen" in done.stderr
    with pytest.raises(NotFound):
        begin(etcd, "fresh", begin=False)
