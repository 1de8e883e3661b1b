"""The history as checkers see it: names resolved, acts joined with their outcomes, one pass from the first event on.

    events --> View: lives of topics, channels, connections, publishes, deliveries, who leads what
                 --> Checker.published, ended, delivered, .. of every checker, each with what was known before

A hook is called before the view takes in what the event changes of a *delivery*, and after it took in everything else:
so a checker compares a delivery with the last one of the same message on the same channel. What no checker asks for
costs nothing. Time and memory are linear in the history.

A FIN has no reply. That the broker read it is known (`confirmed`) when a later publish on the same connection was OK'd
and no error for the FIN came before, as commands run in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tests.jepsen.checkers.findings import Findings
from tests.jepsen.checkers.policy import PolicySaid, letters_topic
from tests.jepsen.history import (
    AdminEnded,
    AdminSent,
    Answered,
    AnyEvent,
    ChannelMade,
    Deleted,
    Died,
    Drained,
    FaultBegun,
    FaultEnded,
    Healed,
    Killed,
    Message,
    Outcome,
    Paused,
    Publish,
    Received,
    Refused,
    Run,
    Sample,
    SeekEnded,
    SeekSent,
    Settled,
    Started,
    Stored,
)

PREDECESSOR_SECONDS = 3.0  # for which the leader before may still deliver
SILENT_SECONDS = 0.5  # without a read: there may have been a cut
BACKLOG_SECONDS = 1.0  # in which all is read that waited for its end
MOVE_UNKNOWN_SECONDS = 35.0  # within which a seek of unknown outcome happens, if it does
MOVES = ("empty", "requeue")  # what an operator asks for beside seeks after which messages come again; see Move
PARTITION_SHIFT = 50
OFFSET_MASK = (1 << 30) - 1  # of a message id: no run has more messages in a partition

Key = tuple[int, int]
PartitionName = tuple[str, int]  # of a topic, and its number


def partition_of(message_id: str) -> int:
    return int(message_id, 16) >> PARTITION_SHIFT


def offset_of(message_id: str) -> int:
    return int(message_id, 16) & OFFSET_MASK


def where(t: float, by: Connection, key: Key) -> str:
    """For people. To be called only when something is wrong: it costs more than looking."""
    return f"{key} on {by.topic.name}/{by.channel.name} at {t:.3f} in life {by.gen}"


@dataclass
class Figures:
    """What the run did, whatever was wrong."""

    kills: int = 0
    attempted: int = 0
    ok: int = 0
    failed: int = 0
    unknown: int = 0
    recovered: int = 0  # of unknown outcome, and came out
    delivered: int = 0  # all deliveries, of all channels
    first: int = 0  # ... for the first time on their channel
    redelivered: int = 0  # ... again, unfinished before
    repeated: int = 0  # ... again, although a FIN had been sent
    finished: int = 0
    mpubs: int = 0
    topics_deleted: int = 0
    settled: int = 0  # FINs that no crash may forget
    oldest_forgotten: float = 0.0  # the longest time between a FIN that was forgotten and the kill


class Sent:
    """A message that somebody tried to publish."""

    __slots__ = ("crc", "id", "op", "timestamp")

    def __init__(self, op: Op, crc: int) -> None:
        self.op = op
        self.crc = crc
        self.id = ""
        self.timestamp = 0


class Op:
    """One PUB, MPUB or DPUB."""

    __slots__ = ("ended", "event", "position", "result", "sent", "topic")

    def __init__(self, event: Publish, topic: TopicLife, position: int) -> None:
        self.event = event
        self.topic = topic
        self.position = position  # in the list of what was answered on its connection
        self.result = "pending"
        self.ended = 0.0
        self.sent: list[tuple[Key, Sent]] = []

    @property
    def partition(self) -> int:
        """Where its messages are, as far as it is known; else -1."""
        if self.event.partition >= 0:
            return self.event.partition
        return next((partition_of(sent.id) for _, sent in self.sent if sent.id), -1)


class Fin:
    """A FIN of one delivery."""

    __slots__ = ("confirmed", "gen", "partition", "settled", "t")

    def __init__(self, t: float, gen: int, partition: PartitionName) -> None:
        self.t = t
        self.gen = gen
        self.partition = partition
        self.confirmed = False
        self.settled = False


class Req:
    """A REQ of one delivery, and whether the message came back too soon."""

    __slots__ = ("confirmed", "due", "early", "gen")

    def __init__(self, due: float, gen: int) -> None:
        self.due = due
        self.gen = gen
        self.early: str | None = None
        self.confirmed = False


class Delivery:
    """What one channel did with one message."""

    __slots__ = ("attempts", "connection", "count", "fins", "gen", "req", "sent_after", "t")

    def __init__(self) -> None:
        self.count = 0
        self.t = 0.0  # when the last one was read
        self.sent_after = 0.0  # and sent
        self.connection: Connection | None = None
        self.gen = 0
        self.attempts = 0
        self.fins: list[Fin] = []  # that were not refused; several if it was delivered again before they were read
        self.req: Req | None = None


class Channel:
    """One channel of one life of a topic."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.durable = not name.endswith("#ephemeral")
        self.ordered = False
        self.made: float | None = None  # when it was first known to exist
        self.owed_backlog = False
        self.deliveries: dict[Key, Delivery] = {}
        self.pause_since: float | None = None  # the broker said it is paused, and nobody has asked otherwise since
        self.born: dict[int, float] = {}  # life of the broker -> when the first SUB was sent
        self.moving: set[int] = set()  # seeks and the like that are under way
        self.moved_at = -1.0  # what was finished before may come again
        self.forgiven = -1.0  # what was sent before need not come: it was emptied, and that was not undone
        self.forgiven_before = -1.0  # the last move: where an undo goes back to
        self.policy: PolicySaid | None = None  # what operators asked of it, if anything


class TopicLife:
    """From a topic's first use to its deletion."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.channels: dict[str, Channel] = {}
        self.ops: list[Op] = []
        self.delete_asked = False
        self.drained = False
        self.letters: set[Key] | None = None  # what came out of it, if the dead of channels are moved to it


class Connection:
    """A subscribed connection."""

    def __init__(self, event: ChannelMade, topic: TopicLife, channel: Channel) -> None:
        self.number = event.conn
        self.gen = event.gen
        self.node = event.node
        self.timeout = event.timeout
        self.topic = topic
        self.channel = channel
        self.since = event.t0  # SUB was sent
        self.read_at = event.t0  # everything sent before was read then
        self.sent_after = event.t0  # what is being read was not sent earlier
        self._backlog_until = 0.0
        self.held: dict[str, Delivery] = {}
        self.answers: list[tuple[str, str, Delivery, Fin | Req | None]] = []  # (command, id, ..) in order
        self.confirmed = 0  # how many of them are known to have been carried out or refused

    def reads(self, t: float) -> None:
        """Messages come. Behind a cut all come that waited for its end, and not in one read."""
        if t - self.read_at > SILENT_SECONDS:
            self.sent_after, self._backlog_until = max(self.read_at, self.since), t + BACKLOG_SECONDS
        elif t > self._backlog_until:
            self.sent_after = self.read_at


@dataclass
class Reign:
    """The time in which a partition surely had one leader and one epoch: from the first sample of it to the last."""

    node: str
    epoch: int
    since: float
    pending: list[tuple[float, str, Callable[[], None]]] = field(default_factory=list)  # see `under_one_leader`


@dataclass(frozen=True)
class Move:
    """A seek, an empty, a requeue of dead letters, or a change of a policy, that is under way."""

    channel: Channel
    event: SeekSent | AdminSent

    def end(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        """It may have been done."""
        channel = self.channel
        if isinstance(self.event, AdminSent) and self.event.verb == "policy":
            if channel.policy is not None and event.result == "ok":
                channel.policy.answered(self.event.t, event.t, self.event.what)
            return
        channel.moving.discard(event.op)
        if event.result == "fail":
            return
        places = event.places if isinstance(event, SeekEnded) else []
        if event.result == "info" or any(place.error for place in places):
            channel.moved_at = event.t + MOVE_UNKNOWN_SECONDS
            if not (isinstance(self.event, AdminSent) and self.event.verb == "requeue"):
                channel.forgiven = channel.forgiven_before = channel.moved_at
            return
        channel.moved_at = event.t
        if isinstance(self.event, SeekSent) and self.event.to == "undo":
            channel.forgiven, channel.forgiven_before = channel.forgiven_before, channel.forgiven
            return
        if isinstance(self.event, AdminSent) and self.event.verb == "requeue":
            return
        channel.forgiven_before = channel.forgiven
        if isinstance(self.event, AdminSent):
            if self.event.verb == "empty":
                channel.forgiven = event.t
        elif any(place.to_offset > place.from_offset for place in places):
            channel.forgiven = event.t


class Checker:
    """One rule. A subclass has the hooks that it needs, and a name."""

    name = ""

    def __init__(self, view: View) -> None:
        self.view = view
        self.findings = Findings(self.name)

    def published(self, op: Op) -> None:
        """It is about to be sent."""

    def ended(self, op: Op) -> None:
        """Its outcome is there."""

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        """A message that somebody sent came out; `last` is as it was before."""

    def moved(self, t: float, by: Connection, key: Key, sent: Sent, message: Message) -> None:
        """A dead letter came out of the topic to which it was moved: the same body under another id."""

    def stray(self, t: float, by: Connection, message: Message) -> None:
        """A message that nobody sent came out."""

    def answered(self, event: Answered, by: Connection) -> None:
        """FIN, REQ or TOUCH is sent."""

    def confirmed(self, act: Fin | Req, t: float, by: Connection) -> None:
        """The broker has read it, and did not refuse."""

    def drained(self, topic: TopicLife) -> None:
        """Everything owed must have come out."""

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        """A fault, or what an operator asks for."""

    def over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        """It has its outcome; a move has not changed the channel yet."""

    def other(self, event: AnyEvent) -> None:
        """An event that is none of these."""

    def end(self) -> None:
        """There are no more."""


HOOKS = (
    "published",
    "ended",
    "delivered",
    "moved",
    "stray",
    "answered",
    "confirmed",
    "drained",
    "begun",
    "over",
    "other",
)
T = TypeVar("T", bound=Checker)


class View:
    """One pass over a history."""

    def __init__(self, kinds: Sequence[type[Checker]]) -> None:
        self.run = Run(0, "", 1.0)
        self.gen = 0
        self.t = 0.0  # of the last event
        self.figures = Figures()
        self.moments: Counter[str] = Counter()
        self.ops: dict[int, Op] = {}
        self.messages: dict[Key, Sent] = {}
        self.topics: dict[str, TopicLife] = {}
        self.connections: dict[int, Connection] = {}
        self.killed_at: dict[int, float] = {}
        self.reigns: dict[PartitionName, Reign] = {}
        self.healed: Healed | None = None
        self._moves: dict[int, Move] = {}
        self.checkers = [kind(self) for kind in kinds]
        self._hooks = {
            name: [getattr(each, name) for each in self.checkers if name in type(each).__dict__] for name in HOOKS
        }

    @property
    def cluster(self) -> bool:
        return self.run.window == 0

    def feed(self, event: AnyEvent) -> None:
        self.t = max(self.t, getattr(event, "t", 0.0))
        match event:
            case Received():
                self._received(event)
            case Answered():
                self._answered(event)
            case Publish():
                self._publish(event)
            case Outcome():
                self._outcome(event)
            case Refused():
                self._refused(event)
            case ChannelMade():
                self._channel_made(event)
            case Sample():
                self._sample(event)
            case SeekSent() | AdminSent() | FaultBegun():
                self._begun(event)
            case SeekEnded() | AdminEnded() | FaultEnded():
                self._over(event)
            case Paused():
                channel = self.topic(event.topic).channels.get(event.channel)
                if channel is not None:
                    channel.pause_since = event.t if event.paused and event.result == "ok" else None
            case Deleted():
                topic = self.topics[event.topic]
                topic.delete_asked = topic.drained = True
                self.figures.topics_deleted += event.result == "ok"
            case Drained():
                self.topic(event.topic).drained = True
                self._tell("drained", self.topic(event.topic))
            case Run():
                self.run = event
            case Started():
                self.gen = event.gen
            case Killed():
                self.figures.kills += 1
                self.moments[event.moment] += 1
                self.killed_at[event.gen] = event.t
            case Healed():
                self.healed = event
            case Stored() | Settled() | Died():
                pass
        for hook in self._hooks["other"]:
            hook(event)

    def end(self) -> list[Findings]:
        for op in self.ops.values():
            if op.result in ("info", "pending"):
                self.figures.unknown += len(op.sent)
                self.figures.recovered += sum(bool(sent.id) for _, sent in op.sent)
        for checker in self.checkers:
            checker.end()
        return [checker.findings for checker in self.checkers]

    def _tell(self, name: str, *facts: object) -> None:
        for hook in self._hooks[name]:
            hook(*facts)

    # ---- publishing

    def topic(self, name: str) -> TopicLife:
        """The topic's present life; whatever uses it after its deletion begins a new one."""
        topic = self.topics.get(name)
        if topic is None or topic.delete_asked:
            topic = self.topics[name] = TopicLife(name)
        return topic

    def _publish(self, event: Publish) -> None:
        connection = self.connections.get(event.conn)
        topic = self.topic(event.topic)
        op = Op(event, topic, len(connection.answers) if connection is not None else 0)
        self.ops[event.op] = op
        topic.ops.append(op)
        topic.drained = False
        for n, crc in enumerate(event.crcs):
            key = (event.process, event.first + n)
            sent = Sent(op, crc)
            assert key not in self.messages, "the load generator used a number twice"
            self.messages[key] = sent
            op.sent.append((key, sent))
        self.figures.attempted += len(event.crcs)
        self.figures.mpubs += event.command == "MPUB"
        self._tell("published", op)

    def _outcome(self, event: Outcome) -> None:
        op = self.ops[event.op]
        op.result = event.result
        op.ended = event.t
        if event.result == "ok":
            self.figures.ok += len(op.sent)
            connection = self.connections.get(op.event.conn)
            if connection is not None:
                self._confirm(connection, op.position, event.t)
        elif event.result == "fail":
            self.figures.failed += len(op.sent)
        self._tell("ended", op)

    def _confirm(self, connection: Connection, end: int, t: float) -> None:
        """The broker has dealt with everything the connection sent before its publish."""
        for _, _, _, act in connection.answers[connection.confirmed : end]:
            if act is not None:
                act.confirmed = True
                self._tell("confirmed", act, t, connection)
        connection.confirmed = max(connection.confirmed, end)

    # ---- channels

    def _channel_made(self, event: ChannelMade) -> None:
        topic = self.topic(event.topic)
        channel = topic.channels.get(event.channel)
        if channel is None:
            channel = topic.channels[event.channel] = Channel(event.channel)
            # The first that anybody asked for. If another was asked for before this one is known to exist, who got the
            # backlog can not be told.
            channel.owed_backlog = channel.durable and len(topic.channels) == 1
            for other in topic.channels.values():
                if other.made is None and other is not channel:
                    other.owed_backlog = False
        channel.ordered |= event.ordered
        if event.result != "ok":
            return
        if channel.made is None:
            channel.made = event.t
        channel.born.setdefault(event.gen, event.t0)
        if event.conn:
            self.connections[event.conn] = Connection(event, topic, channel)

    def _begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, SeekSent) or (isinstance(event, AdminSent) and event.verb in MOVES):
            for channel in self.topic(event.topic).channels.values():
                if channel.name == event.channel:
                    channel.moving.add(event.op)
                    self._moves[event.op] = Move(channel, event)
        if isinstance(event, AdminSent) and event.verb == "policy":
            self._policy_asked(event)
        self._tell("begun", event)

    def _policy_asked(self, event: AdminSent) -> None:
        channel = self.topic(event.topic).channels.get(event.channel)
        if channel is None:
            return
        channel.policy = channel.policy or PolicySaid()
        channel.policy.asked(event.t, event.what)
        self._moves[event.op] = Move(channel, event)
        if name := letters_topic(event.what):
            topic = self.topic(name)
            topic.letters = set() if topic.letters is None else topic.letters
            channel.policy.letters = topic.letters

    def _over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        self._tell("over", event)
        move = self._moves.pop(event.op, None)
        if move is not None:
            move.end(event)

    # ---- deliveries

    def _received(self, event: Received) -> None:
        connection = self.connections[event.conn]
        connection.reads(event.t)
        self.figures.delivered += len(event.messages)
        hooks = self._hooks["delivered"]
        for message in event.messages:
            key = (message.process, message.counter)
            sent = self.messages.get(key)
            if sent is None:
                self._tell("stray", event.t, connection, message)
                connection.held[message.id] = Delivery()  # it will be answered like any other
                continue
            letters = connection.topic.letters
            if letters is not None and sent.op.topic is not connection.topic:
                self._tell("moved", event.t, connection, key, sent, message)
                letters.add(key)
                connection.held[message.id] = Delivery()
                continue
            delivery = connection.channel.deliveries.get(key)
            if delivery is None:
                delivery = connection.channel.deliveries[key] = Delivery()
                self.figures.first += 1
            for hook in hooks:
                hook(event.t, connection, key, sent, message, delivery)
            if not sent.id:
                sent.id, sent.timestamp = message.id, message.timestamp
            delivery.req = None
            delivery.count += 1
            same = delivery.gen == connection.gen and not self.cluster
            delivery.attempts = max(message.attempts, delivery.attempts) if same else message.attempts
            delivery.gen = connection.gen
            delivery.t = event.t
            delivery.sent_after = connection.sent_after
            delivery.connection = connection
            connection.held[message.id] = delivery
        connection.read_at = event.t

    def _answered(self, event: Answered) -> None:
        connection = self.connections[event.conn]
        for message_id in event.ids:
            delivery = connection.held[message_id]
            act: Fin | Req | None = None
            if event.command == "FIN":
                act = Fin(event.t, connection.gen, (connection.topic.name, partition_of(message_id)))
                delivery.fins.append(act)
                self.figures.finished += 1
            elif event.command == "REQ":
                act = delivery.req = Req(event.t + event.delay, connection.gen)
            connection.answers.append((event.command, message_id, delivery, act))
        self._tell("answered", event, connection)

    def _refused(self, event: Refused) -> None:
        """The oldest such command without an outcome was refused: it has no effect.

        In a cluster another node may lead the partition: what that one refuses comes later than answers of the node
        that the client is connected to."""
        connection = self.connections[event.conn]
        answers = connection.answers
        late = range(connection.confirmed) if self.cluster else ()
        for n in (*range(connection.confirmed, len(answers)), *late):
            command, message_id, delivery, act = answers[n]
            if message_id == event.id and command == event.command and (act is not None or n >= connection.confirmed):
                if isinstance(act, Fin):
                    delivery.fins.remove(act)
                    self.figures.finished -= 1
                elif act is not None and delivery.req is act:
                    delivery.req = None
                answers[n] = (command, message_id, delivery, None)
                return
        self._tell("stray", event.t, connection, Message(-1, -1, 0, event.id, 0, 0))

    # ---- who leads

    def _sample(self, event: Sample) -> None:
        for led in event.led:
            name = (led.topic, led.partition)
            reign = self.reigns.get(name)
            if reign is None or reign.epoch != led.epoch:
                self.reigns[name] = Reign(event.node, led.epoch, event.t)
                continue
            pending, reign.pending = reign.pending, []
            for since, node, then in pending:
                if since >= reign.since + PREDECESSOR_SECONDS and node in ("", reign.node):
                    then()

    def under_one_leader(self, partition: PartitionName, since: float, node: str, then: Callable[[], None]) -> None:
        """Have `then` called if a later sample shows that from `since` to now the partition had one leader, which was
        `node`. Where there are no samples it is never called.

        Nor for what was delivered when it had just begun to lead: it takes publishes at once, and delivers only when
        its first batch is committed; until it hears of that, its predecessor does, through this node, too."""
        reign = self.reigns.get(partition)
        if reign is not None:
            reign.pending.append((since, node, then))


def fold(events: Iterable[AnyEvent], *kinds: type[Checker]) -> View:
    """All events fed, and the end."""
    view = View(kinds)
    for event in events:
        view.feed(event)
    view.end()
    return view


def findings_of(events: Iterable[AnyEvent], kind: type[T]) -> Findings:
    """Of one checker over a whole history."""
    return fold(events, kind).checkers[0].findings
