"""The longest turn of the broker's loop while a policy or an operator settles a million messages:

    python -m benchmarks.turns [ROW ..]

    time-out    a million messages in flight time out within a moment; retry 1s, max_attempts 5
    skip, max_depth, ttl
                a million unread messages are passed over, with no consumer connected
    requeue, purge
                an operator selects a million dead letters with `nsqha dead requeue|purge --all`

The broker runs in a process of its own, with a timer in its loop that is due each millisecond and notes how much CPU
the loop's thread has used since it last was: what a turn took of it, whatever else the machine does. Wall time is
shown beside it.
"""

from __future__ import annotations

import json
import mmap
import os
import shlex
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import client, servers
from .build import build

MESSAGES = 1_000_000
ROUNDS = 2
TICK_S = 0.001
TIMEOUT_MS = 5_000
SETTLED_S = 60.0
WATCHED = "NSQHA_BENCH_TURNS"  # the file in which a watched broker notes its longest turn
_LONGEST = struct.Struct("dd")  # CPU, wall; seconds


@dataclass(frozen=True)
class Row:
    """What is asked of the channel, and in which state its messages are."""

    name: str
    policy: str
    in_flight: bool = False
    dead: bool = False  # the verb of this name is used on all of them


ROWS = (
    Row("time-out", '{"retry_ms": 1000, "max_attempts": 5}', in_flight=True),
    Row("skip", '{"skip": true}'),
    Row("max_depth", '{"max_depth": 1}'),
    Row("ttl", '{"ttl_ms": 1000}'),
    Row("requeue", '{"max_attempts": 1, "dead_max": 1000000}', dead=True),
    Row("purge", '{"max_attempts": 1, "dead_max": 1000000}', dead=True),
)


def main(words: Sequence[str]) -> int:
    build()
    servers.compile_modules()
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            if not words or row.name in words:
                turns = [_measured(row, Path(folder)) for _ in range(ROUNDS)]
                shown = ", ".join(f"{cpu * 1e3:.0f} ms CPU ({wall * 1e3:.0f} ms)" for cpu, wall in turns)
                print(f"{row.name:10} longest turn {shown}", flush=True)
    return 0


def _measured(row: Row, folder: Path) -> tuple[float, float]:
    from .place import CHANNEL, FULL, TOPIC, Place, fill, payload, set_policy, wait_quiet

    noted = folder / "longest"
    noted.write_bytes(bytes(_LONGEST.size))
    command = f"{shlex.quote(sys.executable)} -m benchmarks.turns --serve {servers.NSQD_FLAGS} --sync={{sync}}"
    subject = servers.Subject("compiled", command, environment={WATCHED: str(noted)})
    flags = [f"--max-rdy-count={MESSAGES}"]
    with servers.fresh_server(subject, folder, sync="interval", flags=flags) as server:
        client.subscribe(client.open_connection(server.tcp), TOPIC, CHANNEL).close()
        if row.in_flight or row.dead:
            set_policy(server, row.policy)
        stored = fill(Place(server, FULL, folder), payload(100), MESSAGES)
        wait_quiet(server)
        holding = _take_all(server, stored) if row.in_flight else None
        if row.dead:
            _let_die(server, stored)
        wait_quiet(server)
        with noted.open("r+b") as file, mmap.mmap(file.fileno(), 0) as longest:
            longest[:] = bytes(_LONGEST.size)
            if row.dead:
                _ask(server, row.name, stored)
            else:
                if holding is None:
                    set_policy(server, row.policy)
                _wait_settled(server, row, stored)
            cpu, wall = _LONGEST.unpack(longest[:])
        if holding is not None:
            holding.close()
        return cpu, wall


def _take_all(server: servers.Server, count: int) -> Any:
    from .loadgen import Engine
    from .place import CHANNEL, TOPIC, WrongResult

    engine = Engine()
    for _ in range(4):
        sock = client.open_connection(server.tcp, {**client.QUIET, "msg_timeout": TIMEOUT_MS})
        engine.add_consumer(client.subscribe(sock, TOPIC, CHANNEL), holds=True)
    engine.ready(-(-count // 4))
    engine.run(TIMEOUT_MS / 2000, received=count)
    if engine.received < count:
        raise WrongResult(f"only {engine.received} of {count} messages were handed out in time")
    engine.ready(0)
    engine.run(0.05)
    return engine


def _let_die(server: servers.Server, count: int) -> None:
    from .loadgen import Engine
    from .place import CHANNEL, TOPIC

    engine = Engine()
    for _ in range(4):
        engine.add_consumer(client.subscribe(client.open_connection(server.tcp), TOPIC, CHANNEL), req_every=1)
    engine.ready(2500)
    engine.run(SETTLED_S, received=count)
    engine.run(2.0)
    engine.close()
    _wait(lambda: _total(server, "nsqha_channel_dead") >= count, f"all {count} are dead letters")


def _ask(server: servers.Server, verb: str, count: int) -> None:
    """Have an operator do it to all of them; as many are told to be done."""
    from .place import CHANNEL, TOPIC, WrongResult, wait_quiet

    command = [str(Path(sys.executable).with_name("nsqha")), "dead", verb, TOPIC, CHANNEL, "--all", "--yes", "--json"]
    command += ["--grpc-address", server.grpc, "--timeout", f"{SETTLED_S:.0f}s"]
    begun = time.monotonic()
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["messages"]
    print(f"{verb:10} {done} in {time.monotonic() - begun:.1f} s", flush=True)
    if done != count:
        raise WrongResult(f"{verb}: {done} of {count} were done")
    wait_quiet(server, at_most_s=20.0)


def _total(server: servers.Server, family: str) -> float:
    lines = [line for line in server.get("/metrics").decode().splitlines() if line.startswith(family + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _wait(condition: Callable[[], bool], what: str) -> None:
    from .place import WrongResult

    until = time.monotonic() + SETTLED_S
    while not condition():
        if time.monotonic() > until:
            raise WrongResult(f"not after {SETTLED_S:.0f} s: {what}")
        time.sleep(1.0)


def _wait_settled(server: servers.Server, row: Row, count: int) -> None:
    """Until all timed out and are in the log as deferred, or none is unread."""
    from .lifecycle import depth
    from .place import wait_quiet

    def settled() -> bool:
        return _total(server, "nsqha_channel_timed_out_total") >= count if row.in_flight else depth(server) <= 1

    _wait(settled, f"{row.name} has settled all")
    wait_quiet(server, at_most_s=20.0)


# ---- in the process of the broker


def _serve(arguments: Sequence[str]) -> int:
    """`nsqd`, watched."""
    import uvloop

    from nsqha.cli.nsqd import main as nsqd

    made, run = uvloop.new_event_loop, uvloop.run
    file = os.open(os.environ[WATCHED], os.O_RDWR)
    longest = mmap.mmap(file, _LONGEST.size)

    def watched() -> Any:
        loop = made()
        before = [time.thread_time(), time.monotonic()]

        def tick() -> None:
            cpu, wall = time.thread_time() - before[0], time.monotonic() - before[1]
            most_cpu, most_wall = _LONGEST.unpack(longest[:])
            if cpu > most_cpu or wall > most_wall:
                longest[:] = _LONGEST.pack(max(cpu, most_cpu), max(wall, most_wall))
            before[:] = time.thread_time(), time.monotonic()
            loop.call_later(TICK_S, tick)

        loop.call_soon(tick)
        return loop

    uvloop.run = partial(run, loop_factory=watched)
    sys.argv = ["nsqd", *arguments]
    return nsqd()


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[2:]) if sys.argv[1:2] == ["--serve"] else main(sys.argv[1:]))
