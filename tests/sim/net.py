"""A network between simulated nodes: `nsqha.server.peers` over nothing but a loop's `call_later` and a seed.

It obeys the same contract as gRPC (tests/unit/server/test_peers.py) and, where that contract promises nothing, is as
unkind as a real network may be:

- A message takes a random time; order within a direction of a stream holds, order between streams does not.
- When a stream ends, any number of the messages under way still arrives, first ones first, before the end does.
- A partition stops what is under way until it is healed or until an end's pings have waited too long; each end notices
  by itself, and one may have given up while the other still sends.
- A call whose request arrived may be answered, cancelled, or carried out with nobody left to hear of it.

Messages are serialised when they are sent and parsed when they arrive, so nodes share no objects.

    net = Network(loop, random.Random(seed), services)
    server, peers = net.server("b"), net.peers("a")     # a node's address is its name
    net.partition("a", "b"); net.partition("a", "b", both=False); net.heal("a", "b")
    net.slow("a", "b", 0.2)                             # from now on a's messages to b take so much longer
    net.cut("a", "b")                                   # every stream and call between them is lost
    net.crash("b")                                      # the process is gone: its own ends are silent, others are reset
    net.crash("b", silent=True)                         # the machine is gone: others notice by their pings
    net.stalled("b", True)                              # the process is stopped: the same, until it goes on

Each process may have a loop of its own (`loop_of`); what is told to it runs there, whenever that loop runs.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.server.peers import (
    Accept,
    Answer,
    Message,
    Method,
    PeerIdentity,
    StreamHandler,
    error_of,
    kind_and_text,
    methods_of,
)

PING_SECONDS = 8.0
CONNECT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Over:
    """The last item of a direction. `kind`: of the error that the accepting side says it is; empty: it says nothing."""

    kind: str
    why: str


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
        self._stalled: set[str] = set()
        self.rng = rng
        self.methods = methods_of(services)
        self.window_bytes = window_bytes
        self._latency = latency
        self._slower: dict[tuple[str, str], float] = {}
        self._blocked: dict[tuple[str, str], int] = {}  # -> number of the partition
        self._partitions = 0
        self._servers: dict[str, SimPeerServer] = {}
        self._processes: dict[str, list[SimPeers | SimPeerServer]] = {}
        self._wires: dict[int, _Wire] = {}  # in the order of their making; a set would have none
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

    def heal_all(self) -> None:
        """Every partition is over, and nothing is slow."""
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
                end.incoming.put(_Over("", "connection reset"))
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
            self._stalled.discard(address)
            return
        self._stalled.add(address)
        for wire in list(self._wires.values()):
            if any(end.address == address for end in wire.ends):
                wire.watch_stalled(address)

    # ---- what wires ask

    def loop_of(self, address: str) -> asyncio.AbstractEventLoop:
        return self.loop if self._loop_of is None else self._loop_of(address)

    def tell(self, address: str, callback: Callable[..., object], *args: Any) -> None:
        """Run something in the process at `address`: now, if it shares the network's loop."""
        if self._loop_of is None:
            callback(*args)
        else:
            self._loop_of(address).call_soon(callback, *args)

    def is_stalled(self, address: str) -> bool:
        return address in self._stalled

    def blocked(self, a: str, b: str) -> int:
        """The number of the partition between them, or 0."""
        return self._blocked.get((a, b), 0)

    def seconds(self, a: str, b: str) -> float:
        return self.rng.uniform(*self._latency) + self._slower.get((a, b), 0.0)

    def listening(self, address: str) -> SimPeerServer | None:
        return self._servers.get(address)

    def stopped_listening(self, server: SimPeerServer) -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]

    def add(self, wire: _Wire) -> int:
        self._wires_made += 1
        self._wires[self._wires_made] = wire
        return self._wires_made

    def remove(self, number: int) -> None:
        self._wires.pop(number, None)

    def _between(self, a: str, b: str) -> list[_Wire]:
        return [wire for wire in self._wires.values() if {end.address for end in wire.ends} == {a, b}]


class _Way:
    """One direction: what waits for room, and what is under way."""

    def __init__(self, net: Network, source: str, target: _End) -> None:
        self._net = net
        self._source = source
        self._target = target
        self.on_room: Callable[[], None] = lambda: None
        self.waiting: deque[bytes] = deque()
        self._flying: deque[bytes | _Over] = deque()
        self._flying_bytes = 0
        self._late = 0  # how many of them arrived at a partition
        self.open = False
        self._over = False

    def put(self, item: bytes | _Over) -> None:
        if self._over:
            return
        if isinstance(item, _Over):
            self._over = True
            self.waiting.clear()
            self._fly(item)
        else:
            self.waiting.append(item)
            self.pump()

    def pump(self) -> None:
        while self.open and self.waiting and (not self._flying_bytes or self._fits(self.waiting[0])):
            self._fly(self.waiting.popleft())
        if not self.waiting:
            self.on_room()

    def _fits(self, data: bytes) -> bool:
        return self._flying_bytes + len(data) <= self._net.window_bytes

    def _fly(self, item: bytes | _Over) -> None:
        self._flying.append(item)
        if isinstance(item, bytes):
            self._flying_bytes += len(item)
        self._net.loop.call_later(self._net.seconds(self._source, self._target.address), self._arrive)

    def _arrive(self) -> None:
        """Some item's time has come: the first one's turn, as nothing overtakes."""
        if not self._flying:
            return
        if self._net.blocked(self._source, self._target.address):
            self._late += 1
            return
        self._net.tell(self._target.address, self._handed_over, self._flying.popleft())

    def _handed_over(self, item: bytes | _Over) -> None:
        if isinstance(item, bytes):
            self._flying_bytes -= len(item)
        self._target.arrived(item)
        self.pump()

    def resume(self) -> None:
        late, self._late = self._late, 0
        for _ in range(late):
            self._net.loop.call_later(self._net.seconds(self._source, self._target.address), self._arrive)

    def lose_some(self) -> None:
        """Of the messages under way only the first so many arrive. That the stream has ended is never lost."""
        self.waiting.clear()
        over = [self._flying.pop()] if self._over and self._flying else []
        kept = self._net.rng.randint(0, len(self._flying))
        while len(self._flying) > kept:
            lost = self._flying.pop()
            if isinstance(lost, bytes):
                self._flying_bytes -= len(lost)
        self._flying += over


class _End:
    """One end of a stream: a PeerStream."""

    incoming: _Way
    outgoing: _Way

    def __init__(self, wire: _Wire, address: str, peer: PeerIdentity, out: type[Any], in_: type[Any]) -> None:
        self.address = address
        self.peer = peer
        self.handler: StreamHandler | None = None
        self.ended = False
        self.told: _Over | None = None  # how the other side ended it, if that came first
        self._wire = wire
        self._give: Callable[[], Message | None] | None = None
        self._out = out
        self._in = in_

    @property
    def pending(self) -> int:
        return len(self.outgoing.waiting)

    def send(self, message: Message) -> None:
        if not self.ended:
            self.outgoing.put(self._wire.method.encoded(message, self._out))

    def pull(self, give: Callable[[], Message | None]) -> None:
        if not self.ended:
            self._give = give
            self.room()

    def room(self) -> None:
        """Perhaps nothing is pending any more."""
        if self._give is not None:
            self._wire.net.loop_of(self.address).call_soon(self._ask)

    def _ask(self) -> None:
        if self.ended or self.pending or self._give is None:
            return
        give, self._give = self._give, None
        try:
            message = give()
        except Exception as error:
            self.end(_Over(*kind_and_text(error)))
            return
        if message is not None:
            self.send(message)

    def close(self, why: str = "") -> None:
        self.end(_Over("Unavailable", why or "closed"))

    def end(self, over: _Over) -> None:
        """This side ends the stream."""
        if self.ended:
            return
        self._finish()
        self.outgoing.lose_some()
        # As with gRPC, only the side that accepted can say why.
        said = over if self is self._wire.server_end else _Over("", "the other side ended the stream")
        self.outgoing.put(said)
        self._wire.net.loop_of(self.address).call_soon(self._tell, over.why)

    def arrived(self, item: bytes | _Over) -> None:
        if self.ended:
            return
        if isinstance(item, _Over):
            self.told = item
            self._finish()
            self._tell(item.why)
            return
        if self.handler is None:
            return
        try:
            message = self._in.FromString(item)
        except DecodeError:
            self.end(_Over("ValueError", f"{len(item)} bytes that are not a {self._in.__name__}"))
            return
        try:
            self.handler.on_message(message)
        except Exception as error:
            self.end(_Over(*kind_and_text(error)))

    def vanish(self, *, silent: bool) -> None:
        """This side's process is gone."""
        self.ended = True
        self.handler = None
        self.outgoing.lose_some()
        if silent:
            self.incoming.open = False
            self._wire.watch_pings(self.address)
        else:
            self.outgoing.put(_Over("", "connection reset by peer"))
        self._wire.ended()

    def _finish(self) -> None:
        self.ended = True
        self.outgoing.waiting.clear()
        self._wire.ended()

    def _tell(self, why: str) -> None:
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.on_closed(why)


class _Wire:
    """A stream: two ends and what is between them."""

    def __init__(self, peers: SimPeers, address: str, method: Method) -> None:
        self.net = net = peers.net
        self.method = method
        self.client_end = _End(self, peers.address, PeerIdentity(address), method.request, method.reply)
        self.server_end = _End(self, address, peers.identity, method.reply, method.request)
        self.ends = (self.client_end, self.server_end)
        self.client_end.outgoing = self.server_end.incoming = _Way(net, peers.address, self.server_end)
        self.server_end.outgoing = self.client_end.incoming = _Way(net, address, self.client_end)
        for end in self.ends:
            end.outgoing.on_room = end.room
        self.connected = False
        self.number = net.add(self)
        net.loop.call_later(0, self._connect)
        net.loop.call_later(CONNECT_SECONDS, self._refuse, "no connection within a second")

    def _connect(self) -> None:
        a, b = self.client_end.address, self.server_end.address
        if self.connected or self.client_end.ended or self.net.blocked(a, b) or self.net.blocked(b, a):
            return
        there_and_back = self.net.seconds(a, b) + self.net.seconds(b, a)
        self.net.loop.call_later(there_and_back, self._established)

    def _established(self) -> None:
        if self.connected or self.client_end.ended:
            return
        server = self.net.listening(self.server_end.address)
        if server is None:
            self._refuse("connection refused")
            return
        self.net.tell(server.address, self._accepted, server)

    def _accepted(self, server: SimPeerServer) -> None:
        if self.connected or self.client_end.ended or server.dead:
            return
        self.connected = True
        server.accept(self)
        for end in self.ends:
            end.outgoing.open = True
            end.outgoing.pump()

    def _refuse(self, why: str) -> None:
        if not self.connected and not self.client_end.ended:
            self.client_end.end(_Over("", f"{self.server_end.address}: {why}"))

    def healed(self) -> None:
        if not self.connected:
            self._connect()
        for end in self.ends:
            end.incoming.resume()

    def watch_pings(self, gone: str = "") -> None:
        """Let each end notice if this partition lasts, or that the machine `gone` is."""
        a, b = self.client_end.address, self.server_end.address
        number = self.net.blocked(a, b), self.net.blocked(b, a)

        def look(end: _End) -> None:
            still = (self.net.blocked(a, b), self.net.blocked(b, a)) == number and any(number)
            if self.connected and (gone or still):
                end.end(_Over("", "ping timeout"))

        for end in self.ends:
            seconds = PING_SECONDS * self.net.rng.uniform(0.5, 1.0)
            self.net.loop.call_later(seconds, self.net.tell, end.address, look, end)

    def watch_stalled(self, address: str) -> None:
        """Let the other end notice if the process at `address` stays stopped."""

        def look(end: _End) -> None:
            if self.connected and self.net.is_stalled(address):
                end.end(_Over("", "ping timeout"))

        for end in self.ends:
            if end.address != address:
                seconds = PING_SECONDS * self.net.rng.uniform(0.5, 1.0)
                self.net.loop.call_later(seconds, self.net.tell, end.address, look, end)

    def ended(self) -> None:
        if self.client_end.ended and (self.server_end.ended or not self.connected):
            self.net.remove(self.number)


class SimPeers:
    """The calling side of one process."""

    def __init__(self, net: Network, address: str, identity: PeerIdentity) -> None:
        self.net = net
        self.address = address
        self.identity = identity
        self.dead = False
        self._ends: dict[int, _End] = {}
        self._closed = False

    def stream(self, address: str, method: str, handler: StreamHandler) -> _End:
        chosen = self.net.methods[method]
        if not chosen.streaming:
            raise TypeError(f"{chosen.path} is a call")
        return self._open(address, chosen, handler).client_end

    async def call(self, address: str, method: str, request: Message, *, timeout: float) -> Message:
        chosen = self.net.methods[method]
        if chosen.streaming:
            raise TypeError(f"{chosen.path} is a stream")
        chosen.encoded(request, chosen.request)
        loop = self.net.loop_of(self.address)
        waiter = _Waiter(loop)
        wire = self._open(address, chosen, waiter)
        end = wire.client_end
        end.send(request)
        timer = loop.call_later(timeout, end.close, "deadline exceeded")
        try:
            await waiter.done
        finally:
            timer.cancel()
            end.close()
        what = f"{method} to {address}"
        if waiter.reply is not None:
            return waiter.reply
        if not wire.connected:
            raise Unavailable(f"{what}: no connection; nothing was sent")
        if end.told is not None and end.told.kind:
            raise error_of(end.told.kind, f"{what}: {end.told.why}")
        raise OutcomeUnknown(f"{what}: {waiter.why}")

    async def close(self) -> None:
        self._closed = True
        for end in list(self._ends.values()):
            end.close()
        await asyncio.sleep(0)

    def _open(self, address: str, method: Method, handler: StreamHandler) -> _Wire:
        if self._closed or self.dead:
            raise Unavailable("this node is stopping")
        wire = _Wire(self, address, method)
        wire.client_end.handler = handler
        self._ends = {key: end for key, end in self._ends.items() if not end.ended}
        self._ends[wire.number] = wire.client_end
        return wire


class SimPeerServer:
    """The called side of one process."""

    def __init__(self, net: Network, address: str) -> None:
        self.net = net
        self.address = address
        self.dead = False
        self._accepts: dict[str, Accept] = {}
        self._answers: dict[str, Answer] = {}
        self._ends: dict[int, _End] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}

    def on_stream(self, method: str, accept: Accept) -> None:
        assert self.net.methods[method].streaming, f"{method} is a call"
        self._accepts[method] = accept

    def on_call(self, method: str, answer: Answer) -> None:
        assert not self.net.methods[method].streaming, f"{method} is a stream"
        self._answers[method] = answer

    def accept(self, wire: _Wire) -> None:
        """A connection came about."""
        name, end = wire.method.name, wire.server_end
        self._ends = {key: end for key, end in self._ends.items() if not end.ended}
        self._ends[wire.number] = end
        try:
            if wire.method.streaming and name in self._accepts:
                end.handler = self._accepts[name](end)
            elif name in self._answers:
                end.handler = _Answering(self, wire, self._answers[name])
            else:
                raise Unavailable(f"{name} is not served yet")
        except Exception as error:
            end.end(_Over(*kind_and_text(error)))

    def answer(self, number: int, answering: Coroutine[Any, Any, None]) -> None:
        """Runs until it ends, its caller goes, or this process dies."""
        task = self.net.loop_of(self.address).create_task(answering)
        self._answering[number] = task
        task.add_done_callback(lambda _: self._answering.pop(number, None))

    def cancel_answer(self, number: int) -> None:
        if task := self._answering.get(number):
            task.cancel()

    def cancel_answers(self) -> None:
        """The process is gone, or stops."""
        for task in list(self._answering.values()):
            task.cancel()

    def close(self) -> None:
        """Stop listening, end all streams and calls."""
        self.net.stopped_listening(self)
        for end in list(self._ends.values()):
            end.close("this node is stopping")
        self.cancel_answers()


class _Waiter:
    """The caller's end of a call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        self.reply: Message = None
        self.why = ""

    def on_message(self, message: Message) -> None:
        self.reply = message
        self._wake()

    def on_closed(self, why: str) -> None:
        self.why = why
        self._wake()

    def _wake(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class _Answering:
    """The called end of a call."""

    def __init__(self, server: SimPeerServer, wire: _Wire, answer: Answer) -> None:
        self._server = server
        self._wire = wire
        self._answer = answer

    def on_message(self, message: Message) -> None:
        self._server.answer(self._wire.number, self._run(message))

    async def _run(self, request: Message) -> None:
        end = self._wire.server_end
        try:
            reply = await self._answer(end.peer, request)
        except Exception as error:
            end.end(_Over(*kind_and_text(error)))
        else:
            end.send(reply)

    def on_closed(self, why: str) -> None:
        self._server.cancel_answer(self._wire.number)
