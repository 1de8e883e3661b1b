"""What a simulated cluster must come to once nothing befalls it any more.

in sync    every partition has one leader, all its replicas are in its ISR, no move is left
drained    every channel has got everything that it is owed (`ledger`)
level      all replicas have applied the same, to the same end
equal      their logs, byte by byte, and their channel states
of a log   each channel state is the one that its replica's own log says: also before the end (`states`)
mended     what was damaged on a disk is as it was
gone       nothing is left of deleted topics, nor of replicas that were moved away
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from nsqha.cursor.committed.checkpoint import digest
from nsqha.errors import LogCorrupt
from tests import states
from tests.sim.invariants import Violation
from tests.sim.policies import died_unseen

if TYPE_CHECKING:
    from tests.sim.cluster import SimCluster
    from tests.sim.node import SimNode

Key = tuple[int, int]


class Comparison:
    """Looks at all replicas of one cluster."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster

    # ---- what is waited for

    def in_sync(self) -> bool:
        cluster = self.cluster
        if any(name.startswith("moves/") for name in cluster.metadata.store.intents.all()):
            return False
        for key, meta in cluster.metas():
            leaders = [n for n in cluster.nodes if n.joined and n.replicas is not None and key in n.replicas.leading]
            if len(leaders) != 1 or leaders[0].uid != meta.leader or set(meta.isr) != set(meta.replicas):
                return False
            leadership = leaders[0].replicas.leading[key]  # type: ignore[union-attr]
            if leadership.epoch != meta.epoch or not leadership.partition.serving:
                return False
        return all(node.joined for node in cluster.nodes)

    def missing(self) -> Iterator[tuple[str, str, Any]]:
        """(topic, channel, message) that should have come and did not."""
        cluster = self.cluster
        keys: dict[str, list[Key]] = {}
        for name, key, _ in cluster.named_metas():
            keys.setdefault(name, []).append(key)
        for topic, mine in keys.items():
            for channel in cluster.channels_of(topic):
                for stored in cluster.oracle.ledger.missing(cluster.history, topic, channel, mine):
                    lost = (stored.key, stored.log_id) in cluster.lost
                    if not lost and not died_unseen(cluster, topic, channel, stored):
                        yield topic, channel, stored

    def drained(self) -> bool:
        return next(self.missing(), None) is None

    def holders(self, key: Key) -> list[tuple[SimNode, Any, Any, int]]:
        """(node, log, state, committed) of every replica."""
        found: list[tuple[SimNode, Any, Any, int]] = []
        for node in self.cluster.nodes:
            replicas = node.replicas
            if replicas is None:
                continue
            if (leadership := replicas.leading.get(key)) is not None:
                partition = leadership.partition
                found.append((node, partition.log, partition.cursors.state, leadership.committed))
            elif (follower := replicas.followers.get(key)) is not None:
                found.append((node, follower.log, follower.applier.state, follower.applier.committed))
        return found

    def level(self) -> bool:
        for key, meta in self.cluster.metas():
            holders = self.holders(key)
            if len(holders) != len(meta.replicas) or any(state is None for _, _, state, _ in holders):
                return False
            if len({(log.end.log_id, state.applied.log_id, committed) for _, log, state, committed in holders}) != 1:
                return False
            if any(committed != log.end.log_id for _, log, _, committed in holders):
                return False
        return True

    def damage(self) -> Iterator[str]:
        """Flipped bits that are still there."""
        for node, path, at, byte in self.cluster.flips:
            inode = node.storage._names.get(path)
            if inode is not None and len(inode.now) > at and inode.now[at] != byte and self._used(node, path):
                yield f"{node.name}: byte {at} of {path} is {inode.now[at]:#x} and was {byte:#x}"

    def lost(self) -> Iterator[str]:
        """Batches that were damaged everywhere, and that replicas do not have the same of."""
        for key, log_id in self.cluster.lost:
            holders = self.holders(key)
            if any(log_id < log.start.log_id for _, log, _, _ in holders):
                continue  # retention has gone past it somewhere; who still has it finds nobody who could say more
            copies: set[object] = set()
            told = []
            for node, log, _, _ in holders:
                try:
                    copies.add(copy := self._copy(key, log, log_id))
                    told.append(f"{node.name}: {copy[0] if copy[0] == 'given up' else 'whole'}")
                except LogCorrupt as error:
                    copies |= {node.name, "damaged"}
                    told.append(f"{node.name}: {error}")
            if len(copies) > 1:
                yield f"batch {log_id} of {self.cluster.name_of(key)}: {', '.join(told)}"

    def _copy(self, key: Key, log: Any, log_id: int) -> tuple[object, ...]:
        """What a replica has of a batch; of one that was given up only its place may be known."""
        entry = log.entry(log_id)
        if entry.lost and (key, log_id) in self.cluster.lost:
            return "given up", entry.first_offset, entry.end_offset, entry.position, entry.end_position
        if (key, log_id) in self.cluster.lost:
            entry = entry._replace(durable=0)  # one that was written anew does not know that
        return entry.encode(), bytes(log.events(entry))

    def _used(self, node: SimNode, path: str) -> bool:
        """Whether the file belongs to a replica of the node; one that was set aside does not."""
        folder, _, name = path.rpartition("/")
        return any(
            log.directory == folder and any(pair.path("").rpartition("/")[2] in name for pair in log.files.pairs)
            for key, _ in self.cluster.metas()
            for holder, log, _, _ in self.holders(key)
            if holder is node
        )

    def remains(self) -> Iterator[str]:
        """Files of partitions that a node should not have."""
        wanted = {(uid, key) for key, meta in self.cluster.metas() for uid in meta.replicas}
        for name, key in self.cluster.oracle.ledger.lives():
            for node in self.cluster.nodes:
                folder = f"/{name}-{key[0]:016x}/{key[1]}/"
                if (node.uid, key) not in wanted:
                    for path in node.storage.contents():
                        if folder in path:
                            yield f"{node.name} has {path}"

    # ---- what holds at any time

    def states(self) -> None:
        """Each replica's channel state is what its own log says, up to the batch that is applied. Violation."""
        for name, key, _ in self.cluster.named_metas():
            for node, log, state, _ in self.holders(key):
                if state is not None and (differ := states.differences(log, states.Applied.of(state))):
                    raise Violation(f"{node.name} {name}: the channel state (first) is not of its log: {differ}")

    # ---- what is compared then

    def check(self) -> None:
        """Everything that was acknowledged is everywhere, and all replicas are equal. Violation."""
        cluster = self.cluster
        self.states()
        for name, key, _ in cluster.named_metas():
            self._check_equal(f"{name}/{key[1]}", key, self.holders(key))
        for problem in cluster.oracle.ledger.wrong_outcomes(cluster.history):
            raise Violation(problem)
        for (topic, _), came in cluster.history.delivered.items():
            for body in came:
                if cluster.history.attempts.get(body) != topic:
                    raise Violation(f"{body[:40]!r} was delivered and never sent")

    def _check_equal(self, name: str, key: Key, holders: list[tuple[SimNode, Any, Any, int]]) -> None:
        digests = {node.name: digest(state).hex() for node, _, state, _ in holders}
        if len(set(digests.values())) != 1:
            raise Violation(f"{name}: channel states differ: {digests}")
        first = max(log.start.log_id for _, log, _, _ in holders)
        for log_id in range(first, holders[0][1].end.log_id):
            copies: set[object] = set()
            for _, log, _, _ in holders:
                entry = log.entry(log_id)
                copies.add(self._copy(key, log, log_id))
                if entry.lost and (key, log_id) not in self.cluster.lost:
                    raise Violation(f"{name}: batch {log_id} was given up, and some node had it")
            if len(copies) != 1:
                raise Violation(f"{name}: batch {log_id} differs between replicas")

    # ---- for people

    def state(self) -> str:
        """In one line per partition."""
        cluster, lines = self.cluster, []
        for name, key, meta in cluster.named_metas():
            lines.append(
                f"\n  {name}/{key[1]}: epoch {meta.epoch} leader {cluster.name(meta.leader)} "
                f"isr {sorted(map(cluster.name, meta.isr))} of {list(map(cluster.name, meta.replicas))}, "
                f"min {meta.min_isr}, successor {meta.successor}"
            )
            for node, log, state, committed in self.holders(key):
                assert node.replicas is not None
                role = "leads" if key in node.replicas.leading else "follows"
                follower = node.replicas.followers.get(key)
                extra = "" if follower is None else f" behind={follower.behind} stopped={follower.stopped}"
                applied = None if state is None else state.applied.log_id
                uid = meta.isr.get(node.uid, 0)
                lines.append(
                    f"\n    {node.name} {role} promise {node.replicas.service.promised(key)} [{log.start.log_id}, "
                    f"{log.end.log_id}) durable {log.local_durable} committed {committed} applied {applied}"
                    f"{extra} log_uid in ISR {uid:016x} up={node.up} joined={node.joined} frozen={node.frozen}"
                )
        lines += [
            f"\n  missing in {topic}:{channel}: {stored.body[:20]!r}, partition {stored.key[1]}, offset {stored.offset}"
            for topic, channel, stored in islice(self.missing(), 5)
        ]
        lines += [f"\n  {n.name} up={n.up} joined={n.joined} {n.refused}" for n in cluster.nodes if not n.joined]
        lines += [f"\n  intent {name} {intent.record}" for name, intent in cluster.metadata.store.intents.all().items()]
        return "".join(lines)
