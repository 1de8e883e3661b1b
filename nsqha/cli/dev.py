"""`nsqha dev`: a broker and a lookup daemon in one process, nothing to configure.

NSQ's own ports, so that every NSQ tutorial works; one that is taken is replaced by a free one, and that is said. Data
stays in the folder. With --json one line on stdout says where everything is, for scripts; talk goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsqha.server.node import Node

LOOPBACK = "127.0.0.1"
PORTS = {"tcp": 4150, "http": 4151, "lookupd-tcp": 4160, "lookupd-http": 4161, "grpc": 4152}

OK_MEANS = {
    "always": "on disk: written and fdatasync'ed before OK (group commit)",
    "interval": "written to the OS before OK; fsync every 2,500 messages or 2 s",
    "none": "written to the OS before OK; fsync left to the OS",
}


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "dev",
        help="run a broker and a lookup daemon on this machine, nothing to configure",
        description="Run a broker and a lookup daemon in one process. Ctrl-C stops them; data is kept.",
        epilog="examples:\n  nsqha dev\n  nsqha dev --data-dir /tmp/try --sync interval\n  nsqha dev --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data-dir", default="data", help="folder of everything stored (default: ./data)")
    parser.add_argument("--sync", choices=("always", "interval", "none"), default="always", help="what OK means")
    parser.add_argument("--json", action="store_true", help="print one line of JSON once it serves, and nothing else")
    for name, port in PORTS.items():
        parser.add_argument(f"--{name}-port", type=int, default=port, help=f"default {port}; 0: any free one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    import uvloop

    from nsqha import nsqlog

    nsqlog.configure(prefix="[nsqha] ", level="warn")
    return uvloop.run(serve(args))


def choose_ports(args: argparse.Namespace) -> tuple[dict[str, int], list[str]]:
    """The wished ports, or free ones where they are taken; and what to say about that."""
    chosen: dict[str, int] = {}
    notes = []
    for name in PORTS:
        wanted = getattr(args, f"{name.replace('-', '_')}_port")
        if wanted and not is_free(wanted):
            notes.append(f"port {wanted} is taken: {name} uses another one")
            wanted = 0
        chosen[name] = wanted
    return chosen, notes


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


async def serve(args: argparse.Namespace) -> int:
    from lookupd.daemon import Lookupd
    from nsqha.options import LookupdOptions, load_nsqd
    from nsqha.server.node import Node

    ports, notes = choose_ports(args)
    lookupd = Lookupd(
        LookupdOptions(
            tcp_address=f"{LOOPBACK}:{ports['lookupd-tcp']}",
            http_address=f"{LOOPBACK}:{ports['lookupd-http']}",
            broadcast_address=LOOPBACK,
        )
    )
    await lookupd.start()
    data_dir = os.path.abspath(args.data_dir)
    options = load_nsqd(
        [
            f"--tcp-address={LOOPBACK}:{ports['tcp']}",
            f"--http-address={LOOPBACK}:{ports['http']}",
            f"--grpc-address={LOOPBACK}:{ports['grpc']}",
            f"--broadcast-address={LOOPBACK}",
            f"--lookupd-tcp-address={lookupd.tcp_address}",
            f"--data-path={data_dir}",
            f"--sync={args.sync}",
        ],
        {},
    ).options
    node = Node(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        await node.start()
        if args.json:
            print(json.dumps(description(node, lookupd, args)), flush=True)
        else:
            for line in summary(node, lookupd, args.sync, notes):
                print(line, flush=True)
        assert node.failed is not None
        stopping = loop.create_task(stop.wait())
        await asyncio.wait((stopping, node.failed), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
    finally:
        await node.stop()
        await lookupd.stop()
    return 1 if node.failed.done() else 0


def description(node: Node, lookupd: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What scripts get: addresses, process ids, and the command that starts a node again."""
    addresses = node.addresses
    start = [sys.executable, "-m", "nsqha", "dev", "--json", "--data-dir", node.options.data_path, "--sync", args.sync]
    for name, address in (
        ("tcp", addresses.tcp),
        ("http", addresses.http),
        ("grpc", addresses.grpc),
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
                "data": node.options.data_path,
                "start": start,
            }
        ],
        "lookupd": [{"pid": os.getpid(), "tcp": lookupd.tcp_address, "http": lookupd.http_address}],
    }


def summary(node: Node, lookupd: Any, sync: str, notes: list[str]) -> list[str]:
    """The first screen: at most 12 lines."""
    from nsqha import __version__, hot

    addresses = node.addresses
    free = shutil.disk_usage(node.options.data_path).free / 1e9
    speed = "compiled" if hot.ACTIVE == "compiled" else "pure Python (no compiler was found: slower)"
    tcp = f"--nsqd-tcp-address {addresses.tcp} " if not addresses.tcp.endswith(":4150") else ""
    return [
        f"nsqha {__version__} serves · hot functions: {speed}",
        f"  nsqd     tcp {addresses.tcp}   http http://{addresses.http}   grpc {addresses.grpc}",
        f"  lookupd  tcp {lookupd.tcp_address}   http http://{lookupd.http_address}",
        f"  data     {node.options.data_path} ({free:.0f} GB free)",
        f"  OK means {OK_MEANS[sync]}",
        *(f"  note     {note}" for note in notes[:2]),
        "try, in another terminal:",
        f"  curl -d 'hello' 'http://{addresses.http}/pub?topic=orders'",
        f"  {command()} sub {tcp}orders billing",
        f"  {command()} seek {grpc_flag(addresses.grpc)}orders billing start",
        "Ctrl-C stops; data is kept.",
    ]


def command() -> str:
    """How this program is called from a shell in the same folder."""
    path = os.path.relpath(sys.argv[0])
    return path if os.path.basename(path) == "nsqha" and not path.startswith("..") else "nsqha"


def grpc_flag(address: str) -> str:
    return "" if address.endswith(f":{PORTS['grpc']}") else f"--grpc-address {address} "
