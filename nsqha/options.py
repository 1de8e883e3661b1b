"""Every flag of nsqd and nsqlookupd, once: name, key in the config file, default, limits, meaning.

A dataclass is the table: a field `msg_timeout_ns` is the flag --msg-timeout and the key msg_timeout. Names, keys,
defaults and refusals are nsqd's; the last block of Options is our own. Durations are integers of nanoseconds (`_ns`).
Flags that tune something this broker does not have are accepted, so that existing start scripts work; a log line says
so once.

    loaded = nsqd_command_line(sys.argv[1:], os.environ)      # or SystemExit: --version, --help, a wrong flag
    loaded.options.msg_timeout_ns
    for line in loaded.notices: log.info(...)

Precedence: flag > environment (NSQD_MSG_TIMEOUT; NSQLOOKUPD_TCP_ADDRESS for the lookup daemon) > file > default.
NSQHA_... belongs to the command line tools, which connect where these variables say. `nsqd` joins a cluster only if its
command line says so, in a flag or by --config: `nsqha broker` is for the rest.
"""

from __future__ import annotations

import difflib
import enum
import ipaddress
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from hashlib import md5
from typing import Any, ClassVar, Generic, TypeVar

from nsqha import NSQ_VERSION
from nsqha.errors import ConfigError
from nsqha.goflags import (
    BOOL,
    DURATION,
    FLOATS,
    INT,
    STRING,
    STRINGS,
    Flag,
    HelpWanted,
    Kind,
    UsageError,
    VersionWanted,
    choice,
    load,
    parse_bool,
    usage,
)
from nsqha.ids import valid_name

SECOND = 10**9
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
KIB = 1 << 10
MIB = 1 << 20

DELAY_NS_MAX = 8760 * HOUR
"""The largest --max-req-timeout: a year."""
MISSPELT_CHARACTERS_MAX = 80
"""A longer variable is compared with nothing."""
BODY_BYTES_LIMIT = 112 * MIB
"""The largest --max-body-size: as frames of messages of one byte that is one batch of 2 GB, the largest that can be
replicated."""
LOG_LEVELS = ("debug", "info", "warn", "error", "fatal")
TLS_VERSIONS = {"": 0x0301, "tls1.0": 0x0301, "tls1.1": 0x0302, "tls1.2": 0x0303, "tls1.3": 0x0304}
VERIFIED = "require-verify"
"""The value of --tls-client-auth-policy with which a client's certificate is what it says."""


class TlsRequired(enum.IntEnum):
    """Which listeners require TLS; GET /config/tls_required answers these numbers."""

    NO = 0
    EXCEPT_HTTP = 1
    YES = 2


def _tls_required(text: str) -> TlsRequired:
    if text.lower() == "tcp-https":
        return TlsRequired.EXCEPT_HTTP
    return TlsRequired.YES if parse_bool(text) else TlsRequired.NO


def _tls_required_toml(value: object) -> TlsRequired:
    if not isinstance(value, bool):
        raise ValueError('expected true, false or "tcp-https"')
    return TlsRequired.YES if value else TlsRequired.NO


_TLS_REQUIRED = Kind("", _tls_required, _tls_required_toml, is_bool=True, words=("true", "false", "tcp-https"))
_LEVEL = choice(*LOG_LEVELS)
_LOG_FORMAT = choice("text", "json")
_NO_SCAN = "time-outs and delays have exact deadlines, there is no queue scan"


def _flag(
    kind: Kind,
    default: Any,
    usage: str,
    *,
    name: str = "",
    key: str = "",
    inert: str = "",
    least: int | None = None,
    most: int | None = None,
) -> Any:
    metadata = {"kind": kind, "usage": usage, "name": name, "key": key, "inert": inert, "least": least, "most": most}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one nsqd. PUT /config makes a changed copy with `replace`."""

    config: str = _flag(STRING, "", "path to a config file")
    node_id: int = _flag(
        INT, 0, "number of this node in its log, 0-1023 (default: from the host name)", key="id",
        inert="ids of messages come from topic, partition and offset; it is only shown", least=0, most=1023,
    )  # fmt: skip
    log_level: str = _flag(_LEVEL, "info", "debug, info, warn, error or fatal")
    log_prefix: str = _flag(STRING, "[nsqd] ", "log message prefix")
    log_format: str = _flag(_LOG_FORMAT, "text", "text: as nsqd writes it; json: one object per line")
    verbose: bool = _flag(BOOL, False, "", inert="--log-level decides")
    worker_id: bool = _flag(BOOL, False, "", inert="removed from nsqd; --node-id replaced it")

    tcp_address: str = _flag(STRING, "0.0.0.0:4150", "<addr>:<port> or the path of a unix socket, for TCP clients")
    http_address: str = _flag(STRING, "0.0.0.0:4151", "<addr>:<port> for HTTP clients; empty: none")
    https_address: str = _flag(STRING, "0.0.0.0:4152", "<addr>:<port> for HTTPS clients; only with a certificate")
    broadcast_address: str = _flag(STRING, "", "address that is registered with lookupd (default: the host name)")
    broadcast_tcp_port: int = _flag(
        INT, 0, "TCP port that is registered with lookupd (default: the real one)", least=0, most=65535
    )
    broadcast_http_port: int = _flag(
        INT, 0, "HTTP port that is registered with lookupd (default: the real one)", least=0, most=65535
    )
    lookupd_tcp_addresses: tuple[str, ...] = _flag(
        STRINGS, (), "lookupd TCP address (may be given several times)",
        name="lookupd-tcp-address", key="nsqlookupd_tcp_addresses",
    )  # fmt: skip
    auth_http_addresses: tuple[str, ...] = _flag(
        STRINGS, (), "<addr>:<port> or URL of an auth server (may be given several times)", name="auth-http-address"
    )
    auth_http_request_method: str = _flag(choice("get", "post"), "get", "HTTP method for the auth server: get or post")
    http_client_connect_timeout_ns: int = _flag(DURATION, 2 * SECOND, "timeout for HTTP connects", least=1)
    http_client_request_timeout_ns: int = _flag(DURATION, 5 * SECOND, "timeout for HTTP requests", least=1)
    topology_region: str = _flag(STRING, "", "region of this host, for clients that prefer near ones")
    topology_zone: str = _flag(STRING, "", "zone of this host, for clients that prefer near ones")

    data_path: str = _flag(STRING, "", "folder for all data (default: the current folder)")
    mem_queue_size: int = _flag(
        INT, 10_000, "unread messages that an #ephemeral topic or channel keeps at most", least=0
    )
    max_bytes_per_file: int = _flag(
        INT, 100 * MIB, "bytes per segment file before rolling, unless --segment-bytes", least=1
    )
    sync_every: int = _flag(INT, 2500, "messages per fsync with --sync=interval; at most one fsync per 50 ms", least=1)
    sync_timeout_ns: int = _flag(DURATION, 2 * SECOND, "time between fsyncs with --sync=interval", least=1)
    queue_scan_worker_pool_max: int = _flag(INT, 4, "", inert=_NO_SCAN)
    queue_scan_selection_count: int = _flag(INT, 20, "", inert=_NO_SCAN)

    msg_timeout_ns: int = _flag(DURATION, MINUTE, "default time to answer a message before it is requeued", least=1)
    max_msg_timeout_ns: int = _flag(DURATION, 15 * MINUTE, "longest --msg-timeout that a client may ask for", least=1)
    max_msg_size: int = _flag(INT, MIB, "largest message in bytes", least=1, most=1 << 30)
    max_req_timeout_ns: int = _flag(
        DURATION, DELAY_NS_MAX, "longest delay of REQ and DPUB, up to 8760h", least=0, most=DELAY_NS_MAX
    )
    max_body_size: int = _flag(INT, 5 * MIB, "largest command body in bytes", least=1, most=BODY_BYTES_LIMIT)

    max_heartbeat_interval_ns: int = _flag(
        DURATION, MINUTE, "longest heartbeat interval that a client may ask for", least=1
    )
    max_rdy_count: int = _flag(INT, 2500, "largest RDY count of a client", least=1)
    max_output_buffer_size: int = _flag(INT, 64 * KIB, "largest output buffer that a client may ask for", least=1)
    max_output_buffer_timeout_ns: int = _flag(
        DURATION, 30 * SECOND, "longest output buffer timeout of a client", least=1
    )
    min_output_buffer_timeout_ns: int = _flag(
        DURATION, 25_000_000, "shortest output buffer timeout of a client", least=1
    )
    output_buffer_timeout_ns: int = _flag(DURATION, 250_000_000, "default upper bound for buffering output", least=1)
    max_channel_consumers: int = _flag(INT, 0, "consumers per channel on this node; 0: no limit", least=0)

    statsd_address: str = _flag(STRING, "", "UDP <addr>:<port> of a statsd daemon")
    statsd_interval_ns: int = _flag(DURATION, MINUTE, "time between pushes to statsd", least=1)
    statsd_mem_stats: bool = _flag(BOOL, True, "send memory statistics to statsd")
    statsd_prefix: str = _flag(STRING, "nsq.%s", "prefix of statsd keys; %s is the host")
    statsd_udp_packet_size: int = _flag(INT, 508, "bytes per statsd packet", least=1, most=65535)
    statsd_exclude_ephemeral: bool = _flag(BOOL, False, "leave #ephemeral topics and channels out of statsd")
    e2e_processing_latency_percentiles: tuple[float, ...] = _flag(
        FLOATS, (), "message age at FIN to report, as a fraction (may be given several times)",
        name="e2e-processing-latency-percentile",
    )  # fmt: skip
    e2e_processing_latency_window_time_ns: int = _flag(DURATION, 10 * MINUTE, "window of those percentiles", least=1)

    tls_cert: str = _flag(STRING, "", "path to the certificate file")
    tls_key: str = _flag(STRING, "", "path to the key file")
    tls_client_auth_policy: str = _flag(
        choice("", "require", VERIFIED), "", "client certificates: require or require-verify"
    )
    tls_root_ca_file: str = _flag(STRING, "", "path to the certificates that client certificates are verified against")
    tls_required: TlsRequired = _flag(  # noqa: RUF009 - an enumeration is immutable
        _TLS_REQUIRED, TlsRequired.NO, "refuse connections without TLS: true, false, tcp-https (plain HTTP stays open)"
    )
    tls_min_version: str = _flag(choice(*TLS_VERSIONS), "tls1.0", "lowest TLS version: tls1.0, tls1.1, tls1.2, tls1.3")
    deflate: bool = _flag(BOOL, True, "allow deflate")
    max_deflate_level: int = _flag(INT, 6, "highest deflate level that a client may ask for, 1-9", least=1, most=9)
    snappy: bool = _flag(BOOL, True, "allow snappy")
    enable_experiments: tuple[str, ...] = _flag(
        STRINGS, (), "experimental feature of nsqd (may be given several times)",
        name="enable-experiment", key="enable_experiment", inert="none of nsqd's experiments is in this broker",
    )  # fmt: skip

    sync: str = _flag(
        choice("always", "interval", "none"), "always",
        "what OK means for new topics: always: on disk; interval, none: written, fsync later or never",
    )  # fmt: skip
    grpc_address: str = _flag(STRING, "127.0.0.1:0", "<addr>:<port> for administration over gRPC; port 0: a free one")
    peer_address: str = _flag(
        STRING, "", "<addr>:<port> for streams between nodes of a cluster (default: the port after --grpc-address)"
    )
    segments_address: str = _flag(
        STRING, "127.0.0.1:0", "<addr>:<port> for readers of stored segments over HTTP; port 0: a free one; empty: none"
    )
    etcd_endpoints: tuple[str, ...] = _flag(
        STRINGS, (), "<addr>:<port> of an etcd member (may be given several times); makes this node one of a cluster",
        name="etcd-endpoint",
    )  # fmt: skip
    etcd_ca: str = _flag(STRING, "", "path to the certificate authority of etcd; with it TLS is used")
    etcd_cert: str = _flag(STRING, "", "path to this node's certificate for etcd")
    etcd_key: str = _flag(STRING, "", "path to the key of --etcd-cert")
    etcd_user: str = _flag(STRING, "", "user name for etcd")
    etcd_password_file: str = _flag(STRING, "", "path to a file with the password for etcd")
    cluster_name: str = _flag(STRING, "nsqha", "name of this cluster in etcd, which may hold several")
    new_cluster: bool = _flag(BOOL, False, "begin a cluster of this name though etcd has others")
    node_name: str = _flag(STRING, "", "name of this node for operators (default: broadcast address and TCP port)")
    host: str = _flag(STRING, "", "label: replicas of a partition are never on the same host (default: each its own)")
    lease_ttl_ns: int = _flag(
        DURATION, 3 * SECOND, "a node that is silent for this long counts as gone; at least 2s", least=2 * SECOND
    )
    isr_timeout_ns: int = _flag(
        DURATION, 2 * SECOND, "a replica that lags for this long leaves the in-sync replicas", least=1
    )
    max_clock_skew_ns: int = _flag(
        DURATION,
        10 * SECOND,
        "a node whose clock is further off does not lead; stamps are at most this far off; 0: off",
        least=0,
    )
    topic_replicas: int = _flag(
        INT, 0, "replicas of a new topic's partitions; 0: three, or as many as there are nodes", least=0
    )
    cluster_tls_cert: str = _flag(
        STRING,
        "",
        "this node's certificate; with it the gRPC and peer ports require one of --cluster-tls-ca from every client",
    )
    cluster_tls_key: str = _flag(STRING, "", "path to the key of --cluster-tls-cert")
    cluster_tls_ca: str = _flag(STRING, "", "path to a certificate authority that is only for this cluster")
    cluster_secret_file: str = _flag(
        STRING, "", "path to a file with a secret that all processes of the cluster have; without it calls are refused"
    )
    insecure_cluster: bool = _flag(
        BOOL,
        False,
        "start without --cluster-tls-cert and --cluster-secret-file, on a network that only the cluster has",
    )
    segment_bytes: int = _flag(INT, 0, "bytes per segment file before rolling (default: --max-bytes-per-file)", least=0)
    tail_cache_bytes: int = _flag(INT, 16 * MIB, "memory for the newest batches, of all topics", least=0)
    disk_low_bytes: int = _flag(
        INT, 256 * MIB, "refuse publishes while the disk has less free space; 0: never", least=0
    )
    retention_ns: int = _flag(DURATION, 24 * HOUR, "keep finished messages this long, for replay", least=0)
    retention_bytes: int = _flag(INT, 1 << 30, "... and at most this many bytes per partition; -1: no limit", least=-1)
    scrub_bytes_per_second: int = _flag(
        INT, 8 * MIB, "bytes/s of reading stored messages that have no readers, to find damage early; 0: off", least=0
    )
    catch_up_bytes_per_second: int = _flag(
        INT,
        32 * MIB,
        "bytes/s that replicas outside the ISR pull to this node at most, or get from it; 0: no limit",
        least=0,
    )
    scrub_interval_ns: int = _flag(DURATION, 24 * HOUR, "shortest time between two such reads of everything", least=1)
    max_topic_channels: int = _flag(
        INT,
        1000,
        "channels of a topic; one more is refused, as each costs every change of their list; 0: no limit",
        least=0,
    )
    max_node_partitions: int = _flag(
        INT, 20_000, "partitions of a node, replicas included; a topic beyond that is refused; 0: no limit", least=0
    )
    allow_config_from_cidr: str = _flag(
        STRING, "127.0.0.0/8,::1/128", "networks from which PUT /config is allowed, with commas; empty: from none"
    )
    ephemeral_topic_bytes: int = _flag(
        INT,
        64 * MIB,
        "memory of an #ephemeral topic's messages; beyond 3/4 of it the oldest unread ones are dropped",
        least=MIB,
    )
    ephemeral_bytes: int = _flag(
        INT, 256 * MIB, "... of all #ephemeral topics of this node, in equal shares above it", least=MIB
    )
    topic_partitions: int = _flag(INT, 1, "partitions of a topic that a client creates by using it", least=1, most=1023)
    auto_create_topics: bool = _flag(BOOL, True, "PUB and SUB create the topic they name")
    publish_queue_bytes: int = _flag(
        INT, 64 * MIB, "bytes of waiting publishes; above it sockets are not read", least=1
    )
    publish_wait_ns: int = _flag(DURATION, 5 * SECOND, "a publish that is not written after this time fails", least=1)
    publish_outcome_wait_ns: int = _flag(
        DURATION, 30 * SECOND, "a written publish without outcome after this time fails", least=1
    )

    access_file: str = _flag(
        STRING,
        "",
        "path to a file that says who may do what (`nsqha access token` makes its lines); empty: everybody",
    )
    audit_topic: str = _flag(STRING, "", "topic that also gets the record of each change, beside the log")
    lookupd_token_file: str = _flag(
        STRING,
        "",
        "path to a file with the token (role broker) that those of --lookupd-tcp-address with an access file are shown",
    )
    metrics_address: str = _flag(STRING, "", "<addr>:<port> for /metrics and health alone (default: --http-address)")

    @property
    def segment_bytes_or_default(self) -> int:
        return self.segment_bytes or self.max_bytes_per_file


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupdOptions:
    """The options of one nsqlookupd."""

    config: str = _flag(STRING, "", "path to a config file")
    log_level: str = _flag(_LEVEL, "info", "debug, info, warn, error or fatal")
    log_prefix: str = _flag(STRING, "[nsqlookupd] ", "log message prefix")
    log_format: str = _flag(_LOG_FORMAT, "text", "text: as nsqlookupd writes it; json: one object per line")
    verbose: bool = _flag(BOOL, False, "", inert="--log-level decides")
    tcp_address: str = _flag(STRING, "0.0.0.0:4160", "<addr>:<port> for TCP clients")
    http_address: str = _flag(STRING, "0.0.0.0:4161", "<addr>:<port> for HTTP clients")
    https_address: str = _flag(STRING, "", "<addr>:<port> for HTTPS clients; needs --tls-cert and --tls-key")
    broadcast_address: str = _flag(STRING, "", "address of this lookupd node (default: the host name)")
    inactive_producer_timeout_ns: int = _flag(
        DURATION, 300 * SECOND, "how long a producer stays in the list after its last ping", least=1
    )
    tombstone_lifetime_ns: int = _flag(
        DURATION, 45 * SECOND, "how long a tombstone hides a producer of a topic", least=1
    )
    tls_cert: str = _flag(STRING, "", "path to the certificate file of --https-address")
    tls_key: str = _flag(STRING, "", "path to the key of --tls-cert")

    etcd_endpoints: tuple[str, ...] = _flag(
        STRINGS, (), "<addr>:<port> of an etcd member (may be given several times); makes this a cluster's controller",
        name="etcd-endpoint",
    )  # fmt: skip
    etcd_ca: str = _flag(STRING, "", "path to the certificate authority of etcd; with it TLS is used")
    etcd_cert: str = _flag(STRING, "", "path to this daemon's certificate for etcd")
    etcd_key: str = _flag(STRING, "", "path to the key of --etcd-cert")
    etcd_user: str = _flag(STRING, "", "user name for etcd")
    etcd_password_file: str = _flag(STRING, "", "path to a file with the password for etcd")
    cluster_name: str = _flag(STRING, "nsqha", "name of its cluster in etcd, which may hold several")
    new_cluster: bool = _flag(BOOL, False, "begin a cluster of this name though etcd has others")
    cluster_tls_cert: str = _flag(STRING, "", "this daemon's certificate, for nodes that require one")
    cluster_tls_key: str = _flag(STRING, "", "path to the key of --cluster-tls-cert")
    cluster_tls_ca: str = _flag(STRING, "", "path to a certificate authority that is only for this cluster")
    replace_after_ns: int = _flag(
        DURATION, 10 * MINUTE, "a node that is away for this long is replaced on other hosts; 0: never", least=0
    )
    max_topic_channels: int = _flag(
        INT, 1000, "channels of a cluster's topic; /channel/create of one more is refused; 0: no limit", least=0
    )
    cluster_secret_file: str = _flag(
        STRING, "", "path to a file with a secret that all processes of the cluster have; without it calls are refused"
    )
    access_file: str = _flag(
        STRING,
        "",
        "path to a file that says who may do what (`nsqha access token` makes its lines); empty: everybody",
    )
    register_from_cidr: str = _flag(
        STRING,
        "",
        "networks from which producers may register without a token, with commas; for nsqd of NSQ, with --access-file",
    )
    metrics_address: str = _flag(STRING, "", "<addr>:<port> for /metrics and health alone (default: --http-address)")

    # No flags: no old client needs less, as nsqlookupd has no HTTPS; and callers show tokens, not certificates.
    tls_min_version: ClassVar[str] = "tls1.2"
    tls_client_auth_policy: ClassVar[str] = ""
    tls_root_ca_file: ClassVar[str] = ""


T = TypeVar("T", Options, LookupdOptions)


@dataclass(frozen=True, slots=True)
class LoadedOptions(Generic[T]):
    """Options, where those that are set come from, and lines to log when logging is configured."""

    options: T
    sources: Mapping[str, str]
    """flag name -> "flag", "env" or "file"; a flag at its default is not in it."""
    notices: tuple[str, ...]
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Variables that are named as a daemon's and are none -> the nearest name, empty: none is near."""


def nsqd_command_line(argv: Sequence[str], environ: Mapping[str, str]) -> LoadedOptions[Options]:
    """Options of nsqd; SystemExit after --version, --help or an error, which is printed."""
    return _or_exit("nsqd", lambda: _joins_as_asked(load_nsqd(argv, environ)), Options)


def _joins_as_asked(loaded: LoadedOptions[Options]) -> LoadedOptions[Options]:
    """ConfigError if nothing but the environment makes this node one of a cluster: a shell in which an operator works
    on a cluster may have that, and `nsqd --data-path=/tmp/x` means a broker of its own."""
    sources = loaded.sources
    source = sources.get("etcd-endpoint")
    if loaded.options.etcd_endpoints and "env" in (source, sources.get("config") if source == "file" else None):
        variable = "NSQD_ETCD_ENDPOINT" if source == "env" else "NSQD_CONFIG"
        raise ConfigError(
            f"{variable} in the environment names the etcd of a cluster, and nsqd joins none by that alone: start it "
            "as nsqha broker, or with --etcd-endpoint or --config; for a node without a cluster unset the variable"
        )
    return loaded


def nsqlookupd_command_line(argv: Sequence[str], environ: Mapping[str, str]) -> LoadedOptions[LookupdOptions]:
    """Options of nsqlookupd; SystemExit after --version, --help or an error, which is printed."""
    return _or_exit("nsqlookupd", lambda: load_nsqlookupd(argv, environ), LookupdOptions)


def load_nsqd(argv: Sequence[str], environ: Mapping[str, str]) -> LoadedOptions[Options]:
    """Load and check all options. ConfigError (UsageError for the command line itself) if they cannot be used."""
    loaded = _load(Options, "NSQD_", argv, environ)
    options = loaded.options
    if "node-id" not in loaded.sources:
        options = replace(options, node_id=default_node_id(host_name()))
    return replace(loaded, options=checked(options))


def load_nsqlookupd(argv: Sequence[str], environ: Mapping[str, str]) -> LoadedOptions[LookupdOptions]:
    """Load and check all options. ConfigError (UsageError for the command line itself) if they cannot be used."""
    loaded = _load(LookupdOptions, "NSQLOOKUPD_", argv, environ)
    options = loaded.options
    _not_empty(options, "tcp_address", "http_address")
    _check_ranges(options)
    _check_certificate(options)
    if bool(options.https_address) != bool(options.tls_cert):
        raise ConfigError("--https-address and --tls-cert go together: nothing else of this daemon has a certificate")
    _check_cluster(options, (*_ETCD_ACCESS, "cluster_tls_cert"))
    if networks(options.register_from_cidr, "--register-from-cidr") and not options.access_file:
        raise ConfigError("--register-from-cidr needs --access-file: without it every address may register")
    return replace(loaded, options=replace(options, broadcast_address=options.broadcast_address or host_name()))


def checked(options: Options) -> Options:
    """Fill in what other flags and the host imply; ConfigError for what nsqd refuses at its start."""
    if options.tls_client_auth_policy and options.tls_required == TlsRequired.NO:
        options = replace(options, tls_required=TlsRequired.YES)
    options = replace(options, broadcast_address=options.broadcast_address or host_name())
    _not_empty(options, "tcp_address")
    _check_ranges(options)
    _check_certificate(options)
    _check_https_port(options)
    _check_cluster(options, (*_ETCD_ACCESS, "topic_replicas"))
    _check_strangers(options)
    networks(options.allow_config_from_cidr)
    if options.audit_topic and not valid_name(options.audit_topic):
        raise ConfigError(f"--audit-topic={options.audit_topic}: no topic name: 1 to 64 of . a-z A-Z 0-9 _ -")
    if options.tls_required and not options.tls_cert:
        raise ConfigError("cannot require TLS client connections without --tls-cert and --tls-key")
    if options.tls_client_auth_policy == VERIFIED and not options.tls_root_ca_file:
        raise ConfigError("--tls-client-auth-policy=require-verify needs --tls-root-ca-file")
    for fraction in options.e2e_processing_latency_percentiles:
        if not 0 < fraction <= 1:
            raise ConfigError(f"--e2e-processing-latency-percentile={fraction}: must be above 0 and at most 1")
    return options


def _check_certificate(options: Options | LookupdOptions) -> None:
    if bool(options.tls_cert) != bool(options.tls_key):
        raise ConfigError("--tls-cert and --tls-key go together")


def _check_https_port(options: Options) -> None:
    """nsqd's port for HTTPS, which listens only with a certificate, is the usual one for gRPC here."""
    port = options.https_address.rpartition(":")[2]
    if not options.tls_cert or port in ("", "0"):
        return
    for name, address in (("grpc", options.grpc_address), ("peer", options.peer_address)):
        if address.rpartition(":")[2] == port:
            raise ConfigError(
                f"--{name}-address={address} has the port of --https-address={options.https_address}, which listens as "
                "there is a --tls-cert: give one of them another port, or an empty --https-address"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _check_strangers(options: Options) -> None:
    """Whoever reaches the ports of a cluster that asks for nothing reads every message and forges what followers store.
    Readers of segments prove no secret, so their port needs certificates."""
    if not options.etcd_endpoints or options.cluster_tls_cert:
        return
    if options.access_file and not options.cluster_secret_file:
        raise ConfigError(
            "--access-file: in a cluster it needs --cluster-secret-file or --cluster-tls-cert: without them nodes can "
            "not be told from strangers, who would read and change everything as one of them"
        )
    if options.insecure_cluster or options.access_file:  # with which readers of segments show a token
        return
    names = ["segments"] if options.cluster_secret_file else ["grpc", "peer", "segments"]
    for name in names:
        address = getattr(options, f"{name}_address")
        if address and not is_loopback(address.rpartition(":")[0]):
            wanted = "" if options.cluster_secret_file else "--cluster-secret-file or "
            raise ConfigError(
                f"--{name}-address={address}: other hosts reach it, and without {wanted}--cluster-tls-cert each of "
                "them may read and change what is stored; --insecure-cluster says that this network is trusted"
            )


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks(text: str, flag: str = "--allow-config-from-cidr") -> list[Network]:
    """The networks that the flag names. ConfigError."""
    try:
        return [ipaddress.ip_network(part.strip(), strict=False) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"{flag}={text}: {error}") from None


def among(host: str, found: Iterable[Network]) -> bool:
    """Whether one of the networks has this host; an IPv4 address may be written as an IPv6 one. False: no address."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return any(one in network for network in found for one in (address, mapped) if one is not None)


CONFIG_BYTES_MAX = 1 << 20

_ETCD_ACCESS = ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")


def _check_cluster(options: Options | LookupdOptions, only_with_etcd: Sequence[str]) -> None:
    cluster_tls = (options.cluster_tls_cert, options.cluster_tls_key, options.cluster_tls_ca)
    if any(cluster_tls) and not all(cluster_tls):
        raise ConfigError("--cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca go together")
    if options.etcd_endpoints:
        return
    for name in only_with_etcd:
        if getattr(options, name):
            raise ConfigError(f"--{_flag_name(name)} is for a cluster; it needs --etcd-endpoint")


def _check_ranges(options: Options | LookupdOptions) -> None:
    """ConfigError for a value outside of the limits in the table."""
    for flag, value in flags_with_values(options):
        if reason := flag.out_of_range(value):
            raise ConfigError(f"--{flag.name}={flag.written(value)}: {reason}")


def _not_empty(options: Options | LookupdOptions, *names: str) -> None:
    for name in names:
        if not getattr(options, name):
            raise ConfigError(f"--{_flag_name(name)}: must not be empty")


def config_value(options: Options, key: str) -> Any:
    """The answer to GET /config/<key>: text, a number (durations in ns, enumerations by number) or a list.

    KeyError for a key that is not an option.
    """
    for item in fields(options):
        if _key(item.name, item.metadata["key"]) == key and key != "config":
            value = getattr(options, item.name)
            if key == "log_level":
                return LOG_LEVELS.index(value) + 1
            if key == "tls_min_version":
                return TLS_VERSIONS[value]
            return list(value) if isinstance(value, tuple) else value
    raise KeyError(key)


def version_line(program: str) -> str:
    """The line of --version, and the first line of the log: `nsqd v1.3.0 (built w/python3.11)`."""
    return f"{program} v{NSQ_VERSION} (built w/python{sys.version_info.major}.{sys.version_info.minor})"


def host_name() -> str:
    return os.uname().nodename


def default_node_id(host: str) -> int:
    """The same default as nsqd's, so that a host keeps its ids when it changes brokers."""
    return zlib.crc32(md5(host.encode(), usedforsecurity=False).digest()) % 1024


def flags_of(options: type[Options] | type[LookupdOptions]) -> list[Flag]:
    """The flags for goflags, with --version."""
    return [Flag("version", BOOL, False, "print the version and exit", ""), *map(_flag_of, fields(options))]


def flags_with_values(options: Options | LookupdOptions) -> list[tuple[Flag, Any]]:
    """The flags, and what these options have."""
    return [(_flag_of(item), getattr(options, item.name)) for item in fields(options)]


def _flag_of(item: Field[Any]) -> Flag:
    meta = item.metadata
    return Flag(
        meta["name"] or _flag_name(item.name),
        meta["kind"],
        item.default,
        meta["usage"],
        _key(item.name, meta["key"]),
        meta["inert"],
        meta["least"],
        meta["most"],
    )


def _flag_name(field_name: str) -> str:
    return field_name.removesuffix("_ns").replace("_", "-")


def _key(field_name: str, key: str) -> str:
    return key or field_name.removesuffix("_ns")


def _load(kind: type[T], prefix: str, argv: Sequence[str], environ: Mapping[str, str]) -> LoadedOptions[T]:
    settings = load(flags_of(kind), argv, environ=environ, env_prefix=prefix, read_toml=_read_toml, old=OLD_KEYS)
    names = {item.name: item.metadata["name"] or _flag_name(item.name) for item in fields(kind)}
    options = kind(**{attribute: settings.values[name] for attribute, name in names.items()})
    known = [prefix + flag.name.upper().replace("-", "_") for flag in flags_of(kind) if flag.key]
    unknown = unknown_variables(environ, known, prefix)
    notices = tuple(settings.notices) + tuple(misspelt(unknown))
    return LoadedOptions(options, settings.sources, notices, unknown)


TOOL_VARIABLES = frozenset(
    "NSQHA_" + name
    for name in (
        "ADDRESS", "AUTH_SECRET", "CLUSTER_NAME", "CLUSTER_SECRET_FILE", "CLUSTER_TLS_CA", "CLUSTER_TLS_CERT",
        "CLUSTER_TLS_KEY", "ETCD_CA", "ETCD_CERT", "ETCD_ENDPOINT", "ETCD_KEY", "ETCD_PASSWORD_FILE", "ETCD_USER",
        "GRPC_ADDRESS", "NO_EXT", "TCP_ADDRESS", "TLS_CERT", "TLS_KEY", "TLS_ROOT_CA_FILE", "TOKEN", "TOKEN_FILE",
    )
)  # fmt: skip
"""What the command line tools and the extensions read: a daemon may find them in its environment."""


def unknown_variables(environ: Mapping[str, str], known: Sequence[str], prefix: str) -> dict[str, str]:
    """What is named as a daemon's variables are, and is none of them and none of the tools' -> the nearest name."""
    found = {}
    for variable in sorted(environ):
        head = next((start for start in (prefix, "NSQHA_") if variable.startswith(start)), "")
        if not head or variable in known or variable in TOOL_VARIABLES or len(variable) > MISSPELT_CHARACTERS_MAX:
            continue
        close = difflib.get_close_matches(prefix + variable[len(head) :], known, 1, 0.88)
        found[variable] = close[0] if close else ""
    return found


def misspelt(unknown: Mapping[str, str]) -> list[str]:
    """A line for each that is nearly one of a daemon's. They are not refused: an orchestrator puts in NSQD_PORT and the
    like where a service has that name, and they are near to nothing."""
    return [
        f"{variable} in the environment has no effect: did you mean {nearest}?"
        for variable, nearest in unknown.items()
        if nearest
    ]


OLD_KEYS = {"max_message_size": "removed from nsqd; max_msg_size replaced it"}
"""Keys in files of old nsqds that are no flags any more, and why each has no effect."""


def _read_toml(path: str) -> Mapping[str, Any]:
    from nsqha.texts.toml_text import parse_toml  # a start without a file does without

    try:
        with open(path, "rb") as file:
            text = file.read(CONFIG_BYTES_MAX + 1)
        return parse_toml(text, CONFIG_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"--config={path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"--config={path}: {error}") from None


def _or_exit(
    program: str, read: Callable[[], LoadedOptions[T]], kind: type[Options] | type[LookupdOptions]
) -> LoadedOptions[T]:
    try:
        return read()
    except VersionWanted:
        print(version_line(program))
        raise SystemExit(0) from None
    except HelpWanted:
        print(usage(program, flags_of(kind)), end="")
        raise SystemExit(0) from None
    except UsageError as error:
        print(f"{error}\nRun '{program} --help' for usage.", file=sys.stderr)
        raise SystemExit(2) from None
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
