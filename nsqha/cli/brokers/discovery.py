"""From any one address to the other ports: what listens there, and where the rest of it is.

    a broker's HTTP   /info?include_nsqha=true         -> TCP, gRPC
    a broker's TCP    IDENTIFY with "nsqha_ports"      -> HTTP, gRPC
    a broker's gRPC   GetNode (`producers`)            -> TCP
    a lookup daemon   /lookup of a topic, else /nodes  -> HTTP and TCP of brokers

One short connection finds out what listens: `GET ` alone makes an NSQ port refuse the protocol, gRPC greets first, and
HTTP waits for the rest of the line. Ports are taken at the host that the user has named, unless the broker listens
for them at one other address only: what a broker calls 127.0.0.1 is another host for us.
"""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import json
import os
import select
import socket
import struct
import urllib.parse
from dataclasses import dataclass
from typing import Any

from nsqha.cli.brokers.token import headers, wanted
from nsqha.cli.terminal import exits

ENVIRONMENT = {
    "--address": "NSQHA_ADDRESS",
    "--grpc-address": "NSQHA_GRPC_ADDRESS",
    "--nsqd-tcp-address": "NSQHA_TCP_ADDRESS",
}
PROBE_SECONDS = 5.0
GREETING_SECONDS = 0.1  # for a port that is not HTTP to answer or to greet; a slower one is recognized as well
BODY_BYTES_MAX = 16 << 20
PAGE_BYTES_MAX = 256 << 20  # of a page about the cluster: some 500 bytes a partition
NODES_TRIED_MAX = 20  # of those that a lookup daemon names
_IDENTIFY = json.dumps({"feature_negotiation": True, "heartbeat_interval": -1, "nsqha_ports": True}).encode()
_SIZE = struct.Struct(">I")


@dataclass(frozen=True)
class BrokerPorts:
    """Addresses of one broker; empty: not known, or it has none."""

    tcp: str = ""
    http: str = ""
    grpc: str = ""


@dataclass(frozen=True)
class LookupDaemon:
    """A lookup daemon's HTTP address."""

    http: str

    def producers(self, topic: str, timeout_s: float) -> list[BrokerPorts]:
        """The brokers that have the topic; empty if it does not know the topic."""
        found = _get(self.http, f"/lookup?topic={urllib.parse.quote(topic, safe='')}", timeout_s)
        return _listed(found)

    def brokers(self, timeout_s: float) -> list[BrokerPorts]:
        """All brokers that it knows. Raises Exit if there is none."""
        found = _listed(_get(self.http, "/nodes", timeout_s))
        if not found:
            raise exits.Exit(exits.UNREACHABLE, f"the lookup daemon at {self.http} knows no broker now")
        return found


def cluster_of(http_address: str, timeout_s: float) -> dict[str, Any]:
    """The cluster as the daemon with this HTTP port sees it; empty: it is of none, or of an older build."""
    return _get(http_address, "/cluster", timeout_s, bytes_max=PAGE_BYTES_MAX)


def given(args: argparse.Namespace, flag: str, default: str) -> tuple[str, bool]:
    """The address that the user has named, and whether it is any port (--address) and not the one of `flag`.

    Flags go before the environment, and one for a certain port before --address."""
    own = getattr(args, flag[2:].replace("-", "_"))
    if own or args.address:
        return (own, False) if own else (args.address, True)
    if own := os.environ.get(ENVIRONMENT[flag], ""):
        return own, False
    anywhere = os.environ.get(ENVIRONMENT["--address"], "")
    return (anywhere, True) if anywhere else (default, False)


def grpc_port(address: str, timeout_s: float, *, certified: bool = False) -> str:
    """The gRPC port of the broker at `address`, or of one that the lookup daemon there knows. Raises Exit.

    `certified`: we have a certificate, so a port that wants TLS first is taken for the gRPC port."""
    found = discover(address, timeout_s, certified=certified)
    if isinstance(found, BrokerPorts):
        if not found.grpc:
            raise exits.Exit(exits.FAILED, f"{address} is an nsqd without nsqha's administration")
        return found.grpc
    last = ""
    for broker in found.brokers(timeout_s)[:NODES_TRIED_MAX]:
        try:
            ports = discover(broker.http or broker.tcp, min(timeout_s, PROBE_SECONDS))
        except exits.Exit as error:
            last = f": {error}"
            continue
        if isinstance(ports, BrokerPorts) and ports.grpc:
            return ports.grpc
    raise exits.Exit(exits.UNREACHABLE, f"no broker that the lookup daemon at {address} knows can be asked{last}")


def discover(address: str, timeout_s: float, *, certified: bool = False) -> BrokerPorts | LookupDaemon:
    """Find out what listens there. Raises Exit if nothing does, or nothing of ours."""
    timeout_s = min(timeout_s, PROBE_SECONDS)
    start = _first_bytes(address, timeout_s)
    host, _ = host_and_port(address, "--address")
    if start.startswith(b"HTTP/"):
        info = _get(address, "/info?include_nsqha=true", timeout_s)
        if "tcp_port" not in info:
            return LookupDaemon(address)
        return _ports(host, info | {"http_port": 0}, http=address)
    if start[4:8] == b"E_BA":
        text = "is the TCP port of a lookup daemon, where brokers register; give its HTTP port"
        raise exits.Exit(exits.USAGE, f"{address} {text}")
    if start[3:4] == b"\x04" and start[:2] == b"\0\0":  # the SETTINGS of HTTP/2
        return BrokerPorts(grpc=address)
    if start[:2] == b"\x15\x03" or (not start and certified):
        if certified:
            return BrokerPorts(grpc=address)
        text = "speaks TLS: give its TCP port, or --cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca"
        raise exits.Exit(exits.UNREACHABLE, f"{address} {text}")
    if not start or start[4:8] == b"\0\0\0\x01":
        return _ports(host, _identified(address, timeout_s), tcp=address)
    raise exits.Exit(exits.FAILED, f"{address} is neither a broker nor a lookup daemon")


def _ports(host: str, said: dict[str, Any], *, tcp: str = "", http: str = "") -> BrokerPorts:
    grpc_host, _, grpc = str(said.get("grpc_address") or "").rpartition(":")
    return BrokerPorts(
        tcp or _at(host, said.get("tcp_port")),
        http or _at(host, said.get("http_port")),
        _at(_host(host, grpc_host.strip("[]")), grpc),
    )


def _host(named: str, bound: str) -> str:
    try:
        address = ipaddress.ip_address(bound)
    except ValueError:
        return named
    return named if address.is_unspecified or address.is_loopback else bound


def _at(host: str, port: object) -> str:
    if not str(port).isdecimal() or not 0 < int(str(port)) < 65536:
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listed(answer: dict[str, Any]) -> list[BrokerPorts]:
    """The brokers in an answer of a lookup daemon."""
    found = answer.get("producers")
    hosts = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    listed = [_ports(str(entry.get("broadcast_address", "")), entry) for entry in hosts]
    return [broker for broker in listed if broker.tcp]


# ---- sockets


def _connected(address: str, timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection(host_and_port(address, "--address"), timeout_s)
    except OSError as error:
        raise unreachable(address, error, "--address or NSQHA_ADDRESS") from None


def _first_bytes(address: str, timeout_s: float) -> bytes:
    """What the port answers first; empty if it closes without a word."""
    with _connected(address, timeout_s) as connection:
        try:
            connection.sendall(b"GET ")
            if not select.select([connection], [], [], GREETING_SECONDS)[0]:
                connection.sendall(b"/ping HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % address.encode())
            found = b""
            while len(found) < 9 and (more := connection.recv(4096)):
                found += more
        except TimeoutError:
            raise exits.Exit(exits.UNREACHABLE, f"no answer from {address} within {timeout_s:g} s") from None
        except OSError:  # it did not read all of it
            return b""
        return found


def _get(address: str, path: str, timeout_s: float, *, bytes_max: int = BODY_BYTES_MAX) -> dict[str, Any]:
    """The JSON object that HTTP gives there; empty for 404."""
    host, port = host_and_port(address, "--address")
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=headers())
        answer = connection.getresponse()
        found = json.loads(answer.read(bytes_max))
    except (OSError, http.client.HTTPException) as error:
        raise exits.Exit(exits.UNREACHABLE, f"{address}{path.partition('?')[0]}: {error}") from None
    except (ValueError, RecursionError):
        raise exits.Exit(exits.FAILED, f"{address} is neither a broker's HTTP port nor a lookup daemon's") from None
    finally:
        connection.close()
    if answer.status in (401, 403, 429):
        refused = found.get("detail") if isinstance(found, dict) else None
        why = f"{refused}{wanted()}" if refused else "it refuses plain HTTP; give the broker's TCP port"
        if answer.status == 403 and refused:
            why += "; a token without this role needs the port itself: --nsqd-tcp-address, --grpc-address"
        raise exits.Exit(exits.NOT_ALLOWED, f"{address}{path.partition('?')[0]}: {why}")
    if answer.status == 404:
        return {}
    if answer.status != 200 or not isinstance(found, dict):
        raise exits.Exit(exits.FAILED, f"{address}{path.partition('?')[0]} answers {answer.status}")
    return found


def _identified(address: str, timeout_s: float) -> dict[str, Any]:
    """The ports that a broker names in its answer to IDENTIFY; empty: it is a plain nsqd."""
    with _connected(address, timeout_s) as connection:
        try:
            connection.sendall(b"  V2IDENTIFY\n" + _SIZE.pack(len(_IDENTIFY)) + _IDENTIFY)
            head = _exactly(connection, 8)
            size = _SIZE.unpack(head[:4])[0] - 4
            answer = json.loads(_exactly(connection, size)) if head[4:] == bytes(4) and 0 < size < 1 << 16 else None
        except (OSError, ValueError, RecursionError, EOFError):
            answer = None
    if not isinstance(answer, dict):
        raise exits.Exit(exits.FAILED, f"{address} is neither a broker nor a lookup daemon")
    found = answer.get("nsqha_ports")
    return found if isinstance(found, dict) else {}


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise EOFError
        found += more
    return found


def host_and_port(address: str, flag: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:9]) < 65536:
        name = ENVIRONMENT.get(flag, "")
        source = f"{name} in the environment:" if name and os.environ.get(name) == address else flag
        raise exits.Exit(exits.USAGE, f"{source} {address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def unreachable(address: str, error: OSError, where: str) -> exits.Exit:
    why = "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
    text = f"cannot reach the broker at {address}: {why}; start one with `nsqha dev`, or set {where}"
    return exits.Exit(exits.UNREACHABLE, text)
