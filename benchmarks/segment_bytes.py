"""What reading stored segments costs, in CPU of reader and broker, and what publishers notice of it.

    python -m benchmarks.segment_bytes [--mb 800] [--rounds 3] [-k fetch,publish,full] [--tls no]

    fetch      one process reads everything once: cached, not cached, by TLS; CPU-s per GB of frames, MB/s
    publish    5,000 PUB of 600 bytes a second: p50 and p99 of the answer, alone, with two readers at 300 MB/s in all of
               another broker, and of this one: the difference of these two is what readers take from the loop, the
               rest is what they take from the machine
    full       the same with two readers of this broker as fast as they can

One broker with sync=none, so that the disk says nothing. CPU is read from the processes' own clocks; the machine's load
is printed beside it. On a busy machine compare CPU, not MB/s; latencies say something only under `chrt --rr 5` there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.cli.log import folders
from nsqha.cli.terminal import exits
from nsqha.commitlog.files.pairs import file_name
from nsqha.commitlog.reading.lookup import LogIdentity, LogReader
from nsqha.commitlog.storage import OsStorage
from pyspark_nsqha.model import PartitionLife, ReplicaAddress, Split
from pyspark_nsqha.options import Tls
from pyspark_nsqha.reading import fetch
from tests.certificates import Certificates

from . import build, client
from .procstat import ProcessTree, load_average
from .spark_scan import bodies

GB = 1e9
TOPIC = "orders"
LIVE = "live"
READERS = 2
RATE = 300e6  # bytes per second of all readers
PER_SECOND = 5000
WINDOW_S = 6.0


@dataclass(frozen=True)
class Broker:
    """A running one, and where it serves."""

    process: subprocess.Popen[str]
    data: Path
    tcp: str
    segments: str
    tls: Tls | None

    def cpu_s(self) -> float:
        return ProcessTree([self.process.pid]).cpu_ns() / 1e9


@contextmanager
def broker(folder: Path, certificates: Certificates | None) -> Iterator[Broker]:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    ports = {name: _free() for name in ("tcp", "http", "grpc", "segments")}
    flags = [f"--{name}-address={address}" for name, address in ports.items()]
    tls = None
    if certificates is not None:
        flags += [f"--cluster-tls-cert={certificates.cert('node')}", f"--cluster-tls-key={certificates.key('node')}"]
        flags += [f"--cluster-tls-ca={certificates.cert('ca')}"]
        tls = Tls(certificates.cert("reader"), certificates.key("reader"), certificates.cert("ca"))
    command = [sys.executable, "-m", "nsqha.cli.nsqd", *flags, f"--data-path={data}", "--sync=none", "--log-level=warn"]
    command += ["--retention-bytes=-1", "--scrub-bytes-per-second=0"]
    process = subprocess.Popen(command, text=True)
    try:
        until = time.monotonic() + 30
        while True:
            try:
                V2Publisher(ports["tcp"], 5).close()
                break
            except exits.Exit:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        time.sleep(1.0)  # the other ports, and what a start leaves to do
        yield Broker(process, data, ports["tcp"], ports["segments"], tls)
    finally:
        process.terminate()
        process.wait(30)


def _free() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def fill(tcp: str, size: int) -> None:
    source = bodies(random.Random(1))
    pool = [next(source) for _ in range(20_000)]
    publisher = V2Publisher(tcp, 60)
    for at in range(0, size // 634, 400):
        publisher.publish(TOPIC, [pool[(at + i) % len(pool)] for i in range(400)])
    publisher.close()


def split_of(data: Path, address: str) -> tuple[Split, int, list[Path]]:
    """All of the topic, bytes of its frames, its files."""
    (folder,) = folders(str(data), TOPIC, 0)
    log = LogReader.open(OsStorage(), folder.path, LogIdentity(folder.topic_uid, folder.partition))
    last = log.last
    assert last is not None
    split = Split(
        PartitionLife(TOPIC, folder.topic_uid, 0, 0), 0, last.end_offset, 1, last.log_id + 1, 0, last.end_offset,
        last.log_id, last.chain, (ReplicaAddress(address),),
    )  # fmt: skip
    names = [file_name(pair.first.position, s) for pair in log.pairs for s in (".segment", ".commitlog")]
    return split, log.end.position, [Path(folder.path, name) for name in names]


def cool(files: list[Path]) -> None:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(files: list[Path]) -> None:
    for path in files:
        path.read_bytes()


def reader(spec: dict[str, object]) -> None:
    """A process of its own: reads the split again and again, not faster than `rate`, for `seconds`, or once."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # elsewhere in truth: it does not go before publishers
    plain = dict(spec["split"])  # type: ignore[call-overload]
    plain["identity"] = PartitionLife(*plain["identity"])
    plain["replicas"] = tuple(ReplicaAddress(*each) for each in plain["replicas"])
    split = Split(**plain)
    tls = Tls(*spec["tls"]) if spec["tls"] else None  # type: ignore[misc]
    rate, seconds = float(spec["rate"]), float(spec["seconds"])  # type: ignore[arg-type]
    size, begun, cpu = 0, time.monotonic(), time.process_time()
    while True:
        for run in fetch.runs(split, tls=tls):
            size += len(run.frames)
            ahead = size / rate - (time.monotonic() - begun) if rate else 0.0
            if ahead > 0.005:
                time.sleep(ahead)
            if seconds and time.monotonic() > begun + seconds:
                break
        if not seconds or time.monotonic() > begun + seconds:
            break
    wall = time.monotonic() - begun
    print(json.dumps({"bytes": size, "cpu": time.process_time() - cpu, "wall": wall}))


def start(split: Split, tls: Tls | None, *, rate: float = 0.0, seconds: float = 0.0) -> subprocess.Popen[str]:
    spec = {"split": asdict(split), "tls": [tls.cert, tls.key, tls.ca] if tls else None, "rate": rate}
    command = [sys.executable, "-m", "benchmarks.segment_bytes", "--reader", json.dumps(spec | {"seconds": seconds})]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, float]:
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError("a reader failed")
    found: dict[str, float] = json.loads(out)
    return found


def fetching(at: Broker, name: str, *, cold: bool, rounds: int) -> None:
    split, size, files = split_of(at.data, at.segments)
    rows = []
    for _ in range(rounds):
        (cool if cold else warm)(files)
        before = at.cpu_s()
        done = result(start(split, at.tls))
        rows.append((done["cpu"], at.cpu_s() - before, done["bytes"] / GB / done["wall"] * 1000))
    reader_cpu, broker_cpu, speed = (statistics.median(row[i] for row in rows) for i in range(3))
    per = size / GB
    print(
        f"{name:34} reader {reader_cpu / per:5.2f}  broker {broker_cpu / per:5.2f} CPU-s/GB  {speed:6.0f} MB/s", end=""
    )
    print(f"   load {load_average():.1f}", flush=True)


def publishing(at: Broker, name: str, *, rate: float | None, rounds: int, of: Broker | None = None) -> None:
    """`rate` None: nobody reads; 0: as fast as they can. `of`: what they read, if it is another broker."""
    from .loadgen import Engine

    read = of or at
    split, _, files = split_of(read.data, read.segments)
    warm(files)
    p50, p99, speeds, cpus = [], [], [], []
    for _ in range(rounds):
        engine = Engine()
        processes: list[subprocess.Popen[str]] = []
        try:
            if rate is not None:
                each = rate / READERS
                processes = [start(split, read.tls, rate=each, seconds=WINDOW_S + 4) for _ in range(READERS)]
                time.sleep(1.5)
            body = b"x" * 600
            unit = client.pub(LIVE, body)
            host, _, port = at.tcp.rpartition(":")
            sock = client.open_connection((host, int(port)), client.QUIET)
            engine.add_paced(sock, unit, stamp_at=len(unit) - len(body), per_second=PER_SECOND)
            engine.pace(record_after=1.0, record_for=WINDOW_S)
            before = at.cpu_s()
            engine.run(WINDOW_S + 1.0)
            cpus.append(at.cpu_s() - before)
            engine.stop()
            engine.run(2.0, acked=engine.paced)
            took = sorted(engine.ack_ns())
            p50.append(took[len(took) // 2] / 1e6)
            p99.append(took[len(took) * 99 // 100] / 1e6)
            done = [result(process) for process in processes]
            speeds.append(sum(each["bytes"] / each["wall"] for each in done) / 1e6)
        finally:
            engine.close()
            for process in processes:
                process.kill()
                process.wait()
    median = statistics.median
    print(
        f"{name:34} p50 {median(p50):6.2f}  p99 {median(p99):6.2f} ms ({min(p99):.2f}-{max(p99):.2f})  readers "
        f"{median(speeds):5.0f} MB/s  broker {median(cpus) / (WINDOW_S + 1):4.2f} cores   load {load_average():.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-k", default="fetch,publish,full")
    parser.add_argument("--tls", choices=("no", "only", "both"), default="both")
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        reader(json.loads(options.reader))
        return
    wanted = options.k.split(",")
    if {"publish", "full"} & set(wanted):
        build.build()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nsqha-bench-")))
        certificates = Certificates(folder)
        certificates.issue("node", "IP:127.0.0.1", "URI:nsqha:node/00000000000000ab")
        certificates.issue("reader", "URI:nsqha:reader")
        other = folder / "other"
        other.mkdir()
        with broker(folder, None) as plain:
            fill(plain.tcp, options.mb * 1_000_000)
        shutil.copytree(folder / "data", other / "data")
        for tls in {"no": (False,), "only": (True,), "both": (False, True)}[options.tls]:
            with broker(folder, certificates if tls else None) as at:
                suffix = ", TLS" if tls else ""
                if "fetch" in wanted:
                    fetching(at, f"fetch{suffix}, cached", cold=False, rounds=options.rounds)
                    fetching(at, f"fetch{suffix}, not cached", cold=True, rounds=options.rounds)
                if "publish" in wanted:
                    publishing(at, f"publish{suffix}, alone", rate=None, rounds=options.rounds)
                    with broker(other, certificates if tls else None) as of:
                        name = f"publish{suffix}, readers elsewhere"
                        publishing(at, name, rate=RATE, rounds=options.rounds, of=of)
                    publishing(at, f"publish{suffix}, readers at 300 MB/s", rate=RATE, rounds=options.rounds)
                if "full" in wanted:
                    publishing(at, f"publish{suffix}, readers at full speed", rate=0.0, rounds=options.rounds)


if __name__ == "__main__":
    main()
