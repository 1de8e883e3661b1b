"""The files in deploy/ name flags that exist, agree with each other, and mean what their comments say."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from nsqha.cli import build_parser
from nsqha.cli.generate.systemd import SANDBOX
from nsqha.goflags import load
from nsqha.options import SECOND, LoadedOptions, LookupdOptions, Options, flags_of, load_nsqd, load_nsqlookupd
from nsqha.server.node.start import LEAVE_SECONDS_MAX
from nsqha.server.runtime.service_manager import EXTEND_SECONDS, TICKS_PER_PERIOD
from tests.certificates import Certificates

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
DAEMONS = ["broker", "lookupd"]


def unit(daemon: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None, strict=False)  # of a key that comes twice the last one
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(FOLDER / f"nsqha-{daemon}.service")
    return parsed


def flags(daemon: str) -> list[str]:
    """Of the unit's command, with the settings of this folder."""
    program, verb, *given = shlex.split(unit(daemon)["Service"]["ExecStart"])
    assert (Path(program).name, verb) == ("nsqha", daemon)
    found = f"--config=/etc/nsqha/{daemon}.toml"
    assert found in given
    return [f"--config={FOLDER / daemon}.toml" if flag == found else flag for flag in given]


def settings(daemon: str) -> dict[str, object]:
    return tomllib.loads((FOLDER / f"{daemon}.toml").read_text())


def loaded(daemon: str) -> LoadedOptions[Options] | LoadedOptions[LookupdOptions]:
    return load_nsqd(flags(daemon), {}) if daemon == "broker" else load_nsqlookupd(flags(daemon), {})


@pytest.mark.parametrize("daemon", DAEMONS)
def test_the_command_can_be_used_and_every_setting_counts(daemon: str) -> None:
    found = loaded(daemon)
    assert not found.notices
    named = {name.replace("_", "-").replace("endpoints", "endpoint") for name in settings(daemon)}
    assert named <= found.sources.keys()
    assert len(found.options.etcd_endpoints) == 3
    assert found.options.cluster_tls_ca and found.options.etcd_password_file


def test_a_broker_keeps_its_data_where_systemd_makes_a_folder_for_it() -> None:
    options = load_nsqd(flags("broker"), {}).options
    assert options.data_path == "/var/lib/" + unit("broker")["Service"]["StateDirectory"]
    assert options.grpc_address.startswith("0.0.0.0:"), "other hosts have to reach it"
    assert options.peer_address.startswith("0.0.0.0:"), "and this"
    assert options.host and options.topology_zone


@pytest.mark.parametrize("daemon", DAEMONS)
def test_every_setting_is_in_its_file_with_the_default_that_it_has(daemon: str) -> None:
    """What is commented out there may be commented in: it changes nothing."""
    text = (FOLDER / f"{daemon}.toml").read_text().partition("# Every other setting")[2]
    plain = tomllib.loads("\n".join(line[2:] for line in text.splitlines() if " = " in line))
    table = Options if daemon == "broker" else LookupdOptions
    keys = {flag.key for flag in flags_of(table) if flag.key and not flag.inert} - {"config"}
    assert set(plain) | set(settings(daemon)) | {"cluster_secret_file"} == keys
    read = load(flags_of(table), ["--config=x"], environ={}, env_prefix="X_", read_toml=lambda _: plain)
    assert read.values == {flag.name: flag.default for flag in flags_of(table)} | {"config": "x"}


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_unit_is_told_when_the_daemon_is_ready_and_that_it_runs(daemon: str) -> None:
    service = unit(daemon)["Service"]
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert float(service["WatchdogSec"].removesuffix("s")) >= 30, "a machine that swaps is slow, and not dead"
    assert float(service["TimeoutStartSec"].removesuffix("s")) > EXTEND_SECONDS / TICKS_PER_PERIOD


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True)


@pytest.mark.parametrize("daemon", DAEMONS)
def test_the_sandbox_is_tight(daemon: str) -> None:
    path = FOLDER / f"nsqha-{daemon}.service"
    done = analyze("security", "--offline=true", "--threshold=25", str(path))
    assert done.returncode == 0, done.stdout[-500:]


def test_a_unit_without_its_sandbox_would_be_noticed(tmp_path: Path) -> None:
    text = (FOLDER / "nsqha-broker.service").read_text()
    (tmp_path / "nsqha-broker.service").write_text(text.replace(SANDBOX, ""))
    assert analyze("security", "--offline=true", "--threshold=25", str(tmp_path / "nsqha-broker.service")).returncode


@pytest.mark.parametrize("daemon", DAEMONS)
def test_systemd_understands_every_line(daemon: str, tmp_path: Path) -> None:
    text = (FOLDER / f"nsqha-{daemon}.service").read_text()
    there = tmp_path / f"nsqha-{daemon}.service"
    # What it starts has to be there, and the manual page is not installed.
    there.write_text(text.replace("/opt/nsqha/bin/nsqha", "/bin/true").replace("Documentation=", "# "))
    done = analyze("verify", "--man=no", str(there))
    ours = [line for line in done.stderr.splitlines() if there.name in line]
    assert not ours, ours
    there.write_text(there.read_text().replace("WatchdogSec", "WatchdogSeconds").replace("Type=notify", "Type=tell"))
    said = analyze("verify", "--man=no", str(there)).stderr
    assert "WatchdogSeconds" in said and "service type" in said, "a spoilt unit is refused"


@pytest.mark.parametrize("daemon", DAEMONS)
def test_what_ends_is_started_again(daemon: str) -> None:
    assert unit(daemon)["Service"]["Restart"] == "always"
    assert unit(daemon)["Unit"]["StartLimitIntervalSec"] == "0"


def test_a_stop_has_time_to_hand_over() -> None:
    seconds = float(unit("broker")["Service"]["TimeoutStopSec"].removesuffix("s"))
    options = load_nsqd(flags("broker"), {}).options
    assert seconds > LEAVE_SECONDS_MAX + options.publish_outcome_wait_ns / SECOND


def test_both_daemons_use_the_same_etcd_and_authority() -> None:
    broker, lookupd = settings("broker"), settings("lookupd")
    shared = [name for name in broker if name.startswith("etcd_")] + ["cluster_tls_ca"]
    assert {name: broker[name] for name in shared} == {name: lookupd[name] for name in shared}


def test_a_broker_with_a_certificate_for_clients_has_a_port_for_each_listener() -> None:
    options = load_nsqd([*flags("broker"), "--tls-cert=c", "--tls-key=k"], {}).options
    addresses = [
        options.tcp_address,
        options.http_address,
        options.https_address,
        options.grpc_address,
        options.peer_address,
        options.segments_address,
    ]
    assert len({address.rpartition(":")[2] for address in addresses}) == len(addresses)


# ---- docs/operate.md


def commands() -> list[list[str]]:
    """Every command of ours on the pages, with what is around it in a shell taken off."""
    text = "".join((FOLDER.parents[1] / page).read_text() for page in ("docs/operate.md", "deploy/README.md"))
    found = re.findall(r"(?:^    |`|exec broker1 |until )(nsqha(?: [\w./|-]+)+)", text, re.MULTILINE)
    return [shlex.split(command.partition(" |")[0]) for command in found]


def test_every_command_on_the_pages_is_one() -> None:
    assert len(commands()) >= 9
    parser = build_parser()
    for words in commands():
        for alternative in words[-1].split("|"):
            parser.parse_args([*words[1:-1], alternative])  # SystemExit if there is no such verb or flag


def test_what_the_pages_name_is_in_the_files() -> None:
    text = (FOLDER.parents[1] / "docs/operate.md").read_text()
    services = yaml.safe_load((FOLDER.parent / "compose/cluster.yaml").read_text())["services"]
    assert set(re.findall(r"(?:restart|exec) (broker\w*)", text)) <= set(services)
    broker = yaml.safe_load((FOLDER.parent / "k8s/broker.yaml").read_text())
    name = broker["metadata"]["name"]
    assert set(re.findall(r"statefulset ([\w-]+)", text)) == {name}
    claim = broker["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    assert re.findall(r"delete pvc ([\w-]+)", text) == [f"{claim}-{name}-{broker['spec']['replicas'] - 1}"]


def test_the_page_says_how_to_see_until_when_a_certificate_is_good(tmp_path: Path) -> None:
    (command,) = re.findall(r"^    (openssl .*)$", (FOLDER.parents[1] / "docs/operate.md").read_text(), re.MULTILINE)
    Certificates(tmp_path).issue("broker1", "DNS:broker1.example")
    done = subprocess.run(shlex.split(command), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("notAfter=")
