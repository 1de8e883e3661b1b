"""How the cluster verbs reach etcd and the nodes, and how users name nodes, topics and partitions.

Reads for decisions are linearizable; changes are compare-and-set or intents, so a verb may run next to the controller
and to other operators. Reading a cluster that does not exist never creates it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from nsqha.cli.brokers.admin import credentials, secret
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import did_you_mean
from nsqha.clock import SystemClock
from nsqha.election.elect import ReplicaReport
from nsqha.election.model import Controller, NodeInfo, PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.election.moves import Intents, read_intents, successors
from nsqha.election.observed.answers import Observed, ReplicaAnswer, answers_in, questions
from nsqha.election.placement import PartitionName, able, metas_of
from nsqha.election.session import called
from nsqha.election.store import MetadataStore
from nsqha.errors import ConfigError, LogCorrupt, Unavailable
from nsqha.ids import PartitionKey

if TYPE_CHECKING:
    from nsqha.election.etcd.store import EtcdStore


@dataclass(frozen=True)
class EtcdArguments:
    """The flags for etcd in the form that `nsqha.election.etcd.access` expects."""

    etcd_endpoints: tuple[str, ...]
    etcd_ca: str
    etcd_cert: str
    etcd_key: str
    etcd_user: str
    etcd_password_file: str
    cluster_name: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> EtcdArguments:
        given = args.etcd_endpoint or [args.etcd_endpoint_default]
        endpoints = tuple(part.strip() for text in given for part in text.split(",") if part.strip())
        names = ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file", "cluster_name")
        return cls(endpoints, *(getattr(args, name) for name in names))


@dataclass(frozen=True)
class Picture:
    """All metadata of the cluster, read at about the same time."""

    cluster_name: str
    cluster_id: int
    source: str  # where it is from
    revision: int
    topics: Mapping[str, TopicRecord]
    nodes: Mapping[int, NodeInfo]
    intents: Intents
    controller: Controller | None
    unreadable: tuple[str, ...] = ()  # records that cannot be read, and why; the other fields do not have them
    doubt: str = ""  # why these metadata are not trusted now; empty: they are
    stale: bool = False  # they are what a daemon knew last, as etcd does not answer; intents are not known
    observed: Observed = field(default_factory=Observed)  # what nodes say of themselves

    @cached_property
    def metas(self) -> dict[PartitionName, PartitionMeta]:
        return metas_of(self.topics)

    @cached_property
    def away(self) -> list[int]:
        """Nodes that are not alive: those that are missed, and those that were emptied and may be gone for good."""
        return sorted({*self.missed, *self.intents.decommissions} - set(self.nodes))

    @cached_property
    def missed(self) -> list[int]:
        """Nodes that records name but that are not alive."""
        named = {uid for meta in self.metas.values() for uid in (*meta.replicas, *meta.isr)}
        return sorted(named - set(self.nodes))

    @cached_property
    def replaced(self) -> dict[int, int]:
        """Nodes that are away and whose name another node has now, which gets their replicas -> that node."""
        return successors(self.away, self.nodes, self.intents.names)

    @cached_property
    def able(self) -> dict[int, NodeInfo]:
        """The nodes that may get replicas."""
        return able(self.nodes, self.intents.decommissions)

    def settings(self, name: PartitionName) -> TopicSettings:
        return self.topics[name.topic].settings

    def name(self, uid: int) -> str:
        """The name of a node, also of one that is away; else its uid."""
        return called(uid, self.nodes, self.intents.names) or f"{uid:016x}"

    def names(self, uids: Any) -> list[str]:
        return [self.name(uid) for uid in uids]

    def node(self, text: str, *, alive: bool = True) -> int:
        """The uid of a node by its name or uid. Raises Exit if there is none."""
        found = [uid for uid, node in self.nodes.items() if text in (node.name, f"{uid:016x}")]
        away = [uid for uid in self.away if text in (self.name(uid), f"{uid:016x}")]
        if not alive:
            found += away
        if len(found) > 1:
            uids = ", ".join(f"{uid:016x}" for uid in found)
            raise exits.Exit(exits.USAGE, f"several nodes are called {text}: {uids}; name it by its uid")
        if found:
            return found[0]
        if away:
            raise exits.Exit(exits.UNREACHABLE, f"node {text} is away; start it first")
        # No suggestion: the wanted node may be away, and the closest name is then another node's.
        names = ", ".join(sorted(node.name for node in self.nodes.values()))
        known = f"alive are {names}" + (f"; away: {', '.join(self.names(self.away))}" if self.away else "")
        raise exits.Exit(exits.NOT_FOUND, f"there is no node {text}; {known}")

    def topic(self, name: str) -> TopicRecord:
        """The topic of this name. Raises Exit if there is none."""
        record = self.topics.get(name)
        if record is None:
            raise exits.Exit(exits.NOT_FOUND, f"there is no topic {name}{did_you_mean(name, self.topics)}")
        return record

    def partition(self, topic: str, number: int | None) -> tuple[PartitionName, PartitionMeta]:
        """A partition; `number` None: the only one. Raises Exit if there is none, or several and no number."""
        record = self.topic(topic)
        if number is None and len(record.partitions) > 1:
            last = len(record.partitions) - 1
            raise exits.Exit(
                exits.USAGE, f"topic {topic} has several partitions; name one, {topic}/0 to {topic}/{last}"
            )
        meta = record.partitions.get(number or 0)
        if meta is None:
            raise exits.Exit(exits.NOT_FOUND, f"topic {topic} has no partition {number}")
        return PartitionName(topic, record.uid, number or 0), meta


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[EtcdStore]:
    """Open the metadata of the cluster that the flags name; it must exist."""
    from nsqha.election.etcd.access import open_store

    flags = EtcdArguments.of(args)
    store = open_store(flags, SystemClock(), random.SystemRandom(), begin=False)
    try:
        yield store
    finally:
        store.close()


def look(store: MetadataStore, args: argparse.Namespace, *, forgiving: bool = False) -> Picture:
    """Read everything from etcd. `forgiving`: leave out records that cannot be read; for verbs that change nothing."""
    flags = EtcdArguments.of(args)
    topics: Mapping[str, Versioned[TopicRecord]]
    nodes: Mapping[int, NodeInfo]
    try:
        topics, nodes = store.records.topics(), store.records.nodes()
    except (ConfigError, LogCorrupt):
        if not forgiving:
            raise
        topics, nodes = store.watch.view().topics, store.watch.view().nodes
    intents = {name: intent.record for name, intent in store.intents.all().items()}
    return Picture(
        flags.cluster_name,
        store.records.cluster().record.cluster_id,
        f"etcd {', '.join(flags.etcd_endpoints)}",
        store.records.revision,
        {name: topic.record for name, topic in topics.items()},
        nodes,
        read_intents(intents),
        store.records.controller(),
        tuple(sorted(store.watch.view().unreadable.values())),
    )


def ask_nodes(picture: Picture, name: PartitionName, args: argparse.Namespace) -> dict[int, ReplicaReport | str]:
    """Ask each replica of a partition for its report; a text instead says why there is none."""
    from nsqha.pb.v1 import replication_pb2 as pb

    replicas = picture.metas[name].replicas
    addresses = {uid: picture.nodes[uid].grpc_address for uid in replicas if uid in picture.nodes}
    key = pb.PartitionKey(topic_uid=name.uid, partition=name.number)
    request = pb.StatusRequest(cluster_id=picture.cluster_id, keys=[key])
    answers = ask_each(addresses, "Status", request, _report, args)
    return {uid: answers.get(uid, "away") for uid in replicas}


def observe(picture: Picture, args: argparse.Namespace) -> Observed:
    """Ask the nodes what they lead, and how far replicas are that are not in sync."""
    from nsqha.pb.v1 import replication_pb2 as pb

    answers: dict[int, dict[PartitionKey, ReplicaAnswer]] = {}
    silent: dict[int, str] = {}
    left = questions(picture.metas, picture.nodes)
    while left:
        requests = {}
        for node, parts in left.items():
            keys = [pb.PartitionKey(topic_uid=uid, partition=number) for uid, number in parts.pop(0)]
            requests[node] = pb.StatusRequest(cluster_id=picture.cluster_id, keys=keys)
        addresses = {node: picture.nodes[node].grpc_address for node in requests}
        for node, said in ask_each(addresses, "Status", requests, answers_in, args).items():
            if isinstance(said, str):
                silent[node] = said
                answers.pop(node, None)
            else:
                answers.setdefault(node, {}).update(said)
        left = {node: parts for node, parts in left.items() if parts and node not in silent}
    return Observed(answers, silent)


Said = TypeVar("Said")


def ask_each(
    addresses: Mapping[int, str],
    method: str,
    request: Any | Mapping[int, Any],
    read: Callable[[Any, int], Said | str],
    args: argparse.Namespace,
) -> dict[int, Said | str]:
    """Call these nodes all at once, with one request or one for each; return what `read` makes of each reply, or why
    there is none."""
    import grpc

    from nsqha import grpc_channels
    from nsqha.pb.v1.replication_pb2_grpc import ReplicationStub
    from nsqha.server.peers.calls import client_options

    certified, shared = credentials(args), secret(args)
    found: dict[int, Said | str] = {}
    calls = {}
    channels = []
    try:
        for uid, address in addresses.items():
            channel = grpc_channels.channel(address, client_options(), certified, shared)
            channels.append(channel)
            asked = request[uid] if isinstance(request, Mapping) else request
            calls[uid] = getattr(ReplicationStub(channel), method).future(asked, timeout=args.timeout / 1e9)
        for uid, call in calls.items():
            try:
                found[uid] = read(call.result(), uid)
            except Unavailable as error:
                found[uid] = f"no answer: {error}"
            except grpc.RpcError as error:
                found[uid] = f"no answer: {(error.details() or error.code().name).splitlines()[0]}"
    finally:
        for channel in channels:
            channel.close()
    return found


def _report(reply: Any, uid: int) -> ReplicaReport | str:
    from nsqha.server.replica.replica_reports import reports_in

    if reply.node_uid != uid:
        return f"node {reply.node_uid:016x} answers at its address"
    if not reply.replicas:
        return f"poisoned: {reply.poisoned}" if reply.poisoned else "does not have this partition"
    return next(iter(reports_in(reply).values()))
