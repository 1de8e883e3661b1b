"""Judges a history: `check(events) -> Report`, a pure function of what the clients saw.

Per durable channel and topic, once the broker says that the channel is empty:

    lost        OK'd after the channel existed (or backlog owed to a first channel), never delivered
    dropped     delivered, never finished, gone
    torn        of one MPUB some messages came out and some did not

and at any time:

    unexpected  came out without having been sent, or although its publish failed, or on another topic
    altered     came out with another body, id or timestamp than before
    reused      two messages have one id
    disorder    ids or timestamps of one publisher's messages do not grow in the order it sent them
    attempts    zero, or not growing within one life of the broker
    backwards   delivered again although its FIN had taken effect: in the same life, or in a later one although the
                broker had served for `window` seconds since
    early       a DPUB before its time, a REQ before its delay was over
    paused      delivered to a connection that subscribed while the channel was paused
    risen       a message of a deleted topic
    stale       a new ephemeral channel delivered what was OK'd before it existed

A FIN has no reply. That it took effect is known when a later publish on the same connection was OK'd (commands run in
order) and no error for it came before; that the broker has since served for `window` seconds is known when it OK'd a
publish that was sent that much later. What may be told apart from a fault by nothing is no fault: a FIN without such
proof may be forgotten by a crash, and counts as `repeated` if it was.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from tests.jepsen.history import (
    Answered,
    AnyEvent,
    ChannelMade,
    Deleted,
    Drained,
    Killed,
    Message,
    Outcome,
    Paused,
    Publish,
    Ready,
    Received,
    Refused,
    Run,
    Started,
)

CLOCK_SLACK = 0.05  # between the broker's timers and a client's clock
EXAMPLES = 5  # of each kind of problem are kept as text

Key = tuple[int, int]


@dataclass
class Figures:
    """What the run did, for the report."""

    kills: int = 0
    moments: Counter[str] = field(default_factory=Counter)
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
    settled: int = 0  # FINs that no crash may forget, by the rule above
    oldest_forgotten: float = 0.0  # the longest time between a FIN that was forgotten and the kill


@dataclass
class Report:
    figures: Figures = field(default_factory=Figures)
    problems: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, kind: str, text: str) -> None:
        self.problems[kind] += 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < EXAMPLES:
            examples.append(text)

    def __str__(self) -> str:
        f = self.figures
        lines = [
            f"kills {f.kills} ({', '.join(f'{name} {n}' for name, n in sorted(f.moments.items()))})",
            f"published {f.attempted}: OK {f.ok}, failed {f.failed}, unknown {f.unknown} (came out: {f.recovered}); "
            f"{f.mpubs} MPUBs; {f.topics_deleted} topics deleted",
            f"delivered {f.delivered}: first {f.first}, redelivered {f.redelivered}, "
            f"repeated after FIN {f.repeated} (oldest forgotten FIN {f.oldest_forgotten:.2f} s before the kill)",
            f"finished {f.finished}, of which beyond any crash {f.settled}",
            f"lost {self.problems['lost']}, dropped {self.problems['dropped']}, torn {self.problems['torn']}, "
            f"backwards {self.problems['backwards']}, unexpected {self.problems['unexpected']}",
        ]
        for kind, n in sorted(self.problems.items()):
            lines.append(f"{kind.upper()}: {n}")
            lines += [f"    {text}" for text in self.examples.get(kind, ())]
        return "\n".join(lines)


class _Sent:
    """A message that somebody tried to publish."""

    __slots__ = ("crc", "id", "op", "timestamp")

    def __init__(self, op: _Op, crc: int) -> None:
        self.op = op
        self.crc = crc
        self.id = ""
        self.timestamp = 0


class _Op:
    """One PUB, MPUB or DPUB."""

    __slots__ = ("ended", "event", "position", "result", "sent", "topic")

    def __init__(self, event: Publish, topic: _Topic, position: int) -> None:
        self.event = event
        self.topic = topic
        self.position = position  # in the list of what was answered on its connection
        self.result = "pending"
        self.ended = 0.0
        self.sent: list[tuple[Key, _Sent]] = []


class _Fin:
    """A FIN of one delivery."""

    __slots__ = ("confirmed", "gen", "settled", "t")

    def __init__(self, t: float, gen: int) -> None:
        self.t = t
        self.gen = gen
        self.confirmed = False
        self.settled = False


class _Req:
    """A REQ of one delivery, and whether the message came back too soon."""

    __slots__ = ("confirmed", "due", "early", "gen")

    def __init__(self, due: float, gen: int) -> None:
        self.due = due
        self.gen = gen
        self.early: str | None = None
        self.confirmed = False


class _Delivery:
    """What one channel did with one message."""

    __slots__ = ("attempts", "connection", "count", "fins", "gen", "req", "t")

    def __init__(self) -> None:
        self.count = 0
        self.t = 0.0  # of the last one
        self.connection: Connection | None = None
        self.gen = 0
        self.attempts = 0
        self.fins: list[_Fin] = []  # that were not refused; several if it was delivered again before they were read
        self.req: _Req | None = None


class _Channel:
    """One channel of one life of a topic."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.durable = not name.endswith("#ephemeral")
        self.made: float | None = None  # when it was first known to exist
        self.owed_backlog = False
        self.deliveries: dict[Key, _Delivery] = {}
        self.pause_since: float | None = None  # the broker said it is paused, and nobody has asked otherwise since
        self.born: dict[int, float] = {}  # life of the broker -> when the first SUB was sent


class _Topic:
    """One life of a topic: from its first publish to its deletion."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.channels: dict[str, _Channel] = {}
        self.ops: list[_Op] = []
        self.delete_asked = False
        self.drained = False


class Connection:
    """A subscribed connection."""

    def __init__(self, number: int, gen: int, topic: _Topic, channel: _Channel, since: float) -> None:
        self.number = number
        self.gen = gen
        self.topic = topic
        self.channel = channel
        self.since = since  # SUB was sent
        self.read_at = 0.0  # everything sent before was read then
        self.held: dict[str, _Delivery] = {}
        self.answers: list[tuple[str, str, _Delivery, _Fin | _Req | None]] = []  # (command, id, ..) in order
        self.confirmed = 0  # how many of them are known to have been carried out or refused


class Checker:
    """Folds events into a report. Use `check` unless events come one by one."""

    def __init__(self) -> None:
        self.report = Report()
        self._figures = self.report.figures
        self._window = 1.0
        self._gen = 0
        self._ops: dict[int, _Op] = {}
        self._messages: dict[Key, _Sent] = {}
        self._ids: dict[str, Key] = {}
        self._topics: dict[str, _Topic] = {}
        self._connections: dict[int, Connection] = {}
        self._unsettled: deque[tuple[float, _Fin]] = deque()  # confirmed FINs of this life of the broker
        self._killed_at: dict[int, float] = {}

    def feed(self, event: AnyEvent) -> None:
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
            case Paused():
                channel = self._topic(event.topic).channels.get(event.channel)
                if channel is not None:
                    channel.pause_since = event.t if event.paused and event.result == "ok" else None
            case Deleted():
                self._deleted(event)
            case Drained():
                self._drained(event)
            case Run():
                self._window = event.window
            case Started():
                self._gen = event.gen
                self._unsettled.clear()
            case Killed():
                self._figures.kills += 1
                self._figures.moments[event.moment] += 1
                self._killed_at[event.gen] = event.t
            case Ready():
                pass

    def end(self) -> Report:
        """The judgement, when there are no more events."""
        for topic in self._topics.values():
            if not topic.drained and any(c.durable and c.made is not None for c in topic.channels.values()):
                self.report.add("undrained", f"topic {topic.name} was not empty at the end")
        for op in self._ops.values():
            if op.result in ("info", "pending"):
                self._figures.unknown += len(op.sent)
                self._figures.recovered += sum(bool(sent.id) for _, sent in op.sent)
        self._check_order()
        return self.report

    # ---- publishing

    def _topic(self, name: str) -> _Topic:
        """The topic's present life; whatever uses it after its deletion begins a new one."""
        topic = self._topics.get(name)
        if topic is None or topic.delete_asked:
            topic = self._topics[name] = _Topic(name)
        return topic

    def _publish(self, event: Publish) -> None:
        connection = self._connections.get(event.conn)
        topic = self._topic(event.topic)
        op = _Op(event, topic, len(connection.answers) if connection is not None else 0)
        self._ops[event.op] = op
        topic.ops.append(op)
        topic.drained = False
        for n, crc in enumerate(event.crcs):
            key = (event.process, event.first + n)
            sent = _Sent(op, crc)
            assert key not in self._messages, "the load generator used a number twice"
            self._messages[key] = sent
            op.sent.append((key, sent))
        self._figures.attempted += len(event.crcs)
        self._figures.mpubs += event.command == "MPUB"

    def _outcome(self, event: Outcome) -> None:
        op = self._ops[event.op]
        op.result = event.result
        op.ended = event.t
        if event.result == "ok":
            self._figures.ok += len(op.sent)
            connection = self._connections.get(op.event.conn)
            if connection is not None:
                self._confirm(connection, op.position, event.t)
            self._settle(op.event)
        elif event.result == "fail":
            self._figures.failed += len(op.sent)
            for key, sent in op.sent:
                if sent.id:
                    self.report.add("unexpected", f"{key} came out although its publish failed")

    def _confirm(self, connection: Connection, end: int, t: float) -> None:
        """The broker has dealt with everything the connection sent before its publish."""
        for _, _, _, act in connection.answers[connection.confirmed : end]:
            if isinstance(act, _Fin):
                act.confirmed = True
                if act.gen == self._gen:
                    self._unsettled.append((t, act))
            elif isinstance(act, _Req):
                act.confirmed = True
                if act.early is not None:
                    self.report.add("early", act.early)
        connection.confirmed = max(connection.confirmed, end)

    def _settle(self, publish: Publish) -> None:
        """The broker served a publish that was sent then: FINs confirmed `window` before are beyond any crash."""
        if publish.gen != self._gen:
            return
        while self._unsettled and self._unsettled[0][0] + self._window <= publish.t:
            self._unsettled.popleft()[1].settled = True
            self._figures.settled += 1

    # ---- channels

    def _channel_made(self, event: ChannelMade) -> None:
        topic = self._topic(event.topic)
        channel = topic.channels.get(event.channel)
        if channel is None:
            channel = topic.channels[event.channel] = _Channel(event.channel)
            # The first that anybody asked for. If another was asked for before this one is known to exist, who got the
            # backlog can not be told.
            channel.owed_backlog = channel.durable and len(topic.channels) == 1
            for other in topic.channels.values():
                if other.made is None and other is not channel:
                    other.owed_backlog = False
        if event.result != "ok":
            return
        if channel.made is None:
            channel.made = event.t
        channel.born.setdefault(event.gen, event.t0)
        if event.conn:
            self._connections[event.conn] = Connection(event.conn, event.gen, topic, channel, event.t0)

    def _deleted(self, event: Deleted) -> None:
        topic = self._topics[event.topic]
        topic.delete_asked = True
        topic.drained = True
        if event.result == "ok":
            self._figures.topics_deleted += 1
            topic.channels.clear()

    # ---- deliveries

    def _received(self, event: Received) -> None:
        connection = self._connections[event.conn]
        channel = connection.channel
        if channel.pause_since is not None and connection.since > channel.pause_since:
            self.report.add("paused", f"{channel.name} delivered to connection {event.conn} at {event.t:.3f}")
        self._figures.delivered += len(event.messages)
        for message in event.messages:
            self._message(event.t, connection, message)
        connection.read_at = event.t

    def _message(self, t: float, connection: Connection, message: Message) -> None:
        key = (message.process, message.counter)
        sent = self._messages.get(key)
        where = f"{key} on {connection.topic.name}/{connection.channel.name} at {t:.3f} in life {connection.gen}"
        if sent is None:
            self.report.add("unexpected", f"{where}: nobody sent it")
            connection.held[message.id] = _Delivery()  # it will be answered like any other
            return
        publish = sent.op.event
        if publish.topic != connection.topic.name or sent.op.result == "fail":
            self.report.add("unexpected", f"{where}: published to {publish.topic}, outcome {sent.op.result}")
        if message.crc != sent.crc:
            self.report.add("altered", f"{where}: another body than was sent")
        self._identity(where, key, sent, message)
        if t < publish.t + publish.delay - CLOCK_SLACK:
            self.report.add("early", f"{where}: DPUB {publish.delay:.3f} s at {publish.t:.3f}")
        self._check_life(where, sent, connection)
        self._check_delivery(where, t, key, message, connection)

    def _identity(self, where: str, key: Key, sent: _Sent, message: Message) -> None:
        """A message has one id and one timestamp for ever, and an id one message."""
        if not sent.id:
            sent.id, sent.timestamp = message.id, message.timestamp
            other = self._ids.setdefault(message.id, key)
            if other != key:
                self.report.add("reused", f"{where}: id {message.id} is that of {other}")
        elif (sent.id, sent.timestamp) != (message.id, message.timestamp):
            self.report.add(
                "altered",
                f"{where}: was {sent.id} of {sent.timestamp}, is {message.id} of {message.timestamp}",
            )

    def _check_life(self, where: str, sent: _Sent, connection: Connection) -> None:
        if sent.op.topic is not connection.topic:
            self.report.add("risen", f"{where}: published before the topic was deleted")
        channel = connection.channel
        born = channel.born.get(connection.gen)
        if not channel.durable and sent.op.result == "ok" and born is not None and sent.op.ended < born:
            self.report.add("stale", f"{where}: OK'd at {sent.op.ended:.3f}, the channel was made at {born:.3f}")

    def _check_delivery(self, where: str, t: float, key: Key, message: Message, connection: Connection) -> None:
        delivery = connection.channel.deliveries.get(key)
        if delivery is None:
            delivery = connection.channel.deliveries[key] = _Delivery()
        figures, gen = self._figures, connection.gen
        if message.attempts < 1:
            self.report.add("attempts", f"{where}: attempts {message.attempts}")
        overtaken = (
            # An older delivery that waited in the socket of another consumer: the program was not given a core for
            # longer than the message time-out, and nothing had been read there since the newer one was.
            delivery.connection is not connection
            and connection.read_at <= delivery.t
            and message.attempts < delivery.attempts
        )
        if delivery.gen == gen and message.attempts <= delivery.attempts and not overtaken:
            self.report.add("attempts", f"{where}: attempts {message.attempts} after {delivery.attempts}")
        if delivery.count == 0:
            figures.first += 1
        elif not delivery.fins:
            figures.redelivered += 1
        else:
            figures.repeated += 1
            for fin in delivery.fins:
                if fin.settled or (fin.confirmed and fin.gen == gen):
                    self.report.add("backwards", f"{where}: its FIN at {fin.t:.3f} in life {fin.gen} had taken effect")
                elif connection.channel.durable and fin.gen in self._killed_at:
                    age = self._killed_at[fin.gen] - fin.t
                    figures.oldest_forgotten = max(figures.oldest_forgotten, age)
        req = delivery.req
        if req is not None and req.gen == gen and t < req.due - CLOCK_SLACK:
            text = f"{where}: requeued until {req.due:.3f}"
            if req.confirmed:
                self.report.add("early", text)
            else:
                req.early = text
        delivery.req = None
        delivery.count += 1
        delivery.attempts = max(message.attempts, delivery.attempts) if delivery.gen == gen else message.attempts
        delivery.gen = gen
        delivery.t = t
        delivery.connection = connection
        connection.held[message.id] = delivery

    def _answered(self, event: Answered) -> None:
        connection = self._connections[event.conn]
        for message_id in event.ids:
            delivery = connection.held[message_id]
            act: _Fin | _Req | None = None
            if event.command == "FIN":
                act = _Fin(event.t, connection.gen)
                delivery.fins.append(act)
                self._figures.finished += 1
            elif event.command == "REQ":
                act = delivery.req = _Req(event.t + event.delay, connection.gen)
            connection.answers.append((event.command, message_id, delivery, act))

    def _refused(self, event: Refused) -> None:
        """The oldest such command without an outcome was refused: it has no effect."""
        connection = self._connections[event.conn]
        answers = connection.answers
        for n in range(connection.confirmed, len(answers)):
            command, message_id, delivery, act = answers[n]
            if message_id == event.id and command == event.command:
                if isinstance(act, _Fin):
                    delivery.fins.remove(act)
                    self._figures.finished -= 1
                elif act is not None and delivery.req is act:
                    delivery.req = None
                answers[n] = (command, message_id, delivery, None)
                return
        self.report.add("unexpected", f"connection {event.conn}: {event.command} {event.id} refused, never sent")

    # ---- judgement

    def _drained(self, event: Drained) -> None:
        topic = self._topic(event.topic)
        topic.drained = True
        for channel in topic.channels.values():
            if channel.durable and channel.made is not None:
                for op in topic.ops:
                    self._check_op(topic, channel, channel.made, op)

    def _check_op(self, topic: _Topic, channel: _Channel, made: float, op: _Op) -> None:
        owed = channel.owed_backlog or op.event.t >= made
        came = 0
        for key, _ in op.sent:
            delivery = channel.deliveries.get(key)
            sent = f"{op.event.command} at {op.event.t:.3f} in life {op.event.gen}"
            where = f"{key} on {topic.name}/{channel.name}, {sent}"
            if delivery is not None:
                came += 1
                if not delivery.fins:
                    self.report.add("dropped", f"{where}: delivered {delivery.count} times, never finished")
            elif owed and op.result == "ok":
                self.report.add("lost", f"{where}: OK at {op.ended:.3f}")
        if owed and 0 < came < len(op.sent):
            self.report.add("torn", f"{op.event.command} {op.event.op}: {came} of {len(op.sent)} on {channel.name}")

    def _check_order(self) -> None:
        """One publisher's messages stand in the log in the order it sent them; time never goes back."""
        runs: dict[tuple[int, int, int], list[tuple[str, int]]] = {}
        partitions: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for (process, counter), sent in self._messages.items():
            if sent.id:
                life, partition = id(sent.op.topic), int(sent.id, 16) >> 50
                runs.setdefault((life, partition, process), []).append((sent.id, counter))
                partitions.setdefault((life, partition), []).append((sent.id, sent.timestamp))
        for (_, _, process), run in runs.items():
            run.sort()
            for (_, before), (message_id, counter) in pairwise(run):
                if counter < before:
                    self.report.add("disorder", f"({process}, {counter}) has id {message_id}, after {before}")
        for stamps in partitions.values():
            stamps.sort()
            for (before_id, before), (message_id, timestamp) in pairwise(stamps):
                if timestamp < before:
                    self.report.add("disorder", f"{message_id} of {timestamp} stands after {before_id} of {before}")


def check(events: Iterable[AnyEvent]) -> Report:
    """Judge a whole history."""
    checker = Checker()
    for event in events:
        checker.feed(event)
    return checker.end()
