"""What a change that failed is answered by HTTP."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from nsqha.errors import AppendFailed, Conflict, LimitReached, NotFound, OutcomeUnknown, StorageError, Unavailable
from nsqha.server.http.server import ApiError

if TYPE_CHECKING:
    from nsqha.server.http.broker_api import BrokerApi

T = TypeVar("T")


async def done(change: Awaitable[T], broker: BrokerApi, not_found: str = "TOPIC_NOT_FOUND") -> T:
    """Await a change; an error becomes NSQ's code with the reason in `detail`."""
    try:
        return await change
    except NotFound:
        raise ApiError(404, not_found) from None
    except (Unavailable, AppendFailed) as error:
        if broker.exiting:
            raise ApiError(503, "EXITING") from error
        raise ApiError(503, "UNAVAILABLE", detail=str(error)) from error
    except LimitReached as error:
        raise ApiError(507, "LIMIT_REACHED", detail=str(error)) from error
    except Conflict as error:
        raise ApiError(409, "CONFLICT", detail=str(error)) from error
    except OutcomeUnknown as error:
        raise ApiError(504, "OUTCOME_UNKNOWN", detail=str(error)) from error
    except StorageError as error:
        raise ApiError(500, "INTERNAL_ERROR", detail=str(error)) from error
