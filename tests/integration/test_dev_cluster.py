"""`nsqha dev --nodes 3`: where everything is, what a death says, and that a stop leaves nothing behind.

The cluster of a test takes about three seconds to start, so tests that leave it whole share one.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli import build_parser
from tests import freezing
from tests.integration.devnode import ANY_PORTS, BIN, DevNode, die_with_parent
from tests.integration.test_cli import keys_of

NODES = 3
PORTS = [*ANY_PORTS, "--peer-port=0", "--etcd-port=0"]


class DevCluster:
    """A real `nsqha dev --nodes 3`; serves once the constructor returns."""

    def __init__(self, folder: Path, *flags: str, nodes: int = NODES) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [str(BIN / "nsqha"), "dev", "--nodes", str(nodes), "--json", "--data-dir", str(folder), *PORTS, *flags],
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
        assert set(node) == {"pid", "tcp", "http", "grpc", "segments", "data", "start"}
        assert node["data"] == str(shared.folder / f"node-{number}")
        python, *rest = node["start"][:4]
        # One environment has several names for it; the script was installed with one of them.
        assert Path(python).parent == Path(sys.executable).parent and rest == ["-m", "nsqha", "broker"]
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
    eventually(lambda: all(any(Path(n["data"]).glob("topics/replicated-*/0/*.segment")) for n in shared.nodes))


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
    assert said.startswith(f"node-1 (pid {first['pid']}) was killed by SIGKILL; it stays down. To start it again ")
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
    cluster = DevCluster(tmp_path, "--restart", nodes=2)
    os.kill(cluster.nodes[1]["pid"], signal.SIGKILL)
    assert "was killed by SIGKILL; it will be started again in" in cluster.talk()
    new = int(cluster.talk().rpartition("pid ")[2])
    eventually(lambda: get(f"{cluster.nodes[1]['http']}/ping") == b"OK")
    cluster.stop()
    assert gone([*cluster.pids, new])


def test_a_child_that_hangs_does_not_outlive_a_second_signal(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path, nodes=2)
    freezing.stop(cluster.nodes[1]["pid"])
    cluster.process.send_signal(signal.SIGTERM)
    eventually(lambda: not lives(cluster.nodes[0]["pid"]))  # it has begun to stop
    assert lives(cluster.nodes[1]["pid"])
    cluster.stop(signal.SIGINT)
    assert gone(cluster.pids)


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path, nodes=2)
    freezing.stop(cluster.nodes[1]["pid"])
    cluster.process.kill()
    cluster.process.communicate(timeout=60)
    eventually(lambda: gone(cluster.pids))


def test_a_part_that_can_not_start_is_named_and_the_rest_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "node-2" / "lock").mkdir(parents=True)
    command = [str(BIN / "nsqha"), "dev", "--nodes=2", "--data-dir", str(tmp_path), *PORTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot start: node-2 ended with status 1: " in done.stderr
    assert f"see {tmp_path}/node-2.log" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--restart", "--peer-port=0", "--etcd-port=0"])
def test_flags_of_a_cluster_are_refused_without_one(tmp_path: Path, flag: str) -> None:
    done = subprocess.run([str(BIN / "nsqha"), "dev", flag], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "needs --nodes 2 or more" in done.stderr


# ---- the verbs of a cluster


def nsqha(cluster: DevCluster, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "nsqha"), *words], env=environment(cluster), capture_output=True, text=True, timeout=120
    )


def environment(cluster: DevCluster) -> dict[str, str]:
    first, etcd = cluster.nodes[0], cluster.description["etcd"]["endpoint"]
    return os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "NSQHA_ETCD_ENDPOINT": etcd,
        "NSQHA_TCP_ADDRESS": first["tcp"],
        "NSQHA_GRPC_ADDRESS": first["grpc"],
    }


def partition(cluster: DevCluster, topic: str) -> dict[str, Any]:
    done = nsqha(cluster, "cluster", "topics", topic, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


CLUSTER_VERBS = build_parser("cluster").verbs()["cluster"].verbs()
CLUSTER_EXAMPLES = [
    example for name, verb in CLUSTER_VERBS.items() for example in verb.examples if name not in ("import", "forget")
]


@pytest.mark.parametrize("example", CLUSTER_EXAMPLES)
def test_every_example_of_the_cluster_verbs_runs(shared: DevCluster, example: str) -> None:
    publish(shared.nodes[0])
    eventually(lambda: partition(shared, "orders")["state"] == "ok")
    words = shlex.split(example)[1:]
    done = nsqha(shared, *words)
    assert done.returncode == 0, done.stderr
    if "--json" in words:
        for line in done.stdout.splitlines():
            assert set(json.loads(line)) == keys_of(CLUSTER_VERBS[words[1]].shape)


def test_a_node_that_can_not_be_emptied_is_not_waited_for(shared: DevCluster) -> None:
    publish(shared.nodes[0])
    eventually(lambda: partition(shared, "orders")["state"] == "ok")
    done = nsqha(shared, "cluster", "decommission", "node-3", "--yes", "--wait", "--json")
    status = nsqha(shared, "cluster", "status")
    assert nsqha(shared, "cluster", "decommission", "node-3", "--undo", "--yes").returncode == 0
    why = "it has 3 replicas, and 2 other hosts can have them"
    assert (done.returncode, json.loads(done.stdout)["stuck"]["orders/0"]) == (7, why), done.stderr
    # Other tests' topics may stay for the same reason.
    stays = re.compile(rf"cannot be moved: [^:]*\borders/0[^:]*: {why}")
    assert stays.search(done.stderr) and "or use --undo" in done.stderr
    assert stays.search(status.stdout)


def test_what_is_not_there_has_its_exit_status(shared: DevCluster) -> None:
    publish(shared.nodes[0])
    for words, status, said in (
        (["topics", "ordrs"], 3, "did you mean orders?"),
        (["move", "orders", "node-1,node-7"], 3, "there is no node node-7"),
        (["move", "orders", "node-1"], 2, "needs 3 replicas"),
        (["move", "orders", "node-1,node-2,node-1"], 2, "named twice"),
        (["elect", "orders"], 2, "--node NODE; or use --unclean"),
        (["elect", "orders", "--unclean", "--yes"], 5, "its leader is alive and leads"),
        (["nodes", "--cluster-name", "other"], 3, "has no cluster other"),
        (["nodes", "--etcd-endpoint", "127.0.0.1:1"], 6, "correct --etcd-endpoint"),
    ):
        done = nsqha(shared, "cluster", *words)
        assert (done.returncode, said in done.stderr) == (status, True), (words, done.stderr)
        assert "Traceback" not in done.stderr


DAEMON_EXAMPLES = [example for verb in ("broker", "lookupd") for example in build_parser(verb).verbs()[verb].examples]


@pytest.mark.parametrize("example", DAEMON_EXAMPLES)
def test_every_example_of_the_daemons_serves(shared: DevCluster, tmp_path: Path, example: str) -> None:
    words = shlex.split(example.replace("127.0.0.1:2379", shared.description["etcd"]["endpoint"]))[1:]
    words += ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    words += ["--grpc-address=127.0.0.1:0"] if words[0] == "broker" else []
    words += ["--cluster-name=examples", "--new-cluster"] if "--etcd-endpoint" in words else []
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(BIN / "nsqha"), *words], cwd=tmp_path, stdout=log, stderr=log, preexec_fn=die_with_parent
        )
    eventually(lambda: "TCP: listening" in (tmp_path / "log").read_text())
    process.terminate()
    assert process.wait(60) == 0, (tmp_path / "log").read_text()


@pytest.mark.parametrize("verb", ["broker", "lookupd"])
def test_an_etcd_that_can_not_be_reached_is_said_in_one_line_and_no_secret_is(tmp_path: Path, verb: str) -> None:
    (tmp_path / "password").write_text("s3cret")
    (tmp_path / "password").chmod(0o600)
    words = [verb, "--etcd-endpoint=127.0.0.1:1", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    words += ["--etcd-user=nsqha", "--etcd-password-file=password"]
    done = subprocess.run([str(BIN / "nsqha"), *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    fatal = [line for line in done.stderr.splitlines() if "FATAL" in line]
    assert len(fatal) == 1
    assert "127.0.0.1:1" in fatal[0]
    assert "Traceback" not in done.stderr
    assert "s3cret" not in done.stdout + done.stderr


def test_an_unclean_election_says_what_it_may_lose_and_asks(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path)
    first, second, third = cluster.nodes
    publish(first, b"everywhere")
    eventually(lambda: partition(cluster, "orders")["state"] == "ok")
    os.kill(third["pid"], signal.SIGKILL)
    publish(first, b"not on the third")
    eventually(lambda: partition(cluster, "orders")["isr"] == ["node-1", "node-2"])
    for node in (first, second):
        os.kill(node["pid"], signal.SIGKILL)
    again = subprocess.Popen(
        third["start"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    eventually(lambda: get(f"{third['http']}/ping") == b"OK")
    eventually(lambda: partition(cluster, "orders")["state"] == "no leader")
    # It answers what it has a moment after /ping: its gRPC port is the last to serve.
    eventually(lambda: nsqha(cluster, "cluster", "elect", "orders", "--unclean").returncode != 5)
    asked = nsqha(cluster, "cluster", "elect", "orders", "--unclean")
    assert asked.returncode == 8
    assert "acknowledged messages may be lost" in asked.stderr
    assert "no answer, may have acknowledged more" in asked.stderr
    assert partition(cluster, "orders")["leader"] != "node-3"
    done = nsqha(cluster, "cluster", "elect", "orders", "--unclean", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["leader"], told["lossless"], len(told["unheard"])) == ("node-3", False, 2)
    found = partition(cluster, "orders")
    assert (found["leader"], found["isr"]) == ("node-3", ["node-3"])
    again.terminate()
    again.wait(60)
    cluster.stop()
    assert gone([*cluster.pids, again.pid])


def test_a_node_that_was_alone_is_imported_with_its_messages_and_channels(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path / "cluster")
    alone = DevNode(tmp_path)
    alone.create("imported", "billing")
    alone.publish("imported", "first", "second", "third")
    assert alone.ok("sub", "imported", "billing", "-n", "1") == "first\n"
    alone.ok("pub", "imported", "never", "--delay", "1h")
    alone.ok("channel", "set", "imported", "billing", "--max-attempts", "4")
    alone.ok("channel", "set", "imported", "*", "--retry", "3s")
    assert alone.json("message", "kill", "imported", "billing", "--state", "deferred", "--yes")["messages"] == 1
    (example,) = CLUSTER_VERBS["import"].examples
    command = ["sh", "-c", f"{example} --json"]
    run = functools.partial(
        subprocess.run, cwd=tmp_path, env=environment(cluster), capture_output=True, text=True, timeout=120
    )
    running = run(command)
    assert running.returncode != 0
    assert "Traceback" not in running.stderr
    assert alone.stop() == 0
    publish(cluster.nodes[0], topic="imported")
    taken = run(command)
    assert (taken.returncode, taken.stdout) == (4, "")
    assert "has a topic imported already" in taken.stderr
    get(f"{cluster.nodes[0]['http']}/topic/delete?topic=imported", b"")
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["topics"] == ["imported"]
    assert not (tmp_path / "data" / "metadata").exists()
    assert run(command).returncode == 3
    start = [*cluster.nodes[0]["start"], "--data-path", str(tmp_path / "data"), "--node-name", "joined"]
    start += ["--tcp-address", alone.tcp, "--http-address", alone.http, "--grpc-address", alone.grpc]
    start += ["--segments-address", alone.segments, "--peer-address", "127.0.0.1:0"]
    joined = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent)
    eventually(lambda: partition(cluster, "imported")["leader"] == "joined")
    eventually(lambda: get(f"{alone.http}/ping") == b"OK")
    got = nsqha(cluster, "sub", "imported", "billing", "-n", "2", "--nsqd-tcp-address", alone.tcp)
    assert got.stdout.split() == ["second", "third"], got.stderr
    for node in (alone.http, cluster.nodes[1]["http"].removeprefix("http://")):
        followed = json.loads(get(f"{node}/channel/policy?topic=imported&channel=billing"))["in_force"]
        assert followed["max_attempts"] == {"value": 4, "from": "channel"}
        assert followed["retry_ms"] == {"value": 3000, "from": "*"}
    letters = nsqha(cluster, "dead", "list", "imported", "billing", "--bodies", "--json")
    assert [json.loads(line)["body"] for line in letters.stdout.splitlines()] == ["never"], letters.stderr
    joined.terminate()
    assert joined.wait(60) == 0
    cluster.stop()


def test_the_cluster_commands_of_the_readme_show_what_it_says(tmp_path: Path) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    commands = re.search(r"<!-- cluster commands: .*? -->\n```sh\n(.*?)```", readme, re.DOTALL)
    assert commands
    cluster = DevCluster(tmp_path)
    script = commands[1].replace(".venv/bin/nsqha", "nsqha").replace("127.0.0.1:4250", cluster.nodes[1]["tcp"])
    script = script.replace("PID_OF_NODE_1", str(cluster.nodes[0]["pid"]))
    outputs = []
    for line in script.splitlines():
        done = subprocess.run(
            ["bash", "-c", line], env=environment(cluster), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, (line, done.stderr)
        outputs.append(done.stdout)
    assert "node-1" in outputs[1]
    assert sorted(outputs[3].split()) == ["first", "second", "third"]
    assert "1 under-replicated: orders/0" in outputs[4]
    cluster.stop()
    assert gone(cluster.pids)
