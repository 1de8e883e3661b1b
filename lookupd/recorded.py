"""Changes that `nsqha cluster` wrote into the metadata, taken into this daemon's audit by the controller.

    recorded/<id> with an outcome     recorded, then removed
    recorded/<id> without one         the command works, or died: after UNFINISHED_S it is removed, and recorded as
                                      `unknown`

The first may be recorded twice when the controller dies between the two steps, the second is lost then: nothing else is
ever recorded twice or lost. Only the controller does this, and the store refuses it once another one is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nsqha.election.model import Versioned
from nsqha.election.recorded import PREFIX, WAITING_MAX, RecordedChange, read_recorded
from nsqha.election.store import Intent, MetadataIntents
from nsqha.errors import Conflict, OutcomeUnknown, Unavailable
from nsqha.server.authorization.audit import AdminAction, Audit

if TYPE_CHECKING:
    from nsqha.server.runtime.metadata import RunBlocking
    from nsqha.server.runtime.tasks import TaskGroup

UNFINISHED_S = 120.0
"""Longer than a command may take from its first write to its last one (`nsqha cluster accept-metadata` waits for all
nodes between)."""
AGAIN_S = 1.0
TAKEN_MAX = 2 * WAITING_MAX
ROLE, SURFACE = "etcd", "etcd"
DIED = "unknown: INTERRUPTED"


class RecordedChanges:
    """The records of one lookup daemon, over all its terms as controller. Used on its loop."""

    def __init__(self, intents: MetadataIntents, run: RunBlocking, audit: Audit) -> None:
        self._intents = intents
        self._run = run
        self._audit = audit
        self._taken: dict[str, None] = {}  # recorded; the latest, as what is read may be of before a removal

    def heed(self, intents: Mapping[str, Versioned[Intent]], epoch: int, tasks: TaskGroup, known: set[str]) -> None:
        """Take what is new among these intents. `known` is the term's: what a task of it looks after."""
        for name, intent in intents.items():
            key = f"{name} {intent.version}"
            if not name.startswith(PREFIX) or key in known or len(known) >= WAITING_MAX:
                continue
            known.add(key)
            done = tasks.spawn(self._take(name, intent.version, read_recorded(intent.record), epoch))
            done.add_done_callback(lambda _, key=key: known.discard(key))  # type: ignore[misc]

    async def _take(self, name: str, version: int, change: RecordedChange, epoch: int) -> None:
        if not change.outcome:
            await asyncio.sleep(UNFINISHED_S)
            if await self._removed(name, version, epoch):
                self._audit.record(_action(change, DIED))
            return
        if name not in self._taken:
            self._taken[name] = None
            if len(self._taken) > TAKEN_MAX:
                del self._taken[next(iter(self._taken))]
            self._audit.record(_action(change, change.outcome))
        await self._removed(name, version, epoch)

    async def _removed(self, name: str, version: int, epoch: int) -> bool:
        """Remove the record; False: this version of it is gone already."""
        doubt = False
        while True:
            try:
                await self._run(lambda: self._intents.remove(name, version, controller=epoch))
                return True
            except Conflict:
                if not doubt:
                    return False
            except OutcomeUnknown:
                doubt = True
            except Unavailable:
                pass
            if doubt:
                # Gone after an outcome that was not known: it was this process.
                with contextlib.suppress(Unavailable, OutcomeUnknown):
                    found = (await self._run(self._intents.all)).get(name)
                    if found is None or found.version != version:
                        return found is None
            await asyncio.sleep(AGAIN_S)


def _action(change: RecordedChange, outcome: str) -> AdminAction:
    return AdminAction(
        who=change.who,
        role=ROLE,
        address=change.address,
        surface=SURFACE,
        method=change.method,
        target=change.target,
        plan=change.plan,
        outcome=outcome,
        took=change.took,
    )
