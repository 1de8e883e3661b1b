"""A page of each partition after the other, until there are enough messages, or all are changed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.screen import say

PAGE = 1000
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


def change(admin: Admin, args: argparse.Namespace, *, plan: bool, most: int | None = None, **fields: Any) -> int:
    """Change a selection, or only count it; at most `--rate` messages a second. How many.

    `most`: not many more than these, which were there when it began: what is requeued may die again meanwhile."""
    total, rate = 0, getattr(args, "rate", None)
    limit = max(1, min(PAGE, rate)) if rate and not plan else PAGE
    for answers in pages(admin, args, "ChangeMessages", limit, plan_only=plan, **fields):
        changed = sum(answer.changed for answer in answers)
        total += changed
        for answer in answers:
            for failed in answer.failed:
                say(f"{args.parser.prog}: {failed.message_id}: {failed.error}")
                args.partly = True
        if most is not None and total >= most:
            break
        if rate and not plan and changed:
            time.sleep(changed / rate)
    return total


def status(args: argparse.Namespace) -> int:
    return exits.PARTLY if getattr(args, "partly", False) else exits.OK
