"""Packets that are lost from one host to another, and the count of what was sent again because of it.

The sender's neighbour entry for the other points at a hardware address that nobody has. Cuts of the same pair may
overlap: a pair is whole when the last of them is healed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from weakref import WeakKeyDictionary

from tests.integration.hosts import Network
from tests.jepsen.deployment import Deployment, namespace_of
from tests.jepsen.faults.fault import bitten

Pair = tuple[str, str]  # from, to

_lock = threading.Lock()
_standing: WeakKeyDictionary[Network, Counter[Pair]] = WeakKeyDictionary()


class Cuts:
    """What is lost from now on until `heal`."""

    def __init__(self, deployment: Deployment, pairs: Iterable[Pair]) -> None:
        assert deployment.network is not None
        self._network = deployment.network
        self._pairs = sorted(set(pairs))
        self._before = {name: self._sent_again(name) for name in {a for a, _ in self._pairs}}
        self.lost = 0
        self._change(+1)

    def heal(self) -> None:
        self.lost = sum(self._sent_again(name) - before for name, before in self._before.items())
        self._change(-1)

    def proof(self) -> str:
        bitten(self.lost, "nothing was sent again: no packet was lost")
        return f"{self.lost} segments were sent again"

    def _change(self, by: int) -> None:
        with _lock:
            standing = _standing.setdefault(self._network, Counter())
            for pair in self._pairs:
                before, standing[pair] = standing[pair], standing[pair] + by
                if not before:
                    self._network.lose(*pair)
                elif not standing[pair]:
                    self._network.deliver(*pair)

    def _sent_again(self, name: str) -> int:
        """TCP segments that a host has sent again so far."""
        table = Path(namespace_of(self._network.host(name))).parent.parent / "net" / "snmp"
        names, values = (line.split() for line in table.read_text().splitlines() if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])
