"""Checker 6: what was OK'd and has come out nowhere yet becomes nothing, soon after everything is healed.

    unseen   OK'd before the healing, not delayed, and delivered for the first time later than `settle` and
             UNSEEN_SECONDS after it

The number of unseen messages over time is kept for the report.
"""

from __future__ import annotations

from array import array

from tests.jepsen.checkers.findings import quantile
from tests.jepsen.checkers.view import Channel, Checker, Connection, Delivery, Key, Op, Sent
from tests.jepsen.history import Message

UNSEEN_SECONDS = 20.0  # for what piled up meanwhile to be read by the few consumers of a load


class Unseen(Checker):
    name = "unseen"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._unseen: dict[int, int] = {}  # by channel
        self._series: dict[str, dict[int, int]] = {}
        self._latencies = array("f")

    def ended(self, op: Op) -> None:
        if op.result != "ok":
            return
        for channel in op.topic.channels.values():
            if counted(channel, op):
                new = sum(key not in channel.deliveries for key, _ in op.sent)
                self._count(op.ended, op.topic.name, channel, new)

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        op, channel = sent.op, by.channel
        if last.count or op.result != "ok" or not counted(channel, op):
            return
        self._count(t, by.topic.name, channel, -1)
        if op.event.delay:
            return
        self._latencies.append(t - op.ended)
        healed = self.view.healed
        if healed is not None and op.ended <= healed.t and t > healed.t + healed.settle + UNSEEN_SECONDS:
            text = f"{key} on {by.topic.name}/{channel.name}: OK'd at {op.ended:.3f}, healed at {healed.t:.3f}"
            self.findings.add("unseen", f"{text}, came at {t:.3f}")

    def _count(self, t: float, topic: str, channel: Channel, change: int) -> None:
        now = self._unseen[id(channel)] = self._unseen.get(id(channel), 0) + change
        self._series.setdefault(f"{topic}/{channel.name}", {})[int(t)] = now

    def end(self) -> None:
        for name, values in self._series.items():
            self.findings.series[name] = [(float(t), float(value)) for t, value in sorted(values.items())]
        figures = self.findings.figures
        figures["most unseen"] = max((max(values.values()) for values in self._series.values()), default=0)
        figures["from OK to delivery, p50 ms"] = 1000 * quantile(self._latencies, 0.5)
        figures["from OK to delivery, p99 ms"] = 1000 * quantile(self._latencies, 0.99)
        if self.view.healed is not None:
            late = self.findings.problems["unseen"]
            bound = f"within {self.view.healed.settle + UNSEEN_SECONDS:.0f} s"
            text = "what was OK'd comes out after the healing"
            self.findings.promise(text, bound, f"{late} came later", kept=not late)


def counted(channel: Channel, op: Op) -> bool:
    """Whether the publish was OK'd when the channel was known to be there."""
    return channel.durable and channel.made is not None and op.event.t >= channel.made
