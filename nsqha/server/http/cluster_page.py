"""GET /cluster of brokers and lookup daemons: the cluster as this daemon sees it, for whoever only looks.

The records are those of its watch. Beside them, the nodes are asked what they lead: a record says who should. When the
metadata store does not answer the page is still given, with the reason in `stale`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nsqha.election.observed.answers import Observed, ReplicaAnswer, answers_in, questions
from nsqha.election.observed.page import ClusterPage, encode
from nsqha.errors import NsqhaError
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.http.server import JSON, HttpReply, HttpRequest
from nsqha.server.runtime.tasks import Shared

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from nsqha.election.store import MetadataStore
    from nsqha.ids import PartitionKey
    from nsqha.server.peers.api import Peers
    from nsqha.server.runtime.metadata import RunBlocking

STORE_SECONDS = 3.0  # for the metadata store to answer
NODE_SECONDS = 2.0  # for a node
FRESH_SECONDS = 0.5  # so long a page is given again: every one of them asks all nodes

class StoreAnswer(NamedTuple):
    """What only a read of the store can say."""

    intents: Mapping[str, Mapping[str, Any]] | None = None
    doubt: str = ""
    stale: str = ""


class ClusterPages:
    """Makes the pages of one daemon; used on its loop."""

    def __init__(
        self,
        name: str,
        store: MetadataStore,
        peers: Peers,
        run: RunBlocking,
        *,
        cluster_id: Callable[[], Awaitable[int]],
        why_not: Callable[[], str],
    ) -> None:
        """`name`: the cluster's. `why_not`: why the metadata are not trusted; blocks, and raises what a read raises."""
        self._name = name
        self._store = store
        self._peers = peers
        self._run = run
        self._cluster_id = cluster_id
        self._why_not = why_not
        self._under_way: Shared[bytes] | None = None
        self._made_at = 0.0

    async def page(self, _: HttpRequest) -> HttpReply:
        """The handler of the route."""
        return HttpReply(await self.text(), JSON)

    async def text(self) -> bytes:
        """The newest page."""
        loop = asyncio.get_running_loop()
        last = self._under_way
        if last is None or (last.task.done() and loop.time() - self._made_at >= FRESH_SECONDS):
            last = self._under_way = Shared(loop, self._made())
        return await last.outcome()

    async def _made(self) -> bytes:
        page = await self.look()
        text = await asyncio.to_thread(encode, page)
        self._made_at = asyncio.get_running_loop().time()
        return text

    async def look(self) -> ClusterPage:
        """Ask the store and all nodes, at the same time."""
        view = self._store.watch.view()
        page = ClusterPage(
            self._name,
            await self._cluster_id(),
            view.revision,
            {name: topic.record for name, topic in sorted(view.topics.items())},
            view.nodes,
            view.controller,
            None,
            tuple(sorted(view.unreadable.values())),
        )
        wanted = questions(page.metas, view.nodes)
        store, *told = await asyncio.gather(
            self._ask_store(), *(self._ask(node, page, keys) for node, keys in wanted.items())
        )
        answers = {node: said for node, said in zip(wanted, told, strict=True) if not isinstance(said, str)}
        silent = {node: said for node, said in zip(wanted, told, strict=True) if isinstance(said, str)}
        return replace(
            page, intents=store.intents, doubt=store.doubt, stale=store.stale, observed=Observed(answers, silent)
        )

    async def _ask_store(self) -> StoreAnswer:
        def read() -> StoreAnswer:
            intents = {name: intent.record for name, intent in self._store.intents.all().items()}
            return StoreAnswer(intents, self._why_not())

        try:
            async with asyncio.timeout(STORE_SECONDS):
                return await self._run(read)
        except TimeoutError:
            return StoreAnswer(stale=f"the metadata store has not answered within {STORE_SECONDS:g} s")
        except NsqhaError as error:
            return StoreAnswer(stale=str(error))

    async def _ask(
        self, node: int, page: ClusterPage, parts: list[list[PartitionKey]]
    ) -> dict[PartitionKey, ReplicaAnswer] | str:
        """What a node answers; a text: why it does not."""
        found: dict[PartitionKey, ReplicaAnswer] = {}
        try:
            for keys in parts:
                asked = [pb.PartitionKey(topic_uid=uid, partition=number) for uid, number in keys]
                request = pb.StatusRequest(cluster_id=page.cluster_id, keys=asked)
                address = page.nodes[node].grpc_address
                reply = await self._peers.call(address, "Status", request, timeout=NODE_SECONDS)
                said = answers_in(reply, node)
                if isinstance(said, str):
                    return said
                found.update(said)
        except (NsqhaError, ValueError) as error:
            return str(error) or type(error).__name__
        return found
