"""A node that is held tells what it has to those who may ask any node, and to nobody else."""

from __future__ import annotations

import asyncio

import pytest

from nsqha.election.model import PartitionMeta, TopicRecord
from nsqha.errors import Unavailable
from nsqha.options import Options
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.calls import GrpcPeers
from nsqha.server.runtime import tls
from nsqha.server.runtime.certificates import CertificateFiles
from nsqha.server.safe_mode import hold as held
from tests.certificates import Certificates
from tests.unit.server.peer_rig import SERVICES

CLUSTER = 0xC1
ORDERS = TopicRecord("orders", 7, 1, partitions={0: PartitionMeta(isr={1: 11}, replicas=(1, 3))})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    certificates = Certificates(tmp_path_factory.mktemp("made"))
    certificates.issue("held", "IP:127.0.0.1", "URI:nsqha:node/0000000000000001")
    certificates.issue("node", "IP:127.0.0.1", "URI:nsqha:node/0000000000000003")
    certificates.issue("foreign", "IP:127.0.0.1", "URI:nsqha:node/0000000000000063")
    certificates.issue("lookupd", "DNS:lookup1")
    certificates.issue("admin", "URI:nsqha:administrator")
    return certificates


async def answers(made: Certificates, *whose: str) -> list[bool]:
    """Whether each of them is answered."""
    options = Options(
        grpc_address="127.0.0.1:0",
        cluster_tls_cert=made.cert("held"),
        cluster_tls_key=made.key("held"),
        cluster_tls_ca=made.cert("ca"),
    )
    reply = pb.EvidenceReply(name="one")
    server = await held._InventoryServer.serve(
        options, reply, CLUSTER, held.members([ORDERS]), CertificateFiles.of(options)
    )
    found = []
    try:
        for name in whose:
            mine = tls.load_cluster_tls(made.cert(name), made.key(name), made.cert("ca"))
            peers = GrpcPeers(SERVICES, tls=mine)
            try:
                got = await peers.call(server.address, "Evidence", pb.EvidenceRequest(cluster_id=CLUSTER), timeout=10)
                found.append(got == reply)
            except Unavailable:
                found.append(False)
            finally:
                await peers.close()
    finally:
        await server.close()
    return found


def test_evidence_is_for_nodes_of_this_cluster_and_for_lookup_daemons(made: Certificates) -> None:
    assert asyncio.run(answers(made, "node", "lookupd", "foreign", "admin")) == [True, True, False, False]
