"""A cluster on this machine: an etcd, a lookup daemon and some brokers, each a process of its own.

    start   etcd  ->  lookupd and brokers at once  ->  every node registered, serving and linked to the controller
    run     a process that dies stays down and its start command is printed; with --restart it is started again
    stop    broker after broker  ->  lookupd  ->  etcd, each with a deadline, then SIGKILL; a second signal kills all

With --json one line on stdout says where everything is, for scripts; remarks go to stderr. The folder is locked, so
that two such clusters do not share an etcd.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nsqha import __version__, hot
from nsqha.cli.dev.children import Child, stop
from nsqha.cli.dev.plan import (
    ETCD_PORT,
    LOOPBACK,
    OK_MEANS,
    PEER_PORT,
    PORTS,
    DevPlan,
    PortAllocator,
    command,
    make_plan,
)
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.screen import print_json, say
from nsqha.election.etcd.binary import find_etcd

START_SECONDS = 60.0
LOOK_SECONDS = 0.03  # between two checks whether something serves
ANSWER_SECONDS = 1.0
ANSWER_BYTES_MAX = 1 << 20
BROKERS_STOP_SECONDS = 15.0  # for all of them, but each gets at least
BROKER_STOP_SECONDS_MIN = 1.0
OTHERS_STOP_SECONDS = 5.0
RESTART_SECONDS = (0.5, 10.0)  # first and longest back-off before a restart
LINES_MAX = 16
ETCD_ENDPOINT = f"{LOOPBACK}:{ETCD_PORT}"  # the default of the cluster verbs


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    folder = Path(os.path.abspath(args.data_dir))
    program = find_etcd()
    with locked(folder):
        ports = PortAllocator()
        wanted = {name: getattr(args, f"{name.replace('-', '_')}_port") for name in PORTS}
        wanted["etcd"] = ETCD_PORT if args.etcd_port is None else args.etcd_port
        wanted["peer"] = PEER_PORT if args.peer_port is None else args.peer_port
        plan = make_plan(folder, nodes=args.nodes, wanted=wanted, sync=args.sync, etcd=program, ports=ports)
        return asyncio.run(DevCluster(plan, args, ports).serve())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder if necessary, and lock it for this process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "dev.lock").open("ab")
    except OSError as error:
        raise exits.Exit(exits.FAILED, f"cannot start: {error.filename}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise exits.Exit(
                exits.FAILED, f"another `nsqha dev` runs in {folder}; stop it, or choose another --data-dir"
            ) from None
        yield


class DevCluster:
    """All processes of one cluster."""

    def __init__(self, plan: DevPlan, args: argparse.Namespace, ports: PortAllocator) -> None:
        self.plan = plan
        self.args = args
        self.ports = ports
        self.etcd = self._child("etcd", plan.etcd.argv)
        self.lookupd = self._child("lookupd", plan.lookupd.argv)
        self.brokers = [self._child(node.name, node.argv) for node in plan.nodes]
        self._signals = 0
        self._stop_asked = asyncio.Event()

    @property
    def children(self) -> list[Child]:
        return [self.etcd, self.lookupd, *self.brokers]

    async def serve(self) -> int:
        """Serve; returns 0 after a signal. Raises Exit if something did not start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGCHLD, self._on_child)
        minders: list[asyncio.Task[None]] = []  # these tasks need no group: they end in this method
        stop = asyncio.ensure_future(self._stop_asked.wait())
        try:
            starting = asyncio.ensure_future(self._start())
            await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return exits.OK
            await starting
            self.ports.release()
            minders = [asyncio.ensure_future(self._mind(child)) for child in self.children]
            if self.args.json:
                print_json(description(self))
            else:
                print("\n".join(summary(self)), flush=True)
            await stop
        finally:
            for task in (stop, *minders):
                task.cancel()
            await self._stop()
        return exits.OK

    async def _stop(self) -> None:
        """Stop one broker after the other: so each can hand over its leaderships, which is ten times as fast."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BROKERS_STOP_SECONDS
        for broker in self.brokers:
            await stop([broker], seconds=max(BROKER_STOP_SECONDS_MIN, deadline - loop.time()))
        await stop([self.lookupd], seconds=OTHERS_STOP_SECONDS)
        await stop([self.etcd], seconds=OTHERS_STOP_SECONDS)

    # ---- start

    async def _start(self) -> None:
        try:
            self.etcd.start()
            await self._until(self._etcd_serves, [self.etcd], "etcd does not answer")
            for child in (self.lookupd, *self.brokers):
                child.start()
            await self._until(self._all_serve, self.children, "not every node is in the cluster")
        except OSError as error:
            raise exits.Exit(exits.FAILED, f"cannot start: {error.filename}: {error.strerror}") from None

    async def _until(self, check: Callable[[], Any], children: Sequence[Child], what: str) -> None:
        """Wait until `check` is true. Raises Exit if one of `children` ends or it takes too long."""
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while not await check():
            for child in children:
                if not child.alive:
                    raise exits.Exit(
                        exits.FAILED, f"cannot start: {child.name} {child.how_it_ended()}; see {child.log}"
                    )
            if asyncio.get_running_loop().time() > deadline:
                logs = self.plan.folder / "*.log"
                raise exits.Exit(exits.FAILED, f"cannot start: {what} after {START_SECONDS:g} s; see {logs}")
            await asyncio.sleep(LOOK_SECONDS)

    async def _etcd_serves(self) -> bool:
        return b'"true"' in await fetch(self.plan.etcd.endpoint, "/health")

    async def _all_serve(self) -> bool:
        """Whether every node is registered and serves, and the controller has a stream to each: then it can place
        and elect."""
        if not all([await fetch(node.http, "/ping") == b"OK" for node in self.plan.nodes]):
            return False
        return all_joined(await fetch(self.plan.lookupd.http, "/controller"), [node.name for node in self.plan.nodes])

    # ---- run

    async def _mind(self, child: Child) -> None:
        """Report when the child dies, and start it again with --restart."""
        shortest, longest = RESTART_SECONDS
        pause = shortest
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            await child.ended()
            if not self.args.restart:
                ended = f"{child.name} (pid {child.pid}) {child.how_it_ended()}"
                say(f"{ended}; it stays down. To start it again (and stop it yourself):")
                say(f"  {shlex.join(child.argv)}")
                return
            pause = shortest if loop.time() - started > longest else min(2 * pause, longest)
            say(f"{child.name} (pid {child.pid}) {child.how_it_ended()}; it will be started again in {pause:g} s")
            await asyncio.sleep(pause)
            child.start()
            say(f"{child.name} was started again, pid {child.pid}")

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop_asked.set()
        if self._signals > 1:
            for child in self.children:
                child.send(signal.SIGKILL)

    def _on_child(self) -> None:
        for child in self.children:
            child.reap()

    def _child(self, name: str, argv: Sequence[str]) -> Child:
        return Child(name, argv, self.plan.log(name))


def all_joined(answer: bytes, names: Sequence[str]) -> bool:
    """Whether the controller's page shows all these nodes, and streams to each of them."""
    try:
        found = json.loads(answer)
        uids = {str(node["uid"]) for node in found["nodes"] if node["name"] in names}
        return bool(found["here"]) and len(uids) == len(names) and uids <= set(found["links"])
    except (ValueError, KeyError, TypeError):
        return False


async def fetch(address: str, path: str) -> bytes:
    """The body of a page; empty if there is none. It raises no error: the caller asks again."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, int(port), limit=ANSWER_BYTES_MAX)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                head, _, body = (await reader.read(ANSWER_BYTES_MAX)).partition(b"\r\n\r\n")
                while more := await reader.read(ANSWER_BYTES_MAX):
                    body += more
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
    return body if b" 200 " in head.partition(b"\r\n")[0] + b" " else b""


def description(cluster: DevCluster) -> dict[str, Any]:
    """The JSON for scripts: addresses, process ids, and the command that starts a node again."""
    plan = cluster.plan
    return {
        "nodes": [
            {
                "pid": child.pid,
                "tcp": node.tcp,
                "http": node.http,
                "grpc": node.grpc,
                "segments": node.segments,
                "data": str(node.data),
                "start": list(node.argv),
            }
            for node, child in zip(plan.nodes, cluster.brokers, strict=True)
        ],
        "lookupd": [{"pid": cluster.lookupd.pid, "tcp": plan.lookupd.tcp, "http": plan.lookupd.http}],
        "etcd": {"pid": cluster.etcd.pid, "endpoint": plan.etcd.endpoint},
    }


def summary(cluster: DevCluster) -> list[str]:
    """The first screen: at most LINES_MAX lines."""
    plan, (first, second, *_) = cluster.plan, cluster.plan.nodes
    speed = "compiled" if hot.ACTIVE == "compiled" else "pure Python (no compiler was found: slower)"
    free = shutil.disk_usage(plan.folder).free / 1e9
    notes = [f"  note     {note}" for note in plan.notes]
    nodes = [
        f"  {node.name:8} tcp {node.tcp}   http http://{node.http}   grpc {node.grpc}   pid {child.pid}"
        for node, child in zip(plan.nodes, cluster.brokers, strict=True)
    ]
    etcd = "" if plan.etcd.endpoint == ETCD_ENDPOINT else f" --etcd-endpoint {plan.etcd.endpoint}"
    fixed = 9 + len(notes)
    if len(nodes) > LINES_MAX - fixed:
        room = LINES_MAX - fixed - 1
        nodes = [*nodes[:room], f"  ...      {len(nodes) - room} more: {command()} cluster nodes{etcd}"]
    return [
        f"nsqha {__version__} serves a cluster of {len(plan.nodes)} nodes · hot functions: {speed}",
        *nodes,
        f"  lookupd  tcp {plan.lookupd.tcp}   http http://{plan.lookupd.http}   etcd {plan.etcd.endpoint}",
        f"  data     {plan.folder} ({free:.0f} GB free), logs {plan.folder.name}/*.log",
        f"  OK means {OK_MEANS[cluster.args.sync]}, on every in-sync replica",
        *notes,
        "try, in another terminal:",
        f"  curl -d 'hello' 'http://{first.http}/pub?topic=orders'",
        f"  {command()} cluster status{etcd}",
        f"  kill -9 {cluster.brokers[0].pid}; {command()} sub --nsqd-tcp-address {second.tcp} orders billing",
        "Ctrl-C stops; data is kept.",
    ]
