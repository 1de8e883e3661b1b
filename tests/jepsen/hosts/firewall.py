"""Packets that the switch loses: between hosts, in one direction, of one port, of some kind, some of them; counted.

    firewall = Firewall(network)
    loss = firewall.drop(Drop("n1", "e1", port=2379), Drop("n2", "n3", fraction=0.3))
    ...
    loss.heal()
    assert loss.packets() > 0

Cuts of the network do with less; this is what they can not do. The rules are nftables' at the bridge that is the
switch: hosts and their sockets know nothing of them, as an output chain of their own would tell. Each `drop` is a table
of its own, so that faults come and go apart from each other.

nft is the machine's, or Debian's unpacked into the environment by `make .venv/.nftables`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.jepsen.hosts.namespaces import NotPossible
from tests.jepsen.hosts.network import Network

UNPACKED = Path(sys.prefix) / "nftables"
OF_RANDOM = 10_000  # a fraction is so many of these

OF_SWITCH = 'iifname "switch*" oifname "switch*"'  # not those of the control leg, and not those of a link

_tables = count(1)


def nft() -> tuple[str, ...]:
    """The command. NotPossible if there is none."""
    if found := shutil.which("nft"):
        return (found,)
    libraries = [str(path.parent) for path in UNPACKED.glob("usr/lib/*/libnftables.so.1")]
    program = UNPACKED / "usr/sbin/nft"
    if not program.exists() or not libraries:
        raise NotPossible("there is no nft program; `make .venv/.nftables` unpacks one")
    return ("env", f"LD_LIBRARY_PATH={os.pathsep.join(libraries)}", str(program))


@dataclass(frozen=True)
class Drop:
    """Packets that are lost."""

    source: str = ""  # a host; empty: any
    target: str = ""
    port: int = 0  # of either end of a TCP connection
    fraction: float = 1.0
    endings: bool = False  # only segments that end a connection: FIN and RST


class Loss:
    """Some drops, from now on until `heal`."""

    def __init__(self, network: Network, rules: list[str]) -> None:
        self._network = network
        self._table = f"nsqha{next(_tables)}"
        self._packets: int | None = None
        chain = "".join(f'        {OF_SWITCH} {rule} counter name "lost" drop\n' for rule in rules)
        self._nft(
            f"table bridge {self._table} {{\n"
            "    counter lost {\n    }\n"
            "    chain forward {\n"
            "        type filter hook forward priority 0;\n"
            f"{chain}"
            "    }\n"
            "}\n"
        )

    def packets(self) -> int:
        """How many it has lost."""
        if self._packets is not None:
            return self._packets
        said = json.loads(self._network.switch.run(*nft(), "-j", "list", "counters", "table", "bridge", self._table))
        return sum(int(each["counter"]["packets"]) for each in said["nftables"] if "counter" in each)

    def heal(self) -> None:
        if self._packets is None:
            self._packets = self.packets()
            self._nft(f"delete table bridge {self._table}\n")

    def _nft(self, given: str) -> None:
        self._network.switch.run(*nft(), "-f", "-", given=given)


class Firewall:
    """Makes them."""

    def __init__(self, network: Network) -> None:
        """NotPossible if there is no nft."""
        nft()
        self._network = network

    def drop(self, *drops: Drop) -> Loss:
        return Loss(self._network, [rule for drop in drops for rule in self._rules(drop)])

    def _rules(self, drop: Drop) -> Iterator[str]:
        ends = [("saddr", drop.source), ("daddr", drop.target)]
        words = [f"ip {end} {self._network.host(name).ip}" for end, name in ends if name]
        if drop.endings:
            words.append("tcp flags & (fin | rst) != 0")
        chance = [f"numgen random mod {OF_RANDOM} < {round(drop.fraction * OF_RANDOM)}"] if drop.fraction < 1 else []
        for port in [f"tcp dport {drop.port}", f"tcp sport {drop.port}"] if drop.port else [""]:
            yield " ".join([*words, *([port] if port else []), *chance])
