"""What a load on a cluster consists of: topics with publishers, channels with consumers, operators."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tests.jepsen.load import dead_letters
from tests.jepsen.load.publishers import PIPELINED, Habits

if TYPE_CHECKING:
    from nsqha.cli.brokers.admin import Admin


@dataclass(frozen=True)
class ChannelPlan:
    """Consumers of one habit (tests.jepsen.load.consumers)."""

    name: str
    habit: str = "steady"
    consumers: int = 2
    beats: bool = True
    moved: bool = False  # an operator seeks, empties and undoes, again and again
    policy: dict[str, Any] | None = None
    switched: bool = False  # an operator has it skip, and not, again and again
    dead_to: str = ""  # the topic of the plan to which its dead letters are moved

    @property
    def owed(self) -> bool:
        """Whether all that was OK'd has to come out of it: nobody moves it, and no policy passes anything over."""
        passed = any(name in (self.policy or {}) for name in ("ttl_ms", "max_depth"))
        return not (self.moved or self.switched or passed)

    @property
    def said(self) -> dict[str, Any] | None:
        """Its policy, as an operator says it."""
        if not self.dead_to:
            return self.policy
        return {**(self.policy or {}), "dead_letter": f"topic:{self.dead_to}"}


@dataclass(frozen=True)
class TopicPlan:
    name: str
    channels: tuple[ChannelPlan, ...]
    publishers: int = 1
    patient: int = 0  # more publishers, which wait for each answer
    probes: bool = False  # one at a time in each partition, to nodes that are not the victim of a fault
    partitions: int = 1
    ordered: bool = False
    habits: Habits = PIPELINED
    retention_bytes: int = 0  # of a partition; 0: as the node has it
    abandoned_after_ms: int = 0  # what nobody reads for so long retention may remove; 0: nothing

    def owed(self, channel: ChannelPlan) -> bool:
        return channel.owed and not self.abandoned_after_ms

    @property
    def messages_a_second(self) -> float:
        """Of its pipelined publishers, when nothing holds them up."""
        return self.publishers * self.habits.messages_a_second


DEFERRING = Habits(commands=(12, 3, 1), quiet=0.01)


# Messages that wait for longer than the files last in which they are: what is deferred has to be carried on.
LASTING = Habits(commands=(12, 3, 1), delays_ms=(400, 5000, 12_000), padding_most=2000)
LARGE = Habits(padding_most=2000)
RETENTION_BYTES = 50_000  # of topics that forget: a file goes as soon as it is full and nobody needs it
SEGMENT_BYTES = 200_000
LETTERS = "letters"


def policies() -> tuple[TopicPlan, ...]:
    """Channels that may lack what their policy says, beside one that gets everything; and where the dead go to."""
    dying = {"max_attempts": dead_letters.MAX_ATTEMPTS, "retry_ms": 100}
    channels = (
        ChannelPlan("steady"),
        ChannelPlan("expiring", "sleepy", 1, policy={"ttl_ms": 4000}),
        ChannelPlan("bounded", "sleepy", 1, policy={"max_depth": 40}),
        ChannelPlan("skipping", "prompt", 1, switched=True),
        ChannelPlan("dying", "refusing", 1, policy=dying, dead_to=LETTERS),
    )
    return TopicPlan("rules", channels), TopicPlan(
        LETTERS, (ChannelPlan("letters", "prompt", 1, beats=False),), publishers=0
    )


def forgetful() -> tuple[TopicPlan, ...]:
    """Topics whose files go soon: what is read, and where nobody reads, all."""
    return (
        TopicPlan(
            "short",
            (ChannelPlan("steady"), ChannelPlan("troubled", "troubled")),
            habits=LASTING,
            retention_bytes=RETENTION_BYTES,
        ),
        TopicPlan(
            "removed",
            (ChannelPlan("steady"), ChannelPlan("abandoned", "absent", 1)),
            habits=LARGE,
            retention_bytes=RETENTION_BYTES,
            abandoned_after_ms=3000,
        ),
    )


def named(plans: Iterable[TopicPlan], ending: str) -> list[TopicPlan]:
    """The same topics by names of their own."""
    return [
        replace(
            plan,
            name=f"{plan.name}{ending}",
            channels=tuple(
                replace(each, dead_to=f"{each.dead_to}{ending}") if each.dead_to else each for each in plan.channels
            ),
        )
        for plan in plans
    ]


def standard(messages_a_second: float = 500.0) -> tuple[TopicPlan, ...]:
    """What the fault suite runs: every kind of topic and channel beside one another. Probers and patient publishers
    come on top of the rate: some hundred messages a second."""
    plans = (
        TopicPlan(
            "orders",
            (ChannelPlan("steady"), ChannelPlan("troubled", "troubled")),
            patient=1,
            probes=True,
            habits=DEFERRING,
        ),
        TopicPlan("many", (ChannelPlan("steady", consumers=3), ChannelPlan("late", "late")), probes=True, partitions=4),
        TopicPlan("ordered", (ChannelPlan("ordered", "ordered"),), partitions=2, ordered=True, habits=slow_steps()),
        TopicPlan("policies", (ChannelPlan(dead_letters.CHANNEL, "failing", policy=dead_letters.POLICY),)),
        TopicPlan("moved", (ChannelPlan("moved", "prompt", moved=True), ChannelPlan("left", "prompt", 1))),
        *policies(),
        *forgetful(),
    )
    factor = sum(plan.messages_a_second for plan in plans) / messages_a_second
    return tuple(TopicPlan(**{**vars(plan), "habits": plan.habits.slowed(factor)}) for plan in plans)


def slow_steps() -> Habits:
    """For an ordered topic, whose consumers take one message of a partition at a time."""
    return Habits(commands=(1, 0, 0), bursts=(1, 2), pause=(0.02, 0.08))


def make_topics(admin: Admin, plans: Iterable[TopicPlan]) -> None:
    """Have the topics, with their channels and policies."""
    for plan in plans:
        settings = admin.messages.TopicSettings(
            partitions=plan.partitions,
            ordered=plan.ordered,
            retention_bytes=plan.retention_bytes,
            abandoned_after_ms=plan.abandoned_after_ms,
        )
        admin.call(
            "CreateTopic", topic=plan.name, settings=settings, channels=[channel.name for channel in plan.channels]
        )
        for channel in plan.channels:
            if channel.said is not None:
                policy = admin.messages.ChannelPolicy(**channel.said)
                admin.call("UpdateChannelPolicy", topic=plan.name, channel=channel.name, set=policy)


def shown(plans: Iterable[TopicPlan]) -> str:
    """One line for the log of a run."""
    return json.dumps({plan.name: [channel.name for channel in plan.channels] for plan in plans})
