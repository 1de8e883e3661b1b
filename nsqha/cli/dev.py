"""`nsqha dev`: the command line; what it runs is in `nsqha.cli.dev_node`, which is slow to import."""

from __future__ import annotations

import argparse
from typing import Any

from nsqha.cli import exits
from nsqha.cli.parser import add_json, add_verb
from nsqha.cli.verbs import VERBS

PORTS = {"tcp": 4150, "http": 4151, "lookupd-tcp": 4160, "lookupd-http": 4161, "grpc": 4152}
SYNC = ("always", "interval", "none")

DESCRIPTION = """\
Run a broker and a lookup daemon in one process, on this machine only. Ctrl-C stops them; data is kept.
A port that is taken is replaced by a free one, and that is said."""


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "dev",
        run,
        help=VERBS["dev"],
        description=DESCRIPTION,
        examples=("nsqha dev", "nsqha dev --data-dir try --sync interval", "nsqha dev --json"),
        shape='{"nodes": [{"pid", "tcp", "http", "grpc", "data", "start": [argv]}], '
        '"lookupd": [{"pid", "tcp", "http"}]}  once it serves, and nothing else',
        statuses=(exits.FAILED, exits.USAGE),
    )
    verb.add_argument(
        "--data-dir",
        "--data-path",
        metavar="PATH",
        default="data",
        help="folder of everything stored (default: ./data)",
    )
    verb.add_argument("--sync", choices=SYNC, default="always", help="what OK means for new topics (default: always)")
    add_json(verb, "print one line of JSON once it serves, and nothing else")
    for name, default in PORTS.items():
        verb.add_argument(f"--{name}-port", type=port, default=default, help=f"default {default}; 0: any free one")


def port(text: str) -> int:
    if not text.isdecimal() or int(text[:9]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from nsqha.cli import dev_node

    return dev_node.run(args)
