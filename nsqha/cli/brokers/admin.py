"""The broker's gRPC administration, as verbs use it: errors become exit statuses, unknown names get a suggestion.

grpc is imported here, when a verb connects, and nowhere else in the command line: it costs a tenth of a second.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from nsqha.cli.brokers.discovery import ENVIRONMENT, given, grpc_port, host_and_port, unreachable
from nsqha.cli.brokers.token import token
from nsqha.cli.brokers.token import wanted as token_wanted
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import CERTIFICATE_INCOMPLETE, GRPC_ADDRESS, did_you_mean
from nsqha.cli.terminal.screen import print_json, say, some
from nsqha.cluster_secret import ClusterSecret, read_secret
from nsqha.errors import ConfigError, Unavailable

USUAL = (exits.USAGE, exits.NOT_FOUND, exits.UNREACHABLE)  # statuses of a verb that names a topic or a channel
ROLE = "needs the role"  # in a refusal by an access file
LOOK_SECONDS = 1.0  # for requests that only make an error more useful
CHANGES_NOTHING = ("Get", "List", "Describe", "Peek")


class Admin:
    """One connection. Requests are named by their RPC: `call("PauseTopic", topic="orders", paused=True)`."""

    def __init__(self, address: str, timeout_s: float, certified: Any = None, shared: Any = None) -> None:
        """`certified`: gRPC credentials, for a broker that requires a certificate; `shared`: the cluster's secret."""
        probe(address, min(timeout_s, 5.0))
        # Before the first import of grpc: it hides gRPC's own log lines.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        import grpc

        from nsqha import grpc_channels
        from nsqha.pb.v1 import admin_pb2, admin_pb2_grpc

        self.messages: Any = admin_pb2
        self.address = address
        self._grpc: Any = grpc
        self._has_room, self._no_room = grpc_channels.has_room, grpc_channels.NO_ROOM
        self._timeout_s = timeout_s
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
        self._certified = certified is not None
        self._channel: Any = grpc_channels.channel(address, options, certified, shared, token())
        self._stub: Any = admin_pb2_grpc.AdminStub(self._channel)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Admin:
        address, any_port = given(args, "--grpc-address", GRPC_ADDRESS)
        certified, shared = credentials(args), secret(args)
        if any_port:
            address = grpc_port(address, args.timeout / 1e9, certified=certified is not None)
        return cls(address, args.timeout / 1e9, certified, shared)

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, rpc: str, **fields: Any) -> Any:
        """Send a request and return its answer."""
        return self._call(self._stub, self.messages, rpc, fields)

    def call_segments(self, rpc: str, **fields: Any) -> Any:
        """The same for the Segments service, which is at the same address."""
        from nsqha.pb.v1 import segments_pb2, segments_pb2_grpc

        return self._call(segments_pb2_grpc.SegmentsStub(self._channel), segments_pb2, rpc, fields)

    def _call(self, stub: Any, messages: Any, rpc: str, fields: dict[str, Any]) -> Any:
        request = getattr(messages, f"{rpc}Request")(**fields)
        try:
            return getattr(stub, rpc)(request, timeout=self._timeout_s)
        except self._grpc.RpcError as error:
            raise self._exit(error, rpc, fields) from None
        except Unavailable as error:  # of a secret that we do not share
            raise exits.Exit(exits.NOT_ALLOWED, str(error)) from None

    def stream(self, rpc: str, **fields: Any) -> Iterator[Any]:
        """Send a request and yield its answers."""
        request = getattr(self.messages, f"{rpc}Request")(**fields)
        try:
            yield from getattr(self._stub, rpc)(request, timeout=self._timeout_s)
        except self._grpc.RpcError as error:
            raise self._exit(error, rpc, fields) from None
        except Unavailable as error:
            raise exits.Exit(exits.NOT_ALLOWED, str(error)) from None

    def _exit(self, error: Any, rpc: str, fields: dict[str, Any]) -> exits.Exit:
        code, text = error.code(), error.details() or ""
        codes = self._grpc.StatusCode
        if code is codes.NOT_FOUND:
            return exits.Exit(exits.NOT_FOUND, text + self._suggestion(fields))
        if code is codes.ALREADY_EXISTS:
            return exits.Exit(exits.CONFLICT, text)
        if code is codes.INVALID_ARGUMENT:
            return exits.Exit(exits.USAGE, text)
        if code in (codes.PERMISSION_DENIED, codes.UNAUTHENTICATED):
            return exits.Exit(exits.NOT_ALLOWED, text + (token_wanted() if ROLE in text else ""))
        if code is codes.DEADLINE_EXCEEDED:
            what = f"no answer from {self.address} within {self._timeout_s:g} s"
            if not rpc.startswith(CHANGES_NOTHING):
                what += "; it may or may not have been done: check before you try again, or raise --timeout"
            return exits.Exit(exits.UNREACHABLE, what + self._trouble(fields.get("topic", "")))
        if code is codes.UNAVAILABLE and "Socket closed" in text and not self._has_room(self.address):
            return exits.Exit(exits.UNREACHABLE, f"{self.address} {self._no_room}")
        if code is codes.UNAVAILABLE and not self._certified and "Socket closed" in text:
            wanted = "if it requires a certificate, give --cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca"
            what = f"{self.address} closed the connection; {wanted}"
            return exits.Exit(exits.UNREACHABLE, what)
        if code is codes.UNAVAILABLE and "HTTP/2" in text:
            what = f"{self.address} does not speak gRPC; is that the broker's --grpc-address?"
            return exits.Exit(exits.UNREACHABLE, what)
        if code is codes.UNAVAILABLE:
            return exits.Exit(exits.UNREACHABLE, f"{self.address} cannot do this now: {text}; try again")
        if code is codes.UNIMPLEMENTED:
            return exits.Exit(exits.FAILED, f"{self.address} has no {rpc}: it is another program or another version")
        return exits.Exit(exits.FAILED, f"{rpc} at {self.address} failed: {text or code.name}")

    def _trouble(self, name: str) -> str:
        """A likely reason why a request failed: partitions of the topic that acknowledge nothing."""
        try:
            request = self.messages.DescribeTopicRequest(topic=name)
            topic = self._stub.DescribeTopic(request, timeout=LOOK_SECONDS).topic
        except self._grpc.RpcError:
            return ""
        idle = [f"{name}/{p.partition}: {why}" for p in topic.partitions if (why := unserved(p))]
        return f" ({some(idle)})" if idle else ""

    def _suggestion(self, fields: dict[str, Any]) -> str:
        try:
            topics = self._stub.ListTopics(self.messages.ListTopicsRequest(), timeout=LOOK_SECONDS).topics
        except self._grpc.RpcError:
            return ""
        channels = {topic.name: list(topic.channels) for topic in topics}
        topic, channel = fields.get("topic", ""), fields.get("channel", "")
        if topic not in channels:
            return did_you_mean(topic, channels)
        return did_you_mean(channel, channels[topic]) if channel and channel not in channels[topic] else ""


def unserved(partition: Any) -> str:
    """Why a partition acknowledges nothing; empty: it acknowledges."""
    from nsqha.election.health import BELOW, LEADERLESS

    state = replication(partition)
    return state if state in (LEADERLESS, BELOW) else str(partition.error)


def replication(partition: Any) -> str:
    """What is wrong with the replicas of a partition, in the words of `nsqha cluster`; empty: nothing."""
    from nsqha.election.health import BELOW, LEADERLESS, UNDER

    if not partition.leader:
        return LEADERLESS
    if sum(replica.alive and replica.in_sync for replica in partition.replicas) < partition.min_isr:
        return BELOW
    return UNDER if partition.under_replicated else ""


def credentials(args: argparse.Namespace) -> Any:
    """gRPC credentials of the --cluster-tls files; None without them."""
    files = (args.cluster_tls_cert, args.cluster_tls_key, args.cluster_tls_ca)
    if not any(files):
        return None
    if not all(files):
        raise exits.Exit(exits.USAGE, CERTIFICATE_INCOMPLETE)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from nsqha.server.peers.calls import channel_credentials
    from nsqha.server.runtime.tls import load_cluster_tls

    return channel_credentials(load_cluster_tls(*files))


def secret(args: argparse.Namespace) -> ClusterSecret | None:
    """The secret of --cluster-secret-file; None without it."""
    try:
        return read_secret(args.cluster_secret_file)
    except ConfigError as error:
        raise exits.Exit(exits.USAGE, str(error)) from None


def probe(address: str, timeout_s: float) -> None:
    """Fail fast with a clear message if no process listens at the address."""
    import socket

    host, port = host_and_port(address, "--grpc-address")
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        where = f"--grpc-address or {ENVIRONMENT['--grpc-address']}"
        free = "nsqd chooses a free port unless its own --grpc-address names one"
        raise unreachable(address, error, f"{where} ({free})") from None


def done(args: argparse.Namespace, shown: dict[str, Any], word: str) -> int:
    """Print that a change was made: JSON for scripts, one line for people."""
    if args.json:
        print_json(shown)
    else:
        say(f"{word} {args.topic}" + (f" {args.channel}" if "channel" in shown else ""))
    return exits.OK


def warn(args: argparse.Namespace, answer: Any) -> None:
    """Print the nodes that did not answer; what only they know is missing from the answer."""
    for node in answer.unreachable:
        say(f"{args.parser.prog}: no answer from {node.name or f'node {node.node:016x}'}: {node.why}")


def record(message: Any) -> dict[str, Any]:
    """A protobuf message as JSON: every field that has a value or a default, names as in the .proto file."""
    shown: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            shown[field.name] = [record(v) if field.message_type else v for v in value]
        elif field.message_type is not None:
            shown[field.name] = record(value) if message.HasField(field.name) else None
        elif field.enum_type is not None:
            prefix = field.enum_type.values_by_number[0].name.rpartition("_")[0]
            shown[field.name] = field.enum_type.values_by_number[value].name.removeprefix(f"{prefix}_").lower()
        else:
            shown[field.name] = value
    return shown
