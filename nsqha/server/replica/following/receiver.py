"""The follower's half of live replication: one handler for each stream that another node pushes on.

    PushMessage: opens -> FollowerService.open (promise, catch-up) -> Opened
                 appends -> Follower.append [-> disk round] ..... when the stream asks -> one PushReply with all acks
                 committed -> Follower.committed_to

Whatever is wrong with one partition is answered for that partition; the stream is for all of them and stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.silence import SilenceDetector
from nsqha.server.replica.following.follower import Follower

if TYPE_CHECKING:
    from nsqha.server.peers.api import PeerStream

logger = Logger("receiver")


class FollowedReplicas(Protocol):
    """What this node has, as far as its leaders may touch it."""

    def hello(self) -> pb.PushHello:
        """How this node names itself, without a target."""

    def following(self, key: tuple[int, int]) -> Follower | None:
        """The partition, if this node follows."""

    def open(self, receiver: Receiver, opened: pb.Open) -> None:
        """A leader asks for a promise, and where the log ends; answered on the receiver, some time."""

    def leader_lost(self, partitions: int) -> None:
        """The stream on which their leader spoke has ended."""


class LeaderNodes(Protocol):
    """The nodes that push to this one, as its membership in the cluster knows them."""

    def name_of(self, node: int) -> str:
        """What a node's certificate may call it; empty if it is not known."""

    def stream_lost(self, node: int) -> None:
        """The stream of a leader ended: perhaps it is gone."""

    def stream_found(self, node: int) -> None:
        """A node opened its stream."""


class Receiver:
    """One incoming stream."""

    def __init__(self, service: FollowedReplicas, nodes: LeaderNodes, stream: PeerStream) -> None:
        self.leader = 0  # node uid, from the hello
        self.registration = 0
        self.closed = False
        self._service = service
        self._nodes = nodes
        self._stream = stream
        self._acks: dict[Follower, None] = {}
        self._answers: pb.PushReply | None = None  # all but the acks
        self._followers: dict[tuple[int, int], Follower] = {}
        self._silence = SilenceDetector()

    def ended(self) -> bool:
        """Whether the stream is over; asked again after every await."""
        return self.closed

    def silent(self, *, late: bool) -> bool | None:
        """Look whether the leader says nothing, and answers no ping; None: nothing is followed here."""
        if self.closed or not self._followed():
            self._silence.reset()
            return None
        if self._silence.look(self._stream.heard, late=late):
            self._stream.ping()
        return self._silence.silent

    def _followed(self) -> bool:
        """Whether this is still the stream of some partition's leader; those that have another one are forgotten."""
        followers = self._followers
        while followers:
            key, follower = next(iter(followers.items()))
            if follower.port is self:
                return True
            del followers[key]
        return False

    # ---- in

    def on_message(self, message: pb.PushMessage) -> None:
        if message.HasField("hello"):
            if why := self._stranger(message.hello):
                # It asks again for as long as a record names the node that it looks for: no news for the log.
                logger.debug("push_refused", "node %016x at %s: %s", message.hello.node_uid, self._stream.peer, why)
                self._stream.close(why)
                return
            self._greet(message.hello)
        elif not self.leader:
            logger.debug("push_refused", "%s: no hello", self._stream.peer)
            self._stream.close("a stream begins with a hello")
            return
        # Most messages have one append and nothing else, and to walk through nothing costs as much as to read that.
        if message.opens:
            for opened in message.opens:
                self._service.open(self, opened)
        for append in message.appends:
            key = (append.topic_uid, append.partition)
            follower = self._service.following(key)
            if follower is None:
                unknown = pb.PartitionKey(topic_uid=key[0], partition=key[1])
                self.refused(unknown, append.epoch, pb.REFUSAL_UNKNOWN, 0, "this partition is not followed here")
            else:
                follower.append(self, append)
        if message.committed:
            for committed in message.committed:
                follower = self._service.following((committed.topic_uid, committed.partition))
                if follower is not None and follower.port is self and follower.epoch == committed.epoch:
                    follower.committed_to(committed.committed)

    def _stranger(self, hello: pb.PushHello) -> str:
        """Why this stream is not for us, or not from whom it says; empty: it is welcome."""
        mine = self._service.hello()
        if hello.cluster_id != mine.cluster_id:
            return f"this node does not belong to cluster {hello.cluster_id:016x}"
        if hello.target_uid != mine.node_uid:
            return f"this is node {mine.node_uid:016x}, not {hello.target_uid:016x}"
        if not self._stream.peer.may_be(hello.node_uid, self._nodes.name_of(hello.node_uid)):
            return f"{self._stream.peer} may not speak for node {hello.node_uid:016x}"
        return ""

    def _greet(self, hello: pb.PushHello) -> None:
        self.leader = hello.node_uid
        self._nodes.stream_found(hello.node_uid)
        self.registration = hello.registration
        self.greet()

    def greet(self) -> None:
        """Say who this node is; again after it has registered."""
        if self.leader:
            hello = self._service.hello()
            hello.target_uid = self.leader
            self._answer().hello.CopyFrom(hello)

    def on_closed(self, why: str) -> None:
        self.closed = True
        for follower in self._followers.values():
            follower.left(self)
        if self._followers:
            self._service.leader_lost(len(self._followers))
            self._nodes.stream_lost(self.leader)
        self._followers.clear()

    # ---- out

    def followed_by(self, follower: Follower) -> None:
        """This stream is where the partition's leader speaks."""
        self._followers[follower.key] = follower

    def opened(self, follower: Follower, *, behind: bool) -> None:
        log = follower.log
        last = log.entry_before(log.end.log_id)
        self._acks.pop(follower, None)
        self._answer().opened.add(
            key=follower.wire_key,
            epoch=follower.epoch,
            log_uid=follower.log_uid,
            end=log.end.log_id,
            durable=min(log.local_durable, log.end.log_id),
            last_epoch=last.epoch,
            chain=last.chain,
            behind=behind,
            unfit=not follower.applier.fit,
        )

    def ack(self, follower: Follower) -> None:
        if not follower.behind:
            self._acks[follower] = None
            self._stream.pull(self._next)

    def refused(self, key: pb.PartitionKey, epoch: int, refusal: pb.Refusal.ValueType, promised: int, why: str) -> None:
        self._answer().refused.add(key=key, epoch=epoch, refusal=refusal, promised=promised, why=why)

    def _answer(self) -> pb.PushReply:
        """The reply that leaves when the stream asks."""
        if self._answers is None:
            self._answers = pb.PushReply()
            self._stream.pull(self._next)
        return self._answers

    def _next(self) -> pb.PushReply | None:
        """What there is to answer by now."""
        reply, self._answers = self._answers, None
        acks, self._acks = self._acks, {}
        for follower in acks:
            if follower.port is self and not follower.behind:
                if reply is None:
                    reply = pb.PushReply()
                end = follower.log.end.log_id
                topic_uid, partition = follower.key
                reply.acks.add(
                    topic_uid=topic_uid,
                    partition=partition,
                    epoch=follower.epoch,
                    log_uid=follower.log_uid,
                    end=end,
                    durable=min(follower.log.local_durable, end),
                    unfit=not follower.applier.fit,
                )
        return reply
