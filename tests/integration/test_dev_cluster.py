"""`nsqha dev --nodes 3`: where everything is, what a death says, and that a stop leaves nothing behind.

The cluster of a test takes about three seconds to start, so tests that leave it whole share one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.devnode import ANY_PORTS, BIN, die_with_parent

NODES = 3
PORTS = [*ANY_PORTS, "--etcd-port=0"]


class DevCluster:
    """A real `nsqha dev --nodes 3`; serves once the constructor returns."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [str(BIN / "nsqha"), "dev", "--nodes", str(NODES), "--json", "--data-dir", str(folder), *PORTS, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=60)
        self.description: dict[str, Any] = json.loads(line)
        self.nodes: list[dict[str, Any]] = self.description["nodes"]
        self.lookupd: dict[str, Any] = self.description["lookupd"][0]

    @property
    def pids(self) -> list[int]:
        found = [node["pid"] for node in self.nodes]
        return [*found, self.lookupd["pid"], self.description["etcd"]["pid"]]

    def talk(self) -> str:
        """The next line on stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def stop(self, number: int = signal.SIGTERM) -> str:
        """What it still said."""
        self.process.send_signal(number)
        stdout, stderr = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, stderr
        assert stdout == ""
        return stderr


def get(url: str, data: bytes | None = None) -> bytes:
    answer: bytes = urllib.request.urlopen(f"http://{url}", data=data, timeout=10).read()
    return answer


def publish(node: dict[str, Any], body: bytes = b"hello", topic: str = "orders") -> None:
    """Until it succeeds: after a death a new leader has to be elected first."""
    eventually(lambda: get(f"{node['http']}/pub?topic={topic}", body) == b"OK")


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if check():
                return
        except OSError as error:
            last: object = error
        else:
            last = "no"
        assert time.monotonic() < deadline, last
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Not a zombie either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    return not any(lives(pid) for pid in pids)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """For tests that leave every process alive."""
    cluster = DevCluster(tmp_path_factory.mktemp("cluster"), "--sync=interval")
    yield cluster
    cluster.stop()
    assert gone(cluster.pids)


def test_one_line_says_where_everything_is(shared: DevCluster) -> None:
    assert set(shared.description) == {"nodes", "lookupd", "etcd"}
    assert len(shared.nodes) == NODES
    for number, node in enumerate(shared.nodes, 1):
        assert set(node) == {"pid", "tcp", "http", "grpc", "data", "start"}
        assert node["data"] == str(shared.folder / f"node-{number}")
        assert node["start"][:4] == [sys.executable, "-m", "nsqha", "broker"]
        assert get(f"{node['http']}/ping") == b"OK"
    assert set(shared.lookupd) == {"pid", "tcp", "http"}
    assert set(shared.description["etcd"]) == {"pid", "endpoint"}
    assert all(lives(pid) for pid in shared.pids)
    assert len(set(shared.pids)) == NODES + 2


def test_everything_listens_on_the_loopback_only(shared: DevCluster) -> None:
    listeners = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=False).stdout
    mine = [line.split()[3] for line in listeners.splitlines() if any(f"pid={pid}," in line for pid in shared.pids)]
    assert len(mine) >= NODES * 3 + 4 or not listeners
    loopback = ("127.0.0.1:", "[::ffff:127.0.0.1]:")  # the second is how gRPC binds it
    assert [address for address in mine if not address.startswith(loopback)] == []


def test_a_topic_has_all_replicas_at_once(shared: DevCluster) -> None:
    publish(shared.nodes[0], topic="replicated")
    eventually(lambda: all((Path(n["data"]) / "topics").glob("replicated-*") for n in shared.nodes))


def test_every_part_has_a_log_in_the_folder(shared: DevCluster) -> None:
    names = {path.name for path in shared.folder.glob("*.log")}
    assert names == {"etcd.log", "lookupd.log", "node-1.log", "node-2.log", "node-3.log"}
    assert "TCP: listening" in (shared.folder / "node-1.log").read_text()


def test_the_folder_of_a_running_cluster_is_refused(shared: DevCluster) -> None:
    command = [str(BIN / "nsqha"), "dev", "--nodes=2", "--data-dir", str(shared.folder), *PORTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("nsqha dev: another `nsqha dev` runs in ")
    assert len(done.stderr.splitlines()) == 1


def test_a_killed_node_stays_down_until_its_start_command_is_run(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path)
    first, second, _ = cluster.nodes
    publish(first, b"kept")
    os.kill(first["pid"], signal.SIGKILL)
    said, how = cluster.talk(), cluster.talk()
    assert said == f"node-1 (pid {first['pid']}) was killed by SIGKILL; it stays down. To start it again:\n"
    assert how.split() == first["start"]
    publish(second, b"more")
    again = subprocess.Popen(
        first["start"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    eventually(lambda: get(f"{first['http']}/ping") == b"OK")
    publish(first, b"still")
    again.terminate()
    assert again.wait(60) == 0
    assert cluster.stop(signal.SIGINT) == ""
    assert gone(cluster.pids)


def test_with_restart_a_killed_node_comes_back(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path, "--restart")
    os.kill(cluster.nodes[2]["pid"], signal.SIGKILL)
    assert "was killed by SIGKILL; it is started again in" in cluster.talk()
    new = int(cluster.talk().rpartition("pid ")[2])
    eventually(lambda: get(f"{cluster.nodes[2]['http']}/ping") == b"OK")
    cluster.stop()
    assert gone([*cluster.pids, new])


def test_a_child_that_hangs_does_not_outlive_a_second_signal(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path)
    os.kill(cluster.nodes[1]["pid"], signal.SIGSTOP)
    cluster.process.send_signal(signal.SIGTERM)
    eventually(lambda: not lives(cluster.nodes[0]["pid"]))  # it has begun to stop
    assert lives(cluster.nodes[1]["pid"])
    cluster.stop(signal.SIGINT)
    assert gone(cluster.pids)


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path)
    os.kill(cluster.nodes[1]["pid"], signal.SIGSTOP)
    cluster.process.kill()
    cluster.process.communicate(timeout=60)
    eventually(lambda: gone(cluster.pids))


def test_a_part_that_can_not_start_is_named_and_the_rest_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "node-2" / "lock").mkdir(parents=True)
    command = [str(BIN / "nsqha"), "dev", "--nodes=2", "--data-dir", str(tmp_path), *PORTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "can not start: node-2 ended with status 1: " in done.stderr
    assert f"see {tmp_path}/node-2.log" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--restart", "--etcd-port=0"])
def test_flags_of_a_cluster_are_refused_without_one(tmp_path: Path, flag: str) -> None:
    done = subprocess.run([str(BIN / "nsqha"), "dev", flag], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "needs --nodes 2 or more" in done.stderr
