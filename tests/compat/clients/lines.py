"""JSON lines in and out, for the clients written in Python."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_lock = threading.Lock()


def commands() -> Iterator[dict[str, Any]]:
    """What the test says, one command after the other; blocks."""
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "close":
            return
        if "bodies" in command:
            command["bodies"] = [base64.b64decode(body) for body in command["bodies"]]
        yield command


def follow(act: Callable[[dict[str, Any] | None], None]) -> None:
    """Call `act` from a thread for each command, and with None at the end."""

    def run() -> None:
        for command in commands():
            act(command)
        act(None)

    threading.Thread(target=run, daemon=True).start()


def tell(event: str, **fields: Any) -> None:
    if isinstance(fields.get("body"), bytes):
        fields["body"] = base64.b64encode(fields["body"]).decode()
    if isinstance(fields.get("id"), bytes):
        fields["id"] = fields["id"].decode()
    with _lock:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()
