"""The URLs of the Youzan fork's cluster tools, translated to the changes and intents of this cluster.

    POST /topic/partition/expand?topic=&partition_num=
    POST /topic/meta/update?topic=[&replicator=][&syncdisk=][&retention=]
    POST /topic/partition/move?topic=&partition=&move_from=&move_to=[&move_leader=true]
    POST /cluster/node/remove?remove_node=
    GET  /listlookup

Settings are those of the fork's /topic/create (`settings_of`), and errors are called as it calls them:

    partition_num  partitions; there can only be more of them
    replicator     replicas of each partition; 0: the default
    syncdisk       1 is sync=always, more is sync=interval, 0 the default
    retention      days; 0: the default
    orderedmulti   of /topic/create only

`extend`, `upgradeext` and `disable_channel_auto_create` are refused: there is no such topic here. Other arguments of
the fork (`suggestload`, `multipart`, ..) mean nothing here and are passed over. The controller and the leaders change
partitions after the answer. A move replaces the replica `move_from` by `move_to`; with `move_leader`, `move_to` leads
from then on, and a `move_to` that is a replica already takes over without a replica being moved. The leader itself is
moved only with `move_leader`, and other replicas only without it. Nodes are named as in `lookupd.cluster_api`.
/listlookup names only this daemon, also as the one to send changes to: every daemon takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lookupd.cluster_api import LookupCluster, different_hosts, node_uid, number, partition_named
from nsqha.election.model import REPLICAS_MAX, PartitionMeta, TopicSettings
from nsqha.ids import PARTITIONS_MAX
from nsqha.server.http.server import ApiError, HttpApi, HttpRequest

DAY_MS = 24 * 3600 * 1000
SYNCDISK_MAX = 4000
RETENTION_DAYS_MAX = 36_500
TAKEN = "of the fork's arguments partition_num, replicator, syncdisk, retention and orderedmulti are taken"
_REFUSED = ("extend", "upgradeext", "disable_channel_auto_create")


class ForkApi:
    """Handlers of these routes."""

    def __init__(self, cluster: LookupCluster, describe: Callable[[], dict[str, object]]) -> None:
        """`describe`: this daemon, as /listlookup shows it."""
        self._cluster = cluster
        self._describe = describe

    def add_to(self, api: HttpApi) -> None:
        api.add("POST", "/topic/partition/expand", self.expand, takes=("topic",))
        api.add("POST", "/topic/meta/update", self.update, takes=("topic",))
        api.add("POST", "/topic/partition/move", self.move, takes=("topic", "partition"))
        api.add("POST", "/cluster/node/remove", self.remove)
        api.add("GET", "/listlookup", self.lookups)

    async def expand(self, request: HttpRequest) -> None:
        await self._change(request, {"partitions": partition_num(request)})

    async def update(self, request: HttpRequest) -> None:
        await self._change(request, changed_by(request))

    async def _change(self, request: HttpRequest, changes: dict[str, Any]) -> None:
        topic = request.query.require_name("topic")
        if not await self._cluster.run(lambda: self._cluster.changes.change_settings(topic, changes)):
            raise ApiError(404, "TOPIC_NOT_FOUND")

    async def move(self, request: HttpRequest) -> None:
        view, query = self._cluster.view, request.query
        name, meta = partition_named(view, request)
        source, target = (node_uid(view, query.require(name)) for name in ("move_from", "move_to"))
        wanted = moved(meta, source, target, leader=query.flag("move_leader", False))
        different_hosts(view, wanted)
        await self._cluster.run(lambda: self._cluster.changes.move({name: wanted}))

    async def remove(self, request: HttpRequest) -> None:
        uid = node_uid(self._cluster.view, request.query.require("remove_node"))
        await self._cluster.run(lambda: self._cluster.changes.decommission(uid))

    async def lookups(self, _: HttpRequest) -> object:
        me = self._describe()
        return {"lookupdnodes": [me], "lookupdleader": me}


def settings_of(request: HttpRequest) -> TopicSettings | None:
    """The settings in the parameters of /topic/create; None if there are none."""
    changes = changed_by(request)
    if request.query.get("partition_num") is not None:
        changes["partitions"] = partition_num(request)
    if request.query.get("orderedmulti") is not None:
        changes["ordered"] = request.query.flag("orderedmulti", False)
    return TopicSettings(**changes) if changes else None


def partition_num(request: HttpRequest) -> int:
    return number(request, "partition_num", None, 1, PARTITIONS_MAX, code="TOPIC_PARTITION_NUM")


def changed_by(request: HttpRequest) -> dict[str, Any]:
    """The settings that the parameters change; None for a setting that goes back to its default."""
    query, changes = request.query, dict[str, Any]()
    for name in _REFUSED:
        if query.flag(name, False):
            raise ApiError(400, f"INVALID_ARG_{name.upper()}", why=f"there is no such topic here; {TAKEN}")
    if query.get("replicator") is not None:
        changes["replicas"] = number(request, "replicator", None, 0, REPLICAS_MAX, code="TOPIC_REPLICATOR") or None
    if query.get("syncdisk") is not None:
        every = number(request, "syncdisk", None, 0, SYNCDISK_MAX, code="TOPIC_SYNC_DISK")
        changes["sync"] = None if every == 0 else "always" if every == 1 else "interval"
    if query.get("retention") is not None:
        days = number(request, "retention", None, 0, RETENTION_DAYS_MAX, code="TOPIC_RETENTION")
        changes["retention_ms"] = days * DAY_MS or None
    return changes


def moved(meta: PartitionMeta, source: int, target: int, *, leader: bool) -> tuple[int, ...]:
    """The replicas after the move, first the one that will lead."""
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
