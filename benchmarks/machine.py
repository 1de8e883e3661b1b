"""What this machine charges for the steps that bound a broker, beside the machine that the targets come from.

    python -m benchmarks.machine                about fifteen seconds; the factors say how to read a missed target

A target in microseconds is a statement about one machine. These are the four steps that figures were taken of there
with plain programs: a round trip over loopback between two processes (uvloop, then a gRPC stream, which is what
followers are reached by), an append to a file, and a checksum. CPU is that of both processes, so it holds on a machine
that is in use; round trips do not.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import uvloop

from benchmarks.procstat import ProcessTree

MESSAGE = b"m" * 1024
ANSWER = b"a" * 64
ROUNDS = 5
TRIPS = 1500  # per round
APPEND_BYTES = 134
CHECKSUM_BYTES = 27_000
METHOD = "/benchmarks.Machine/Echo"


@dataclass(frozen=True)
class Step:
    """One of the things measured, with what the machine of the targets took."""

    name: str
    unit: str
    there: float


TCP_CPU = Step("TCP round trip of 1 KiB, CPU of both sides", "us", 24)
TCP_TRIP = Step("TCP round trip of 1 KiB, p50", "us", 22)
GRPC_CPU = Step("gRPC stream round trip of 1 KiB, CPU of both sides", "us", 108)
GRPC_TRIP = Step("gRPC stream round trip of 1 KiB, p50", "us", 105)
APPEND = Step(f"append of {APPEND_BYTES} bytes to a file, CPU", "us", 2.2)
CHECKSUM = Step(f"zlib.crc32 of {CHECKSUM_BYTES} bytes, CPU", "us", 5.4)


# ---- the other side: answers each message with a short one


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._have = 0

    def data_received(self, data: bytes) -> None:
        whole, self._have = divmod(self._have + len(data), len(MESSAGE))
        if whole:
            self._transport.write(ANSWER * whole)


async def _serve_tcp() -> int:
    server = await asyncio.get_running_loop().create_server(_Echo, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _serve_grpc() -> int:
    import grpc

    async def echo(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(ANSWER)

    server = grpc.aio.server()
    service, method = METHOD[1:].split("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _kept.append(server)
    return port


_kept: list[Any] = []
_SERVERS: dict[str, Callable[[], Awaitable[int]]] = {"tcp": _serve_tcp, "grpc": _serve_grpc}


async def _serve(kind: str) -> None:
    print(await _SERVERS[kind](), flush=True)
    await asyncio.Event().wait()


@contextmanager
def _other_side(kind: str) -> Iterator[tuple[int, int]]:
    """Its pid and port."""
    command = [sys.executable, "-m", "benchmarks.machine", "--serve", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.terminate()


# ---- this side


class _Asker(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._have = 0

    def ask(self) -> asyncio.Future[None]:
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(MESSAGE)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._have += len(data)
        if self._have >= len(ANSWER):
            self._have -= len(ANSWER)
            self._answered.set_result(None)


async def _tcp_trips(port: int) -> Callable[[], Awaitable[None]]:
    _, asker = await asyncio.get_running_loop().create_connection(_Asker, "127.0.0.1", port)
    return asker.ask


async def _grpc_trips(port: int) -> Callable[[], Awaitable[None]]:
    import grpc

    call: Any = grpc.aio.insecure_channel(f"127.0.0.1:{port}").stream_stream(METHOD)()

    async def trip() -> None:
        await call.write(MESSAGE)
        await call.read()

    return trip


async def round_trips(kind: str, *, rounds: int = ROUNDS, trips: int = TRIPS) -> tuple[float, float]:
    """(CPU of both sides in us, median time in us) of a round trip over `tcp` or `grpc`: the best round."""
    with _other_side(kind) as (pid, port):
        trip = await (_tcp_trips if kind == "tcp" else _grpc_trips)(port)
        both = ProcessTree([os.getpid(), pid])
        for _ in range(trips // 5):
            await trip()
        figures = []
        for _ in range(rounds):
            spent = []
            cpu = both.cpu_ns()
            for _ in range(trips):
                begun = time.perf_counter()
                await trip()
                spent.append(time.perf_counter() - begun)
            figures.append(((both.cpu_ns() - cpu) / trips / 1e3, statistics.median(spent) * 1e6))
    return min(cpu for cpu, _ in figures), min(time for _, time in figures)


def _cpu_us(step: Callable[[], object], times: int) -> float:
    """CPU of one step in us: the best round."""
    rounds = []
    for _ in range(ROUNDS):
        cpu = time.thread_time_ns()
        for _ in range(times):
            step()
        rounds.append((time.thread_time_ns() - cpu) / times / 1e3)
    return min(rounds)


def measure(directory: str) -> dict[Step, float]:
    """All steps; files go to `directory`."""
    tcp_cpu, tcp_trip = uvloop.run(round_trips("tcp"))
    grpc_cpu, grpc_trip = uvloop.run(round_trips("grpc"))
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        descriptor, data = file.fileno(), b"x" * APPEND_BYTES
        append = _cpu_us(lambda: os.write(descriptor, data), 20_000)
    data = os.urandom(CHECKSUM_BYTES)
    checksum = _cpu_us(lambda: zlib.crc32(data), 5_000)
    return {
        TCP_CPU: tcp_cpu,
        TCP_TRIP: tcp_trip,
        GRPC_CPU: grpc_cpu,
        GRPC_TRIP: grpc_trip,
        APPEND: append,
        CHECKSUM: checksum,
    }


def main() -> None:
    width = max(len(step.name) for step in (TCP_CPU, TCP_TRIP, GRPC_CPU, GRPC_TRIP, APPEND, CHECKSUM))
    print(f"{'step':{width}}  {'here':>8}  {'there':>8}  factor   (load average {os.getloadavg()[0]:.1f})")
    for step, here in measure(".").items():
        print(f"{step.name:{width}}  {here:6.1f} {step.unit}  {step.there:6.1f} {step.unit}  {here / step.there:5.1f}x")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        uvloop.run(_serve(sys.argv[2]))
    else:
        main()
