"""The Admin service: each RPC is one call of the broker; and the gRPC listener of a node, with all its services.

In a cluster a node answers for all of it: `Describer` asks all nodes, `TopicRequest` the leaders of a topic's
partitions.

Health (`grpc.health.v1`) and reflection are on, so that grpcurl and probes work without our .proto files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import nsqha.grpc_env

# isort: split
from google.protobuf import descriptor_pool
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import nsqha
from nsqha import hot, ids
from nsqha.admin import messages, peeking, policies, replay
from nsqha.admin.access import JUDGED, AdminGate
from nsqha.admin.answers import Context, answers, refuse
from nsqha.admin.call_counts import CallCounter
from nsqha.admin.describe import SYNC, Describer
from nsqha.admin.fan_out import FanOut
from nsqha.admin.peer_admins import GrpcOthers, PeerAdmins
from nsqha.admin.segments import SegmentsService
from nsqha.admin.skipping import skip_damage
from nsqha.cluster_secret import ClusterSecret
from nsqha.election.model import TopicSettings
from nsqha.election.policy import EVERY_CHANNEL
from nsqha.election.rules import check_settings
from nsqha.election.session import View
from nsqha.errors import Conflict
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import admin_pb2, admin_pb2_grpc, segments_pb2, segments_pb2_grpc
from nsqha.server.http.broker_api import announced_ports
from nsqha.server.peers import calls as peer_grpc
from nsqha.server.peers import renewing
from nsqha.server.topics.channel_list import check_there

if TYPE_CHECKING:
    from nsqha.server.authorization.audit import Audit
    from nsqha.server.authorization.guard import Guard
    from nsqha.server.node.broker import Broker
    from nsqha.server.runtime.certificates import CertificateFiles
    from nsqha.server.segments.renewals import HoldRenewals

logger = Logger("admin")

ALONE_BYTES_MAX = 128 << 20  # of one request where no other node calls: more than the largest body

_SYNC_NAME = {number: name for name, number in SYNC.items()}


def _named(topic: str, channel: str | None = None) -> None:
    if not ids.valid_name(topic):
        raise ValueError(f"{topic!r} is not a topic name: 1 to 64 of . a-z A-Z 0-9 _ - and optionally #ephemeral")
    if channel is not None and not ids.valid_name(channel):
        raise ValueError(f"{channel!r} is not a channel name: 1 to 64 of . a-z A-Z 0-9 _ - and optionally #ephemeral")


class AdminService(admin_pb2_grpc.AdminServicer):
    """Topics, channels, replay."""

    def __init__(self, broker: Broker, others: PeerAdmins | None = None) -> None:
        """`others`: how to ask other nodes; None for a single node."""
        self._broker = broker
        self.describer = Describer(broker, others)
        self._fan_out = FanOut(None if broker.cluster is None else broker.cluster.leaders, others)

    # ---- node and topics

    @answers
    async def GetNode(self, request: Any) -> Any:
        broker = self._broker
        tcp_port, http_port = announced_ports(broker.options, broker.ports)
        return admin_pb2.GetNodeResponse(
            version=nsqha.__version__,
            implementation=hot.ACTIVE,
            data_path=broker.options.data_path,
            health=broker.health(),
            node_uid=broker.parts.journal.identity.node_uid,
            start_time_ns=broker.start_time_ns,
            sync=broker.options.sync,
            disk_free_bytes=broker.availability.space.free_bytes,
            publishes_refused=broker.availability.refuses_publish() is not None,
            retention_ms=broker.options.retention_ns // 1_000_000,
            retention_bytes=broker.options.retention_bytes,
            tcp_port=max(tcp_port, 0),
            http_port=max(http_port, 0),
        )

    @answers
    async def ListTopics(self, request: Any) -> Any:
        return await self.describer.topics(request)

    @answers
    async def DescribeTopic(self, request: Any) -> Any:
        return await self.describer.topic(request)

    @answers
    async def CreateTopic(self, request: Any) -> Any:
        _named(request.topic)
        for channel in request.channels:
            _named(request.topic, channel)
        if request.topic in self._broker.topics:
            raise Conflict(f"topic {request.topic} exists already")
        wanted = settings_of(request.settings)
        await self._broker.topics.create_topic(request.topic, wanted)
        for channel in request.channels:
            await self._broker.channels.create(request.topic, channel)
        remarks = self._broker.topics.placement.remarks(wanted)
        return admin_pb2.CreateTopicResponse(topic=await self._topic(request.topic), remarks=remarks)

    @answers
    async def DeleteTopic(self, request: Any) -> Any:
        await self._broker.topics.delete_topic(request.topic)
        return admin_pb2.DeleteTopicResponse()

    @answers
    async def PauseTopic(self, request: Any) -> Any:
        await self._broker.channels.pause_topic(request.topic, request.paused)
        return admin_pb2.PauseTopicResponse()

    @answers
    async def EmptyTopic(self, request: Any) -> Any:
        skipped = await self.describer.unfinished(request.topic)
        await self._broker.channels.empty_topic(request.topic)
        return admin_pb2.EmptyTopicResponse(skipped=skipped)

    @answers
    async def UpdateTopicSettings(self, request: Any) -> Any:
        changes: dict[str, Any] = {}
        if request.HasField("sync"):
            changes["sync"] = _SYNC_NAME.get(request.sync)
        for name in ("retention_ms", "retention_bytes", "abandoned_after_ms", "replicas", "min_isr"):
            if request.HasField(name):
                changes[name] = getattr(request, name) or None
        if request.HasField("partitions"):
            changes["partitions"] = request.partitions
        await self._broker.topics.change_settings(request.topic, changes)
        remarks = []
        if changes.keys() & {"partitions", "replicas", "min_isr"}:
            topics = self._broker.topics
            remarks = topics.placement.remarks(topics.topic(request.topic).record.settings)
        return admin_pb2.UpdateTopicSettingsResponse(topic=await self._topic(request.topic), remarks=remarks)

    # ---- channels

    @answers
    async def ListChannels(self, request: Any) -> Any:
        return await self.describer.channels(request)

    @answers
    async def DescribeChannel(self, request: Any) -> Any:
        return await self.describer.channel(request)

    @answers
    async def CreateChannel(self, request: Any) -> Any:
        _named(request.topic, request.channel)
        channels = self._broker.channels
        if channels.has(request.topic, request.channel):
            raise Conflict(f"channel {request.channel} of topic {request.topic} exists already")
        await (channels.readers.ensure if request.reader else channels.create)(request.topic, request.channel)
        wanted = admin_pb2.DescribeChannelRequest(topic=request.topic, channel=request.channel)
        return admin_pb2.CreateChannelResponse(channel=(await self.describer.channel(wanted)).channel)

    @answers
    async def DeleteChannel(self, request: Any) -> Any:
        skipped = await self.describer.unfinished(request.topic, request.channel)
        await self._broker.channels.delete(request.topic, request.channel)
        return admin_pb2.DeleteChannelResponse(skipped=skipped)

    @answers
    async def PauseChannel(self, request: Any) -> Any:
        await self._broker.channels.pause(request.topic, request.channel, request.paused)
        return admin_pb2.PauseChannelResponse()

    @answers
    async def EmptyChannel(self, request: Any) -> Any:
        skipped = await self.describer.unfinished(request.topic, request.channel)
        await self._broker.channels.empty(request.topic, request.channel)
        described = admin_pb2.DescribeChannelRequest(topic=request.topic, channel=request.channel)
        dead = (await self.describer.channel(described)).channel.dead
        return admin_pb2.EmptyChannelResponse(dead=dead, skipped=skipped)

    @answers
    async def ListMessages(self, request: Any) -> Any:
        return await messages.list_messages(self._broker, request, self._fan_out)

    @answers
    async def ChangeMessages(self, request: Any) -> Any:
        return await messages.change_messages(self._broker, request, self._fan_out)

    async def finish_message(self, topic: str, channel: str, message_id: str) -> None:
        """For HTTP; as `messages.finish_message`."""
        await messages.finish_message(self._broker, self._fan_out, topic, channel, message_id)

    @answers
    async def GetChannelPolicy(self, request: Any) -> Any:
        topic = self._broker.topics.topic(request.topic)
        if request.channel != EVERY_CHANNEL:
            check_there(topic, request.channel)
        return policies.policies_of(topic.record.channels, request.channel)

    @answers
    async def UpdateChannelPolicy(self, request: Any) -> Any:
        changes = policies.changes_of(request)
        expected = policies.policy_of(request.expected) if request.HasField("expected") else None
        channels = await self._broker.channels.ask(request.topic, request.channel, changes, expected=expected)
        return policies.policies_of(channels, request.channel)

    # ---- replay

    @answers
    async def Seek(self, request: Any) -> Any:
        return await replay.seek(self._broker, request, self._fan_out)

    @answers
    async def UndoSeek(self, request: Any) -> Any:
        return await replay.undo(self._broker, request, self._fan_out)

    @answers
    async def SkipDamage(self, request: Any) -> Any:
        return await skip_damage(self._broker, request, self._fan_out)

    async def PeekMessages(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(peeking.peek(self._broker, request, self._fan_out)) as messages:
                async for message in messages:
                    yield message
        except Exception as error:
            await refuse(context, error)
            raise

    async def _topic(self, name: str) -> Any:
        return (await self.describer.topic(admin_pb2.DescribeTopicRequest(topic=name))).topic


def settings_of(message: Any) -> TopicSettings:
    """TopicSettings of a request; zeros mean "not set". ValueError if they do not fit each other."""
    wanted = TopicSettings(
        sync=_SYNC_NAME.get(message.sync),  # type: ignore[arg-type]
        partitions=message.partitions or 1,
        retention_ms=message.retention_ms or None,
        retention_bytes=message.retention_bytes or None,
        abandoned_after_ms=message.abandoned_after_ms or None,
        ordered=message.ordered,
        replicas=message.replicas or None,
        min_isr=message.min_isr or None,
    )
    check_settings(wanted)
    return wanted


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # untyped
    """gRPC's health protocol: it reports whether this process serves, as /ping does; readiness is /readyz's."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    async def List(self, request: Any, context: Context) -> Any:  # the library has none
        found = {name: await self.Check(health_pb2.HealthCheckRequest(service=name), context) for name in self.names}
        return health_pb2.HealthListResponse(statuses=found)


def _alone() -> View:
    """The view of a node without a cluster: no other node may speak for it."""
    return View()


def _described(names: Sequence[str]) -> list[Any]:
    """The descriptors of these services."""
    pool = descriptor_pool.Default()
    return [pool.FindServiceByName(name) for name in names]


class AdminServer:
    """The gRPC listener of one node: administration, and `peers`, the services for other nodes.

    With `tls` every client needs a certificate of the cluster's CA.
    """

    def __init__(
        self,
        broker: Broker,
        address: str,
        peers: peer_grpc.GrpcPeerServer | None = None,
        *,
        tls: CertificateFiles | None = None,
        secret: ClusterSecret | None = None,
        guard: Guard | None = None,
        audit: Audit | None = None,
        audit_topic: str = "",
    ) -> None:
        """With `secret` every call has to prove it; with `guard` a call may show a token instead."""
        self._guard = guard
        self._audit = audit
        self._audit_topic = audit_topic
        self._secret = secret
        self._broker = broker
        self._wanted = address
        self._peers = peers
        self._tls = tls
        self._others: GrpcOthers | None = None
        self._server: aio.Server | None = None
        self._segments: SegmentsService | None = None
        self.address = ""
        self.renewals: HoldRenewals  # of holds, for what serves bytes; from `start` on

    async def start(self) -> None:
        """Listen. Raises Unavailable or ConfigError if the address cannot be bound."""
        cluster = self._broker.cluster
        guard = self._guard
        view = _alone if cluster is None else cluster.leaders.members.view
        proofs = self._secret is not None
        gate = AdminGate(view, guard, self._audit, proofs=proofs, audit_topic=self._audit_topic)
        alone = 0 if self._peers else ALONE_BYTES_MAX
        counter = CallCounter()
        self._broker.endpoints.grpc_requests = counter.counts
        gates = [counter, *peer_grpc.gates(self._secret, JUDGED if guard is not None else ()), gate]
        server = aio.server(interceptors=gates, options=peer_grpc.server_options(alone))
        if cluster is not None:
            self._others = GrpcOthers(tls=self._tls, secret=self._secret)
        service = AdminService(self._broker, self._others)
        admin_pb2_grpc.add_AdminServicer_to_server(service, server)
        self._broker.endpoints.finish_message = service.finish_message
        self._broker.endpoints.unfinished = service.describer.unfinished
        segments = self._segments = SegmentsService(self._broker, self._others)
        segments_pb2_grpc.add_SegmentsServicer_to_server(segments, server)
        self.renewals = segments.renewals
        if self._peers is not None:
            self._peers.add_to(server)
        names = [
            admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
            segments_pb2.DESCRIPTOR.services_by_name["Segments"].full_name,
        ]
        names += self._peers.service_names if self._peers is not None else ()
        gate.check_table(_described((*names, health.SERVICE_NAME, reflection.SERVICE_NAME)))
        checks = _Health(("", *names))
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        for name in checks.names:
            await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        self.address = await renewing.listen(server, self._wanted, self._tls)
        self._server = server
        logger.info("listening", "gRPC: listening on %s", self.address, address="grpc")

    async def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
        if self._server is not None:
            await self._server.stop(grace=0.5)
        if self._others is not None:
            await self._others.close()
        if self._segments is not None:
            self._segments.close()
