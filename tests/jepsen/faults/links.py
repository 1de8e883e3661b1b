"""N8, N9, N12: networks that lose some packets, are slow, or do not say that a connection has ended.

N8   a part of all packets from and to one host, or between any two, is lost
N9   packets of one host come late, twice, in another order; or its line is slow
N12  nobody hears that connections of a broker have ended: its FIN and RST are lost, and it is killed
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.jepsen.deployment import Deployment, NotNow, one_of
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.faults.processes import kill
from tests.jepsen.hosts.firewall import Drop, Firewall, Loss
from tests.jepsen.hosts.links import Link, Trouble

FRACTIONS = (0.01, 0.05, 0.15, 0.3)
SLOW_LINE = 50_000 / 8  # bytes a second
LATE = Trouble(delay=0.1, jitter=0.05)
UNTIDY = Trouble(delay=0.002, jitter=0.002, duplicate=0.05, reorder=0.1, hold=0.02)
THIN = Trouble(rate=SLOW_LINE, queue=20_000)


def packets(loss: Loss) -> str:
    lost = loss.packets()
    bitten(lost, "no packet was lost")
    return f"{lost} packets were lost"


def firewall(deployment: Deployment) -> Firewall:
    assert deployment.network is not None
    return Firewall(deployment.network)


def lossy_host(deployment: Deployment, rng: random.Random) -> Injected:
    victim, fraction = one_of(rng, deployment.whole_names), rng.choice(FRACTIONS)
    drops = [Drop(source=victim, fraction=fraction), Drop(target=victim, fraction=fraction)]
    loss = firewall(deployment).drop(*drops)
    what = f"{fraction:.0%} of the packets of {victim} are lost"
    return Injected(what, frozenset([victim]), loss.heal, lambda: packets(loss))


def lossy_network(deployment: Deployment, rng: random.Random) -> Injected:
    """Everybody is hit a little, so nobody is a victim whom another fault should spare."""
    fraction = rng.choice(FRACTIONS[:-1])
    loss = firewall(deployment).drop(Drop(fraction=fraction))
    return Injected(f"{fraction:.0%} of all packets are lost", frozenset(), loss.heal, lambda: packets(loss))


def troubled(name: str, trouble: Trouble) -> Callable[[Deployment, random.Random], Injected]:
    """Packets that a host sends and receives are treated so."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        assert deployment.network is not None
        victim = one_of(rng, deployment.whole_names)
        link = Link(deployment.network, victim)
        link.trouble(sent=trouble, received=trouble)
        proofs: list[str] = []

        def heal() -> None:
            carried = link.unplug()
            counts = {"late": carried.delayed}
            if trouble.duplicate:
                counts |= {"doubled": carried.duplicated, "overtaken": carried.reordered}
            if all(counts.values()):
                each = ", ".join(f"{count} {what}" for what, count in counts.items())
                proofs.append(f"of {carried.packets} packets {each}")

        def proof() -> str:
            bitten(proofs, "no packet was late, or none was doubled and overtaken")
            return proofs[0]

        return Injected(f"{name} of {victim}", frozenset([victim]), heal, proof)

    return inject


def half_open(deployment: Deployment, rng: random.Random) -> Injected:
    """Who was connected to it goes on waiting: also a new start's answer to what is sent on old connections is lost."""
    victim = one_of(rng, deployment.whole_nodes)
    if victim._process is None or victim._process.poll() is not None:
        raise NotNow("it does not run")
    loss = firewall(deployment).drop(Drop(source=victim.name, endings=True))
    kill(victim)

    def heal() -> None:
        loss.heal()
        victim.spawn()

    what = f"kill -9 {victim}, and nobody hears it"
    return Injected(what, frozenset([victim.name]), heal, lambda: packets(loss))


def kind(
    number: str, title: str, promise: str, inject: Callable[[Deployment, random.Random], Injected], need: str
) -> FaultKind:
    return FaultKind(number, title, promise, inject, (3.0, 12.0), frozenset(("namespaces", need)), settle=60.0)


KINDS = (
    kind("N8-host", "packets of one host are lost", "latency only", lossy_host, "firewall"),
    kind("N8-all", "packets of everybody are lost", "latency only", lossy_network, "firewall"),
    kind(
        "N9-late",
        "100 ms more or less, one way",
        "the ISR stays, or shrinks once",
        troubled("late packets", LATE),
        "links",
    ),
    kind(
        "N9-untidy", "packets come twice and in another order", "nothing", troubled("untidy packets", UNTIDY), "links"
    ),
    kind("N9-slow", "50 kbit/s", "the ISR shrinks once", troubled("a slow line", THIN), "links"),
    kind("N12", "connections end and nobody hears it", "noticed within 5 s", half_open, "firewall"),
)
