"""How a failed RPC ends: nsqha's errors become gRPC status codes, with a text of bounded length.

A trailer carries the kind of the error, so that a calling node can raise the same error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import nsqha.grpc_env  # noqa: F401  # before gRPC

# isort: split
import grpc

from nsqha.errors import (
    Conflict,
    LimitReached,
    LogCorrupt,
    NotFound,
    OutcomeUnknown,
    StorageError,
    Unavailable,
    WrongKind,
)
from nsqha.nsqlog import Logger
from nsqha.server.peers.api import ERROR_TRAILER, kind_and_text

__all__ = ["Context", "answers", "refuse"]

T = TypeVar("T")

logger = Logger("admin")

TOLD_MAX = 500  # characters of an error; percent-encoded they may be twelve bytes each, and 8 KiB always pass

_STATUS = (
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (LimitReached, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (WrongKind, grpc.StatusCode.FAILED_PRECONDITION),
    (Conflict, grpc.StatusCode.ALREADY_EXISTS),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (OutcomeUnknown, grpc.StatusCode.UNKNOWN),
    (LogCorrupt, grpc.StatusCode.DATA_LOSS),
    (StorageError, grpc.StatusCode.INTERNAL),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
)

Context = Any  # grpc.aio.ServicerContext, which has no usable types


def answers(method: Callable[[Any, Any], Awaitable[T]]) -> Callable[[Any, Any, Context], Awaitable[T]]:
    """Wrap a unary RPC that raises nsqha's errors."""

    @wraps(method)
    async def rpc(self: Any, request: Any, context: Context) -> T:
        try:
            return await method(self, request)
        except Exception as error:
            await refuse(context, error)
            raise

    return rpc


async def refuse(context: Context, error: Exception) -> None:
    """End the call with the status for `error`. It returns if there is none, which is a bug in the broker."""
    for kind, code in _STATUS:
        if isinstance(error, kind):
            # With this a calling node raises the same error.
            trailer = ((ERROR_TRAILER, kind_and_text(error)[0]),)
            await context.abort(code, _short(str(error)) or type(error).__name__, trailing_metadata=trailer)
    logger.error("rpc_failed", "an administration call failed", error=error)


def _short(text: str) -> str:
    """Cut the text to TOLD_MAX: a trailer that is too long for the caller ends the whole connection."""
    return text if len(text) <= TOLD_MAX else f"{text[:TOLD_MAX]}..."
