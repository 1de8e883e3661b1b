"""Nodes whose certificates name a host and no node uid, and one of them loses etcd: its name is in no record then."""

from __future__ import annotations

import urllib.error
from pathlib import Path

import pytest

from tests.certificates import Certificates
from tests.etcd_server import EtcdServer
from tests.integration.cluster import Cluster, Member, published_and_read_through
from tests.integration.servers import wait_until
from tests.tcp_relay import Relay

pytestmark = pytest.mark.timeout(180)


def shown(node: Member, topic: str, channel: str) -> bool:
    try:
        node.request(f"/channel/policy?topic={topic}&channel={channel}")
    except urllib.error.HTTPError:
        return False
    return True


def test_a_node_that_lost_etcd_still_serves_its_clients(tmp_path: Path, etcd: EtcdServer) -> None:
    (tmp_path / "made").mkdir()
    made = Certificates(tmp_path / "made")
    made.issue("third", "IP:127.0.0.1", "DNS:third.example")
    made.issue("others", "IP:127.0.0.1", "DNS:localhost")
    made.issue("lookupd", "DNS:lookupd.example")

    def tls(name: str) -> list[str]:
        files = {"cert": made.cert(name), "key": made.key(name), "ca": made.cert("ca")}
        return [f"--cluster-tls-{flag}={path}" for flag, path in files.items()]

    def flags(name: str) -> list[str]:
        third = ["--broadcast-address=third.example", *tls("third")]
        return third if name == "n3" else ["--broadcast-address=localhost", *tls("others")]

    whole = Cluster(tmp_path / "cluster", etcd, flags=flags, lookupd_flags=tls("lookupd"))
    with Relay.to(etcd.client_port) as relay:
        cut = whole.nodes[2]
        endpoint, ours = (f"--etcd-endpoint={to}" for to in (etcd.endpoint, relay.endpoint))
        cut.flags = [ours if flag == endpoint else flag for flag in cut.flags]
        with whole.started() as cluster:
            cluster.create("orders", "steady")
            cluster.wait_isr("orders", 3)
            assert cluster.leader("orders") is not cut
            wait_until(lambda: shown(cut, "orders", "steady"), "the node that will be cut knows of the channel")
            relay.cut()
            cluster.wait_registered(2)
            published_and_read_through(cut, "orders")
            cut.kill()
            relay.release()
            cut.start()
            cluster.wait_isr("orders", 3)
