"""A closed loop of an ordered topic: `python -m benchmarks.ordered`.

One connection with RDY 1 finishes each message as it comes; the next one is handed out when that FIN is committed, with
sync=always after a disk round.

How long a disk round takes is measured just before each run with always.

The client is plain Python and takes a share of what is shown.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from . import disk, servers

MESSAGES = 20_000
RUN = 1_000  # messages in an MPUB
SECONDS = 4.0
ROUNDS = 3
BODY = bytes(100)


def main() -> None:
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
        with socket.create_connection(server.tcp) as connection:
            return _consume(connection)


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
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    frames = connection.makefile("rb")
    connection.sendall(b"  V2SUB t c\nRDY 1\n")
    finished, began = 0, time.monotonic()
    while finished < MESSAGES and time.monotonic() < began + SECONDS:
        (size,) = struct.unpack(">I", frames.read(4))
        frame = frames.read(size)
        if frame[:4] == b"\0\0\0\2":
            connection.sendall(b"FIN " + frame[14:30] + b"\n")
            finished += 1
        elif frame[4:] == b"_heartbeat_":
            connection.sendall(b"NOP\n")
    return finished / (time.monotonic() - began)


if __name__ == "__main__":
    main()
