"""How many calls the gRPC port answered, by method and status, for /metrics.

A call counts when it ends, a stream of answers with its last. What is in no table of methods counts as one method, so
that no caller can make series; a gate answers also for what nobody serves.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc import aio

from nsqha.access.surfaces import GRPC
from nsqha.cluster_secret import CHALLENGE_PATH

NO_METHOD = "(none)"
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}

_METHODS = frozenset((*GRPC, CHALLENGE_PATH[1:]))

Context = Any  # grpc.aio.ServicerContext, which has no usable types


class CallCounter(aio.ServerInterceptor):  # type: ignore[misc]  # untyped
    """Stands before all gates, so that what they refuse counts too."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            self.counts[NO_METHOD, grpc.StatusCode.UNIMPLEMENTED.name] += 1
            return None
        method = details.method[1:]
        return self._counting(method if method in _METHODS else NO_METHOD, handler)

    def _counting(self, method: str, handler: Any) -> Any:
        """The same handler, whose calls count."""
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[bool(handler.request_streaming), bool(handler.response_streaming)]
        wrapped = self._answering if inspect.iscoroutinefunction(behaviour) else self._streaming
        return make(wrapped(method, behaviour), handler.request_deserializer, handler.response_serializer)

    def _answering(self, method: str, behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
        """Of one that returns its answer, or writes the answers itself."""

        async def counted(request: Any, context: Context) -> Any:
            with self._counted(method, context):
                return await behaviour(request, context)

        return counted

    def _streaming(self, method: str, behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
        async def counted(request: Any, context: Context) -> AsyncIterator[Any]:
            with self._counted(method, context):
                async for message in behaviour(request, context):
                    yield message

        return counted

    @contextmanager
    def _counted(self, method: str, context: Context) -> Iterator[None]:
        code = grpc.StatusCode.UNKNOWN.name  # what gRPC answers when a method raises
        try:
            yield
            code = _name(context.code())
        except aio.AbortError:
            code = _name(context.code())
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED.name
            raise
        finally:
            self.counts[method, code] += 1


def _name(code: Any) -> str:
    """Of a status as a context has it: a number, or one of gRPC's."""
    name: str | None = getattr(code, "name", None)
    return name or _NAMES.get(code or 0, grpc.StatusCode.UNKNOWN.name)
