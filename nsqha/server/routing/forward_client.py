"""Publishes on their way to the node that leads: publishers of this node's publishers, links to other nodes.

    Connection, HTTP, gRPC -> PartitionPublisher (order, retry) -> Partition here | Link -> Forward stream -> its leader

Any node takes publishes for any topic. A publisher keeps to one partition per topic, one that is led here if there is
one; it stays with it when the leader changes. At most one hop: who is sent a publish and does not lead refuses it, and
says who does, which matters to a node that has lost the records (`nsqha.server.routing.hints`).

A link's stream begins with a greeting each way, and nothing is sent before the other side has answered: so a node that
is gone costs a wait, not an unknown outcome. What was sent when the stream breaks is of unknown outcome; so it is when
the other node's lease ends or it registers anew, or when it is silent and another node leads the partition, long before
its silence ends the stream, and what comes later goes to the next leader. A window bounds what one node has under way
at another one: it is what a leader holds beyond its own budget.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from nsqha.errors import NotFound
from nsqha.hot import NOT_STORED, OUTCOME_UNKNOWN
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2, routing_pb2
from nsqha.server.partition.topic import Topic
from nsqha.server.peers.keepalive import SilenceWatch
from nsqha.server.routing.hints import from_wire
from nsqha.server.routing.leaders import LeaderAt, Leaders, is_another
from nsqha.server.routing.publisher import PartitionPublisher, Publish, Target
from nsqha.server.runtime.budget import PublishBudget

if TYPE_CHECKING:
    from nsqha.server.partition.partition import Partition
    from nsqha.server.peers.api import Peers, PeerStream

WINDOW_BYTES = 8 << 20  # under way at one other node; a publish that is larger goes alone
MESSAGE_BYTES = 1 << 20  # publishes are sent together up to this much
GREETING_SECONDS = 1.0  # a node that does not answer for this time is tried again
DIAL_AGAIN_SECONDS = 0.02  # ... and one that refuses, for all its publishers together, after this
TOLD_A_TURN = 16  # publishes that hear in one turn of the loop that a link is lost
PACED_PARTITIONS = 64  # from so many partitions on, publishers hear of a lost link one after another
PARTITION_SECONDS = 0.0004  # for each; about what its election takes
PACED_SECONDS = 0.5  # at most, for all
ANSWER_SLACK_SECONDS = 5.0  # beyond what the leader may take until it answers

logger = Logger("forwarding")


class LocalTarget:
    """A partition that this node leads."""

    __slots__ = ("_partition", "_refusal")

    counts = True

    def __init__(self, partition: Partition, refusal: Callable[[], str | None]) -> None:
        self._partition = partition
        self._refusal = refusal

    @property
    def gone(self) -> bool:
        return self._partition.closed

    def take(self, publish: Publish) -> None:
        refusal = self._refusal()
        if refusal is not None:
            publish.failed(NOT_STORED + refusal)
            return
        self._partition.publish(publish.frames, publish, publish.delay_ms)


class RemoteTarget:
    """A partition that another node leads, in one epoch."""

    __slots__ = ("_key", "_link")

    counts = False

    def __init__(self, link: ForwardLink, leader: LeaderAt, number: int) -> None:
        self._link = link
        self._key = replication_pb2.PartitionKey(topic_uid=leader.topic_uid, partition=number)

    @property
    def gone(self) -> bool:
        return self._link.ended

    def take(self, publish: Publish) -> None:
        self._link.take(self._key, publish)


class SentPublish(NamedTuple):
    """A publish that was sent to another node."""

    sequence: int
    key: replication_pb2.PartitionKey
    publish: Publish


class ForwardWindow:
    """Publishes that one other node was sent and has not answered; `bytes` of them it may hold at most WINDOW_BYTES."""

    __slots__ = ("_given_up", "_sequence", "bytes", "sent")

    def __init__(self) -> None:
        self.sent: dict[int, SentPublish] = {}  # by sequence, in order
        self.bytes = 0  # of those, and of those that were given up
        self._given_up: dict[int, int] = {}  # sizes of publishes that the other side may still have
        self._sequence = 0

    def fill(self, queue: deque[tuple[replication_pb2.PartitionKey, Publish]]) -> list[SentPublish]:
        """Take from the front what goes with one message; nothing while the window is full."""
        taken: list[SentPublish] = []
        size = 0
        while queue:
            key, publish = queue[0]
            length = len(publish.frames)
            if (self.bytes and self.bytes + length > WINDOW_BYTES) or (size and size + length > MESSAGE_BYTES):
                break
            queue.popleft()
            self._sequence += 1
            sent = self.sent[self._sequence] = SentPublish(self._sequence, key, publish)
            taken.append(sent)
            self.bytes += length
            size += length
        return taken

    def take_back(self, sequence: int) -> SentPublish | None:
        """It was answered; None if it was given up before."""
        sent = self.sent.pop(sequence, None)
        self.bytes -= self._given_up.pop(sequence, 0) if sent is None else len(sent.publish.frames)
        return sent

    def give_up(self, hopeless: Callable[[Publish], bool]) -> list[Publish]:
        """Wait no longer for answers to these publishes."""
        overdue = [sent for sent in self.sent.values() if hopeless(sent.publish)]
        for sequence, _, publish in overdue:
            del self.sent[sequence]
            self._given_up[sequence] = len(publish.frames)
        return [sent.publish for sent in overdue]

    def clear(self) -> list[Publish]:
        """The stream has ended: what no answer comes for any more."""
        lost = [sent.publish for sent in self.sent.values()]
        self.sent.clear()
        self.bytes = 0
        return lost


class ForwardLink:
    """The Forward stream to one node: a `StreamHandler`. It ends with its stream; the next one is another object."""

    def __init__(
        self,
        peers: Peers,
        leaders: Leaders,
        leader: LeaderAt,
        *,
        loop: asyncio.AbstractEventLoop,
        wait_seconds: float,
        answer_seconds: float,
        on_end: Callable[[ForwardLink, str], None],
    ) -> None:
        self._leader = leader  # of one of the partitions; all that counts is where it is
        self.ended = False
        self.greeted = False  # it has answered
        self._loop = loop
        self._wait_seconds = wait_seconds
        self._answer_seconds = answer_seconds
        self._on_end = on_end
        self._begun = loop.time()
        self._queue: deque[tuple[replication_pb2.PartitionKey, Publish]] = deque()  # not sent
        self._window = ForwardWindow()
        self._scheduled = False
        self._leaders = leaders
        self._registration = leaders.registration(leader.node)
        self._stream: PeerStream = peers.stream(leader.peer_address, "Forward", self)
        greeting = routing_pb2.Greeting(cluster_id=leaders.cluster_id, node_uid=leaders.node, target_uid=leader.node)
        self._stream.send(routing_pb2.ForwardRequest(greeting=greeting))
        self._watch = SilenceWatch(self._stream, lambda: self.greeted and not self.idle, self._leave_if_silent)

    @property
    def node(self) -> int:
        return self._leader.node

    @property
    def address(self) -> str:
        return self._leader.peer_address

    def take(self, key: replication_pb2.PartitionKey, publish: Publish) -> None:
        """Send it at the end of the tick, or when the window allows. Its outcome is `publish`'s to hear."""
        if self.ended:
            publish.refused(f"the connection to {self.address} is lost")
            return
        self._queue.append((key, publish))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and self.greeted:
            self._scheduled = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._scheduled = False
        now = self._loop.time()
        while not self.ended and (sent := self._window.fill(self._queue)):
            message = routing_pb2.ForwardRequest()
            for sequence, key, publish in sent:
                message.publishes.add(
                    sequence=sequence,
                    key=key,
                    topic=publish.publisher.topic,
                    frames=publish.frames,
                    defer_ms=publish.delay_ms,
                    waited_ms=max(0, round((now - publish.at) * 1000)),
                )
            self._stream.send(message)
            self._watch.begin()

    # ---- answers

    def on_message(self, message: routing_pb2.ForwardReply) -> None:
        if message.HasField("greeting"):
            self.greeted = True
        for sequence in message.stored:
            if (sent := self._window.take_back(sequence)) is not None:
                sent.publish.stored()
        not_led: dict[tuple[int, int], str] = {}
        for failure in message.failures:
            if (sent := self._window.take_back(failure.sequence)) is not None:
                _, key, publish = sent
                if failure.outcome == routing_pb2.FORWARD_OUTCOME_NOT_LEADER:
                    not_led[key.topic_uid, key.partition] = publish.publisher.topic
                self._failed(publish, failure)
        hints = {(hint.key.topic_uid, hint.key.partition): from_wire(hint) for hint in message.leaders}
        for where, topic in not_led.items():
            self._leaders.not_led(topic, where[1], by=self.node, hint=hints.get(where))
        if self._queue:
            self._schedule()

    def _failed(self, publish: Publish, failure: routing_pb2.ForwardFailure) -> None:
        if failure.outcome == routing_pb2.FORWARD_OUTCOME_NOT_LEADER:
            publish.refused(failure.why)
        elif failure.outcome == routing_pb2.FORWARD_OUTCOME_REFUSED:
            publish.failed(NOT_STORED + failure.why)
        else:
            publish.failed(OUTCOME_UNKNOWN + failure.why)

    def leaders_changed(self) -> None:
        """Other nodes may lead what was sent there."""
        if not self._leaders.alive(self.node):
            self.close("its lease has ended")
        elif is_another(self._leaders.registration(self.node), self._registration):
            # A host that lost its power ends no stream, and the end of its lease may have been missed here.
            self.close("it has registered anew")
        elif self._watch.silent:
            self._leave_if_silent()

    def _leave_if_silent(self) -> None:
        """That node says nothing: what it has of partitions that another one leads by now gets no better answer."""
        for publish in self._window.give_up(self._led_elsewhere):
            publish.failed(f"{OUTCOME_UNKNOWN}{self.address} does not answer, and another node leads the partition now")
        stays: deque[tuple[replication_pb2.PartitionKey, Publish]] = deque()
        queue, self._queue = self._queue, stays
        for key, publish in queue:
            if self._led_elsewhere(publish):
                publish.refused(f"{self.address} does not answer")
            else:
                stays.append((key, publish))

    def _led_elsewhere(self, publish: Publish) -> bool:
        leader = self._leaders.leader(publish.publisher.topic, publish.publisher.number)
        return leader is not None and leader.node != self.node

    def on_closed(self, why: str) -> None:
        self._end(why)

    def close(self, why: str) -> None:
        """That node leads nothing any more, or this node stops."""
        if not self.ended:
            self._end(why)
            self._stream.close(why)

    def _end(self, why: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._watch.stop()
        self._on_end(self, why)
        sent = self._window.clear()
        queue, self._queue = self._queue, deque()
        lost, unsent = f"the connection to {self.address} was lost: {why}", f"no connection to {self.address}: {why}"
        tell: list[Callable[[], object]] = [partial(publish.failed, OUTCOME_UNKNOWN + lost) for publish in sent]
        tell += [partial(publish.refused, unsent, unreachable=not self.greeted) for _, publish in queue]
        places = {(publish.publisher.topic, publish.publisher.number): None for _, publish in queue}
        tell += [partial(self._leaders.not_led, *place, by=self.node) for place in places]
        partitions = len({id(publish.publisher) for publish in sent})
        seconds = min(partitions * PARTITION_SECONDS, PACED_SECONDS) if partitions >= PACED_PARTITIONS else 0.0
        self._tell(iter(tell), seconds * TOLD_A_TURN / max(1, len(tell)))

    def _tell(self, rest: Iterator[Callable[[], object]], pause: float) -> None:
        """Tell publishers a few outcomes in each turn: each may close a client's connection, and the controller waits
        for this node's answers before it elects other leaders. Of hundreds of partitions with a `pause`: their clients
        come again at once, and would take the processor from the elections that all of them wait for."""
        for outcome in itertools.islice(rest, TOLD_A_TURN):
            outcome()
        if operator.length_hint(rest):
            if pause:
                self._loop.call_later(pause, self._tell, rest, pause)
            else:
                self._loop.call_soon(self._tell, rest, pause)

    # ---- time

    def keep_house(self) -> None:
        """Once a second: a greeting that does not come, what waits too long, answers that never come."""
        now = self._loop.time()
        if not self.greeted and now - self._begun > GREETING_SECONDS:
            self.close("no answer")
            return
        for publish in self._window.give_up(lambda publish: publish.at < now - self._answer_seconds):
            publish.failed(OUTCOME_UNKNOWN + "not confirmed in time")
        overdue = now - self._wait_seconds
        while self._queue and self._queue[0][1].at < overdue:
            self._queue.popleft()[1].failed(f"{NOT_STORED}{self.address} does not take publishes in time")

    @property
    def refused_just_now(self) -> bool:
        """Whether that node was dialled a moment ago, and did not answer."""
        return self.ended and not self.greeted and self._loop.time() < self._begun + DIAL_AGAIN_SECONDS

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not self._queue and not self._window.sent

    def __repr__(self) -> str:
        return f"Link({self.address}: {len(self._queue)} wait, {len(self._window.sent)} under way)"


class Forwarder:
    """The publishers of one node, and its links to others: a `Router`."""

    clustered = True

    def __init__(
        self,
        topics: Mapping[str, Topic],
        leaders: Leaders,
        peers: Peers,
        *,
        loop: asyncio.AbstractEventLoop,
        budget: PublishBudget,
        wait_seconds: float,
        outcome_seconds: float,
        refusal: Callable[[], str | None],
    ) -> None:
        """`wait_seconds`: for a leader; `outcome_seconds`: a written publish may take so long; `refusal`: why nothing
        can be stored on this node now."""
        self._topics = topics
        self._leaders = leaders
        self._peers = peers
        self._loop = loop
        self._budget = budget
        self._refusal = refusal
        self._wait_seconds = wait_seconds
        self._answer_seconds = wait_seconds + outcome_seconds + ANSWER_SLACK_SECONDS
        # A publisher lives as long as a publisher remembers it or something of it is under way: asked for again
        # meanwhile, it must be the same one, or its publishes could overtake each other.
        # By topic, then by source and partition, in the order in which they came; None: the one that was chosen for a
        # source that names no partition.
        self._publishers: dict[str, WeakValueDictionary[tuple[int, int | None], PartitionPublisher]] = {}
        self._links: dict[int, ForwardLink] = {}
        self._looking = False  # at the links, at the end of this turn of the loop
        self._closed = False
        self._forget = leaders.when_changed(self._changed)

    def publisher(self, topic: str, source: int, number: int | None = None) -> PartitionPublisher | None:
        """Where this source publishes to the topic, or to that partition of it; None: there is no such topic."""
        found = self._topics.get(topic)
        led = found.led if found is not None and not found.deleting else ()
        partitions = self._leaders.partitions(topic)
        if not partitions and not led:
            return None
        if number is None:
            known = self._publishers.get(topic)
            chosen = None if known is None else known.get((source, None))
            if chosen is not None and chosen.number < max(partitions, 1 + max((p.number for p in led), default=0)):
                return chosen
            publisher = self._publisher(topic, source, led[source % len(led)].number if led else source % partitions)
            self._publishers[topic][source, None] = publisher
            return publisher
        return self._publisher(topic, source, number)

    def _publisher(self, topic: str, source: int, number: int) -> PartitionPublisher:
        known = self._publishers.get(topic)
        if known is None:
            known = self._publishers[topic] = WeakValueDictionary()
        publisher = known.get((source, number))
        if publisher is None:
            publisher = PartitionPublisher(
                topic, number, self, loop=self._loop, budget=self._budget, wait_seconds=self._wait_seconds
            )
            known[source, number] = publisher
        return publisher

    # ---- for publishers

    @property
    def asking(self) -> bool:
        """Whether other nodes are asked who leads: no news tells what they say."""
        return self._leaders.cut_off

    def target(self, topic: str, number: int) -> Target | None:
        found = self._topics.get(topic)
        if found is not None and not found.deleting:
            partition = found.leads(number)
            if partition is not None:
                return LocalTarget(partition, self._refusal)
        if number >= self._leaders.partitions(topic):
            if found is None or found.deleting:
                raise NotFound(f"topic {topic} was deleted")
            return None
        leader = self._leaders.leader(topic, number)
        if self._closed:
            return None
        if leader is None or leader.node == self._leaders.node:
            self._leaders.not_led(topic, number)
            return None
        link = self._links.get(leader.node)
        if link is not None and link.address == leader.peer_address and link.refused_just_now:
            # Thousands of publishers of a node that died would dial it, each on its own, when others are to lead.
            self._leaders.not_led(topic, number, by=leader.node)
            return None
        return RemoteTarget(self._link(leader), leader, number)

    def _changed(self, topic: str) -> None:
        if not self._looking:  # once for all topics that change together
            self._looking = True
            self._loop.call_soon(self._look_at_links)
        publishers = self._publishers.get(topic)
        if publishers is None:
            return
        if not publishers:
            del self._publishers[topic]
            return
        for reference in publishers.valuerefs():  # for one publisher, `items` takes seven times as long
            if reference.key[1] is not None and (publisher := reference()) is not None:
                publisher.leaders_changed()

    def _look_at_links(self) -> None:
        self._looking = False
        for link in list(self._links.values()):
            link.leaders_changed()

    # ---- links

    def _link(self, leader: LeaderAt) -> ForwardLink:
        link = self._links.get(leader.node)
        if link is not None and not link.ended and link.address == leader.peer_address:
            return link
        if link is not None and not link.ended:
            link.close("the node has another address now")
        link = ForwardLink(
            self._peers,
            self._leaders,
            leader,
            loop=self._loop,
            wait_seconds=self._wait_seconds,
            answer_seconds=self._answer_seconds,
            on_end=self._link_ended,
        )
        self._links[leader.node] = link
        return link

    def _link_ended(self, link: ForwardLink, why: str) -> None:
        if link.greeted:  # else it is tried again and again
            if self._links.get(link.node) is link:
                del self._links[link.node]
            logger.info("forward_ended", "publishes to %s: %s", link.address, why)

    def keep_house(self) -> None:
        """About once a second."""
        for link in list(self._links.values()):
            if link.ended:
                del self._links[link.node]
            else:
                link.keep_house()
        for topic in [topic for topic, publishers in self._publishers.items() if not publishers]:
            del self._publishers[topic]

    @property
    def idle(self) -> bool:
        """Whether no publish of this node is on its way to another one."""
        return all(link.idle for link in self._links.values())

    def close(self) -> None:
        """The node stops: what is under way is of unknown outcome."""
        self._closed = True
        self._forget()
        for link in list(self._links.values()):
            link.close("this node is stopping")
