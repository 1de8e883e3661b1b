"""/debug/pprof: what this process does, as far as nsqd's endpoints have a meaning in Python. All answers are text.

    /debug/pprof/             the list
    /debug/pprof/cmdline      the command line, NUL between its words
    /debug/pprof/goroutine    the stack of every task (also threadcreate: of every thread)
    /debug/pprof/heap         the largest places of allocation, if the process runs with PYTHONTRACEMALLOC=1
    /debug/pprof/profile      ?seconds=30: folded stacks `a;b;c count` of all threads, ready for a flame graph

`block`, `symbol` and Go's binary formats are not offered: 404.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from types import FrameType
from typing import Any, TypeVar

from nsqha.server.http.server import ApiError, HttpApi, HttpRequest
from nsqha.server.runtime.tasks import in_thread

PROFILE_HZ = 100
PROFILE_SECONDS_MAX = 300.0
HEAP_LINES = 50
_profiling = threading.Lock()

T = TypeVar("T")


def add_to(api: HttpApi) -> None:
    for path in ("/debug/pprof", "/debug/pprof/"):
        api.add("GET", path, _index, plain=True)
    for name, handler in (
        ("cmdline", _cmdline),
        ("goroutine", _tasks),
        ("threadcreate", _threads),
        ("heap", _heap),
        ("profile", _profile),
    ):
        api.add("GET", f"/debug/pprof/{name}", handler, plain=True)


async def _index(_request: HttpRequest) -> object:
    return __doc__


async def _cmdline(_request: HttpRequest) -> object:
    return "\0".join(sys.orig_argv)


async def _tasks(_request: HttpRequest) -> object:
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    parts = [f"{len(tasks)} tasks"]
    for task in tasks:
        parts.append("\n".join([task.get_name(), *map(_place, _awaiting(task.get_coro()))]))
    return "\n\n".join(parts) + "\n"


def _awaiting(coro: Any) -> Iterator[FrameType]:
    """The frames of a suspended coroutine, outermost call first."""
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None) or getattr(coro, "ag_frame", None)
        if frame is None:
            return
        yield frame
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None) or getattr(coro, "ag_await", None)


async def _threads(_request: HttpRequest) -> object:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, innermost in sys._current_frames().items():
        places = [_place(frame) for frame in _callers(innermost)]
        parts.append("\n".join([f"thread {names.get(ident, ident)}", *reversed(places)]))
    return "\n\n".join(parts) + "\n"


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    # Compiled code has frames without line.
    return f"    {frame.f_code.co_filename}:{frame.f_lineno or '?'} {frame.f_code.co_qualname}"


async def _heap(_request: HttpRequest) -> object:
    if not tracemalloc.is_tracing():
        return "tracemalloc is off; start with PYTHONTRACEMALLOC=1 to see where memory is allocated\n"
    lines = await in_thread(lambda: tracemalloc.take_snapshot().statistics("lineno")[:HEAP_LINES])
    current, peak = tracemalloc.get_traced_memory()
    return f"{current} bytes now, {peak} at most\n\n" + "".join(f"{line}\n" for line in lines)


async def _profile(request: HttpRequest) -> object:
    text = request.query.get("seconds") or "30"
    try:
        seconds = float(text)
    except ValueError:
        raise ApiError(400, "INVALID_REQUEST") from None
    if not 0 < seconds <= PROFILE_SECONDS_MAX:
        raise ApiError(400, "INVALID_REQUEST")
    if not _profiling.acquire(blocking=False):
        raise ApiError(503, "another profile is being taken; try again when it has ended")
    stacks = await in_thread(lambda: _sample_and_release(seconds))
    return "".join(f"{stack} {count}\n" for stack, count in stacks.most_common())


def _sample_and_release(seconds: float) -> Counter[str]:
    try:
        return sample(seconds)
    finally:
        _profiling.release()


def sample(seconds: float) -> Counter[str]:
    """Count the stacks of all other threads, PROFILE_HZ times a second."""
    me = threading.get_ident()
    found: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for ident, frame in sys._current_frames().items():
            if ident != me:
                found[_folded(frame)] += 1
        time.sleep(1 / PROFILE_HZ)
    return found


def _folded(innermost: FrameType) -> str:
    names = [f"{PurePath(f.f_code.co_filename).stem}.{f.f_code.co_qualname}" for f in _callers(innermost)]
    return ";".join(reversed(names))
