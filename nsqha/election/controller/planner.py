"""The controller's slow work: where replicas go, and which leader moves where, a little at a time.

About every second the planner looks at all metadata and says what to begin or to continue. All of it is throttled,
because it loads the disks and the network of nodes that serve; none of it is urgent, except that a partition which
would stop acknowledging after one more loss gets a new replica sooner.

    no replicas yet                      -> placed
    a move is asked for (intent)         -> its next step
    a node is being emptied (intent)     -> moves off it
    a node is back with an empty disk    -> moves to it of what its predecessor of the same name has, at once
    a node stays away                    -> moves that replace it, after `replace_after_s`, or at once if forgotten
    fewer replicas than the topic wants  -> moves that add some, once the nodes have been the same for `settle_s`
    more replicas than its settings say  -> moves that take some away, likewise
    leader is not the first replica      -> transfer, after `settle_s`

A partition whose leader is being elected gets no more replicas: they could not copy from any leader, and a single
replica, which can be elected without an operator while it is the only one, would then need one.

It also keeps the names of the nodes that have replicas, so that a node that is away can be shown by its name, and so
that its successor is known: an empty disk has another uid, and the node that starts with it has the same name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nsqha.election import moves
from nsqha.election.controller.events import PutIntent, RemoveIntent, Say
from nsqha.election.model import TRIED_SECONDS, NodeInfo, PartitionMeta, TopicSettings
from nsqha.election.placement import (
    Load,
    Move,
    PartitionName,
    Transfer,
    able,
    balance,
    fill,
    host_of,
    min_isr_of,
    place,
    replicas_due,
    replicas_wanted,
    staying,
)


@dataclass(frozen=True)
class PlanLimits:
    """Times in seconds, counts of partitions in the whole cluster."""

    settle_s: float = 10.0  # time since nodes last came or went
    replace_after_s: float = 600.0  # a node that is away for this long does not come back soon
    emergency_after_s: float = 30.0  # the same for a partition with fewer live members than min_isr
    moves_max: int = 4  # under way at once
    replacements_max: int = 16  # the same while the successor of a node is filled: nothing else can do its work
    transfers_max: int = 4  # of leaderships back to their first replica, in one round
    transfers_every_s: float = 2.0

    def replacing_after(self, seconds: float) -> PlanLimits:
        """The same limits with another wait for nodes that are away; 0: they are never replaced."""
        wait = seconds or math.inf
        return replace(
            self, replace_after_s=wait, emergency_after_s=min(self.emergency_after_s, wait) if seconds else wait
        )


@dataclass(frozen=True)
class World:
    """The state of the cluster that plans are made from."""

    metas: Mapping[PartitionName, PartitionMeta]
    settings: Mapping[PartitionName, TopicSettings]
    nodes: Mapping[int, NodeInfo]
    unled: frozenset[PartitionName] = frozenset()  # a leader is being elected
    unreachable: frozenset[int] = frozenset()  # nodes that the controller does not reach now
    holders: frozenset[int] | None = None  # nodes that have replicas, if they were counted
    wall_s: float = 0.0  # the present moment, seconds since 1970
    version: int = 0  # another one if `metas` or `settings` are other ones; 0: not counted

    def replica_nodes(self) -> set[int]:
        """Nodes that have replicas, by the records."""
        if self.holders is not None:
            return set(self.holders)
        return {uid for meta in self.metas.values() for uid in meta.replicas}

    def load(self) -> Load:
        return Load.of(meta.replicas for meta in self.metas.values())


@dataclass
class Steps:
    """The changes to make now."""

    puts: list[NamedPut] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)  # several of one partition: the first that can begin
    intents: list[PutIntent | RemoveIntent | Say] = field(default_factory=list)


@dataclass(frozen=True)
class NamedPut:
    """A partition's record to put by compare-and-set, with a reason for people."""

    name: PartitionName
    meta: PartitionMeta
    why: str


class Planner:
    """Makes plans. It remembers since when nodes are away, and what it has asked for already."""

    def __init__(self, now: float, limits: PlanLimits) -> None:
        self.limits = limits
        self.moves: Mapping[PartitionName, tuple[int, ...]] = {}
        self.decommissions: frozenset[int] = frozenset()
        self._intents = moves.Intents({}, frozenset())
        self._forgotten: frozenset[int] = frozenset()
        self._successors: Mapping[int, int] = {}
        self._names: Mapping[int, str] = {}  # of nodes, as they are kept
        self._versions: dict[str, int] = {}
        self._asked: set[str] = set()  # intents that are being written
        self._away: dict[int, float] = {}
        self._changed = now  # when nodes came or went
        self._known: dict[int, int] = {}  # node -> registration
        self._next_transfers = now + limits.settle_s
        self._ready = False
        self._well: object = None  # what the partitions were when none needed other replicas

    def metadata(
        self, world: World, intents: Mapping[str, Mapping[str, Any]], versions: Mapping[str, int], now: float
    ) -> None:
        """Note that the metadata changed."""
        read = moves.read_intents(intents)
        self.moves, self.decommissions, self._intents = read.moves, read.decommissions, read
        self._names, self._forgotten = read.names, read.forgotten
        self._versions = dict(versions)
        lives = {uid: node.registration for uid, node in world.nodes.items()}
        if lives != self._known:
            self._known, self._changed = lives, now
        named = world.replica_nodes()
        named.update(uid for wanted in self.moves.values() for uid in wanted)
        self._away = {uid: self._away.get(uid, now) for uid in named if uid not in world.nodes}
        self._successors = moves.successors(self._away, world.nodes, read.names)
        self._ready = True

    def intent_done(self, name: str) -> None:
        self._asked.discard(name)

    def avoided(self, nodes: Mapping[int, NodeInfo]) -> frozenset[int]:
        """Nodes that should become leaders only if no other can."""
        unfit = {uid for uid, node in nodes.items() if node.leaving or node.declines or node.poisoned}
        return self.decommissions | unfit

    def nodes_are_tried(self, nodes: Mapping[int, NodeInfo], now: float) -> bool:
        """True while nodes that have just registered may join in a moment: what is placed now would go without them."""
        return now - self._changed < TRIED_SECONDS and any(node.just_registered for node in nodes.values())

    def place(self, names: Iterable[PartitionName], world: World) -> list[NamedPut]:
        """Choose replicas for partitions that have none; those that no node can take now are left out."""
        nodes = able(world.nodes, self.decommissions)
        load = world.load()
        puts = []
        for name in names:
            meta, settings = world.metas[name], world.settings[name]
            (replicas,) = place([name.number], replicas_wanted(settings, nodes), nodes, load).values()
            if replicas:
                min_isr = min_isr_of(settings, settings.replicas or len(replicas))
                puts.append(NamedPut(name, replace(meta, replicas=replicas, min_isr=min_isr), "replicas_placed"))
        return puts

    def plan(self, world: World, now: float) -> Steps:
        """What to begin or to continue."""
        steps = Steps()
        if self._ready:
            self._continue_moves(world, steps)
            self._begin_moves(world, steps, now)
            self._balance(world, steps, now)
            self._keep_names(world, steps)
            self._end_forgetting(world, steps)
        return steps

    def _continue_moves(self, world: World, steps: Steps) -> None:
        for name, wanted in self.moves.items():
            intent = moves.move_name(name)
            meta = world.metas.get(name)
            if meta is None:
                self._remove(intent, steps)
                continue
            match moves.next_step(meta, wanted, world.settings[name]):
                case moves.Put(new, why):
                    steps.puts.append(NamedPut(name, new, why))
                case moves.HandOver(candidates):
                    avoided = self.avoided(world.nodes) | world.unreachable
                    fit = [u for u in candidates if u in meta.isr and u in world.nodes and u not in avoided]
                    # The first that may: one that has lost the lead often waits for its turn, and a move does not.
                    steps.transfers += [Transfer(name, meta.leader, uid) for uid in fit]
                case moves.Done() if self._remove(intent, steps):
                    text = f"{name.topic}:{name.number}: the move is done"
                    steps.intents.append(
                        Say("move_done", text, "info", {"topic": name.topic, "partition": name.number})
                    )

    def _begin_moves(self, world: World, steps: Steps, now: float) -> None:
        room = self.limits.moves_max - len(self.moves)
        replacing = self.limits.replacements_max - len(self.moves)  # room for moves to successors
        nodes = able(world.nodes, self.decommissions | world.unreachable)
        # Most partitions need nothing, and this runs all the time: only the others are examined. A node that went away
        # a moment ago, with thousands of replicas, is nothing to replace yet.
        wait = min(self.limits.emergency_after_s, self.limits.replace_after_s)
        long_away = {uid for uid, since in self._away.items() if uid in self._forgotten or now - since >= wait}
        suspects = self.decommissions | long_away | self._successors.keys()
        default = replicas_wanted(TopicSettings(), nodes)
        given = (world.version, room > 0, replacing > 0, self.moves, suspects, frozenset(self._successors), default)
        if world.version and given == self._well:
            return  # nobody looks at thousands of partitions again, twice a second, of which none has changed
        closer = sorted(
            name
            for name, meta in world.metas.items()
            if meta.leader
            # A move with a new target needs no room.
            and (
                room > 0
                or name in self.moves
                or (replacing > 0 and not self._successors.keys().isdisjoint(meta.replicas))
            )
            and (
                name in self.moves
                or len(meta.replicas) < (world.settings[name].replicas or default)
                or len(meta.replicas) > (world.settings[name].replicas or len(meta.replicas))
                or not suspects.isdisjoint(meta.replicas)
            )
        )
        if not closer:
            self._well = given
            return
        load = world.load()
        for name in closer:
            meta, under_way = world.metas[name], name in self.moves
            found = None
            if under_way or replacing > 0:
                found = self._succeeded(name, meta, world, nodes)
            if found is None and (under_way or room > 0):
                found = self._better(name, meta, world, nodes, load, now)
            if found is not None and self._put(name, *found, steps):
                load.add([uid for uid in found[0] if uid not in meta.replicas])
                room -= not under_way
                replacing -= not under_way

    def _succeeded(
        self, name: PartitionName, meta: PartitionMeta, world: World, nodes: Mapping[int, NodeInfo]
    ) -> tuple[tuple[int, ...], str] | None:
        """The replicas with successors in the places of nodes that are away; None if there are none to put there. As
        in `_better` there has to be a log to copy: a move that waits takes the room of others."""
        replicas = list(self.moves.get(name, meta.replicas))
        if not any(uid in world.nodes for uid in meta.isr):
            return None
        changed = False
        for at, uid in enumerate(replicas):
            successor = self._successors.get(uid, 0)
            if successor in nodes and successor not in replicas:
                hosts = {host_of(nodes[other]) for other in replicas if other in nodes}
                if host_of(nodes[successor]) not in hosts:
                    replicas[at], changed = successor, True
        return (tuple(replicas), "node_replaced") if changed else None

    def _better(
        self,
        name: PartitionName,
        meta: PartitionMeta,
        world: World,
        nodes: Mapping[int, NodeInfo],
        load: Load,
        now: float,
    ) -> tuple[tuple[int, ...], str] | None:
        """Better replicas for a partition, and why; None if it has the right ones, or there are no better ones.

        Without a live member of the ISR there is no log to copy. A move that began then would take the partition away
        from the node that it waited for; and one with a single replica could not be led by that alone any more."""
        if not any(uid in world.nodes for uid in meta.isr):
            return None
        wanted = self.moves.get(name)
        away = {uid for uid in (*meta.replicas, *(wanted or ())) if self._stays_away(uid, meta, world, now)}
        if wanted is not None and not (away | self.decommissions) & set(wanted):
            return None  # a move is under way, to nodes that are alive and are to have replicas
        # Also a node that a move was to bring in: nothing waits for one that has been given up.
        emptied = self.decommissions & {*meta.replicas, *(wanted or ())}
        gone = away | emptied
        settings = world.settings[name]
        settled = now - self._changed >= self.limits.settle_s
        count = replicas_due(meta, settings, nodes)
        keep = [uid for uid in (wanted or meta.replicas) if uid not in gone]
        filled = fill(keep, count, nodes, load)
        if gone and len(filled) >= min(len(wanted or meta.replicas), count):
            return filled, "node_decommissioned" if emptied else "node_away"
        if (
            wanted is None
            and away & self._forgotten
            and (left := moves.without(meta, away & self._forgotten, world.nodes))
        ):
            return left, "node_forgotten"
        if not gone and settled and len(filled) > len(meta.replicas) and name not in world.unled:
            return filled, "more_replicas"
        if not gone and settled and wanted is None and settings.replicas and len(meta.replicas) > settings.replicas:
            return fewer(meta, settings.replicas, nodes)
        return None

    def _stays_away(self, uid: int, meta: PartitionMeta, world: World, now: float) -> bool:
        if uid in world.nodes:
            return False
        if uid in self._forgotten:
            return True
        alive = [member for member in meta.isr if member in world.nodes]
        emergency = len(alive) < meta.min_isr
        limit = self.limits.emergency_after_s if emergency else self.limits.replace_after_s
        return now - self._away.get(uid, now) >= limit

    def _balance(self, world: World, steps: Steps, now: float) -> None:
        if not self._intents.may_balance(world.wall_s):
            return
        if now < self._next_transfers or now - self._changed < self.limits.settle_s:
            return
        self._next_transfers = now + self.limits.transfers_every_s
        under_way = sum(1 for meta in world.metas.values() if meta.successor)
        nodes = staying(world.nodes, self.avoided(world.nodes) | world.unreachable)
        still = {name: meta for name, meta in world.metas.items() if name not in self.moves}
        steps.transfers += balance(still, nodes, self.limits.transfers_max - under_way)

    def _keep_names(self, world: World, steps: Steps) -> None:
        """Store names of nodes that have replicas or are being emptied; forget those of other nodes that are away."""
        named = self.decommissions | world.replica_nodes()
        for uid in sorted(named & world.nodes.keys()):
            name, key = world.nodes[uid].name, moves.node_name(uid)
            if name and name != self._names.get(uid) and key not in self._asked:
                self._asked.add(key)
                steps.intents.append(PutIntent(key, {"node": uid, "name": name}, self._versions.get(key, 0)))
        for uid in sorted(self._names.keys() - named - world.nodes.keys()):
            self._remove(moves.node_name(uid), steps)

    def _end_forgetting(self, world: World, steps: Steps) -> None:
        """End requests to forget a node that no record names any more, or that is back."""
        for uid in sorted(self._forgotten):
            if uid in world.nodes or uid not in self._away:
                self._remove(moves.forget_name(uid), steps)

    def _put(self, name: PartitionName, replicas: tuple[int, ...], why: str, steps: Steps) -> bool:
        intent = moves.move_name(name)
        if intent in self._asked:
            return False
        self._asked.add(intent)
        record = moves.move_intent(Move(name, replicas), why)
        steps.intents.append(PutIntent(intent, record, self._versions.get(intent, 0)))
        text = f"{name.topic}:{name.number}: replicas become {', '.join(f'{uid:016x}' for uid in replicas)} ({why})"
        fields = {"topic": name.topic, "partition": name.number, "why": why}
        steps.intents.append(Say("move_begins", text, "info", fields))
        return True

    def _remove(self, intent: str, steps: Steps) -> bool:
        if intent in self._asked or intent not in self._versions:
            return False
        self._asked.add(intent)
        steps.intents.append(RemoveIntent(intent, self._versions[intent]))
        return True


def fewer(meta: PartitionMeta, count: int, nodes: Mapping[int, NodeInfo]) -> tuple[tuple[int, ...], str] | None:
    """Keep `count` replicas: the leader, and members of the ISR in their order; None while there are too few."""
    fit = [uid for uid in meta.replicas if uid in meta.isr and uid in nodes]
    kept = sorted(fit, key=lambda uid: uid != meta.leader)[:count]
    return (tuple(uid for uid in fit if uid in kept), "fewer_replicas") if len(kept) == count else None
