"""Several hosts on this machine: namespaces on one switch, with addresses of their own, that can be cut apart.

    with Network.made() as network:
        a, b = network.host("a"), network.host("b")       # Host: address, and what starts a process there
        cut = network.cut("a", "b")                       # packets between them are lost, in silence
        assert cut.packets() > 0
        network.heal()

           eth0 of each host == the switch    198.18.N.1 ..    what faults are about
    leg of this process, and
           eth1 of each host == control       198.19.N.1 ..    no fault touches it

This process reaches every address of a host by the control leg: clients that are to meet faults run on hosts of their
own. A namespace lives as long as the process that holds it; when these end, also with this process, the kernel removes
namespaces, switch and addresses: nothing has to be cleaned. A host has mounts of its own as well, for its disks.

A cut points a sender's neighbour entry for the other at a hardware address that nobody has. So what is sent goes
nowhere, as with a broken switch: no error, no reset, and connections that stand do not notice. The switch hands such
frames to a port that leads nowhere, which counts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from tests.integration.servers import Host, wait_until
from tests.jepsen.hosts.namespaces import MOUNTS, NETWORK, Namespaces, NotPossible, run

DATA, CONTROL = "198.18", "198.19"  # of RFC 2544: for tests of network devices, in use nowhere else
OURS = 254
HOSTS_MAX = 250

Pair = tuple[str, str]  # names of hosts: who sends, who does not receive

_networks = count(1)


@dataclass
class Cut:
    """Pairs of hosts between which nothing passes, each in one direction."""

    network: Network
    pairs: tuple[Pair, ...]
    _before: int = 0
    _lost: int | None = None

    def packets(self) -> int:
        """How many it has swallowed."""
        return self._counted() - self._before if self._lost is None else self._lost

    def heal(self) -> None:
        if self._lost is None:
            self._lost = self.packets()
            self.network.end_cut(self)

    def _counted(self) -> int:
        lost = self.network.lost()
        return sum(lost[pair] for pair in self.pairs)


class Network:
    """The switch, and who is on it. Use `made`."""

    def __init__(self) -> None:
        self._reserved, self._number = _own_number()
        self.leg = f"nsqha{os.getpid()}-{next(_networks)}"
        self._hosts: dict[str, tuple[int, Host, Namespaces]] = {}
        self._cuts: list[Cut] = []
        self._changing = threading.Lock()  # faults that go on cut and heal by threads of their own
        self._sinks: set[Pair] = set()
        self.switch: Namespaces

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Network]:
        """NotPossible says what is missing."""
        for program in ("ip", "bridge"):
            if shutil.which(program) is None:
                raise NotPossible(f"there is no {program} program")
        network = cls()
        try:
            network._make()
            yield network
        finally:
            network._close()

    def _make(self) -> None:
        self.switch = Namespaces(NETWORK)
        # Its own devices have nothing to say: they count what others do.
        self.switch.run("sh", "-c", "d=/proc/sys/net/ipv6/conf/default/disable_ipv6; [ ! -e $d ] || echo 1 >$d")
        for bridge in ("switch", "control"):
            self._run(self.switch, f"link add {bridge} type bridge mcast_snooping 0", f"link set {bridge} up")
        self._plug("control", self.leg, None, OURS)
        # What goes to any address of a host takes the control leg; a host answers for all that it has.
        run("ip", "route", "add", f"{DATA}.{self._number}.0/24", "dev", self.leg)

    def _close(self) -> None:
        for _, _, namespaces in self._hosts.values():
            namespaces.end()
        if hasattr(self, "switch"):
            self.switch.end()
        # The kernel takes a moment to remove what was in them.
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not os.path.exists(f"/sys/class/net/{self.leg}"), "the leg is gone", 10)
        self._reserved.close()

    def host(self, name: str) -> Host:
        """The host with this name, which is made if it is not there."""
        if name not in self._hosts:
            number, namespaces = len(self._hosts) + 1, Namespaces(NETWORK | MOUNTS)
            assert number <= HOSTS_MAX, "too many hosts"
            host = Host(f"{DATA}.{self._number}.{number}", namespaces.prefix)
            self._hosts[name] = (number, host, namespaces)
            self._plug("switch", "eth0", namespaces, number)
            self._plug("control", "eth1", namespaces, number)
            self._run(namespaces, "link set lo up")
        return self._hosts[name][1]

    def namespaces(self, name: str) -> Namespaces:
        """Those of a host that is there."""
        return self._hosts[name][2]

    def port(self, name: str) -> str:
        """The switch's interface to a host, in the namespace of the switch."""
        return f"switch{self._hosts[name][0]}"

    def arrange(self, *lines: str) -> None:
        """Commands of `ip` in the namespace of the switch."""
        self._run(self.switch, *lines)

    @property
    def names(self) -> list[str]:
        return list(self._hosts)

    # ---- cuts

    def cut(self, one: str, other: str) -> Cut:
        """Nothing passes between two hosts any more."""
        return self.cut_pairs([(one, other), (other, one)])

    def cut_one_way(self, source: str, target: str) -> Cut:
        """Nothing that `source` sends arrives at `target`; the other way all does."""
        return self.cut_pairs([(source, target)])

    def cut_off(self, one: str, others: Iterable[str]) -> Cut:
        """Nothing passes between a host and the others."""
        return self.cut_pairs([pair for other in others if other != one for pair in ((one, other), (other, one))])

    def cut_pairs(self, pairs: Sequence[Pair]) -> Cut:
        """One cut of many, made at once. Cuts may overlap: what two of them have cut passes when both are healed."""
        with self._changing:
            for pair in pairs:
                self._count(pair)
            lost = self.lost()
            cut = Cut(self, tuple(pairs), sum(lost[pair] for pair in pairs))
            self._cuts.append(cut)
            self._point(pairs)
        return cut

    def end_cut(self, cut: Cut) -> None:
        with self._changing:
            self._cuts.remove(cut)
            self._point(cut.pairs)

    def heal(self) -> None:
        """All cuts end."""
        for cut in list(self._cuts):
            cut.heal()

    def lost(self) -> Counter[Pair]:
        """How many packets cuts have swallowed, since the network was made."""
        sinks = tuple(self._sinks)
        devices = json.loads(self.switch.run("ip", "-s", "-j", "link", "show"))
        sent = {device["ifname"]: int(device["stats64"]["tx"]["packets"]) for device in devices}
        return Counter({pair: sent[f"lost{self._of(pair)}"] for pair in sinks})

    def _point(self, pairs: Iterable[Pair]) -> None:
        """Have the neighbour entries of senders say what the cuts want, those of one host at once."""
        cuts = {pair for cut in self._cuts for pair in cut.pairs}
        commands: dict[str, list[str]] = {}
        for source, target in pairs:
            number, host, _ = self._hosts[target]
            hardware = self._nobody((source, target)) if (source, target) in cuts else _hardware(number)
            commands.setdefault(source, []).append(f"neigh replace {host.ip} lladdr {hardware} dev eth0 nud permanent")
        for source, lines in commands.items():
            self._run(self._hosts[source][2], *lines)

    def _count(self, pair: Pair) -> None:
        """Have the switch count what is sent to the address that nobody has."""
        if pair in self._sinks:
            return
        device = f"lost{self._of(pair)}"
        quiet = "flood off mcast_flood off bcast_flood off learning off"
        self._run(
            self.switch,
            f"link add {device} type veth peer name end{self._of(pair)}",
            f"link set {device} master switch up",
            f"link set {device} type bridge_slave {quiet}",
            f"link set end{self._of(pair)} up",
        )
        self.switch.run(*f"bridge fdb add {self._nobody(pair)} dev {device} master static".split())
        self._sinks.add(pair)

    def _of(self, pair: Pair) -> str:
        return "-".join(str(self._hosts[name][0]) for name in pair)

    def _nobody(self, pair: Pair) -> str:
        source, target = (self._hosts[name][0] for name in pair)
        return f"02:00:00:ff:{source:02x}:{target:02x}"

    # ---- plugs

    def _plug(self, bridge: str, device: str, inside: Namespaces | None, number: int) -> None:
        """Connect namespaces, or this process's own, to a bridge."""
        port, pid = f"{bridge}{number}", inside.pid if inside is not None else os.getpid()
        subnet = f"{DATA if bridge == 'switch' else CONTROL}.{self._number}"
        self._run(
            self.switch,
            f"link add {port} type veth peer name {device} netns {pid}",
            f"link set {port} master {bridge} up",
        )
        self._run(
            inside,
            f"link set {device} address {_hardware(number)}",
            f"addr add {subnet}.{number}/24 dev {device}",
            f"link set {device} up",
        )

    @staticmethod
    def _run(inside: Namespaces | None, *lines: str) -> None:
        """Commands of `ip`, by one process."""
        command = ("ip", "-batch", "-")
        given = "\n".join(lines)
        run(*command, given=given) if inside is None else inside.run(*command, given=given)


def _own_number() -> tuple[socket.socket, int]:
    """The third part of our addresses, which no other network of this machine has while the socket is open."""
    for number in random.sample(range(1, 255), 254):
        reserved = socket.socket(socket.AF_UNIX)
        try:
            reserved.bind(f"\0nsqha-hosts-{number}")
            return reserved, number
        except OSError:
            reserved.close()
    raise NotPossible("254 networks are in use here")


def _hardware(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"


__all__ = ["Cut", "Network", "NotPossible"]
