"""Leading one partition for one epoch: its log goes to the followers, their acks to the commit rule.

    Partition (log, commit) <--- acks that count --- Leadership ---> FollowerStreams (one stream per follower node)
                                                        |
                              IsrKeeper.step -> Propose, Fence, Reread -> metadata (worker thread) -> replied

The keeper decides (nsqha.replication.isr); this shell carries out what it says, in the order in which it says it: the
effective ISR is widened before a proposal leaves. What the store answers late or never is the keeper's business too.

Only leaderships that wait for something get ticks (`LeadershipRuntime.ticking`): thousands of partitions without
traffic cost nothing. A quiet one gets them again from its next batch, event or record on; a busy one pays nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nsqha.election.model import NodeInfo, PartitionMeta
from nsqha.errors import LogCorrupt
from nsqha.nsqlog import Logger
from nsqha.replication.isr import Effective, Fence, IsrKeeper, Propose, Reread, StepDown
from nsqha.server.replica.leading.records import RecordRequests

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.ids import PartitionKey
    from nsqha.replication.followers import IsrLimits
    from nsqha.replication.isr import Action, Outcome
    from nsqha.replication.pace import SharedRate
    from nsqha.server.partition.partition import Partition
    from nsqha.server.replica.leading.records import RecordStore
    from nsqha.server.replica.leading.sender import FollowerProgress, FollowerStreams, PushPiece
    from nsqha.server.runtime.measures import Measures

HOLD_SECONDS_MAX = 3.0  # that publishes wait for a successor
MILLISECOND = 0.001

logger = Logger("leadership", waits=True)

_NODE = re.compile(r"\bnode (\d+)\b")


@dataclass(frozen=True, slots=True)
class LeadershipRuntime:
    """What the node lends to each partition that it leads."""

    node: int  # its uid
    clock: Clock
    links: FollowerStreams
    nodes: Callable[[], Mapping[int, NodeInfo]]  # those that are alive
    spawn: Callable[[Coroutine[Any, Any, None]], object]  # begins a task that nothing waits for
    step_down: Callable[[Leadership, str], None]  # ends a leadership, and why
    ticking: dict[Leadership, None]  # those that wait for something get ticks
    measures: Measures
    limits: IsrLimits | None = None
    push_rate: SharedRate | None = None  # of all that is pushed to replicas that are far behind; None: no limit


class PublishHold:
    """Publishes of one partition that wait while another node is to lead next: it has to reach the end of the log,
    which must not move away from it. Those that still wait when this one's epoch ends are the next leader's, while of
    any that is written by then nobody knows what became."""

    def __init__(self, partition: Partition, clock: Clock) -> None:
        self._successor = 0  # the node that is to lead next; 0: none
        self._begun = 0  # an epoch later than this one that has begun
        self._over = False  # it did, and this leadership has not ended yet
        self._partition = partition
        self._clock = clock
        self._since = 0.0

    @property
    def holds(self) -> bool:
        """Whether another node is to lead next, or leads already. Nothing is held any more if that took too long."""
        return self._over or bool(self._successor)

    def wait_for(self, successor: int) -> None:
        """Hold publishes back for this node, or let them go (0)."""
        if successor != self._successor:
            self._successor = successor
            if not self._over:
                self._hold()

    def epoch_begun(self, epoch: int) -> None:
        """Hold publishes back until this leadership ends, as that epoch has begun."""
        if epoch > self._begun:
            self._begun, self._over = epoch, True
            self._hold()

    def _hold(self) -> None:
        self._since = self._clock.monotonic()
        self._partition.hand_over(self.holds)

    def release_overdue(self) -> None:
        """Let them go after a while: the successor did not take over, and no node said that it is given up, perhaps
        because the metadata are away."""
        if self.holds and self._clock.monotonic() - self._since >= HOLD_SECONDS_MAX:
            self._over = False
            self._partition.hand_over(False)


class PushTargets:
    """The followers that one partition is pushed to."""

    def __init__(self, leadership: Leadership, runtime: LeadershipRuntime) -> None:
        self._leadership = leadership
        self._runtime = runtime
        self._followers: dict[int, FollowerProgress] = {}

    def __iter__(self) -> Iterator[int]:
        """Their nodes."""
        return iter(self._followers)

    def wake(self) -> None:
        """There is more in the log."""
        for progress in self._followers.values():
            progress.wake()

    def feed(self, wanted: AbstractSet[int]) -> None:
        """Push to these nodes, as far as they are alive, and to no other."""
        for node in set(self._followers) - wanted:
            self._followers.pop(node).stop()
        nodes = self._runtime.nodes()
        for node in sorted(wanted - set(self._followers)):
            info = nodes.get(node)
            if info is not None and info.peer_address:
                rest = partial(self._rest, node)
                self._followers[node] = self._runtime.links.add(self._leadership, node, info.peer_address, rest)

    def _rest(self, node: int, cost: int) -> float:
        """Seconds to rest after so much was pushed to a follower that lacks more than that."""
        meta, rate = self._leadership.meta, self._runtime.push_rate
        alive = {self._runtime.node, *self._runtime.nodes()}
        if rate is None or node in meta.isr or len(alive.intersection(meta.isr)) < meta.min_isr:
            return 0.0  # messages may have to wait for it
        return rate.done(cost, self._runtime.clock.monotonic())

    def stop(self) -> None:
        """Push to none any more."""
        for progress in self._followers.values():
            progress.stop()
        self._followers.clear()


class Leadership:
    """One epoch of one partition on the node that leads it."""

    def __init__(
        self,
        runtime: LeadershipRuntime,
        partition: Partition,
        meta: PartitionMeta,
        *,
        key: PartitionKey,
        topic: str,
        log_uid: int,
        records: RecordStore,
    ) -> None:
        self.partition = partition
        self.log = partition.log
        self.topic = topic
        self.key = key
        self.log_uid = log_uid
        self.epoch = meta.epoch
        self.epoch_start = partition.log.end.log_id
        self.piece: PushPiece | None = None  # of `push`
        self.ended = False
        self._retiring = False  # this node shuts down
        self._runtime = runtime
        self._hold = PublishHold(partition, runtime.clock)
        self._targets = PushTargets(self, runtime)
        self._requests = RecordRequests(
            records,
            partition=f"{topic}/{key[1]}",
            spawn=runtime.spawn,
            replied=self._replied,
            found=self._found,
            unreadable=self._unreadable,
        )
        self._keeper = IsrKeeper(
            runtime.node,
            meta,
            epoch_start=self.epoch_start,
            now=runtime.clock.monotonic(),
            limits=runtime.limits,
            sync_always=partition.leader.sync_always,
        )
        partition.batches.set_followers(self._targets.wake, self._committed)

    def start(self) -> None:
        """Push to every node that has a replica. What the ISR lacks is seen to when they have answered, and by ticks:
        of thousands that begin together none needs more at first."""
        self.nodes_changed(begins=True)

    def stop(self) -> None:
        """This node does not lead any more, or ends."""
        self.ended = True
        self._runtime.ticking.pop(self, None)
        self.partition.batches.set_followers(None, None)
        self._requests.close()
        self._targets.stop()

    @property
    def isr_answers(self) -> bool:
        """Whether every in-sync replica is connected and acknowledges in time."""
        reports = self._keeper.followers
        found = [reports.get(node) for node in self.meta.isr if node != self._runtime.node]
        return all(report is not None and report.gone_at is None and not reports.late(report) for report in found)

    @property
    def meta(self) -> PartitionMeta:
        """The newest record that is known."""
        return self._keeper.meta

    @property
    def committed(self) -> int:
        return self.partition.leader.committed

    @property
    def waited_end(self) -> int:
        """Log id: no caller waits for the batches from here on."""
        return self.partition.batches.outstanding.waited_end

    def lags(self) -> Iterator[tuple[int, int, int]]:
        """(node, commitlog entries, bytes) that each follower has not acknowledged."""
        log = self.partition.log
        end = log.end
        for node in self._targets:
            acked = max(self._keeper.followers.end_of(node), log.start.log_id)
            try:
                position = log.entry(acked).position if acked < end.log_id else end.position
            except LogCorrupt:
                position = end.position  # its channels and the scrub say so; the other figures are still wanted
            yield node, max(end.log_id - acked, 0), end.position - position

    # ---- the partition

    def _committed(self) -> None:
        self.piece = None
        self._runtime.links.committed(self)
        if self._hold.holds:
            self._step()  # perhaps that was the last batch before the next leader's

    def tick(self) -> None:
        """Every 100 ms, while this waits for something."""
        if self.ended:
            return
        if self._keeper.ended is None:
            self._hold.release_overdue()
        self._step()
        if self._keeper.quiet and not self._hold.holds and not self.ended:
            self._runtime.ticking.pop(self, None)
            self.partition.batches.set_followers(self._appended_when_quiet, self._committed)

    def _appended_when_quiet(self) -> None:
        """The first batch after a while: its followers have a time to acknowledge it in."""
        self._wait()
        self._targets.wake()

    def _wait(self) -> None:
        """Something may be due later: ticks are needed."""
        if self not in self._runtime.ticking and not self.ended:
            self._runtime.ticking[self] = None
            self.partition.batches.set_followers(self._targets.wake, self._committed)

    # ---- followers

    def heard(
        self, node: int, *, registration: int, log_uid: int, end: int, durable: int, fit: bool = True, opened: bool
    ) -> None:
        if self.ended:
            return
        keeper, now = self._keeper, self._runtime.clock.monotonic()
        keeper.followers.heard(
            node, registration=registration, log_uid=log_uid, end=end, durable=durable, fit=fit, now=now
        )
        counts = keeper.countable(node, log_uid)
        if opened:
            end, durable = keeper.counted(node)
            if self.partition.leader.opened(node, end=end, durable=durable):
                self.partition.committed_moved()
        elif counts:
            self.partition.replica_acked(node, end, durable)
        if not counts or (opened and self._keeper.heir):
            self._step()
        elif opened:
            self._wait()  # it is as the record says, and is to lead for nobody: nothing is to be changed at once

    def lost(self, node: int) -> None:
        if not self.ended:
            self._keeper.followers.lost(node, self._runtime.clock.monotonic())
            if node in self._keeper.effective:  # else nothing waits for it; where a node died, each new leader lost it
                self._step()

    def fenced(self, node: int, promised: int) -> None:
        if not self.ended:
            logger.info("fenced", "%s/%d: node %016x has promised epoch %d", self.topic, self.key[1], node, promised)
            if promised > self.epoch:
                self._hold.epoch_begun(promised)  # what is written from now on, that node does not take from this one
            self._keeper.followers.lost(node, self._runtime.clock.monotonic())
            self._wait()
            self._requests.reread(promised=promised)

    # ---- the record

    def refreshed(self, meta: PartitionMeta) -> None:
        """The metadata brought a newer record."""
        if not self.ended:
            self._do(self._keeper.refreshed(meta, self._runtime.clock.monotonic()))
            self._feed(self._keeper.meta)
            self._keeper.followers.sync_always = self.partition.leader.sync_always
            self._hold.wait_for(self._keeper.heir)

    def _feed(self, meta: PartitionMeta) -> None:
        """Push to every replica of the record, and to no other."""
        if not self.ended:
            self._targets.feed({*meta.replicas, *meta.isr} - {self._runtime.node})

    def _replied(self, outcome: Outcome) -> None:
        self._do(self._keeper.replied(outcome, self._runtime.clock.monotonic()))
        self._feed(self._keeper.meta)
        if not self.ended:
            self._hold.wait_for(self._keeper.heir)

    def _found(self, meta: PartitionMeta | None) -> None:
        if meta is None:
            self._runtime.step_down(self, "the topic was deleted")
        else:
            self.refreshed(meta)

    def _unreadable(self, promised: int) -> None:
        if promised > self.epoch:
            # A node that promises has read a record of that epoch, so this one is over. Clients would wait here in
            # vain for as long as this node alone has lost the metadata.
            self._runtime.step_down(self, f"epoch {promised} has begun, and the metadata can not be read here")
        # Else the keeper asks again.

    def nodes_changed(self, *, begins: bool = False) -> None:
        """A node came, went, moved or shuts down; or the leadership begins."""
        if self.ended:
            return
        nodes, now = self._runtime.nodes(), self._runtime.clock.monotonic()
        departing = {node for node, info in nodes.items() if info.leaving}
        if self._retiring:
            departing.add(self._runtime.node)
        declining = frozenset(node for node, info in nodes.items() if info.declines)
        self._keeper.depart(frozenset(departing), now, declining=declining)
        self._feed(self._keeper.meta)
        if begins:
            self._wait()
        else:
            self._step()

    def retire(self) -> None:
        """This node shuts down: another one is to lead, as soon as it has everything."""
        self._retiring = True
        self.nodes_changed()

    # ---- what the keeper wants

    def _step(self) -> None:
        # Before the keeper may name the next leader: what is written behind that is of unknown outcome.
        self._hold.wait_for(self._keeper.heir)
        partition = self.partition
        end = partition.log.end.log_id
        self._do(
            self._keeper.step(
                committed=partition.leader.committed,
                end=end,
                end_durable=min(partition.log.local_durable, end),
                complete=not partition.batches.last_progress_due,
                now=self._runtime.clock.monotonic(),
            )
        )

    def _do(self, actions: list[Action]) -> None:
        self._wait()
        for action in actions:
            if self.ended:
                return
            match action:
                case Effective(nodes, recorded, min_isr, acked):
                    if self.partition.leader.set_isr(recorded, nodes, min_isr=min_isr, acked=acked):
                        self.partition.committed_moved()
                case Propose(meta, registered, "transfer"):
                    text = "%s/%d: node %016x has everything up to log id %d and is to lead epoch %d"
                    logger.info(
                        "handing_over", text, self.topic, self.key[1], meta.leader, self.log.end.log_id, meta.epoch
                    )
                    self._requests.propose(meta, registered)
                case Propose(meta, registered, change, why):
                    members = sorted(f"{node:016x}" for node in meta.isr)
                    named = _NODE.sub(lambda found: f"node {int(found[1]):016x}", why)  # as everything else names them
                    event = change if change == "transfer_given_up" else f"isr_{change}"
                    logger.info(event, "%s/%d: %s; proposed: %s", self.topic, self.key[1], named, members)
                    self._runtime.measures.isr_changes[self.topic, change] += 1
                    self._requests.propose(meta, registered)
                case Fence(version):
                    self._requests.fence(version)
                case Reread():
                    self._requests.reread()
                case StepDown(why):
                    self._hold.epoch_begun(self.epoch + 1)
                    self._runtime.step_down(self, why)

    def __repr__(self) -> str:
        return f"Leadership({self.topic}/{self.key[1]}, epoch {self.epoch})"


def waits_seconds(leadership: Leadership) -> float:
    """Seconds since the oldest batch that is not committed was written, or an in-sync replica whose acks count was
    lost; 0: neither is there."""
    runtime, reports = leadership._runtime, leadership._keeper.followers
    batches = leadership.partition.batches.outstanding.batches
    waits = [runtime.clock.monotonic() - batches[0].written_at] if batches else []
    for node in leadership.meta.isr:
        report = reports.get(node) if node != runtime.node else None
        if report is not None and report.gone_at is not None:
            waits.append(max(reports.time - report.gone_at, MILLISECOND))
    return max(waits, default=0.0)
