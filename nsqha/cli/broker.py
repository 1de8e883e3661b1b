"""`nsqha broker`: one node of a cluster. It is `nsqd` that requires an etcd, with help in groups."""

from __future__ import annotations

import argparse
import os
from typing import Any

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_verb
from nsqha.cli.verbs import VERBS

DESCRIPTION = """\
Run one node of a cluster. Other nodes are found in etcd; a node keeps its identity in its data folder, so start it
again with the same --data-path. All flags of `nsqd` work here. For a node without a cluster use nsqd or nsqha dev.

Every flag can also be in the environment (NSQD_ETCD_ENDPOINT=...) or in the file that --config names."""

GROUPS = {
    "cluster": (
        "etcd-endpoint", "etcd-ca", "etcd-cert", "etcd-key", "etcd-user", "etcd-password-file", "cluster-name",
        "node-name", "host", "topology-zone", "topology-region", "lease-ttl", "isr-timeout", "max-clock-skew",
        "topic-replicas", "cluster-tls-cert", "cluster-tls-key", "cluster-tls-ca", "cluster-secret-file",
        "insecure-cluster",
    ),
    "addresses (clients use the first three, operators gRPC, nodes gRPC and peer, Spark jobs and the like segments)": (
        "tcp-address", "http-address", "https-address", "grpc-address", "peer-address", "segments-address",
        "broadcast-address", "broadcast-tcp-port", "broadcast-http-port",
    ),
    "data": (
        "data-path", "sync", "sync-every", "sync-timeout", "retention", "retention-bytes", "segment-bytes",
        "max-bytes-per-file", "disk-low-bytes",
    ),
    "topics": ("topic-partitions", "auto-create-topics", "max-msg-size", "max-body-size", "max-req-timeout"),
}  # fmt: skip


def add_parser(commands: Any) -> None:
    from nsqha.cli.daemon_flags import add_daemon_flags
    from nsqha.options import Options

    verb = add_verb(
        commands,
        "broker",
        run,
        help=VERBS["broker"],
        description=DESCRIPTION,
        examples=(
            "nsqha broker --etcd-endpoint 127.0.0.1:2379 --data-path data --broadcast-address 127.0.0.1 "
            "--grpc-address 127.0.0.1:4152",
            "nsqha broker --etcd-endpoint 127.0.0.1:2379 --data-path data --host rack1 --node-name a --sync interval "
            "--broadcast-address 127.0.0.1",
        ),
        statuses=(exits.FAILED, exits.USAGE),
    )
    verb.usage = "nsqha broker --etcd-endpoint HOST:PORT --data-path PATH [flags]"
    add_daemon_flags(verb, Options, GROUPS)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from nsqha.cli import nsqd
    from nsqha.options import load_nsqd

    loaded = load_nsqd(args.given, os.environ)
    if not loaded.options.etcd_endpoints:
        raise exits.Exit(exits.USAGE, "--etcd-endpoint is missing: give HOST:PORT of a member of the cluster's etcd")
    return nsqd.run(loaded.options, loaded.notices)
