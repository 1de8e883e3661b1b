"""The leader's half of live replication: one stream to each follower node, for all partitions led here.

    Partition.append --wake--> Pushed (one partition, one follower) --end of tick--> PushMessage --> follower
    Opened, Ack, Refused --> Leadership (who counts it) --> commit

A `Pushed` has a cursor into the leader's log and a window: what is sent and not acknowledged. There is no queue of
batches besides the log: a follower that is late, or comes back, is fed from the same reads, by and by from the files.
A stream that cannot take more waits for acks, so one slow follower delays no other and costs no memory.

What was appended in one tick leaves in one message. The committed point rides with appends; only a log that falls
silent tells it alone, a moment later. Spec: `Push` (the leader's half).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nsqha.commitlog import copying
from nsqha.commitlog.entry import BatchCorrupt
from nsqha.errors import LogCorrupt
from nsqha.nsqlog import Log
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import PeerStream

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.server.partition import Partition
    from nsqha.server.peers import Peers

log = Log("push")

T = TypeVar("T")

MESSAGE_BYTES = 1 << 20  # of data in one message; one batch always goes whole
WINDOW_BYTES = 4 << 20  # of a partition, sent to one follower and not acknowledged
PENDING_MAX = 4  # messages that wait in the stream
FULL_SECONDS = 0.002  # until a stream that took no more is looked at again
COMMITTED_SECONDS = 0.05  # after which a silent log tells its committed point alone
RETRY_SECONDS = 0.02  # first, doubled each time up to
RETRY_SECONDS_MAX = 1.0


class Leader(Protocol):
    """What a `Pushed` serves: the leadership of one partition."""

    epoch: int
    topic: str
    epoch_start: int
    wire_key: pb.PartitionKey

    @property
    def log(self) -> PartitionLog: ...

    @property
    def partition(self) -> Partition: ...

    @property
    def committed(self) -> int:
        """End of what is committed."""

    def heard(
        self, node: int, *, registration: int, log_uid: int, end: int, durable: int, fit: bool, opened: bool
    ) -> None:
        """A follower says what it has; `opened`: and whatever it said before is void."""

    def lost(self, node: int) -> None:
        """A follower can not be reached, or refuses."""

    def fenced(self, node: int, promised: int) -> None:
        """A follower has promised another epoch."""


class State(Enum):
    IDLE = "idle"  # no stream, or a refusal that will be tried again
    OPENING = "opening"
    BEHIND = "behind"  # it catches up by itself and says when it is near
    PUSHING = "pushing"


class Pushed:
    """One partition on its way to one follower."""

    __slots__ = ("_retry_seconds", "_sent", "_window", "committed_sent", "leader", "link", "next", "retry", "state")

    def __init__(self, leader: Leader, link: PushLink) -> None:
        self.leader = leader
        self.link = link
        self.state = State.IDLE
        self.next = 0  # log id to send next
        self.committed_sent = 0
        self.retry: asyncio.TimerHandle | None = None
        self._sent: deque[tuple[int, int]] = deque()  # (end, bytes) of what is not acknowledged
        self._window = 0
        self._retry_seconds = RETRY_SECONDS

    def wake(self) -> None:
        """There is more in the log."""
        if self.state is State.PUSHING:
            self.link.wake(self)

    def committed(self) -> None:
        """The committed point moved."""
        if self.state is State.PUSHING:
            self.link.tell_committed(self)

    def stop(self) -> None:
        """The leadership has ended."""
        self.link.remove(self)

    # ---- for the link

    def open(self, message: pb.PushMessage) -> None:
        """Ask where the follower is."""
        leader = self.leader
        start = leader.epoch_start
        message.opens.add(
            key=leader.wire_key,
            topic=leader.topic,
            epoch=leader.epoch,
            start=start,
            chain=leader.log.entry_before(start).chain if start >= leader.log.start.log_id else 0,
            first=leader.log.start.log_id,
        )
        self.state = State.OPENING

    def opened(self, opened: pb.Opened, registration: int) -> None:
        """The follower has answered: push from its end on, if its log is the beginning of ours."""
        leader, log_ = self.leader, self.leader.log
        self._retry_seconds = RETRY_SECONDS
        self._sent.clear()
        self._window = 0
        near = not opened.behind and log_.start.log_id <= opened.end <= log_.end.log_id
        near = near and log_.entry_before(opened.end).chain == opened.chain
        if not near and not opened.behind:
            self.link.retry(self)  # it looks for the place where the two part when it is asked again
        self.state = State.PUSHING if near else State.BEHIND
        self.next = opened.end
        self.committed_sent = 0
        leader.heard(
            self.link.node,
            registration=registration,
            log_uid=opened.log_uid,
            end=opened.end if near else 0,
            durable=opened.durable if near else 0,
            fit=near and not opened.unfit,
            opened=True,
        )
        if near:
            self.link.wake(self)
            self.link.tell_committed(self)

    def acked(self, ack: pb.Ack, registration: int) -> None:
        """The follower has more."""
        if self.state is not State.PUSHING:
            return
        while self._sent and self._sent[0][0] <= ack.end:
            self._window -= self._sent.popleft()[1]
        node = self.link.node
        self.leader.heard(
            node,
            registration=registration,
            log_uid=ack.log_uid,
            end=ack.end,
            durable=ack.durable,
            fit=not ack.unfit,
            opened=False,
        )
        if self.next < self.leader.log.end.log_id:
            self.link.wake(self)

    def fill(self, message: pb.PushMessage, room: int) -> int:
        """Put the next batches into the message; how many bytes. 0: nothing to send, or no window."""
        leader, log_ = self.leader, self.leader.log
        end = log_.end.log_id
        if self.state is not State.PUSHING or self.next >= end or self._window >= WINDOW_BYTES:
            return 0
        if self.next < log_.start.log_id:
            self.ask_again()  # retention went past it: it has to begin anew
            return 0
        try:
            run = copying.read_run(log_, self.next, end, min(room, WINDOW_BYTES - self._window), lost=True)
        except LogCorrupt as error:
            log.error("push_stopped", "%s can not be sent on: %s", log_.directory, error)
            if isinstance(error, BatchCorrupt):
                leader.partition.on_damage(error.first.log_id, error.end.log_id)
            self.failed()
            return 0
        committed = leader.committed
        message.appends.add(
            key=leader.wire_key, epoch=leader.epoch, entries=run.entries, data=run.data, committed=committed
        )
        self.committed_sent = committed
        size = len(run.data) or len(run.entries)  # frames that were given up are not sent
        self._sent.append((run.end, size))
        self._window += size
        self.next = run.end
        return size

    def ask_again(self) -> None:
        """Send nothing more on what the follower said; it is asked where it is."""
        self.state = State.IDLE
        self.link.retry(self)

    def failed(self) -> None:
        """Our own log can not be read here: the others go on, and this one is tried again once it may be mended."""
        self.leader.lost(self.link.node)
        self._retry_seconds = RETRY_SECONDS_MAX
        self.ask_again()

    def refused(self, refused: pb.Refused) -> None:
        """The follower says no."""
        self.state = State.IDLE
        if refused.refusal == pb.REFUSAL_FENCED:
            self.leader.fenced(self.link.node, refused.promised)
        elif refused.refusal in (pb.REFUSAL_NO_SPACE, pb.REFUSAL_FAILED):
            self.leader.lost(self.link.node)
        self.link.retry(self)

    def next_retry(self) -> float:
        seconds = self._retry_seconds
        self._retry_seconds = min(2 * seconds, RETRY_SECONDS_MAX)
        return seconds


class PushLink:
    """The stream to one follower node."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peers: Peers,
        *,
        node: int,
        address: str,
        hello: pb.PushHello,
    ) -> None:
        """`hello` is what this node says of itself; `address` may change later."""
        self.node = node
        self.address = address
        self.registration = 0  # of the follower's process life; 0: it is not registered yet, or there is no stream
        self.wanted = False  # also without partitions, until the stream ends
        self._greeted = False  # it has said who it is
        self._loop = loop
        self._peers = peers
        self._hello = hello
        self._pushed: dict[tuple[int, int], Pushed] = {}
        self._dirty: dict[Pushed, None] = {}
        self._silent: dict[Pushed, None] = {}
        self._stream: PeerStream | None = None
        self._flushing = False
        self._full: asyncio.TimerHandle | None = None  # the stream took no more: looked at again then
        self._committed_timer: asyncio.TimerHandle | None = None
        self._reconnect: asyncio.TimerHandle | None = None
        self._reconnect_seconds = RETRY_SECONDS
        self._closed = False

    # ---- partitions

    def add(self, leader: Leader) -> Pushed:
        """Push a partition to this node from now on."""
        pushed = Pushed(leader, self)
        key = (leader.wire_key.topic_uid, leader.wire_key.partition)
        before = self._pushed.get(key)
        if before is not None:
            self.remove(before)
        self._pushed[key] = pushed
        if self._stream is None:
            self.connect()
        elif self._greeted:
            self._open([pushed])
        return pushed

    def remove(self, pushed: Pushed) -> None:
        key = (pushed.leader.wire_key.topic_uid, pushed.leader.wire_key.partition)
        if self._pushed.get(key) is pushed:
            del self._pushed[key]
        pushed.state = State.IDLE
        self._dirty.pop(pushed, None)
        self._silent.pop(pushed, None)
        if pushed.retry is not None:
            pushed.retry.cancel()

    def retry(self, pushed: Pushed) -> None:
        """Ask again in a moment."""
        if pushed.retry is not None:
            pushed.retry.cancel()
        pushed.retry = self._loop.call_later(pushed.next_retry(), self._retry, pushed)

    def _retry(self, pushed: Pushed) -> None:
        pushed.retry = None
        if pushed in self._pushed.values() and self._greeted:
            self._open([pushed])

    def _open(self, pushed: list[Pushed]) -> None:
        assert self._stream is not None
        message = pb.PushMessage()
        for one in pushed:
            self._guarded(one, one.open, message)
        self._stream.send(message)

    def _guarded(self, pushed: Pushed, step: Callable[..., T], *args: Any) -> T | None:
        """One partition's trouble is not that of the others on the stream."""
        try:
            return step(*args)
        except Exception as error:
            log.error("push_stopped", "%s to node %016x", pushed.leader.topic, self.node, error=error)
            pushed.failed()
            return None

    # ---- the stream

    def connect(self) -> None:
        """Have a stream, if it is of use."""
        if self._reconnect is not None:
            self._reconnect.cancel()
            self._reconnect = None
        if self._closed or not (self._pushed or self.wanted) or self._stream is not None:
            return
        self._stream = self._peers.stream(self.address, "Push", self)
        self._stream.send(pb.PushMessage(hello=self._hello))

    def on_message(self, message: pb.PushReply) -> None:
        if message.HasField("hello"):
            # Again when it registers: a node serves before that, and whoever joins the ISR is named by registration.
            self._greeted = True
            self.registration = message.hello.registration
            self._reconnect_seconds = RETRY_SECONDS
            if self._pushed:
                self._open(list(self._pushed.values()))
        for opened in message.opened:
            if (pushed := self._of(opened.key, opened.epoch)) is not None:
                self._guarded(pushed, pushed.opened, opened, self.registration)
        for ack in message.acks:
            if (pushed := self._of(ack.key, ack.epoch)) is not None:
                self._guarded(pushed, pushed.acked, ack, self.registration)
        for refused in message.refused:
            if (pushed := self._of(refused.key, refused.epoch)) is not None:
                log.debug("push_refused", "node %016x refuses %s: %s", self.node, pushed.leader.topic, refused.why)
                self._guarded(pushed, pushed.refused, refused)

    def _of(self, key: pb.PartitionKey, epoch: int) -> Pushed | None:
        pushed = self._pushed.get((key.topic_uid, key.partition))
        return pushed if pushed is not None and pushed.leader.epoch == epoch else None

    def on_closed(self, why: str) -> None:
        self._stream = None
        self.wanted = False
        if self._greeted:
            log.info("push_lost", "the stream to node %016x at %s ended: %s", self.node, self.address, why)
        self._greeted = False
        self.registration = 0
        for pushed in list(self._pushed.values()):
            pushed.state = State.IDLE
            pushed.leader.lost(self.node)
        if not self._closed and self._reconnect is None:
            self._reconnect = self._loop.call_later(self._reconnect_seconds, self.connect)
            self._reconnect_seconds = min(2 * self._reconnect_seconds, RETRY_SECONDS_MAX)

    # ---- batches

    def wake(self, pushed: Pushed) -> None:
        """Send what is new at the end of this tick."""
        self._dirty[pushed] = None
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._full is not None:
            self._full.cancel()
            self._full = None
        stream = self._stream
        while stream is not None and self._dirty and stream.pending < PENDING_MAX:
            message = pb.PushMessage()
            room = MESSAGE_BYTES
            for pushed in list(self._dirty):
                size = self._guarded(pushed, pushed.fill, message, room)
                if not size:
                    self._dirty.pop(pushed, None)
                    continue
                room -= size
                if room <= 0:
                    break
            if not message.appends:
                return
            stream.send(message)
        if stream is not None and self._dirty:
            # It is full. Acks of what it holds may wake other partitions only, or nobody.
            self._full = self._loop.call_later(FULL_SECONDS, self._flush)

    def tell_committed(self, pushed: Pushed) -> None:
        """Tell the committed point soon, unless an append does."""
        self._silent[pushed] = None
        if self._committed_timer is None:
            self._committed_timer = self._loop.call_later(COMMITTED_SECONDS, self._tell_committed)

    def _tell_committed(self) -> None:
        self._committed_timer = None
        silent, self._silent = self._silent, {}
        message = pb.PushMessage()
        for pushed in silent:
            committed = pushed.leader.committed
            if pushed.state is State.PUSHING and committed > pushed.committed_sent:
                pushed.committed_sent = committed
                message.committed.add(key=pushed.leader.wire_key, epoch=pushed.leader.epoch, committed=committed)
        if message.committed and self._stream is not None:
            self._stream.send(message)

    def close(self) -> None:
        """End the stream; nobody is led for this node any more."""
        self._closed = True
        for handle in (self._committed_timer, self._reconnect, self._full):
            if handle is not None:
                handle.cancel()
        if self._stream is not None:
            self._stream.close("the node stops")


class PushLinks:
    """The links of one node, by follower."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peers: Peers, hello: pb.PushHello) -> None:
        """`hello` without a target."""
        self._loop = loop
        self._peers = peers
        self._hello = hello
        self._links: dict[int, PushLink] = {}

    def add(self, leader: Leader, node: int, address: str) -> Pushed:
        """Push a partition to a node."""
        return self._link(node, address).add(leader)

    def prepare(self, node: int, address: str) -> None:
        """Have a stream to a node, so that a partition can be pushed there at once."""
        link = self._link(node, address)
        link.wanted = True
        link.connect()

    def _link(self, node: int, address: str) -> PushLink:
        link = self._links.get(node)
        if link is None:
            hello = pb.PushHello()
            hello.CopyFrom(self._hello)
            hello.target_uid = node
            link = self._links[node] = PushLink(self._loop, self._peers, node=node, address=address, hello=hello)
        return link

    def moved(self, node: int, address: str) -> None:
        """The node is reached there from now on."""
        if (link := self._links.get(node)) is not None:
            link.address = address

    def set_registration(self, registration: int) -> None:
        """This node's process life, as others compare it."""
        self._hello.registration = registration
        for link in self._links.values():
            link._hello.registration = registration

    def close(self) -> None:
        for link in self._links.values():
            link.close()
