"""The leader's half of live replication: one stream to each follower node, for all partitions led here.

    Partition.append --wake--> FollowerProgress --when the stream asks--> PushMessage --> follower
    Opened, Ack, Refused --> Leadership (who counts it) --> commit

A `FollowerProgress` is of one partition and one follower; it has a cursor into the leader's log and a window: what is
sent and not acknowledged. There is no queue of batches besides the log: a follower that is late, or comes back, is fed
from the same reads, by and by from the files.
A stream that cannot take more asks for nothing, so one slow follower delays no other and costs no memory.

A host that loses its power ends no stream. When its node is back and registers, before pings have told that it was
gone, the stream that does not answer then is opened anew: all it could still do is keep the new process waiting.

The first batch after an answer of a follower leaves at once; what is appended behind it, until the stream asks, leaves
in one message. Followers that are equally far share what is made for the first of them. The committed point rides with
appends; only a log that falls silent tells it alone, a moment later.
Spec: `Push` (the leader's half).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from nsqha.commitlog import copying
from nsqha.commitlog.entry import BatchCorrupt
from nsqha.errors import LogCorrupt
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.quantile import SECONDS_BOUNDS, Histogram
from nsqha.replication.acceptance import same_past
from nsqha.replication.pace import BATCH_COST_MIN
from nsqha.server.peers.api import PeerStream
from nsqha.server.runtime.backoff import Backoff

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.server.partition.partition import Partition
    from nsqha.server.peers.api import Peers

logger = Logger("sender")

T = TypeVar("T")
RestAfter = Callable[[int], float]

MESSAGE_BYTES = 1 << 20  # of data in one message; one batch always goes whole
WINDOW_BYTES = 4 << 20  # of a partition, sent to one follower and not acknowledged
COMMITTED_SECONDS = 0.05  # after which a silent log tells its committed point alone
RETRY_SECONDS = 0.02  # first, doubled each time up to
RETRY_SECONDS_MAX = 1.0
ANSWER_SECONDS = 0.5  # a node that registered anew has so long to answer on the stream that was there before


class PushPiece(NamedTuple):
    """Batches of one partition as they are sent: [first, end), with what was committed then."""

    first: int
    end: int
    committed: int
    size: int  # bytes of data
    message: pb.PushMessage  # it must not be changed


class LeadingPartition(Protocol):
    """What a `FollowerProgress` serves: the leadership of one partition."""

    key: tuple[int, int]
    epoch: int
    topic: str
    epoch_start: int
    piece: PushPiece | None  # the newest, for the other followers; the leader drops it when it is committed

    @property
    def log(self) -> PartitionLog: ...

    @property
    def partition(self) -> Partition: ...

    @property
    def committed(self) -> int:
        """End of what is committed."""

    @property
    def waited_end(self) -> int:
        """Log id: no caller waits for the batches from here on."""

    def heard(
        self, node: int, *, registration: int, log_uid: int, end: int, durable: int, fit: bool, opened: bool
    ) -> None:
        """A follower says what it has; `opened`: and whatever it said before is void."""

    def lost(self, node: int) -> None:
        """A follower can not be reached, or refuses."""

    def fenced(self, node: int, promised: int) -> None:
        """A follower has promised another epoch."""


class PushState(Enum):
    """How far a partition is with one follower."""

    IDLE = "idle"  # no stream yet, or a refusal that will be tried again
    LOST = "lost"  # the stream ended, and its leader knows
    TO_OPEN = "to open"  # asked with the next message
    OPENING = "opening"
    BEHIND = "behind"  # it catches up by itself and says when it is near
    PUSHING = "pushing"


class FollowerProgress:
    """One partition on its way to one follower."""

    __slots__ = (
        "_backoff",
        "_can_not_write",
        "_end_then",
        "_rest_after",
        "_sent",
        "_window",
        "committed_sent",
        "leader",
        "link",
        "next",
        "resting",
        "retry",
        "state",
    )

    def __init__(self, leader: LeadingPartition, link: FollowerStream, rest_after: RestAfter | None = None) -> None:
        self.leader = leader
        self.link = link
        self.state = PushState.IDLE
        self.next = 0  # log id to send next
        self.committed_sent = 0
        self.retry: asyncio.TimerHandle | None = None
        self._sent: deque[tuple[int, int, float]] = deque()  # (end, bytes, when) of what is not acknowledged
        self._window = 0
        self._backoff = Backoff(RETRY_SECONDS, RETRY_SECONDS_MAX)
        self._can_not_write = False  # the follower has refused what was sent, and has acknowledged nothing since
        self.resting: asyncio.TimerHandle | None = None  # it is far behind, and clients go first
        self._rest_after = rest_after
        self._end_then = 0  # of the leader's log when it rested last

    def wake(self) -> None:
        """There is more in the log."""
        if self.state is PushState.PUSHING:
            self.link.wake(self)

    def stop(self) -> None:
        """The leadership has ended."""
        self.link.remove(self)

    # ---- for the link

    def open(self, message: pb.PushMessage) -> None:
        """Ask where the follower is."""
        leader = self.leader
        start, (topic_uid, partition) = leader.epoch_start, leader.key
        message.opens.add(
            key=pb.PartitionKey(topic_uid=topic_uid, partition=partition),
            topic=leader.topic,
            epoch=leader.epoch,
            start=start,
            chain=leader.log.entry_before(start).chain if start >= leader.log.start.log_id else 0,
            first=leader.log.start.log_id,
        )
        self.state = PushState.OPENING

    def opened(self, opened: pb.Opened, registration: int) -> None:
        """The follower has answered: push from its end on, if its log is the beginning of ours."""
        leader, log = self.leader, self.leader.log
        if not self._can_not_write:  # a follower with a full disk opens the stream each time
            self._backoff.reset()
        self._sent.clear()
        self._window = 0
        self.rest_no_more()
        near = not opened.behind and same_past(
            end=opened.end,
            chain=opened.chain,
            own_start=log.start.log_id,
            own_end=log.end.log_id,
            before=log.entry_before,
        )
        if not near and not opened.behind:
            self.link.retry(self)  # it looks for the place where the two part when it is asked again
        self.state = PushState.PUSHING if near else PushState.BEHIND
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
            self.link.send_commits((leader,))

    def acked(self, ack: pb.Ack, registration: int) -> None:
        """The follower has more."""
        if self.state is not PushState.PUSHING:
            return
        if self._can_not_write:
            self._can_not_write = False
            self._backoff.reset()
        leader, sent, end = self.leader, self._sent, ack.end
        while sent and sent[0][0] <= end:
            _, size, at = sent.popleft()
            self._window -= size
            self.link.times.acknowledged(at)
        leader.heard(
            self.link.node,
            registration=registration,
            log_uid=ack.log_uid,
            end=end,
            durable=ack.durable,
            fit=not ack.unfit,
            opened=False,
        )
        if self.next < leader.log.end.log_id:
            self.link.wake(self)

    def take(self, room: int) -> PushPiece | None:
        """The next batches, up to `room` bytes of them but at least one; None: nothing to send, or no window."""
        leader, first, window = self.leader, self.next, WINDOW_BYTES - self._window
        end = leader.log.end.log_id
        if self.state is not PushState.PUSHING or first >= end or window <= 0 or self.resting is not None:
            return None
        committed = leader.committed
        piece = leader.piece
        if (
            piece is None
            or (piece.first, piece.end, piece.committed) != (first, end, committed)
            or piece.size > min(room, window)
        ):
            piece = self._made(first, end, min(room, window), committed)
            if piece is None:
                return None
            if piece.end == end:
                leader.piece = piece
        self.committed_sent = committed
        self._sent.append((piece.end, piece.size, self.link.times.now()))
        self._window += piece.size
        self.next = piece.end
        if piece.end < end and self._rest_after is not None:
            self._rest(piece, end)
        return piece

    def _rest(self, piece: PushPiece, end: int) -> None:
        """More is left than goes with one message: keep to the rate, unless the follower would come no nearer."""
        assert self._rest_after is not None
        batches, grown = piece.end - piece.first, end - (self._end_then or end)
        self._end_then = end
        if batches < 2 * grown:
            return
        if seconds := self._rest_after(max(piece.size, batches * BATCH_COST_MIN)):
            self.resting = self.link.later(seconds, self._rested)

    def _rested(self) -> None:
        self.resting = None
        self.link.wake(self)

    def rest_no_more(self) -> None:
        if self.resting is not None:
            self.resting.cancel()
            self.resting = None

    def _made(self, first: int, end: int, room: int, committed: int) -> PushPiece | None:
        leader, log = self.leader, self.leader.log
        if first < log.start.log_id:
            self.ask_again()  # retention went past it: it has to begin a new log
            return None
        try:
            run = copying.read_run(log, first, end, room, lost=True)
        except LogCorrupt as error:
            logger.error("push_stopped", "%s can not be sent on: %s", log.directory, error)
            if isinstance(error, BatchCorrupt):
                leader.partition.on_damage(error.first.log_id, error.end.log_id)
            self.failed()
            return None
        message = pb.PushMessage()
        topic_uid, partition = leader.key
        message.appends.add(
            topic_uid=topic_uid,
            partition=partition,
            epoch=leader.epoch,
            entries=run.entries,
            data=run.data,
            committed=committed,
            patient=first >= leader.waited_end,
        )
        size = len(run.data) or len(run.entries)  # frames that were given up are not sent
        return PushPiece(first, run.end, committed, size, message)

    def ask_again(self) -> None:
        """Send nothing more on what the follower said; it is asked where it is."""
        self.state = PushState.IDLE
        self.link.retry(self)

    def failed(self) -> None:
        """Our own log can not be read here: the others go on, and this one is tried again once it may be mended."""
        self.leader.lost(self.link.node)
        self._backoff.at_max()
        self.ask_again()

    def refused(self, refused: pb.Refused) -> None:
        """The follower says no."""
        self.state = PushState.IDLE
        if refused.refusal == pb.REFUSAL_FENCED:
            self.leader.fenced(self.link.node, refused.promised)
        elif refused.refusal in (pb.REFUSAL_NO_SPACE, pb.REFUSAL_FAILED):
            self._can_not_write = True
            self.leader.lost(self.link.node)
        self.link.retry(self)

    def next_retry(self) -> float:
        return self._backoff.next_pause()

    @property
    def oldest_sent(self) -> float | None:
        """When the oldest was sent of what is not acknowledged."""
        return self._sent[0][2] if self._sent else None


class PushTimes:
    """When a follower node answers, and how long it takes to acknowledge."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.answered = False  # it has, since batches were last sent at once
        self.seconds = Histogram(SECONDS_BOUNDS)  # from sending batches to their acknowledgement

    def acknowledged(self, sent_at: float) -> None:
        self.seconds.observe(self.now() - sent_at)


class FollowerStream:
    """The stream to one follower node."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peers: Peers,
        *,
        address: str,
        hello: pb.PushHello,
    ) -> None:
        """`hello` is what this node says of itself; `address` may change later."""
        self.hello = hello
        self.address = address
        self.registration = 0  # of the follower's process life; 0: it is not registered yet, or there is no stream
        self.wanted = False  # also without partitions, until the stream ends
        self.times = PushTimes(loop.time)
        self._greeted = False  # it has said who it is
        self._loop = loop
        self._peers = peers
        self._followers: dict[tuple[int, int], FollowerProgress] = {}
        self._dirty: dict[FollowerProgress, None] = {}  # may have something to send
        self._commits_unsent: dict[LeadingPartition, None] = {}  # these moved, and perhaps no append says so
        self._stream: PeerStream | None = None
        self._reconnect: asyncio.TimerHandle | None = None
        self._backoff = Backoff(RETRY_SECONDS, RETRY_SECONDS_MAX)
        self._closed = False

    def lag_seconds(self) -> float:
        """Since the oldest was sent of what is not acknowledged."""
        oldest = [at for progress in self._followers.values() if (at := progress.oldest_sent) is not None]
        return max(0.0, self.times.now() - min(oldest)) if oldest else 0.0

    @property
    def node(self) -> int:
        """The uid of the follower node."""
        return self.hello.target_uid

    # ---- partitions

    def later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, call)

    def add(self, leader: LeadingPartition, rest_after: RestAfter | None = None) -> FollowerProgress:
        """Push a partition to this node from now on."""
        progress = FollowerProgress(leader, self, rest_after)
        before = self._followers.get(leader.key)
        if before is not None:
            self.remove(before)
        self._followers[leader.key] = progress
        if self._stream is None:
            self.connect()
        elif self._greeted:
            self._open([progress])
        return progress

    def remove(self, progress: FollowerProgress) -> None:
        if self._followers.get(progress.leader.key) is progress:
            del self._followers[progress.leader.key]
        progress.state = PushState.IDLE
        self._dirty.pop(progress, None)
        if progress.retry is not None:
            progress.retry.cancel()
        progress.rest_no_more()

    def retry(self, progress: FollowerProgress) -> None:
        """Ask again in a moment."""
        if progress.retry is not None:
            progress.retry.cancel()
        progress.retry = self._loop.call_later(progress.next_retry(), self._retry, progress)

    def _retry(self, progress: FollowerProgress) -> None:
        progress.retry = None
        if self._followers.get(progress.leader.key) is progress and self._greeted:
            self._open([progress])

    def _open(self, progress: Iterable[FollowerProgress]) -> None:
        """Ask where the follower is, when the stream asks: those of many new leaders go together."""
        assert self._stream is not None
        for one in progress:
            one.state = PushState.TO_OPEN
            self._dirty[one] = None
        self._stream.pull(self._next)

    def _guarded(self, progress: FollowerProgress, step: Callable[..., T], *args: Any) -> T | None:
        """One partition's trouble is not that of the others on the stream."""
        try:
            return step(*args)
        except Exception as error:
            logger.error("push_stopped", "%s to node %016x", progress.leader.topic, self.node, error=error)
            if isinstance(error, BatchCorrupt):
                progress.leader.partition.on_damage(error.first.log_id, error.end.log_id)
            progress.failed()
            return None

    # ---- the stream

    def connect(self) -> None:
        """Have a stream, if it is of use."""
        if self._reconnect is not None:
            self._reconnect.cancel()
            self._reconnect = None
        if self._closed or not (self._followers or self.wanted) or self._stream is not None:
            return
        self._stream = self._peers.stream(self.address, "Push", self)
        self._stream.send(pb.PushMessage(hello=self.hello))

    def on_message(self, message: pb.PushReply) -> None:
        self.times.answered = True
        if message.HasField("hello"):
            # Again when it registers: a node serves before that, and members of the ISR are named by registration.
            self._greeted = True
            self.registration = message.hello.registration
            self._backoff.reset()
            if self._followers:
                self._open(list(self._followers.values()))
        # Most messages have one ack and nothing else, and to walk through nothing costs as much as to read that.
        if message.opened:
            for opened in message.opened:
                if (progress := self._of((opened.key.topic_uid, opened.key.partition), opened.epoch)) is not None:
                    self._guarded(progress, progress.opened, opened, self.registration)
        for ack in message.acks:
            if (progress := self._of((ack.topic_uid, ack.partition), ack.epoch)) is not None:
                self._guarded(progress, progress.acked, ack, self.registration)
        if message.refused:
            for refused in message.refused:
                if (progress := self._of((refused.key.topic_uid, refused.key.partition), refused.epoch)) is not None:
                    logger.debug(
                        "push_refused", "node %016x refuses %s: %s", self.node, progress.leader.topic, refused.why
                    )
                    self._guarded(progress, progress.refused, refused)

    def _of(self, key: tuple[int, int], epoch: int) -> FollowerProgress | None:
        progress = self._followers.get(key)
        return progress if progress is not None and progress.leader.epoch == epoch else None

    def on_closed(self, why: str) -> None:
        self._stream = None
        self._commits_unsent.clear()
        self.wanted = False
        if self._greeted:
            logger.info("push_lost", "the stream to node %016x at %s ended: %s", self.node, self.address, why)
        self._greeted = False
        self.registration = 0
        for progress in list(self._followers.values()):
            if progress.state is not PushState.LOST:  # once: a node that is gone is dialled again and again
                progress.state = PushState.LOST
                progress.leader.lost(self.node)
        if not self._closed and self._reconnect is None:
            self._reconnect = self._loop.call_later(self._backoff.next_pause(), self.connect)

    # ---- batches

    def wake(self, progress: FollowerProgress) -> None:
        """Send what is new: at once, or while an answer is awaited when the stream asks, with all that is new then."""
        self._dirty[progress] = None
        stream = self._stream
        if stream is None:
            return
        if self.times.answered and not stream.pending:
            if (message := self._next()) is not None:
                self.times.answered = False
                stream.send(message)
        else:
            stream.pull(self._next)

    def _next(self) -> pb.PushMessage | None:
        """What is new, as much as fits one message."""
        if self._commits_unsent and (commits := self._commit_message()) is not None:
            if self._dirty and self._stream is not None:
                self._stream.pull(self._next)
            return commits
        pieces: list[pb.PushMessage] = []
        room = MESSAGE_BYTES
        opens: pb.PushMessage | None = None
        for progress in list(self._dirty):
            if progress.state is PushState.TO_OPEN:
                if opens is None:
                    pieces.append(opens := pb.PushMessage())
                del self._dirty[progress]
                self._guarded(progress, progress.open, opens)
                continue
            piece = self._guarded(progress, progress.take, room)
            if piece is None or piece.end == progress.leader.log.end.log_id:
                self._dirty.pop(progress, None)
            if piece is not None:
                if pieces and piece.size > room and self._stream is not None:
                    self._stream.send(piece.message)  # one large batch, which may fill a whole message
                else:
                    pieces.append(piece.message)
                room -= piece.size
                if room <= 0:
                    break
        if self._dirty and self._stream is not None:
            self._stream.pull(self._next)
        if len(pieces) <= 1:
            return pieces[0] if pieces else None
        message = pb.PushMessage()
        for one in pieces:
            message.MergeFrom(one)
        return message

    def send_commits(self, leaders: Iterable[LeadingPartition]) -> None:
        """Send committed points when the stream asks, unless they went with appends."""
        if self._stream is not None:
            self._commits_unsent.update(dict.fromkeys(leaders))
            self._stream.pull(self._next)

    def _commit_message(self) -> pb.PushMessage | None:
        message = pb.PushMessage()
        unsent, self._commits_unsent = self._commits_unsent, {}
        for leader in unsent:
            progress, committed = self._followers.get(leader.key), leader.committed
            if progress is None or progress.leader is not leader or progress.state is not PushState.PUSHING:
                continue
            if committed > progress.committed_sent:
                progress.committed_sent = committed
                topic_uid, partition = leader.key
                message.committed.add(topic_uid=topic_uid, partition=partition, epoch=leader.epoch, committed=committed)
        return message if message.committed else None

    def look_whether_alive(self) -> None:
        """The node has registered anew: the process at the other end of this stream may have been another one."""
        if (stream := self._stream) is not None:
            stream.ping()
            self._loop.call_later(ANSWER_SECONDS, self._renew_unless_heard, stream, stream.heard)

    def _renew_unless_heard(self, stream: PeerStream, heard: float) -> None:
        if self._stream is not stream or stream.heard != heard:
            return
        stream.close("the node registered anew, and does not answer here")
        if self.wanted:  # `on_closed`, which comes next, takes it for a node that is gone
            self._reconnect = self._loop.call_later(self._backoff.next_pause(), self._connect_wanted)

    def _connect_wanted(self) -> None:
        self.wanted = True
        self.connect()

    def close(self) -> None:
        """End the stream for good."""
        self._closed = True
        if self._reconnect is not None:
            self._reconnect.cancel()
        if self._stream is not None:
            self._stream.close("the node stops")


class FollowerStreams:
    """The links of one node, by follower."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peers: Peers, hello: pb.PushHello) -> None:
        """`hello` without a target."""
        self._loop = loop
        self._peers = peers
        self._hello = hello
        self._links: dict[int, FollowerStream] = {}
        self._registrations: dict[int, int] = {}  # of the nodes, as the watch last brought them
        self._commits_moved: dict[LeadingPartition, None] = {}  # their committed points moved
        self._commits_timer: asyncio.TimerHandle | None = None

    def add(
        self, leader: LeadingPartition, node: int, address: str, rest_after: RestAfter | None = None
    ) -> FollowerProgress:
        """Push a partition to a node. `rest_after`: how long to rest after so much was sent, while more is left."""
        return self._link(node, address).add(leader, rest_after)

    def prepare(self, node: int, address: str) -> None:
        """Have a stream to a node, so that a partition can be pushed there at once."""
        link = self._link(node, address)
        link.wanted = True
        link.connect()

    def _link(self, node: int, address: str) -> FollowerStream:
        link = self._links.get(node)
        if link is None:
            hello = pb.PushHello()
            hello.CopyFrom(self._hello)
            hello.target_uid = node
            link = self._links[node] = FollowerStream(self._loop, self._peers, address=address, hello=hello)
        return link

    def link(self, node: int) -> FollowerStream | None:
        """The stream to a node, if anything was pushed there."""
        return self._links.get(node)

    def committed(self, leader: LeadingPartition) -> None:
        """Its committed point moved: send it soon, where no append does."""
        self._commits_moved[leader] = None
        if self._commits_timer is None:
            self._commits_timer = self._loop.call_later(COMMITTED_SECONDS, self._send_commits)

    def _send_commits(self) -> None:
        self._commits_timer = None
        moved, self._commits_moved = self._commits_moved, {}
        for link in self._links.values():
            link.send_commits(moved)

    def registered(self, node: int, address: str, registration: int) -> None:
        """The node is reached there from now on, in this life."""
        renewed = self._registrations.get(node) != registration
        self._registrations[node] = registration
        if (link := self._links.get(node)) is not None:
            link.address = address
            if renewed and link.registration != registration:
                link.look_whether_alive()

    def set_registration(self, registration: int) -> None:
        """This node's process life, as others compare it."""
        self._hello.registration = registration
        for link in self._links.values():
            link.hello.registration = registration

    def close(self) -> None:
        if self._commits_timer is not None:
            self._commits_timer.cancel()
        for link in self._links.values():
            link.close()
