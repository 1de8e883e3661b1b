"""N1-N7, N10, N11: shapes of a network that loses packets, in silence.

    N1   one host and nobody               N6   the leader and its followers
    N2   two halves; leader and follower   N7   clients and the leader
    N3   a ring: each loses one            N10  a host that flaps: cut off and back, 0.5 to 3 s each
    N4   one way only                      N11  hosts cut off one after the other, healed in another order
    N5   the leader and etcd

A shape is a set of pairs (from, to): what the first sends to the second is lost. The switch counts what it swallows.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable

from tests.integration.cluster import pause
from tests.jepsen.deployment import CLIENTS, Deployment, one_of
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.hosts.network import Cut, Pair

Shape = tuple[str, frozenset[str], set[Pair]]  # in words, its victims, what is lost
NAMESPACES = frozenset(("namespaces",))


def both_ways(ones: Iterable[str], others: Iterable[str]) -> set[Pair]:
    pairs = {(a, b) for a, b in itertools.product(ones, others) if a != b}
    return pairs | {(b, a) for a, b in pairs}


def cut_in(deployment: Deployment, pairs: set[Pair]) -> Cut:
    assert deployment.network is not None
    return deployment.network.cut_pairs(sorted(pairs))


def lost(*cuts: Cut) -> str:
    """The proof of cuts that are healed."""
    packets = sum(cut.packets() for cut in cuts)
    bitten(packets, "no packet was lost")
    return f"{packets} packets were lost"


def cut(shape: Callable[[Deployment, random.Random], Shape]) -> Callable[[Deployment, random.Random], Injected]:
    """The fault that loses what the shape says."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        what, victims, pairs = shape(deployment, rng)
        made = cut_in(deployment, pairs)
        return Injected(what, victims, made.heal, lambda: lost(made))

    return inject


# ---- shapes


def isolated_leader(deployment: Deployment, rng: random.Random) -> Shape:
    return isolated(deployment, deployment.leader_of().name)


def isolated_any(deployment: Deployment, rng: random.Random) -> Shape:
    return isolated(deployment, one_of(rng, deployment.whole_names))


def isolated(deployment: Deployment, victim: str) -> Shape:
    """From everybody but the clients."""
    return f"{victim} is cut off", frozenset([victim]), both_ways([victim], deployment.names)


def halves(deployment: Deployment, rng: random.Random) -> Shape:
    """Each kind of daemon is parted; the minority has at least one broker or etcd member."""
    few = {one_of(rng, deployment.whole_nodes).name, rng.choice(deployment.etcd_members).name}
    few.update(daemon.directory.name for daemon in deployment.lookupds if rng.random() < 0.5)
    many = set(deployment.names) - few
    return f"halves: {' '.join(sorted(few))} | {' '.join(sorted(many))}", frozenset(few), both_ways(few, many)


def pair(deployment: Deployment, rng: random.Random) -> Shape:
    """The leader and one follower, who could go on if the record named no others; etcd is on the other side."""
    few = {deployment.leader_of().name, one_of(rng, deployment.followers_of()).name}
    others = set(deployment.names) - few
    return f"{' and '.join(sorted(few))}, leader and follower, are cut off", frozenset(few), both_ways(few, others)


def ring(deployment: Deployment, rng: random.Random) -> Shape:
    """Among the etcd members and the brokers: each loses its neighbour behind, and so has a majority of its own.

    The two brokers that lose each other are whole, and one of them leads: whoever is dead sends nothing that could be
    lost, and two that follow have little to say to each other."""
    pair = [deployment.leader_of().name, one_of(rng, deployment.followers_of()).name]
    others = [node.name for node in deployment.nodes if node.name not in pair]
    nodes = [*rng.sample(pair, 2), *rng.sample(others, len(others))]
    etcds = [etcd.name for etcd in deployment.etcd_members]
    pairs = both_ways(nodes[:1], nodes[1:2])
    for index, name in enumerate(nodes):
        pairs |= both_ways([name], [etcds[index % len(etcds)]])
    lost = ", ".join(f"{a}-{b}" for a, b in sorted(pairs) if a < b)
    return f"ring without {lost}", frozenset(nodes), pairs


def one_way(deployment: Deployment, rng: random.Random) -> Shape:
    """What a host sends is lost, what is sent to it arrives; or the other way."""
    victim = one_of(rng, deployment.whole_names)
    others = [name for name in deployment.names if name != victim]
    if rng.random() < 0.5:
        return f"nothing from {victim} arrives", frozenset([victim]), {(victim, other) for other in others}
    return f"nothing arrives at {victim}", frozenset([victim]), {(other, victim) for other in others}


def leader_and_etcd(deployment: Deployment, rng: random.Random) -> Shape:
    leader = deployment.leader_of().name
    etcds = [etcd.name for etcd in deployment.etcd_members]
    return f"{leader}, the leader, loses etcd", frozenset([leader]), both_ways([leader], etcds)


def leader_and_followers(deployment: Deployment, rng: random.Random) -> Shape:
    leader = deployment.leader_of().name
    nodes = [node.name for node in deployment.nodes]
    return f"{leader}, the leader, loses the other brokers", frozenset([leader]), both_ways([leader], nodes)


def clients_and_leader(deployment: Deployment, rng: random.Random) -> Shape:
    leader = deployment.leader_of().name
    return f"clients lose {leader}, the leader", frozenset([leader]), both_ways([CLIENTS], [leader])


# ---- faults that go on


def flapping(deployment: Deployment, rng: random.Random) -> Injected:
    victim = one_of(rng, deployment.whole_names)
    _, victims, pairs = isolated(deployment, victim)
    seed, enough, cuts = rng.random(), threading.Event(), list[Cut]()

    def flap() -> None:
        chances = random.Random(seed)
        while not enough.is_set():
            cuts.append(cut_in(deployment, pairs))
            enough.wait(chances.uniform(0.5, 3))
            cuts[-1].heal()
            enough.wait(chances.uniform(0.5, 3))

    thread = threading.Thread(target=flap, name="flapping")
    thread.start()

    def heal() -> None:
        enough.set()
        thread.join()

    return Injected(f"{victim} flaps", victims, heal, lambda: f"cut off {len(cuts)} times, {lost(*cuts)}")


def swizzle(deployment: Deployment, rng: random.Random) -> Injected:
    """Brokers are cut off one after the other, and come back in another order."""
    victims = [node.name for node in deployment.whole_nodes]
    one_of(rng, victims)
    rng.shuffle(victims)
    cuts: list[Cut] = []
    for victim in victims:
        cuts.append(cut_in(deployment, isolated(deployment, victim)[2]))
        pause(rng.uniform(0.1, 1.5))
    waits = [rng.uniform(0.1, 1.5) for _ in cuts]
    back = rng.sample(cuts, len(cuts))

    def heal() -> None:
        for wait, each in zip(waits, back, strict=True):
            each.heal()
            pause(wait)

    what = f"{' '.join(victims)} are cut off in turn"
    return Injected(what, frozenset(victims), heal, lambda: lost(*cuts))


def kind(number: str, title: str, promise: str, inject: Callable[[Deployment, random.Random], Injected]) -> FaultKind:
    return FaultKind(number, title, promise, inject, seconds=(3.0, 10.0), needs=NAMESPACES)


KINDS = (
    kind("N1-leader", "the leader's host and nobody", "another leads; no fork", cut(isolated_leader)),
    kind("N1-any", "one host and nobody", "nothing lost", cut(isolated_any)),
    kind("N2-halves", "two halves", "the minority refuses; no fork", cut(halves)),
    kind("N2-pair", "leader and follower, and the rest with etcd", "they acknowledge nothing", cut(pair)),
    kind("N3", "a ring of majorities", "no fork, and progress", cut(ring)),
    kind("N4", "one way only", "as N1", cut(one_way)),
    kind("N5", "the leader and etcd", "the old leader is fenced by promises", cut(leader_and_etcd)),
    kind("N6", "the leader and its followers", "a stall at the floor, then an election", cut(leader_and_followers)),
    kind("N7", "clients and the leader", "unknown outcomes, nothing lost", cut(clients_and_leader)),
    kind("N10", "a host that flaps", "epochs bounded, progress", flapping),
    kind("N11", "hosts cut off one after the other, healed in another order", "recovery in time", swizzle),
)
