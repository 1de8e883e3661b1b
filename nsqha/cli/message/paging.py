"""A page of each partition after the other, until there are enough messages, or all are changed."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.screen import say

PAGE = 1000
STEPS_A_SECOND = 20  # at most, of a selection that is changed at a rate
STATES = ("in-flight", "waiting", "deferred", "dead")
REASONS = ("requeued", "timed-out", "disconnected", "expired", "operator")


def state(admin: Admin, word: str) -> int:
    return int(admin.messages.MessageState.Value(f"MESSAGE_STATE_{word.upper().replace('-', '_')}"))


def reason(admin: Admin, word: str | None) -> int:
    return int(admin.messages.DeathReason.Value(f"DEATH_REASON_{(word or 'unspecified').upper().replace('-', '_')}"))


def pages(admin: Admin, args: argparse.Namespace, rpc: str, limit: int, **fields: Any) -> Iterator[Any]:
    """The answers of all partitions, page by page. A partition that fails is told on stderr, and as the exit status."""
    after: list[Any] = []
    fields |= {} if args.partition is None else {"partition": args.partition}
    while True:
        answers = admin.call(rpc, topic=args.topic, channel=args.channel, after=after, limit=limit, **fields).partitions
        for one in answers:
            if one.error:
                say(f"{args.parser.prog}: partition {one.partition}: {one.error}")
                args.partly = True
        yield answers
        after = [one.next for one in answers if one.HasField("next")]
        if not after:
            return


def select(
    admin: Admin, args: argparse.Namespace, word: str, first: Callable[[Any], int] | None = None
) -> list[tuple[int, Any]]:
    """Up to `--limit` messages in this state: (partition, message). `first`: those for which it is lowest, of all."""
    found: list[tuple[int, Any]] = []
    wanted = state(admin, word)
    limit = PAGE if first is not None else min(args.limit, PAGE)
    for answers in pages(admin, args, "ListMessages", limit, state=wanted, bodies=args.bodies):
        found += [(answer.partition, message) for answer in answers for message in answer.messages]
        if first is not None:
            found.sort(key=lambda one: first(one[1]))
            del found[args.limit :]
        elif len(found) >= args.limit:
            break
    return found[: args.limit]


@dataclass
class Changed:
    """What was changed, or would be."""

    messages: int = 0
    partitions: dict[int, int] = field(default_factory=dict)  # so many of each
    ids: dict[str, str] = field(default_factory=dict)  # of those that were named: why they were not changed; "": done

    def take(self, args: argparse.Namespace, answers: Sequence[Any]) -> int:
        """Add what partitions answered; say which messages could not be changed. How many were."""
        changed = 0
        for answer in answers:
            changed += answer.changed
            self.partitions[answer.partition] = self.partitions.get(answer.partition, 0) + answer.changed
            self.ids |= dict.fromkeys(answer.done, "") | {failed.message_id: failed.error for failed in answer.failed}
            for failed in answer.failed:
                say(f"{args.parser.prog}: {failed.message_id}: {failed.error}")
                args.partly = True
        self.messages += changed
        return changed


class ChangeRate:
    """Small steps: no more than `rate` messages are changed in any second, however many partitions there are."""

    def __init__(
        self, rate: int, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.step = max(1, min(PAGE, rate // STEPS_A_SECOND))
        self._rate = rate
        self._now = now
        self._sleep = sleep
        self._next = now()

    def wait(self) -> None:
        """Until the next step may begin. A step that came late is not made up for."""
        if (seconds := self._next - self._now()) > 0:
            self._sleep(seconds)
        self._next = max(self._next, self._now())

    def did(self, changed: int) -> None:
        """The step that began last changed so many."""
        self._next += changed / self._rate


def change_ids(admin: Admin, args: argparse.Namespace, ids: Sequence[str], *, plan: bool, **fields: Any) -> Changed:
    """Change messages by id, of any partitions, or only look whether that can be done; at most `--rate` a second."""
    found, pace = Changed(), _pace(args, plan)
    ids = list(dict.fromkeys(ids))
    step = len(ids) if pace is None else pace.step
    for first in range(0, len(ids), step):
        if pace is not None:
            pace.wait()
        answers = _call(admin, args, message_ids=ids[first : first + step], plan_only=plan, **fields)
        changed = found.take(args, answers)
        if pace is not None:
            pace.did(changed)
    return found


def change(
    admin: Admin, args: argparse.Namespace, *, plan: bool, planned: Changed | None = None, **fields: Any
) -> Changed:
    """Change a selection, or only count it; at most `--rate` messages a second, of all partitions together.

    `planned`: not many more than these, which were there when it began: what is requeued may die again meanwhile."""
    pace = _pace(args, plan)
    if pace is not None and planned is not None:
        return _change_paced(admin, args, planned, pace, fields)
    found = Changed()
    for answers in pages(admin, args, "ChangeMessages", PAGE, plan_only=plan, **fields):
        found.take(args, answers)
        if planned is not None and found.messages >= planned.messages:
            break
    return found


def _change_paced(
    admin: Admin, args: argparse.Namespace, planned: Changed, pace: ChangeRate, fields: dict[str, Any]
) -> Changed:
    """One small page of one partition after the other, in turn."""
    found = Changed()
    places: deque[tuple[int, list[Any]]] = deque((n, []) for n, count in planned.partitions.items() if count)
    while places and (left := planned.messages - found.messages) > 0:
        number, after = places.popleft()
        pace.wait()
        limit = min(pace.step, left)
        for answer in _call(admin, args, partition=number, after=after, limit=limit, **fields):
            pace.did(found.take(args, [answer]))
            if answer.error:
                say(f"{args.parser.prog}: partition {number}: {answer.error}")
                args.partly = True
            elif answer.HasField("next"):
                places.append((number, [answer.next]))
    return found


def _pace(args: argparse.Namespace, plan: bool) -> ChangeRate | None:
    return ChangeRate(args.rate) if args.rate and not plan else None


def _call(admin: Admin, args: argparse.Namespace, **fields: Any) -> Sequence[Any]:
    named = {"topic": args.topic, "channel": args.channel}
    if args.partition is not None:
        named["partition"] = args.partition
    answers: Sequence[Any] = admin.call("ChangeMessages", **named | fields).partitions
    return answers


def status(args: argparse.Namespace) -> int:
    return exits.PARTLY if getattr(args, "partly", False) else exits.OK
