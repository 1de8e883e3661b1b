"""Hand-made histories, for tests of the checkers."""

from __future__ import annotations

from tests.jepsen import history
from tests.jepsen.checkers.judgement import Report, judge
from tests.jepsen.history import (
    AdminEnded,
    AdminSent,
    Answered,
    AnyEvent,
    ChannelMade,
    Drained,
    FaultBegun,
    FaultEnded,
    Healed,
    Killed,
    Led,
    Message,
    Outcome,
    Place,
    Publish,
    Received,
    Run,
    Sample,
    SeekEnded,
    SeekSent,
    Started,
)

FIRST_ID = 0x1A73C0000000
FIRST_NS = 10**18


class Story:
    """Writes a history: one topic, one publisher, connections as they come; times pass by themselves."""

    def __init__(self, *, cluster: bool = False, sync: str = "always") -> None:
        self.events: list[AnyEvent] = [Run(1, sync, 0.0 if cluster else 1.1), Started(0.0, 1)]
        self.t = 0.0
        self.gen = 1
        self.ops = 0
        self.counter = 0

    def add(self, event: AnyEvent) -> None:
        self.events.append(event)

    def pass_time(self, seconds: float) -> None:
        self.t += seconds

    def sub(self, conn: int, channel: str = "ch", topic: str = "t", *, node: str = "n1", ordered: bool = False) -> None:
        self.pass_time(0.01)
        self.add(ChannelMade(self.t, self.t, self.gen, conn, topic, channel, "ok", node, ordered))

    def pub(
        self,
        count: int = 1,
        result: history.Result | None = "ok",
        *,
        conn: int = 0,
        delay: float = 0.0,
        topic: str = "t",
        process: int = 7,
        probe: bool = False,
        partition: int = -1,
    ) -> list[Message]:
        """One publish and its outcome; the messages as they should come out."""
        self.pass_time(0.01)
        self.ops += 1
        first, self.counter = self.counter, self.counter + count
        crcs = [1000 + n for n in range(first, first + count)]
        command = "MPUB" if count > 1 else "DPUB" if delay else "PUB"
        self.add(
            Publish(
                self.t, self.ops, self.gen, conn, process, topic, command, first, crcs, delay, "n1", partition, probe
            )
        )
        if result is not None:
            self.pass_time(0.001)
            self.add(Outcome(self.t, self.ops, result))
        numbers = range(first, self.counter)
        return [Message(process, n, 1000 + n, f"{n + FIRST_ID:016x}", 1, FIRST_NS + n) for n in numbers]

    def recv(self, conn: int, *messages: Message) -> None:
        self.pass_time(0.01)
        self.add(Received(self.t, conn, list(messages)))

    def fin(self, conn: int, *messages: Message) -> None:
        self.add(Answered(self.t, conn, "FIN", [message.id for message in messages], 0.0))

    def req(self, conn: int, message: Message, delay: float) -> None:
        self.add(Answered(self.t, conn, "REQ", [message.id], delay))

    def take(self, conn: int, *messages: Message) -> None:
        self.recv(conn, *messages)
        self.fin(conn, *messages)

    def kill(self) -> None:
        self.add(Killed(self.t, self.gen, "serving"))
        self.gen += 1
        self.add(Started(self.t, self.gen))

    # ---- of a cluster

    def sample(
        self,
        *,
        node: str = "n1",
        epoch: int = 1,
        isr: int = 3,
        floor: int = 2,
        rss: int = 1,
        fds: int = 9,
        pid: int = 1,
        topic: str = "t",
        deleted: tuple[str, ...] = (),
    ) -> None:
        """That node leads partition 0 of the topic, with so many in sync of three."""
        self.pass_time(0.01)
        names = [f"n{n}" for n in range(1, isr + 1)]
        self.add(Sample(self.t, node, rss, fds, [Led(topic, 0, epoch, names, 3, floor)], {}, pid, [*deleted]))

    def fault(self, kind: str, seconds: float, *, bit: bool = True) -> None:
        self.ops += 1
        self.add(FaultBegun(self.t, self.ops, kind, f"{kind} of n1", ["n1"]))
        self.pass_time(seconds)
        self.add(FaultEnded(self.t, self.ops, "ok" if bit else "fail", "413 packets dropped"))

    def heal(self, settle: float = 10.0) -> None:
        self.add(Healed(self.t, settle))

    def seek(
        self,
        to: str,
        *places: Place,
        value: int = 0,
        result: history.Result = "ok",
        channel: str = "ch",
        topic: str = "t",
    ) -> None:
        self.pass_time(0.01)
        self.ops += 1
        self.add(SeekSent(self.t, self.ops, topic, channel, to, value))
        self.pass_time(0.01)
        self.add(SeekEnded(self.t, self.ops, result, list(places)))

    def admin(self, verb: str, result: history.Result = "ok", channel: str = "ch", topic: str = "t") -> None:
        self.pass_time(0.01)
        self.ops += 1
        self.add(AdminSent(self.t, self.ops, verb, topic, channel))
        self.pass_time(0.01)
        self.add(AdminEnded(self.t, self.ops, result))

    # ---- the judgement

    def judged(self, *topics: str) -> Report:
        for topic in topics or ("t",):
            self.add(Drained(self.t, topic))
        return judge(self.events)

    def problems(self, *topics: str) -> dict[str, int]:
        return dict(self.judged(*topics).problems)


def changed(message: Message, **fields: object) -> Message:
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    return Message(**(values | fields))


def again(message: Message, attempts: int = 2) -> Message:
    return changed(message, attempts=attempts)
