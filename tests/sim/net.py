"""A network between simulated nodes: `nsqha.server.peers.api` over nothing but a loop's `call_later` and a seed.

It obeys the same contract as gRPC (tests/unit/server/peers/test_api.py) and, where that contract promises nothing, is
as unkind as a real network may be:

- A message takes a random time; order within a direction of a stream holds, order between streams does not.
- When a stream ends, any number of the messages under way still arrives, first ones first, before the end does.
- A partition stops what is under way until it is healed or until an end's pings have waited too long; each end notices
  by itself, and one may have given up while the other still sends.
- A call whose request arrived may be answered, cancelled, or carried out with nobody left to hear of it.

Messages are serialised when they are sent and parsed when they arrive, so nodes share no objects.

    net = Network(loop, random.Random(seed), services)
    server, peers = net.server("b"), net.peers("a")     # a node's address is its name
    net.partition("a", "b"); net.partition("a", "b", both=False); net.heal("a", "b")
    net.close_peer_port("b")                            # calls to b work, streams do not
    net.slow("a", "b", 0.2)                             # from now on a's messages to b take so much longer
    net.cut("a", "b")                                   # every stream and call between them is lost
    net.crash("b")                                      # the process is gone: its own ends are silent, others are reset
    net.crash("b", silent=True)                         # the machine is gone: others notice by their pings
    net.stalled("b", True)                              # the process is stopped: the same, until it goes on
    net.holds = lambda method, message: ...             # messages that wait on their way for `let_go` (tests.scripts)

Each process may have a loop of its own (`loop_of`); what is told to it runs there, whenever that loop runs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from nsqha.server.peers.api import Message, Method, PeerIdentity, methods_of
from tests.sim.peers import SimPeers, SimPeerServer
from tests.sim.wire import Over, Wire


class Network:
    """All nodes, and what is wrong between them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        services: Iterable[ServiceDescriptor],
        *,
        latency: tuple[float, float] = (0.000_05, 0.000_5),
        window_bytes: int = 1 << 20,
        loop_of: Callable[[str], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        """`loop_of`: of the process at an address; all are on `loop` if not given."""
        self.loop = loop
        self._loop_of = loop_of
        self._stalled: dict[str, int] = {}  # processes that are stopped -> which of all stops it is
        self._stops = 0
        self.rng = rng
        self.holds: Callable[[Method, Message], bool] | None = None
        self.kept: Callable[[int], int] = lambda sent: rng.randint(0, sent)  # how many arrive when a stream ends
        self.methods = methods_of(services)
        self.window_bytes = window_bytes
        self.latency = latency
        self._slower: dict[tuple[str, str], float] = {}
        self._blocked: dict[tuple[str, str], int] = {}  # -> number of the partition
        self._partitions = 0
        self._closed_ports: set[str] = set()
        self._servers: dict[str, SimPeerServer] = {}
        self._processes: dict[str, list[SimPeers | SimPeerServer]] = {}
        self._wires: dict[int, Wire] = {}  # in the order of their making; a set would have none
        self._wires_made = 0

    # ---- nodes

    def peers(self, address: str, identity: PeerIdentity | None = None) -> SimPeers:
        """The calling side of the node at `address`; `identity`: what its certificate says."""
        made = SimPeers(self, address, identity or PeerIdentity(address))
        self._processes.setdefault(address, []).append(made)
        return made

    def server(self, address: str) -> SimPeerServer:
        """The called side; it listens from now on."""
        made = self._servers[address] = SimPeerServer(self, address)
        self._processes.setdefault(address, []).append(made)
        return made

    # ---- faults

    def partition(self, a: str, b: str, *, both: bool = True) -> None:
        """Nothing gets from `a` to `b`, nor back if `both`."""
        for link in ((a, b), (b, a)) if both else ((a, b),):
            self._partitions += 1
            self._blocked.setdefault(link, self._partitions)
        for wire in self._between(a, b):
            wire.watch_pings()

    def heal(self, a: str, b: str) -> None:
        """Both directions work again; what waited goes on."""
        self._blocked.pop((a, b), None)
        self._blocked.pop((b, a), None)
        for wire in self._between(a, b):
            wire.healed()

    def close_peer_port(self, address: str) -> None:
        """No stream can be opened to this node, and those that others have opened are lost; calls work."""
        self._closed_ports.add(address)
        for wire in list(self._wires.values()):
            if wire.method.streaming and wire.server_end.address == address:
                for end in wire.ends:
                    end.incoming.lose_some()
                    end.incoming.put(Over("", "connection reset"))

    def heal_all(self) -> None:
        """Every partition is over, every port is open, and nothing is slow."""
        self._closed_ports.clear()
        self._slower.clear()
        for a, b in list(self._blocked):
            self.heal(a, b)

    def slow(self, a: str, b: str, seconds: float) -> None:
        """Messages from `a` to `b` that are sent from now on take so much longer."""
        self._slower[a, b] = seconds

    def cut(self, a: str, b: str) -> int:
        """Every stream and call between the two is reset; their number."""
        wires = self._between(a, b)
        for wire in wires:
            for end in wire.ends:
                end.incoming.lose_some()
                end.incoming.put(Over("", "connection reset"))
        return len(wires)

    def crash(self, address: str, *, silent: bool = False) -> None:
        """The node's process is gone: none of its handlers hears anything more. A new one may take the address."""
        self._servers.pop(address, None)
        for process in self._processes.pop(address, ()):
            process.dead = True
            if isinstance(process, SimPeerServer):
                process.cancel_answers()
        for wire in list(self._wires.values()):
            for end in wire.ends:
                if end.address == address:
                    end.vanish(silent=silent)

    def stalled(self, address: str, stalled: bool) -> None:
        """Whether the process there is stopped; to be told when that changes."""
        if not stalled:
            self._stalled.pop(address, None)
            return
        self._stops += 1
        self._stalled[address] = self._stops
        for wire in list(self._wires.values()):
            if any(end.address == address for end in wire.ends):
                wire.watch_stalled(address)

    # ---- by hand

    def streams(self, a: str, b: str) -> list[Wire]:
        """Those that `a` opened to `b`, oldest first."""
        wires = self._between(a, b)
        return [wire for wire in wires if wire.client_end.address == a]

    # ---- what wires ask

    def loop_of(self, address: str) -> asyncio.AbstractEventLoop:
        return self.loop if self._loop_of is None else self._loop_of(address)

    def tell(self, address: str, callback: Callable[..., object], *args: Any) -> None:
        """Run something in the process at `address`: now, if it shares the network's loop."""
        if self._loop_of is None:
            callback(*args)
        else:
            self._loop_of(address).call_soon(callback, *args)

    def stop_of(self, address: str) -> int:
        """The number of the stop of the process there, or 0: it runs."""
        return self._stalled.get(address, 0)

    def blocked(self, a: str, b: str) -> int:
        """The number of the partition between them, or 0."""
        return self._blocked.get((a, b), 0)

    def refuses(self, wire: Wire) -> bool:
        """Whether the port that a new connection is for is closed."""
        return wire.method.streaming and wire.server_end.address in self._closed_ports

    def seconds(self, a: str, b: str) -> float:
        return self.rng.uniform(*self.latency) + self._slower.get((a, b), 0.0)

    def listening(self, address: str) -> SimPeerServer | None:
        return self._servers.get(address)

    def stopped_listening(self, server: SimPeerServer) -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]

    def add(self, wire: Wire) -> int:
        self._wires_made += 1
        self._wires[self._wires_made] = wire
        return self._wires_made

    def remove(self, number: int) -> None:
        self._wires.pop(number, None)

    def _between(self, a: str, b: str) -> list[Wire]:
        return [wire for wire in self._wires.values() if {end.address for end in wire.ends} == {a, b}]
