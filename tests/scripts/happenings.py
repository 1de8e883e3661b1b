"""What happened on a stage, line by line: seen from above after every turn of a node, as the invariants are.

    b promises epoch 1          its journal says so
    a leads epoch 1 from 1      the end of its log back then
    a appends 3 to 5            log ids; "cuts at 3": its log ends there; "has lost 2": a power cut took it
    a commits 4                 "knows commit 4": a follower hears of it
    a asks a b c, of ISR a b    who must acknowledge: the effective ISR and the recorded one
    b acks 4, 2 on disk         when the leader hears it; so with "is at" (Opened) and "refuses"
    a proposes shrink to a b: c is gone
    a answers m1 OK             to the client that published it
    ! I4 t/0: ...               a broken invariant, or a command that cannot be done

The log lines of the events in `SHOWN` are shown as they are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsqha.election.memory import Change, StoreState
from nsqha.election.model import PartitionMeta
from nsqha.ids import PartitionKey
from tests.sim.cluster import SimCluster
from tests.sim.loop import NodeLoop
from tests.sim.node import SimNode

if TYPE_CHECKING:
    from nsqha.server.replica.leading.leadership import Leadership
    from nsqha.server.replica.roles import Replicas

SHOWN = {
    "handing_over",
    "transfer_given_up",
    "stepping_down",
    "not_leading",
    "partition_stopped",
    "committed_cut",
    "log_begun_anew",
    "role_delayed",
}
"""Events whose log lines are shown as they are."""

NONE_ASKED: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())


@dataclass
class Seen:
    """What a node looked like after its last turn."""

    replicas: Replicas | None = None
    leading: int = 0  # epoch
    promise: int = 0
    end: int = 0
    committed: int = 0
    log_uid: int = 0
    asked: tuple[frozenset[int], frozenset[int]] = NONE_ASKED  # (effective, recorded)


class LogLines(logging.Handler):
    """Passes what nodes log on."""

    def __init__(self, heard: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.INFO)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard(record)


class Happenings:
    """The lines of one scene."""

    def __init__(self, cluster: SimCluster, nodes: Mapping[str, SimNode]) -> None:
        self._cluster = cluster
        self._log_lines = LogLines(self._logged)
        self._nodes = nodes
        self.key: PartitionKey = (0, 0)  # of the partition, once it is made
        self._broken: set[str] = set()  # what has been said of broken invariants
        self._lines: list[str] = []
        self._seen: dict[str, Seen] = {}
        self._versions = 0
        cluster.scheduler.on_turn = self._turned
        self._observer = cluster.on_record
        cluster.on_record = self._recorded

    def listen(self) -> None:
        """Hear what nodes log, until `close`."""
        logging.getLogger("nsqha").addHandler(self._log_lines)
        logging.getLogger("nsqha").setLevel(logging.INFO)

    def begin(self) -> None:
        """Show only what comes from now on; the record as it is now is version 1."""
        self.look_at_all()
        self._versions = 1
        self.take()

    def close(self) -> None:
        logging.getLogger("nsqha").removeHandler(self._log_lines)

    def say(self, line: str) -> None:
        self._lines.append(line)

    def take(self) -> list[str]:
        """The lines since the last time."""
        lines, self._lines = self._lines, []
        return lines

    # ---- names

    def name(self, node: SimNode) -> str:
        return next(name for name, other in self._nodes.items() if other is node)

    def names(self, uids: Iterable[int]) -> str:
        return " ".join(name for name, node in self._nodes.items() if node.uid in set(uids))

    def named(self, text: str) -> str:
        """With the names of a script for those of the simulation."""
        for name, node in self._nodes.items():
            for written in (f"node {node.uid:016x}", f"{node.uid:016x}", str(node.uid), node.name):
                text = re.sub(rf"\b{written}\b", name, text)
        text = re.sub(r"Entry\(log_id=(\d+), [^)]*\)", r"entry \1", text)
        text = re.sub(r"/tmp/topics/t-[0-9a-f]{16}/0", "the log", text)
        return re.sub(r"^at [\d.]+: ", "", text).replace(f"({self.key[0]}, 0)", "t/0")

    # ---- nodes

    def _turned(self, loop: NodeLoop) -> None:
        machine = self._cluster.machines.get(loop.name)
        if isinstance(machine, SimNode) and machine.loop is loop:
            self._look(machine)
            self._cluster.oracle.look(machine)
        self._tell_broken()

    def look_at_all(self) -> None:
        """Also at nodes that had nothing to do."""
        for node in self._nodes.values():
            self._look(node)
        self._tell_broken()

    def _tell_broken(self) -> None:
        """Say which invariants are broken. A node is looked at again after each of its turns; each is said once."""
        violations = self._cluster.oracle.violations
        for what in map(self.named, violations):
            if what not in self._broken:
                self._broken.add(what)
                self.say(f"! {what}")
        violations.clear()

    def _look(self, node: SimNode) -> None:
        replicas, journal, name = node.replicas, node.journal, self.name(node)
        if replicas is None or journal is None:
            return
        seen = self._seen.setdefault(name, Seen(replicas))
        leadership, follower = replicas.leading.get(self.key), replicas.followers.get(self.key)
        if seen.replicas is not replicas and follower is not None:
            seen = self._seen[name] = self._new_process(name, seen, replicas, follower.log.end.log_id)
        if seen.replicas is not replicas:
            return  # it has not opened its log yet
        record: Any = journal._file.written.get(self.key)
        if record is not None and record.promise > seen.promise:
            seen.promise = record.promise
            self.say(f"{name} promises epoch {seen.promise}")
        if leadership is not None:
            self._look_at_leader(name, seen, leadership)
        elif follower is not None:
            seen.leading = 0
            self._look_at_log(name, seen, follower.log.end.log_id, follower.log_uid)
            self._look_at_commit(name, seen, follower.applier.committed, "knows commit")

    def _new_process(self, name: str, seen: Seen, replicas: Replicas, end: int) -> Seen:
        if end < seen.end:
            self.say(f"{name} has lost {end}" + (f" to {seen.end - 1}" if end < seen.end - 1 else ""))
        return Seen(replicas, promise=seen.promise, end=end, log_uid=seen.log_uid)

    def _look_at_leader(self, name: str, seen: Seen, leadership: Leadership) -> None:
        if leadership.epoch != seen.leading:
            seen.leading, seen.committed, seen.asked = leadership.epoch, 0, NONE_ASKED
            self.say(f"{name} leads epoch {seen.leading} from {leadership.epoch_start}")
        self._look_at_log(name, seen, leadership.log.end.log_id, leadership.log_uid)
        keeper = leadership._keeper
        asked = keeper.effective, frozenset(keeper.meta.isr)
        if asked != seen.asked:
            if seen.asked != NONE_ASKED:
                self.say(f"{name} asks {self.names(asked[0])}, of ISR {self.names(asked[1])}")
            seen.asked = asked
        self._look_at_commit(name, seen, leadership.committed, "commits")

    def _look_at_commit(self, name: str, seen: Seen, committed: int, verb: str) -> None:
        if committed > seen.committed:
            seen.committed = committed
            if committed > 1:
                self.say(f"{name} {verb} {committed}")

    def _look_at_log(self, name: str, seen: Seen, end: int, log_uid: int) -> None:
        if log_uid != seen.log_uid:
            if seen.log_uid:
                self.say(f"{name} has its log under another name")
            seen.log_uid = log_uid
        if end < seen.end:
            self.say(f"{name} cuts at {end}")
        elif end > seen.end and seen.end:
            self.say(f"{name} appends {seen.end}" + (f" to {end - 1}" if end - 1 > seen.end else ""))
        seen.end = end

    # ---- messages, as the leader hears them

    def answered(self, follower: str, reply: Any) -> None:
        for opened in reply.opened:
            self.say(f"{follower} is at {opened.end}" + (" and catches up" if opened.behind else ""))
        for ack in reply.acks:
            durable = f", {ack.durable} on disk" if self._cluster.sync_always else ""
            self.say(f"{follower} acks {ack.end}{durable}")
        for refused in reply.refused:
            self.say(f"{follower} refuses: {self.named(refused.why)}")

    # ---- the record

    def asked(self, loop: NodeLoop, meta: PartitionMeta | None) -> None:
        """A leader's proposal is in its log line, with the reason."""
        if meta is None:
            self.say(f"{self._of(loop)} fences the record")
        elif loop.name in {controller.name for controller in self._cluster.controllers}:
            self.say(f"the controller wants {self.names([meta.leader])} to lead epoch {meta.epoch}")

    def _recorded(self, state: StoreState, change: Change) -> None:
        self._observer(state, change)
        for name, after in change.topics.items():
            before = state.topics.get(name)
            if after is not None and before is not None:
                self._changed(before.record.partitions[0], after.record.partitions[0])

    def _changed(self, old: PartitionMeta, new: PartitionMeta) -> None:
        if new.epoch != old.epoch:
            self.say(f"{self.names([new.leader])} is elected, epoch {new.epoch}")
        if new.successor and new.successor != old.successor:
            self.say(f"{self.names([new.successor])} is to lead next")
        self._versions += 1
        self.say(f"ISR {self.names(new.isr)} v{self._versions}")

    def _of(self, loop: NodeLoop) -> str:
        return self.named(loop.name)

    def _logged(self, record: logging.LogRecord) -> None:
        event, loop = getattr(record, "event", ""), self._cluster.scheduler.current
        if loop is None or loop.dead:
            return
        if event.startswith("isr_"):
            args: Any = record.args
            _, _, why, members = args
            to = [int(uid, 16) for uid in members]
            self.say(f"{self._of(loop)} proposes {event[4:]} to {self.names(to)}: {self.named(str(why))}")
        elif event in SHOWN:
            error = record.exc_info[1] if isinstance(record.exc_info, tuple) else record.exc_info
            what = self.named(record.getMessage()).removeprefix("t/0: ")
            self.say(f"{self._of(loop)}: {what}" + (f" {self.named(str(error))}" if error else ""))
