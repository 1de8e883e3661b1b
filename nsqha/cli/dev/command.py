"""`nsqha dev`: the command line; what it runs is in `node` (one process) and `cluster` (many)."""

from __future__ import annotations

import argparse
from typing import Any

from nsqha.cli.dev.plan import ETCD_PORT, PEER_PORT, PORTS
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_json, add_verb
from nsqha.cli.verbs import VERBS

NODES_MAX = 15
SYNC = ("always", "interval", "none")

DESCRIPTION = """\
Run a broker and a lookup daemon in one process, reachable from this machine only. Ctrl-C stops them; data is kept.
A port in use is replaced by a free one, with a note.

With --nodes 3 it is a cluster: three brokers, a lookup daemon and an etcd, each a process of its own. A process that
dies stays down (kill one and watch) and its start command is printed; --restart starts it again. The log of each is in
the data folder. The first node has the ports above, each further node 100 more. etcd syncs its files only with
--sync=always, like the brokers."""


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "dev",
        run,
        help=VERBS["dev"],
        description=DESCRIPTION,
        examples=(
            "nsqha dev",
            "nsqha dev --data-dir try --sync interval",
            "nsqha dev --json",
            "nsqha dev --nodes 3",
            "nsqha dev --nodes 3 --restart --json",
        ),
        shape='{"nodes": [{"pid", "tcp", "http", "grpc", "segments", "data", "start": [argv]}], '
        '"lookupd": [{"pid", "tcp", "http"}]}  once it serves, and nothing else; '
        'a cluster has also "etcd": {"pid", "endpoint"}',
        statuses=(exits.FAILED, exits.USAGE),
    )
    verb.add_argument("--nodes", type=nodes, default=1, metavar="N", help=f"brokers, 1 to {NODES_MAX} (default: 1)")
    verb.add_argument("--restart", action="store_true", help="in a cluster: start again processes that die")
    verb.add_argument(
        "--data-dir",
        "--data-path",
        metavar="PATH",
        default="data",
        help="folder for all data (default: ./data)",
    )
    verb.add_argument("--sync", choices=SYNC, default="always", help="what OK means for new topics (default: always)")
    add_json(verb, "print one line of JSON once it serves, and nothing else")
    for name, default in PORTS.items():
        verb.add_argument(f"--{name}-port", type=port, default=default, help=f"default {default}; 0: any free one")
    verb.add_argument("--peer-port", type=port, help=f"in a cluster; default {PEER_PORT}; 0: any free one")
    verb.add_argument("--etcd-port", type=port, help=f"in a cluster; default {ETCD_PORT}; 0: any free one")


def nodes(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= NODES_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes, 1 to {NODES_MAX}")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text[:9]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> int:
    if args.nodes > 1:
        from nsqha.cli.dev import cluster as dev_cluster

        return dev_cluster.run(args)
    cluster_ports = {"--peer-port": args.peer_port, "--etcd-port": args.etcd_port}
    given = ["--restart"] * args.restart + [flag for flag, port in cluster_ports.items() if port is not None]
    if given:
        raise exits.Exit(exits.USAGE, f"{given[0]} is for a cluster; it needs --nodes 2 or more")
    from nsqha.cli.dev import node as dev_node

    return dev_node.run(args)
