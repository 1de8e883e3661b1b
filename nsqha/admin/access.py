"""Checks before a call is carried out: the caller has permission (`nsqha.server.peers.identity`), and the request can
be read.

Health and reflection are open to every client that can connect. Methods between nodes check their callers themselves
(`nsqha.server.peers.calls`).

The caller is checked when the request has arrived. So no method of these services takes a stream of requests.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from nsqha.nsqlog import Logger
from nsqha.pb.v1 import admin_pb2, segments_pb2
from nsqha.server.peers import calls as peer_grpc
from nsqha.server.peers.api import ADMINISTRATOR_URI, READER_URI, PeerIdentity
from nsqha.server.peers.identity import may_administrate, may_read
from nsqha.server.runtime.rare_warnings import RareWarnings

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

    from nsqha.election.session import View

_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
_SEGMENTS = segments_pb2.DESCRIPTOR.services_by_name["Segments"]

logger = Logger("admin")

Context = Any  # grpc.aio.ServicerContext, which has no usable types


class Rule(NamedTuple):
    """Who may call the methods of one service."""

    prefix: str
    may: Callable[[View, PeerIdentity], bool]
    who: str  # for the one who is refused


def _rules() -> list[Rule]:
    administrator, reader = f"no administrator's ({ADMINISTRATOR_URI})", f"no reader's ({READER_URI})"
    return [
        Rule(f"/{_ADMIN.full_name}/", may_administrate, administrator),
        Rule(f"/{_SEGMENTS.full_name}/", may_read, f"{reader}, {administrator}"),
    ]


def only_single_requests(service: ServiceDescriptor) -> None:
    """TypeError if a method of it takes a stream of requests."""
    for method in service.methods:
        if method.client_streaming:
            raise TypeError(f"{service.full_name}/{method.name}: the caller would not be checked")


class AdminGate(aio.ServerInterceptor):  # type: ignore[misc]  # untyped
    """Ends calls of the Admin and Segments services with PERMISSION_DENIED unless the certificate is a member's or an
    administrator's, for Segments also a reader's. A request that cannot be parsed ends any call with INVALID_ARGUMENT.
    """

    def __init__(self, view: Callable[[], View]) -> None:
        """`view` returns the cluster's view; that of a node without a cluster is empty."""
        for service in (_ADMIN, _SEGMENTS):
            only_single_requests(service)
        self._view = view
        self._rules = _rules()
        self._refused = RareWarnings(logger, "stranger_refused")

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = await continuation(details)
        method: str = details.method
        rule = next((rule for rule in self._rules if method.startswith(rule.prefix)), None)
        if handler is None:
            return None
        if handler.request_streaming or handler.request_deserializer is None:
            if rule is not None:
                raise TypeError(f"{method}: the caller would not be checked")
            return handler

        async def read(data: bytes, context: Context) -> Any:
            if rule is not None:
                await self._check(rule, self._view(), context, method)
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                why = f"{len(data)} bytes that are no request of {method}"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)

        if handler.unary_unary is not None:

            async def answer(data: bytes, context: Context) -> Any:
                return await handler.unary_unary(await read(data, context), context)

            return grpc.unary_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)

        if inspect.iscoroutinefunction(handler.unary_stream):

            async def writes(data: bytes, context: Context) -> None:
                await handler.unary_stream(await read(data, context), context)

            return grpc.unary_stream_rpc_method_handler(writes, response_serializer=handler.response_serializer)

        async def answers(data: bytes, context: Context) -> AsyncIterator[Any]:
            async for message in handler.unary_stream(await read(data, context), context):
                yield message

        return grpc.unary_stream_rpc_method_handler(answers, response_serializer=handler.response_serializer)

    async def _check(self, rule: Rule, view: View, context: Context, method: str) -> None:
        peer = peer_grpc.identity_of(context.auth_context(), peer_grpc.address_of(context))
        if rule.may(view, peer):
            return
        self._refused.warning("%s from %s: %s, and no node's of this cluster", method, peer, rule.who)
        why = f"the certificate of {peer} is {rule.who}, and no node's of this cluster"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
