"""What must hold in a simulated cluster, looked at from above after every turn of a node.

Names are those of the design reference. Everything is compared with what was seen before, in memory of its own, so that
no two nodes can agree on something wrong:

    I1   an epoch of a partition is led by one process life at most
    I2   a promise never goes down, and is in the journal before anything is done on its account
    I3   a batch commits when every member of the recorded ISR has it, in the log that the record names
    I4   every member of the recorded ISR that has the log which the record names has every committed batch
    I5   a new leader was in the ISR just before, or nothing was ever acknowledged
    I8   nobody takes the ISR below its floor
    I6   a (partition, epoch, log id) has one content, everywhere;  I7  a committed log id has one content, for ever
    I10  what is called durable, or gone for good, is so on the disk (`durability`)
    I11  channel state holds committed batches only, and those of the log beside it
    I12  only committed messages are delivered
    I13  a log never ends below what its node knew to be committed

What clients and operators were promised is in `ledger`, and looked at here with every delivery.

And the product's own assertions: a partition that stopped, a task that failed, a callback that raised.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from zlib import crc32

from nsqha import ids
from nsqha.commitlog.entry import FAULTY, REBUILT, UNREADABLE
from nsqha.election.model import PartitionMeta
from nsqha.errors import LogCorrupt
from tests.sim.durability import Durability
from tests.sim.ledger import Ledger
from tests.sim.storage import Crashed

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.cursor.committed.state import AppliedEntry, PartitionState
    from nsqha.election.memory import Change, StoreState
    from tests.sim.cluster import SimCluster
    from tests.sim.node import SimNode

Key = tuple[int, int]

BROKEN = {
    "partition_stopped",
    "state_diverged",
    "task_failed",
    "reply_failed",
    "round_failed",
    "channel_stuck",
    "controller_failed",
    "housekeeping_failed",
    "committed_cut",
    "role_failed",
    "replica_unusable",
}
"""Log events that mean a bug, whatever the faults are."""


class Violation(AssertionError):
    """An invariant is broken."""


class Oracle:
    """Watches one cluster."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.violations: list[str] = []
        self.committed: dict[Key, int] = {}  # the end of what any leader committed
        self.chains: dict[Key, dict[int, tuple[int, int]]] = {}  # committed log id -> epoch, chain
        self.commits = 0
        self._written: dict[tuple[Key, int, int], int] = {}  # (partition, epoch, log id) -> chain
        self._leaders: dict[tuple[Key, int], tuple[str, int]] = {}
        self._promised: dict[tuple[str, int, Key], int] = {}
        self._seen: dict[tuple[str, Key], tuple[PartitionLog, int, int]] = {}  # log, end, committed
        self._applied: dict[tuple[str, Key], AppliedEntry] = {}
        self._look_again: set[Key] = set()
        self._joined: dict[str, int] = {}  # the life in which a node was last seen to be there
        self.operators_elections: set[tuple[Key, int]] = set()  # (partition, epoch)
        self.ledger = Ledger()
        self._durability = Durability()
        self._held: dict[tuple[Key, int, int], int] = {}  # (partition, node uid, log uid) -> the most that it ever had
        self._whole: dict[tuple[str, Key], tuple[PartitionLog, int]] = {}  # log, below what it has no hole
        self._deliveries: list[tuple[SimNode, str, str, bytes, bytes, int, float]] = []

    def broken(self, what: str) -> None:
        """Remember it; the run ends with the first."""
        self.violations.append(f"at {self.cluster.time:.4f}: {what}")

    def digest(self) -> int:
        """Of all that was committed."""
        return crc32(repr(sorted((key, sorted(chains.items())) for key, chains in self.chains.items())).encode())

    # ---- after a turn

    def look(self, node: SimNode) -> None:
        """Everything about one node that may have changed."""
        replicas = node.replicas
        if replicas is None or node.journal is None or node.storage.off:
            return
        if node.joined and self._joined.get(node.name) != node.lives:
            self._joined[node.name] = node.lives
            self._look_again |= {*replicas.leading, *replicas.followers}
        for key, leadership in replicas.leading.items():
            log, committed = leadership.partition.log, leadership.partition.leader.committed
            if self._moved(node, key, log, committed):
                self._read(key, log, committed)
                self._check_leader(node, key, leadership.epoch, replicas.registration)
                self._check_log(node, key, log, committed)
                self._check_promise(node, key, leadership.epoch)
                self._holds(node, key, leadership.log_uid, log)
                self._check_applied(node, key, log, leadership.partition.cursors.state)
                if committed > self.committed.get(key, 0):
                    self._check_acked(node, key, leadership.epoch, committed)
                    self.committed[key] = committed
                    self.commits += 1
                    self._look_again.add(key)
            self._check_durable(node, key, log)
        for key, follower in replicas.followers.items():
            if self._moved(node, key, follower.log, follower.applier.committed):
                self._read(key, follower.log, follower.applier.committed)
                self._check_log(node, key, follower.log, follower.applier.committed)
            self._holds(node, key, follower.log_uid, follower.log)
            self._check_durable(node, key, follower.log)
            if follower.port is not None:
                self._check_promise(node, key, follower.epoch)
            state, committed = follower.applier.state, follower.applier.committed
            if state is not None and state.applied.log_id >= max(committed, 1):
                self.broken(f"I11 {node.name} {key}: applied {state.applied.log_id}, committed is {committed}")
            if state is not None:
                self._check_applied(node, key, follower.log, state)
        if self._look_again:
            self.check_electable()
        if self._deliveries:
            self._check_deliveries()

    def _read(self, key: Key, log: PartitionLog, committed: int) -> None:
        for problem in self.ledger.read(key, log, committed, self.cluster.scheduler.now):
            self.broken(problem)

    def _moved(self, node: SimNode, key: Key, log: PartitionLog, committed: int) -> bool:
        seen = self._seen.get((node.name, key))
        return seen is None or seen[0] is not log or seen[1] != log.end.log_id or seen[2] != committed

    def _check_leader(self, node: SimNode, key: Key, epoch: int, registration: int) -> None:
        me = (node.name, node.lives)
        other = self._leaders.setdefault((key, epoch), me)
        if other != me:
            self.broken(f"I1 {key}: epoch {epoch} is led by {other} and by {me}, registration {registration}")

    def _check_applied(self, node: SimNode, key: Key, log: PartitionLog, state: PartitionState) -> None:
        applied = state.applied
        if self._applied.get((node.name, key)) == applied:
            return
        self._applied[node.name, key] = applied
        if log.start.log_id <= applied.log_id < log.end.log_id:
            entry = self._entry(log, applied.log_id)
            if entry is not None and entry != (applied.epoch, applied.chain):
                self.broken(f"I11 {node.name} {key}: {applied} is applied, the log has {entry} there")

    def _holds(self, node: SimNode, key: Key, log_uid: int, log: PartitionLog) -> None:
        has = self._has(log)
        if has > self._held.get((key, node.uid, log_uid), 0):
            self._held[key, node.uid, log_uid] = has

    def _has(self, log: PartitionLog) -> int:
        """The end of what a replica may acknowledge."""
        return min(log.local_durable, log.end.log_id) if self.cluster.sync_always else log.end.log_id

    def _check_acked(self, node: SimNode, key: Key, epoch: int, committed: int) -> None:
        """I3, for the leader that the record names: its ISR is among those that the leader asks."""
        meta = dict(self.cluster.metas()).get(key)
        if meta is None or (meta.leader, meta.epoch) != (node.uid, epoch):
            return
        for uid, log_uid in meta.isr.items():
            if (has := self._held.get((key, uid, log_uid), 0)) < committed:
                name = self.cluster.name(uid)
                self.broken(f"I3 {key}: {node.name} commits {committed} in epoch {epoch}; {name} has had {has}")

    def _check_promise(self, node: SimNode, key: Key, epoch: int) -> None:
        assert node.journal is not None
        mine = (node.name, node.disks, key)
        before = self._promised.get(mine, 0)
        if epoch == before:
            return
        if epoch < before:
            self.broken(f"I2 {node.name} {key}: acts in epoch {epoch}, promised {before}")
        record = node.journal._file.written.get(key)
        durable = 0 if record is None else record.promise
        if durable < epoch:
            self.broken(f"I2 {node.name} {key}: acts in epoch {epoch}, the journal has {durable}")
        if problem := self._durability.journal(node):
            self.broken(problem)
        self._promised[mine] = max(epoch, before)

    def _check_durable(self, node: SimNode, key: Key, log: PartitionLog) -> None:
        if problem := self._durability.log(node, key, log):
            self.broken(problem)

    def _check_log(self, node: SimNode, key: Key, log: PartitionLog, committed: int) -> None:
        place, end = (node.name, key), log.end.log_id
        seen = self._seen.get(place)
        first, known = log.start.log_id, log.start.log_id
        if seen is not None and seen[0] is log:
            first, known = min(seen[1], end), seen[2]
            if end < seen[2]:
                self.broken(f"I13 {node.name} {key}: the log ends at {end}, committed was {seen[2]}")
        self._seen[place] = (log, end, committed)
        for log_id in range(max(first, log.start.log_id), end):
            entry = self._entry(log, log_id)
            if entry is None:
                continue
            epoch, chain = entry
            if self._written.setdefault((key, epoch, log_id), chain) != chain:
                self.broken(f"I6 {node.name} {key}: batch {log_id} of epoch {epoch} has two contents")
        chains = self.chains.setdefault(key, {})
        for log_id in range(max(known, log.start.log_id), min(committed, end)):
            entry = self._entry(log, log_id)
            if entry is not None and chains.setdefault(log_id, entry) != entry:
                self.broken(f"I7 {node.name} {key}: committed batch {log_id} is {entry} here, {chains[log_id]} before")

    def _entry(self, log: PartitionLog, log_id: int) -> tuple[int, int] | None:
        try:
            entry = log.entry(log_id)
        except (LogCorrupt, OSError):
            return None
        if entry.flags & REBUILT:
            return None  # it holds the place of a damaged one, until that is fetched again
        return entry.epoch, entry.chain

    # ---- who could become leader

    def check_electable(self) -> None:
        """I4, for the partitions whose commit point or record changed, or that a node came back with."""
        again, self._look_again = self._look_again, set()
        store = self.cluster.metadata.store
        for topic in store.records.topics().values():
            for number, meta in topic.record.partitions.items():
                key = (topic.record.uid, number)
                if key in again:
                    for uid, log_uid in meta.isr.items():
                        self._check_member(key, uid, log_uid, meta)

    def _check_member(self, key: Key, uid: int, log_uid: int, meta: PartitionMeta) -> None:
        node = next((node for node in self.cluster.nodes if node.uid == uid), None)
        replicas = None if node is None else node.replicas
        committed = self.committed.get(key, 0)
        if node is None or replicas is None or not committed:
            return
        if key in replicas.leading:
            log, mine = replicas.leading[key].log, replicas.leading[key].log_uid
        elif key in replicas.followers:
            follower = replicas.followers[key]
            log, mine = follower.log, follower.log_uid
            if follower.stopped is not None:
                return
        else:
            return
        if mine != log_uid:
            return
        if replicas.integrity.suspects.unsound_from(key) is not None and (key, meta.epoch) in self.operators_elections:
            return  # it is about to give up what it has not got; else a log that is doubted has another name
        if (has := self._has(log)) < committed:
            self.broken(f"I4 {key}: {node.name} is in the ISR of epoch {meta.epoch} and has {has} of {committed}")
            return
        if "bit_flip" in self.cluster.plan.faults and (hole := self._hole(node, key, log, committed)) is not None:
            self.broken(f"I4 {key}: {node.name} is in the ISR of epoch {meta.epoch} without batch {hole}")
        last = committed - 1
        if last >= log.start.log_id:
            entry = self._entry(log, last)
            expected = self.chains.get(key, {}).get(last)
            if entry is not None and expected is not None and entry != expected:
                self.broken(f"I4 {key}: {node.name} is in the ISR with {entry} at {last}, committed is {expected}")

    def _hole(self, node: SimNode, key: Key, log: PartitionLog, committed: int) -> int | None:
        """A committed batch whose place is held by what recovery put there: it knows that it does not have it."""
        whole, below = self._whole.get((node.name, key), (None, 0))
        for log_id in range(max(log.start.log_id, below if whole is log else 0), min(committed, log.end.log_id)):
            try:
                if log.entry(log_id).flags & UNREADABLE == FAULTY and (key, log_id) not in self.cluster.lost:
                    return log_id
            except (LogCorrupt, OSError):
                continue  # nobody has looked there yet
        self._whole[node.name, key] = log, min(committed, log.end.log_id)
        return None

    # ---- the records

    def recorded(self, state: StoreState, change: Change) -> None:
        """The metadata is about to change."""
        for uid, left in change.tombstones.items():
            if (tombstone := state.tombstones.get(uid)) is not None:
                without = {*tombstone.nodes} - ({*left.nodes} if left is not None else set())
                for problem in self._durability.removed(self.cluster.nodes_of(without), tombstone):
                    self.broken(problem)
        for name, after in change.topics.items():
            if after is not None:
                self.ledger.record(after.record)
            before = state.topics.get(name)
            if before is None or after is None or before.record.uid != after.record.uid:
                continue
            for number in after.record.partitions.keys() - before.record.partitions.keys():
                self.cluster.grown(name, number)
            for number, new in after.record.partitions.items():
                old = before.record.partitions.get(number)
                if old is not None and old != new:
                    self._look_at_all_of((before.record.uid, number))
                    self._look_again.add((before.record.uid, number))
                    self._check_change(f"{name}/{number}", (before.record.uid, number), old, new)

    def _look_at_all_of(self, key: Key) -> None:
        """Holes are looked for from the start again: replicas may have come by them since."""
        for node in self.cluster.nodes:
            self._whole.pop((node.name, key), None)

    def _check_change(self, name: str, key: Key, old: PartitionMeta, new: PartitionMeta) -> None:
        if new.epoch < old.epoch:
            self.broken(f"I1 {name}: epoch {old.epoch} -> {new.epoch}")
        if new.epoch == old.epoch and (new.leader, new.registration) != (old.leader, old.registration) and old.leader:
            self.broken(f"I1 {name}: epoch {old.epoch} gets another leader: {old} -> {new}")
        if (key, new.epoch) in self.operators_elections:
            return  # what it costs is looked at as what was acknowledged
        if new.epoch > old.epoch and old.isr and new.leader not in old.electable:
            self.broken(f"I5 {name}: {new.leader:016x} leads epoch {new.epoch} and was not in the ISR {old.isr}")
        if len(new.isr) < min(len(old.isr), new.min_isr):
            self.broken(f"I8 {name}: the ISR goes from {len(old.isr)} to {len(new.isr)}, the floor is {new.min_isr}")

    # ---- consumers

    def delivered(
        self, node: SimNode, topic: str, channel: str, message_id: bytes, body: bytes, epoch: int, attempts: int
    ) -> None:
        """A message came; `epoch` of the leader that gave it, 0 if that is another node. Judged after the turn, which
        may have committed it."""
        number = ids.partition_of(int(message_id, 16))
        now = self.cluster.scheduler.now
        if epoch and (why := self.ledger.attempts_broken(topic, channel, number, epoch, attempts, now)):
            self.broken(f"{node.name} delivers {body[:40]!r} to {topic}:{channel} in epoch {epoch}: {why}")
        self._deliveries.append((node, topic, channel, message_id, body, epoch, self.cluster.scheduler.now))

    def _check_deliveries(self) -> None:
        """I12: what was committed, and as it was; and nothing of what is paused."""
        deliveries, self._deliveries = self._deliveries, []
        for node, topic, channel, message_id, body, epoch, at in deliveries:
            found = self.ledger.find(topic, message_id)
            if found is None:
                self.broken(f"I12 {node.name}: {topic} has no message {message_id!r}")
                continue
            key, offset = found
            messages = self.ledger.messages.get(key, [])
            if offset >= len(messages):
                self.broken(f"I12 {node.name} {key}: offset {offset} is delivered and not committed")
            elif messages[offset].body != body:
                self.broken(f"I12 {node.name} {key}: offset {offset} is {body[:40]!r} and was {messages[offset]}")
            elif epoch and (pause := self.ledger.pause_broken(topic, channel, messages[offset], epoch, at)):
                self.broken(f"{node.name} delivers {messages[offset]} to {topic}:{channel} in epoch {epoch}: {pause}")
            elif epoch and key in self.ledger.ordered and channel in self.cluster.channels_of(topic):
                history = self.cluster.history
                if why := self.ledger.order_broken(history, topic, channel, messages[offset], epoch):
                    told = f"{messages[offset]} to {topic}:{channel} in epoch {epoch}"
                    self.broken(f"{node.name} delivers {told} out of order: {why}")


class ErrorLog(logging.Handler):
    """Tells the oracle of events that must not be."""

    def __init__(self, cluster: SimCluster) -> None:
        super().__init__(logging.ERROR)
        self._cluster = cluster

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", "")
        error: Any = record.exc_info
        if isinstance(error, tuple):
            error = error[1]
        loop = self._cluster.scheduler.current
        if event == "channel_stuck" and error is None and "bit_flip" in self._cluster.plan.faults:
            return  # it stops in front of damage
        if event not in BROKEN or isinstance(error, Crashed) or (loop is not None and loop.dead):
            return
        self._cluster.oracle.broken(f"{event}: {record.getMessage()}: {type(error).__name__}: {error}")
        self._cluster.errors.append(error)
