"""A broker and a lookup daemon in one process without configuration.

They use NSQ's own ports, so that every NSQ tutorial works; a port in use is replaced by a free one, with a note. Data
stays in the folder. With --json one line on stdout says where everything is, for scripts; remarks go to stderr.

One difference to a broker started as `nsqd`: everything listens on the loopback address only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
from typing import Any

import uvloop

from lookupd.daemon import Lookupd
from nsqha import __version__, hot, nsqlog
from nsqha.cli.dev.plan import LOOPBACK, OK_MEANS, PORTS, command, is_free
from nsqha.cli.nsqd import open_grpc
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import GRPC_ADDRESS, TCP_ADDRESS
from nsqha.cli.terminal.screen import print_json
from nsqha.options import LookupdOptions, load_nsqd
from nsqha.server.node.start import Node
from nsqha.server.runtime.tasks import first_done


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    nsqlog.configure(prefix="[nsqha] ", level="warn")
    return uvloop.run(serve(args))


async def serve(args: argparse.Namespace) -> int:
    """Serve; returns 0 after a signal, 1 if the disk failed."""
    ports, taken = choose_ports(args)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    lookupd = Lookupd(
        LookupdOptions(
            tcp_address=f"{LOOPBACK}:{ports['lookupd-tcp']}",
            http_address=f"{LOOPBACK}:{ports['lookupd-http']}",
            broadcast_address=LOOPBACK,
        )
    )
    await lookupd.start()
    try:
        node = Node(options_of(args, ports, lookupd.tcp_address), open_grpc)
        try:
            await node.start()
        except OSError as error:
            if error.filename is None:
                raise
            raise exits.Exit(exits.FAILED, f"cannot start: {error.filename}: {error.strerror}") from None
        try:
            if args.json:
                print_json(description(node, lookupd, args))
            else:
                print("\n".join(summary(node, lookupd, args.sync, taken)), flush=True)
            assert node.failed is not None
            await first_done(stop.wait(), node.failed)
        finally:
            await node.stop()
    finally:
        await lookupd.stop()
    return 1 if node.failed.done() else 0


def options_of(args: argparse.Namespace, ports: dict[str, int], lookupd_tcp_address: str) -> Any:
    """The broker's options, made by `nsqd`'s own flags."""
    flags = [
        f"--tcp-address={LOOPBACK}:{ports['tcp']}",
        f"--http-address={LOOPBACK}:{ports['http']}",
        f"--grpc-address={LOOPBACK}:{ports['grpc']}",
        f"--segments-address={LOOPBACK}:{ports['segments']}",
        f"--broadcast-address={LOOPBACK}",
        f"--lookupd-tcp-address={lookupd_tcp_address}",
        f"--data-path={os.path.abspath(args.data_dir)}",
        f"--sync={args.sync}",
    ]
    return load_nsqd(flags, {}).options


def choose_ports(args: argparse.Namespace) -> tuple[dict[str, int], list[str]]:
    """Return the wanted ports, 0 for those in use; and the ports in use."""
    chosen: dict[str, int] = {}
    taken = []
    for name in PORTS:
        wanted = getattr(args, f"{name.replace('-', '_')}_port")
        if wanted and not is_free(wanted):
            taken.append(f"{wanted} ({name})")
            wanted = 0
        chosen[name] = wanted
    return chosen, taken


def description(node: Node, lookupd: Lookupd, args: argparse.Namespace) -> dict[str, Any]:
    """The JSON for scripts: addresses, process ids, and the command that starts a node again."""
    addresses = node.addresses
    start = [sys.executable, "-m", "nsqha", "dev", "--json", "--data-dir", node.options.data_path, "--sync", args.sync]
    for name, address in (
        ("tcp", addresses.tcp),
        ("http", addresses.http),
        ("grpc", addresses.grpc),
        ("segments", addresses.segments),
        ("lookupd-tcp", lookupd.tcp_address),
        ("lookupd-http", lookupd.http_address),
    ):
        start += [f"--{name}-port", address.rpartition(":")[2]]
    return {
        "nodes": [
            {
                "pid": os.getpid(),
                "tcp": addresses.tcp,
                "http": addresses.http,
                "grpc": addresses.grpc,
                "segments": addresses.segments,
                "data": node.options.data_path,
                "start": start,
            }
        ],
        "lookupd": [{"pid": os.getpid(), "tcp": lookupd.tcp_address, "http": lookupd.http_address}],
    }


def summary(node: Node, lookupd: Lookupd, sync: str, taken: list[str]) -> list[str]:
    """The first screen: at most 12 lines."""
    addresses = node.addresses
    free = shutil.disk_usage(node.options.data_path).free / 1e9
    speed = "compiled" if hot.ACTIVE == "compiled" else "pure Python (no compiler was found: slower)"
    tcp = "" if addresses.tcp == TCP_ADDRESS else f"--nsqd-tcp-address {addresses.tcp} "
    grpc = "" if addresses.grpc == GRPC_ADDRESS else f"--grpc-address {addresses.grpc} "
    replaced = f"ports in use, replaced by free ones: {', '.join(taken)}"
    return [
        f"nsqha {__version__} serves · hot functions: {speed}",
        f"  nsqd     tcp {addresses.tcp}   http http://{addresses.http}   grpc {addresses.grpc}   "
        f"segments {addresses.segments}",
        f"  lookupd  tcp {lookupd.tcp_address}   http http://{lookupd.http_address}",
        f"  data     {node.options.data_path} ({free:.0f} GB free)",
        f"  OK means {OK_MEANS[sync]}",
        *([f"  note     {replaced}"] if taken else []),
        "try, in another terminal:",
        f"  curl -d 'hello' 'http://{addresses.http}/pub?topic=orders'",
        f"  {command()} sub {tcp}orders billing",
        f"  {command()} seek {grpc}orders billing start",
        "Ctrl-C stops; data is kept.",
    ]
