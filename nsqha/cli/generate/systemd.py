"""Units and settings for systemd: deploy/systemd."""

from __future__ import annotations

from nsqha.cli.generate.topology import (
    BROKER_PORTS,
    DATA_PATH,
    RECOVERY_BYTES,
    RECOVERY_BYTES_PER_SECOND,
    other_settings,
    port,
    stop_seconds,
)
from nsqha.options import LookupdOptions, Options

FOLDER = "deploy/systemd"
WATCHDOG_SECONDS = 60

SANDBOX = """\
# The sandbox. The daemon writes to its data folder and to the log, and to nothing else.
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
UMask=0077
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
DevicePolicy=closed
PrivateUsers=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
LockPersonality=yes
MemoryDenyWriteExecute=yes
RemoveIPC=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
# Left out, as the daemon cannot live with it:
#   ProcSubset=pid                   the boot id (/proc/sys/kernel/random) says whether the page cache is still the same
#   SystemCallFilter=~@resources     it raises its own limit of open files
#   PrivateNetwork=, IPAddressDeny=  it is there for the network; say here which one you have:
# IPAddressDeny=any
# IPAddressAllow=10.0.0.0/8 localhost
"""


def files() -> dict[str, str]:
    return {
        f"{FOLDER}/nsqha-broker.service": _unit(
            "broker",
            "nsqha broker",
            f"--data-path={DATA_PATH}",
            f"StateDirectory={DATA_PATH.rpartition('/')[2]}\nStateDirectoryMode=0750\n",
            _START,
        ),
        f"{FOLDER}/nsqha-lookupd.service": _unit("lookupd", "nsqha lookup daemon and controller", "", "", ""),
        f"{FOLDER}/broker.toml": _with_others(Options, _BROKER),
        f"{FOLDER}/lookupd.toml": _with_others(LookupdOptions, _LOOKUPD),
    }


_MINUTES = RECOVERY_BYTES // RECOVERY_BYTES_PER_SECOND // 60
_START = f"""\
# Type=notify: what waits for this unit is started when all that was acknowledged earlier can be served again. While it
# reads its log (of 1 TB up to {_MINUTES} minutes after a crash) it asks for more time, as long as its loop runs.
"""


def _unit(daemon: str, what: str, flags: str, state: str, remark: str) -> str:
    command = " ".join(filter(None, (f"/opt/nsqha/bin/nsqha {daemon}", f"--config=/etc/nsqha/{daemon}.toml", flags)))
    return f"""\
# Written by `nsqha generate systemd`; change it with `systemctl edit nsqha-{daemon}`.
[Unit]
Description={what}
Documentation=man:nsqha-{daemon}(1)
Wants=network-online.target
After=network-online.target
# It ends when etcd is not there at its start, or its disk fails: never give up starting it again.
StartLimitIntervalSec=0

[Service]
{remark}Type=notify
NotifyAccess=main
TimeoutStartSec=90s
# Of the event loop: one that does not turn for this long is ended, and started again.
WatchdogSec={WATCHDOG_SECONDS}s
User=nsqha
{state}ExecStart={command}
Restart=always
RestartSec=2s
# SIGTERM hands leaderships over, writes what is left and marks the stop clean.
KillMode=mixed
TimeoutStopSec={stop_seconds()}s
LimitNOFILE=1048576

{SANDBOX}
[Install]
WantedBy=multi-user.target
"""


def _with_others(options: type[Options] | type[LookupdOptions], given: str) -> str:
    return f"{given}\n# Every other setting, at its default.\n\n{other_settings(options, given)}\n"


_ACCESS = """\
etcd_endpoints = ["etcd1.example:2379", "etcd2.example:2379", "etcd3.example:2379"]
etcd_ca = "/etc/nsqha/etcd-ca.crt"
etcd_cert = "/etc/nsqha/etcd-client.crt"
etcd_key = "/etc/nsqha/etcd-client.key"
etcd_user = "nsqha"
etcd_password_file = "/etc/nsqha/etcd-password"

cluster_tls_cert = "/etc/nsqha/{name}.crt"
cluster_tls_key = "/etc/nsqha/{name}.key"
cluster_tls_ca = "/etc/nsqha/cluster-ca.crt"
# Or, or also, a secret that all of them share: docs/cluster.md says what it does not give.
# cluster_secret_file = "/etc/nsqha/cluster-secret"
"""

_BROKER = f"""\
# A broker on host broker1. Every line is a flag of `nsqha broker`; `nsqha broker --help` explains them.

broadcast_address = "broker1.example"  # what clients and other nodes connect to
grpc_address = "0.0.0.0:{port(BROKER_PORTS, "grpc")}"          # calls of other nodes, lookup daemons and operators
peer_address = "0.0.0.0:{port(BROKER_PORTS, "peer")}"          # streams of other nodes and lookup daemons
segments_address = "0.0.0.0:{port(BROKER_PORTS, "segments")}"      # Spark jobs and other readers of stored segments
https_address = "0.0.0.0:4155"         # only with tls_cert and tls_key; nsqd's default is 4152, which is gRPC's here
host = "broker1"                       # replicas of a partition are never on the same one
topology_zone = "a"                    # and are spread over as many of these as there are

{_ACCESS.format(name="broker1")}"""

_LOOKUPD = f"""\
# A lookup daemon on host lookup1. Every line is a flag of `nsqha lookupd`.

broadcast_address = "lookup1.example"

{_ACCESS.format(name="lookup1")}"""
