"""Changes of a partition's replicas that take several steps, and the intents that survive the controller's death.

A move is the list of wanted replicas of a partition. In every state the next step follows from the partition's record
alone, so a new controller continues where the old one stopped:

    add the new nodes to `replicas`  ->  they catch up and the leader adds them to the ISR  ->  if the leader must go,
    the leadership is handed to one that stays  ->  `replicas` and ISR become the wanted list  ->  done

Until the last step no old member of the ISR is removed. Intents are JSON objects in the metadata store:

    moves/<topic uid>.<partition>   {"topic": "t", "uid": 7, "partition": 0, "replicas": [1, 2, 3], "why": "operator"}
    decommissions/<node uid>        {"node": 7, "held": {"<topic uid>.<partition>": [7, 1, 2]}}
    forgotten/<node uid>            {"node": 7}
    settings/balance                {"paused": true, "window": "01:00-05:00"}
    names/<node uid>                {"node": 7, "name": "node-7"}
    hidden/<topic uid>.<node uid>   {"uid": 7, "node": 7, "at_ms": 1700000000000}
    recorded/<16 hex digits>        the record of a change, for the audit: nsqha.election.recorded

uids in names are 16 hex digits. A decommission stays until an operator removes it: the node gets no new replicas; it
remembers the replicas of each partition that the node held, so that they can be brought back. A forgotten node is one
that is away and is not waited for; the controller removes that intent when no record names the node any more. A name
is not a request: it is the last name of a node that has replicas, kept for when it is away. A node is hidden for a
topic by a tombstone at a lookup daemon, which removes that intent after HIDDEN_SECONDS: meanwhile a /topic/delete at
that node means that node alone, as nsqadmin sends it after each tombstone.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nsqha.election.model import MOVED_FROM_MAX, NodeInfo, PartitionMeta, TopicSettings, Versioned
from nsqha.election.placement import Hours, Move, PartitionName, fits, min_isr_of

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
    balance_window: Hours | None = None  # when the controller may move leaderships by itself; None: at any hour
    names: Mapping[int, str] = field(default_factory=dict)  # last names of nodes that have replicas
    forgotten: frozenset[int] = frozenset()

    def may_balance(self, wall_s: float) -> bool:
        """True if the controller may move leaderships by itself at this moment, seconds since 1970."""
        return not self.balance_paused and (self.balance_window is None or self.balance_window.has(wall_s))


def read_intents(intents: Mapping[str, Mapping[str, Any]]) -> Intents:
    """Read the intents that this version knows; others, and malformed ones, are ignored."""
    moves: dict[PartitionName, tuple[int, ...]] = {}
    nodes: set[int] = set()
    names: dict[int, str] = {}
    forgotten: set[int] = set()
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
            elif kind == "forgotten":
                forgotten.add(int(intent["node"]))
        except (KeyError, TypeError, ValueError):
            continue
    balance = intents.get(BALANCE, {})
    paused, window = bool(balance.get("paused")), _window(balance)
    return Intents(moves, frozenset(nodes), paused, window, names, frozenset(forgotten))


def _window(balance: Mapping[str, Any]) -> Hours | None:
    try:
        return Hours.of(str(balance["window"]))
    except (KeyError, ValueError):
        return None


def move_name(name: PartitionName) -> str:
    return f"moves/{_place(name)}"


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


def decommission_intent(node: int, metas: Mapping[PartitionName, PartitionMeta]) -> dict[str, Any]:
    """The request, with the replicas of each partition that the node holds now."""
    held = {_place(name): list(meta.replicas) for name, meta in metas.items() if node in meta.replicas}
    return {"node": node, "held": held}


def brought_back(
    node: int,
    intent: Mapping[str, Any],
    metas: Mapping[PartitionName, PartitionMeta],
    wanted: Mapping[PartitionName, tuple[int, ...]],
    nodes: Mapping[int, NodeInfo],
) -> dict[PartitionName, tuple[int, ...]]:
    """The moves that undo a decommission: the node gets its places back from the nodes that stand in for it.

    `wanted`: moves that are under way. A partition that other requests have changed since keeps what they made."""
    held = intent.get("held")
    found = {}
    for name, meta in metas.items():
        before = held.get(_place(name)) if isinstance(held, dict) else None
        now = wanted.get(name, meta.replicas)
        if not isinstance(before, list) or node not in before or node in now or node not in nodes:
            continue
        stand_ins = [uid for uid in now if uid not in before]
        if len(now) == len(before) and len(stand_ins) == 1:
            back = tuple(before)
        elif stand_ins:
            back = tuple(node if uid == stand_ins[-1] else uid for uid in now)
        else:
            back = (*now, node) if len(now) < len(before) else now
        if fits(back, nodes) and back != now:
            found[name] = back
    return found


def successors(away: Iterable[int], nodes: Mapping[int, NodeInfo], names: Mapping[int, str]) -> dict[int, int]:
    """node that is away -> the live node that has its name now, unless several have it."""
    live: dict[str, list[int]] = {}
    for uid, node in nodes.items():
        live.setdefault(node.name, []).append(uid)
    found = {uid: live.get(names.get(uid, ""), []) for uid in away if names.get(uid)}
    return {uid: same[0] for uid, same in found.items() if len(same) == 1}


def without(meta: PartitionMeta, gone: Iterable[int], alive: Container[int]) -> tuple[int, ...]:
    """The replicas without some that are gone; empty if too few are in sync to acknowledge without them."""
    left = tuple(uid for uid in meta.replicas if uid not in set(gone))
    fit = [uid for uid in left if uid in meta.isr and uid in alive]
    return left if len(fit) >= max(meta.min_isr, 1) else ()


def forget_name(node: int) -> str:
    return f"forgotten/{node:016x}"


def _place(name: PartitionName) -> str:
    return f"{name.uid:016x}.{name.number}"


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
