"""The cluster for verbs that only look: as a broker or a lookup daemon sees it, or as etcd and the nodes say it.

Any daemon of the cluster is asked first: it needs an address, and a token with the role viewer where there is an access
file. Where none answers, or only etcd is named, etcd is read and the nodes are asked, which takes rights there.

What is not in order at the first look is looked at again a second later: an election, or a leadership that is handed
over, is no trouble that is worth an alarm.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nsqha.cli.brokers.discovery import LookupDaemon, cluster_of, discover
from nsqha.cli.cluster import show
from nsqha.cli.cluster.access import Picture, look, observe, opened
from nsqha.cli.cluster.rebuilding import look_of, measured, rebuilds
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import LOOKUPD_ADDRESS
from nsqha.election.health import OK, UNDER
from nsqha.election.moves import read_intents
from nsqha.election.observed.page import decode
from nsqha.errors import LogCorrupt, NsqhaError, StaleMetadata, Unavailable

DAEMON_SECONDS = 10.0  # for a daemon to answer that waits for etcd and the nodes itself
LOOK_SECONDS = 1.0  # between two looks
USUAL_NAME = "nsqha"
MOST_REBUILDS = 1000  # that are measured


@dataclass(frozen=True)
class ClusterLook:
    """The cluster, and how far its replicas are that are made again."""

    picture: Picture
    rebuilding: list[dict[str, Any]]


def seen(args: argparse.Namespace) -> ClusterLook:
    """Look once, or twice if that shows more. Exit or NsqhaError: nobody answers."""
    first, at = _look(args), time.monotonic()
    if not _worth_another(first):
        return ClusterLook(first, [])
    time.sleep(LOOK_SECONDS)
    second = _look(args)
    before, after = look_of(first.observed, at), look_of(second.observed, time.monotonic())
    return ClusterLook(second, measured(rebuilds(second)[:MOST_REBUILDS], before, after, second))


def status_page(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The page of `cluster status`, and where it is from."""
    found = seen(args)
    return show.status(found.picture, found.rebuilding), found.picture.source


def _worth_another(picture: Picture) -> bool:
    if rebuilds(picture):
        return True
    for name, meta in picture.metas.items():
        said = picture.observed.of(name, meta)
        if show.state(name, meta, picture) not in (OK, UNDER) or (said and said.waits_s >= show.WAITS_SECONDS):
            return True
    return False


def _look(args: argparse.Namespace) -> Picture:
    ways: list[Callable[[argparse.Namespace], Picture]] = [_by_daemon, _by_etcd]
    if etcd_first(args):
        ways.reverse()
    errors: list[NsqhaError] = []
    for way in ways:
        try:
            return way(args)
        except StaleMetadata:
            raise  # etcd is there, and waits for an operator: no daemon knows better
        except NsqhaError as error:
            errors.append(error)
            if way is _by_etcd and not isinstance(error, Unavailable):
                break  # etcd answers, and says why not
    said = [status for error in errors if (status := exits.status_of(error)) != exits.UNREACHABLE]
    raise exits.Exit(said[0] if said else exits.UNREACHABLE, "; and ".join(map(str, errors)))


def etcd_first(args: argparse.Namespace) -> bool:
    """Whether etcd is named and no daemon is; a flag says more than the environment."""
    if args.etcd_endpoint or args.address:
        return bool(args.etcd_endpoint)
    return "NSQHA_ETCD_ENDPOINT" in os.environ and "NSQHA_ADDRESS" not in os.environ


def _by_etcd(args: argparse.Namespace) -> Picture:
    with opened(args) as store:
        found = replace(look(store, args, forgiving=True), doubt=store.why_not())
    return replace(found, observed=observe(found, args))


def _by_daemon(args: argparse.Namespace) -> Picture:
    """Raises Exit: there is no daemon, it refuses, or is not one of the cluster."""
    seconds = args.timeout / 1e9
    address = args.address or os.environ.get("NSQHA_ADDRESS") or LOOKUPD_ADDRESS
    where = discover(address, seconds)
    what = "lookup daemon" if isinstance(where, LookupDaemon) else "broker"
    if not where.http:
        raise exits.Exit(exits.FAILED, f"{address} does not say where its HTTP port is: give that")
    found = cluster_of(where.http, seconds + DAEMON_SECONDS)
    if not found:
        raise exits.Exit(exits.NOT_FOUND, f"the {what} at {where.http} is not one of a cluster, or of an older build")
    try:
        page = decode(found)
    except LogCorrupt as error:
        raise exits.Exit(exits.FAILED, f"{where.http}: {error}") from None
    if args.cluster_name not in (USUAL_NAME, page.cluster):
        text = f"the {what} at {where.http} is of the cluster {page.cluster}, and not of {args.cluster_name}"
        raise exits.Exit(exits.NOT_FOUND, text)
    return Picture(
        page.cluster,
        page.cluster_id,
        f"seen by {where.http}",
        page.revision,
        page.topics,
        page.nodes,
        read_intents(page.intents or {}),
        page.controller,
        page.unreadable,
        f"{page.stale}; this is what the {what} last knew" if page.stale else page.doubt,
        bool(page.stale),
        page.observed,
    )
