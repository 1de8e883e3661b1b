"""A load in a thread of its own, so that whoever breaks things may block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import uvloop

from tests.jepsen.checkers.judgement import Report, judge
from tests.jepsen.history import History
from tests.jepsen.load.publishers import OUTCOME_SECONDS

END_SECONDS = 95.0  # in which a load has drained, beside what a publish may take


class AnyLoad(Protocol):
    history: History

    def begin(self) -> None: ...
    async def end(self) -> list[str]: ...


L = TypeVar("L", bound=AnyLoad)


class Background(Generic[L]):
    """A load in a thread of its own, so that whoever breaks the cluster may block; `finish` has its judgement."""

    def __init__(self, make: Callable[[], L], enter: Callable[[], None] = lambda: None) -> None:
        """`make` is called on the load's loop; `enter` before there is one, in its thread."""
        self.load: L
        self.stuck: list[str] = []
        self._make = make
        self._enter = enter
        self._error: BaseException | None = None
        self._task: asyncio.Task[object] | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> L:
        self._thread.start()
        assert self._begun.wait(10), "the load did not begin"
        return self.load

    def _run(self) -> None:
        try:
            self._enter()
            uvloop.run(self._main())
        except BaseException as error:
            self._error = error

    async def _main(self) -> None:
        self.load = self._make()
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._enough = asyncio.Event()
        self.load.begin()
        self._begun.set()
        await self._enough.wait()
        self.stuck = await self.load.end()

    def finish(self) -> Report:
        """End the load; what it saw, judged."""
        self._loop.call_soon_threadsafe(self._enough.set)
        self._thread.join(OUTCOME_SECONDS + END_SECONDS)
        assert not self._thread.is_alive(), "the load does not end"
        if self._error is not None:
            raise self._error
        return judge(self.load.history)

    def close(self) -> None:
        """End it in any case, unjudged if it has not been finished: no client of a failed test knocks at later ones."""
        with contextlib.suppress(RuntimeError):  # it has ended
            if self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)
