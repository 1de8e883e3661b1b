"""The `nsqha` command. Each verb is a module with `add_parser`; what is slow to import is imported when it runs.

stdout is data, stderr is talk. Exit status: 0 ok, 1 failed, 2 usage, 3 not found, 4 exists already or was changed,
6 unreachable or timed out, 8 not confirmed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> None:
    """Run one command; ends the process with its exit status."""
    from nsqha import __version__
    from nsqha.cli import dev
    from nsqha.errors import Conflict, NotFound, NsqhaError, Unavailable

    parser = argparse.ArgumentParser(
        prog="nsqha",
        description="A durable message broker that unchanged NSQ clients use as if it were nsqd.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nsqha {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    dev.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        status = args.run(args)
    except KeyboardInterrupt:
        status = 130
    except NsqhaError as error:
        print(f"nsqha: {error}", file=sys.stderr)
        status = 3 if isinstance(error, NotFound) else 4 if isinstance(error, Conflict) else 1
        if isinstance(error, Unavailable):
            status = 6
    sys.exit(status)
