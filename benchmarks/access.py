"""What the check of the access file costs: `python -m benchmarks.access`.

CPU time of `Guard.allow` with a file of 1,000 tokens, the best of ROUNDS, in microseconds per request.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nsqha.access.roles import Role
from nsqha.access.surfaces import PUBLISH, VIEW
from nsqha.access.tokens import PREFIX, entry
from nsqha.clock import SystemClock
from nsqha.server.authorization.access_file import AccessFile
from nsqha.server.authorization.guard import Guard

TOKENS = 1000
REQUESTS = 20_000
ROUNDS = 7
ADDRESS = "10.0.0.7:40000"


def token(n: int) -> str:
    """As long as those that `nsqha access token` makes."""
    return f"{PREFIX}{n:043}"


def best(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time_ns()
        for _ in range(REQUESTS):
            call()
        found.append((time.process_time_ns() - began) / REQUESTS / 1000)
    return min(found)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "access.toml"
        lines = [entry(f"t{n}", token(n), [Role.VIEWER, Role.PUBLISHER], ["a", "orders.*"]) for n in range(TOKENS)]
        path.write_text('anonymous = ["viewer"]\n' + "".join(lines))
        path.chmod(0o600)
        guard = Guard(AccessFile(str(path), SystemClock()), SystemClock())
        shown = f"Bearer {token(TOKENS // 2)}"
        rows = {
            "a token": lambda: guard.allow(VIEW, ADDRESS, shown),
            "a token, its topic by a pattern": lambda: guard.allow(PUBLISH, ADDRESS, shown, "orders.eu"),
            "without a token": lambda: guard.allow(VIEW, ADDRESS, None),
        }
        for name, call in rows.items():
            print(f"{name:<34} {best(call):5.2f} us")


if __name__ == "__main__":
    main()
