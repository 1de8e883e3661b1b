"""What the controller knows of each node: suspected, silent, blamed by others, shutting down, its process life.

    a stream ended, or others blame it --> suspected: asked once more --answered--> nothing
    or is open and silent                                             --not answered--> silent, until it answers again

Of a node whose stream is open the controller knows only that it is late (`linked`), and others have to bear that out.
A node that joins, leaves or registers again begins without history. Nothing here decides about partitions.
"""

from __future__ import annotations

from collections.abc import Mapping

from nsqha.election.model import NodeInfo, PartitionMeta


class NodeHealth:
    """The health of all nodes, in one term of one controller."""

    def __init__(self) -> None:
        self.nodes: Mapping[int, NodeInfo] = {}
        self.silent: dict[int, float] = {}  # did not answer when they were suspected, and since when
        self.leaving: dict[int, float] = {}  # shut down, and since when
        self._suspects: dict[int, float] = {}
        self._open: set[int] = set()  # suspected, or silent, only because nothing comes on a stream that is open
        self._blame: dict[int, dict[int, float]] = {}  # blamed -> by -> since
        self._unheard: dict[int, dict[int, float]] = {}  # not heard, though no stream ended -> by -> since
        self._unlinked: dict[int, float] = {}  # no stream to its peer port can be opened, and since when
        self._lives: dict[int, int] = {}  # registration that the node itself last reported

    def changed(self, nodes: Mapping[int, NodeInfo], now: float) -> list[int]:
        """Set the current nodes; return those whose record differs from before."""
        before, self.nodes = self.nodes, nodes
        found = [uid for uid in set(before) | set(nodes) if before.get(uid) != nodes.get(uid)]
        for uid in found:
            old, new = before.get(uid), nodes.get(uid)
            if new is None or not new.leaving:
                self.leaving.pop(uid, None)
            else:
                self.leaving.setdefault(uid, now)
            if old is None or new is None or old.registration != new.registration:
                # Another life, or none: the state of the last one does not apply.
                for held in (self.silent, self._suspects, self._blame, self._unheard, self._unlinked, self._lives):
                    held.pop(uid, None)
                self._open.discard(uid)
        return found

    def suspect(self, node: int, now: float, *, open_: bool = False) -> bool:
        """Note a suspicion; `open_`: the stream to it is open, and silent. True if it is new."""
        if node not in self.nodes or node in self._suspects or node in self.silent:
            return False
        self._suspects[node] = now
        if open_:
            self._open.add(node)
        return True

    def link(self, node: int, now: float, *, open_: bool) -> None:
        """The controller's stream to a node is open, or has ended or could not be opened."""
        if open_:
            self._unlinked.pop(node, None)
        elif node in self.nodes:
            self._open.discard(node)
            self._unlinked.setdefault(node, now)

    def unlinked(self, now: float, *, after: float) -> frozenset[int]:
        """Nodes at whose peer port the controller has been refused for `after` seconds."""
        return frozenset(uid for uid, since in self._unlinked.items() if now - since >= after)

    def blamers(self, node: int) -> frozenset[int]:
        """Nodes that have lost their streams to this one."""
        return frozenset(self._blame.get(node, ()))

    def linked(self, node: int) -> bool:
        """Whether a node that is silent has still its stream to the controller."""
        return node in self._open

    def witnesses(self, node: int) -> frozenset[int]:
        """Nodes that say they hear nothing of this one, or have lost their streams to it, and are heard themselves."""
        return (self.blamers(node) | self._unheard.get(node, {}).keys()) - self.silent.keys() - {node}

    def suspected_since(self, node: int) -> float | None:
        return self._suspects.get(node)

    def answered(self, node: int, registration: int, now: float) -> bool:
        """Note an answer. True if it ends a suspicion, or the node's silence."""
        self._lives[node] = registration
        if node in self.silent and node in self._unlinked:
            self._unlinked[node] = now  # only now it is more than silence: its peer port may be next to answer
        self._open.discard(node)
        return self._suspects.pop(node, None) is not None or self.silent.pop(node, None) is not None

    def not_answered(self, node: int) -> bool:
        """Note a missing answer. True if the node was suspected, and counts as silent from now on."""
        since = self._suspects.pop(node, None)
        if since is not None:
            self.silent[node] = since
        return since is not None

    def blamed(self, by: int, nodes: frozenset[int], now: float) -> tuple[list[int], list[int]]:
        """`by` has lost its streams to exactly `nodes`. Return those it no longer blames, and those it blames newly."""
        return _told(self._blame, by, nodes, now)

    def unheard(self, by: int, nodes: frozenset[int], now: float) -> tuple[list[int], list[int]]:
        """`by` hears nothing of exactly `nodes`, on open streams. Return those it hears again, and the new ones."""
        return _told(self._unheard, by, nodes, now)

    def restarted(self, meta: PartitionMeta) -> bool:
        """Whether the leader of a record is alive in a later life than the one that was elected."""
        led_by, known = meta.leader, meta.registration
        return bool(known) and (self.nodes[led_by].registration > known or self._lives.get(led_by, 0) > known)

    def in_order(self) -> dict[int, int]:
        """Nodes that answer, whose disks are open, and of which nobody complains, with their newest known lives."""
        return {
            uid: max(node.registration, self._lives.get(uid, 0))
            for uid, node in self.nodes.items()
            if not (node.poisoned or uid in self.silent or self._blame.get(uid) or self._unheard.get(uid))
        }

    def cut_off(self, meta: PartitionMeta, now: float, *, after: float) -> bool:
        """Whether it cannot commit, as so many followers have lost the leader, or not heard it, for `after` seconds."""
        told = (self._blame.get(meta.leader, {}), self._unheard.get(meta.leader, {}))
        if not any(told):
            return False
        lost = {uid for by in told for uid, since in by.items() if uid in meta.isr and now - since >= after}
        return len(meta.isr) > 1 and bool(lost) and len(meta.isr) - len(lost) < meta.min_isr


def _told(
    table: dict[int, dict[int, float]], by: int, nodes: frozenset[int], now: float
) -> tuple[list[int], list[int]]:
    """`by` says something of exactly `nodes`. Return those of which it no longer does, and the new ones, in order."""
    over = sorted(node for node, tellers in table.items() if node not in nodes and tellers.pop(by, None) is not None)
    newly = sorted(node for node in nodes if by not in table.get(node, ()))
    for node in newly:
        table.setdefault(node, {})[by] = now
    return over, newly
