"""What an operator asked of a channel, as far as he was answered, and which messages it may lack because of that.

    expired    it was older than the policy allows
    beyond     as many messages as the policy keeps unread stood behind it
    skipped    the policy may have said skip between its publish and then
    moved      it died, and has come out of the topic to which the dead go

Nothing else is a reason: what is missing otherwise is lost. Each holds for the moment at which the channel was done
with the message, if the log says it (`reason_then`), by the message's own timestamp and the clocks of the leaders:

    expired    timestamp + ttl <= time of the batch that says so
    beyond     the log went on for that many messages in that batch
    skipped    skip was asked for before that batch
    moved      the log had it as a dead letter, with max_attempts, or expired

A batch is written after what it says has happened, so its time and end are never too early. A log that says nothing
leaves the end of the run (`reason`). Whether something was there to be taken away only the log can say (`removed`): see
tests.jepsen.checkers.removal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

FOREVER = float("inf")
TO_TOPIC = "topic:"
FIELDS = ("ttl_ms", "max_depth", "skip", "max_attempts")

Key = tuple[int, int]


@dataclass
class Said:
    """A value of one field, and when it may have been in force."""

    value: Any
    began: float
    ended: float = FOREVER


@dataclass(frozen=True)
class Done:
    """How a channel was done with a message, as its log says."""

    t: float  # at the latest, by the clock of the run
    age: float  # of the message, by its timestamp and that of the batch
    behind: int  # so many messages of the partition came after it
    attempts: int  # at which it died; 0: it was no dead letter


class PolicySaid:
    """Of one channel."""

    def __init__(self) -> None:
        self.letters: set[Key] | None = None  # what came out of the topic to which its dead go
        self.removed = False  # retention may pass it: an `abandoned_after` of its topic
        self.abandoned_after = FOREVER
        self._said: dict[str, list[Said]] = {field: [] for field in FIELDS}

    def asked(self, t: float, what: str) -> None:
        """It may be in force from now on."""
        asked: dict[str, Any] = json.loads(what)
        if "abandoned_after_ms" in asked:
            self.removed = True
            self.abandoned_after = min(self.abandoned_after, asked["abandoned_after_ms"] / 1000)
        for field in FIELDS:
            if field in asked:
                self._said[field].append(Said(asked[field], t))

    def answered(self, asked: float, t: float, what: str) -> None:
        """What was asked for then is in force, whoever leads; nothing else of the same fields is."""
        for field in json.loads(what).keys() & self._said.keys():
            for said in self._said[field]:
                if said.began < asked:
                    said.ended = min(said.ended, t)

    def _in_force(self, field: str, since: float, until: float) -> list[Any]:
        """The values that may have been in force at some time between."""
        said = [said for said in self._said[field] if said.began <= until and since <= said.ended]
        return [each.value for each in said if each.value]

    def reason(self, key: Key, published: float, behind: int | None, now: float, *, skew: float) -> str:
        """Why a message that was published then need not have been finished by now; "" if there is none. `behind`: how
        many messages its partition has behind it; None: where it is, is not known. `skew`: of the clocks, by faults."""
        if self._moved(key):
            return "moved"
        if behind is not None and behind >= self._least("max_depth", published, now):
            return "beyond"
        if self._in_force("skip", published, now):
            return "skipped"
        return "expired" if now - published >= self._ttl(published, now) - skew else ""

    def reason_then(self, key: Key, published: float, done: Done, *, skew: float) -> str:
        """Why the channel was done with the message at that moment, though no consumer had finished it."""
        until = done.t + 2 * skew  # two clocks may be wrong: of the leader, and of whoever gave the run its time
        if done.behind >= self._least("max_depth", published, until):
            return "beyond"
        if self._in_force("skip", published, until):
            return "skipped"
        expired = done.age >= self._ttl(published, until) - skew
        if expired and done.attempts <= 0:
            return "expired"
        least = self._least("max_attempts", published, until)
        died = done.attempts >= least or (expired and done.attempts > 0)
        return "moved" if died and self._moved(key) else ""

    def _moved(self, key: Key) -> bool:
        return self.letters is not None and key in self.letters

    def _least(self, field: str, since: float, until: float) -> float:
        return min(self._in_force(field, since, until), default=FOREVER)

    def _ttl(self, since: float, until: float) -> float:
        return self._least("ttl_ms", since, until) / 1000


def letters_topic(what: str) -> str:
    """Where the dead go to, if that is a topic."""
    fate = json.loads(what).get("dead_letter", "")
    return str(fate).removeprefix(TO_TOPIC) if str(fate).startswith(TO_TOPIC) else ""
