"""A channel in which some messages always fail, under a policy: what has become of them when the load is at rest.

    failing   every seventh message is answered by REQ, whatever its attempt; the others are finished
    at rest   nothing waits, is deferred or in flight: each of these is one dead letter
    raised    all dead letters are requeued, come at attempt 1, and are finished

A crash may repeat an attempt: the wire never shows more than the policy allows. It may not lose a dead letter, nor make
two of one. Others are dead, too, if nobody answered their deliveries: time-outs and lost connections are failures as
well, and consumers at a node that stands still, or behind a cut, have many. Whether that was so the history tells
(tests.jepsen.checkers.deaths).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsqha.cli.brokers.admin import Admin
from tests.jepsen.checkers.deaths import BY_SILENCE
from tests.jepsen.history import Letter, Message

if TYPE_CHECKING:
    from tests.integration.cluster import Cluster

CHANNEL = "failing"
MAX_ATTEMPTS = 3
POLICY = {"max_attempts": MAX_ATTEMPTS, "retry_ms": 100}
PAGE = 1000
EVERY = 7

Key = tuple[int, int]  # process and number of a message


def fails(key: Key) -> bool:
    """Whether the message with this process and number is one of those that always fail."""
    return sum(key) % EVERY == 0


class FailingMessages:
    """What the consumers of the channel saw, and the judgement."""

    def __init__(self, grpc: Callable[[], str], topic: str) -> None:
        """`grpc`: where to ask."""
        self.failing = True  # else they are finished, too
        self.seen: dict[str, Key] = {}  # by id
        self.dead = 0  # as the judgement found them
        self._letters: dict[str, Letter] = {}
        self._raised: dict[str, int] = {}  # what came since -> at which attempt
        self._grpc = grpc
        self.topic = topic
        self._problems: list[str] = []

    @classmethod
    def of(cls, cluster: Cluster, topic: str) -> FailingMessages:
        """Set the policy; the channel is there."""
        node = cluster.nodes[0]
        node.request(f"/channel/policy?topic={topic}&channel={CHANNEL}", json.dumps(POLICY).encode())
        return cls(lambda: next(node for node in cluster.nodes if node.running).grpc, topic)

    def received(self, messages: list[Message]) -> set[str]:
        """Which of them are to be answered by REQ."""
        failing = set()
        for message in messages:
            key = (message.process, message.counter)
            if message.attempts > MAX_ATTEMPTS:
                self._problems.append(f"{key} came with attempts {message.attempts}")
            if fails(key):
                self.seen[message.id] = key
                if self.failing:
                    failing.add(message.id)
            if not self.failing:
                self._raised.setdefault(message.id, message.attempts)
        return failing

    def raise_all(self, tell: Callable[[list[Letter]], None] = lambda letters: None) -> list[str]:
        """The load is at rest: what is wrong. `tell` gets all dead letters; then they are requeued, and finished when
        they come."""
        with Admin(self._grpc(), 30) as admin:
            letters = self._listed(admin)
            problems = self.judged(letters)
            tell(letters)
            self.failing = False
            self._requeue(admin)
        return problems

    def judged(self, letters: list[Letter]) -> list[str]:
        """What is wrong with these dead letters, as far as consumers can say that."""
        dead = Counter(letter.id for letter in letters)
        self._letters = {letter.id: letter for letter in letters}
        self.dead = len(dead)
        others = {each.id for each in letters if each.id not in self.seen and each.reason not in BY_SILENCE}
        twice = {message_id for message_id, count in dead.items() if count > 1}
        return [
            f"{len(ids)} {what}: {sorted(ids)[:5]}"
            for ids, what in (
                (self.seen.keys() - dead.keys(), "failed and are not dead"),
                (others, "are dead and did not fail"),
                (twice, "are dead letters twice"),
            )
            if ids
        ]

    def _listed(self, admin: Admin) -> list[Letter]:
        found: list[Letter] = []
        after: list[Any] = []
        while True:
            (answer,) = admin.call(
                "ListMessages",
                topic=self.topic,
                channel=CHANNEL,
                state=admin.messages.MESSAGE_STATE_DEAD,
                limit=PAGE,
                after=after,
            ).partitions
            assert not answer.error, answer.error
            for letter in answer.messages:
                if letter.attempts != MAX_ATTEMPTS:
                    self._problems.append(f"{letter.message_id} died at attempt {letter.attempts}")
                lived = (letter.died_ns - letter.published_ns) / 1e9
                reason = admin.messages.DeathReason.Name(letter.reason).removeprefix("DEATH_REASON_").lower()
                found.append(Letter(letter.message_id, reason, lived))
            if not answer.HasField("next"):
                return found
            after = [answer.next]

    def _requeue(self, admin: Admin) -> None:
        requeued = 0
        after: list[Any] = []
        while True:
            (answer,) = admin.call(
                "ChangeMessages",
                topic=self.topic,
                channel=CHANNEL,
                state=admin.messages.MESSAGE_STATE_DEAD,
                action=admin.messages.MESSAGE_ACTION_REQUEUE,
                after=after,
            ).partitions
            assert not answer.error, answer.error
            requeued += answer.changed
            if not answer.HasField("next"):
                break
            after = [answer.next]
        if requeued != self.dead:
            self._problems.append(f"{requeued} of {self.dead} dead letters were requeued")

    @property
    def all_raised(self) -> bool:
        """Whether all that were requeued have come."""
        return self._letters.keys() <= self._raised.keys()

    def end(self) -> list[str]:
        """What else is wrong, when all that was requeued has come."""
        late = [message_id for message_id in self._letters if self._raised.get(message_id, 1) != 1]
        problems = [f"{len(late)} requeued dead letters did not begin at attempt 1: {late[:5]}"] if late else []
        if missing := self._letters.keys() - self._raised.keys():
            problems.append(f"{len(missing)} requeued dead letters never came: {sorted(missing)[:5]}")
        if len(self.seen) < EVERY:
            problems.append(f"only {len(self.seen)} messages failed: that says nothing")
        return problems + self._problems
