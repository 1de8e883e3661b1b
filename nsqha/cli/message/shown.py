"""Messages of a channel in a table, and as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nsqha.cli.brokers.admin import record
from nsqha.cli.terminal.screen import Cell, body_json, print_json, printable, table
from nsqha.cli.terminal.times import show_duration, show_time

SHAPE = (
    '{"id", "partition", "offset", "state", "attempts", "published_ns", "due_ns", "died_ns", "reason", "client", '
    '"times_out_ns", "error", "body_bytes", "body"}, one message a line'
)
_BODY_SHOWN = 60


def print_messages(found: Sequence[tuple[int, Any]], *, json: bool, bodies: bool) -> None:
    """`found`: (partition, message)."""
    if json:
        for partition, message in found:
            print_json(as_json(partition, message))
        return
    headers: tuple[str, ...] = ("ID", "STATE", "ATTEMPTS", "PUBLISHED", "WHAT")
    rows: list[tuple[Cell, ...]] = []
    for partition, message in found:
        row: tuple[Cell, ...] = (
            message.message_id,
            as_json(partition, message)["state"].replace("_", " "),
            message.attempts,
            show_time(message.published_ns) if message.published_ns else "",
            what(message),
        )
        rows.append((*row, printable(message.body[:_BODY_SHOWN].decode(errors="replace"))) if bodies else row)
    table((*headers, "BODY") if bodies else headers, rows)


def as_json(partition: int, message: Any) -> dict[str, Any]:
    shown = record(message)
    del shown["message_id"], shown["body"]
    return {"id": message.message_id, "partition": partition, **shown, **body_json(message.body)}


def what(message: Any) -> str:
    """What holds for the message beside its state."""
    now_ns = time.time_ns()
    if message.died_ns:
        reason = as_json(0, message)["reason"].replace("_", " ")
        return f"{reason}, {show_duration(max(now_ns - message.died_ns, 0) / 1e9)} ago"
    if message.client:
        return f"at {message.client} for {show_duration(max(message.times_out_ns - now_ns, 0) / 1e9)} more"
    if message.due_ns > now_ns:
        return f"due in {show_duration((message.due_ns - now_ns) / 1e9)}"
    if message.due_ns:
        return f"due for {show_duration((now_ns - message.due_ns) / 1e9)}"
    return str(message.error)
