"""Whether a node that registered has joined: which connections with the others it has had, and which it lacks.

A node has joined when it was connected, in both directions, with a majority of the registered brokers, itself counted,
and with the controller. Each connection counts once it was there: a link that is lost later is no question of joining.
A majority that was reached is enough for this process life, however many brokers register later.

A cluster may have no controller at the moment. Then none is waited for; one that is named later, and does not come for
CONTROLLER_LOOKS, is missing.
"""

from __future__ import annotations

from collections.abc import Mapping

CONTROLLER_LOOKS = 50  # that find a controller named which has not come, before a node that had joined has not
SHOWN_MAX = 3  # brokers that a text names
WHY_CHARACTERS = 160  # of each of these


class Contacts:
    """The connections that one process of a node has had."""

    def __init__(self, me: int) -> None:
        self.reached: set[int] = set()  # nodes, in both directions
        self._me = me
        self._failed: dict[int, str] = {}
        self._majority = False
        self._controller = False
        self._missed_looks = 0  # in a row, that found a controller named which has not come
        self._joined = False

    def connected(self, node: int) -> None:
        """Both directions of the connection with a node worked."""
        self.reached.add(node)
        self._failed.pop(node, None)

    def failed(self, node: int, why: str) -> None:
        """The side that is not reached, and why."""
        self._failed[node] = why[:WHY_CHARACTERS]

    def controller_came(self) -> None:
        """A controller has opened its stream to this node."""
        self._controller = True

    @property
    def complete(self) -> bool:
        """True once nothing can be missing any more in this process life."""
        return self._majority and self._controller

    def look(self, names: Mapping[int, str], controller: str) -> str:
        """Which connections are missing; empty: none. `names`: the registered nodes; `controller`: the name of the
        present one, empty: there is none."""
        everyone = {self._me, *names}
        reached, needed = self.reached & everyone, len(everyone) // 2 + 1
        self._majority = self._majority or len(reached) >= needed
        self._missed_looks = self._missed_looks + 1 if controller and not self._controller else 0
        lacks_controller = self._missed_looks > (CONTROLLER_LOOKS if self._joined else 0)
        self._joined = self._majority and not lacks_controller
        if self._joined:
            return ""
        texts = []
        if not self._majority:
            texts.append(f"connected with {len(reached)} of {len(everyone)} brokers, itself included: {needed} needed")
            failed = [uid for uid in sorted(self._failed) if uid in everyone and uid not in reached]
            texts += [f"{self._name(uid, names)} {self._failed[uid]}" for uid in failed[:SHOWN_MAX]]
            texts += [f"and {len(failed) - SHOWN_MAX} more"] * (len(failed) > SHOWN_MAX)
        if lacks_controller:
            texts.append(f"controller {controller} has not connected to the peer port of this node")
        return "; ".join(texts)

    def _name(self, uid: int, names: Mapping[int, str]) -> str:
        return "this node itself" if uid == self._me else names.get(uid) or f"node {uid:016x}"
