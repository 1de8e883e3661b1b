"""What tools of the Youzan fork ask of a cluster by its URLs, as the intents that this cluster has for it.

    POST /topic/partition/move?topic=&partition=&move_from=&move_to=[&move_leader=true]
    POST /cluster/node/remove?remove_node=
    GET  /listlookup

A move replaces the replica `move_from` by `move_to`; with `move_leader`, `move_to` leads from then on, and a `move_to`
that is a replica already takes over without a replica being moved. The leader itself is moved only with `move_leader`,
and nobody else with it. Nodes are named as in `lookupd.cluster_api`. /listlookup names this daemon alone, also as the
one to send changes to: every daemon takes them.
"""

from __future__ import annotations

from collections.abc import Callable

from lookupd.cluster_api import Cluster, different_hosts, node_uid, number
from nsqha.election.model import PartitionMeta
from nsqha.election.placement import PartitionName
from nsqha.server.http_envelope import ApiError, HttpApi, Request


class ForkApi:
    """Handlers of these routes."""

    def __init__(self, cluster: Cluster, describe: Callable[[], dict[str, object]]) -> None:
        """`describe`: this daemon, as /listlookup shows it."""
        self._cluster = cluster
        self._describe = describe

    def add_to(self, api: HttpApi) -> None:
        api.add("POST", "/topic/partition/move", self.move)
        api.add("POST", "/cluster/node/remove", self.remove)
        api.add("GET", "/listlookup", self.lookups)

    async def move(self, request: Request) -> None:
        view, query = self._cluster.view, request.query
        topic = view.topics.get(query.require_name("topic"))
        if topic is None:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        partition = number(request, "partition", None, 0, len(topic.record.partitions) - 1)
        source, target = (node_uid(view, query.require(name)) for name in ("move_from", "move_to"))
        wanted = moved(topic.record.partitions[partition], source, target, leader=query.flag("move_leader", False))
        different_hosts(view, wanted)
        name = PartitionName(topic.record.name, topic.record.uid, partition)
        await self._cluster.run(lambda: self._cluster.changes.move({name: wanted}))

    async def remove(self, request: Request) -> None:
        uid = node_uid(self._cluster.view, request.query.require("remove_node"))
        await self._cluster.run(lambda: self._cluster.changes.decommission(uid))

    async def lookups(self, _: Request) -> object:
        me = self._describe()
        return {"lookupdnodes": [me], "lookupdleader": me}


def moved(meta: PartitionMeta, source: int, target: int, *, leader: bool) -> tuple[int, ...]:
    """The replicas after the move, the one that is to lead first."""
    if source not in meta.replicas:
        raise ApiError(400, "INVALID_ARG_MOVE_FROM", why="it has no replica of this partition")
    if leader != (source == meta.leader):
        why = "it leads this partition: say move_leader=true" if not leader else "it does not lead this partition"
        raise ApiError(400, "INVALID_ARG_MOVE_LEADER", why=why)
    if target in meta.replicas:
        if not leader or target == source:
            raise ApiError(400, "INVALID_ARG_MOVE_TO", why="it has a replica of this partition already")
        kept = meta.replicas
    else:
        kept = tuple(target if uid == source else uid for uid in meta.replicas)
    first = target if leader else meta.leader
    return (first, *(uid for uid in kept if uid != first)) if first in kept else kept
