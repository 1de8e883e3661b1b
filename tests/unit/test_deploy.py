"""The files in deploy/ name flags that exist, agree with each other, and mean what their comments say."""

from __future__ import annotations

import configparser
import shlex
import tomllib
from pathlib import Path

import pytest

from nsqha.options import SECOND, LoadedOptions, LookupdOptions, Options, load_nsqd, load_nsqlookupd
from nsqha.server.node.start import LEAVE_SECONDS_MAX

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
DAEMONS = ["broker", "lookupd"]


def unit(daemon: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None)
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
