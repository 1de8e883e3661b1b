"""What a message costs NATS JetStream, and what it costs us, on this machine and in this minute.

    python -m benchmarks.jetstream                   one server and three, three rounds; needs go, about five minutes
    python -m benchmarks.jetstream --sync always     on disk before the ack, in both

A `nats-server` that is on PATH is measured; without one, go builds version 2.15.2 for the run. Its streams are kept in
files, with as many replicas as there are servers; clients talk to the first server. CPU is the run time of all servers
of a side. Ours goes on until they are quiet again (`place.Meter`), theirs ends with the window: what they do late is
free. Both publish 100 bytes, both consumers acknowledge each message; ours sends its FINs in bulk, as theirs its acks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.figures import Cell, Spread
from benchmarks.place import QUICK
from benchmarks.procstat import ProcessTree
from benchmarks.runner import Plan, run, say, temporary_workspace
from benchmarks.servers import our_broker, our_cluster
from benchmarks.workloads import WORKLOADS

SERVER = "github.com/nats-io/nats-server/v2@v2.15.2"
CLIENT = Path(__file__).parent / "client"
READY_S = 30.0
CELL_S = 120.0


@dataclass(frozen=True)
class Row:
    """A row of ours, and the flags that make the client do the same."""

    workload: str
    flags: tuple[str, ...]


ROWS = (
    Row("pub-pipelined-100", ("-work=pipelined", "-connections=4", "-outstanding=200")),
    Row("pub-16x1", ("-work=waiting", "-connections=16", "-outstanding=1")),
    Row("pub-1x1", ("-work=waiting", "-connections=1", "-outstanding=1")),
    Row("consume", ("-work=consume", "-connections=4", "-outstanding=2500")),
)


@dataclass(frozen=True)
class Tools:
    server: str
    client: str


def tools(directory: Path) -> Tools:
    """The server, and the client built from its source here."""
    go = shutil.which("go")
    if go is None:
        raise SystemExit("benchmarks.jetstream: its client is a Go program, and no go is on PATH: install Go 1.26")
    subprocess.run([go, "build", "-o", str(directory / "client"), "."], cwd=CLIENT, check=True)
    server = shutil.which("nats-server")
    if server is None:
        environment = os.environ | {"GOBIN": str(directory)}
        subprocess.run([go, "install", SERVER], env=environment, check=True)
        server = str(directory / "nats-server")
    return Tools(server, str(directory / "client"))


@contextmanager
def servers(binary: str, directory: Path, replicas: int, sync: str) -> Iterator[tuple[list[str], ProcessTree]]:
    """So many servers on empty directories: their addresses and processes."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    clients, routes = free_addresses(replicas), free_addresses(replicas)
    processes = []
    try:
        for n, address in enumerate(clients):
            configuration = directory / f"{n}.conf"
            configuration.write_text(configured(n, address, directory / str(n), routes, sync))
            log = (directory / f"{n}.log").open("wb")
            processes.append(subprocess.Popen([binary, "-c", str(configuration)], stdout=log, stderr=log))
            log.close()
        for address in clients:
            wait_for(address)
        yield clients, ProcessTree([process.pid for process in processes])
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def configured(n: int, address: str, store: Path, routes: Sequence[str], sync: str) -> str:
    """The configuration of server `n` of as many as there are routes."""
    always = ", sync_interval: always" if sync == "always" else ""
    lines = [f"server_name: n{n}", f"listen: {address}", f'jetstream {{ store_dir: "{store}"{always} }}']
    if len(routes) > 1:
        others = ", ".join(f"nats://{route}" for route in routes)
        lines.append(f"cluster {{ name: bench, listen: {routes[n]}, routes: [{others}] }}")
    return "\n".join(lines) + "\n"


def free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def wait_for(address: str) -> None:
    host, port = address.split(":")
    deadline = time.monotonic() + READY_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise SystemExit(f"benchmarks.jetstream: nats-server does not answer at {address}") from None
            time.sleep(0.05)


def theirs(made: Tools, row: Row, replicas: int, sync: str, directory: Path, number: int) -> Cell:
    """One cell of JetStream."""
    cell = Cell(row.workload, f"JetStream {replicas}", number)
    with servers(made.server, directory, replicas, sync) as (addresses, tree):
        command = [made.client, *row.flags, f"-replicas={replicas}", "-addresses=" + ",".join(addresses)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None and client.stderr is not None
            begun = cpu = 0.0
            for line in client.stdout:
                word, _, value = line.strip().partition(" ")
                if word == "begin":
                    begun, cpu = time.perf_counter(), tree.cpu_ns()
                elif word == "end":
                    cell.figures["cpu_us"] = (tree.cpu_ns() - cpu) / 1e3 / int(value)
                    cell.figures["rate_per_s"] = int(value) / (time.perf_counter() - begun)
            if client.wait(CELL_S) or not cell.figures:
                cell.failure = client.stderr.read().strip()
    return cell


def ours(row: Row, replicas: int, sync: str, workspace: Path, number: int) -> Cell:
    """One cell of ours, as `python -m benchmarks --quick` measures it."""
    subject = our_broker("compiled") if replicas == 1 else our_cluster(replicas)
    workload = next(each for each in WORKLOADS if each.name == row.workload)
    plan = Plan([subject], [workload], QUICK, sync, rounds=1)
    (cell,) = run(plan, workspace, lambda position, of, cell: None)
    cell.round, cell.subject = number, f"nsqha {replicas}"
    return cell


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """A line for each row and number of replicas: medians with their ranges, and how many times ours theirs costs."""
    sides_head = f"{'nsqha us/msg':20} {'per s':>9}  {'JetStream us/msg':20} {'per s':>9}"
    yield f"{'row':18} {'replicas':8}  {sides_head}  CPU ratio"
    for row, replicas in dict.fromkeys((cell.workload, cell.subject.split()[-1]) for cell in cells):
        sides = []
        for name in ("nsqha", "JetStream"):
            same = [c for c in cells if (c.workload, c.subject) == (row, f"{name} {replicas}") and not c.failure]
            if not same:
                break
            sides.append([Spread.of([cell.figures[key] for cell in same]) for key in ("cpu_us", "rate_per_s")])
        if len(sides) == 2:
            (cpu, rate), (their_cpu, their_rate) = sides
            texts = [f"{s.median:.2f} ({s.low:.2f}-{s.high:.2f})" for s in (cpu, their_cpu)]
            yield (
                f"{row:18} {replicas:8}  {texts[0]:20} {rate.median:>9,.0f}  {texts[1]:20} {their_rate.median:>9,.0f}"
                f"  {their_cpu.median / cpu.median:.1f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jetstream", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", default="1,3", help="how many servers: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--sync", choices=("interval", "always"), default="interval", help="%(default)s")
    parser.add_argument("-k", metavar="ROWS", default="", help="only rows whose name holds one of these words")
    args = parser.parse_args()
    words = args.k.split(",")
    rows = [row for row in ROWS if any(word in row.workload for word in words)]
    cells = []
    with temporary_workspace(None) as workspace:
        made = tools(workspace)
        for replicas in map(int, args.replicas.split(",")):
            for row in rows:
                for number in range(args.rounds):
                    sides = [
                        partial(ours, row, replicas, args.sync, workspace, number),
                        partial(theirs, made, row, replicas, args.sync, workspace / "nats", number),
                    ]
                    for side in sides if number % 2 == 0 else reversed(sides):
                        cell = side()
                        cells.append(cell)
                        said = cell.failure or f"{cell.figures['cpu_us']:.2f} us  {cell.figures['rate_per_s']:,.0f}/s"
                        say(f"{cell.workload} {cell.subject}: {said}")
    print("\n".join(table(cells)))
    return 2 if any(cell.failure for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
