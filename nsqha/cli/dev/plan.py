"""What a cluster on one machine consists of: folders, ports and command lines. No process is touched here.

    D/dev.lock  D/etcd/  D/etcd.log  D/lookupd.log  D/node-1/  D/node-1.log  D/node-2/ ...

The first node has the usual ports, each further one 100 more, so that they are easy to distinguish; a port in use is
replaced by any free port. Everything listens on the loopback address only.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
PORTS = {"tcp": 4150, "http": 4151, "lookupd-tcp": 4160, "lookupd-http": 4161, "grpc": 4152, "segments": 4154}
PEER_PORT = 4153
NODE_PORTS = ("tcp", "http", "grpc", "peer", "segments")
ETCD_PORT = 2379
STRIDE = 100
SINGLE_NODE_FILES = ("journal", "metadata")

OK_MEANS = {
    "always": "on disk: written and fdatasync'ed before OK (group commit)",
    "interval": "written to the OS before OK; fsync every 2,500 messages or 2 s",
    "none": "written to the OS before OK; fsync left to the OS",
}

# A single member waits for no other: a short election makes it serve in a fifth of the time. History is kept for an
# hour, so that a long run does not grow for ever.
ETCD_FLAGS = (
    "--heartbeat-interval=20", "--election-timeout=200", "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=1h", "--log-level=warn",
)  # fmt: skip


@dataclass(frozen=True)
class NodePlan:
    """One broker."""

    name: str
    tcp: str
    http: str
    grpc: str
    peer: str
    segments: str
    data: Path
    argv: tuple[str, ...]


@dataclass(frozen=True)
class LookupdPlan:
    tcp: str
    http: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class EtcdPlan:
    endpoint: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class DevPlan:
    """All parts of the cluster, and notes for the user."""

    folder: Path
    nodes: tuple[NodePlan, ...]
    lookupd: LookupdPlan
    etcd: EtcdPlan
    notes: tuple[str, ...]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


ANY_PORT_FIRST, ANY_PORT_END = 10_000, 32_768  # Linux takes ports of outgoing connections from the end on
ATTEMPTS = 100


class PortAllocator:
    """Allocates ports: the wanted one, or else any free one. They stay bound until `release`, beside their users."""

    def __init__(self, bind: Callable[[int], socket.socket | None] | None = None) -> None:
        self.taken: list[str] = []
        self._bind = bind or bind_loopback
        self._held: list[socket.socket] = []

    def take(self, wanted: int, what: str) -> int:
        """Allocate `wanted`, 0: any free port. `what` names it in the note if the port is in use."""
        held = self._bind(wanted) if 0 <= wanted <= 65535 else None
        if held is None:
            self.taken.append(f"{wanted} ({what})")
            held = self._bind(0)
        if held is None:
            raise OSError("no port is free")
        self._held.append(held)
        return int(held.getsockname()[1])

    def release(self) -> None:
        """Free the allocated ports, once their users listen: before that, any other program could take one."""
        for held in self._held:
            held.close()
        self._held.clear()


def bind_loopback(port: int) -> socket.socket | None:
    """Bind a port on the loopback address, 0: any free one; None if it is in use."""
    if port == 0:
        # The kernel's own choice is a port of outgoing connections: one of these may take it before its user listens.
        for _ in range(ATTEMPTS):
            choice = ANY_PORT_FIRST + secrets.randbelow(ANY_PORT_END - ANY_PORT_FIRST)
            if held := _bind(choice, beside_others=False):
                return held
    return _bind(port, beside_others=True)


def _bind(port: int, *, beside_others: bool) -> socket.socket | None:
    """Bind a port, so that its user can listen on it while this one is held: Linux lets sockets that do not listen
    share a port with each other and with one that does, if all have SO_REUSEADDR. With `beside_others`, a port that
    another program holds in this way, or that has connections of the past, is free."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, beside_others)
    try:
        held.bind((LOOPBACK, port))
    except OSError:
        held.close()
        return None
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def is_free(port: int) -> bool:
    """Whether no program on this machine listens on the port."""
    held = bind_loopback(port)
    if held is not None:
        held.close()
    return held is not None


def command() -> str:
    """The command that starts this program from a shell in the same folder."""
    path = os.path.relpath(sys.argv[0])
    return path if os.path.basename(path) == "nsqha" and not path.startswith("..") else "nsqha"


def make_plan(
    folder: Path,
    *,
    nodes: int,
    wanted: Mapping[str, int],
    sync: str,
    etcd: str,
    ports: PortAllocator,
    program: Sequence[str] = (),
) -> DevPlan:
    """`wanted` has a port for each of NODE_PORTS, lookupd-tcp, lookupd-http and etcd; `etcd` is a path."""
    nsqha = (sys.executable, "-m", "nsqha")
    # In this order: when a port is in use, the first nodes keep the usual ones.
    chosen = [{kind: _node_port(ports, wanted[kind], kind, n) for kind in NODE_PORTS} for n in range(nodes)]
    lookupd_tcp = _at(ports.take(wanted["lookupd-tcp"], "lookupd-tcp"))
    lookupd_http = _at(ports.take(wanted["lookupd-http"], "lookupd-http"))
    endpoint, peer = _at(ports.take(wanted["etcd"], "etcd")), _at(ports.take(0, "etcd peers"))
    lookupd = (
        *nsqha, "lookupd", "--tcp-address", lookupd_tcp, "--http-address", lookupd_http,
        "--broadcast-address", LOOPBACK, "--etcd-endpoint", endpoint,
    )  # fmt: skip
    return DevPlan(
        folder,
        tuple(_node(nsqha, folder, number, found, endpoint, sync) for number, found in enumerate(chosen, 1)),
        LookupdPlan(lookupd_tcp, lookupd_http, lookupd),
        EtcdPlan(endpoint, tuple(_etcd(etcd, folder / "etcd", endpoint, peer, sync))),
        tuple(_notes(folder, nodes, ports.taken)),
    )


def _node_port(ports: PortAllocator, first: int, kind: str, index: int) -> int:
    name = kind if index == 0 else f"{kind} of node-{index + 1}"
    return ports.take(first + STRIDE * index if first else 0, name)


def _node(
    nsqha: tuple[str, ...], folder: Path, number: int, chosen: Mapping[str, int], endpoint: str, sync: str
) -> NodePlan:
    name = f"node-{number}"
    tcp, http, grpc, peer, segments = (_at(chosen[kind]) for kind in NODE_PORTS)
    data = folder / name
    argv = (
        *nsqha, "broker", "--tcp-address", tcp, "--http-address", http, "--grpc-address", grpc,
        "--peer-address", peer, "--segments-address", segments, "--data-path", str(data), "--etcd-endpoint", endpoint,
        "--node-name", name, "--broadcast-address", LOOPBACK, "--sync", sync,
    )  # fmt: skip
    return NodePlan(name, tcp, http, grpc, peer, segments, data, argv)


def _etcd(program: str, folder: Path, endpoint: str, peer: str, sync: str) -> list[str]:
    client, peers = f"http://{endpoint}", f"http://{peer}"
    argv = [program, "--name", "dev", "--data-dir", str(folder)]
    argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
    argv += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"dev={peers}"]
    argv += ETCD_FLAGS
    # The records in etcd are as durable as the messages that depend on them: no syncs there if there are none here.
    return argv if sync == "always" else [*argv, "--unsafe-no-fsync"]


def _notes(folder: Path, nodes: int, taken: Sequence[str]) -> list[str]:
    notes = [f"ports in use, replaced by free ones: {', '.join(taken)}"] if taken else []
    if any((folder / name).exists() for name in SINGLE_NODE_FILES):
        notes.append(f"{folder} also has the data of a single node; a cluster does not use it")
    extra = sorted(path.name for path in folder.glob("node-*") if path.is_dir() and _number(path.name) > nodes)
    if extra:
        notes.append(f"there is data of {', '.join(extra)}, not started; what only they have cannot be served")
    return notes


def _number(name: str) -> int:
    text = name.removeprefix("node-")
    return int(text) if text.isdecimal() else 0


def _at(port: int) -> str:
    return f"{LOOPBACK}:{port}"
