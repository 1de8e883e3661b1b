"""What a load on a cluster consists of: topics with publishers, channels with consumers, operators."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
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

    @property
    def messages_a_second(self) -> float:
        """Of its pipelined publishers, when nothing holds them up."""
        return self.publishers * self.habits.messages_a_second


DEFERRING = Habits(commands=(12, 3, 1), quiet=0.01)


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
    )
    factor = sum(plan.messages_a_second for plan in plans) / messages_a_second
    return tuple(TopicPlan(**{**vars(plan), "habits": plan.habits.slowed(factor)}) for plan in plans)


def slow_steps() -> Habits:
    """For an ordered topic, whose consumers take one message of a partition at a time."""
    return Habits(commands=(1, 0, 0), bursts=(1, 2), pause=(0.02, 0.08))


def make_topics(admin: Admin, plans: Iterable[TopicPlan]) -> None:
    """Have the topics, with their channels and policies."""
    for plan in plans:
        settings = admin.messages.TopicSettings(partitions=plan.partitions, ordered=plan.ordered)
        admin.call(
            "CreateTopic", topic=plan.name, settings=settings, channels=[channel.name for channel in plan.channels]
        )
        for channel in plan.channels:
            if channel.policy is not None:
                policy = admin.messages.ChannelPolicy(**channel.policy)
                admin.call("UpdateChannelPolicy", topic=plan.name, channel=channel.name, set=policy)


def shown(plans: Iterable[TopicPlan]) -> str:
    """One line for the log of a run."""
    return json.dumps({plan.name: [channel.name for channel in plan.channels] for plan in plans})
