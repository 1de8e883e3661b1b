"""Requests of the controller that nodes have not answered yet: at most one to each node, and one urgent one.

Partitions that need a request meanwhile wait until the answer is there (`wait`, `returned`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from nsqha.election.controller.events import Probe
from nsqha.election.controller.rounds import ControllerLimits, OpenProbe
from nsqha.election.placement import PartitionName
from nsqha.ids import PartitionKey


class PendingProbes:
    """The open requests of one term of one controller."""

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self._asked: dict[tuple[int, bool], OpenProbe] = {}
        self._waiting: defaultdict[tuple[int, bool], set[PartitionName]] = defaultdict(set)
        self._number = 0

    def ask(
        self, node: int, keys: Iterable[PartitionKey], now: float, *, urgent: bool = False, suspected: bool = True
    ) -> Probe | None:
        """Ask a node what it has of these partitions; None: it has not answered the last request yet. `urgent`: it
        has little time to answer; more of it for many partitions, unless it is `suspected` itself."""
        asked = self._asked.get((node, urgent))
        if asked is not None and now < asked.due:
            return None
        chosen = tuple(sorted(set(keys))[: self._limits.keys_max])
        self._number += 1
        timeout = self._limits.doubt_s if urgent else self._limits.probe_s
        if not suspected:
            timeout += self._limits.key_s * max(0, len(chosen) - 1)
        # A lost answer would block the node for ever; after twice its time-out the request counts as lost.
        self._asked[node, urgent] = OpenProbe(self._number, frozenset(chosen), now, now + 2 * timeout, urgent)
        return Probe(self._number, node, chosen, timeout)

    def asked(self, node: int, key: PartitionKey, since: float, now: float) -> bool:
        """Whether the node was asked for this partition since then, and still has time to answer."""
        for urgent in (True, False):
            probe = self._asked.get((node, urgent))
            if probe is not None and since <= probe.sent and now < probe.due and key in probe.keys:
                return True
        return False

    def wait(self, node: int, urgent: bool, names: Sequence[PartitionName]) -> None:
        """Ask for these when the answer to the open request is there."""
        if names:
            self._waiting[node, urgent].update(names)

    def returned(self, number: int, node: int) -> tuple[OpenProbe | None, set[PartitionName]]:
        """The request that was answered, or failed, and the partitions that waited for it. None: it was given up."""
        for urgent in (True, False):
            asked = self._asked.get((node, urgent))
            if asked is not None and asked.number == number:
                return self._asked.pop((node, urgent)), self._waiting.pop((node, urgent), set())
        return None, set()
