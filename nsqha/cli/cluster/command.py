"""`nsqha cluster`: its verbs talk to etcd, and to nodes where necessary.

Work that takes long is an intent in etcd, carried out by the controller: it continues when the verb or its terminal
ends. --wait shows the progress.

Verbs that change something need rights in etcd (--etcd-user, --etcd-cert), and in the cluster where they ask nodes
(--cluster-tls-cert, --cluster-secret-file). Verbs that only look ask any broker or lookup daemon, which wants a token
with the role viewer if it has an access file.
"""

from __future__ import annotations

import argparse
from typing import Any

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import (
    Parser,
    add_certificate,
    add_etcd,
    add_json,
    add_look,
    add_timeout,
    add_verb,
    add_yes,
    count,
    hours,
    topic_and_partition,
)
from nsqha.cli.terminal.parser import name as topic_name
from nsqha.cli.verbs import VERBS

USUAL = (exits.FAILED, exits.USAGE, exits.NOT_FOUND, exits.UNREACHABLE)
MOVE = '{"topic", "partition", "replicas", "wanted", "joining"}'
DECOMMISSION = '{"node", "replicas", "leaderships", "moving", "stuck": {"topic/partition": why}}'


def add_parser(commands: Any) -> None:
    noun = add_verb(commands, "cluster", None, help=VERBS["cluster"])
    verbs = noun.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_looks(verbs)
    _add_moves(verbs)
    _add_elect(verbs)
    _add_import(verbs)
    _add_accept(verbs)


def _add_looks(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "status",
        lambda args: _shown(args, "status"),
        help="show whether the cluster is healthy, and what is in progress",
        description="Show whether the cluster is healthy. Exit status 1, for monitoring: something cannot be "
        "acknowledged, there is no controller, or records cannot be read. When etcd is away, what a daemon knew last "
        "is shown with a line that says so, null where only etcd knows, and the exit status is 1.",
        examples=("nsqha cluster status", "nsqha cluster status --json"),
        shape='{"cluster", "cluster_id", "revision", "controller": {"name", "epoch"} or null, "nodes", "away", '
        '"unfit": {node: why}, "silent": {node: why}, "partitions", "leaderless", "below_min_isr", "stalled", '
        '"under_replicated", "not_led": {"topic/partition": why}, "slow": {"topic/partition": seconds}, "unasked", '
        '"owed": {"topic/partition": replicas}, '
        '"replacements", "rebuilding": [{"topic", "partition", "node", "bytes_left", "bytes_per_second", '
        '"seconds_left"}], "moves", "decommissions", "balance_paused", "balance_window", "doubt", "stale", '
        '"unreadable", "healthy"}',
        statuses=(*USUAL, exits.NOT_ALLOWED),
    )
    _finish_look(verb)
    verb = add_verb(
        verbs,
        "nodes",
        lambda args: _shown(args, "nodes"),
        help="list the nodes with their replicas and leaderships",
        description="List the nodes. While replicas are rebuilt the nodes are asked how much is left of each.",
        examples=("nsqha cluster nodes", "nsqha cluster nodes --json"),
        shape='{"name", "uid", "state", "tcp", "http", "grpc", "peer", "segments", "host", "zone", "version", '
        '"nsqd_version", "peer_levels", "replicas", "leaderships", "rebuilding": {"replicas", "bytes_left", '
        '"bytes_per_second", "seconds_left"} or null} per line',
        statuses=(*USUAL, exits.NOT_ALLOWED),
    )
    _finish_look(verb)
    verb = add_verb(
        verbs,
        "topics",
        lambda args: _shown(args, "topics"),
        help="list partitions: leader, in-sync replicas, state",
        examples=("nsqha cluster topics", "nsqha cluster topics orders --json"),
        shape='{"topic", "partition", "uid", "state", "why", "leader", "successor", "epoch", "isr", "replicas", '
        '"owed", "min_isr", "sync"} per line',
        statuses=(*USUAL, exits.NOT_ALLOWED),
    )
    verb.add_argument("topic", metavar="TOPIC", type=topic_name, nargs="?", help="only this one")
    _finish_look(verb)


def _add_moves(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "move",
        lambda args: _change(args, "move"),
        help="give a partition other replicas",
        description="Give a partition these replicas, first the one that will lead. New ones catch up before old ones "
        "are removed; publishing continues.",
        examples=(
            "nsqha cluster move orders/0 node-2,node-3,node-1",
            "nsqha cluster move orders node-1,node-2,node-3 --wait",
        ),
        shape=MOVE,
        statuses=USUAL,
    )
    _add_partition(verb)
    verb.add_argument("nodes", metavar="NODE,NODE", help="names or uids, see nsqha cluster nodes")
    _finish(verb, wait=True)

    verb = add_verb(
        verbs,
        "decommission",
        lambda args: _change(args, "decommission"),
        help="move all replicas away from a node, and place no more there",
        description="Move all replicas away from a node; when it is empty it can be stopped for good. Partitions that "
        "no other node can take are named, with the reason. --wait also ends when only these are left, with exit "
        "status 7. Shows what it moves and asks first.\n\n"
        "--undo allows replicas on it again and moves back those that it held when it was decommissioned, from the "
        "nodes that stand in for it.",
        examples=(
            "nsqha cluster decommission node-3 --yes",
            "nsqha cluster decommission node-3 --undo --yes",
        ),
        shape=DECOMMISSION,
        statuses=(*USUAL, exits.PARTLY, exits.NOT_CONFIRMED),
    )
    verb.add_argument("node", metavar="NODE", help="name or uid")
    verb.add_argument("--undo", action="store_true", help="allow replicas on it again, and bring back those it held")
    add_yes(verb)
    _finish(verb, wait=True)

    verb = add_verb(
        verbs,
        "forget",
        lambda args: _change(args, "forget"),
        help="do not wait for a node that is away: replace its replicas now",
        description="Do not wait for a node that is away and does not come back: its replicas are created again on "
        "other nodes now, or given up where no other host has room and enough are in sync without them. Shows which "
        "and asks first. Refused for a node that is alive, and where no other in-sync replica is alive.",
        examples=("nsqha cluster forget node-3", "nsqha cluster forget node-3 --yes --wait"),
        shape='{"node", "only", "rebuilt", "dropped", "waiting", "forgotten"}',
        statuses=(*USUAL, exits.NOT_ALLOWED, exits.PARTLY, exits.NOT_CONFIRMED),
    )
    verb.add_argument("node", metavar="NODE", help="name or uid")
    add_yes(verb)
    _finish(verb, wait=True)

    verb = add_verb(
        verbs,
        "balance",
        lambda args: _change(args, "balance"),
        help="balance replicas over the nodes",
        description="Begin the moves that balance the number of replicas over the nodes. Leaderships go back to the "
        "first replica of each partition automatically, unless that is paused, in the hours of --window.",
        examples=(
            "nsqha cluster balance --dry-run",
            "nsqha cluster balance --limit 2",
            "nsqha cluster balance --resume",
            "nsqha cluster balance --window 01:00-05:00",
        ),
        shape='{"dry_run", "paused", "window", "transfers", "moves"}',
        statuses=USUAL,
    )
    chosen = verb.add_mutually_exclusive_group()
    chosen.add_argument("--dry-run", action="store_true", help="only show what would be done")
    chosen.add_argument("--pause", action="store_true", help="leaderships stay where they are")
    chosen.add_argument("--resume", action="store_true", help="leaderships go back automatically again")
    help = "the controller moves leaderships back only in these hours, in UTC; always: at any hour"
    chosen.add_argument("--window", type=hours, metavar="HH:MM-HH:MM", help=help)
    verb.add_argument("--limit", type=count, default=4, metavar="N", help="at most N moves (default 4)")
    _finish(verb)


def _add_elect(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "elect",
        lambda args: _change(args, "elect"),
        help="hand a partition to another leader; or elect one with possible loss if no replica may lead",
        description="Hand the leadership of a partition to a member of its in-sync replicas.\n\n"
        "With --unclean: elect a leader although no in-sync replica can lead. Messages that it does not have are lost, "
        "also if they were acknowledged. Every replica is asked first. The command shows where their logs end, says "
        "that nothing is lost only if the logs prove it, and asks.",
        examples=("nsqha cluster elect orders/0 --node node-2",),
        shape='{"topic", "partition", "leader", "epoch", "unclean", "answers", "ahead", "unheard", "lossless", '
        '"known", "done"}',
        statuses=(*USUAL, exits.CONFLICT, exits.NOT_ALLOWED, exits.NOT_CONFIRMED),
    )
    _add_partition(verb)
    verb.add_argument("--node", metavar="NODE", help="the new leader (with --unclean default: the one that has most)")
    verb.add_argument("--unclean", action="store_true", help="acknowledged messages may be lost")
    add_yes(verb)
    _add_nodes(verb)
    _finish(verb, wait=True)


def _add_import(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "import",
        _import,
        help="move the topics of a single node into the cluster",
        description="Move the topics of a single node into the cluster; the node must be stopped. Messages and "
        "channels stay where they are, in its data folder: start it with --etcd-endpoint afterwards. If the cluster "
        "has a topic of the same name, nothing is changed.",
        examples=("nsqha cluster import data --yes",),
        shape='{"cluster", "cluster_id", "node", "topics"}',
        statuses=(*USUAL, exits.CONFLICT, exits.NOT_CONFIRMED),
    )
    verb.add_argument("data_path", metavar="PATH", help="its data folder")
    add_yes(verb)
    _finish(verb)


def _add_accept(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "accept-metadata",
        _accept,
        help="make an etcd that was restored to an older state follow the nodes",
        description="Nodes do not trust an etcd that was restored from a backup: there are no elections and no changes "
        "of replicas until this command. It asks every node what it has, shows what would change and what may be lost, "
        "and asks. Then every epoch rises above all that nodes have promised, the replicas that have most are in sync, "
        "and topics that etcd does not have come back. All nodes stop for some seconds. If it is interrupted, "
        "run it again; if no node waits, it does nothing.",
        examples=("nsqha cluster accept-metadata", "nsqha cluster accept-metadata --yes --json"),
        shape='{"done", "generation", "nodes", "unheard", "restored", "deleted", "partitions"}',
        statuses=(*USUAL, exits.CONFLICT, exits.NOT_CONFIRMED),
    )
    verb.add_argument(
        "--without",
        metavar="UID",
        action="append",
        help="continue although this node does not answer; what only it has may be lost. May be repeated",
    )
    add_yes(verb)
    _add_nodes(verb)
    _finish(verb)


def _accept(args: argparse.Namespace) -> int:
    from nsqha.cli.cluster import accept as cluster_accept

    return cluster_accept.run(args)


def _import(args: argparse.Namespace) -> int:
    from nsqha.cli.cluster import import_topics as cluster_import

    return cluster_import.run(args)


def _add_partition(verb: Parser) -> None:
    verb.add_argument(
        "topic", metavar="TOPIC/PARTITION", type=topic_and_partition, help="orders/0; orders if it has one"
    )


def _add_nodes(verb: Parser) -> None:
    """Add flags for verbs that ask the nodes themselves."""
    add_certificate(verb)
    add_timeout(verb, "3s")


def _finish_look(verb: Parser) -> None:
    """Add flags for verbs that only look."""
    add_json(verb)
    add_look(verb)


def _finish(verb: Parser, *, wait: bool = False) -> None:
    if wait:
        verb.add_argument("--wait", action="store_true", help="wait until it is done, and show the progress")
    add_json(verb)
    add_etcd(verb)


def _shown(args: argparse.Namespace, what: str) -> int:
    from nsqha.cli.cluster import looking, show
    from nsqha.cli.terminal.screen import print_json, say

    if what == "status":
        shown, source = looking.status_page(args)
        if args.json:
            print_json(shown)
        else:
            show.print_status(shown, source)
        return exits.OK if shown["healthy"] else exits.FAILED
    found = looking.seen(args)
    if found.picture.doubt:
        say(f"{args.parser.prog}: not trusted: {found.picture.doubt}")
    if what == "nodes":
        rows = show.nodes(found.picture, found.rebuilding)
    else:
        if args.topic is not None:
            found.picture.topic(args.topic)
        rows = show.partitions(found.picture, args.topic)
    if args.json:
        for row in rows:
            print_json(row)
    elif what == "nodes":
        show.print_nodes(rows)
    else:
        show.print_partitions(rows)
    return exits.OK


def _change(args: argparse.Namespace, verb: str) -> int:
    from nsqha.cli.cluster import change as cluster_change

    return cluster_change.VERBS[verb](args)
