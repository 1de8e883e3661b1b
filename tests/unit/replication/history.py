"""A random life of a tiny cluster, checked after each step.

    python -m tests.unit.replication.history SEED      what happened in that one

A life is drawn so that it has a character: some kinds of events come often, some never (swarm testing). Uniform lives
are all alike, and die of crashes before anything is committed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from tests.unit.replication.tiny import Tiny
from tests.unit.replication.tiny_parts import Wrong
from tests.unit.replication.tiny_rules import check, possible

STEPS = 120

# What a healthy cluster does all the time, and what happens to it.
OFTEN = {"arrives": 12.0, "returns": 12.0, "write": 5.0, "sync": 5.0, "connect": 8.0, "become": 8.0, "settle": 5.0}
SOMETIMES = {
    "answer": 4.0,
    "restart": 3.0,
    "tick": 3.0,
    "refresh": 1.0,
    "reconnect": 0.3,
    "cut": 0.5,
    "noticed": 2.0,
    "give_up": 1.0,
}
SELDOM = {"elect": 0.7, "crash": 0.4, "kill": 0.4, "wipe": 0.3, "power": 0.5, "expel": 1.0, "drop": 0.3}
TIME = {"long tick": 2.0, "longest tick": 1.0}
HAND_OVER = {"depart": 0.4, "successor": 1.5}
WEIGHTS = OFTEN | SOMETIMES | SELDOM | TIME


class History:
    """One life, by seed."""

    def __init__(self, seed: int, *, steps: int = STEPS, hands_over: bool = False) -> None:
        """`hands_over`: leaders that shut down, or have a successor, name the next one themselves."""
        self.rng = rng = random.Random(seed)
        nodes = rng.choice((2, 3, 3, 3, 4, 5))
        min_isr = rng.randint(1, nodes // 2 + 1) if rng.random() < 0.3 else nodes // 2 + 1
        members = rng.randint(1, nodes) if rng.random() < 0.5 else nodes
        self.tiny = Tiny(nodes, min_isr=min_isr, sync_always=rng.random() < 0.6, members=members)
        self.tiny.hands_over = hands_over
        self.steps = steps
        character = {kind: rng.choice((0.2, 1.0, 1.0, 4.0)) for kind in WEIGHTS}
        for kind in (*SELDOM, "cut", "give_up"):
            if rng.random() < 0.4:
                character[kind] = 0.0
        self.weights = {kind: weight * character[kind] for kind, weight in WEIGHTS.items()} | HAND_OVER

    def run(self) -> Tiny:
        for _ in range(self.steps):
            self.one_step()
        return self.tiny

    def one_step(self) -> None:
        by_kind: dict[str, list[Callable[[], None]]] = {}
        for kind, operation in possible(self.tiny):
            by_kind.setdefault(kind, []).append(operation)
        kinds = list(by_kind)
        kind = self.rng.choices(kinds, [self.weights[kind] + 1e-6 for kind in kinds])[0]
        self.tiny.say(f"({kind})")
        self.rng.choice(by_kind[kind])()
        self.tiny.look_all()
        check(self.tiny)


def heal(tiny: Tiny, *, rounds: int = 600) -> int | None:
    """No more faults, and time: who leads when every replica is in the ISR and all is committed; None: nobody can."""
    for uid, node in tiny.nodes.items():
        if not node.up:
            tiny.restart(uid)
    for uid in sorted(tiny.departing):
        tiny.depart(uid)
    if tiny.meta.successor:
        tiny.name_successor(0)
    if not any(tiny.electable(uid) for uid in tiny.nodes):
        return None  # what is done then is not decided here
    for _ in range(rounds):
        _no_requests_left(tiny)
        leader = _led(tiny)
        leading = tiny.nodes[leader].leading
        assert leading is not None
        for uid in tiny.nodes:
            if uid != leader and (uid not in leading.streams or leading.streams[uid].closed):
                tiny.connect(leader, uid)
        for stream in list(tiny.streams):
            while stream.down and not stream.closed:
                tiny.arrives(stream)
        for uid in tiny.nodes:
            tiny.sync(uid)
        for stream in list(tiny.streams):
            while stream.up and not stream.closed:
                tiny.returns(stream)
        tiny.tick()
        check(tiny)
        node = tiny.nodes[leader]
        everybody = set(tiny.nodes)
        if node.leading is None or set(tiny.meta.isr) != everybody or node.leading.keeper.effective != everybody:
            continue
        if node.leading.leader.committed == node.end:
            return leader
    raise Wrong(f"not healed: {tiny.meta}, {[(n.name, n.end, n.committed) for n in tiny.nodes.values()]}")


def _no_requests_left(tiny: Tiny) -> None:
    while tiny.requests:
        request = tiny.requests[0]
        if request.outcome is None:
            tiny.settle(request)
        if request in tiny.requests:
            tiny.answer(request)


def _led(tiny: Tiny) -> int:
    """Whom the metadata names, leading; elected anew if it can not lead that epoch."""
    leader = tiny.meta.leader
    leading = tiny.nodes[leader].leading
    if leading is None or leading.epoch != tiny.meta.epoch:
        if not tiny.may_become(leader):
            leader = next(uid for uid in tiny.nodes if tiny.electable(uid))
            tiny.elect(leader, keep=True)
        tiny.become(leader)
    tiny.refresh(leader)
    return leader


if __name__ == "__main__":
    history = History(int(sys.argv[1]))
    try:
        history.run()
    finally:
        print("\n".join(history.tiny.trace))
