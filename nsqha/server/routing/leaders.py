"""Who leads what in the cluster, as the parts that serve clients see it.

A view: it may be late. A request that relies on it is refused by the node that it names, if that does not lead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Administration(IntEnum):
    """What is done to a topic or channel at every leader and is not in the record; as in routing.proto."""

    EMPTY_TOPIC = 1
    EMPTY_CHANNEL = 2
    PAUSE_CHANNEL = 3  # an #ephemeral one
    UNPAUSE_CHANNEL = 4


@dataclass(frozen=True, slots=True)
class LeaderAt:
    """The leader of one partition."""

    node: int  # uid
    address: str  # of its gRPC port, for calls
    peer_address: str  # of its peer port, for streams
    epoch: int
    topic_uid: int


def is_another(registration: int, before: int) -> bool:
    """Whether these are registrations of two lives of a node; 0, not known, is none."""
    return registration != before and 0 not in (registration, before)


class Leaders(Protocol):
    """The cluster's leaders, for one node."""

    @property
    def node(self) -> int:
        """This node's uid."""

    @property
    def cluster_id(self) -> int: ...

    @property
    def cut_off(self) -> bool:
        """Whether this node can not know what the records are: it asks other nodes who leads."""

    def name_of(self, node: int) -> str:
        """What the node's certificate may call it, see `PeerIdentity.may_be`; empty: unknown."""

    def alive(self, node: int) -> bool:
        """Whether a node has its lease, as far as is known."""

    def registration(self, node: int) -> int:
        """Which life of a node has its lease, as far as is known; 0: none that is registered."""

    def partitions(self, topic: str) -> int:
        """How many the topic has; 0: there is no such topic."""

    def leader(self, topic: str, number: int) -> LeaderAt | None:
        """The leader of the partition; None: no node at the moment, or one without a lease. By the record, or by what
        other nodes say of a later epoch: good for where to send, and for nothing else."""

    def recorded(self, topic: str, number: int) -> LeaderAt | None:
        """As `leader`, by the record alone: what other nodes may be given as an answer."""

    def not_led(self, topic: str, number: int, *, by: int = 0, hint: LeaderAt | None = None) -> bool:
        """The node `by` takes nothing for the partition: it does not lead, and says with `hint` who does, or it is not
        there. 0: no leader is known. True: this node has lost the records and asks others now: look again in a
        moment."""

    def when_changed(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call with a topic's name when a leader or address changed, the topic came or went, and after this node began
        or ceased to lead one of its partitions (`Topic.add_led`, `remove_led`). The result ends it."""
