"""The tables of nsqd and nsqlookupd: upstream's names, defaults and refusals, and what the commands print."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli import build_parser
from nsqha.errors import ConfigError
from nsqha.goflags import BOOL, DURATION, INT
from nsqha.options import (
    HOUR,
    MINUTE,
    SECOND,
    TOOL_VARIABLES,
    LookupdOptions,
    Options,
    TlsRequired,
    checked,
    config_value,
    default_node_id,
    flags_of,
    load_nsqd,
    load_nsqlookupd,
    nsqd_command_line,
    nsqlookupd_command_line,
    version_line,
)

ROOT = Path(__file__).resolve().parents[2]

UPSTREAM = """version config verbose worker-id log-level log-prefix node-id tcp-address http-address https-address
    broadcast-address broadcast-tcp-port broadcast-http-port lookupd-tcp-address auth-http-address
    auth-http-request-method http-client-connect-timeout http-client-request-timeout topology-region topology-zone
    data-path mem-queue-size max-bytes-per-file sync-every sync-timeout queue-scan-worker-pool-max
    queue-scan-selection-count msg-timeout max-msg-timeout max-msg-size max-body-size max-req-timeout
    max-heartbeat-interval max-rdy-count max-output-buffer-size max-output-buffer-timeout min-output-buffer-timeout
    output-buffer-timeout max-channel-consumers statsd-address statsd-prefix statsd-interval statsd-mem-stats
    statsd-udp-packet-size statsd-exclude-ephemeral e2e-processing-latency-percentile
    e2e-processing-latency-window-time tls-cert tls-key tls-root-ca-file tls-client-auth-policy tls-required
    tls-min-version deflate max-deflate-level snappy enable-experiment""".split()  # noqa: SIM905 - a list for reading


UPSTREAM_LOOKUPD = """version config verbose log-level log-prefix tcp-address http-address broadcast-address
    inactive-producer-timeout tombstone-lifetime""".split()  # noqa: SIM905 - a list for reading

OTHER_VALUES = {
    "log-level": "debug", "tls-min-version": "tls1.2", "tls-client-auth-policy": "require", "tls-required": "tcp-https",
    "auth-http-request-method": "post", "node-id": "7", "max-deflate-level": "3",
    "e2e-processing-latency-percentile": "0.5", "max-req-timeout": "2h",
}  # fmt: skip
TLS = ["--tls-cert=c", "--tls-key=k"]


def nsqd(*argv: str, env: dict[str, str] | None = None) -> Options:
    return load_nsqd(argv, env or {}).options


def test_every_flag_of_nsqd_is_there() -> None:
    names = [flag.name for flag in flags_of(Options)]
    assert set(UPSTREAM) <= set(names)
    assert len(names) == len(set(names))
    keys = {flag.name: flag.key for flag in flags_of(Options)}
    assert keys["node-id"] == "id"
    assert keys["lookupd-tcp-address"] == "nsqlookupd_tcp_addresses"
    assert keys["auth-http-address"] == "auth_http_addresses"
    assert keys["e2e-processing-latency-percentile"] == "e2e_processing_latency_percentiles"
    assert keys["enable-experiment"] == "enable_experiment"
    assert keys["msg-timeout"] == "msg_timeout"


@pytest.mark.parametrize(
    ("program", "name"),
    [("nsqd", name) for name in UPSTREAM] + [("nsqlookupd", name) for name in UPSTREAM_LOOKUPD],
)
def test_every_flag_and_key_of_upstream_sets_something(program: str, name: str, tmp_path: Path) -> None:
    """-x v, --x v, -x=v, --x=v and the key of the config file say the same, and not what is the default."""
    if name in ("version", "config"):
        return  # have tests of their own
    kind, load = (Options, load_nsqd) if program == "nsqd" else (LookupdOptions, load_nsqlookupd)
    flag = next(flag for flag in flags_of(kind) if flag.name == name)
    rest = TLS if name.startswith("tls-") and name not in ("tls-cert", "tls-key") else []
    rest += {"tls-cert": ["--tls-key=k"], "tls-key": ["--tls-cert=c"]}.get(name, [])
    value = OTHER_VALUES.get(name) or {BOOL: "false" if flag.default else "true", INT: "1234", DURATION: "1m23s"}.get(
        flag.kind, "a:1"
    )
    file = tmp_path / "config"
    file.write_text(f"{flag.key} = {value if flag.kind in (BOOL, INT) else repr(value)}\n")
    forms = [[f"-{name}={value}"], [f"--{name}={value}"], [f"--config={file}"]]
    if not flag.kind.is_bool:
        forms += [[f"-{name}", value], [f"--{name}", value]]
    found = [load([*form, *rest], {}) for form in forms]
    assert len({replace(loaded.options, config="") for loaded in found}) == 1
    assert found[0].options != load(TLS if rest else [], {}).options
    for loaded in found:
        said = [notice for notice in loaded.notices if notice.startswith(f"--{name} has no effect: ")]
        assert len(said) == len(loaded.notices) == bool(flag.inert)


def test_every_flag_is_read_by_somebody_or_says_that_it_has_no_effect() -> None:
    root = Path(__file__).parents[2]
    files = [file for part in ("nsqha", "lookupd") for file in (root / part).rglob("*.py") if file.stem != "options"]
    code = "".join(map(Path.read_text, files))
    within = {"max_bytes_per_file": "segment_bytes_or_default"}  # read by a property
    checks = ("config", "node_id", "insecure_cluster")  # read by the options themselves
    for kind in (Options, LookupdOptions):
        for item in fields(kind):
            read = re.search(rf"\.{within.get(item.name, item.name)}\b", code) is not None
            assert read != bool(item.metadata["inert"]) or item.name in checks, item.name


def test_defaults_are_nsqds_but_for_the_longest_delay() -> None:
    options = nsqd()
    assert (options.tcp_address, options.http_address, options.https_address) == (
        "0.0.0.0:4150",
        "0.0.0.0:4151",
        "0.0.0.0:4152",
    )
    assert (options.msg_timeout_ns, options.max_msg_timeout_ns, options.max_req_timeout_ns) == (
        MINUTE,
        15 * MINUTE,
        8760 * HOUR,
    )
    assert (options.max_msg_size, options.max_body_size, options.mem_queue_size) == (1048576, 5242880, 10000)
    assert (options.sync, options.sync_every, options.sync_timeout_ns) == ("always", 2500, 2 * SECOND)
    assert options.segment_bytes_or_default == 100 << 20
    assert options.broadcast_address
    assert 0 <= options.node_id < 1024


def test_the_node_id_follows_the_host_name() -> None:
    assert default_node_id("host-a") != default_node_id("host-b")
    assert nsqd("--node-id=5").node_id == 5


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--node-id=-1"], "--node-id=-1: must be at least 0"),
        (["--node-id=1024"], "--node-id=1024: must be at most 1023"),
        (["--max-deflate-level=0"], "--max-deflate-level=0: must be at least 1"),
        (["--max-deflate-level=10"], "--max-deflate-level=10: must be at most 9"),
        (["--e2e-processing-latency-percentile=1.5"], "above 0 and at most 1"),
        (["--e2e-processing-latency-percentile=0"], "above 0 and at most 1"),
        (["--e2e-processing-latency-percentile=nan"], "above 0 and at most 1"),
        (["--tls-required"], "without --tls-cert and --tls-key"),
        (["--tls-required=tcp-https"], "without --tls-cert and --tls-key"),
        (["--tls-client-auth-policy=require"], "without --tls-cert and --tls-key"),
        (["--tls-cert=c"], "go together"),
        (["--tls-cert=c", "--tls-key=k", "--tls-client-auth-policy=require-verify"], "--tls-root-ca-file"),
        (["--max-req-timeout=8761h"], "8760h"),
        (["--max-msg-size=0"], "--max-msg-size=0: must be at least 1"),
        (["--max-msg-size=2000000000"], "--max-msg-size=2000000000: must be at most"),
        (["--max-body-size=117440513"], "--max-body-size=117440513: must be at most 117440512"),
        (["--msg-timeout=-1s"], "--msg-timeout=-1s: must be above zero"),
        (["--broadcast-tcp-port=70000"], "--broadcast-tcp-port=70000: must be at most 65535"),
        (["--mem-queue-size=-1"], "--mem-queue-size=-1: must be at least 0"),
        (["--retention=-1h"], "--retention=-1h0m0s: must be at least 0s"),
        (["--scrub-interval=0s"], "--scrub-interval=0s: must be above zero"),
        (["--catch-up-bytes-per-second=-1"], "--catch-up-bytes-per-second=-1: must be at least 0"),
        (["--scrub-bytes-per-second=-1"], "--scrub-bytes-per-second=-1: must be at least 0"),
        (["--auth-http-request-method=put"], "-auth-http-request-method"),
        (["--tls-min-version=tls1.4"], "-tls-min-version"),
        (["--log-level=loud"], "-log-level"),
        (["--sync=often"], "-sync"),
        (["--config=/does/not/exist"], "--config=/does/not/exist: No such file"),
        (["--tcp-address="], "--tcp-address: must not be empty"),
    ],
)
def test_what_is_refused_at_the_start(argv: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        nsqd(*argv)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_client_certificate_policy_turns_tls_on() -> None:
    options = nsqd("--tls-client-auth-policy=require", "--tls-cert=c", "--tls-key=k")
    assert options.tls_required is TlsRequired.YES
    options = nsqd("--tls-client-auth-policy=require", "--tls-cert=c", "--tls-key=k", "--tls-required=tcp-https")
    assert options.tls_required is TlsRequired.EXCEPT_HTTP


def test_the_config_file_of_nsqd_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "nsqd.cfg"
    file.write_text(
        """
        ## as in nsqd's own sample
        verbose = false
        id = 7
        tcp_address = "127.0.0.1:1"
        nsqlookupd_tcp_addresses = ["127.0.0.1:4160", "127.0.0.1:4161"]
        max_output_buffer_timeout = "1s"
        sync_timeout = 3000
        tls_required = "tcp-https"
        tls_cert = "c"
        tls_key = "k"
        tls_min_version = ""
        e2e_processing_latency_percentiles = [1.0, 0.99]
        """
    )
    loaded = load_nsqd([f"--config={file}", "--tcp-address=127.0.0.1:2"], {"NSQD_LOG_LEVEL": "DEBUG"})
    options = loaded.options
    assert (options.node_id, options.tcp_address, options.log_level) == (7, "127.0.0.1:2", "debug")
    assert options.lookupd_tcp_addresses == ("127.0.0.1:4160", "127.0.0.1:4161")
    assert (options.max_output_buffer_timeout_ns, options.sync_timeout_ns) == (SECOND, 3 * SECOND)
    assert options.tls_required is TlsRequired.EXCEPT_HTTP
    assert options.e2e_processing_latency_percentiles == (1.0, 0.99)
    assert (loaded.sources["tcp-address"], loaded.sources["log-level"]) == ("flag", "env")
    assert sorted(loaded.notices) == [
        "--node-id has no effect: ids of messages come from topic, partition and offset; it is only shown",
        "--verbose has no effect: --log-level decides",
    ]


@pytest.mark.parametrize("load", [load_nsqd, load_nsqlookupd])
def test_a_config_file_may_begin_with_a_byte_order_mark(tmp_path: Path, load: Callable[..., Any]) -> None:
    file = tmp_path / "nsqd.cfg"
    file.write_bytes(b'\xef\xbb\xbftcp_address = "127.0.0.1:1"\n')
    assert load([f"--config={file}"], {}).options.tcp_address == "127.0.0.1:1"


@pytest.mark.parametrize("value", ["false", "7", '"yes"', "[1]", "1979-05-27"])
def test_keys_of_old_nsqds_may_have_any_value(tmp_path: Path, value: str) -> None:
    file = tmp_path / "nsqd.cfg"
    file.write_text("".join(f"{key} = {value}\n" for key in ("verbose", "worker_id", "max_message_size")))
    assert sorted(load_nsqd([f"--config={file}"], {}).notices) == [
        "--verbose has no effect: --log-level decides",
        "--worker-id has no effect: removed from nsqd; --node-id replaced it",
        f"max_message_size in {file} has no effect: removed from nsqd; max_msg_size replaced it",
    ]


@pytest.mark.parametrize("content", [b"tcp_address = ", b"\xff\xfe", b"a = 1\na = 2\n", b"a = " + b"[" * 100_000])
def test_a_broken_config_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "nsqd.cfg"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="not a TOML file") as caught:
        nsqd(f"--config={file}")
    assert "\n" not in str(caught.value)


def test_text_in_a_config_file_holds_no_nul(tmp_path: Path) -> None:
    """The system's calls take none: it would be a failure somewhere later."""
    file = tmp_path / "nsqd.cfg"
    for line in ('data_path = "a\\u0000b"', 'nsqlookupd_tcp_addresses = ["a\\u0000b:1"]'):
        file.write_text(line)
        with pytest.raises(ConfigError, match="a NUL character"):
            nsqd(f"--config={file}")


@pytest.mark.parametrize("flag", ["tcp-address", "http-address"])
def test_the_lookup_daemon_needs_both_addresses(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag}: must not be empty"):
        load_nsqlookupd([f"--{flag}="], {})


def test_networks_that_register_without_a_token_need_an_access_file() -> None:
    flag = "--register-from-cidr=10.0.0.0/8, ::1/128"
    assert load_nsqlookupd([flag, "--access-file=a"], {}).options.register_from_cidr == flag.partition("=")[2]
    with pytest.raises(ConfigError, match="--register-from-cidr needs --access-file"):
        load_nsqlookupd([flag], {})
    with pytest.raises(ConfigError, match=r"--register-from-cidr=10.0.0.0/99"):
        load_nsqlookupd(["--register-from-cidr=10.0.0.0/99", "--access-file=a"], {})


def test_the_lookup_daemon_has_https_where_all_of_it_is_given() -> None:
    certificate = ("--tls-cert=c", "--tls-key=k")
    flags = ["--https-address=0.0.0.0:4163", *certificate, "--metrics-address=127.0.0.1:9"]
    options = load_nsqlookupd(flags, {}).options
    assert (options.https_address, options.tls_cert, options.tls_key) == ("0.0.0.0:4163", "c", "k")
    assert options.metrics_address == "127.0.0.1:9"
    assert (LookupdOptions().https_address, LookupdOptions().metrics_address) == ("", "")
    for alone in (["--https-address=0.0.0.0:4163"], certificate):
        with pytest.raises(ConfigError, match="--https-address and --tls-cert go together"):
            load_nsqlookupd(list(alone), {})
    for half in certificate:
        with pytest.raises(ConfigError, match="--tls-cert and --tls-key go together"):
            load_nsqlookupd(["--https-address=0.0.0.0:4163", half], {})


def test_the_lookup_daemon_has_an_environment_of_its_own() -> None:
    env = {"NSQD_TCP_ADDRESS": "nsqd:1", "NSQLOOKUPD_TCP_ADDRESS": "lookup:1"}
    assert load_nsqlookupd([], env).options.tcp_address == "lookup:1"
    assert nsqd(env=env).tcp_address == "nsqd:1"
    with pytest.raises(ConfigError, match="tombstone-lifetime"):
        load_nsqlookupd(["--tombstone-lifetime=0"], {})
    assert LookupdOptions().inactive_producer_timeout_ns == 300 * SECOND


def test_where_the_command_line_tools_connect_is_nothing_to_a_daemon() -> None:
    """$NSQHA_GRPC_ADDRESS would be both where to connect and where to listen."""
    env = {
        f"NSQHA_{name}": "127.0.0.1:9"
        for name in ("ETCD_ENDPOINT", "GRPC_ADDRESS", "TCP_ADDRESS", "CLUSTER_NAME", "CLUSTER_TLS_CERT")
    }
    assert nsqd(env=env) == nsqd()
    assert load_nsqlookupd([], env) == load_nsqlookupd([], {})


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("NSQHA_DATAPATH", "NSQD_DATA_PATH"),
        ("NSQHA_DATA_PATH", "NSQD_DATA_PATH"),
        ("NSQD_DATAPATH", "NSQD_DATA_PATH"),
        ("NSQD_ETCD_ENDPOINTS", "NSQD_ETCD_ENDPOINT"),
        ("NSQD_BROADCAST_ADRESS", "NSQD_BROADCAST_ADDRESS"),
    ],
)
def test_a_misspelt_variable_is_said_with_the_nearest_name(variable: str, meant: str) -> None:
    (notice,) = load_nsqd([], {variable: "x"}).notices
    assert notice == f"{variable} in the environment has no effect: did you mean {meant}?"


def test_what_others_put_into_the_environment_is_not_talked_about() -> None:
    others = ("NSQD_PORT", "NSQD_SERVICE_HOST", "NSQD_PORT_4150_TCP_ADDR", "NSQLOOKUPD_PORT", "NSQD_" + "X" * 99)
    environ = dict.fromkeys((*others, *TOOL_VARIABLES), "x")
    assert not load_nsqd([], environ).notices


def test_the_variables_of_the_tools_are_those_that_they_read() -> None:
    """Those that are put together (`NSQHA_TLS_{..}`) are found in the help."""
    sources = "".join(path.read_text() for path in (ROOT / "nsqha" / "cli").rglob("*.py"))
    parser = build_parser()
    helps = "".join(below.format_help() for verb in parser.verbs().values() for below in [verb, *verb.verbs().values()])
    named = set(re.findall(r"\bNSQHA_[A-Z_]*[A-Z]\b", sources + helps))
    assert named - {"NSQHA_CLUSTER_TLS", "NSQHA_TLS"} <= TOOL_VARIABLES | {"NSQHA_EXTENSIONS", "NSQHA_IMAGE"}


def test_nsqd_joins_no_cluster_by_its_environment_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nsqd.cfg"
    file.write_text('etcd_endpoints = ["etcd:2379"]')
    by_variable = {"NSQD_ETCD_ENDPOINT": "etcd:2379"}
    for env in (by_variable, {"NSQD_CONFIG": str(file)}):
        with pytest.raises(SystemExit) as refused:
            nsqd_command_line(["--data-path=x"], env)
        assert refused.value.code == 1
        said = capsys.readouterr().err
        assert next(iter(env)) in said and "nsqha broker" in said
        assert load_nsqd([], env).options.etcd_endpoints == ("etcd:2379",), "nsqha broker says that it joins one"
    for flag, env in (("--etcd-endpoint=etcd:2379", by_variable), (f"--config={file}", {})):
        assert nsqd_command_line([flag], env).options.etcd_endpoints == ("etcd:2379",)
    assert nsqd_command_line(["--etcd-endpoint="], by_variable).options.etcd_endpoints == ()


@pytest.mark.parametrize("flag", ["--grpc-address=0.0.0.0:4152", "--peer-address=10.0.0.1:4152"])
def test_the_port_of_https_is_taken_once_there_is_a_certificate(flag: str) -> None:
    assert nsqd(flag).https_address == "0.0.0.0:4152", "it does not listen"
    with pytest.raises(ConfigError, match=re.escape(f"{flag} has the port of --https-address=0.0.0.0:4152")):
        nsqd(flag, "--tls-cert=c", "--tls-key=k")
    for https in ("--https-address=", "--https-address=0.0.0.0:4155"):
        nsqd(flag, "--tls-cert=c", "--tls-key=k", https)


def test_config_values_look_as_nsqd_shows_them() -> None:
    options = checked(Options(broadcast_address="h"))
    assert config_value(options, "log_level") == 2
    assert config_value(options, "msg_timeout") == 60_000_000_000
    assert config_value(options, "nsqlookupd_tcp_addresses") == []
    assert config_value(options, "snappy") is True
    assert config_value(options, "id") == 0
    assert config_value(options, "tls_required") == 0
    assert config_value(options, "tls_min_version") == 0x0301
    for key in ("nope", "config", "version", "node_id", "msg_timeout_ns"):
        with pytest.raises(KeyError):
            config_value(options, key)


def test_every_field_is_checked_or_free_text() -> None:
    """A number that nobody bounds is a mistake in the table."""
    loose = {"queue_scan_worker_pool_max", "queue_scan_selection_count"}  # without effect
    for item in fields(Options):
        if item.type == "int" and item.name not in loose:
            name = item.metadata["name"] or item.name.removesuffix("_ns").replace("_", "-")
            value = "-9223372036s" if item.name.endswith("_ns") else "-9223372036854775808"
            with pytest.raises(ConfigError):
                nsqd(f"--{name}={value}")


def test_the_version_line() -> None:
    assert version_line("nsqd") == f"nsqd v1.3.0 (built w/python3.{sys.version_info.minor})"


@pytest.mark.parametrize(
    ("argv", "status", "out", "err"),
    [
        (["--version"], 0, "nsqd v1.3.0 (built w/python", ""),
        (["-version"], 0, "nsqd v1.3.0 (built w/python", ""),
        (["--help"], 0, "Usage of nsqd:\n", ""),
        (["--nope"], 2, "", "flag provided but not defined: -nope\nRun 'nsqd --help' for usage.\n"),
        (["--msg-timeout=soon"], 2, "", 'invalid value "soon" for flag -msg-timeout: parse error\n'),
        (["--node-id=1024"], 1, "", "nsqd: --node-id=1024: must be at most 1023\n"),
    ],
)
def test_how_the_command_ends(
    argv: list[str], status: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        nsqd_command_line(argv, {})
    printed = capsys.readouterr()
    assert caught.value.code == status
    assert printed.out.startswith(out)
    assert printed.err.startswith(err)
    assert bool(printed.out) == bool(out)


def test_the_help_of_the_lookup_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nsqlookupd_command_line(["-h"], {})
    assert "-tombstone-lifetime duration\n" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help_import_nothing_slow(flag: str) -> None:
    code = (
        f"import sys, runpy; sys.argv = ['nsqlookupd', {flag!r}]\n"
        "try: runpy.run_module('lookupd', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(sorted({'asyncio', 'aiohttp', 'grpc', 'uvloop'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "nsqlookupd" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_lookup_daemon_of_a_cluster_needs_etcd() -> None:
    assert load_nsqlookupd([], {}).options.etcd_endpoints == ()
    given = load_nsqlookupd(["--etcd-endpoint=a:2379,b:2379", "--etcd-endpoint", "c:2379", "--etcd-ca=ca"], {}).options
    assert (given.etcd_endpoints, given.cluster_name) == (("a:2379", "b:2379", "c:2379"), "nsqha")
    for flag in ("--etcd-user=u", "--etcd-password-file=f", "--etcd-ca=ca"):
        with pytest.raises(ConfigError, match="it needs --etcd-endpoint"):
            load_nsqlookupd([flag], {})
        with pytest.raises(ConfigError, match="it needs --etcd-endpoint"):
            load_nsqd([flag], {})
    with pytest.raises(ConfigError, match="go together"):
        load_nsqlookupd(["--etcd-endpoint=a:1", "--cluster-tls-key=k"], {})


CLUSTER = "--etcd-endpoint=127.0.0.1:2379"


@pytest.mark.parametrize("flag", ["grpc-address", "peer-address", "segments-address"])
def test_a_cluster_that_strangers_reach_is_refused(flag: str) -> None:
    for host in ("0.0.0.0", "", "[::]", "10.0.0.1", "broker1"):
        with pytest.raises(ConfigError, match=f"--{flag}={re.escape(host)}:4199: other hosts reach it"):
            nsqd(CLUSTER, f"--{flag}={host}:4199")
        nsqd(CLUSTER, f"--{flag}={host}:4199", "--insecure-cluster")
        nsqd(f"--{flag}={host}:4199")
    for host in ("127.0.0.1", "127.0.0.2", "[::1]", "localhost"):
        nsqd(CLUSTER, f"--{flag}={host}:4199")


def test_a_secret_opens_calls_and_streams_and_not_segments() -> None:
    secret = (CLUSTER, "--cluster-secret-file=/x")
    nsqd(*secret, "--grpc-address=0.0.0.0:4199", "--peer-address=0.0.0.0:4198")
    with pytest.raises(ConfigError, match="without --cluster-tls-cert each of them"):
        nsqd(*secret, "--segments-address=0.0.0.0:4199")
