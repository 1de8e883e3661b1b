"""Records of other nodes: only the node that is named may send them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nsqha.election.model import NodeInfo
from nsqha.errors import NotFound
from nsqha.pb.v1 import routing_pb2
from nsqha.server.routing.audit_copies import AuditCopies


class Peer:
    def __init__(self, uid: int) -> None:
        self.uid = uid

    def may_be(self, uid: int, name: str) -> bool:
        return uid == self.uid


@pytest.mark.parametrize(("uid", "named", "taken"), [(7, "a", True), (8, "a", False), (7, "c", False)])
def test_a_record_is_taken_from_the_node_that_it_names(uid: int, named: str, taken: bool) -> None:
    records: list[tuple[Any, str]] = []
    audit: Any = SimpleNamespace(take=lambda fields, node: records.append((fields, node)))
    nodes = {7: NodeInfo(7, name="a"), 8: NodeInfo(8, name="b")}
    copies = AuditCopies(audit, SimpleNamespace(), lambda: nodes, cluster_id=1, node=9, spawn=lambda work: None)  # type: ignore[arg-type]
    request = routing_pb2.AuditedRequest(cluster_id=1, node=named, record=msgspec.json.encode({"who": "x"}))
    if taken:
        asyncio.run(copies._answer(Peer(uid), request))  # type: ignore[arg-type]
    else:
        with pytest.raises(NotFound):
            asyncio.run(copies._answer(Peer(uid), request))  # type: ignore[arg-type]
    assert records == ([({"who": "x"}, "a")] if taken else [])
