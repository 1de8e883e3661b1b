"""What an operator asked of a channel, as far as he was answered, and which messages it may lack because of that.

    expired    it is older than the policy allows, by now
    beyond     as many messages as the policy keeps unread stand behind it
    skipped    the policy may have said skip between its publish and now
    moved      it died, and has come out of the topic to which the dead go

Nothing else is a reason: what is missing otherwise is lost. Whether something was there to be taken away only the log
can say (`removed`): see tests.jepsen.checkers.removal.
"""

from __future__ import annotations

import json
from typing import Any

FOREVER = float("inf")
TO_TOPIC = "topic:"

Key = tuple[int, int]


class PolicySaid:
    """Of one channel."""

    def __init__(self) -> None:
        self.letters: set[Key] | None = None  # what came out of the topic to which its dead go
        self.removed = False  # retention may pass it: an `abandoned_after` of its topic
        self._ttl = FOREVER
        self._max_depth = FOREVER
        self._skips: list[tuple[float, float]] = []  # when it may have been on

    def asked(self, t: float, what: str) -> None:
        """It may be in force from now on."""
        said: dict[str, Any] = json.loads(what)
        self._ttl = min(self._ttl, said.get("ttl_ms", FOREVER) / 1000)
        self._max_depth = min(self._max_depth, said.get("max_depth", FOREVER))
        self.removed |= "abandoned_after_ms" in said
        if said.get("skip") and not self._skipping:
            self._skips.append((t, FOREVER))

    def answered(self, t: float, what: str) -> None:
        """It is in force, whoever leads."""
        if json.loads(what).get("skip") is False and self._skipping:
            self._skips[-1] = self._skips[-1][0], t

    @property
    def _skipping(self) -> bool:
        return bool(self._skips) and self._skips[-1][1] == FOREVER

    def reason(self, key: Key, published: float, behind: int | None, now: float, *, skew: float) -> str:
        """Why a message that was published then need not have been finished; "" if there is none. `behind`: how many
        messages its partition has behind it; None: where it is, is not known. `skew`: of the clocks, by faults."""
        if self.letters is not None and key in self.letters:
            return "moved"
        if behind is not None and behind >= self._max_depth:
            return "beyond"
        if any(began <= now and published <= end for began, end in self._skips):
            return "skipped"
        return "expired" if now - published >= self._ttl - skew else ""


def letters_topic(what: str) -> str:
    """Where the dead go to, if that is a topic."""
    fate = json.loads(what).get("dead_letter", "")
    return str(fate).removeprefix(TO_TOPIC) if str(fate).startswith(TO_TOPIC) else ""
