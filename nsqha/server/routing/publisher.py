"""What one connection publishes to one partition, in order, through changes of its leader.

A publisher hands publishes to a target (the partition on this node, or a link to the node that leads it) and remembers
each until its outcome is known. A client never hears "not leader": what was definitely not stored goes to the next
leader.

The rule that keeps the order: a refused publish goes out again only when nothing of this publisher is on its way any
more, and only if nothing that came after it was stored, or may have been; else it fails. So what is stored of a
publisher is in the order of its publishes, and the client gets an error for each that is not. Once one has failed, all
later ones that are not under way fail too: they would be stored behind a gap, and the connection ends with the first
failure anyway.

               +--------------------- refused, nothing later stored ---------------------+
               v                                                                         |
    publish -> waiting -- target known, same as before or nothing under way --> under way --> stored | failed

Waiting ends after `wait_seconds` since the client sent it. Bytes that wait or are on their way to another node count in
the node's `PublishBudget`; those given to a partition here are counted by the partition.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from nsqha.errors import NotFound
from nsqha.hot import NOT_STORED, Reply
from nsqha.server.runtime.backoff import Backoff
from nsqha.server.runtime.budget import PublishBudget

RETRY_SECONDS = 0.02  # first, doubled each time up to
RETRY_SECONDS_MAX = 0.2
NEWS_SECONDS = 0.5
"""While no node leads, or the leader's node could not be dialled: thousands may wait for the successors of one that
died, and `leaders_changed` tells them."""


class Target(Protocol):
    """Where a publisher's publishes go for the time being."""

    @property
    def counts(self) -> bool:
        """Whether it counts bytes in the budget itself."""

    @property
    def gone(self) -> bool:
        """Whether it takes no more, so that what it says is not stored may be stored elsewhere."""

    def take(self, publish: Publish) -> None:
        """Store it; exactly one of its methods is called, perhaps at once."""


class Router(Protocol):
    """Finds targets; and calls `PartitionPublisher.leaders_changed` when others may be right."""

    @property
    def asking(self) -> bool:
        """Whether other nodes are asked who leads: no news tells what they say."""

    def target(self, topic: str, number: int) -> Target | None:
        """Where to publish to this partition now; None: no node leads it at the moment. NotFound: there is no topic."""


class Publish:
    """One publish of a publisher, and what came of it."""

    __slots__ = ("at", "counted", "delay_ms", "frames", "number", "publisher", "reply", "target")

    def __init__(
        self, publisher: PartitionPublisher, number: int, frames: bytes, reply: Reply, delay_ms: int | None, at: float
    ) -> None:
        self.publisher = publisher
        self.number = number  # in the publisher
        self.frames = frames
        self.reply = reply
        self.delay_ms = delay_ms
        self.at = at  # when the client sent it; loop time
        self.target: Target | None = None  # that has it, or had it last
        self.counted = False  # its bytes are in the budget on the publisher's account

    @property
    def source(self) -> object:
        """Whose publishes keep their order."""
        return self.publisher

    def stored(self) -> None:
        """Committed."""
        self.publisher.ended(self, stored=True)

    def refused(self, why: str, *, unreachable: bool = False) -> None:
        """Definitely not stored; another leader may do. `unreachable`: the node could not even be dialled."""
        self.publisher.came_back(self, why, unreachable=unreachable)

    def failed(self, why: str) -> None:
        """As `Reply.failed`."""
        definite = why.startswith(NOT_STORED)
        if definite and self.target is not None and self.target.gone:
            self.publisher.came_back(self, why.removeprefix(NOT_STORED))
        else:
            self.publisher.ended(self, stored=not definite, why=why)


class LeaderRetry:
    """The pauses after which a publisher looks for a leader again; each is longer, until something was stored."""

    __slots__ = ("_look_again", "_loop", "backoff", "timer", "unreachable")

    def __init__(self, loop: asyncio.AbstractEventLoop, look_again: Callable[[], None]) -> None:
        self.timer: asyncio.TimerHandle | None = None  # while there is a pause
        self._loop = loop
        self._look_again = look_again
        self.backoff: Backoff | None = None  # None: the next pause is the first one
        self.unreachable = False  # the next pause is NEWS_SECONDS

    def wait(self) -> None:
        if self.timer is None:
            if self.backoff is None:
                self.backoff = Backoff(RETRY_SECONDS, RETRY_SECONDS_MAX)
            pause = NEWS_SECONDS if self.unreachable else self.backoff.next_pause()
            self.timer = self._loop.call_later(pause, self._due)

    def stop(self) -> None:
        self.unreachable = False  # that was of the target before
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _due(self) -> None:
        self.timer, self.unreachable = None, False
        self._look_again()


class PartitionPublisher:
    """See above. It has what connections and `Publishing` use of a `Partition`."""

    __slots__ = (
        "__weakref__",
        "_back",
        "_broken",
        "_budget",
        "_kept",
        "_last",
        "_loop",
        "_pumping",
        "_retry",
        "_router",
        "_target",
        "_under_way",
        "_wait_seconds",
        "_waiting",
        "_why",
        "number",
        "topic",
    )

    closed = False
    queue = None  # only `publish` knows where a publish goes

    def __init__(
        self,
        topic: str,
        number: int,
        router: Router,
        *,
        loop: asyncio.AbstractEventLoop,
        budget: PublishBudget,
        wait_seconds: float,
    ) -> None:
        self.topic = topic
        self.number = number
        self._router = router
        self._loop = loop
        self._budget = budget
        self._wait_seconds = wait_seconds
        self._target: Target | None = None
        self._waiting: deque[Publish] = deque()
        self._under_way = 0
        self._back: list[Publish] = []  # refused; what is under way is waited for
        self._kept = 0  # the highest number that is stored, or may be
        self._last = 0
        self._broken: str | None = None
        self._why = ""  # what the last refusal said
        self._pumping = False
        self._retry = LeaderRetry(loop, self._look_again)

    # ---- for who publishes

    def publish(self, frames: bytes, reply: Reply, delay_ms: int | None = None) -> None:
        """Store a run of blank frames as one unit; `reply` hears of the outcome.

        `delay_ms`: every channel gets the messages so long after they were written.
        """
        if self._broken is not None:
            reply.failed(self._broken)
            return
        self._last += 1
        publish = Publish(self, self._last, frames, reply, delay_ms, self._loop.time())
        self._waiting.append(publish)
        self._pump()
        if self._waiting and not publish.counted and self._waiting[-1] is publish:
            self._count(publish)

    # ---- for the router

    def leaders_changed(self) -> None:
        """Another target may be right from now on."""
        self._target = None
        self._retry.backoff = None
        self._retry.stop()
        self._pump()

    # ---- on their way

    def _pump(self) -> None:
        """Give what waits to the target, in order."""
        if self._pumping or self._retry.timer is not None:
            return  # a target answered from within `take`; or no target takes anything at the moment
        self._pumping = True
        try:
            while self._waiting and not self._back:
                target = self._target
                if target is None or target.gone:
                    if self._under_way or not self._find_target():
                        return
                    continue
                self._give(target, self._waiting.popleft())
        finally:
            self._pumping = False
        self._settle_refused()

    def _find_target(self) -> bool:
        try:
            self._target = self._router.target(self.topic, self.number)
        except NotFound as error:
            self._break(f"{NOT_STORED}{error}")
            return False
        if self._target is None or self._target.gone:
            self._retry.unreachable = self._retry.unreachable or (self._target is None and not self._router.asking)
            self._target = None
            self._retry.wait()
        return self._target is not None

    def _give(self, target: Target, publish: Publish) -> None:
        self._under_way += 1
        if target.counts:
            self._release(publish)
        else:
            self._count(publish)
        publish.target = target
        target.take(publish)

    def _count(self, publish: Publish) -> None:
        if not publish.counted:
            publish.counted = True
            self._budget.take(len(publish.frames))

    def _release(self, publish: Publish) -> None:
        if publish.counted:
            publish.counted = False
            self._budget.give(len(publish.frames))

    # ---- what came of it

    def ended(self, publish: Publish, *, stored: bool, why: str = "") -> None:
        """`stored`: it is, or may be."""
        self._under_way -= 1
        self._release(publish)
        if stored:
            self._kept = max(self._kept, publish.number)
        if why:
            publish.reply.failed(why)
            self._break(NOT_STORED + "an earlier publish of this connection failed")
        else:
            self._retry.backoff = None
            publish.reply.stored()
        self._settle_refused()
        if self._waiting:
            self._pump()

    def came_back(self, publish: Publish, why: str, *, unreachable: bool = False) -> None:
        self._under_way -= 1
        self._retry.unreachable = unreachable
        self._count(publish)
        self._target = None
        self._why = why
        self._back.append(publish)
        if self._broken is not None:
            self._break(self._broken)
        self._settle_refused()

    def _settle_refused(self) -> None:
        """Nothing is under way any more: what was refused goes first, or fails."""
        if self._under_way or not self._back or self._pumping:
            return
        back = sorted(self._back, key=lambda publish: publish.number)
        self._back = []
        self._waiting.extendleft(reversed(back))
        if back[0].number < self._kept:
            self._break(NOT_STORED + self._why)
        else:
            self._retry.wait()

    def _break(self, why: str) -> None:
        """One has failed: so do all that are not under way."""
        if self._broken is None:
            self._broken = why
        failing = [*sorted(self._back, key=lambda publish: publish.number), *self._waiting]
        self._back = []
        self._waiting.clear()
        self._retry.stop()
        for publish in failing:
            self._release(publish)
            publish.reply.failed(why)

    # ---- waiting for a leader

    def _look_again(self) -> None:
        if self._waiting and self._waiting[0].at + self._wait_seconds <= self._loop.time():
            reason = self._why or "no node leads the partition"
            self._break(f"{NOT_STORED}{reason} (waited {self._wait_seconds:g} s for a leader)")
            return
        self._target = None
        self._pump()

    def __repr__(self) -> str:
        state = self._broken or f"{len(self._waiting)} waiting, {self._under_way} under way, {len(self._back)} refused"
        return f"PartitionPublisher({self.topic}/{self.number}: {state})"
