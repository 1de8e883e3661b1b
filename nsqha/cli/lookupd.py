"""`nsqha lookupd`: a lookup daemon, with an etcd also a controller. It is `nsqlookupd` with help in groups."""

from __future__ import annotations

import argparse
import os
from typing import Any

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_verb
from nsqha.cli.verbs import VERBS

DESCRIPTION = """\
Run a lookup daemon. With --etcd-endpoint it answers from the cluster's metadata and is a controller: one at a time
elects leaders and places replicas, the others wait to take over. Run two or three. All flags of `nsqlookupd` work
here.

Every flag can also be in the environment (NSQLOOKUPD_ETCD_ENDPOINT=...) or in the file that --config names."""

GROUPS = {
    "cluster": (
        "etcd-endpoint", "etcd-ca", "etcd-cert", "etcd-key", "etcd-user", "etcd-password-file", "cluster-name",
        "cluster-tls-cert", "cluster-tls-key", "cluster-tls-ca", "cluster-secret-file",
    ),
    "addresses": ("tcp-address", "http-address", "https-address", "metrics-address", "broadcast-address"),
}  # fmt: skip


def add_parser(commands: Any) -> None:
    from nsqha.cli.daemon_flags import add_daemon_flags
    from nsqha.options import LookupdOptions

    verb = add_verb(
        commands,
        "lookupd",
        run,
        help=VERBS["lookupd"],
        description=DESCRIPTION,
        examples=("nsqha lookupd --etcd-endpoint 127.0.0.1:2379", "nsqha lookupd --tcp-address 127.0.0.1:4160"),
        statuses=(exits.FAILED, exits.USAGE),
    )
    verb.usage = "nsqha lookupd [--etcd-endpoint HOST:PORT] [flags]"
    add_daemon_flags(verb, LookupdOptions, GROUPS)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from nsqha.options import load_nsqlookupd

    loaded = load_nsqlookupd(args.given, os.environ)
    from lookupd.daemon import serve

    return serve(loaded)
