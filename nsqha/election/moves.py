"""Changes of a partition's replicas that take several steps, and the intents that survive the controller's death.

A move is the list of wanted replicas of a partition. In every state the next step follows from the partition's record
alone, so a new controller continues where the old one stopped:

    add the new nodes to `replicas`  ->  they catch up and the leader adds them to the ISR  ->  if the leader must go,
    the leadership is handed to one that stays  ->  `replicas` and ISR become the wanted list  ->  done

Until the last step no old member of the ISR is removed. Intents are JSON objects in the metadata store:

    moves/<topic uid>.<partition>   {"topic": "t", "uid": 7, "partition": 0, "replicas": [1, 2, 3], "why": "operator"}
    decommissions/<node uid>        {"node": 7}
    settings/balance                {"paused": true}
    names/<node uid>                {"node": 7, "name": "node-7"}
    hidden/<topic uid>.<node uid>   {"uid": 7, "node": 7, "at_ms": 1700000000000}

uids in names are 16 hex digits. A decommission stays until an operator removes it: the node gets no new replicas. A
name is not a request: it is the last name of a node that has replicas, kept for when it is away. A node is hidden for
a topic by a tombstone at a lookup daemon, which removes that intent after HIDDEN_SECONDS: meanwhile a /topic/delete at
that node means that node alone, as nsqadmin sends it after each tombstone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nsqha.election.model import MOVED_FROM_MAX, PartitionMeta, TopicSettings, Versioned
from nsqha.election.placement import Move, PartitionName, min_isr_of

BALANCE = "settings/balance"
HIDDEN_SECONDS = 60.0
HIDDEN_STALE_SECONDS = 600.0
"""An intent that its lookup daemon did not live to remove counts for so long, by clocks that may differ."""


@dataclass(frozen=True, slots=True)
class Put:
    """Change the partition's record."""

    meta: PartitionMeta
    why: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """Another replica must lead first."""

    candidates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joining:
    """These nodes must catch up and join the ISR first."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The partition has the wanted replicas."""


Step = Put | HandOver | Joining | Done


def next_step(meta: PartitionMeta, wanted: tuple[int, ...], settings: TopicSettings) -> Step:
    """The next step of a move."""
    if new := [uid for uid in wanted if uid not in meta.replicas]:
        return Put(replace(meta, replicas=(*meta.replicas, *new)), "replicas_added")
    if missing := tuple(uid for uid in wanted if uid not in meta.isr):
        return Joining(missing)
    if meta.leader not in wanted:
        return HandOver(wanted)
    isr = {uid: log_uid for uid, log_uid in meta.isr.items() if uid in wanted}
    min_isr = min_isr_of(settings, len(wanted))
    # A node that is down keeps its files until it sees this. If the topic is deleted before, its tombstone says so.
    moved_from = [uid for uid in meta.moved_from if uid not in meta.replicas]
    moved_from = [uid for uid in (*moved_from, *meta.replicas) if uid not in wanted][-MOVED_FROM_MAX:]
    moved = replace(meta, replicas=wanted, isr=isr, min_isr=min(min_isr, len(isr)), moved_from=tuple(moved_from))
    return Done() if moved == meta else Put(moved, "replicas_moved")


@dataclass(frozen=True)
class Intents:
    """The requests of operators and controllers."""

    moves: Mapping[PartitionName, tuple[int, ...]]
    decommissions: frozenset[int]
    balance_paused: bool = False
    names: Mapping[int, str] = field(default_factory=dict)  # last names of nodes that have replicas


def read_intents(intents: Mapping[str, Mapping[str, Any]]) -> Intents:
    """Read the intents that this version knows; others, and malformed ones, are ignored."""
    moves: dict[PartitionName, tuple[int, ...]] = {}
    nodes: set[int] = set()
    names: dict[int, str] = {}
    for name, intent in intents.items():
        kind = name.partition("/")[0]
        try:
            if kind == "moves":
                key = PartitionName(str(intent["topic"]), int(intent["uid"]), int(intent["partition"]))
                moves[key] = tuple(int(uid) for uid in intent["replicas"])
            elif kind == "decommissions":
                nodes.add(int(intent["node"]))
            elif kind == "names":
                names[int(intent["node"])] = str(intent["name"])
        except (KeyError, TypeError, ValueError):
            continue
    return Intents(moves, frozenset(nodes), bool(intents.get(BALANCE, {}).get("paused")), names)


def move_name(name: PartitionName) -> str:
    return f"moves/{name.uid:016x}.{name.number}"


def move_intent(move: Move, why: str) -> dict[str, Any]:
    name, replicas = move
    return {
        "topic": name.topic,
        "uid": name.uid,
        "partition": name.number,
        "replicas": list(replicas),
        "why": why,
    }


def decommission_name(node: int) -> str:
    return f"decommissions/{node:016x}"


def node_name(node: int) -> str:
    return f"names/{node:016x}"


def hidden_name(topic_uid: int, node: int) -> str:
    return f"hidden/{topic_uid:016x}.{node:016x}"


def hidden_intent(topic_uid: int, node: int, wall_ns: int) -> dict[str, Any]:
    return {"uid": topic_uid, "node": node, "at_ms": wall_ns // 10**6}


def is_hidden(intents: Mapping[str, Versioned[Mapping[str, Any]]], topic_uid: int, node: int, wall_ns: int) -> bool:
    """Whether a lookup daemon hid the node for this topic a moment ago."""
    found = intents.get(hidden_name(topic_uid, node))
    at_ms = found.record.get("at_ms") if found is not None else None
    return isinstance(at_ms, int) and abs(wall_ns // 10**6 - at_ms) < HIDDEN_STALE_SECONDS * 1000
