"""The units of deploy/systemd as plain processes, and what systemd does for them as far as these units ask for it.

Three hosts with a broker, two with a lookup daemon, and an etcd. ExecStart and the configuration are as in deploy/, but
for what an operator has to say there: host names, and here the cluster's secret instead of certificates, and an etcd
without TLS. The sandbox is not there; `tests/unit/test_deploy_validators.py` has systemd's own opinion of it.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.servers import wait_until
from tests.integration.topologies import DEPLOY, Container

FOLDER = DEPLOY / "systemd"
ETCD = "etcd1.example"
WATCHDOG_SHARE = 20  # of WatchdogSec: a minute is a long time to wait for a sign


class NotifySocket:
    """NOTIFY_SOCKET of one unit: what its process has said since it was started."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.said: list[str] = []
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        while data := self._socket.recv(4096):
            self.said.extend(data.decode().split("\n"))

    def heard(self, word: str) -> bool:
        return any(said == word or said.startswith(f"{word}=") for said in self.said)

    def close(self) -> None:
        """What has come is heard first: recv() gives it, and then nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._socket.close()


@dataclass
class Unit(Container):
    """A service of Type=notify: a start has ended when its process says READY=1."""

    watchdog_seconds: float = 0.0
    notified: NotifySocket | None = None
    lives: list[list[str]] = field(default_factory=list)
    """What each process has said."""

    def start(self) -> None:
        path = self.folder / "notify"
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.notified is not None:
            self.notified.close()
        self.notified = NotifySocket(path)
        self.lives.append(self.notified.said)
        self.environment |= {
            "NOTIFY_SOCKET": str(path),
            "WATCHDOG_USEC": str(int(self.watchdog_seconds * 1e6)),
        }
        super().start()

    def ready(self) -> bool:
        return self.alive() and self.notified is not None and self.notified.heard("READY=1")

    def restart(self) -> None:
        """`systemctl restart`: it comes back when the unit is started."""
        assert self.stop() == 0, "within TimeoutStopSec"
        self.start()
        wait_until(self.ready, f"{self.name} has said READY=1", 90)

    def kill(self) -> None:
        super().kill()
        if self.notified is not None:
            self.notified.close()


def settings(name: str) -> dict[str, str]:
    """Those of a unit's [Service] that stand in one line."""
    text = (FOLDER / f"nsqha-{name}.service").read_text()
    return dict(re.findall(r"^(\w+)=(.*)$", text.partition("[Service]")[2].partition("[Install]")[0], re.MULTILINE))


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def hosts() -> list[Container]:
    return [_etcd(), *_units("lookupd", "lookup", 2), *_units("broker", "broker", 3)]


def _units(name: str, host: str, count: int) -> Iterator[Unit]:
    service = settings(name)
    assert service["Type"] == "notify" and service["NotifyAccess"] == "main" and service["KillMode"] == "mixed"
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).is_absolute()
    (config,) = [word.partition("=")[2] for word in arguments if word.startswith("--config=")]
    for number in range(1, count + 1):
        yield Unit(
            f"{host}{number}",
            (f"{host}{number}.example",),
            [Path(program).name, *arguments],
            {},
            seconds(service["TimeoutStopSec"]),
            files={config: _configured((FOLDER / f"{name}.toml").read_text(), host, number)},
            watchdog_seconds=seconds(service["WatchdogSec"]) / WATCHDOG_SHARE,
        )


def _configured(text: str, host: str, number: int) -> str:
    """The file as the operator of this host completes it."""
    text = text.replace(f"{host}1", f"{host}{number}")
    text = re.sub(r"^(etcd_(?!endpoints)|cluster_tls_).*\n", "", text, flags=re.MULTILINE)
    text, secrets = re.subn(r"^# (?=cluster_secret_file = )", "", text, flags=re.MULTILINE)
    assert secrets == 1
    return re.sub(r"^etcd_endpoints = .*$", f'etcd_endpoints = ["{ETCD}:2379"]', text, flags=re.MULTILINE)


def _etcd() -> Container:
    listens = ("--listen-client-urls=http://0.0.0.0:2379", "--listen-peer-urls=http://0.0.0.0:2380")
    says = (f"--advertise-client-urls=http://{ETCD}:2379", f"--initial-advertise-peer-urls=http://{ETCD}:2380")
    member = ("--name=one", "--data-dir=/etcd-data", f"--initial-cluster=one=http://{ETCD}:2380")
    return Container("etcd1", (ETCD,), ["etcd", *member, *listens, *says], {}, 10.0)
