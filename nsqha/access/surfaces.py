"""What each HTTP route, each gRPC method, each command of a V2 client and each of the lookup protocol needs.

A daemon whose route or method is in none of these tables does not start, and a test compares them with what there is in
both directions. The keys of HTTP are `METHOD path`, of gRPC `Service/Method`.
"""

from __future__ import annotations

from collections.abc import Mapping

from nsqha.access.roles import Need, Role
from nsqha.errors import ConfigError

OPEN = Need()
VIEW = Need(frozenset({Role.VIEWER}))
READ = Need(frozenset({Role.READER}))
SEGMENTS = Need(frozenset({Role.SEGMENTS}))
HOLD = Need(frozenset({Role.SEGMENTS}), change=True)
PUBLISH = Need(frozenset({Role.PUBLISHER}))
CONSUME = Need(frozenset({Role.CONSUMER}))
LOOK_UP = Need(frozenset({Role.VIEWER, Role.PUBLISHER, Role.CONSUMER, Role.BROKER}))
REGISTER = Need(frozenset({Role.BROKER}))
OPERATE = Need(frozenset({Role.OPERATOR}), change=True)
ADMINISTER = Need(frozenset({Role.ADMIN}), change=True)
INSPECT = Need(frozenset({Role.ADMIN}))
NODES = Need(frozenset({Role.NODE}))

HEALTH: Mapping[str, Need] = {
    "GET /ping": OPEN,
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "GET /startupz": OPEN,
}

BROKER_HTTP: Mapping[str, Need] = {
    **HEALTH,
    "GET /info": VIEW,
    "GET /stats": VIEW,
    "GET /metrics": VIEW,
    "GET /cluster": VIEW,
    "GET /config/:opt": INSPECT,
    "PUT /config/:opt": ADMINISTER,
    "POST /pub": PUBLISH,
    "POST /mpub": PUBLISH,
    "POST /topic/create": OPERATE,
    "POST /topic/delete": ADMINISTER,
    "POST /topic/empty": OPERATE,
    "POST /topic/pause": OPERATE,
    "POST /topic/unpause": OPERATE,
    "POST /channel/create": OPERATE,
    "POST /channel/delete": ADMINISTER,
    "POST /channel/empty": OPERATE,
    "POST /channel/pause": OPERATE,
    "POST /channel/unpause": OPERATE,
    "GET /channel/policy": VIEW,
    "POST /channel/policy": OPERATE,
    "POST /channel/skip": OPERATE,
    "POST /message/finish": OPERATE,
    "POST /channel/unskip": OPERATE,
    "GET /debug/pprof": INSPECT,
    "GET /debug/pprof/": INSPECT,
    "GET /debug/pprof/cmdline": INSPECT,
    "GET /debug/pprof/goroutine": INSPECT,
    "GET /debug/pprof/threadcreate": INSPECT,
    "GET /debug/pprof/heap": INSPECT,
    "GET /debug/pprof/profile": INSPECT,
}

LOOKUPD_HTTP: Mapping[str, Need] = {
    "GET /ping": OPEN,
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "GET /info": VIEW,
    "GET /topics": VIEW,
    "GET /channels": LOOK_UP,
    "GET /lookup": LOOK_UP,
    "GET /nodes": VIEW,
    "GET /debug": INSPECT,
    "POST /topic/create": OPERATE,
    "PUT /topic/create": OPERATE,
    "POST /topic/delete": ADMINISTER,
    "POST /topic/tombstone": ADMINISTER,
    "POST /channel/create": OPERATE,
    "POST /channel/delete": ADMINISTER,
    "GET /controller": VIEW,
    "GET /metrics": VIEW,
    "GET /cluster": VIEW,
    "GET /cluster/balance": VIEW,
    "POST /cluster/balance": ADMINISTER,
    "POST /cluster/spread": ADMINISTER,
    "POST /cluster/move": ADMINISTER,
    "POST /cluster/decommission": ADMINISTER,
    "POST /cluster/recommission": ADMINISTER,
    "POST /topic/partition/expand": ADMINISTER,
    "POST /topic/meta/update": ADMINISTER,
    "POST /topic/partition/move": ADMINISTER,
    "POST /cluster/node/remove": ADMINISTER,
    "GET /listlookup": VIEW,
}

GRPC: Mapping[str, Need] = {
    "nsqha.v1.Admin/GetNode": VIEW,
    "nsqha.v1.Admin/ListTopics": VIEW,
    "nsqha.v1.Admin/DescribeTopic": VIEW,
    "nsqha.v1.Admin/CreateTopic": OPERATE,
    "nsqha.v1.Admin/DeleteTopic": ADMINISTER,
    "nsqha.v1.Admin/PauseTopic": OPERATE,
    "nsqha.v1.Admin/EmptyTopic": OPERATE,
    "nsqha.v1.Admin/UpdateTopicSettings": ADMINISTER,
    "nsqha.v1.Admin/ListChannels": VIEW,
    "nsqha.v1.Admin/DescribeChannel": VIEW,
    "nsqha.v1.Admin/CreateChannel": OPERATE,
    "nsqha.v1.Admin/DeleteChannel": ADMINISTER,
    "nsqha.v1.Admin/PauseChannel": OPERATE,
    "nsqha.v1.Admin/EmptyChannel": OPERATE,
    "nsqha.v1.Admin/GetChannelPolicy": VIEW,
    "nsqha.v1.Admin/UpdateChannelPolicy": OPERATE,
    "nsqha.v1.Admin/ListMessages": Need(frozenset({Role.READER, Role.OPERATOR})),
    "nsqha.v1.Admin/ChangeMessages": OPERATE,
    "nsqha.v1.Admin/Seek": OPERATE,
    "nsqha.v1.Admin/UndoSeek": OPERATE,
    "nsqha.v1.Admin/SkipDamage": ADMINISTER,
    "nsqha.v1.Admin/PeekMessages": READ,
    "nsqha.v1.Segments/Snapshot": HOLD,  # a change if it asks for a hold
    "nsqha.v1.Segments/RenewHold": HOLD,
    "nsqha.v1.Segments/ReleaseHold": HOLD,
    "nsqha.v1.Segments/CommitReader": HOLD,
    "nsqha.v1.Replication/Push": NODES,
    "nsqha.v1.Replication/Status": NODES,
    "nsqha.v1.Replication/EpochEnd": NODES,
    "nsqha.v1.Replication/Fetch": NODES,
    "nsqha.v1.Replication/Evidence": NODES,
    "nsqha.v1.Replication/Live": NODES,
    "nsqha.v1.Replication/Reach": NODES,
    "nsqha.v1.Routing/Forward": NODES,
    "nsqha.v1.Routing/Relay": NODES,
    "nsqha.v1.Routing/Reconcile": NODES,
    "nsqha.v1.Routing/Leaders": NODES,
    "nsqha.v1.Routing/Administer": NODES,
    "nsqha.v1.Routing/KnownChannels": NODES,
    "nsqha.v1.Routing/Audited": NODES,
    "grpc.health.v1.Health/Check": OPEN,
    "grpc.health.v1.Health/List": OPEN,
    "grpc.health.v1.Health/Watch": OPEN,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": VIEW,
}

BODIES_TOO = READ
"""What a request of ListMessages needs that asks for bodies as well."""

DEAD_LETTER_TOPIC = READ
"""What a policy with `dead_letter=topic:NAME` needs as well: consumers of that topic read the bodies of this one."""


def writes_audit(need: Need) -> Need:
    """What a request about the topic of --audit-topic needs as well: daemons write it, and only administrators change
    it."""
    if need.change and Role.OPERATOR in need.roles:
        return ADMINISTER
    return INSPECT if need == PUBLISH else OPEN


V2: Mapping[str, Need] = {
    "IDENTIFY": OPEN,
    "AUTH": OPEN,
    "NOP": OPEN,
    "PUB": PUBLISH,
    "MPUB": PUBLISH,
    "DPUB": PUBLISH,
    "SUB": CONSUME,
    # Of a client that has subscribed: where it may not consume there is nothing to ask for or to answer.
    "RDY": OPEN,
    "FIN": OPEN,
    "REQ": OPEN,
    "TOUCH": OPEN,
    "CLS": OPEN,
}

LOOKUP_V1: Mapping[str, Need] = {
    "IDENTIFY": OPEN,
    "AUTH": OPEN,
    "PING": OPEN,
    "REGISTER": REGISTER,
    "UNREGISTER": REGISTER,
}

SEGMENT_BYTES = SEGMENTS
"""What a reader of the segments port needs."""


def need_of(table: Mapping[str, Need], name: str) -> Need:
    """What the table says of it. ConfigError: nothing, so the daemon can not start."""
    need = table.get(name)
    if need is None:
        raise ConfigError(f"{name} is in no table of nsqha.access.surfaces: say there which role it needs")
    return need
