"""The cluster as etcd has it, or, when etcd does not answer, as a lookup daemon last knew it."""

from __future__ import annotations

import argparse
from typing import Any

from nsqha.cli.brokers.discovery import LookupDaemon, discover
from nsqha.cli.cluster import show
from nsqha.cli.cluster.access import Picture, look, opened
from nsqha.cli.cluster.rebuilding import progress
from nsqha.cli.terminal import exits
from nsqha.errors import Unavailable

LOOKUPD_SECONDS = 20.0  # for a lookup daemon to answer that waits for etcd itself


def picture(args: argparse.Namespace) -> Picture:
    with opened(args) as store:
        return look(store, args, forgiving=True)


def status_page(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The page of `cluster status`, and which etcd it is from. Unavailable: nobody answers."""
    try:
        with opened(args) as store:
            found = look(store, args, forgiving=True)
            doubt = store.why_not()
            rebuilding = progress(found, args)
    except Unavailable as error:
        try:
            known = _known_by_lookupd(args.address)
        except exits.Exit as refused:
            raise exits.Exit(exits.NOT_ALLOWED, f"{error}; and the lookup daemon refuses: {refused}") from None
        if known is None:
            raise
        return show.remembered(args.cluster_name, known, f"{error}; this is what the lookup daemon last knew"), "away"
    return show.status(found, doubt, rebuilding), found.etcd


def _known_by_lookupd(address: str) -> dict[str, Any] | None:
    """What a lookup daemon knows of the cluster; None: there is none at that address. Raises Exit: it wants a token."""
    try:
        found = discover(address, LOOKUPD_SECONDS)
        return found.cluster(LOOKUPD_SECONDS) if isinstance(found, LookupDaemon) else None
    except exits.Exit as error:
        if error.status == exits.NOT_ALLOWED:
            raise
        return None
