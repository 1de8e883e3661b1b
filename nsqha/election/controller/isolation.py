"""Whether this controller is cut off from nodes that live, while a partition waits for them.

A node that keeps its lease and does not answer may be on the other side of a cut, together with another controller. If
a partition waits for such members of its ISR (its leader commits nothing, or none can be elected), this controller can
not help and another one perhaps can: it should resign. A silent node that no partition waits for is no reason.
"""

from __future__ import annotations

from nsqha.election.controller.state import ControllerState, text_of
from nsqha.election.placement import PartitionName


class Isolation:
    """Partitions that wait for nodes which this controller does not reach, and since when."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._since: dict[PartitionName, float] = {}

    def why_resign(self, now: float) -> str:
        """Why another controller should take over; empty: it need not."""
        state = self._state
        waiting = {name: self._since.get(name, now) for name in state.rounds if self._unreached(name)}
        self._since = waiting
        late = [name for name, since in waiting.items() if now - since >= state.limits.resign_s]
        if not late:
            return ""
        name = min(late)
        nodes = ", ".join(state.name(uid) for uid in self._unreached(name))
        return f"{text_of(name)} waits for nodes that live and do not answer this controller: {nodes}"

    def _unreached(self, name: PartitionName) -> list[int]:
        """Members of the ISR for which the partition waits, and which do not answer."""
        state = self._state
        silent, meta, kind = state.standing.silent, state.parts[name].meta, state.rounds[name].kind
        # A leader that is silent and only watched is heard by its followers, so nothing waits for it.
        if kind == "elect" or (kind == "watch" and meta.leader not in silent):
            return [uid for uid in meta.isr if uid in silent and uid in state.nodes]
        return []
