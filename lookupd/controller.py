"""The controller's shell: wins and holds the controller key, and carries out what `ControllerMachine` decides.

    hints of the store ─┐                                   ┌─> Status calls to nodes      (tasks on the loop)
    Live streams ───────┼─> machine.step(event, now) ─> [..]┼─> compare-and-set, reads     (worker threads)
    ticks ──────────────┘         one at a time             └─> log, counters

Every lookup daemon that has the metadata store runs one; the one that holds the key works, the others wait until the
key is free. A *term* lasts from winning the key to losing it (lease gone, another epoch seen, the store is not
trusted) and has one machine. When it ends, its tasks are cancelled and late results are dropped; the store refuses
late writes, because each names the term's epoch.

The loop is not blocked by the store: calls run in WORKERS threads. The lease is renewed only while the loop ticks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, TypeVar

from lookupd.links import Links
from lookupd.recorded import RecordedChanges
from lookupd.standby import Gone, Standby
from nsqha.clock import Clock
from nsqha.election.controller.controller import ControllerMachine
from nsqha.election.controller.events import (
    Answered,
    Blamed,
    Event,
    IntentDone,
    Linked,
    Metadata,
    NotAnswered,
    Outcome,
    Probe,
    PutDone,
    PutIntent,
    PutPartition,
    ReadTopic,
    RemoveIntent,
    Resign,
    Say,
    Suspect,
    Tick,
    TopicRead,
    Unheard,
)
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.model import Controller, PartitionMeta, Versioned
from nsqha.election.session import ClusterSession
from nsqha.election.store import Intent, MetadataStore, PartitionChange, Refusal
from nsqha.errors import (
    ConfigError,
    Conflict,
    LogCorrupt,
    NsqhaError,
    OutcomeUnknown,
    StaleMetadata,
    Unavailable,
)
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.quantile import Histogram
from nsqha.server.authorization.audit import Audit
from nsqha.server.peers.api import Peers
from nsqha.server.replica.replica_reports import reports_in
from nsqha.server.runtime.backoff import Backoff
from nsqha.server.runtime.tasks import TaskGroup, first_done

if TYPE_CHECKING:
    from nsqha.server.runtime.metadata import RunBlocking

TTL_S = 3.0
WORKERS = 8
BULK = 50  # partitions whose records are changed by one call; more begin together, as etcd writes them together
CAMPAIGN_AGAIN_S = 1.0
TICKS_PER_TTL = 10
RESIGN_AGAIN_S = (10.0, 640.0)  # the pause after a first resignation, doubled with each other one, and the longest
RESIGN_FORGET_S = 600.0  # after the end of that pause
LEAVE_TO_OTHERS_S = 3.0  # after a resignation; a standby campaigns each second
READ_AGAIN_S = (0.05, 1.0)  # pause after a failed read, and the longest it grows to

T = TypeVar("T")
_Other = Probe | ReadTopic | PutIntent | RemoveIntent | Resign | Say
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
NO_PARTITION: PartitionKey = (0, 0)  # an empty request would ask for everything that the node has


class MetadataGate(Protocol):
    """Whether decisions may rest on the metadata (`nsqha.election.metadata_restore`). Both calls block."""

    def why_not(self) -> str:
        """Why the metadata are not trusted now; empty: no reason is known. Raises what a read of the store raises."""

    def believe_accepted(self) -> bool:
        """Trust a store again if an operator has accepted its metadata; return whether that is so."""


class ControllerCounts:
    """Counters since the process began."""

    def __init__(self) -> None:
        self.terms = 0
        self.elections: Counter[str] = Counter()  # by why
        self.possible_losses = 0
        self.changes: Counter[Outcome] = Counter()
        self.probes = 0
        self.probes_failed = 0
        self.election_seconds = Histogram(SECONDS)  # from the suspicion to the record


class MetadataTrust:
    """Whether the controller may decide by the metadata, as the gate says."""

    def __init__(self, gate: MetadataGate, run: RunBlocking) -> None:
        self._gate = gate
        self._run = run
        self._maybe_doubted = asyncio.Event()

    def look(self) -> None:
        """There may be a doubt."""
        self._maybe_doubted.set()

    async def why_not(self) -> str:
        return await self._run(self._gate.why_not)

    async def accepted(self) -> bool:
        """Whether an operator has accepted metadata that were not trusted, so that they are now."""
        try:
            return await self._run(self._gate.believe_accepted)
        except NsqhaError:
            return False

    async def ended(self) -> str:
        """Wait until the metadata are no longer trusted; return the reason."""
        while True:
            await self._maybe_doubted.wait()
            self._maybe_doubted.clear()
            try:
                if why := await self.why_not():
                    return why
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(CAMPAIGN_AGAIN_S)
                self._maybe_doubted.set()
            except StaleMetadata as error:
                return str(error)


class TrustedMetadata:
    """Metadata that are always trusted: there is no gate."""

    def look(self) -> None:
        pass

    async def why_not(self) -> str:
        return ""

    async def accepted(self) -> bool:
        return False

    async def ended(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never


class Candidacy:
    """When this process campaigns for the controller key, and when it gives the key away.

    It resigns seldom: another controller may not reach more nodes than this one.
    """

    def __init__(self) -> None:
        self.maybe_free = asyncio.Event()  # the controller key may be free
        self.gone: Controller | None = None  # a controller whose process has died
        self._backoff = Backoff(*RESIGN_AGAIN_S)
        self._due = 0.0

    def may_resign(self, now: float) -> bool:
        """Whether this process may resign again; if so, it counts as done. Times are monotonic seconds."""
        if now < self._due:
            return False
        if now >= self._due + RESIGN_FORGET_S:
            self._backoff.reset()
        self._due = now + self._backoff.next_pause()
        return True


class ControllerShell:
    """The controller's shell of one lookup daemon; used on one loop."""

    def __init__(
        self,
        store: MetadataStore,
        peers: Peers,
        clock: Clock,
        *,
        name: str,
        limits: ControllerLimits | None = None,
        gate: MetadataGate | None = None,
        gone: Gone | None = None,
        audit: Audit | None = None,
    ) -> None:
        """`name` identifies this process for people; without a `gate` the store is always trusted. `gone(name)` ends
        when the process of that name is gone; without it, the lease of a controller that died has to end first.
        `audit`: where changes that operators wrote into the store are recorded."""
        self.counts = ControllerCounts()
        self.store = store
        self.peers = peers
        self.clock = clock
        self.limits = limits or ControllerLimits()
        self.logger = Logger("controller", waits=True)
        self.term: Term | None = None
        self.candidacy = Candidacy()
        self._name = name
        self._workers = ThreadPoolExecutor(WORKERS, "metadata")
        self._tasks = TaskGroup()
        self.recorded = RecordedChanges(store.intents, self.run, audit or Audit())
        self._trust = MetadataTrust(gate, self.run) if gate is not None else TrustedMetadata()
        self._standby = Standby(gone, self._controller_gone) if gone is not None else None
        self._unwatch: Callable[[], None] | None = None

    async def start(self) -> None:
        """Begin to campaign."""
        loop = asyncio.get_running_loop()
        self._unwatch = self.store.watch.on_change(lambda name: _tell(loop, self._hint, name))
        self._tasks.spawn(self._campaign_for_ever())

    async def stop(self) -> None:
        """Release the key at once, so that another daemon can take over."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        await self._tasks.close()
        if self._standby is not None:
            self._standby.watch(None)
        self._workers.shutdown(wait=True)

    async def run(self, call: Callable[[], T]) -> T:
        """Call the store in a worker thread."""
        return await self.begin(call)

    def begin(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """The same; the call begins before anything else that the loop has to do."""
        return asyncio.get_running_loop().run_in_executor(self._workers, call)

    def _hint(self, name: str) -> None:
        if name in ("", "controller"):
            self.candidacy.maybe_free.set()
        if name in ("", "hold") or name.startswith("waiting/"):
            self._trust.look()
        if self.term is not None:
            self.term.hint(name)

    def _controller_gone(self, controller: Controller) -> None:
        self.logger.warning("controller_gone", "the process of controller %s is gone", controller.name)
        self.candidacy.gone = controller
        self.candidacy.maybe_free.set()

    async def _watch_controller(self, *, here: bool) -> None:
        if self._standby is not None:
            # A read, not the view: with a late view the wrong controller would be watched for a second.
            self._standby.watch(None if here else await self.run(self.store.records.controller))

    async def _campaign_for_ever(self) -> None:
        said = ""
        while True:
            try:
                await self._session()
                said = ""
            except NsqhaError as error:
                if str(error) != said:
                    self.logger.warning("controller_paused", "the metadata store does not let us campaign: %s", error)
                    said = str(error)
                if isinstance(error, StaleMetadata) and await self._trust.accepted():
                    self.logger.info("metadata_believed", "an operator accepted the metadata as they are now")
            except Exception as error:
                # A bug must not leave the cluster without this candidate for good.
                self.logger.error("controller_failed", "the campaign broke off: %s", error, error=error)
            await asyncio.sleep(CAMPAIGN_AGAIN_S)

    async def _session(self) -> None:
        """Run from getting a lease to its loss."""
        loop, lost = asyncio.get_running_loop(), asyncio.Event()
        session = await self.run(lambda: self.store.sessions.open(ttl_s=TTL_S, lost=lambda: _tell(loop, lost.set)))
        ticking = self._tasks.spawn(_tick(session))
        try:
            while not lost.is_set():
                self.candidacy.maybe_free.clear()
                if why := await self._trust.why_not():
                    raise Unavailable(why)
                if (dead := self.candidacy.gone) is not None:
                    await self.run(lambda: session.depose(dead))
                    self.candidacy.gone = None
                won = await self.run(lambda: session.campaign(Controller(self._name)))
                await self._watch_controller(here=won is not None)
                if won is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.candidacy.maybe_free.wait(), CAMPAIGN_AGAIN_S)
                    continue
                resigned = await self._serve(won.epoch, lost)
                await self.run(session.resign)
                await asyncio.sleep(LEAVE_TO_OTHERS_S if resigned else CAMPAIGN_AGAIN_S)
        finally:
            ticking.cancel()
            # Shielded: also on cancellation the key is released, and does not wait for the lease to end.
            await asyncio.shield(self.run(session.close))

    async def _serve(self, epoch: int, lost: asyncio.Event) -> bool:
        """Serve one term; return whether it ended so that another process can be the controller."""
        cluster_id = (await self.run(self.store.records.cluster)).record.cluster_id
        self.counts.terms += 1
        self.logger.info("controller_began", "this process is the controller, epoch %d", epoch, epoch=epoch)
        term = self.term = Term(self, epoch, cluster_id)
        why = "stopped"
        self._trust.look()  # the doubt may have come between the check and winning the key
        doubted = self._tasks.spawn(self._trust.ended())
        try:
            term.hint("")
            await first_done(term.over, lost.wait(), doubted)
            why = term.over.result() if term.over.done() else "the lease is lost"
            if doubted.done():
                why = doubted.result()
        finally:
            doubted.cancel()
            self.term = None
            term.end()
            self.logger.info(
                "controller_ended", "no longer the controller, epoch %d: %s", epoch, why, epoch=epoch, why=why
            )
        return term.resigned


class Term:
    """One machine and everything that runs for it."""

    def __init__(self, shell: ControllerShell, epoch: int, cluster_id: int) -> None:
        loop = asyncio.get_running_loop()
        self.epoch = epoch
        self.machine = ControllerMachine(shell.clock.monotonic(), shell.limits)
        self.links = Links(shell.peers, cluster_id, self)
        self.over: asyncio.Future[str] = loop.create_future()  # the reason
        self.intents: Mapping[str, Versioned[Intent]] | None = None
        self.resigned = False
        self._shell = shell
        self._cluster_id = cluster_id
        self._loop = loop
        self._tasks = TaskGroup(loop, self._failed)
        self._timer: asyncio.TimerHandle | None = None
        self._look_scheduled = False
        self._intents_changed = False
        self._heeded: set[str] = set()  # records of changes that a task of this term looks after
        self._ended = False

    def end(self) -> None:
        """Stop: nothing is decided or done after this."""
        self._ended = True
        self.links.close()
        if self._timer is not None:
            self._timer.cancel()
        self._tasks.cancel()

    # ---- what happens

    def hint(self, name: str) -> None:
        """A record may have changed. Many hints at once cause one read of the view."""
        self._intents_changed |= name == "" or name.startswith("intents/")
        if not self._look_scheduled:
            self._look_scheduled = True
            self._loop.call_soon(self._look)

    def suspected(self, node: int, why: str) -> None:
        self.feed(Suspect(node, why))

    def linked(self, node: int) -> None:
        self.feed(Linked(node))

    def unheard(self, node: int) -> None:
        self.feed(Unheard(node))

    def blamed(self, by: int, nodes: frozenset[int], unheard: frozenset[int]) -> None:
        self.feed(Blamed(by, nodes, unheard))

    def feed(self, *events: Event) -> None:
        """Feed events to the machine, and start its actions."""
        if self._ended:
            return
        try:
            self._step(events)
        except Exception as error:
            # A machine that broke an invariant decides nothing more; the next term begins from the records.
            self._shell.logger.error("controller_failed", "the controller cannot go on: %s", error, error=error)
            self._stop(f"{type(error).__name__}: {error}")
            return
        self._set_timer()

    def _step(self, events: Iterable[Event]) -> None:
        puts, others, now = list[PutPartition](), list[_Other](), self._shell.clock.monotonic()
        for event in events:
            for action in self.machine.step(event, now):
                if isinstance(action, PutPartition):
                    puts.append(action)
                else:
                    others.append(action)
        # Elections first: who is to lead can begin while the rest is done.
        for first in range(0, len(puts), BULK):
            self._put(puts[first : first + BULK])
        for other in others:
            self._perform(other)

    def _look(self) -> None:
        self._look_scheduled = False
        if self._ended:
            return
        view = self._shell.store.watch.view()
        if view.controller is not None and view.controller.epoch > self.epoch:
            self._stop(f"{view.controller.name or 'another process'} is the controller")
            return
        if self._intents_changed:
            self._intents_changed = False
            self._tasks.spawn(self._read_intents())
        if self.intents is not None:
            self.links.update(view.nodes)
            self.feed(Metadata(view.topics, view.nodes, self.intents))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, self.machine.next_tick() - self._shell.clock.monotonic())
        self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self.feed(Tick(self._shell.clock.wall_ns() / 1e9))

    def _stop(self, why: str) -> None:
        self._ended = True
        if not self.over.done():
            self.over.set_result(why)

    # ---- what is done

    def _perform(self, action: _Other) -> None:
        match action:
            case Say():
                self._say(action)
            case Probe():
                self._tasks.spawn(self._probe(action))
            case ReadTopic(name):
                self._tasks.spawn(self._read_topic(name))
            case PutIntent() | RemoveIntent():
                self._tasks.spawn(self._change_intent(action))
            case Resign(why):
                self._resign(why)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, StaleMetadata):
            self._shell.logger.error("metadata_stale", "nothing is decided by this metadata: %s", error)
            self._stop(str(error))
        else:
            self._shell.logger.error("controller_failed", "the controller cannot go on: %s", error, error=error)
            self._stop(f"{type(error).__name__}: {error}")

    def _resign(self, why: str) -> None:
        if self._shell.candidacy.may_resign(self._shell.clock.monotonic()):
            self.resigned = True
            self._shell.logger.warning("controller_resigns", "another controller may do better: %s", why, why=why)
            self._stop(f"resigned: {why}")

    async def _probe(self, probe: Probe) -> None:
        counts, node = self._shell.counts, self.machine.state.nodes.get(probe.node)
        counts.probes += 1
        keys = [pb.PartitionKey(topic_uid=uid, partition=number) for uid, number in probe.keys or (NO_PARTITION,)]
        request = pb.StatusRequest(cluster_id=self._cluster_id, keys=keys)
        try:
            if node is None:
                raise Unavailable("it is not registered any more")
            if self.links.asks(probe.node):
                reply = await self.links.ask(probe.node, request, probe.timeout_s)
            else:
                reply = await self._shell.peers.call(node.grpc_address, "Status", request, timeout=probe.timeout_s)
            if reply.node_uid != probe.node:
                raise Unavailable(f"node {reply.node_uid:016x} answers at {node.grpc_address}")
        except (NsqhaError, ValueError) as error:
            counts.probes_failed += 1
            self.feed(NotAnswered(probe.number, probe.node, str(error)))
        else:
            self.feed(Answered(probe.number, probe.node, reply.registration, reports_in(reply)))

    def _put(self, puts: Sequence[PutPartition]) -> None:
        """Change the records of partitions, all in one call: an etcd that is asked for each of hundreds takes longest
        of all that a failover consists of."""
        records, epoch = self._shell.store.records, self.epoch
        changes = [
            PartitionChange(put.name.topic, put.name.uid, put.name.number, put.meta, put.registered) for put in puts
        ]
        call = self._shell.begin(lambda: records.replace_partitions(changes, controller=epoch))
        call.add_done_callback(_seen)  # the term may end before the task below has begun
        self._tasks.spawn(self._take_results(puts, call))

    async def _take_results(
        self, puts: Sequence[PutPartition], call: asyncio.Future[list[PartitionMeta | Refusal]]
    ) -> None:
        done = []
        for put, result in zip(puts, await call, strict=True):
            outcome: Outcome = "applied"
            if isinstance(result, OutcomeUnknown):
                outcome = "unknown"
            elif not isinstance(result, PartitionMeta):
                outcome = "refused"
                self._shell.logger.info("change_refused", "%s:%d: %s", put.name.topic, put.name.number, result)
            self._shell.counts.changes[outcome] += 1
            done.append(PutDone(put.name, outcome, result if isinstance(result, PartitionMeta) else None))
        self.feed(*done)

    async def _read_topic(self, name: str) -> None:
        topic = await self._read(lambda: self._shell.store.records.topic(name))
        self.feed(TopicRead(name, topic))

    async def _read_intents(self) -> None:
        self.intents = await self._read(self._shell.store.intents.all)
        self._shell.recorded.heed(self.intents, self.epoch, self._tasks, self._heeded)
        self.hint("topics/")  # look again, now with them

    async def _change_intent(self, change: PutIntent | RemoveIntent) -> None:
        store = self._shell.store

        def carry_out() -> None:
            if isinstance(change, PutIntent):
                store.intents.put(
                    change.name, change.intent, expected_version=change.expected_version, controller=self.epoch
                )
            else:
                store.intents.remove(change.name, change.expected_version, controller=self.epoch)

        with contextlib.suppress(Conflict, OutcomeUnknown, Unavailable):
            await self._shell.run(carry_out)
        # Its outcome is in the view before the machine may ask again.
        self.intents = await self._read(store.intents.all)
        self.feed(IntentDone(change.name))
        self.hint("topics/")

    async def _read(self, call: Callable[[], T]) -> T:
        """Read until it succeeds: the machine waits for it. A record that cannot be read holds up nothing else."""
        backoff = Backoff(*READ_AGAIN_S)
        said = ""
        while True:
            try:
                return await self._shell.run(call)
            except (Unavailable, OutcomeUnknown):
                pass
            except (LogCorrupt, ConfigError) as error:
                if str(error) != said:
                    said = str(error)
                    self._shell.logger.error("record_unreadable", "%s; nothing is decided about it until it can", said)
            await asyncio.sleep(backoff.next_pause())

    def _say(self, say: Say) -> None:
        counts, log = self._shell.counts, self._shell.logger
        if say.event == "leader_elected":
            counts.elections[str(say.fields["why"])] += 1
            counts.election_seconds.observe(float(str(say.fields["seconds"])))
        elif say.event == "possible_loss":
            counts.possible_losses += 1
        write = {"info": log.info, "warning": log.warning, "error": log.error}[say.level]
        write(say.event, "%s", say.text, **say.fields)  # type: ignore[arg-type]


def _seen(call: asyncio.Future[T]) -> None:
    if not call.cancelled():
        call.exception()


async def _tick(session: ClusterSession) -> None:
    while True:
        session.ticked()
        await asyncio.sleep(session.ttl_s / TICKS_PER_TTL)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Call `call` on the loop, from a thread of the store; the loop may be closed already."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
