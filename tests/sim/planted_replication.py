"""Planted bugs: promises and epochs, what an acknowledgement means, the ISR and its record, logs that part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from nsqha.commitlog.log import PartitionLog, SyncTicket
from nsqha.election import elect
from nsqha.election.controller import elections
from nsqha.hot import NOT_STORED, OUTCOME_UNKNOWN
from nsqha.replication.acceptance import Accepted, Fenced, decide_open
from nsqha.replication.isr import Effective, IsrKeeper, ProposalRefused
from nsqha.replication.leader import LeaderReplica
from nsqha.replication.silence import LOOK_SECONDS, SILENT_LOOKS, LookTimes, SilenceDetector
from nsqha.server.clients.connection import Connection
from nsqha.server.clients.publish import PublishWaiter
from nsqha.server.replica import follower_service as promises
from nsqha.server.replica.follower_service import FollowerService
from nsqha.server.replica.following import catch_up as catchup
from nsqha.server.replica.following.applier import Applier, PendingBatches
from nsqha.server.replica.following.catch_up import CatchUp
from nsqha.server.replica.following.follower import Follower
from nsqha.server.replica.following.receiver import Receiver
from nsqha.server.replica.leader_roles import LeaderRoles
from nsqha.server.replica.leading import records
from nsqha.server.replica.leading.records import PartitionRecords
from nsqha.server.replica.leading.sender import FollowerProgress
from nsqha.server.routing.publisher import PartitionPublisher
from nsqha.server.runtime.disk import DiskRounds
from nsqha.server.runtime.journal import JournalWriter
from tests.sim.planting import mutant, parting
from tests.sim.storage import SimFile, SimStorage

# ---- promises and epochs


@mutant()
def epoch_unchecked() -> Iterator[None]:
    """A follower takes appends of any leader that ever spoke to it."""

    def append(self: Follower, port: Any, message: Any) -> None:
        self.port, self.epoch = port, message.epoch
        original(self, port, message)

    def decide(**known: Any) -> Any:
        verdict = decided(**known)
        return Accepted() if isinstance(verdict, Fenced) else verdict

    def follow(self: Follower, port: Any, epoch: int, start: int) -> None:
        self.port, self.epoch = port, epoch
        self.leader_log.committed, self.leader_log.start = 0, start
        self._held.clear()

    original, decided = Follower.append, decide_open
    with (
        patch.object(Follower, "append", append),
        patch.object(Follower, "follow", follow),
        patch.object(promises, "decide_open", decide),
    ):
        yield


@mutant()
def promise_not_journalled() -> Iterator[None]:
    """An answer leaves before the promise that it rests on is durable."""

    async def promise(self: JournalWriter) -> None:
        pass  # what is staged is written some time

    async def write(self: JournalWriter) -> None:
        await original(self)

    original = JournalWriter.promise
    with patch.object(JournalWriter, "promise", promise), patch.object(JournalWriter, "write", write):
        yield


@mutant()
def epoch_resumed() -> Iterator[None]:
    """A leader that was restarted goes on in the epoch of its earlier life."""

    async def lead(self: LeaderRoles, known: Any, number: int, **how: Any) -> None:
        follower = self._table.followers[known.record.uid, number]
        if known.record.partitions[number].epoch == follower.epoch:
            follower.epoch -= 1
        await original(self, known, number, **how)

    def unfit(self: LeaderRoles, key: Any, follower: Follower, meta: Any) -> str:
        return ""

    original = LeaderRoles.lead
    with patch.object(LeaderRoles, "lead", lead), patch.object(LeaderRoles, "_unfit", unfit):
        yield


@mutant()
def elected_outside_the_isr() -> Iterator[None]:
    """The controller takes a replica that is alive and not in the ISR, if there is one."""

    def choose(ballot: elect.Ballot) -> Any:
        meta = ballot.meta
        outside = [uid for uid in meta.replicas if uid not in meta.isr and uid in ballot.nodes]
        if not outside or not meta.isr:
            return original(ballot)
        return elect.Elected(elect._led(ballot, outside[0], {**meta.isr, outside[0]: 0}))

    original = elect.choose
    with patch.object(elections, "choose", choose):
        yield


# ---- what an acknowledgement means


@mutant()
def commit_without_followers() -> Iterator[None]:
    """The leader's own disk is enough."""

    def set_isr(self: LeaderReplica, recorded: Any, effective: Any, **more: Any) -> bool:
        return original(self, {self.node}, {self.node}, **(more | {"min_isr": 1, "acked": {}}))

    original = LeaderReplica.set_isr
    with patch.object(LeaderReplica, "set_isr", set_isr):
        yield


@mutant()
def commit_before_the_disk() -> Iterator[None]:
    """sync=always counts what is in the page cache."""

    def advance(self: LeaderReplica) -> bool:
        before, self.sync_always = self.sync_always, False
        try:
            return original(self)
        finally:
            self.sync_always = before

    original = LeaderReplica._advance
    with patch.object(LeaderReplica, "_advance", advance):
        yield


@mutant()
def ack_from_the_page_cache() -> Iterator[None]:
    """A follower calls durable what it has written."""

    def append(self: Follower, message: Any) -> None:
        original(self, message)
        if self.port is not None:
            self.port.ack(self)

    def answer(self: Receiver) -> Any:
        acks = list(self._acks)
        durable = [follower.log.local_durable for follower in acks]
        for follower in acks:
            follower.log.local_durable = follower.log.end.log_id
        try:
            return answered(self)
        finally:
            for follower, before in zip(acks, durable, strict=True):
                follower.log.local_durable = before

    original, answered = Follower._append, Receiver._next
    with patch.object(Follower, "_append", append), patch.object(Receiver, "_next", answer):
        yield


@mutant()
def rounds_without_fsync() -> Iterator[None]:
    """A disk round that forgets the files."""

    def unsynced(self: Any) -> SyncTicket | None:
        ticket = original(self)
        return None if ticket is None else SyncTicket(ticket.log_id, ticket.files[1:], ticket.past)

    original = PartitionLog.unsynced
    with patch.object(PartitionLog, "unsynced", unsynced):
        yield


@mutant()
def failed_fsync_retried() -> Iterator[None]:
    """A sync that failed is tried again, which succeeds."""

    def sync(self: SimFile) -> None:
        try:
            original(self)
        except Exception:
            if self._storage.off:  # type: ignore[attr-defined]
                raise
            self._failed = False
            original(self)

    original = SimFile.sync
    with patch.object(SimFile, "sync", sync):
        yield


@mutant()
def directories_not_synced() -> Iterator[None]:
    """Names of new files are left to chance."""

    with patch.object(SimStorage, "sync_names", lambda self, path: None):
        yield


@mutant()
def unknown_told_as_refused() -> Iterator[None]:
    """A publisher hears "not stored" where nobody knows."""

    def failed(self: PublishWaiter, why: str) -> None:
        waiter(self, why.replace(OUTCOME_UNKNOWN, NOT_STORED))

    def publish_failed(self: Connection, command: str, why: str) -> bytes:
        return told(self, command, why.replace(OUTCOME_UNKNOWN, NOT_STORED))

    waiter, told = PublishWaiter.failed, Connection.publish_failed
    with (
        patch.object(PublishWaiter, "failed", failed),
        patch.object(Connection, "publish_failed", publish_failed),
    ):
        yield


@mutant()
def unknown_publish_sent_again() -> Iterator[None]:
    """A publish whose outcome nobody knows goes to the next leader."""

    def ended(self: PartitionPublisher, publish: Any, *, stored: bool, why: str = "") -> None:
        if why.startswith(OUTCOME_UNKNOWN):
            self.came_back(publish, why)
        else:
            original(self, publish, stored=stored, why=why)

    original = PartitionPublisher.ended
    with patch.object(PartitionPublisher, "ended", ended):
        yield


# ---- the ISR


def _unchecked(self: IsrKeeper, actions: Any) -> Any:
    return actions


@mutant()
def effective_too_small() -> Iterator[None]:
    """A member counts as gone as soon as its removal is proposed."""

    def effective(self: IsrKeeper) -> frozenset[int]:
        return frozenset((self._proposal.meta if self._proposal is not None else self.meta).isr)

    def changed(self: IsrKeeper) -> Any:
        changes = [action for action in original(self) if isinstance(action, Effective)]
        return [Effective(a.nodes, a.nodes, 1, a.acked) for a in changes]

    def counting(self: IsrKeeper) -> Any:
        """Or nothing is said before the answer comes: a removal is no change to those that count."""
        recorded, _, least = counted(self)
        return recorded, effective(self), least

    original, counted = IsrKeeper._changed, IsrKeeper._counting
    with (
        patch.object(IsrKeeper, "effective", property(effective)),
        patch.object(IsrKeeper, "_counting", counting),
        patch.object(IsrKeeper, "_changed", changed),
        patch.object(IsrKeeper, "_checked", _unchecked),
    ):
        yield


@mutant(scene=("test_cluster.test_a_join_whose_outcome_is_unknown_may_have_been_done",))
def unknown_taken_for_refused() -> Iterator[None]:
    """A compare-and-set without an answer counts as not done."""
    with patch.object(records, "Unknown", ProposalRefused), patch.object(IsrKeeper, "_checked", _unchecked):
        yield


@mutant()
def compares_nothing() -> Iterator[None]:
    """A leader's change of the record overwrites what others wrote meanwhile."""

    async def propose(self: PartitionRecords, meta: Any, registered: Any) -> Any:
        now = await self.read()
        return await original(self, meta if now is None else replace(meta, version=now.version), {})

    original = PartitionRecords.propose
    with patch.object(PartitionRecords, "propose", propose):
        yield


@mutant()
def floor_ignored() -> Iterator[None]:
    """The ISR shrinks to whoever is there."""
    with (
        patch.object(IsrKeeper, "_floor", property(lambda self: 1)),
        patch.object(IsrKeeper, "_checked", _unchecked),
    ):
        yield


@mutant()
def joins_before_it_caught_up() -> Iterator[None]:
    """Whoever is reachable may join."""

    def may_join(self: IsrKeeper, node: int) -> bool:
        follower = self.followers.get(node)
        return follower is not None and bool(follower.registration) and bool(follower.log_uid)

    with patch.object(IsrKeeper, "_may_join", may_join):
        yield


@mutant()
def opened_anywhere() -> Iterator[None]:
    """What a follower has of another past counts like what the leader has."""

    def opened(self: FollowerProgress, message: Any, registration: int) -> None:
        log = self.leader.log
        message.end = min(message.end, log.end.log_id)
        message.durable = min(message.durable, message.end)
        message.chain = log.entry_before(message.end).chain
        original(self, message, registration)

    def in_sync(self: FollowerService, key: Any, follower: Follower, message: Any) -> bool:
        return follower.applier.state is not None and self._integrity.suspects.unsound_from(key) is None

    original = FollowerProgress.opened
    with patch.object(FollowerProgress, "opened", opened), patch.object(FollowerService, "_in_sync", in_sync):
        yield


# ---- logs that part


@mutant()
def cut_too_far() -> Iterator[None]:
    """Catch-up cuts three batches more than it should, without looking."""

    async def common(self: CatchUp) -> int | None:
        end = await original(self)
        return None if end is None else max(self._follower.log.start.log_id, end - 3)

    original = CatchUp._common_end
    with (
        patch.object(CatchUp, "_common_end", common),
        patch.object(catchup, "check_cut", lambda to, *, committed: None),
    ):
        yield


@mutant()
def uncommitted_applied() -> Iterator[None]:
    """A follower takes everything that it has for committed."""

    def committed_to(self: Follower, end: int) -> None:
        original(self, self.log.end.log_id)

    original = Follower.committed_to
    with patch.object(Follower, "committed_to", committed_to):
        yield


@mutant()
def never_caught_up() -> Iterator[None]:
    """A replica that parted from the leader stays where it is."""

    async def run(self: CatchUp) -> None:
        self._follower.behind = True

    with patch.object(CatchUp, "run", run):
        yield


@mutant()
def rounds_forgotten() -> Iterator[None]:
    """A request that comes while a round runs is lost."""

    def request(self: DiskRounds, partition: Any, *, patient: bool = False) -> None:
        if not self._running:
            original(self, partition, patient=patient)

    original = DiskRounds.request
    with patch.object(DiskRounds, "request", request):
        yield


# ---- who is taken for silent


@mutant(scene=("test_silence.test_a_pause_of_the_whole_machine_is_no_silence", 1e6))
def own_pause_counted() -> Iterator[None]:
    """A witness that did not run itself takes that time for silence."""
    missed = 1

    def late(self: LookTimes, now: float) -> bool:
        nonlocal missed
        missed = min(SILENT_LOOKS, max(1, round((now - self._last) / LOOK_SECONDS)))
        original_late(self, now)
        return False

    def look(self: SilenceDetector, heard: float, *, late: bool) -> bool:
        before, asks = self.looks, original_look(self, heard, late=False)
        if self.looks > before:
            self.looks = SILENT_LOOKS if missed == SILENT_LOOKS else before + missed
        return asks

    original_late, original_look = LookTimes.late, SilenceDetector.look
    with patch.object(LookTimes, "late", late), patch.object(SilenceDetector, "look", look):
        yield


@mutant(scene=("test_silence.test_a_leader_that_one_follower_hears_goes_on",))
def one_witness_is_enough() -> Iterator[None]:
    """A leader is lost as soon as one follower and the controller do not hear it."""

    def unheard(self: elections.Elections, part: Any) -> bool:
        return bool(self._state.standing.witnesses(part.meta.leader) & part.meta.isr.keys())

    with patch.object(elections.Elections, "_unheard", unheard):
        yield


@mutant(scene=("test_silence.test_a_leader_that_answers_no_ping_of_a_follower_for_a_while_goes_on",))
def the_controller_is_not_asked() -> Iterator[None]:
    """What followers say is enough, though the controller hears the leader."""

    def reason(self: elections.Elections, part: Any, now: float) -> str:
        return original(self, part, now) or (elections.SILENT if self._unheard(part) else "")

    original = elections.Elections.reason
    with patch.object(elections.Elections, "reason", reason):
        yield


# ---- channel states and the log beside them


@mutant(parting)
def cut_batches_are_applied() -> Iterator[None]:
    """A catch-up forgets what was pending behind its cut, unless it was cancelled there; and a batch is not compared
    with the one that was applied before it."""

    async def agree(self: CatchUp) -> None:
        past = self._follower.log.past
        await original(self)
        if self._follower.log.past is not past:
            self._follower.applier._pending.batches.clear()

    original = CatchUp._agree
    with (
        patch.object(CatchUp, "_agree", agree),
        patch.object(PendingBatches, "of", lambda self, log: self.batches),
        patch.object(Applier, "_vouch", lambda self, state: None),
    ):
        yield


@mutant()
def acks_count_under_any_log_uid() -> Iterator[None]:
    """A member of the ISR that lost its log counts with the one that it began again."""

    def countable(self: IsrKeeper, node: int, log_uid: int) -> bool:
        proposed = self._proposal is not None and node in self._proposal.meta.isr
        return log_uid != 0 and (node in self.meta.isr or proposed)

    with patch.object(IsrKeeper, "countable", countable):
        yield
