"""The controller over HTTP: its state, and requests of operators. Every lookup daemon serves this.

    GET  /controller                                     who it is, rounds, nodes, moves (JSON); what is known when the
                                                         store does not answer, with the reason in `store_doubt`
    GET  /cluster                                        all records, and what the nodes say that they lead
                                                         (`nsqha.server.http.cluster_page`)
    GET  /cluster/balance                                a preview: transfers that are due, moves that would even out
    POST /cluster/balance?paused=true|false              whether leaderships go back automatically
    POST /cluster/balance?window=01:00-05:00|always      and in which hours (UTC)
    POST /cluster/spread?limit=N                         begin the moves of the preview, at most N (4)
    POST /cluster/move?topic=&partition=&replicas=a,b,c  give a partition these replicas; the first one leads
    POST /cluster/decommission?node=                     empty a node, and keep it empty
    POST /cluster/recommission?node=                     allow replicas on it again

A node is named by its uid (16 hex digits) or by its name. Requests are intents: they are answered when they are stored,
and the current controller carries them out. Only a new topic is waited for until it is led (`LookupCluster.led`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from lookupd.changes import MetadataChanges
from lookupd.controller import ControllerShell, MetadataGate
from lookupd.directory import LookupDirectory, writable
from nsqha.election import health
from nsqha.election.model import NodeInfo, PartitionMeta, TopicSettings
from nsqha.election.moves import HIDDEN_SECONDS, Intents, read_intents
from nsqha.election.observed.answers import LeaderState
from nsqha.election.placement import PartitionName, able, balance, host_of, refuse_too_many_replicas, spread, staying
from nsqha.election.session import View
from nsqha.errors import Conflict, LimitReached, NotFound, NsqhaError, OutcomeUnknown, Unavailable
from nsqha.pb.v1.routing_pb2 import KnownChannelsRequest
from nsqha.server.http.cluster_page import ClusterPages
from nsqha.server.http.server import ApiError, HttpApi, HttpRequest
from nsqha.server.runtime.tasks import TaskGroup

if TYPE_CHECKING:
    from lookupd.metrics import ClusterFigures

SPREAD_LIMIT = 4
SPREAD_LIMIT_MAX = 100
LED_SECONDS = 10.0  # that a creation waits for the leaders of all partitions, as at a broker
KNOWN_CHANNELS_S = 3.0  # for a broker to say what its lookup daemons know

T = TypeVar("T")


class LookupCluster:
    """The parts of a lookup daemon that belong to its cluster."""

    def __init__(
        self,
        shell: ControllerShell,
        directory: LookupDirectory,
        changes: MetadataChanges,
        *,
        name: str,
        gate: MetadataGate | None = None,
    ) -> None:
        """`name`: the cluster's; `gate`: as the controller's."""
        self.shell = shell
        why_not = gate.why_not if gate is not None else str  # nothing is known against the metadata
        self.pages = ClusterPages(
            name, shell.store, shell.peers, shell.run, cluster_id=self._cluster_id, why_not=why_not
        )
        self.directory = directory
        self.changes = changes
        self._known_id = 0
        self._tasks = TaskGroup()

    @property
    def view(self) -> View:
        return self.shell.store.watch.view()

    async def run(self, call: Callable[[], T]) -> T:
        """Call the store; its errors become HTTP answers."""
        try:
            return await self.shell.run(call)
        except ValueError as error:
            raise ApiError(400, "INVALID_REQUEST", why=str(error)) from error
        except NotFound as error:
            raise ApiError(404, "NOT_FOUND", why=str(error)) from error
        except Conflict as error:
            raise ApiError(409, "CONFLICT", why=str(error)) from error
        except LimitReached as error:
            raise ApiError(507, "LIMIT_REACHED", why=str(error)) from error
        except OutcomeUnknown as error:
            raise ApiError(503, "OUTCOME_UNKNOWN", why=str(error)) from error
        except (Unavailable, NsqhaError) as error:
            raise ApiError(503, "METADATA_UNAVAILABLE", why=str(error)) from error

    def start(self) -> None:
        """Learn the cluster's id while the store answers: nodes are asked with it also when it is away."""
        self._tasks.spawn(self._learn_id())

    async def _learn_id(self) -> None:
        with suppress(ApiError):
            await self._cluster_id()

    async def _cluster_id(self) -> int:
        if not self._known_id:
            self._known_id = (await self.run(self.shell.store.records.cluster)).record.cluster_id
        return self._known_id

    async def create_topic(self, name: str, settings: TopicSettings, channels: Iterable[str]) -> None:
        """As `MetadataChanges.create_topic`; refused with more replicas than there are nodes, unless it is there."""

        def create() -> None:
            view = self.view
            if name not in view.topics:
                refuse_too_many_replicas(settings, view.topics, view.nodes)
            self.changes.create_topic(name, settings, channels)

        await self.run(create)

    async def led(self, name: str, *, new: bool) -> None:
        """Return once every partition of a stored topic has a leader that is alive. Those of a new topic can be written
        to then, too, as far as enough of their replicas are alive: /lookup with access=w names them all. 504: one is
        not so for long."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def hint(_: str) -> None:  # on any thread
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        unwatch = self.shell.store.watch.on_change(hint)
        try:
            async with asyncio.timeout(LED_SECONDS):
                while without_leader(self.view, name) != [] or (new and below_min_isr(self.view, name)):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            raise ApiError(504, "OUTCOME_UNKNOWN", why=_not_led(self.view, name)) from None
        finally:
            unwatch()

    async def hide(self, topic_uid: int, node: int, wall_ns: int) -> None:
        """Let the brokers know for HIDDEN_SECONDS that this daemon hides the node for a topic."""
        await self.run(lambda: self.changes.hide(topic_uid, node, wall_ns))
        self._tasks.spawn(self._show_again(topic_uid, node, wall_ns))

    async def _show_again(self, topic_uid: int, node: int, wall_ns: int) -> None:
        await asyncio.sleep(HIDDEN_SECONDS)
        with suppress(ApiError):  # another daemon was faster, or the store is away: brokers go by the time as well
            await self.run(lambda: self.changes.show_again(topic_uid, node, wall_ns))

    def figures(self) -> ClusterFigures:
        """For /metrics."""
        from lookupd.metrics import ClusterFigures

        shell, term = self.shell, self.shell.term
        if term is None:
            return ClusterFigures(self.view, shell.counts)
        state = term.machine.state
        unled = frozenset(state.leader_check.not_leading())
        return ClusterFigures(self.view, shell.counts, is_controller=True, rounds=len(state.rounds), unled=unled)

    async def close(self) -> None:
        await self._tasks.close()

    async def known_channels(self, topic: str) -> set[str]:
        """Channels that a new topic begins with: brokers ask their other lookup daemons for them.

        A broker that does not answer counts as one that knows no channel. Nothing is asked for a topic that exists."""
        nodes = [node for node in self.view.nodes.values() if node.grpc_address]
        if topic in self.view.topics or not nodes:
            return set()
        request = KnownChannelsRequest(cluster_id=await self._cluster_id(), topic=topic)
        return {c for known in await asyncio.gather(*[self._known(n, request) for n in nodes]) for c in known}

    async def _known(self, node: NodeInfo, request: KnownChannelsRequest) -> Collection[str]:
        try:
            reply = await self.shell.peers.call(node.grpc_address, "KnownChannels", request, timeout=KNOWN_CHANNELS_S)
        except (NsqhaError, ValueError) as error:
            text = "%s: which channels the topic %s begins with is not known of node %016x: %s"
            self.shell.logger.warning("channels_unknown", text, node.name, request.topic, node.node_uid, error)
            return ()
        return list(reply.channels)


class ClusterApi:
    """Handlers of the routes above."""

    def __init__(self, cluster: LookupCluster) -> None:
        self._cluster = cluster

    def add_to(self, api: HttpApi) -> None:
        api.add("GET", "/controller", self.controller)
        api.add("GET", "/cluster", self._cluster.pages.page)
        api.add("GET", "/cluster/balance", self.preview)
        api.add("POST", "/cluster/balance", self.pause)
        api.add("POST", "/cluster/spread", self.spread)
        api.add("POST", "/cluster/move", self.move, takes=("topic", "partition"))
        api.add("POST", "/cluster/decommission", self.decommission, takes=("node",))
        api.add("POST", "/cluster/recommission", self.recommission, takes=("node",))

    async def controller(self, _: HttpRequest) -> object:
        view, shell, doubt = self._cluster.view, self._cluster.shell, ""
        try:
            intents = await self._intents()
        except ApiError as error:  # the rest is known without the store
            intents, doubt = read_intents({}), str(error.extra.get("why", error))
        metas = _metas(view)
        who = view.controller
        term = shell.term
        unled = term.machine.state.leader_check.not_leading() if term is not None else set()
        states = {
            name: health.state_of(meta, view.nodes, LeaderState(False) if name in unled else None)
            for name, meta in sorted(metas.items())
        }
        moves = [_move(name, wanted, metas.get(name)) for name, wanted in sorted(intents.moves.items())]
        found: dict[str, object] = {
            "controller": {"name": who.name, "epoch": who.epoch} if who else None,
            "here": term is not None,
            "revision": view.revision,
            "nodes": [_node(node, metas, intents) for _, node in sorted(view.nodes.items())],
            "decommissions": [
                {"node": f"{uid:016x}", **health.progress(uid, metas, intents.moves)}
                for uid in sorted(intents.decommissions)
            ],
            "moves": moves,
            "store_doubt": doubt,
            "partitions": len(metas),
            "leaderless": [_named(name) for name, state in states.items() if state == health.LEADERLESS],
            "below_min_isr": [_named(name) for name, state in states.items() if state == health.BELOW],
            "under_replicated": [_named(name) for name, state in states.items() if state == health.UNDER],
            "balance_paused": intents.balance_paused,
            "balance_window": _window(intents),
            "unreadable": sorted(view.unreadable.values()),
        }
        if term is not None:
            machine = term.machine
            for move, name in zip(moves, sorted(intents.moves), strict=True):
                seen = machine.state.seen.get(name, {})
                move["ends"] = {f"{uid:016x}": report.end for uid, report in sorted(seen.items())}
            found["links"] = [f"{uid:016x}" for uid in term.links.open]
            found["silent"] = [f"{uid:016x}" for uid in sorted(machine.state.standing.silent)]
            found["rounds"] = [
                {**_named(name), "kind": round_.kind, "why": round_.why, "waiting": round_.waiting}
                for name, round_ in sorted(machine.state.rounds.items())
            ]
        return found

    async def preview(self, _: HttpRequest) -> object:
        view, intents = self._cluster.view, await self._intents()
        metas, nodes = _metas(view), able(view.nodes, intents.decommissions)
        leading = staying(view.nodes, intents.decommissions)
        return {
            "paused": intents.balance_paused,
            "window": _window(intents),
            "transfers": [
                {**_named(t.name), "from": f"{t.source:016x}", "to": f"{t.target:016x}"}
                for t in balance(metas, leading, len(metas))
            ],
            "moves": [
                _move(move.name, move.replicas, metas[move.name]) for move in spread(metas, nodes, SPREAD_LIMIT_MAX)
            ],
        }

    async def pause(self, request: HttpRequest) -> None:
        window = request.query.get("window")
        if window is None:
            request.query.require("paused")
        paused = request.query.flag("paused", True) if request.query.get("paused") is not None else None
        await self._cluster.run(lambda: self._cluster.changes.change_balance(paused=paused, window=window))

    async def spread(self, request: HttpRequest) -> object:
        limit = number(request, "limit", SPREAD_LIMIT, 1, SPREAD_LIMIT_MAX)
        view, intents = self._cluster.view, await self._intents()
        metas = {name: meta for name, meta in _metas(view).items() if name not in intents.moves}
        found = {move.name: move.replicas for move in spread(metas, able(view.nodes, intents.decommissions), limit)}
        await self._cluster.run(lambda: self._cluster.changes.move(found))
        return {"moves": [_move(name, replicas, metas[name]) for name, replicas in found.items()]}

    async def move(self, request: HttpRequest) -> None:
        view = self._cluster.view
        name, meta = partition_named(view, request)
        replicas = tuple(node_uid(view, part) for part in request.query.require("replicas").split(","))
        different_hosts(view, replicas)
        joined(view, set(replicas).difference(meta.replicas))
        await self._cluster.run(lambda: self._cluster.changes.move({name: replicas}))

    async def decommission(self, request: HttpRequest) -> None:
        uid = node_uid(self._cluster.view, request.query.require("node"))
        await self._cluster.run(lambda: self._cluster.changes.decommission(uid))

    async def recommission(self, request: HttpRequest) -> None:
        uid = node_uid(self._cluster.view, request.query.require("node"))
        if not await self._cluster.run(lambda: self._cluster.changes.recommission(uid)):
            raise ApiError(404, "NODE_NOT_FOUND")

    async def _intents(self) -> Intents:
        intents = await self._cluster.run(self._cluster.shell.store.intents.all)
        return read_intents({name: intent.record for name, intent in intents.items()})


def without_leader(view: View, topic: str) -> list[int] | None:
    """The partitions whose leader is not there; None: this view has no such topic, perhaps not yet."""
    found = view.topics.get(topic)
    if found is None:
        return None
    return [number for number, meta in sorted(found.record.partitions.items()) if meta.leader not in view.nodes]


def below_min_isr(view: View, topic: str) -> list[int]:
    """The partitions that cannot be written to, and will be: enough of their replicas are alive."""
    found = view.topics.get(topic)
    return [
        number
        for number, meta in sorted(found.record.partitions.items() if found is not None else ())
        if not writable(meta) and len(view.nodes.keys() & set(meta.replicas)) >= meta.min_isr
    ]


def _not_led(view: View, topic: str) -> str:
    said = f"topic {topic} is stored, but after {LED_SECONDS:.0f} s "
    without = without_leader(view, topic)
    if without == []:
        few = ", ".join(map(str, below_min_isr(view, topic)))
        return said + f"these partitions have too few replicas in sync to be written to: {few}; publishes to them wait"
    if without is None:
        return said + "this daemon does not see it: it was deleted meanwhile, or the metadata store is late"
    return said + (
        f"these partitions have no leader: {', '.join(map(str, without))}; they get one as soon as enough of their "
        "replicas answer (nsqha cluster status shows it)"
    )


def node_uid(view: View, text: str) -> int:
    """The uid of a node by name or uid, also of a node that is away if a record still names it. Else 404."""
    for uid, node in view.nodes.items():
        if text == node.name:
            return uid
    known = set(view.nodes) | {uid for meta in _metas(view).values() for uid in meta.replicas}
    for uid in known:
        if text == f"{uid:016x}":
            return uid
    raise ApiError(404, "NODE_NOT_FOUND")


def partition_named(view: View, request: HttpRequest) -> tuple[PartitionName, PartitionMeta]:
    """The partition that a request names by `topic` and `partition`. Else 404 or 400."""
    topic = view.topics.get(request.query.require_name("topic"))
    if topic is None:
        raise ApiError(404, "TOPIC_NOT_FOUND")
    partition = number(request, "partition", None, 0, len(topic.record.partitions) - 1)
    return PartitionName(topic.record.name, topic.record.uid, partition), topic.record.partitions[partition]


def different_hosts(view: View, replicas: Collection[int]) -> None:
    """Answer 400 unless these nodes are all alive and on different hosts."""
    hosts = {host_of(view.nodes[uid]) for uid in replicas if uid in view.nodes}
    if len(hosts) != len(replicas):
        raise ApiError(400, "INVALID_ARG_REPLICAS", why="two replicas would be on one host, or one is not alive")


def joined(view: View, added: Collection[int]) -> None:
    """Answer 400 if one of the nodes that get a replica has not joined."""
    for uid in added:
        if uid in view.nodes and (why := view.nodes[uid].joining):
            raise ApiError(400, "INVALID_ARG_REPLICAS", why=f"node {view.nodes[uid].name} has not joined: {why}")


def number(request: HttpRequest, name: str, default: int | None, low: int, high: int, *, code: str = "") -> int:
    """A whole number within limits; 400 otherwise. Without a default it must be there.

    `code`: what errors call it, MISSING_ARG_<code> and INVALID_ARG_<code>, if not by its name."""
    text, code = request.query.get(name), code or name.upper()
    if text is None and default is None:
        raise ApiError(400, f"MISSING_ARG_{code}")
    if text is None:
        assert default is not None
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or not low <= int(text) <= high:
        raise ApiError(400, f"INVALID_ARG_{code}", why=f"it must be {low} to {high}")
    return int(text)


def _metas(view: View) -> dict[PartitionName, PartitionMeta]:
    return {
        PartitionName(name, topic.record.uid, number): meta
        for name, topic in view.topics.items()
        for number, meta in topic.record.partitions.items()
    }


def _window(intents: Intents) -> str | None:
    return None if intents.balance_window is None else str(intents.balance_window)


def _named(name: PartitionName) -> dict[str, Any]:
    return {"topic": name.topic, "partition": name.number}


def _move(name: PartitionName, wanted: tuple[int, ...], meta: PartitionMeta | None) -> dict[str, Any]:
    return {
        **_named(name),
        "replicas": [f"{uid:016x}" for uid in (meta.replicas if meta else ())],
        "wanted": [f"{uid:016x}" for uid in wanted],
        "joining": [f"{uid:016x}" for uid in wanted if meta is None or uid not in meta.isr],
    }


def _node(node: NodeInfo, metas: Mapping[PartitionName, PartitionMeta], intents: Intents) -> dict[str, Any]:
    uid = node.node_uid
    held = health.progress(uid, metas, intents.moves)
    return {
        "uid": f"{uid:016x}",
        "name": node.name,
        "host": node.host,
        "zone": node.zone,
        "grpc_address": node.grpc_address,
        "peer_address": node.peer_address,
        "poisoned": node.poisoned,
        "leaving": node.leaving,
        "declines": node.declines,
        "joining": node.joining,
        "decommissioned": uid in intents.decommissions,
        "replicas": held["replicas"],
        "leaderships": held["leaderships"],
    }
