"""How a waiting lookup daemon sees at once that the controller's process has died, before its lease ends.

It keeps a connection to the controller's HTTP port, and sends nothing on it. When the connection ends and the port then
*refuses* another one, the process is gone: the machine answers but no process listens. For a silent port, and for one
that was never reached, only the end of the lease counts. Safety does not depend on this judgement: taking the key of a
controller that is alive only ends its term, as every write of a term names its epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from nsqha.election.model import Controller
from nsqha.nsqlog import Logger
from nsqha.server.runtime.backoff import Backoff
from nsqha.server.runtime.tasks import TaskGroup

CONNECT_SECONDS = 1.0
RETRY_SECONDS = 0.02  # first, doubled each time up to
RETRY_SECONDS_MAX = 1.0
SETTLED_SECONDS = 1.0  # a connection that lasted this long was a real one

logger = Logger("standby")

Gone = Callable[[str], Coroutine[None, None, None]]


async def gone(address: str) -> None:
    """Return when the process that listened at host:port has ended; never if it was not reached before."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    reached, backoff = False, Backoff(RETRY_SECONDS, RETRY_SECONDS_MAX)
    while True:
        began = loop.time()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            if reached:
                return
        except (OSError, ValueError, TimeoutError):
            pass  # silent, or about to end: its next answer will show which
        else:
            if not reached:
                logger.info("controller_reached", "waiting beside the controller at %s", address)
            reached = True
            try:
                while await reader.read(1024):
                    pass
            except OSError:
                pass
            finally:
                writer.close()
            if loop.time() - began > SETTLED_SECONDS:
                backoff.reset()
                continue
        await asyncio.sleep(backoff.next_pause())


class Standby:
    """Watches one controller after the other."""

    def __init__(self, gone: Gone, tell: Callable[[Controller], None]) -> None:
        """`tell` is called once for each controller whose process is gone."""
        self._gone = gone
        self._tell = tell
        self._watched = 0  # epoch
        self._tasks = TaskGroup()

    def watch(self, controller: Controller | None) -> None:
        """Watch the current controller; None: there is none, or it is this process."""
        epoch = controller.epoch if controller is not None else 0
        if epoch == self._watched:
            return
        self._watched = epoch
        self._tasks.cancel()
        if controller is not None:
            self._tasks.spawn(self._watch(controller))

    async def _watch(self, controller: Controller) -> None:
        await self._gone(controller.name)
        self._tell(controller)
