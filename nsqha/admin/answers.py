"""How an RPC of ours ends when it fails: our errors as gRPC status codes, in a text that fits.

Another node that asked gets the error that it was, by a trailer.
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
    """A unary RPC that raises our errors."""

    @wraps(method)
    async def rpc(self: Any, request: Any, context: Context) -> T:
        try:
            return await method(self, request)
        except Exception as error:
            await refuse(context, error)
            raise

    return rpc


async def refuse(context: Context, error: Exception) -> None:
    """End the call with the status that stands for `error`; return if none does: that is a bug of ours."""
    for kind, code in _STATUS:
        if isinstance(error, kind):
            # Another node that asked gets the error that it was.
            told = ((ERROR_TRAILER, kind_and_text(error)[0]),)
            await context.abort(code, _short(str(error)) or type(error).__name__, trailing_metadata=told)
    logger.error("rpc_failed", "an administration call failed", error=error)


def _short(text: str) -> str:
    """What fits the end of a call: a header that is too long for the caller ends the whole connection."""
    return text if len(text) <= TOLD_MAX else f"{text[:TOLD_MAX]}..."
