"""Who may administrate: see `nsqha.server.members`. Health and reflection are for whoever gets as far as this port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from nsqha.nsqlog import Log
from nsqha.pb.v1 import admin_pb2
from nsqha.server import peer_grpc
from nsqha.server.members import may_administrate

if TYPE_CHECKING:
    from nsqha.election.session import View

_PREFIX = f"/{admin_pb2.DESCRIPTOR.services_by_name['Admin'].full_name}/"

log = Log("admin")

Context = Any  # grpc.aio.ServicerContext, which has no usable types


class AdministratorsOnly(aio.ServerInterceptor):  # type: ignore[misc]  # untyped
    """Ends calls of the Admin service with PERMISSION_DENIED if the certificate names somebody, but no member."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_PREFIX):
            return handler
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:

            async def answer(request: Any, context: Context) -> Any:
                await self._check(context, details.method)
                return await handler.unary_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(answer, **codec)

        async def answers(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._check(context, details.method)
            async for message in handler.unary_stream(request, context):
                yield message

        assert handler.unary_stream is not None, "the service has no method that takes a stream"
        return grpc.unary_stream_rpc_method_handler(answers, **codec)

    async def _check(self, context: Context, method: str) -> None:
        peer = peer_grpc.identity_of(context.auth_context(), context.peer())
        if may_administrate(self._view(), peer):
            return
        log.warning("stranger_refused", "%s from %s: no node of this cluster", method, peer)
        why = (
            f"the certificate names {peer}, which is no node of this cluster; administrators' certificates name nobody"
        )
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
