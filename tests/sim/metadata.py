"""The cluster's metadata store, as processes reach it over a bad line.

One `MemoryStore` holds the records; each process has a `Handle` to it. What a handle may do to its process, as etcd and
the way to it do:

- A write was applied and its reply is lost, or it is applied some time after the caller gave up: `OutcomeUnknown`.
- The store can not be reached: `Unavailable` where nothing was sent, else as above; that may begin with a change whose
  reply is lost.
- It is away for everybody, as without a quorum. No lease ends meanwhile, and each has its whole time when it is back.
- The view lags behind; hints are late, or are lost, and a single "" comes for all of them later.
- A lease that was not renewed for its time ends, whatever its holder believes; it is renewed only while the process
  ticks and reaches the store. Who holds it hears of its end when he reaches the store again.

Every method blocks, so it runs where `NodeLoop.run_in_executor` runs jobs; time taken is given to the loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nsqha.election.memory import MemorySession, MemoryStore
from nsqha.election.model import (
    ChannelList,
    ClusterRecord,
    Controller,
    NodeInfo,
    PartitionMeta,
    Tombstone,
    TopicRecord,
    TopicSettings,
    Versioned,
    name_taken,
)
from nsqha.election.session import ClusterSession, Lost, StoreIdentity, View
from nsqha.election.store import Hint, Intent, PartitionChange, Refusal
from nsqha.errors import ConfigError, Conflict, NotFound, NsqhaError, OutcomeUnknown, Unavailable
from tests.fakes.metadata import FakeFolders
from tests.sim.loop import Again, NodeLoop, Scheduler

T = TypeVar("T")

STORE_UID = 0xE7CD
KEEP_ALIVE_SHARE = 0.3  # of the TTL between renewals
GIVE_UP_SECONDS = (0.2, 2.0)  # until a call that is not answered ends
LATE_SECONDS = (0.0, 5.0)  # a write is applied so long after its caller gave up


@dataclass
class Trouble:
    """How bad the way to the store is; shares of all calls or hints."""

    lost_replies: float = 0.0
    late_writes: float = 0.0
    refusals: float = 0.0
    lost_hints: float = 0.0
    hint_seconds: float = 0.002
    call_seconds: float = 0.002


@dataclass(eq=False)
class HeldChange:
    """A change of a partition that is under way by hand: it may reach the store, and its caller may hear of it."""

    loop: NodeLoop
    call: Callable[[], PartitionMeta]
    stored: bool = False
    result: PartitionMeta | None = None
    error: NsqhaError | None = None
    heard: bool = False
    unknown: bool = False  # its caller hears that the outcome is unknown
    go_on: Callable[[], object] = lambda: None

    def store(self) -> None:
        """It reaches the store."""
        self.stored = True
        try:
            self.result = self.call()
        except NsqhaError as error:
            self.error = error

    def reply(self) -> PartitionMeta:
        """What its caller hears; it waits until it may (Held)."""
        if not self.heard:
            raise Held(self)
        if self.unknown:
            raise OutcomeUnknown("no answer in time")
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Held(Again):
    """The call is made again when its change goes on."""

    def __init__(self, change: HeldChange) -> None:
        super().__init__(0.0)
        self._change = change

    def later(self, loop: NodeLoop, run: Callable[..., object], *args: Any) -> None:
        self._change.go_on = lambda: loop.call_soon(run, *args)


class HeldChanges:
    """All changes of partitions that nodes have asked for, each until it goes on by hand (tests.scripts). A process has
    one under way at a time, and another after it heard that the outcome is unknown."""

    def __init__(self, asked: Callable[[NodeLoop, PartitionMeta | None], object]) -> None:
        """`asked(loop, meta)`: a process wants this; None: a fence."""
        self.under_way: list[HeldChange] = []
        self._asked = asked
        self._waiting: dict[NodeLoop, HeldChange] = {}

    def reply(self, loop: NodeLoop, call: Callable[[], PartitionMeta], meta: PartitionMeta | None) -> PartitionMeta:
        change = self._waiting.get(loop)
        if change is None:
            change = self._waiting[loop] = HeldChange(loop, call)
            self.under_way.append(change)
            self._asked(loop, meta)
        if change.heard:
            del self._waiting[loop]
        return change.reply()

    def store(self) -> NsqhaError | None:
        """Let the oldest that has not reached the store reach it; returns why it is refused there."""
        change = self._first(lambda change: not change.stored)
        change.store()
        if change.heard:
            self.under_way.remove(change)
        return change.error

    def answer(self) -> None:
        """The process that asked for the oldest that is stored hears what became of it."""
        change = self._first(lambda change: change.stored)
        self.under_way.remove(change)
        change.heard = True
        change.go_on()

    def unknown(self) -> None:
        """The process that asked for the oldest hears that the outcome is unknown; it may reach the store yet."""
        change = self._first(lambda change: not change.heard)
        change.heard = change.unknown = True
        if change.stored:
            self.under_way.remove(change)
        change.go_on()

    def lose(self) -> None:
        """The oldest never reaches the store."""
        self.under_way.remove(self._first(lambda change: not change.stored))

    def _first(self, fits: Callable[[HeldChange], bool]) -> HeldChange:
        found = next(filter(fits, self.under_way), None)
        assert found is not None, "there is no such change"
        return found


class SimMetadata:
    """The store, and everybody's way to it."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self.loop = scheduler.loop("etcd")
        self.trouble = Trouble()
        self.unreachable: set[str] = set()  # names of processes
        self.is_away = False
        self.losing: dict[str, float] = {}  # processes whose next change of a partition is lost sight of, and how long
        self.held: HeldChanges | None = None
        self.holds_hint: Callable[[NodeLoop, str], bool] = lambda loop, name: False
        self.folders = FakeFolders()  # always within reach: what is lost there is never acknowledged
        self.handles: list[Handle] = []
        self.unknown_applied = 0  # coverage: changes whose callers do not know
        self.use(MemoryStore(random.Random(rng.getrandbits(64))))

    def use(self, store: MemoryStore) -> None:
        """Keep the records there; before anybody has a handle."""
        self.store = store
        store.watch.on_change(self._changed)

    def handle(self, loop: NodeLoop) -> Handle:
        """The way of one process."""
        made = Handle(self, loop)
        self.handles.append(made)
        return made

    def reach(self, name: str, reachable: bool) -> None:
        """Cut a process off, or let it reach the store again."""
        if reachable:
            self.unreachable.discard(name)
            for handle in self.handles:
                if handle.loop.name == name:
                    handle.hint_lost()
        else:
            self.unreachable.add(name)

    def away(self, away: bool) -> None:
        """It has lost its quorum, or found one."""
        if away == self.is_away:
            return
        self.is_away = away
        if not away:
            for handle in self.handles:
                handle.hint_lost()
                for session in handle.sessions.opened:
                    session.granted_anew()

    def heal(self) -> None:
        """No more trouble."""
        self.trouble = Trouble()
        self.away(False)
        self.losing.clear()
        for name in sorted(self.unreachable):
            self.reach(name, True)

    def _changed(self, name: str) -> None:
        self.handles = [handle for handle in self.handles if not handle.dead]
        for handle in self.handles:
            handle.changed(name)


@dataclass(eq=False)
class Handle:
    """One process's `MetadataStore`."""

    metadata: SimMetadata
    loop: NodeLoop
    _view: View = field(init=False)
    _hints: list[Hint] = field(default_factory=list)
    _hint_at: float = 0.0  # hints keep their order
    _lost: bool = False
    _closed: bool = False

    def __post_init__(self) -> None:
        self._view = self.store.watch.view()
        self.records = SimRecords(self)
        self.intents = SimIntents(self)
        self.sessions = SimSessions(self)

    @property
    def store(self) -> MemoryStore:
        return self.metadata.store

    @property
    def dead(self) -> bool:
        return self.loop.dead or self._closed

    @property
    def reachable(self) -> bool:
        return self.loop.name not in self.metadata.unreachable and not self.metadata.is_away

    # ---- calls

    def _takes(self, seconds: tuple[float, float]) -> None:
        self.loop.reply_seconds = self.metadata.rng.uniform(*seconds)

    def read(self, call: Callable[[], T]) -> T:
        rng, trouble = self.metadata.rng, self.metadata.trouble
        if not self.reachable or rng.random() < trouble.refusals:
            self._takes(GIVE_UP_SECONDS)
            raise Unavailable("the metadata store can not be reached")
        self._takes((0.0, 2 * trouble.call_seconds))
        return call()

    def change(self, call: Callable[[], T]) -> T:
        """A change of a partition; its process may lose the store with it, and not know for a while what it did."""
        metadata, name = self.metadata, self.loop.name
        seconds = metadata.losing.pop(name, None) if self.reachable else None
        if seconds is None:
            return self.write(call)
        metadata.reach(name, False)
        metadata.loop.call_later(seconds, metadata.reach, name, True)
        self._takes(GIVE_UP_SECONDS)
        if metadata.rng.random() < 0.7:
            self._apply_unheard(call)
        else:
            metadata.loop.call_later(metadata.rng.uniform(0.0, seconds), self._apply_unheard, call)
        raise OutcomeUnknown("the connection was lost")

    def write(self, call: Callable[[], T]) -> T:
        """A change, with whatever may happen to it on the way."""
        rng, trouble = self.metadata.rng, self.metadata.trouble
        dice = rng.random()
        if not self.reachable:
            self._takes(GIVE_UP_SECONDS)
            error = Unavailable if dice < 0.5 else OutcomeUnknown
            raise error("the metadata store can not be reached")
        if dice < trouble.refusals:
            raise Unavailable("the metadata store has no leader")
        dice = rng.random()
        if dice < trouble.lost_replies:
            self._takes(GIVE_UP_SECONDS)
            self._apply_unheard(call)
            raise OutcomeUnknown("the reply was lost")
        if dice < trouble.lost_replies + trouble.late_writes:
            self._takes(GIVE_UP_SECONDS)
            self.metadata.loop.call_later(rng.uniform(*LATE_SECONDS), self._apply_unheard, call)
            raise OutcomeUnknown("no answer in time")
        self._takes((0.0, 2 * trouble.call_seconds))
        return call()

    def _apply_unheard(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except (NsqhaError, ValueError):
            return
        self.metadata.unknown_applied += 1

    # ---- what comes by itself

    def changed(self, name: str) -> None:
        metadata = self.metadata
        if self._lost or metadata.holds_hint(self.loop, name):
            return
        if not self.reachable or metadata.rng.random() < metadata.trouble.lost_hints:
            self._lost = True
            if self.reachable:
                metadata.loop.call_later(metadata.rng.uniform(0.0, 3.0), self.hint_lost)
            return
        self.tell(name)

    def hint_lost(self) -> None:
        """The watch begins anew."""
        if self._lost and self.reachable and not self.dead:
            self._lost = False
            self.tell("")

    def tell(self, name: str) -> None:
        """Have the process hear that this record may have changed."""
        metadata = self.metadata
        seconds = metadata.rng.uniform(0.0, 2 * metadata.trouble.hint_seconds)
        self._hint_at = max(self._hint_at, metadata.scheduler.now + seconds)
        view = self.store.watch.view()
        metadata.loop.call_later(self._hint_at - metadata.scheduler.now, self.loop.call_soon, self._told, name, view)

    def _told(self, name: str, view: View) -> None:
        if view.revision >= self._view.revision:
            self._view = view
        for hint in tuple(self._hints):
            self.loop.in_thread(lambda h=hint: h(name))  # type: ignore[misc]

    # ---- MetadataStore

    @property
    def watch(self) -> Handle:
        return self

    def identity(self) -> StoreIdentity:
        return StoreIdentity(STORE_UID, self._view.revision)

    def view(self) -> View:
        return self._view

    def on_change(self, hint: Hint) -> Callable[[], None]:
        self._hints.append(hint)
        return lambda: self._hints.remove(hint) if hint in self._hints else None

    def close(self) -> None:
        self._closed = True
        self._hints.clear()


class SimRecords:
    """One process's `MetadataRecords`."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._store = handle.store.records

    @property
    def revision(self) -> int:
        return self._handle.view().revision

    def cluster(self) -> Versioned[ClusterRecord]:
        return self._handle.read(self._store.cluster)

    def topics(self) -> dict[str, Versioned[TopicRecord]]:
        return self._handle.read(self._store.topics)

    def topic(self, name: str) -> Versioned[TopicRecord] | None:
        return self._handle.read(lambda: self._store.topic(name))

    def topics_of(self, names: Collection[str]) -> dict[str, Versioned[TopicRecord] | None]:
        return self._handle.read(lambda: self._store.topics_of(names))

    def tombstones(self) -> dict[int, Tombstone]:
        return self._handle.read(self._store.tombstones)

    def nodes(self) -> dict[int, NodeInfo]:
        return self._handle.read(self._store.nodes)

    def controller(self) -> Controller | None:
        return self._handle.read(self._store.controller)

    def create_topic(
        self,
        name: str,
        settings: TopicSettings,
        *,
        partitions: Mapping[int, PartitionMeta] | None = None,
        channels: ChannelList | None = None,
        uid: int | None = None,
    ) -> Versioned[TopicRecord]:
        return self._handle.write(
            lambda: self._store.create_topic(name, settings, partitions=partitions, channels=channels, uid=uid)
        )

    def replace(
        self, name: str, expected_version: int, record: TopicRecord, *, controller: int | None = None
    ) -> Versioned[TopicRecord]:
        return self._handle.write(lambda: self._store.replace(name, expected_version, record, controller=controller))

    def replace_partition(
        self,
        name: str,
        uid: int,
        number: int,
        meta: PartitionMeta,
        *,
        registered: Mapping[int, int] | None = None,
        controller: int | None = None,
    ) -> PartitionMeta:
        call = lambda: self._store.replace_partition(  # noqa: E731
            name, uid, number, meta, registered=registered, controller=controller
        )
        handle = self._handle
        held = handle.metadata.held
        return handle.change(call) if held is None else held.reply(handle.loop, call, meta)

    def replace_partitions(
        self, changes: Sequence[PartitionChange], *, controller: int | None = None
    ) -> list[PartitionMeta | Refusal]:
        # All of them are one call, as a transaction is; the scenes that hold changes have one partition.
        handle = self._handle
        held = handle.metadata.held
        if held is not None and len(changes) == 1:
            c = changes[0]
            call = lambda: self._store.replace_partition(  # noqa: E731
                c.name, c.uid, c.number, c.meta, registered=c.registered, controller=controller
            )
            try:
                return [held.reply(handle.loop, call, c.meta)]
            except (Conflict, NotFound, Unavailable, OutcomeUnknown) as refused:
                return [refused]
        try:
            return handle.change(lambda: self._store.replace_partitions(changes, controller=controller))
        except (OutcomeUnknown, Unavailable) as error:
            return [error] * len(changes)

    def fence_partition(self, name: str, uid: int, number: int, version: int) -> PartitionMeta:
        call = lambda: self._store.fence_partition(name, uid, number, version)  # noqa: E731
        handle = self._handle
        held = handle.metadata.held
        try:
            return handle.write(call) if held is None else held.reply(handle.loop, call, None)
        except OutcomeUnknown as error:
            raise Unavailable(str(error)) from error

    def delete_topic(self, name: str, *, expected_version: int | None = None) -> Tombstone:
        return self._handle.write(lambda: self._store.delete_topic(name, expected_version=expected_version))

    def forget_tombstone(self, uid: int, *, node: int | None = None) -> None:
        self._handle.write(lambda: self._store.forget_tombstone(uid, node=node))

    def put_recovered(self, record: TopicRecord) -> Versioned[TopicRecord]:
        return self._handle.write(lambda: self._store.put_recovered(record))

    def raise_epochs(self, *, leader: int | None = None) -> dict[str, Versioned[TopicRecord]]:
        return self._handle.write(lambda: self._store.raise_epochs(leader=leader))


class SimIntents:
    """One process's `MetadataIntents`."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._store = handle.store.intents

    def all(self) -> dict[str, Versioned[Intent]]:
        return self._handle.read(self._store.all)

    def put(
        self, name: str, intent: Intent, *, expected_version: int = 0, controller: int | None = None
    ) -> Versioned[Intent]:
        return self._handle.write(
            lambda: self._store.put(name, intent, expected_version=expected_version, controller=controller)
        )

    def remove(self, name: str, expected_version: int, *, controller: int | None = None) -> None:
        self._handle.write(lambda: self._store.remove(name, expected_version, controller=controller))


class SimSessions:
    """One process's `MetadataSessions`."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.opened: list[SimSession] = []

    def open(self, *, ttl_s: float, lost: Lost) -> ClusterSession:
        return self._handle.read(lambda: SimSession(self._handle, ttl_s, lost))


class SimSession:
    """A lease on virtual time, and what hangs on it."""

    def __init__(self, handle: Handle, ttl_s: float, lost: Lost) -> None:
        self._handle = handle
        self._ttl_s = ttl_s
        self._lost = lost
        self._told = False
        self._expired = False
        self._over = False
        self._waited = 0.0
        self._scheduler = handle.metadata.scheduler
        self._inner: MemorySession = handle.store.sessions.open(ttl_s=ttl_s, lost=self._at_end)
        self._granted = self._renewed = self._ticked = self._scheduler.now
        handle.sessions.opened.append(self)
        self._keep_alive()

    def _keep_alive(self) -> None:
        """The thread that renews, and the store that counts."""
        now, handle = self._scheduler.now, self._handle
        if self._over:
            return
        alive = not handle.dead and not handle.loop.frozen and handle.reachable
        if alive and self._expired:
            self._tell()
            return
        if alive and now - self._ticked < self._ttl_s * KEEP_ALIVE_SHARE and not self._expired:
            self._granted = self._renewed = now
        if not self._expired and not handle.metadata.is_away and now - self._granted >= self._ttl_s:
            self._inner.expire()
        if handle.dead and self._expired:
            return
        handle.metadata.loop.call_later(self._ttl_s * KEEP_ALIVE_SHARE / 2, self._keep_alive)

    def granted_anew(self) -> None:
        """The store gives every lease its whole time again; the holder does not hear of it."""
        self._granted = self._scheduler.now

    def _at_end(self) -> None:
        self._expired = True

    def _tell(self) -> None:
        self._over = self._told = True
        self._handle.loop.call_soon(lambda: self._handle.loop.in_thread(self._lost))

    # ---- Session

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    def ticked(self) -> None:
        self._ticked = self._scheduler.now

    def fresh(self, now: float) -> bool:
        return not self._told and now - self._renewed < 2 / 3 * self._ttl_s

    def seconds_left(self, now: float) -> float:
        return 0.0 if self._told else max(0.0, self._renewed + self._ttl_s - now)

    def register(self, node: NodeInfo) -> NodeInfo:
        handle, inner = self._handle, self._inner
        if inner._node is not None:
            return inner._node  # done, and the reply was lost
        there = handle.store.watch.nodes
        if (node.node_uid in there or name_taken(node, there.values())) and handle.reachable:
            if self._waited > 2 * self._ttl_s + 1.0:
                raise ConfigError(f"another process is node {node.node_uid:016x}, or has its name")
            self._waited += 0.2
            raise Again(0.2)
        try:
            return handle.write(lambda: inner.register(node))
        except OutcomeUnknown:
            raise Again(0.25) from None

    def update(self, node: NodeInfo) -> NodeInfo:
        return self._handle.write(lambda: self._inner.update(node))

    def campaign(self, candidate: Controller) -> Controller | None:
        return self._handle.write(lambda: self._inner.campaign(candidate))

    def resign(self) -> None:
        self._handle.write(self._inner.resign)

    def depose(self, controller: Controller) -> None:
        self._handle.write(lambda: self._inner.depose(controller))

    def close(self) -> None:
        self._over = True
        if self._handle.reachable:
            self._inner.close()
        else:
            self._handle.metadata.loop.call_later(self._ttl_s, self._inner.expire)
