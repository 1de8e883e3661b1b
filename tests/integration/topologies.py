"""The topologies of deploy/ as plain processes, out of those very files: commands, variables, probes, stops.

There is no container engine: each container has an address of 127.0.0.0/8 instead of a network of its own, and a folder
instead of a volume. So names of services and pods, "every address" and paths in commands and variables become these;
everything else is as the file says, and nothing else is in the environment. Listeners whose default is every address
are told their container's.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nsqha.cli.generate.topology import BROKER_PORTS, DATA_PATH, LOOKUPD_PORTS, SECRET_FILE, DaemonPort
from nsqha.election.etcd.binary import find_etcd
from tests.integration.devnode import die_with_parent
from tests.integration.servers import BIN, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NAMESPACE = "default"


@dataclass
class Container:
    """One process. `probes`: kind -> path and port, or a command."""

    name: str
    hosts: tuple[str, ...]
    """What others call it."""
    command: list[str]
    environment: dict[str, str]
    grace_seconds: float
    probes: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by their path in the command."""
    ip: str = ""
    folder: Path = Path()
    process: subprocess.Popen[bytes] | None = None

    @property
    def role(self) -> str:
        words = {"nsqd": "broker", "nsqlookupd": "lookupd", "etcd": "etcd"}
        return words.get(self.command[0]) or self.command[1]

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        assert self.process is None
        self.folder.mkdir(parents=True, exist_ok=True)
        program = find_etcd() if self.command[0] == "etcd" else str(BIN / self.command[0])
        assert program is not None
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [program, *self.command[1:]],
                env={"PATH": f"{BIN}:/usr/bin:/bin", **self.environment},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                preexec_fn=die_with_parent,
            )

    def stop(self) -> int:
        """SIGTERM, and the grace period of the file; it may not be needed to its end."""
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(signal.SIGTERM)
        return process.wait(self.grace_seconds)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def succeeds(self, command: list[str]) -> bool:
        """Whether a command that runs in it ends with 0."""
        environment = {"PATH": f"{BIN}:/usr/bin:/bin", **self.environment}
        words = [str(BIN / command[0]), *command[1:]]
        return subprocess.run(words, env=environment, capture_output=True, timeout=30).returncode == 0

    def passes(self, kind: str) -> bool:
        """What the probe of this kind says now; one that the file does not have passes."""
        probe = self.probes.get(kind)
        if probe is None:
            return True
        if isinstance(probe, list):
            return self.succeeds(probe)
        port, path, seconds = probe
        try:
            with urllib.request.urlopen(f"http://{self.ip}:{port}{path}", timeout=seconds) as answer:
                return 200 <= int(answer.status) < 400
        except (OSError, urllib.error.URLError):
            return False

    def alive(self) -> bool:
        """Whether it runs. One that ended, as its etcd was not there yet, is started again, as the file says."""
        if self.process is not None and self.process.poll() is not None:
            self.process = None
            self.start()
            time.sleep(0.2)
        return self.process is not None

    def ready(self) -> bool:
        return self.alive() and all(self.passes(kind) for kind in ("startup", "liveness", "readiness", "health"))


class Topology:
    """All containers of some files, on addresses of their own."""

    def __init__(self, folder: Path, containers: list[Container]) -> None:
        self.containers = {container.name: container for container in containers}
        network = random.Random(f"{os.getpid()}{time.time_ns()}").randrange(1 << 16)
        secret = folder / "secret"
        secret.write_text("0123456789abcdef" * 4)
        secret.chmod(0o600)
        for number, container in enumerate(containers, 1):
            container.ip = f"127.{network % 200 + 20}.{network >> 8}.{number}"
            container.folder = folder / container.name
        names = {name: container.ip for container in containers for name in container.hosts}
        longest_first = sorted(names, key=len, reverse=True)
        pattern = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, longest_first))})(?![\w-]|\.\w)")
        for container in containers:

            def placed(text: str, c: Container = container) -> str:
                text = re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)(?=:)", c.ip, text)
                text = pattern.sub(lambda found: names[found[1]], text)
                for path in (SECRET_FILE, "/run/secrets/nsqha-cluster", "/etc/nsqha/cluster-secret"):
                    text = text.replace(path, str(secret))
                for path in (DATA_PATH, "/etcd-data"):
                    text = text.replace(path, str(c.folder / "volume"))
                for path in c.files:
                    text = text.replace(path, str(c.folder / Path(path).name))
                return text

            container.folder.mkdir()
            for path, text in container.files.items():
                (container.folder / Path(path).name).write_text(placed(text))

            container.command = [placed(word) for word in container.command]
            container.environment = {name: placed(text) for name, text in container.environment.items()}
            container.environment |= _listening(container)

    def of(self, role: str) -> list[Container]:
        return [container for container in self.containers.values() if container.role == role]

    @contextlib.contextmanager
    def running(self) -> Iterator[Topology]:
        """All of them are up and pass their probes."""
        try:
            for container in self.containers.values():
                (container.folder / "volume").mkdir(parents=True, exist_ok=True)
                container.start()
            for container in self.containers.values():
                wait_until(container.ready, f"{container.name} passes its probes", 60)
            yield self
        except BaseException:
            for container in self.containers.values():
                print(f"---- {container.name} {shlex.join(container.command)}\n{container.log()[-2500:]}")
            raise
        finally:
            for container in self.containers.values():
                container.kill()


def _listening(container: Container) -> dict[str, str]:
    """Listeners that the file leaves at "every address", and where a loopback of its own would be."""
    if container.role == "etcd":
        return {}
    prefix, ports = ("NSQD_", BROKER_PORTS) if container.role == "broker" else ("NSQLOOKUPD_", LOOKUPD_PORTS)
    usual = {f"{prefix}{_upper(p)}": f"{container.ip}:{p.number}" for p in ports if p.name in ("tcp", "http")}
    if container.role == "broker":
        usual["NSQHA_ADDRESS"] = usual["NSQD_HTTP_ADDRESS"]  # of `nsqha check`, which asks the container's own loopback
    return {name: value for name, value in usual.items() if name not in container.environment}


def _upper(port: DaemonPort) -> str:
    return port.flag.removeprefix("--").upper().replace("-", "_")


# ---- out of the files


def compose(path: Path, dockerfile: Path = DEPLOY / "Dockerfile") -> list[Container]:
    """The services of a Compose file that no profile is needed for; the health check is the image's or their own."""
    image = re.search(r"^HEALTHCHECK .*\\\n\s+CMD (\[.*\])$", dockerfile.read_text(), re.MULTILINE)
    assert image
    found = []
    for name, service in yaml.safe_load(path.read_text())["services"].items():
        if "profiles" in service:
            continue
        own = "image" in service and "build" not in service
        probes = {} if own else {"health": yaml.safe_load(image[1])}
        seconds = float(service.get("stop_grace_period", "10s").removesuffix("s"))
        environment = {key: str(value) for key, value in service.get("environment", {}).items()}
        found.append(Container(name, (name,), service["command"], environment, seconds, probes))
    return found


def kubernetes(folder: Path = DEPLOY / "k8s") -> list[Container]:
    """The pods of all stateful sets that the kustomization has."""
    resources = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    documents = [text for name in resources for text in yaml.safe_load_all((folder / name).read_text())]
    return [pod for text in documents if text["kind"] == "StatefulSet" for pod in _pods(text["spec"], text["metadata"])]


def _pods(spec: Any, metadata: Any) -> Iterator[Container]:
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = {
        kind: (ports[probe["httpGet"]["port"]], probe["httpGet"]["path"], probe["timeoutSeconds"])
        for kind in ("startup", "liveness", "readiness")
        if (probe := container.get(f"{kind}Probe"))
    }
    for number in range(spec["replicas"]):
        name = f"{metadata['name']}-{number}"
        fields = {"metadata.name": name, "metadata.namespace": NAMESPACE, "spec.nodeName": f"machine-{number}"}
        environment: dict[str, str] = {}
        for entry in container.get("env", ()):
            source = entry.get("valueFrom")
            text = fields[source["fieldRef"]["fieldPath"]] if source else entry["value"]
            environment[entry["name"]] = _expanded(text, environment)
        host = f"{name}.{spec['serviceName']}"
        command = [_expanded(word, environment) for word in container["command"]]
        grace = float(pod.get("terminationGracePeriodSeconds", 30))
        yield Container(name, (host, f"{host}.{NAMESPACE}.svc"), command, environment, grace, probes)


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], text)
