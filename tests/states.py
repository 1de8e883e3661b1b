"""Is a channel state what the log beside it says? For the simulation, and for brokers of the fault suite.

    kept = Applied.of(state)           on the loop of its owner
    differences(log.snapshot(), kept)  in any thread; {} if it is, or the log cannot say

The state is made of the log's beginning, or of the oldest checkpoint that the log can begin with: a later one may be of
the state that is wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nsqha.commitlog.entry import BROKEN_CHAIN
from nsqha.cursor.committed.checkpoint import digest
from nsqha.cursor.committed.loading import load
from nsqha.cursor.committed.state import PartitionState
from nsqha.errors import LogCorrupt
from nsqha.frames import LOST


class Applied(NamedTuple):
    """A channel state at one moment."""

    log_id: int
    digest: bytes
    parts: dict[str, object]

    @classmethod
    def of(cls, state: PartitionState) -> Applied:
        return cls(state.applied.log_id, digest(state), parts(state))


def parts(state: PartitionState) -> dict[str, object]:
    """A channel state, thing by thing, for people."""
    told: dict[str, object] = {"applied": tuple(state.applied), "epoch": state.epoch, "version": state.version}
    told |= {"pump": state.pump, "log start": state.log_start, "later": state.later.rows()}
    for name, channel in state.channels.items():
        held = [(ref.offset, ref.due_ns, ref.attempts, ref.position) for ref in channel.deferred.items()]
        told[f"channel {name}"] = (channel.uid, channel.floor, list(channel.ranges), channel.paused, channel.seek, held)
    return told


def differences(log: Any, kept: Applied) -> dict[str, tuple[object, object]]:
    """What is different in the state (first) and in the log. A log that is damaged or was, of which an operator gave up
    something, or of an #ephemeral topic, says nothing."""
    if not kept.log_id:
        return {}
    try:
        end = kept.log_id + 1
        if any(entry.flags & (LOST | BROKEN_CHAIN) for entry in log.entries(log.start.log_id, end)):
            return {}
        right = load(log, log.events, end_log_id=end, committed=end, distrusted=0).state
    except (LogCorrupt, OSError):
        return {}
    if digest(right) == kept.digest:
        return {}
    said = parts(right)
    pairs = {name: (kept.parts.get(name), said.get(name)) for name in {**kept.parts, **said}}
    found = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return found or {"digest": (kept.digest, digest(right))}
