"""The dead letters of one channel on its leader: who dies, and what becomes of it.

    failed at delivery max_attempts -+                      +-> keep: a deferred message that is never due
    expired on retry ----------------+-> policy dead_letter +-> topic: kept, until they are moved there
    an operator kills it ------------+                      +-> drop: finished, counted

The breaker: with `dead_max` dead letters nothing dies any more. So many failures are an outage, not poison; what fails
waits, and is handed out again with the count of deliveries at its limit.

An #ephemeral channel keeps nothing: there `drop` is the rule.
"""

from __future__ import annotations

from nsqha.cursor.deferred.dead import Reason, dead_due_ns
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.policy import ChannelPolicies, DeathPolicy


class DeadLetters:
    """Lets messages of one channel die, and counts them by reason."""

    __slots__ = ("_ephemeral", "_name", "_policies", "died")

    def __init__(self, name: str, policies: ChannelPolicies, *, ephemeral: bool) -> None:
        self.died: dict[Reason, int] = dict.fromkeys(Reason, 0)  # under this leader; also those that were dropped
        self._name = name
        self._policies = policies
        self._ephemeral = ephemeral

    @property
    def policy(self) -> DeathPolicy | None:
        """What the channel's policy says of them."""
        return self._policies.death(self._name)

    def _drops(self, policy: DeathPolicy | None) -> bool:
        return self._ephemeral or (policy is not None and policy.drop)

    def full(self, policy: DeathPolicy, kept: int) -> bool:
        """Whether nothing may die now, where so many are kept."""
        return not self._drops(policy) and kept >= policy.most

    def letter(self, offset: int, attempts: int, reason: Reason, now_ns: int) -> Deferred | None:
        """The message dies: as what it is deferred; None: it is to be finished. It is counted."""
        self.died[reason] += 1
        if self._drops(self.policy):
            return None
        return Deferred(offset, dead_due_ns(now_ns, reason), attempts)
