"""One event for each change that an operator or a program asks for: who, what, and how it ended. Without an access file
too, as long as anybody asks.

    admin_action {who, role, from, surface, method, target, plan, outcome, took}

`who` is the name of a token or what a certificate says, never a secret; `target` names topics, channels, nodes, never a
body. What a node asks another one on behalf of its caller is not recorded again there.

What is refused is asked for by strangers as often as they like: REFUSED_PER_SECOND of these have a record, the others a
line that says so now and then. Metrics count all refusals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from nsqha.nsqlog import Logger
from nsqha.server.runtime.rare_warnings import RareWarnings

TARGET_CHARACTERS_MAX = 500
METHOD_CHARACTERS_MAX = 100
REFUSED_PER_SECOND = 20

logger = Logger("audit", answers=True)


@dataclass(frozen=True, slots=True)
class AdminAction:
    """One change, done or refused."""

    who: str
    role: str  # the one that it needs
    address: str
    surface: str  # http, https, grpc, ..
    method: str
    target: str
    plan: bool  # only the plan was asked for: nothing was changed
    outcome: str  # `done`, or how it failed: a status and a code; and what it skips (`skips_text`)
    took: float  # seconds

    def fields(self) -> dict[str, Any]:
        return {
            "who": self.who,
            "role": self.role,
            "from": self.address,
            "surface": self.surface,
            "method": _short(self.method, METHOD_CHARACTERS_MAX),
            "target": _short(self.target, TARGET_CHARACTERS_MAX),
            "plan": self.plan,
            "outcome": self.outcome,
            "took": round(self.took, 6),
        }


def skips_text(messages: int) -> str:
    """For the end of an outcome: so many messages that were never finished will not be delivered."""
    return f"; skips {messages} never finished" if messages else ""


_FIELDS = ("who", "role", "from", "surface", "method", "target", "plan", "outcome", "took")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


class Audit:
    """The audit of one daemon."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.publish: Callable[[bytes], None] | None = None
        """Where the records go besides the log, as JSON; it never waits and raises nothing."""
        self.copied: Callable[[bytes], None] | None = None
        """Where those of changes of `topic` go besides, for other nodes; as `publish`."""
        self.topic = ""  # the audit's own
        self._now = now
        self._second, self._refused = 0, 0  # how many were refused in which second
        self._more = RareWarnings(logger, "audit_refusals_unrecorded", now)

    def record(self, action: AdminAction) -> None:
        if action.outcome.startswith("refused") and not self._has_room():
            self._more.warning("more than %d changes a second are refused: not each has a record", REFUSED_PER_SECOND)
            return
        fields = action.fields()
        text = "AUDIT: %(who)s (%(from)s) %(surface)s %(method)s %(target)s: " + ("plan, " if action.plan else "")
        logger.info("admin_action", "%s", text % fields + action.outcome, **fields)
        encoded = msgspec.json.encode(fields)
        if self.publish is not None:
            self.publish(encoded)
        own = self.topic and f"topic={self.topic}" in action.target.split(" ")
        if self.copied is not None and own and not action.outcome.startswith("refused"):
            self.copied(encoded)

    def take(self, fields: dict[str, Any], node: str) -> None:
        """Log a record of another node."""
        shown = {name: fields.get(name, "") for name in _FIELDS}
        text = "AUDIT: {who} ({from}) {surface} {method} {target}: {outcome}".format(**shown)
        logger.info("admin_action", "%s (at node %s)", text, node, **shown, node=node)

    def _has_room(self) -> bool:
        second = int(self._now())
        if second != self._second:
            self._second, self._refused = second, 0
        self._refused += 1
        return self._refused <= REFUSED_PER_SECOND
