"""docs/operate.md carried out: an upgrade and the way back, a node replaced, a secret, a certificate and a token
renewed. The commands are those of the page, with the names of this cluster; restarts are in test_topologies.py."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from nsqha import __version__
from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.election.model import PEER_LEVEL
from tests.certificates import Certificates
from tests.integration.asking import AskingPublisher, received
from tests.integration.build_of_level import program
from tests.integration.cluster import Cluster, Member, gone
from tests.integration.servers import BIN, Daemon, Node, wait_until

pytestmark = pytest.mark.timeout(300)

PAGE = (Path(__file__).resolve().parents[2] / "docs/operate.md").read_text()
TOPIC, CHANNEL = "orders", "billing"


def of_page(section: str) -> list[str]:
    """The commands of ours in one section, in their order."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"(?:^    |`)(nsqha(?: [\w./-]+)+)", text, re.MULTILINE)


def ran(command: str, cluster: Cluster | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    program, *words = shlex.split(command)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NSQHA_")}
    if cluster is not None:
        environment["NSQHA_ETCD_ENDPOINT"] = cluster.etcd.endpoint
        environment["NSQHA_ADDRESS"] = cluster.lookupds[-1].http  # who only looks needs no more
    return subprocess.run(
        [str(BIN / program), *words], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
    )


def done(command: str, cluster: Cluster | None = None, cwd: Path | None = None) -> str:
    found = ran(command, cluster, cwd)
    assert found.returncode == 0, f"{command}: {found.returncode}\n{found.stdout}{found.stderr}"
    return found.stdout


def wait_well(cluster: Cluster) -> None:
    """What the page says before and after everything."""
    check, status = of_page("Before and after everything")
    assert (check, status) == ("nsqha check cluster", "nsqha cluster status")
    try:
        wait_until(lambda: ran(check, cluster).returncode == 0, check, 60)
    except AssertionError:
        raise AssertionError(f"{check}: {ran(check, cluster).stdout}") from None


@contextlib.contextmanager
def under_load(cluster: Cluster) -> Iterator[AskingPublisher]:
    """Of a client that asks a lookup daemon: 0 publishes lost, 0 refused."""
    cluster.create(TOPIC, CHANNEL)
    lookups = [daemon.http for daemon in cluster.lookupds]
    with AskingPublisher(lookups, TOPIC) as client:
        client.goes_on()
        yield client
        client.goes_on()
    assert client.refused == []
    assert client.stored <= received(lookups[0], TOPIC, CHANNEL, client.stored)


def restarted(cluster: Cluster, daemon: Daemon, change: Callable[[], None]) -> None:
    assert daemon.stop() == 0
    change()
    daemon.start()
    wait_well(cluster)


# ---- upgrade, and back


def test_an_upgrade_and_the_way_back_lose_and_refuse_nothing(tmp_path: Path) -> None:
    pause, nodes, nodes_json, resume = of_page("Upgrade, and back")
    assert pause.endswith("balance --pause") and resume.endswith("balance --resume")
    later = {
        name: program(tmp_path, build="9.0.0", oldest=PEER_LEVEL, newest=PEER_LEVEL + 1, daemon=name)
        for name in ("nsqd", "nsqlookupd")
    }
    with Cluster.running(tmp_path / "cluster", lookupds=2) as cluster, under_load(cluster) as client:
        for build, commands in (("9.0.0", later), (__version__, {name: name for name in later})):
            done(pause, cluster)
            for daemon in [*cluster.nodes, *cluster.lookupds]:
                command = commands["nsqd" if isinstance(daemon, Member) else "nsqlookupd"]
                restarted(cluster, daemon, partial(setattr, daemon, "command", command))
                client.goes_on()
            assert done(nodes, cluster).count(build) == len(cluster.nodes)
            levels = [json.loads(line)["peer_levels"] for line in done(nodes_json, cluster).splitlines()]
            assert levels == [f"{PEER_LEVEL}-{PEER_LEVEL + (build == '9.0.0')}"] * 3
            done(resume, cluster)


# ---- replace a node


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster.running(tmp_path / "cluster", sync="none") as cluster:
        cluster.create(TOPIC, CHANNEL)
        with contextlib.closing(V2Publisher(cluster.nodes[0].tcp, 40)) as publisher:
            publisher.publish(TOPIC, [b"%d" % n for n in range(100)])
        yield cluster


def check_all_there(cluster: Cluster) -> None:
    wait_well(cluster)
    bodies = {b"%d" % n for n in range(100)}
    assert received(cluster.lookupd.http, TOPIC, CHANNEL, bodies) == bodies


def elsewhere(cluster: Cluster, name: str, folder: Path) -> Member:
    """A process of the same name on other hardware: in another folder, at other ports."""
    return Member(folder, name, cluster.etcds.endpoints, sync="none", flags=())


def test_a_disk_that_is_there_goes_on_in_other_hardware(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.followers(TOPIC)[0]
    before = cluster.uid(node)
    assert node.stop() == 0
    moved, copy = (elsewhere(cluster, node.name, tmp_path / where) for where in ("new", "copy"))
    with contextlib.ExitStack() as ends:
        for member in (moved, copy):
            ends.callback(member.__exit__)
        shutil.rmtree(copy.data)
        shutil.copytree(node.data, moved.data, dirs_exist_ok=True)
        moved.start()
        wait_until(lambda: moved.joined, "it is a member")
        cluster.nodes[cluster.nodes.index(node)] = moved
        cluster.wait_isr(TOPIC, 3)
        assert cluster.uid(moved) == before
        check_all_there(cluster)
        shutil.copytree(node.data, copy.data)
        copy.spawn()
        assert gone(copy, 60) != 0
        assert "is a copy" in copy.log() and "Traceback" not in copy.log()


def test_a_disk_that_is_gone_is_filled_again(cluster: Cluster) -> None:
    node = cluster.leader(TOPIC)
    node.kill()
    node.wipe()
    node.start()
    cluster.wait_isr(TOPIC, 3)
    check_all_there(cluster)


def test_a_node_that_goes_for_good_is_emptied_first(cluster: Cluster) -> None:
    command = next(command for command in of_page("Replace a node") if "decommission" in command)
    assert command == "nsqha cluster decommission broker3 --wait"
    with cluster.another("n4") as fourth:
        fourth.start()
        cluster.nodes.append(fourth)
        cluster.wait_registered(4)
        leaving = cluster.leader(TOPIC)
        done(command.replace("broker3", leaving.name) + " --yes", cluster)
        assert cluster.uid(leaving) not in cluster.named_in_records()
        assert leaving.stop() == 0
        cluster.nodes.remove(leaving)
        check_all_there(cluster)
        cluster.nodes.append(leaving)


# ---- renew


def test_the_secret_of_a_cluster_is_replaced_in_two_rounds(tmp_path: Path) -> None:
    old, new = "o" * 40, "n" * 40
    folder = tmp_path / "secrets"
    folder.mkdir()

    def write(name: str, *secrets: str) -> None:
        path = folder / name
        path.write_text("\n".join(secrets) + "\n")
        path.chmod(0o600)

    def flags(name: str) -> list[str]:
        write(name, old)
        return [f"--cluster-secret-file={folder / name}"]

    options = {"flags": flags, "lookupd_flags": flags("lookupd"), "lookupds": 2}
    with Cluster.running(tmp_path / "cluster", **options) as cluster, under_load(cluster) as client:
        for secrets in ((new, old), (new,)):
            write("lookupd", *secrets)  # both read one file, at their start
            for daemon in cluster.daemons:
                name = daemon.name if isinstance(daemon, Member) else "lookupd"
                restarted(cluster, daemon, partial(write, name, *secrets))
                client.goes_on()
        logs = "".join(daemon.log() for daemon in cluster.daemons)
        assert old not in logs and new not in logs


def test_a_certificate_is_renewed_without_a_restart(tmp_path: Path) -> None:
    (ask,) = re.findall(r"^    (openssl .*)$", PAGE, re.MULTILINE)
    made = Certificates(tmp_path)
    for name, days in (("broker1", 2), ("later", 30)):
        made.issue(name, "IP:127.0.0.1", days=days)
    flags = [f"--tls-cert={made.cert('broker1')}", f"--tls-key={made.key('broker1')}"]
    with Node(tmp_path / "node", flags=flags) as node:

        def expires() -> float:
            (found,) = re.findall(r"^nsqha_certificate_expiry_timestamp_seconds\S* (\S+)$", metrics(node), re.MULTILINE)
            return float(found)

        before = expires()
        for kind in ("key", "crt"):  # the key first, each written beside and renamed
            shutil.copy(tmp_path / f"later.{kind}", tmp_path / "new")
            os.replace(tmp_path / "new", tmp_path / f"broker1.{kind}")
        wait_until(lambda: expires() > before, "the new one counts", 20)
        answer = subprocess.run(shlex.split(ask), cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        end = datetime.datetime.strptime(answer.strip(), "notAfter=%b %d %H:%M:%S %Y %Z")
        assert expires() == end.replace(tzinfo=datetime.UTC).timestamp()


def metrics(node: Node) -> str:
    return node.request("/metrics").decode()


def test_a_token_is_renewed_while_both_count(tmp_path: Path) -> None:
    make, check = [command for command in of_page("Renew certificates and secrets") if " access " in command]
    access = tmp_path / "access.toml"
    access.write_text('anonymous = ["viewer"]\n')
    access.chmod(0o600)
    old = token(done(make.replace("billing-2", "billing"), cwd=tmp_path))
    with Node(tmp_path / "node", flags=[f"--access-file={access}"]) as node:
        assert status(node, old) == 200
        new = token(done(make, cwd=tmp_path))
        done(check, cwd=tmp_path)
        wait_until(lambda: status(node, new) == 200, "the new one counts")
        assert status(node, old) == 200
        text = access.read_text()
        (table,) = re.findall(r"^\[tokens\.billing\]\n.*?(?=^\[)", text, re.MULTILINE | re.DOTALL)
        beside = tmp_path / "access.new"
        beside.write_text(text.replace(table, ""))
        beside.chmod(0o600)
        beside.replace(access)
        done(check, cwd=tmp_path)
        wait_until(lambda: status(node, old) == 401, "the old one does not count any more")
        assert status(node, new) == 200


def token(said: str) -> str:
    return said.split()[0]


def status(node: Node, shown: str) -> int:
    connection = http.client.HTTPConnection(node.http, timeout=20)
    try:
        connection.request("POST", "/pub?topic=invoices", b"x", {"Authorization": f"Bearer {shown}"})
        return connection.getresponse().status
    finally:
        connection.close()
