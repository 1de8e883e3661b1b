"""How far replicas are that are made again, or come back: what each lacks of its leader's log, and for how long yet.

The metadata say only who is in sync. The nodes are asked where their logs end, twice, a moment apart: what is left is
divided by how fast it shrinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nsqha.cli.cluster.access import Picture
from nsqha.cli.terminal.screen import show_bytes, show_count
from nsqha.election.observed.answers import Observed
from nsqha.election.placement import PartitionName
from nsqha.ids import PartitionKey

Positions = Mapping[int, Mapping[PartitionKey, int]]
"""Where the logs of each node end, in bytes."""


class ReplicaRebuild(NamedTuple):
    """A replica that is not in sync on a node that is alive, and the leader that fills it."""

    name: PartitionName
    node: int
    leader: int


class Look(NamedTuple):
    """What was found at a time."""

    at: float
    positions: Positions

    def left(self, rebuild: ReplicaRebuild) -> int | None:
        """Bytes that the replica lacks; None: one of the two did not say."""
        key = (rebuild.name.uid, rebuild.name.number)
        leader, own = (self.positions.get(node, {}).get(key) for node in (rebuild.leader, rebuild.node))
        return None if leader is None or own is None else max(leader - own, 0)


def rebuilds(picture: Picture) -> list[ReplicaRebuild]:
    """All that are under way, or should be."""
    return [
        ReplicaRebuild(name, node, meta.leader)
        for name, meta in picture.metas.items()
        for node in meta.replicas
        if node not in meta.isr and node in picture.nodes and meta.leader in picture.nodes
    ]


def measured(found: Iterable[ReplicaRebuild], before: Look, after: Look, picture: Picture) -> list[dict[str, Any]]:
    """One for each; what is not known is None."""
    shown = []
    for rebuild in found:
        was, left = before.left(rebuild), after.left(rebuild)
        rate = None if was is None or left is None else (was - left) / (after.at - before.at)
        shown.append(
            {
                "topic": rebuild.name.topic,
                "partition": rebuild.name.number,
                "node": picture.name(rebuild.node),
                "bytes_left": left,
                "bytes_per_second": None if rate is None else round(rate),
                "seconds_left": _seconds(left, rate),
            }
        )
    return shown


def _seconds(left: int | None, rate: float | None) -> float | None:
    if left == 0:
        return 0.0
    return None if left is None or rate is None or rate <= 0 else round(left / rate, 1)


def look_of(observed: Observed, at: float) -> Look:
    """What the nodes said of their logs."""
    return Look(
        at,
        {
            node: {key: answer.position for key, answer in said.items() if answer.position is not None}
            for node, said in observed.answers.items()
        },
    )


def by_node(shown: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same, summed up by the node's name: it is done when its last one is."""
    found: dict[str, dict[str, Any]] = {}
    for one in shown:
        nothing = {"replicas": 0, "bytes_left": 0, "bytes_per_second": 0, "seconds_left": 0.0}
        node = found.setdefault(one["node"], nothing)
        node["replicas"] += 1
        for key in ("bytes_left", "bytes_per_second"):
            node[key] = None if one[key] is None or node[key] is None else node[key] + one[key]
        known = one["seconds_left"] is not None and node["seconds_left"] is not None
        node["seconds_left"] = max(one["seconds_left"], node["seconds_left"]) if known else None
    return found


def line_of(shown: Mapping[str, Any]) -> str:
    """For people: what is left."""
    if shown["bytes_left"] is None:
        return "not known how much is left"
    text = f"{show_bytes(shown['bytes_left'])} left"
    if not shown["bytes_left"]:
        return f"{text}, about to be in sync"
    if shown["seconds_left"] is None:
        return f"{text}, comes no nearer"
    return f"{text} at {show_bytes(shown['bytes_per_second'])}/s, about {shown['seconds_left']:,.0f} s"


def line_of_node(shown: Mapping[str, Any]) -> str:
    return f"rebuilding {show_count(shown['replicas'], 'replica')}: {line_of(shown)}"
