"""The cable between a host and the switch, which delays, loses, repeats and reorders packets, or is slow.

    with Link.plugged(network, "n1") as link:
        link.trouble(sent=Trouble(delay=0.1, jitter=0.05), received=Trouble(loss=0.1))
        ...
        assert link.sent().delayed > 0

A process copies packets between two taps (`copier`); the switch's port of the host is moved behind it:

    host eth0 == [port] bridge [tap] == copier == [tap] switch

so addresses, routes and connections stay what they are, and the kernel cuts what hosts send into packets of one frame
with their checksums. A link that is unplugged costs nothing. Two of one host are plugged one after the other only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.jepsen.hosts.namespaces import NotPossible
from tests.jepsen.hosts.network import Network

COPIER = Path(__file__).with_name("copier.py")


@dataclass(frozen=True)
class Trouble:
    """What happens to packets of one direction. Times in seconds; fractions of packets."""

    delay: float = 0.0
    jitter: float = 0.0  # more or less than the delay by up to this; the order stays
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0  # so many are held back for `hold`, and others overtake them
    hold: float = 0.02
    rate: float = 0.0  # bytes a second; 0: all that there is
    queue: int = 65_536  # bytes that wait for a line of some rate; more are lost


WHOLE = Trouble()


@dataclass(frozen=True)
class Carried:
    """Packets of one direction, since the link was plugged in."""

    packets: int  # all that came
    lost: int
    duplicated: int
    reordered: int  # that left after one that had come later
    delayed: int
    overflowed: int  # lost for want of room


class Link:
    """Use `plugged`."""

    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self._port = network.port(name)
        self._bridge = f"mid-{self._port}"
        near, far = f"near-{self._port}", f"{self._port}-far"  # the firewall knows those of the switch by their names
        command = [*network.switch.prefix, sys.executable, "-S", str(COPIER), near, far]
        self._copier = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            if self._line() != "ready\n":
                raise NotPossible("packets can not be copied: there is no /dev/net/tun, or it may not be used")
            network.arrange(
                f"link add {self._bridge} type bridge mcast_snooping 0",
                f"link set {self._bridge} up",
                f"link set {near} master {self._bridge} up",
                f"link set {far} master switch up",
                f"link set {self._port} master {self._bridge}",
            )
        except BaseException:
            self._end()
            raise

    @classmethod
    @contextlib.contextmanager
    def plugged(cls, network: Network, name: str) -> Iterator[Link]:
        """NotPossible if packets can not be copied here."""
        link = cls(network, name)
        try:
            yield link
        finally:
            link.unplug()

    def trouble(self, *, sent: Trouble = WHOLE, received: Trouble = WHOLE) -> None:
        """What happens from now on to what the host sends and receives; without arguments nothing."""
        self._ask([dataclasses.asdict(sent), dataclasses.asdict(received)])

    def sent(self) -> Carried:
        return self._carried()[0]

    def received(self) -> Carried:
        return self._carried()[1]

    def unplug(self) -> Carried:
        """The port is the switch's again; what is under way is lost. All that was carried, of both directions."""
        if self._copier.poll() is not None:
            return Carried(0, 0, 0, 0, 0, 0)
        carried = self._carried()
        self._network.arrange(f"link set {self._port} master switch", f"link del {self._bridge}")
        self._end()
        both = zip(*(dataclasses.astuple(each) for each in carried), strict=True)
        return Carried(*(sum(each) for each in both))

    def _carried(self) -> list[Carried]:
        return [Carried(**counts) for counts in self._ask(None)]

    def _ask(self, command: object) -> list[dict[str, int]]:
        assert self._copier.stdin is not None
        self._copier.stdin.write(f"{json.dumps(command)}\n")
        self._copier.stdin.flush()
        answer: list[dict[str, int]] = json.loads(self._line())
        return answer

    def _line(self) -> str:
        assert self._copier.stdout is not None
        return self._copier.stdout.readline()

    def _end(self) -> None:
        self._copier.kill()
        self._copier.communicate()
