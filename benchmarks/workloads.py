"""The rows of the benchmark. Names are stable: scripts, stored results and the targets refer to them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from .lifecycle import DeadLetters, Held, Idle, Restart
from .loads import Consume, EndToEnd, Latency, Publish
from .place import Measure
from .verify import Verify

CERTIFICATE = ("tls.crt", "tls.key")
RETRY = '"max_attempts": 5, "retry_ms": 100'
OPENSSL = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"


@dataclass(frozen=True)
class Workload:
    """One row. `sync` overrides the run's mode; `rounds_max` bounds rows that take long or hardly vary."""

    name: str
    about: str
    measure: Measure
    sync: str | None = None
    flags: tuple[str, ...] = ()
    tls: bool = False
    rounds_max: int = 99


WORKLOADS: tuple[Workload, ...] = (
    Workload("verify", "is everything delivered once, in order, unaltered", Verify(), rounds_max=1),
    # publishing
    Workload("pub-pipelined-100", "PUB 100 B, 4 connections x 200 outstanding", Publish(4, 200)),
    Workload("pub-pipelined-1k", "PUB 1 KB, 4 connections x 200 outstanding", Publish(4, 200, body_bytes=1024)),
    Workload("mpub-100", "MPUB of 200 x 100 B, 4 connections x 4 outstanding", Publish(4, 4, batch=200)),
    Workload("mpub-1k", "MPUB of 200 x 1 KB, 4 connections x 4 outstanding", Publish(4, 4, batch=200, body_bytes=1024)),
    Workload("pub-16x1", "PUB 100 B, 16 connections x 1 outstanding", Publish(16, 1)),
    Workload("pub-200x1", "PUB 100 B, 200 connections x 1 outstanding", Publish(200, 1)),
    Workload("pub-1x1", "PUB 100 B, 1 connection x 1 outstanding", Publish(1, 1)),
    Workload(
        "pub-100-topics",
        "PUB 100 B, 4 x 200 outstanding, each command to the next of 100 topics",
        Publish(4, 200, topics=100),
    ),
    # consuming
    Workload("consume", "backlog, 4 connections RDY 2500, FINs in bulk", Consume(4, 2500)),
    Workload(
        "consume-small-fins", "the same, one FIN per send call as Go clients do", Consume(4, 2500, fins_per_send=1)
    ),
    Workload("consume-rdy1", "backlog, 16 connections RDY 1", Consume(16, 1)),
    Workload("consume-req", "backlog, 4 connections RDY 2500, 1 % requeued once", Consume(4, 2500, req_every=100)),
    Workload(
        "consume-policy",
        "as consume, with max_attempts, retry, ttl and max_depth set and nothing failing",
        Consume(4, 2500, policy=f'{{{RETRY}, "ttl_ms": 3600000, "max_depth": 1000000000}}'),
    ),
    Workload(
        "consume-req-policy",
        "as consume-req, with max_attempts and retry 100ms",
        Consume(4, 2500, req_every=100, policy=f"{{{RETRY}}}"),
    ),
    Workload("consume-cold", "backlog in no cache, 4 connections RDY 2500", Consume(4, 2500, cold=True)),
    # both at once
    Workload(
        "e2e-mpub",
        "MPUB 4 x 4 outstanding and 4 consumers RDY 2500, until all is delivered",
        EndToEnd(4, 4, 4, 2500, batch=200),
    ),
    Workload(
        "e2e-pub", "PUB 4 x 200 outstanding and 4 consumers RDY 2500, until all is delivered", EndToEnd(4, 200, 4, 2500)
    ),
    Workload(
        "fanout-3",
        "MPUB 4 x 4 outstanding, 3 channels with 2 consumers RDY 2500 each; per published message",
        EndToEnd(4, 4, 2, 2500, batch=200, channels=3),
    ),
    Workload("e2e-8x1", "PUB 8 connections x 1 outstanding and 8 consumers RDY 25", EndToEnd(8, 1, 8, 25)),
    # latency
    Workload("latency-1000", "1 publisher at 1,000/s, 1 consumer, no output buffering asked for", Latency(1000)),
    Workload("latency-5000", "1 publisher at 5,000/s, 1 consumer, no output buffering asked for", Latency(5000)),
    Workload(
        "latency-1000-defaults", "the same at 1,000/s with a client's default settings", Latency(1000, defaults=True)
    ),
    # on disk before OK
    Workload(
        "always-pub-pipelined-100",
        "sync=always, PUB 100 B, 4 x 200 outstanding",
        Publish(4, 200, times_disk=True),
        sync="always",
    ),
    Workload(
        "always-pub-16x1", "sync=always, PUB 100 B, 16 x 1 outstanding", Publish(16, 1, times_disk=True), sync="always"
    ),
    Workload(
        "always-pub-1x1", "sync=always, PUB 100 B, 1 x 1 outstanding", Publish(1, 1, times_disk=True), sync="always"
    ),
    # encrypted
    Workload("tls-pub", "TLS, PUB 100 B, 4 x 200 outstanding", Publish(4, 200, tls=True), tls=True),
    Workload("tls-consume", "TLS, backlog, 4 connections RDY 2500", Consume(4, 2500, tls=True), tls=True),
    # at rest
    Workload("idle", "nobody connected: memory, CPU per second, exec to ready", Idle(), rounds_max=1),
    Workload(
        "restart-1gb",
        "1 GB of 1 KB messages: ready and first message after kill -9 and after a stop",
        Restart(),
        rounds_max=1,
    ),
    Workload(
        "memory-in-flight",
        "1 M messages in flight: growth of anonymous memory",
        Held("in flight"),
        flags=("--max-rdy-count=1000000",),
        rounds_max=1,
    ),
    Workload(
        "memory-deferred",
        "1 M messages requeued by an hour: growth of anonymous memory",
        Held("deferred"),
        rounds_max=1,
    ),
    Workload(
        "dead-letters",
        "100,000 dead letters, beside as many: growth of anonymous memory, a page of 1,000",
        DeadLetters(),
        rounds_max=1,
    ),
)


def select(expression: str | None) -> list[Workload]:
    """Rows whose name holds, or as a glob matches, one of the comma-separated words; a leading `!` leaves out."""
    words = [word.strip() for word in (expression or "").split(",") if word.strip()]
    wanted = [word for word in words if not word.startswith("!")]
    unwanted = [word[1:] for word in words if word.startswith("!")]
    return [
        workload
        for workload in WORKLOADS
        if (not wanted or any(_matches(workload.name, word) for word in wanted))
        and not any(_matches(workload.name, word) for word in unwanted)
    ]


def _matches(name: str, word: str) -> bool:
    return fnmatchcase(name, word) if any(sign in word for sign in "*?[") else word in name


def tls_flags(workspace: Path) -> Sequence[str]:
    """Flags for a server with a certificate of its own, made on first use. Raises FileNotFoundError without openssl."""
    certificate, key = (workspace / name for name in CERTIFICATE)
    if not certificate.exists():
        if shutil.which("openssl") is None:
            raise FileNotFoundError("TLS rows need the openssl command to make a certificate")
        subprocess.run(
            [*OPENSSL.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
        )
    return (f"--tls-cert={certificate}", f"--tls-key={key}")
