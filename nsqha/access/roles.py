"""Roles, what each implies, and what one caller was granted.

    viewer      statistics, descriptions, /metrics
    reader      what a viewer may, and the bodies of messages
    publisher   to publish, to topics that match its patterns
    consumer    to consume, from topics that match its patterns
    broker      to register with a lookup daemon as a producer, and to look topics up there
    operator    what a viewer may, and to create, pause, empty, seek and undo, to change policies and single messages
    admin       everything but to publish and to consume

A `Need` is met by any of its roles. One without roles is open to everybody. Publisher and consumer are implied by no
other role: who administrates does not write into a queue by mistake. Neither is broker: consumers show their tokens to
every producer that a lookup daemon names.

Two roles can not be given in an access file: `segments` is what a certificate with `nsqha:reader` has, and `node` is a
process of the cluster itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

PATTERN = re.compile(r"[.a-zA-Z0-9_*-]{1,64}(#ephemeral)?")
STARS_MAX = 3  # of a pattern: what one costs to match grows with their number


class Role(StrEnum):
    """What may be granted."""

    VIEWER = "viewer"
    READER = "reader"
    PUBLISHER = "publisher"
    CONSUMER = "consumer"
    BROKER = "broker"
    OPERATOR = "operator"
    ADMIN = "admin"
    SEGMENTS = "segments"
    NODE = "node"


GRANTED = (Role.VIEWER, Role.READER, Role.PUBLISHER, Role.CONSUMER, Role.BROKER, Role.OPERATOR, Role.ADMIN)
"""The roles of an access file."""
BY_TOPIC = frozenset((Role.PUBLISHER, Role.CONSUMER))

_IMPLIED: dict[Role, tuple[Role, ...]] = {
    Role.READER: (Role.VIEWER, Role.SEGMENTS),
    Role.OPERATOR: (Role.VIEWER,),
    Role.ADMIN: (Role.OPERATOR, Role.READER, Role.VIEWER, Role.SEGMENTS),
    Role.NODE: tuple(role for role in Role if role is not Role.NODE),
}


@dataclass(frozen=True, slots=True)
class Need:
    """What a request has to be granted: one of these roles, or none at all."""

    roles: frozenset[Role] = frozenset()
    change: bool = False
    """Whether it changes something: then it is audited."""

    @property
    def open(self) -> bool:
        return not self.roles

    def __str__(self) -> str:
        return " or ".join("reader" if role is Role.SEGMENTS else role for role in Role if role in self.roles) or "open"


class TopicPatterns:
    """Names of topics, in which `*` stands for any run of characters."""

    __slots__ = ("_exact", "_matches", "patterns")

    def __init__(self, patterns: Iterable[str] = ("*",)) -> None:
        """ValueError for what is no pattern."""
        self.patterns = tuple(patterns)
        for pattern in self.patterns:
            if not PATTERN.fullmatch(pattern) or pattern.count("*") > STARS_MAX:
                why = f"topic names, in which * stands for any characters, at most {STARS_MAX} times"
                raise ValueError(f"{pattern!r} is no pattern: {why}")
        self._exact = frozenset(pattern for pattern in self.patterns if "*" not in pattern)
        wild = [".*".join(map(re.escape, pattern.split("*"))) for pattern in self.patterns if "*" in pattern]
        self._matches = re.compile("|".join(wild)).fullmatch if wild else None

    def match(self, topic: str) -> bool:
        return topic in self._exact or (self._matches is not None and self._matches(topic) is not None)


ALL_TOPICS = TopicPatterns()


@dataclass(frozen=True, slots=True)
class Grant:
    """What one caller may do."""

    who: str  # the name of its token, its certificate or its kind; for the audit
    general: frozenset[Role]  # with those that are implied
    by_topic: frozenset[Role] = frozenset()  # publisher, consumer
    topics: TopicPatterns = ALL_TOPICS  # of these

    def may(self, need: Need, topic: str | None = None) -> bool:
        """Whether it has what is needed. `topic`: the one that is meant; None: the request names none."""
        if not need.roles.isdisjoint(self.general):
            return True
        if topic is None or need.roles.isdisjoint(self.by_topic):
            return not need.roles
        return self.topics.match(topic)

    @property
    def roles(self) -> frozenset[Role]:
        """All of them, with those that are implied."""
        return self.general | self.by_topic


def granted(who: str, roles: Iterable[Role], topics: TopicPatterns = ALL_TOPICS) -> Grant:
    """A grant of these roles and what they imply."""
    found = set(roles)
    for role in tuple(found):
        found.update(_IMPLIED.get(role, ()))
    return Grant(who, frozenset(found - BY_TOPIC), frozenset(found & BY_TOPIC), topics)
