"""What all deployments have in common: ports, probes, and how long a start and a stop may take. Out of the options and
the constants of the code, so that neither has to be looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nsqha.goflags import format_duration
from nsqha.options import SECOND, LookupdOptions, Options, TlsRequired, flags_of

LIVE_PATH, READY_PATH, STARTED_PATH = "/healthz", "/readyz", "/startupz"
UID = 10001
SECRET_FILE = "/run/secrets/nsqha-cluster/secret"
DATA_PATH = "/var/lib/nsqha"
IMAGE = "nsqha"
RECOVERY_BYTES = 10**12
RECOVERY_BYTES_PER_SECOND = 125_000_000
"""What a start may have to read, and how fast the slowest disks do that which are sold for it."""
STARTUP_PERIOD_SECONDS = 10
MARGIN_SECONDS = 15
ETCD_PORT, ETCD_PEER_PORT = 2379, 2380


@dataclass(frozen=True)
class DaemonPort:
    """One listener of a daemon."""

    name: str
    number: int
    inside: bool = False
    """Whether only nodes, lookup daemons and operators have business there."""

    @property
    def flag(self) -> str:
        return f"--{self.name}-address"


@dataclass(frozen=True)
class HttpProbe:
    """One question to a daemon's HTTP port, and what an orchestrator does with it."""

    kind: str  # as Kubernetes calls it
    path: str
    period_seconds: int
    failures: int = 0
    """How many in a row mean that it is so; 0: as the orchestrator has it."""
    why: str = ""
    port: str = "http"


BROKER_PORTS = (
    DaemonPort("tcp", 4150),
    DaemonPort("http", 4151),
    DaemonPort("grpc", 4152, inside=True),
    DaemonPort("peer", 4153, inside=True),
    DaemonPort("segments", 4154, inside=True),
)
LOOKUPD_PORTS = (DaemonPort("tcp", 4160), DaemonPort("http", 4161))


def port(ports: Sequence[DaemonPort], name: str) -> int:
    return next(port.number for port in ports if port.name == name)


def started_periods() -> int:
    """How often a probe may fail until the log of a large node has been read."""
    return RECOVERY_BYTES // RECOVERY_BYTES_PER_SECOND // STARTUP_PERIOD_SECONDS


def probes(started: str) -> tuple[HttpProbe, ...]:
    """Those of a daemon that has started once `started` answers."""
    whole_log = "Until it has read its log: 1 TB on a slow disk."
    return (
        HttpProbe("startup", started, STARTUP_PERIOD_SECONDS, started_periods(), whole_log),
        HttpProbe("liveness", LIVE_PATH, 10, 6, "Only what a restart repairs: never etcd, replicas, or lag."),
        HttpProbe("readiness", READY_PATH, 5, 2),
    )


def stop_seconds() -> int:
    """What a stop may take: hand over, end changes, answer publishes that are under way, and write."""
    from nsqha.server.node.broker import CHANGES_SECONDS_MAX
    from nsqha.server.node.start import LEAVE_SECONDS_MAX

    waits = LEAVE_SECONDS_MAX + CHANGES_SECONDS_MAX + Options().publish_outcome_wait_ns / SECOND
    return int(waits) + MARGIN_SECONDS


def variables(options: type[Options] | type[LookupdOptions], **settings: str) -> dict[str, str]:
    """Environment variables of a daemon, by the keys of its settings. KeyError for a key that is none."""
    names = {flag.key: flag.name for flag in flags_of(options)}
    prefix = "NSQD_" if options is Options else "NSQLOOKUPD_"
    return {prefix + names[key].upper().replace("-", "_"): value for key, value in settings.items()}


def other_settings(options: type[Options] | type[LookupdOptions], given: str) -> str:
    """Lines for a config file: every setting that `given` does not mention, at its default, commented out."""
    lines = []
    for flag in flags_of(options):
        if not flag.key or flag.inert or flag.name == "config" or f"\n{flag.key} =" in f"\n{given}".replace("# ", ""):
            continue
        lines.append(f"# {flag.key} = {_toml(flag.default, is_duration=flag.kind.word == 'duration')}  # {flag.usage}")
    return "\n".join(lines)


def _toml(value: Any, *, is_duration: bool) -> str:
    if is_duration:
        return f'"{format_duration(value)}"'
    if isinstance(value, bool | TlsRequired):
        return str(bool(value)).lower()
    if isinstance(value, tuple):
        return "[]"
    return f"{int(value)}" if isinstance(value, int) else f'"{value}"'
