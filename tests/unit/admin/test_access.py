"""What gets through to the Admin service without a look at who asks: nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from nsqha.admin import access
from nsqha.admin.access import AdminGate, only_single_requests
from nsqha.errors import ConfigError
from nsqha.pb.v1 import admin_pb2, routing_pb2

ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]


def passed(handler: Any, method: str) -> Any:
    """The handler that is called instead."""

    async def found(details: Any) -> Any:
        return handler

    gate = AdminGate(None)
    return asyncio.run(gate.intercept_service(found, SimpleNamespace(method=method)))


def test_a_service_with_requests_in_streams_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    routing = routing_pb2.DESCRIPTOR.services_by_name["Routing"]
    only_single_requests(ADMIN)
    with pytest.raises(TypeError, match="Routing/Forward"):
        only_single_requests(routing)
    monkeypatch.setattr(access, "_ADMIN", routing)
    with pytest.raises(TypeError, match="Routing/Forward"):
        AdminGate(None)


@pytest.mark.parametrize(
    "handler",
    [
        grpc.stream_unary_rpc_method_handler(print, bytes),
        grpc.stream_stream_rpc_method_handler(print, bytes),
        grpc.unary_unary_rpc_method_handler(print),
    ],
)
def test_what_can_not_be_looked_at_is_passed_on_to_other_services_only(handler: Any) -> None:
    assert passed(handler, "/nsqha.v1.Routing/Forward") is handler
    with pytest.raises(TypeError):
        passed(handler, f"/{ADMIN.full_name}/Anything")


def test_single_requests_are_looked_at_and_unknown_methods_are_nobodys() -> None:
    handler = grpc.unary_unary_rpc_method_handler(print, bytes)
    assert passed(handler, f"/{ADMIN.full_name}/Anything") is not handler
    assert passed(None, f"/{ADMIN.full_name}/Anything") is None


def test_a_method_that_is_in_no_table_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    AdminGate.check_table([ADMIN])
    monkeypatch.setattr(access, "GRPC", {name: need for name, need in access.GRPC.items() if "Seek" not in name})
    with pytest.raises(ConfigError, match=r"nsqha\.v1\.Admin/Seek is in no table of nsqha.access.surfaces"):
        AdminGate.check_table([ADMIN])


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (admin_pb2.SeekResponse(partitions=[admin_pb2.SeekPartition(again=9)]), "done"),
        (
            admin_pb2.SeekResponse(partitions=[admin_pb2.SeekPartition(skipped=3), admin_pb2.SeekPartition(skipped=4)]),
            "done; skips 7 never finished",
        ),
        (
            admin_pb2.SeekResponse(partitions=[admin_pb2.SeekPartition(skipped=3), admin_pb2.SeekPartition(error="x")]),
            "failed: PARTITIONS (1); skips 3 never finished",
        ),
        (admin_pb2.EmptyChannelResponse(skipped=5, dead=1), "done; skips 5 never finished"),
        (
            admin_pb2.SkipDamageResponse(skipped=[admin_pb2.SkippedDamage(messages_lost=2)]),
            "done; skips 2 never finished",
        ),
        (
            admin_pb2.ChangeMessagesResponse(
                partitions=[admin_pb2.ChangedMessages(changed=1, failed=[admin_pb2.FailedMessage(error="x")] * 2)]
            ),
            "failed: MESSAGES (2)",
        ),
    ],
)
def test_a_record_says_what_failed_and_what_is_skipped(answer: Any, outcome: str) -> None:
    assert access.outcome_of(answer) == outcome
