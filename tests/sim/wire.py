"""Streams of the simulated network: two ends, and two ways on which messages are under way.

What may happen to them is said in `net`; a message is lost, late or kept back on a way, never changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from nsqha.server.peers.api import Message, Method, PeerIdentity, StreamHandler, kind_and_text

if TYPE_CHECKING:
    from tests.sim.net import Network
    from tests.sim.peers import SimPeers, SimPeerServer

PING_SECONDS = 8.0
CONNECT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Over:
    """The last item of a direction. `kind`: of the error that the accepting side says it is; empty: it says nothing."""

    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks the process at the other end for an answer, which is one, too; it needs no room."""

    is_answer: bool


class Way:
    """One direction: what waits for room, and what is under way."""

    def __init__(self, net: Network, source: str, target: End) -> None:
        self._net = net
        self._source = source
        self._target = target
        self.on_room: Callable[[], None] = lambda: None
        self.waiting: deque[bytes] = deque()
        self._flying: deque[bytes | Over | Ping] = deque()
        self._flying_bytes = 0
        self._late = 0  # how many of them arrived at a partition
        self.open = False
        self._over = False

    def put(self, item: bytes | Over) -> None:
        if self._over:
            return
        if isinstance(item, Over):
            self._over = True
            self.waiting.clear()
            self._fly(item)
        else:
            self.waiting.append(item)
            self.pump()

    def ping(self, ping: Ping) -> None:
        if self.open and not self._over:
            self._fly(ping)

    def pump(self) -> None:
        while self.open and self.waiting and (not self._flying_bytes or self._fits(self.waiting[0])):
            self._fly(self.waiting.popleft())
        if not self.waiting:
            self.on_room()

    def _fits(self, data: bytes) -> bool:
        return self._flying_bytes + len(data) <= self._net.window_bytes

    def _fly(self, item: bytes | Over | Ping) -> None:
        self._flying.append(item)
        if isinstance(item, bytes):
            self._flying_bytes += len(item)
        self._net.loop.call_later(self._net.seconds(self._source, self._target.address), self._arrive)

    def _arrive(self) -> None:
        """Some item's time has come: the first one's turn, as nothing overtakes."""
        if not self._flying:
            return
        if self._net.blocked(self._source, self._target.address) or self.held is not None:
            self._late += 1
            return
        self._net.tell(self._target.address, self._handed_over, self._flying.popleft())

    @property
    def held(self) -> Message | None:
        """The first message under way, if it waits for `let_go`."""
        if self._net.holds is None or not self._flying or not isinstance(item := self._flying[0], bytes):
            return None
        message = self._target.parsed(item)
        return message if self._net.holds(self._target.method, message) else None

    def let_go(self, *, instead: Message | None = None) -> None:
        """Hand over what waits at the head, or this instead, and behind it what does not wait."""
        item = self._flying.popleft()
        assert isinstance(item, bytes)
        if instead is not None:
            sent: bytes = item
            item = instead.SerializeToString()
            self._flying_bytes += len(item) - len(sent)
        self._net.tell(self._target.address, self._handed_over, item)
        self._late -= 1
        while self._late and self.held is None:
            self._late -= 1
            self._arrive()

    def lose_all(self) -> None:
        """Nothing of what is under way arrives."""
        self.waiting.clear()
        self._flying.clear()
        self._flying_bytes = self._late = 0

    def _handed_over(self, item: bytes | Over | Ping) -> None:
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
        kept = self._net.kept(len(self._flying))
        while len(self._flying) > kept:
            lost = self._flying.pop()
            if isinstance(lost, bytes):
                self._flying_bytes -= len(lost)
        self._flying += over


class End:
    """One end of a stream: a PeerStream."""

    incoming: Way
    outgoing: Way

    def __init__(self, wire: Wire, address: str, peer: PeerIdentity, out: type[Any], in_: type[Any]) -> None:
        self.address = address
        self.peer = peer
        self.handler: StreamHandler | None = None
        self.ended = False
        self.heard = 0.0  # when anything came from the other side last
        self.told: Over | None = None  # how the other side ended it, if that came first
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

    def ping(self) -> None:
        if not self.ended:
            self.outgoing.ping(Ping(is_answer=False))

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
            self.end(Over(*kind_and_text(error)))
            return
        if message is not None:
            self.send(message)

    def close(self, why: str = "") -> None:
        self.end(Over("Unavailable", why or "closed"))

    def end(self, over: Over) -> None:
        """This side ends the stream."""
        if self.ended:
            return
        self._finish()
        self.outgoing.lose_some()
        # As with gRPC, only the side that accepted can say why.
        said = over if self is self._wire.server_end else Over("", "the other side ended the stream")
        self.outgoing.put(said)
        self._wire.net.loop_of(self.address).call_soon(self._tell, over.why)

    def arrived(self, item: bytes | Over | Ping) -> None:
        if self.ended:
            return
        self.heard = self._wire.net.loop_of(self.address).time()
        if isinstance(item, Ping):
            if not item.is_answer:
                self.outgoing.ping(Ping(is_answer=True))
            return
        if isinstance(item, Over):
            self.told = item
            self._finish()
            self._tell(item.why)
            return
        if self.handler is None:
            return
        try:
            message = self.parsed(item)
        except DecodeError:
            self.end(Over("ValueError", f"{len(item)} bytes that are not a {self._in.__name__}"))
            return
        try:
            self.handler.on_message(message)
        except Exception as error:
            self.end(Over(*kind_and_text(error)))

    @property
    def method(self) -> Method:
        return self._wire.method

    def parsed(self, item: bytes) -> Message:
        """What has come here as these bytes. DecodeError."""
        message: Message = self._in.FromString(item)
        return message

    def vanish(self, *, silent: bool) -> None:
        """This side's process is gone."""
        self.ended = True
        self.handler = None
        self.outgoing.lose_some()
        if silent:
            self.incoming.open = False
            self._wire.watch_pings(self.address)
        else:
            self.outgoing.put(Over("", "connection reset by peer"))
        self._wire.ended()

    def _finish(self) -> None:
        self.ended = True
        self.outgoing.waiting.clear()
        self._wire.ended()

    def _tell(self, why: str) -> None:
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.on_closed(why)


class Wire:
    """A stream: two ends and what is between them."""

    def __init__(self, peers: SimPeers, address: str, method: Method) -> None:
        self.net = net = peers.net
        self.method = method
        self.client_end = End(self, peers.address, PeerIdentity(address), method.request, method.reply)
        self.server_end = End(self, address, peers.identity, method.reply, method.request)
        self.ends = (self.client_end, self.server_end)
        self.client_end.outgoing = self.server_end.incoming = Way(net, peers.address, self.server_end)
        self.server_end.outgoing = self.client_end.incoming = Way(net, address, self.client_end)
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
        if server is None or self.net.refuses(self):
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
            self.client_end.end(Over("", f"{self.server_end.address}: {why}"))

    def healed(self) -> None:
        if not self.connected:
            self._connect()
        for end in self.ends:
            end.incoming.resume()

    def watch_pings(self, gone: str = "") -> None:
        """Let each end notice if this partition lasts, or that the machine `gone` is."""
        a, b = self.client_end.address, self.server_end.address
        number = self.net.blocked(a, b), self.net.blocked(b, a)

        def look(end: End) -> None:
            still = (self.net.blocked(a, b), self.net.blocked(b, a)) == number and any(number)
            if self.connected and (gone or still):
                end.end(Over("", "ping timeout"))

        for end in self.ends:
            seconds = PING_SECONDS * self.net.rng.uniform(0.5, 1.0)
            self.net.loop.call_later(seconds, self.net.tell, end.address, look, end)

    def watch_stalled(self, address: str) -> None:
        """Let the other end notice if the process at `address` stays stopped: one that runs in between answers."""
        stop = self.net.stop_of(address)

        def look(end: End) -> None:
            if self.connected and self.net.stop_of(address) == stop:
                end.end(Over("", "ping timeout"))

        for end in self.ends:
            if end.address != address:
                seconds = PING_SECONDS * self.net.rng.uniform(0.5, 1.0)
                self.net.loop.call_later(seconds, self.net.tell, end.address, look, end)

    def ended(self) -> None:
        if self.client_end.ended and (self.server_end.ended or not self.connected):
            self.net.remove(self.number)
