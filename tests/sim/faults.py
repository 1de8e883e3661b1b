"""Misfortune for a simulated cluster: what happens to it, at the rates that the seed drew, until it is healed.

Each kind comes as a Poisson process of its own, picks whom it hits and for how long, and ends by itself. What would
make losses legitimate (docs/guarantees.md) is not done:

- With sync=always any number of machines may lose power. With sync=interval the page cache is part of what OK means, so
  a machine loses it only while another member of each of its ISRs still has the log that the record names, and while
  some other node has whatever is damaged there.
- A journal rots only while another member of each ISR has its log under the name that the record knows. If the end of
  that one is cut when it restarts, an operator decides (`Operators.in_doubt`).
- Only one disk is replaced in a run, and none while another member is the last with what was acknowledged.
- A bit is turned over only in what is durable and committed, and each batch is damaged on one node at most: another
  member of the ISR has it as it was. In most runs all damage of a partition is on one node; in some anywhere, and all
  members may be opened anew and be found damaged: they mend one another before anybody leads. What nobody has is drawn
  by `losses`.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT
from nsqha.commitlog.journal import JOURNAL
from nsqha.commitlog.recordfile import scan
from nsqha.errors import LogCorrupt
from tests.sim.losses import vouched_on_disk
from tests.sim.metadata import Trouble
from tests.sim.node import DATA
from tests.sim.storage import SECTOR

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.election.model import PartitionMeta
    from nsqha.server.replica.following.follower import Follower
    from tests.sim.cluster import SimCluster
    from tests.sim.node import Machine, SimNode

Key = tuple[int, int]  # topic uid, partition

POWER = {"power_loss", "power_loss_all", "die_writing"}  # a host may go with them
DURATIONS = (0.05, 0.3, 1.0, 2.0, 4.0, 7.0)
PARTED_SECONDS = 5.0  # at most, until the one that is behind leads
AWAY_SECONDS = (0.5, 2.0, 5.0, 10.0)  # 3: a lease


class Misfortune:
    """All faults of one run."""

    def __init__(self, cluster: SimCluster, rng: random.Random) -> None:
        self.cluster = cluster
        self._rng = rng
        self._over = False
        self._wiped = False
        self._gone: set[tuple[int, int]] = set()  # (node, log uid) whose page cache was lost
        self._damaged: set[tuple[Key, int]] = set()  # (partition, log id), on any node
        self._where: dict[tuple[Key, int], SimNode] = {}  # the same: on which
        self._bad_disk: dict[tuple[int, int], SimNode] = {}  # where a partition is damaged
        for node in cluster.nodes:
            node.may_lose_power = lambda n=node: self._loses_cache(n)  # type: ignore[misc]
        if "part_ways" in cluster.plan.faults:
            for node in cluster.nodes:
                self._watch_cuts(node)
                node.on_broker = self._watch_cuts
        for kind, rate in sorted(cluster.plan.faults.items()):
            self._next(kind, rate)
        cluster.losses.begin(self._damaged)

    def stop(self) -> None:
        """Nothing new happens."""
        self._over = True

    def _next(self, kind: str, rate: float) -> None:
        self.cluster.world.call_later(self._rng.expovariate(rate), self._strike, kind, rate)

    def _strike(self, kind: str, rate: float) -> None:
        if self._over:
            return
        self._next(kind, rate)
        strike: Callable[[], str | None] = getattr(self, kind)
        what = strike()
        if what is not None:
            self.cluster.count(kind)
            self.cluster.note(f"{kind} {what}")

    # ---- whom, how long

    def _node(self) -> SimNode:
        return self._rng.choice(self.cluster.nodes)

    def _leader(self) -> SimNode | None:
        leaders = [n for n in self.cluster.nodes if n.joined and n.replicas is not None and n.replicas.leading]
        return self._rng.choice(leaders) if leaders else None

    def _for_a_while(self, end: Callable[[], None]) -> float:
        seconds = self._rng.choice(DURATIONS)
        self.cluster.world.call_later(seconds, self._unless_over, end)
        return seconds

    def _unless_over(self, end: Callable[[], None]) -> None:
        if not self._over:
            end()

    # ---- processes and machines

    def _end(self, node: SimNode | None, *, power: bool = False) -> str | None:
        if node is None or not node.up or (power and not self._loses_cache(node)):
            return None
        node.end("power loss" if power else "killed", power=power)
        return node.name

    def _loses_cache(self, node: SimNode) -> bool:
        """Whether what is not synced may go; what goes is noted."""
        return self.cluster.sync_always or self._keep_a_copy(node)

    def _keep_a_copy(self, node: SimNode) -> bool:
        """Whether others have all that its logs have, under the names that the records know; these are gone now."""
        gone = {(node.uid, meta.isr[node.uid]) for _, meta in self.cluster.metas() if node.uid in meta.isr}
        if node.replicas is not None:
            gone |= {(node.uid, leadership.log_uid) for leadership in node.replicas.leading.values()}
            gone |= {(node.uid, follower.log_uid) for follower in node.replicas.followers.values()}
        lost = self._gone | gone
        for _, meta in self.cluster.metas():
            if node.uid in meta.isr and all(member in lost for member in meta.isr.items()):
                return False
        metas = dict(self.cluster.metas())
        for (key, log_id), damaged in self._where.items():
            if key in metas and not self._others_have(key, metas[key], log_id, damaged, lost):
                return False
        self._gone = lost
        return True

    def _others_have(
        self, key: Key, meta: PartitionMeta, log_id: int, but: SimNode, lost: set[tuple[int, int]]
    ) -> bool:
        """Whether another node than `but` has a committed batch: on its disk, or in a page cache that is not lost."""
        for node in self.cluster.nodes:
            log_uid = meta.isr.get(node.uid)
            if node is not but and ((log_uid and (node.uid, log_uid) not in lost) or self._on_disk(node, key, log_id)):
                return True
        return False

    def _on_disk(self, node: SimNode, key: Key, log_id: int) -> bool:
        log = None if node.replicas is None else node.replicas.table.log_of(key)
        durable = log is not None and log.start.log_id <= log_id < min(log.local_durable, log.end.log_id)
        return log is not None and durable and self._committed(key, log, log_id)

    def _committed(self, key: Key, log: PartitionLog, log_id: int) -> bool:
        """Whether the batch that a log has there is the one that was committed."""
        try:
            entry = log.entry(log_id)
        except LogCorrupt:
            return False
        return self.cluster.oracle.chains.get(key, {}).get(log_id) == (entry.epoch, entry.chain)

    def kill(self) -> str | None:
        return self._end(self._node())

    def kill_leader(self) -> str | None:
        return self._end(self._leader())

    def power_loss(self) -> str | None:
        return self._end(self._node(), power=True)

    def power_loss_all(self) -> str | None:
        for node in self.cluster.nodes:
            self._end(node, power=True)
        return "all nodes"

    def die_writing(self) -> str | None:
        node = self._node()
        if not node.up:
            return None
        n = self._rng.choice((1, 3, 10, 40))
        node.storage.crash_after(n)
        return f"{node.name} at the {n}-th write from now"

    def stop_node(self) -> str | None:
        node = self._node()
        if not node.joined or node.frozen:
            return None
        loop = node.loop

        async def stop() -> None:
            await node.stop()

        def ended() -> None:
            if node.loop is loop and node.up:
                node.end("stopped")

        def begin() -> None:
            loop.create_task(stop()).add_done_callback(lambda _: ended())

        loop.call_soon(begin)
        self.cluster.world.call_later(15.0, ended)
        return node.name

    def _freeze(self, machine: Machine | None) -> str | None:
        if machine is None or not machine.up or machine.frozen:
            return None
        machine.freeze()
        loop = machine.loop

        def thaw() -> None:
            if machine.loop is loop:
                machine.thaw()

        return f"{machine.name} for {self._for_a_while(thaw)} s"

    def freeze(self) -> str | None:
        return self._freeze(self._node())

    def freeze_leader(self) -> str | None:
        return self._freeze(self._leader())

    def controller_kill(self) -> str | None:
        controller = self._rng.choice(self.cluster.controllers)
        if not controller.up:
            return None
        controller.end()
        self._for_a_while(lambda: None if controller.up else controller.start())
        return controller.name

    def controller_freeze(self) -> str | None:
        return self._freeze(self._rng.choice(self.cluster.controllers))

    def wipe(self) -> str | None:
        node = self._node()
        if self._wiped or not node.joined or self._last_of_an_isr(node) or not self._keep_a_copy(node):
            return None
        self._wiped = True
        node.end("its disk is replaced")
        node.wipe()
        return node.name

    def _last_of_an_isr(self, node: SimNode) -> bool:
        """Whether some partition would have fewer members than its floor promises with its disk."""
        return any(node.uid in meta.isr and len(meta.isr) < 2 for _, meta in self.cluster.metas())

    def clock(self) -> str | None:
        node = self._node()
        self.cluster.set_clock(node, self._rng.uniform(-20, 20))
        return f"{node.name} is {node.skew_ns / 1e9:.1f} s off"

    def journal_damage(self) -> str | None:
        """A process ends, and its journal rots: its logs go by another name from then on, in no ISR."""
        node = self._node()
        if not node.joined or node.journal is None or self._last_of_an_isr(node) or not self._keep_a_copy(node):
            return None
        end = node.journal._file.end
        node.end("killed, and its journal rots")
        path = f"{DATA}/{JOURNAL}"
        if len(scan(node.storage.contents()[path]).payloads) < 2:
            return None  # the node would not know who it is
        bit = self._rng.randrange(8 * end)
        node.storage.flip(path, bit)
        return f"{node.name}: bit {bit} of {8 * end}"

    # ---- network

    def _names(self, *, controllers: bool = True) -> list[str]:
        machines = self.cluster.machines if controllers else {node.name: node for node in self.cluster.nodes}
        return sorted(machines)

    def partition(self, *, both: bool = True) -> str | None:
        a, b = self._rng.sample(self._names(), 2)
        self.cluster.net.partition(a, b, both=both)
        seconds = self._for_a_while(lambda: self.cluster.net.heal(a, b))
        return f"{a} {'<->' if both else '->'} {b} for {seconds} s"

    def partition_one_way(self) -> str | None:
        return self.partition(both=False)

    def isolate(self) -> str | None:
        """A node from all others; half of the time from the metadata store too."""
        net, node = self.cluster.net, self._node()
        others = [name for name in self._names() if name != node.name]
        for other in others:
            net.partition(node.name, other)
        store_too = self._rng.random() < 0.5
        if store_too:
            self.cluster.metadata.reach(node.name, False)

        def heal() -> None:
            for other in others:
                net.heal(node.name, other)
            if store_too:
                self.cluster.metadata.reach(node.name, True)

        return f"{node.name} for {self._for_a_while(heal)} s{', also from the store' if store_too else ''}"

    def cut(self) -> str | None:
        a, b = self._rng.sample(self._names(), 2)
        return f"{a} {b}: {self.cluster.net.cut(a, b)} connections"

    def slow_link(self) -> str | None:
        a, b = self._rng.sample(self._names(), 2)
        late = self._rng.choice((0.01, 0.05, 0.3))
        self.cluster.net.slow(a, b, late)
        return f"{a} -> {b} by {late} s for {self._for_a_while(lambda: self.cluster.net.slow(a, b, 0.0))} s"

    # ---- logs that part

    def part_ways(self) -> str | None:
        """A leader has batches that one follower gets and another does not, and dies; the other one is elected."""
        leader, net = self._leader(), self.cluster.net
        if leader is None or leader.frozen:
            return None
        assert leader.replicas is not None
        key = self._rng.choice(sorted(leader.replicas.leading))
        meta = dict(self.cluster.metas()).get(key)
        isr = [] if meta is None else [*meta.isr]
        others = [n for n in self.cluster.nodes_of(isr) if n is not leader and n.joined and not n.frozen]
        if len(others) < 2:
            return None
        behind, ahead = self._rng.sample(others, 2)
        net.partition(leader.name, behind.name, both=False)
        loops = leader.loop, ahead.loop

        def die() -> None:
            if (leader.loop, ahead.loop) != loops or not ahead.joined:
                net.heal(leader.name, behind.name)
                return
            ahead.freeze()
            leader.end("killed behind a cut")
            net.heal(leader.name, behind.name)
            thaw(PARTED_SECONDS)

        def thaw(left: float) -> None:
            led = any(other == key and meta.leader == behind.uid for other, meta in self.cluster.metas())
            if led or left <= 0 or ahead.loop is not loops[1]:
                if ahead.loop is loops[1]:
                    ahead.thaw()
            else:
                self.cluster.world.call_later(0.05, self._unless_over, lambda: thaw(left - 0.05))

        self.cluster.world.call_later(self._rng.uniform(0.05, 0.4), die)
        return f"{leader.name} reaches {ahead.name} and not {behind.name}, and dies"

    def _watch_cuts(self, node: SimNode) -> None:
        """While a log is cut the disk is slow, and the node loses everybody: its leader opens another stream."""
        assert node.replicas is not None
        files, net = node.replicas.files, self.cluster.net
        cut = files.cut

        async def interrupted(follower: Follower, log_id: int) -> None:
            if not self._over and self._rng.random() < 0.7:
                before, node.disk_seconds = node.disk_seconds, 0.2
                loop = self.cluster.world

                def heal() -> None:
                    node.disk_seconds = before

                loop.call_later(0.6, self._unless_over, heal)
                for other in self._names():
                    if other != node.name:
                        loop.call_later(self._rng.uniform(0.0, 0.05), net.cut, node.name, other)
                self.cluster.count("interrupted cuts")
            await cut(follower, log_id)

        files.cut = interrupted  # type: ignore[method-assign]

    # ---- disks

    def slow_disk(self) -> str | None:
        node = self._node()
        node.disk_seconds = self._rng.choice((0.01, 0.05, 0.5))

        def heal() -> None:
            node.disk_seconds = 0.001

        return f"{node.name}: {node.disk_seconds} s for {self._for_a_while(heal)} s"

    def disk_hang(self) -> str | None:
        """Nothing comes back from it for longer than anybody waits."""
        node = self._node()
        node.disk_seconds = self._rng.choice((2.0, 6.0))

        def heal() -> None:
            node.disk_seconds = 0.001

        return f"{node.name}: {node.disk_seconds} s for {self._for_a_while(heal)} s"

    def disk_full(self) -> str | None:
        node = self._node()
        if not node.up:
            return None
        storage = node.storage
        for operation in ("pwrite", "create", "allocate"):
            storage.fail(operation, code=errno.ENOSPC, times=1 << 30)
        return f"{node.name} for {self._for_a_while(storage.heal)} s"

    def disk_error(self) -> str | None:
        node = self._node()
        if not node.up or not self._loses_cache(node):
            return None
        node.storage.fail("sync", code=errno.EIO)
        return f"{node.name}: its next sync fails"

    def bit_flip(self) -> str | None:
        """In a segment or commitlog, of a batch that another member of the ISR has."""
        rng, node, ledger = self._rng, self._node(), self.cluster.oracle.ledger
        key, meta = rng.choice(self.cluster.metas())
        log = None if node.replicas is None else node.replicas.table.log_of(key)
        others = [uid for uid in meta.isr if uid != node.uid]
        if not self.cluster.plan.damage_anywhere:
            node = self._bad_disk.setdefault(key, node) if others else node
            log = None if node.replicas is None else node.replicas.table.log_of(key)
            others = [uid for uid in meta.isr if uid != node.uid]
        if not node.joined or log is None or not others:
            return None
        first, end = log.start.log_id, min(log.local_durable, log.end.log_id, ledger.known(key))
        if first >= end:
            return None
        log_id = rng.randrange(first, end)
        if (key, log_id) in self._damaged or not self._committed(key, log, log_id):
            return None
        if not self.cluster.sync_always and not self._others_have(key, meta, log_id, node, self._gone):
            return None
        entry, pair = log.entry(log_id), log.files.pair_of(log_id)
        if self.cluster.plan.lost_sectors and rng.random() < 0.5:
            return self._lose_sector(node, key, meta, log_id, end)
        self._damaged.add((key, log_id))
        self._where[key, log_id] = node
        if rng.random() < 0.5:
            path, at = pair.path(SEGMENT), entry.position - pair.position + rng.randrange(entry.size)
        else:
            path, at = pair.path(COMMITLOG), pair.slot(log_id) + rng.randrange(ENTRY_BYTES)
        bit = rng.randrange(8)
        if log_id >= vouched_on_disk(log) and POWER & {*self.cluster.plan.faults}:
            return None  # a damaged end, after a power loss, is a torn one to whoever finds it
        self.cluster.flips.append((node, path, at, node.storage.contents()[path][at]))
        node.storage.flip(path, 8 * at + bit)
        return f"{node.name}: batch {log_id} of {self.cluster.name_of(key)}, byte {at} of {path.rpartition('/')[2]}"

    def _lose_sector(self, node: SimNode, key: Key, meta: PartitionMeta, log_id: int, end: int) -> str | None:
        """One that this batch has a part in reads as zeros, and so do its neighbours' parts: on another disk they are
        as they were."""
        assert node.replicas is not None
        log = node.replicas.table.log_of(key)
        assert log is not None
        entry, pair = log.entry(log_id), log.files.pair_of(log_id)
        kind = self._rng.choice((SEGMENT, COMMITLOG))
        if kind == SEGMENT:
            at = entry.position - pair.position + self._rng.randrange(entry.size)
        else:
            at = pair.slot(log_id)
        start, stop = at // SECTOR * SECTOR, at // SECTOR * SECTOR + SECTOR
        hurt = []
        for n in range(pair.first.log_id, log.end_of(pair).log_id):
            try:
                other = log.entry(n)
            except LogCorrupt:
                return None
            low, size = (other.position - pair.position, other.size) if kind == SEGMENT else (pair.slot(n), ENTRY_BYTES)
            if low < stop and start < low + size:
                hurt.append(n)
        safe = min(end, vouched_on_disk(log) if POWER & {*self.cluster.plan.faults} else end)
        if hurt[-1] >= safe or (kind == COMMITLOG and start < pair.slot(pair.first.log_id)):
            return None
        for n in hurt:
            if (key, n) in self._damaged or not self._committed(key, log, n):
                return None
            if not self.cluster.sync_always and not self._others_have(key, meta, n, node, self._gone):
                return None
        self._damaged |= {(key, n) for n in hurt}
        self._where |= {(key, n): node for n in hurt}
        path = pair.path(kind)
        held = node.storage.contents()[path][start:stop]
        self.cluster.flips += [(node, path, start + i, byte) for i, byte in enumerate(held) if byte]
        node.storage.blank(path, start // SECTOR)
        self.cluster.count("sectors lost")
        return f"{node.name}: batches {hurt} of {self.cluster.name_of(key)}, a sector of {path.rpartition('/')[2]}"

    # ---- the metadata store

    def metadata_trouble(self) -> str | None:
        rng, metadata = self._rng, self.cluster.metadata
        metadata.trouble = trouble = Trouble(
            lost_replies=rng.choice((0.0, 0.1, 0.4)),
            late_writes=rng.choice((0.0, 0.1, 0.4)),
            refusals=rng.choice((0.0, 0.1, 0.5)),
            lost_hints=rng.choice((0.0, 0.3, 1.0)),
            hint_seconds=rng.choice((0.002, 0.1, 1.0)),
            call_seconds=rng.choice((0.002, 0.05)),
        )

        def heal() -> None:
            if metadata.trouble is trouble:
                metadata.trouble = Trouble()

        return f"{trouble} for {self._for_a_while(heal)} s"

    def metadata_away(self) -> str | None:
        """For everybody: it has no quorum."""
        metadata = self.cluster.metadata
        if metadata.is_away:
            return None
        metadata.away(True)
        seconds = self._rng.choice(AWAY_SECONDS)
        self.cluster.world.call_later(seconds, self._unless_over, lambda: metadata.away(False))
        return f"for {seconds} s"

    def lost_change(self) -> str | None:
        """A leader changes a record and does not know whether it did, for a while."""
        leader = self._leader()
        if leader is None:
            return None
        seconds = self._rng.choice((0.5, 2.0, 4.0))
        self.cluster.metadata.losing[leader.name] = seconds
        return f"of {leader.name}, the next one, for {seconds} s"

    def metadata_unreachable(self) -> str | None:
        name = self._rng.choice(self._names())
        self.cluster.metadata.reach(name, False)
        return f"for {name} for {self._for_a_while(lambda: self.cluster.metadata.reach(name, True))} s"
