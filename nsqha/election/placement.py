"""Which nodes have replicas of a partition, and what to change when there are better ones. Plans only.

    place      chooses replicas for partitions that have none
    fill       completes one list of replicas: a new partition, a dead replica, more replicas than before
    balance    moves leaders back to the first replica of each list, a few at a time
    spread     changes lists of replicas to balance the load of the nodes

Rules, in this order: never two replicas on one host; as many zones as possible; the node with the fewest replicas (for
the first place: the fewest first places); for the second place, the node that would take over least from the first; the
lowest uid, so that the same input has the same answer everywhere. A node without a `host` label counts as a host of its
own. With fewer hosts than wanted replicas the list is shorter; it grows when hosts are added.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, TopicSettings, Versioned

DEFAULT_REPLICAS = 3
DAY_MINUTES = 24 * 60
ALWAYS = "always"  # instead of hours of the day
_HOURS = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)", re.ASCII)


class PartitionName(NamedTuple):
    """One partition of one life of a topic."""

    topic: str
    uid: int  # the topic's
    number: int


def metas_of(topics: Mapping[str, TopicRecord]) -> dict[PartitionName, PartitionMeta]:
    """All partitions of these topics, in order."""
    return {
        PartitionName(name, topic.uid, number): meta
        for name, topic in sorted(topics.items())
        for number, meta in sorted(topic.partitions.items())
    }


class Transfer(NamedTuple):
    """A change of leadership from one replica to another."""

    name: PartitionName
    source: int
    target: int


class Move(NamedTuple):
    """The replicas that a partition will have in the end."""

    name: PartitionName
    replicas: tuple[int, ...]


@dataclass
class Load:
    """The replicas of each node; plans count what they add."""

    replicas: Counter[int] = field(default_factory=Counter)
    first: Counter[int] = field(default_factory=Counter)  # lists that begin with the node
    # ... and their second places: when a node dies, not all its leaderships should go to a single other node.
    heirs: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> Load:
        load = cls()
        for replicas in lists:
            load.add(replicas)
        return load

    def add(self, replicas: Sequence[int]) -> None:
        self.replicas.update(replicas)
        self.first.update(replicas[:1])
        self.heirs[tuple(replicas[:2])] += 1

    def remove(self, replicas: Sequence[int]) -> None:
        self.replicas.subtract(replicas)
        self.first.subtract(replicas[:1])
        self.heirs[tuple(replicas[:2])] -= 1


class CountedLoad:
    """The load of the topics that there are, counted again only where they changed."""

    def __init__(self) -> None:
        self.counted = 0  # topics, each time that one was looked into
        self._load = Load()
        self._topics: dict[str, Versioned[TopicRecord]] = {}

    def of(self, topics: Mapping[str, Versioned[TopicRecord]]) -> Load:
        """The load of these; the caller's own."""
        known = self._topics
        for name in known.keys() - topics.keys():
            self._remove(known.pop(name))
        for name in [name for name, topic in topics.items() if known.get(name) is not topic]:
            if name in known:
                self._remove(known[name])
            known[name] = topic = topics[name]
            for meta in topic.record.partitions.values():
                self._load.add(meta.replicas)
            self.counted += 1
        load = self._load
        return Load(load.replicas.copy(), load.first.copy(), load.heirs.copy())

    def _remove(self, topic: Versioned[TopicRecord]) -> None:
        for meta in topic.record.partitions.values():
            self._load.remove(meta.replicas)


def host_of(node: NodeInfo) -> str:
    return node.host or f"node:{node.node_uid:016x}"


def able(nodes: Mapping[int, NodeInfo], emptied: Iterable[int] = ()) -> dict[int, NodeInfo]:
    """The nodes that may get replicas: those that stay, and have joined."""
    return {u: node for u, node in staying(nodes, emptied).items() if not node.joining}


def staying(nodes: Mapping[int, NodeInfo], emptied: Iterable[int] = ()) -> dict[int, NodeInfo]:
    """The nodes that may lead what they hold: not those with a closed disk, shutting down, or being emptied."""
    out = set(emptied)
    return {u: node for u, node in nodes.items() if not node.poisoned and not node.leaving and u not in out}


def replicas_wanted(settings: TopicSettings, nodes: Mapping[int, NodeInfo]) -> int:
    """The number of replicas that the topic requires, else three, or fewer if there are fewer hosts."""
    return settings.replicas or max(1, min(DEFAULT_REPLICAS, len({host_of(node) for node in nodes.values()})))


def refuse_too_many_replicas(
    settings: TopicSettings, topics: Mapping[str, Versioned[TopicRecord]], nodes: Iterable[int]
) -> None:
    """ValueError: more replicas are asked for by number than there are nodes. Nodes that are away for a while count:
    those that have replicas."""
    if settings.replicas is None:
        return
    holders = (meta.replicas for topic in topics.values() for meta in topic.record.partitions.values())
    known = set(nodes).union(*holders)
    if settings.replicas > len(known):
        raise ValueError(
            f"replicas is {settings.replicas}, and the cluster has {len(known)} nodes: a topic has at most one "
            "replica on each; start more nodes first, or ask for fewer"
        )


def replicas_due(meta: PartitionMeta, settings: TopicSettings, nodes: Mapping[int, NodeInfo]) -> int:
    """The same for a partition that has some: without a setting it keeps up to three, also when hosts are lost."""
    return settings.replicas or max(replicas_wanted(settings, nodes), min(len(meta.replicas), DEFAULT_REPLICAS))


def min_isr_of(settings: TopicSettings, replicas: int) -> int:
    """The topic's min_isr, else a majority."""
    return min(settings.min_isr or replicas // 2 + 1, max(replicas, settings.replicas or 0, 1))


def place(
    partitions: Iterable[int], replicas: int, nodes: Mapping[int, NodeInfo], load: Load, *, prefer: int = 0
) -> dict[int, tuple[int, ...]]:
    """A list of replicas for each partition; `load` counts them. `prefer`: the node that comes first in each list."""
    placed = {}
    for number in partitions:
        keep = (prefer,) if prefer in nodes else ()
        placed[number] = fill(keep, replicas, nodes, load)
        load.add(placed[number])
    return placed


def fill(keep: Sequence[int], count: int, nodes: Mapping[int, NodeInfo], load: Load) -> tuple[int, ...]:
    """`keep` and more of `nodes`, up to `count` in all if there are enough. `load` is only read."""
    chosen = list(keep)
    hosts = {host_of(nodes[uid]) for uid in keep if uid in nodes}
    zones = Counter(nodes[uid].zone for uid in keep if uid in nodes)
    while len(chosen) < count:
        free = [u for u, node in nodes.items() if u not in chosen and host_of(node) not in hosts]
        if not free:
            break
        uid = min(free, key=lambda u: _rank(nodes[u], zones, load, chosen))
        chosen.append(uid)
        hosts.add(host_of(nodes[uid]))
        zones[nodes[uid].zone] += 1
    return tuple(chosen)


def _rank(node: NodeInfo, zones: Counter[str], load: Load, chosen: Sequence[int]) -> tuple[int, int, int, int, int]:
    uid = node.node_uid
    first = load.first[uid] if not chosen else 0
    heir = load.heirs[chosen[0], uid] if len(chosen) == 1 else 0
    return zones[node.zone], first, load.replicas[uid], heir, uid


def balance(
    partitions: Mapping[PartitionName, PartitionMeta], nodes: Mapping[int, NodeInfo], limit: int
) -> list[Transfer]:
    """The next leaderships to move back to the first replica of their list, those of the most loaded nodes first.

    Only to members of the ISR on `nodes`, which may lead. Empty: nothing has to be done."""
    leaders = Counter(meta.leader for meta in partitions.values() if meta.leader)
    possible = [
        Transfer(name, meta.leader, meta.replicas[0])
        for name, meta in partitions.items()
        if meta.leader and meta.replicas and meta.leader != meta.replicas[0] and not meta.successor
        if meta.replicas[0] in meta.isr and meta.replicas[0] in nodes
    ]
    chosen: list[Transfer] = []
    while possible and len(chosen) < limit:
        best = min(possible, key=lambda t: (leaders[t.target] - leaders[t.source], t.name))
        possible.remove(best)
        chosen.append(best)
        leaders[best.source] -= 1
        leaders[best.target] += 1
    return chosen


@dataclass(frozen=True, slots=True)
class Hours:
    """Hours of the day in which the controller may move leaderships by itself, in UTC, so that all lookup daemons mean
    the same moment: minutes [first, end), past midnight if the end is the smaller one."""

    first: int
    end: int

    @classmethod
    def of(cls, text: str) -> Hours:
        """Parse HH:MM-HH:MM. ValueError says what is wrong."""
        found = _HOURS.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not HH:MM-HH:MM, in UTC, as 01:00-05:00")
        numbers = [int(digits) for digits in found.groups()]
        first, end = numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]
        if numbers[1] > 59 or numbers[3] > 59 or first >= DAY_MINUTES or end > DAY_MINUTES:
            raise ValueError(f"{text!r}: there is no such time of the day; it goes from 00:00 to 24:00")
        if first == end:
            raise ValueError(f"{text!r} is no time at all; for the whole day say {ALWAYS}")
        return cls(first, end)

    def has(self, wall_s: float) -> bool:
        """True if this moment, in seconds since 1970, is within them."""
        minute = wall_s / 60 % DAY_MINUTES
        if self.first < self.end:
            return self.first <= minute < self.end
        return minute >= self.first or minute < self.end

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.first, self.end))


def spread(partitions: Mapping[PartitionName, PartitionMeta], nodes: Mapping[int, NodeInfo], limit: int) -> list[Move]:
    """The next moves that bring the counts of replicas, then of first places, within one of each other."""
    lists = {name: meta.replicas for name, meta in partitions.items() if meta.replicas}
    load = Load.of(lists.values())
    moves: dict[PartitionName, Move] = {}
    while nodes and len(moves) < limit:
        found = _lighter(lists, nodes, load, moves) or _reordered(lists, nodes, load, moves)
        if found is None:
            break
        load.remove(lists[found.name])
        load.add(found.replicas)
        lists[found.name] = found.replicas
        moves[found.name] = found
    return list(moves.values())


def _lighter(
    lists: Mapping[PartitionName, tuple[int, ...]],
    nodes: Mapping[int, NodeInfo],
    load: Load,
    taken: Mapping[PartitionName, Move],
) -> Move | None:
    """Move one replica from a node to one that has at least two fewer, if zones and hosts allow."""
    for source in sorted(nodes, key=lambda u: (-load.replicas[u], u)):
        for target in sorted(nodes, key=lambda u: (load.replicas[u], u)):
            if load.replicas[source] - load.replicas[target] < 2:
                break
            for name in sorted(lists):
                replicas = lists[name]
                if name in taken or source not in replicas or target in replicas:
                    continue
                new = tuple(target if uid == source else uid for uid in replicas)
                if fits(new, nodes) and _zones(new, nodes) >= _zones(replicas, nodes):
                    return Move(name, new)
    return None


def _reordered(
    lists: Mapping[PartitionName, tuple[int, ...]],
    nodes: Mapping[int, NodeInfo],
    load: Load,
    taken: Mapping[PartitionName, Move],
) -> Move | None:
    """The same replicas with another one first."""
    for name in sorted(lists, key=lambda n: (-load.first[lists[n][0]], n)):
        replicas = lists[name]
        others = [uid for uid in replicas[1:] if uid in nodes]
        if name in taken or not others:
            continue
        target = min(others, key=lambda u: (load.first[u], u))
        if load.first[replicas[0]] - load.first[target] >= 2:
            return Move(name, (target, *(uid for uid in replicas if uid != target)))
    return None


def fits(replicas: Sequence[int], nodes: Mapping[int, NodeInfo]) -> bool:
    """Whether no two of the replicas are on one host."""
    hosts = [host_of(nodes[uid]) for uid in replicas if uid in nodes]
    return len(set(hosts)) == len(hosts)


def _zones(replicas: Sequence[int], nodes: Mapping[int, NodeInfo]) -> int:
    return len({nodes[uid].zone for uid in replicas if uid in nodes})
