"""Requests of the controller that nodes have not answered yet: one to each node at a time, and one urgent one.

Of many partitions whose leaders are sought a node is asked in parts (`ask_part`). Several of those are under way, of
up to `keys_max` partitions: the node answers the next one when those before have leaders (`server.node.cluster.live`).
Partitions that need a request when there is no room wait until an answer is there (`wait`, `returned`).
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
        self._open: defaultdict[tuple[int, bool], dict[int, OpenProbe]] = defaultdict(dict)  # by node, urgent: number
        self._asked: defaultdict[tuple[int, bool], dict[PartitionKey, OpenProbe]] = defaultdict(dict)  # the last one
        self._waiting: defaultdict[tuple[int, bool], set[PartitionName]] = defaultdict(set)
        self._number = 0

    def ask(
        self, node: int, keys: Iterable[PartitionKey], now: float, *, urgent: bool = False, suspected: bool = True
    ) -> Probe | None:
        """Ask a node what it has of these partitions; None: it has not answered all that it was asked. `urgent`: it
        has little time to answer; more of it for many partitions, unless it is `suspected` itself."""
        if self._drop_lost(node, urgent, now):
            return None
        return self._send(node, keys, now, urgent=urgent, suspected=suspected)

    def ask_part(
        self, node: int, keys: Sequence[PartitionKey], now: float, *, urgent: bool, suspected: bool, beside: int = 0
    ) -> Probe | None:
        """Ask beside what is under way, as long as it is not of too many partitions; None: it is. The node is asked for
        `beside` partitions at once, so the first part has the time of all."""
        begun = self._drop_lost(node, urgent, now)
        if begun and len(self._asked[node, urgent]) + len(keys) > self._limits.keys_max:
            return None
        beside = min(beside, self._limits.keys_max)
        return self._send(node, keys, now, urgent=urgent, suspected=suspected, beside=beside)

    def _send(
        self, node: int, keys: Iterable[PartitionKey], now: float, *, urgent: bool, suspected: bool, beside: int = 0
    ) -> Probe:
        chosen = tuple(sorted(set(keys))[: self._limits.keys_max])
        self._number += 1
        under_way = self._asked[node, urgent]
        timeout = self._limits.doubt_s if urgent else self._limits.probe_s
        if not suspected:
            # Also for the parts that are answered before.
            timeout += self._limits.key_s * max(0, len(under_way) + len(chosen) - 1, beside - 1)
        # A lost answer would block the node for ever; after twice its time-out the request counts as lost.
        asked = OpenProbe(self._number, frozenset(chosen), now, now + 2 * timeout, urgent)
        self._open[node, urgent][self._number] = asked
        under_way.update(dict.fromkeys(chosen, asked))
        return Probe(self._number, node, chosen, timeout)

    def asked(self, node: int, key: PartitionKey, since: float, now: float) -> bool:
        """Whether the node was asked for this partition since then, and still has time to answer."""
        for urgent in (True, False):
            probe = self._asked[node, urgent].get(key)
            if probe is not None and since <= probe.sent and now < probe.due:
                return True
        return False

    def wait(self, node: int, urgent: bool, names: Sequence[PartitionName]) -> None:
        """Ask for these when the answer to an open request is there."""
        if names:
            self._waiting[node, urgent].update(names)

    def returned(self, number: int, node: int) -> tuple[OpenProbe | None, set[PartitionName]]:
        """The request that was answered, or failed, and the partitions that waited for it. None: it was given up."""
        for urgent in (True, False):
            if (asked := self._open[node, urgent].get(number)) is not None:
                self._end(node, asked)
                return asked, self._waiting.pop((node, urgent), set())
        return None, set()

    def _drop_lost(self, node: int, urgent: bool, now: float) -> bool:
        """Whether requests are under way, without those that were lost."""
        begun = self._open[node, urgent]
        for probe in [probe for probe in begun.values() if now >= probe.due]:
            self._end(node, probe)
        return bool(begun)

    def _end(self, node: int, probe: OpenProbe) -> None:
        del self._open[node, probe.urgent][probe.number]
        asked = self._asked[node, probe.urgent]
        for key in probe.keys:
            if asked.get(key) is probe:
                del asked[key]
