"""The lookup daemon's HTTP API for clients, nsqadmin and nsqd.

Key order and spelling are upstream's. /nodes gives as many `tombstones` as `topics`: nsqadmin indexes one by the other.

With a cluster, answers are the cluster's topics, channels and leaders together with what stock nsqds registered here;
a create changes the metadata and the registrations, and /topic/create waits for leaders. This daemon never puts
#ephemeral names into the metadata: they live on the nodes that use them, which register them.

/topic/delete and /channel/delete drop registrations, as upstream's: messages are deleted where clients of brokers are
authorized, by the same requests to a broker or by `nsqha topic delete` and `nsqha channel delete`. nsqadmin sends
them to both. Its cross at a node is a /topic/tombstone here and then a
/topic/delete at that node. In a cluster that node keeps the topic: it finds the tombstone in the metadata
(`election.moves`).

Parameters of the Youzan fork that have a meaning here:

    GET  /lookup?topic=&access=r|w&partition=N|*&metainfo=true      adds `partitions` {N: producer}, and `meta`
    GET  /topics?metaInfo=true                                      adds `meta_info`
    POST /topic/create?topic=&partition_num=&replicator=&syncdisk=&retention=&orderedmulti=

`access=w` leaves out what cannot acknowledge publishes now, `access=r` shows also what a tombstone hides. `multipart`
and `suggestload` are accepted without effect: a node may lead any number of a topic's partitions, and placement follows
from the load. So is `consistent` of /lookup. The other settings, and the fork's other URLs, are in `lookupd.fork_api`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from itertools import chain
from typing import Any

import msgspec

from lookupd.cluster_api import ClusterApi, LookupCluster, number
from lookupd.directory import meta_info, meta_of, producer
from lookupd.fork_api import ForkApi, settings_of
from lookupd.registry import Peer, Registry
from nsqha import NSQ_VERSION
from nsqha.access.surfaces import LOOKUPD_HTTP
from nsqha.clock import Clock, Now, read
from nsqha.election.model import NodeInfo
from nsqha.ids import PARTITIONS_MAX, is_ephemeral
from nsqha.server.http.server import ApiError, HttpApi, HttpReply, HttpRequest, JsonStream
from nsqha.server.http.streaming import AT_ONCE, Parts, in_order, json_list, json_object, json_parts, json_values
from nsqha.server.runtime.measures import expired_certificates


class LookupdApi:
    """Answers from one registry, and one cluster if there is one. Answers to reads are made in parts as they are taken
    (`server.http.streaming`): a large one has what was registered when each part of it was made."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        cluster: LookupCluster | None = None,
        *,
        describe: Callable[[], dict[str, object]] = dict,
    ) -> None:
        """`describe`: this daemon, for /listlookup."""
        self._describe = describe
        self._registry = registry
        self._clock = clock
        self._cluster = cluster
        self._requests: Mapping[tuple[str, int], int] = {}

    def routes(self) -> HttpApi:
        api = HttpApi(LOOKUPD_HTTP)
        self._requests = api.requests
        self._add_observed_to(api)
        api.add("GET", "/info", _async(lambda _: {"version": NSQ_VERSION}))
        api.add("GET", "/topics", _async(self.topics))
        api.add("GET", "/channels", _async(self.channels))
        api.add("GET", "/lookup", _async(self.lookup))
        api.add("GET", "/nodes", _async(self.nodes))
        api.add("GET", "/debug", _async(self.debug))
        api.add("POST", "/topic/create", self.create_topic, takes=("topic",))
        api.add("POST", "/topic/delete", _async(self.delete_topic), takes=("topic",))
        api.add("POST", "/topic/tombstone", self.tombstone, takes=("topic", "node"))
        api.add("POST", "/channel/create", self.create_channel, takes=("topic", "channel"))
        api.add("POST", "/channel/delete", _async(self.delete_channel), takes=("topic", "channel"))
        if self._cluster is not None:
            ClusterApi(self._cluster).add_to(api)
            ForkApi(self._cluster, self._describe).add_to(api)
            api.add("PUT", "/topic/create", self.create_topic, takes=("topic",))  # the fork's
        return api

    def observed_routes(self) -> HttpApi:
        """What is served at --metrics-address: metrics and health."""
        api = HttpApi(LOOKUPD_HTTP)
        self._add_observed_to(api)
        return api

    def _add_observed_to(self, api: HttpApi) -> None:
        api.add("GET", "/ping", _async(lambda _: "OK"), plain=True)
        api.add("GET", "/healthz", _async(lambda _: "OK"), plain=True, quiet=True)
        api.add("GET", "/readyz", _async(self.readyz), plain=True, quiet=True)
        api.add("GET", "/metrics", self.metrics, plain=True, quiet=True)

    # ---- questions

    async def metrics(self, request: HttpRequest) -> HttpReply:
        from lookupd.metrics import LookupFigures, render  # not needed before the first scrape

        figures = LookupFigures(
            topics=len(self._registry.topic_names()),
            producers=len(self._registry.active_peers(read(self._clock))),
            requests=self._requests,
            cluster=self._cluster.figures() if self._cluster is not None else None,
        )
        return HttpReply(*render(figures, request.headers.get("Accept", "")))

    def readyz(self, request: HttpRequest) -> object:
        """OK: it answers from memory, whether etcd can be reached or not."""
        if request.query.get("verbose") is None:
            return "OK"
        lines = ["OK"]
        if self._cluster is not None:
            view = self._cluster.view
            controller = view.controller.name if view.controller else "none"
            lines.append(f"[+] metadata: revision {view.revision}, {len(view.nodes)} nodes, controller {controller}")
        if expired := expired_certificates(self._clock.wall_ns() / 1e9):
            lines.append(f"[+] certificates: {expired}")
        return "\n".join(lines)

    def topics(self, request: HttpRequest) -> object:
        topics = self._cluster.view.topics if self._cluster else {}
        answer = {"topics": json_values(in_order([*self._registry.topic_names(), *topics]))}
        if topics and request.query.flag("metaInfo", False):
            named = in_order(list(topics))
            answer["meta_info"] = json_values(
                {"topic_name": name, **meta_info(topics[name].record)} if isinstance(name, str) else name
                for name in named
            )
        return JsonStream(json_object(answer))

    def channels(self, request: HttpRequest) -> object:
        return JsonStream(json_object({"channels": self._channels(request.query.require("topic"))}))

    def _channels(self, topic: str) -> Parts:
        found = self._registry.channel_names(topic)
        if self._cluster is not None:
            found.extend(self._cluster.directory.channels(self._cluster.view, topic))
        return json_values(in_order(found))

    def lookup(self, request: HttpRequest) -> object:
        query, now = request.query, read(self._clock)
        topic = query.require("topic")
        registered = self._registry.producers(topic, now)
        access = query.get("access") or ""
        if access not in ("", "r", "w"):
            raise ApiError(400, "INVALID_ARG_ACCESS")
        leaders = self._leaders(topic, access)
        if registered is None and leaders is None:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        wanted = query.get("partition") or "*"
        stock = [production.peer for production in registered or ()]
        alone = stock[0] if len(stock) == 1 and leaders is None else None  # a node without a cluster
        numbers = range(registered[0].partitions) if registered and alone else range(0)
        if wanted != "*":
            chosen = number(request, "partition", None, 0, PARTITIONS_MAX)
            numbers = range(chosen, chosen + 1) if chosen in numbers else range(0)
            leaders = {n: node for n, node in (leaders or {}).items() if n == chosen}
        # One entry per node, however many partitions it leads.
        nodes = {node.node_uid: node for node in (leaders or {}).values()}
        if leaders is not None:
            ours = self._our_addresses()
            stock = [peer for peer in stock if _address(peer) not in ours]
        peers = stock if wanted == "*" else [alone] if alone and numbers else []
        shown = chain(map(producer, nodes.values()), map(_peer, peers))
        answer = {"channels": self._channels(topic), "producers": json_values(shown)}
        if access or query.get("partition") is not None or query.get("metainfo") is not None:
            led = {str(n): producer(node) for n, node in (leaders or {}).items()}
            answer["partitions"] = json_parts(led | {str(n): _peer(alone) for n in numbers if alone})
        if self._cluster is not None and query.get("metainfo") is not None:
            found = self._cluster.view.topics.get(topic)
            if found is not None:
                answer["meta"] = json_parts(meta_info(found.record))
        if alone and registered and query.get("metainfo") is not None:
            answer["meta"] = json_parts(meta_of(registered[0].partitions, replicas=1, ordered=False))
        return JsonStream(json_object(answer))

    def _leaders(self, topic: str, access: str) -> dict[int, NodeInfo] | None:
        if self._cluster is None:
            return None
        return self._cluster.directory.leaders(self._cluster.view, topic, read(self._clock), access=access)

    def _our_addresses(self) -> set[tuple[str, int]]:
        """Addresses of the cluster's nodes: the metadata know better than their registrations here."""
        return set() if self._cluster is None else self._cluster.directory.addresses(self._cluster.view)

    def nodes(self, _: HttpRequest) -> object:
        now, ours = read(self._clock), self._our_addresses()
        stock = [peer for peer in self._registry.active_peers(now) if _address(peer) not in ours]
        items = chain(map(json_parts, self._cluster_nodes()), (self._node(peer, now) for peer in stock))
        return JsonStream(json_object({"producers": json_list(items)}))

    def _node(self, peer: Peer, now: Now) -> Parts:
        names, hidden = list[str](), list[bool]()
        for name in in_order(list(peer.topics)):
            if not isinstance(name, str):
                yield b""
                continue
            is_hidden = self._registry.hidden(peer, name, now)
            if is_hidden is not None:
                names.append(name)
                hidden.append(is_hidden)
                if len(names) % AT_ONCE == 0:
                    yield b""
        fields = {name: json_parts(value) for name, value in _peer(peer).items()}
        yield from json_object(fields | {"tombstones": json_values(hidden), "topics": json_values(names)})

    def _cluster_nodes(self) -> list[dict[str, Any]]:
        if self._cluster is None:
            return []
        now, view, directory = read(self._clock), self._cluster.view, self._cluster.directory
        ephemeral: dict[tuple[str, int], list[str]] = {}
        ours = self._our_addresses()
        for peer in self._registry.active_peers(now):
            if _address(peer) in ours:
                ephemeral[_address(peer)] = sorted(name for name in peer.topics if is_ephemeral(name))
        found = []
        for uid, led in directory.led(view).items():
            node = view.nodes[uid]
            shown = producer(node)
            names = [
                *led,
                *(n for n in ephemeral.get((shown["broadcast_address"], shown["tcp_port"]), []) if n not in led),
            ]
            shown["tombstones"] = [directory.hidden(name, node, now) for name in names]
            shown["topics"] = names
            shown["partitions"] = led
            found.append(shown)
        return found

    def debug(self, _: HttpRequest) -> object:
        return JsonStream(self._registrations())

    def _registrations(self) -> Parts:
        before = b"{"
        for key, members in self._registry.registrations():
            if not members:
                yield b""
                continue
            yield before + msgspec.json.encode(key) + b":"
            yield from json_values(_registered(peer, tombstone) for peer, tombstone in members)
            before = b","
        yield b"{}" if before == b"{" else b"}"

    # ---- changes

    async def create_topic(self, request: HttpRequest) -> None:
        topic = request.query.require_name("topic")
        settings = settings_of(request)
        if self._cluster is None or is_ephemeral(topic):
            if settings is not None:
                raise ApiError(400, "INVALID_REQUEST", why="these settings need a topic of a cluster")
            self._create(topic)
            return
        cluster, channels = self._cluster, await self._begins_with(self._cluster, topic)
        new = topic not in cluster.view.topics
        if settings is None:
            await cluster.run(lambda: cluster.changes.ensure_topic(topic, channels))
        else:
            await cluster.create_topic(topic, settings, channels)
        await cluster.led(topic, new=new)

    async def create_channel(self, request: HttpRequest) -> None:
        topic, channel = request.query.require_name("topic"), request.query.require_name("channel")
        if self._cluster is None or is_ephemeral(topic) or is_ephemeral(channel):
            self._create(topic, channel)
            return
        cluster, channels = self._cluster, await self._begins_with(self._cluster, topic)
        await cluster.run(lambda: cluster.changes.create_channel(topic, channel, channels))

    async def _begins_with(self, cluster: LookupCluster, topic: str) -> list[str]:
        """The channels of a new topic of the cluster; a broker that creates a topic asks for them in the same way."""
        found = await cluster.known_channels(topic)
        return sorted(c for c in found.union(self._registry.channels(topic)) if not is_ephemeral(c))

    def _create(self, topic: str, channel: str = "") -> None:
        if not self._registry.create(topic, channel):
            raise ApiError(507, "TOO_MANY_NAMES")

    def delete_topic(self, request: HttpRequest) -> None:
        self._registry.delete_topic(request.query.require("topic"))

    def delete_channel(self, request: HttpRequest) -> None:
        topic, channel = request.query.require_name("topic"), request.query.require_name("channel")
        known = self._cluster is not None and channel in self._cluster.directory.channels(self._cluster.view, topic)
        if not self._registry.delete_channel(topic, channel) and not known:
            raise ApiError(404, "CHANNEL_NOT_FOUND")

    async def tombstone(self, request: HttpRequest) -> None:
        topic, node = request.query.require("topic"), request.query.require("node")
        now = read(self._clock)
        self._registry.tombstone(topic, node, now)
        if (cluster := self._cluster) is None:
            return
        uid = cluster.directory.tombstone(cluster.view, topic, node, now)
        if uid and not is_ephemeral(topic):
            # Before the answer: nsqadmin sends the node a /topic/delete right after it.
            await cluster.hide(cluster.view.topics[topic].record.uid, uid, self._clock.wall_ns())


def _async(answer: Callable[[HttpRequest], object]) -> Callable[[HttpRequest], Awaitable[object]]:
    async def handler(request: HttpRequest) -> object:
        return answer(request)

    return handler


def _address(peer: Peer) -> tuple[str, int]:
    return peer.info.broadcast_address, peer.info.tcp_port


def _registered(peer: Peer, tombstone: Now | None) -> dict[str, Any]:
    facts = {"id": peer.id, **_peer(peer)}
    del facts["remote_address"]
    facts["last_update"] = peer.heard.wall_ns
    facts["tombstoned"] = tombstone is not None
    facts["tombstoned_at"] = tombstone.wall_ns if tombstone else 0
    return facts


def _peer(peer: Peer) -> dict[str, Any]:
    info = peer.info
    return {
        "remote_address": peer.id,
        "hostname": info.hostname,
        "broadcast_address": info.broadcast_address,
        "tcp_port": info.tcp_port,
        "http_port": info.http_port,
        "version": info.version,
        "topology_zone": info.topology_zone,
        "topology_region": info.topology_region,
    }
