"""A closed loop of an ordered topic: `python -m benchmarks.ordered`.

One connection with RDY 1 finishes each message as it comes; the next one is handed out when that FIN is committed, with
sync=always after a disk round.

How long a disk round takes is measured just before each run with always.

The client is the compiled one of the other rows.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from . import client, disk, servers
from .build import build

MESSAGES = 20_000
RUN = 1_000  # messages in an MPUB
SECONDS = 4.0
ROUNDS = 3
BODY = bytes(100)


def main() -> None:
    build()
    servers.compile_modules()
    with tempfile.TemporaryDirectory() as folder:
        rates = [_rate(Path(folder), "interval") for _ in range(ROUNDS)]
        print(f"interval  {_told(rates)}")
        rates, in_rounds = [], []
        for _ in range(ROUNDS):
            disk_round = disk.probe(Path(folder)).round_s
            rates.append(_rate(Path(folder), "always"))
            in_rounds.append(1 / rates[-1] / disk_round)
        spread = f"{median(in_rounds):.2f} disk rounds ({min(in_rounds):.2f}-{max(in_rounds):.2f})"
        print(f"always    {_told(rates)}, each in {spread}")


def _told(rates: Sequence[float]) -> str:
    return f"{median(rates):7,.0f} messages/s ({min(rates):,.0f}-{max(rates):,.0f})"


def _rate(folder: Path, sync: str) -> float:
    with servers.fresh_server(servers.our_broker("compiled"), folder, sync=sync) as server:
        create = ["-m", "nsqha", "topic", "create", "t", "--ordered", f"--grpc-address={server.grpc}"]
        subprocess.run([sys.executable, *create], check=True, stdout=subprocess.DEVNULL)
        with socket.create_connection(server.tcp) as connection:
            _publish(connection)
        return _consume(client.open_connection(server.tcp))


def _publish(connection: socket.socket) -> None:
    run = struct.pack(">I", RUN) + (struct.pack(">I", len(BODY)) + BODY) * RUN
    replies = connection.makefile("rb")
    connection.sendall(b"  V2")
    for _ in range(MESSAGES // RUN):
        connection.sendall(b"MPUB t\n" + struct.pack(">I", len(run)) + run)
        reply = replies.read(10)
        if reply[8:] != b"OK":
            raise RuntimeError(f"the broker refused an MPUB: {reply!r}")


def _consume(connection: socket.socket) -> float:
    from .loadgen import Engine

    engine = Engine()
    try:
        engine.add_consumer(client.subscribe(connection, "t", "c"))
        engine.expect(BODY)
        engine.ready(1)
        seconds = engine.run(SECONDS, received=MESSAGES)
        return engine.received / seconds
    finally:
        engine.close()


if __name__ == "__main__":
    main()
