"""The output of `nsqha cluster status`, `nodes` and `topics`, made from one `Picture`, and its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsqha.cli.cluster.access import Picture
from nsqha.cli.cluster.rebuilding import by_node, line_of, line_of_node
from nsqha.cli.terminal.screen import show_count, some, table
from nsqha.election.health import BELOW, LEADERLESS, OK, STALLED, UNDER, owed, progress, state_of, stays
from nsqha.election.model import NodeInfo, PartitionMeta
from nsqha.election.moves import without
from nsqha.election.placement import Load, PartitionName, fill, replicas_due
from nsqha.ids import is_ephemeral

WAITS_SECONDS = 0.2  # a leader whose oldest batch waits for longer is looked at again
SLOW_SECONDS = 1.0  # ... and is named if it still waits for longer than this

PROBLEMS = (
    ("leaderless", "without a leader"),
    ("below_min_isr", "below min_isr"),
    ("stalled", "acknowledging nothing"),
    ("under_replicated", "under-replicated"),
)
"""Lists of partitions in `status`, and what they are called; the worst first."""


def status(picture: Picture, rebuilding: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """One page about the cluster; None is what only etcd knows while it is away. `rebuilding`: as
    `rebuilding.measured` found it."""
    metas, known = picture.metas, not picture.stale
    states: dict[str, list[str]] = {UNDER: [], BELOW: [], LEADERLESS: [], STALLED: []}
    without_node: dict[str, int] = {}
    slow, unasked, reasons = dict[str, float](), list[str](), dict[str, str]()
    for name, meta in metas.items():
        states.setdefault(state(name, meta, picture), []).append(place(name))
        if missing := unplaced(name, picture):
            without_node[place(name)] = missing
        if why := not_led(name, meta, picture):
            reasons[place(name)] = why
        said = picture.observed.of(name, meta)
        if said is None and meta.leader in picture.nodes:
            unasked.append(place(name))
        elif said is not None and said.leads and said.waits_s >= SLOW_SECONDS:
            slow[place(name)] = round(said.waits_s, 1)
    controller, intents = picture.controller, picture.intents
    return {
        "cluster": picture.cluster_name,
        "cluster_id": f"{picture.cluster_id:016x}",
        "revision": picture.revision,
        "controller": {"name": controller.name, "epoch": controller.epoch} if controller else None,
        "nodes": sorted(picture.names(picture.nodes)),
        "away": sorted(picture.names(picture.missed)),
        "unfit": {picture.name(uid): why for uid in picture.nodes if (why := unfit(uid, picture))},
        "silent": {picture.name(uid): why for uid, why in sorted(picture.observed.silent.items())},
        "partitions": len(metas),
        "leaderless": states[LEADERLESS],
        "below_min_isr": states[BELOW],
        "stalled": states[STALLED],
        "under_replicated": states[UNDER],
        "not_led": reasons,
        "slow": slow,
        "unasked": unasked,
        "owed": without_node if known else None,
        "replacements": (
            [replacement(uid, by, picture) for uid, by in sorted(picture.replaced.items())] if known else None
        ),
        "rebuilding": list(rebuilding),
        "moves": [move(name, wanted, picture) for name, wanted in sorted(intents.moves.items())] if known else None,
        "decommissions": [decommission(uid, picture) for uid in sorted(intents.decommissions)] if known else None,
        "balance_paused": intents.balance_paused if known else None,
        "balance_window": str(intents.balance_window) if known and intents.balance_window is not None else None,
        "doubt": picture.doubt,
        "stale": picture.stale,
        "unreadable": list(picture.unreadable),
        "healthy": not (
            controller is None
            or picture.doubt
            or picture.unreadable
            or states[LEADERLESS]
            or states[BELOW]
            or states[STALLED]
        ),
    }


def state(name: PartitionName, meta: PartitionMeta, picture: Picture) -> str:
    """The state of a partition, by its record and by what its leader says."""
    return state_of(meta, picture.nodes, picture.observed.of(name, meta))


def not_led(name: PartitionName, meta: PartitionMeta, picture: Picture) -> str:
    """Why a node that runs does not lead a partition, though the record names it; empty: it does, or nothing is
    known."""
    said = picture.observed.of(name, meta)
    if said is None or said.leads or meta.leader not in picture.nodes:
        return ""
    return f"{picture.name(meta.leader)} is the leader in the record and does not lead: {said.why}"


def place(name: PartitionName) -> str:
    return f"{name.topic}/{name.number}"


def unplaced(name: PartitionName, picture: Picture) -> int:
    """How many wanted replicas of a partition have no node. An #ephemeral topic has only the one of its node."""
    if is_ephemeral(name.topic):
        return 0
    return owed(picture.metas[name], picture.settings(name), picture.able)


def move(name: PartitionName, wanted: Sequence[int], picture: Picture) -> dict[str, Any]:
    """A change of replicas that is under way."""
    meta = picture.metas.get(name)
    return {
        "topic": name.topic,
        "partition": name.number,
        "replicas": picture.names(meta.replicas if meta else ()),
        "wanted": picture.names(wanted),
        "joining": picture.names(uid for uid in wanted if meta is None or uid not in meta.isr),
    }


def replacement(uid: int, by: int, picture: Picture) -> dict[str, Any]:
    """The progress of filling a node that has the name of one that is away."""
    metas = picture.metas.values()
    return {
        "uid": f"{uid:016x}",
        "by": picture.name(by),
        "left": sum(uid in meta.replicas for meta in metas),
        "rebuilt": sum(by in meta.isr for meta in metas),
    }


def decommission(uid: int, picture: Picture) -> dict[str, Any]:
    """The progress of emptying a node. It does not wait for an #ephemeral topic, which ends with its node anyway."""
    lasting = {name: meta for name, meta in picture.metas.items() if not is_ephemeral(name.topic)}
    return {
        "node": picture.name(uid),
        **progress(uid, lasting, picture.intents.moves),
        "stuck": {place(name): why for name, why in stuck(uid, picture).items()},
    }


def stuck(uid: int, picture: Picture) -> dict[PartitionName, str]:
    """The partitions that cannot be moved off a node now, and why."""
    leaving = {name for name, wanted in picture.intents.moves.items() if uid not in wanted}
    metas = {n: meta for n, meta in picture.metas.items() if n not in leaving and not is_ephemeral(n.topic)}
    settings = {name: picture.settings(name) for name in metas}
    able = {node: info for node, info in picture.able.items() if node != uid}
    return stays(uid, metas, settings, picture.nodes, able)


def forgetting(uid: int, picture: Picture) -> dict[str, list[str]]:
    """What becomes of the replicas of a node that is away when it is forgotten, by the rules of the planner."""
    able = {node: info for node, info in picture.able.items() if node != uid}
    found: dict[str, list[str]] = {"only": [], "rebuilt": [], "dropped": [], "waiting": []}
    for name, meta in picture.metas.items():
        if uid not in meta.replicas or is_ephemeral(name.topic):
            continue
        keep = [replica for replica in meta.replicas if replica != uid]
        due = min(len(meta.replicas), replicas_due(meta, picture.settings(name), able))
        if not any(member in picture.nodes for member in meta.isr):
            kind = "only"
        elif len(fill(keep, due, able, Load())) >= due:
            kind = "rebuilt"
        else:
            kind = "dropped" if without(meta, [uid], picture.nodes) else "waiting"
        found[kind].append(place(name))
    return found


def print_status(shown: dict[str, Any], source: str) -> None:
    controller = shown["controller"]
    print(f"cluster     {shown['cluster']} ({shown['cluster_id']}), {source}, revision {shown['revision']:,}")
    who = f"{controller['name']}, epoch {controller['epoch']}" if controller else f"none: {no_controller(shown)}"
    print(f"controller  {who}")
    away = f"; away: {', '.join(shown['away'])}" if shown["away"] else ""
    print(f"nodes       {len(shown['nodes'])} alive: {', '.join(shown['nodes']) or 'none'}{away}")
    for name, why in shown["unfit"].items():
        print(f"            {name}: {why}")
    for name, why in shown["silent"].items():
        print(f"            {name} does not answer: {why}")
    if shown["doubt"]:
        print(f"metadata    not trusted: {shown['doubt']}")
    for why in shown["unreadable"]:
        print(f"unreadable  {why}")
    print(f"partitions  {shown['partitions']:,}{_troubles(shown)}")
    for found in shown["replacements"] or ():
        left = f"{show_count(found['left'], 'replica')} left, {show_count(found['rebuilt'], 'replica')} in sync"
        print(f"replacing   {found['uid']} by {found['by']}: {left}")
    for found in shown["rebuilding"] or ():
        print(f"rebuilding  {found['topic']}/{found['partition']} on {found['node']}: {line_of(found)}")
    for found in shown["moves"] or ():
        joining = f", joining: {', '.join(found['joining'])}" if found["joining"] else ""
        print(f"moving      {found['topic']}/{found['partition']} to {', '.join(found['wanted'])}{joining}")
    for found in shown["decommissions"] or ():
        left = f"{show_count(found['replicas'], 'replica')}, {show_count(found['leaderships'], 'leadership')} left"
        print(f"emptying    {found['node']}: {left if found['replicas'] else 'empty, it can be stopped for good'}")
        for line in stuck_lines(found["stuck"]):
            print(f"            cannot be moved: {line}")
    if shown["balance_paused"]:
        print("balance     paused: leaderships stay where they are")
    elif shown["balance_window"]:
        print(f"balance     leaderships go back within {shown['balance_window']} UTC only")


def no_controller(shown: Mapping[str, Any]) -> str:
    """Why there is no controller, or the remedy. Lookup daemons elect none with metadata that nodes do not trust."""
    if shown["doubt"] and not shown["stale"]:
        return "lookup daemons elect none before the metadata are accepted"
    return "start nsqha lookupd"


def stuck_lines(stuck: Mapping[str, str]) -> list[str]:
    """`orders/0, orders/1: why`, one line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for where, why in stuck.items():
        by_reason.setdefault(why, []).append(where)
    return [f"{some(places)}: {why}" for why, places in by_reason.items()]


def slow_ones(slow: Mapping[str, float]) -> list[str]:
    """`orders/0 (for 2.5 s)`, those that wait longest first."""
    return [f"{where} (for {seconds:g} s)" for where, seconds in sorted(slow.items(), key=lambda one: -one[1])]


def _troubles(shown: dict[str, Any]) -> str:
    texts = []
    for key, what in PROBLEMS:
        places = shown[key]
        if places:
            texts.append(f"\n            {len(places):,} {what}: {some(places)}")
    texts += [f"\n            {line}" for line in stuck_lines(shown["not_led"])]
    if shown["slow"]:
        texts.append(f"\n            {len(shown['slow']):,} where publishes wait: {some(slow_ones(shown['slow']))}")
    if shown["unasked"]:
        what = "whose leader does not answer, so that it is not known whether it serves"
        texts.append(f"\n            {len(shown['unasked']):,} {what}: {some(shown['unasked'])}")
    text = "".join(texts) or ", all in sync on every replica"
    if shown["owed"]:
        missing = [f"{where} ({count})" for where, count in shown["owed"].items()]
        text += f"\n            {len(missing):,} with replicas that have no node: {some(missing)}"
    return text


def nodes(picture: Picture, rebuilding: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """The nodes that are alive, and those that records still name."""
    rows, filled = [], by_node(rebuilding)
    for uid in [*sorted(picture.nodes, key=picture.name), *picture.away]:
        node = picture.nodes.get(uid) or NodeInfo(uid)
        held = progress(uid, picture.metas, picture.intents.moves)
        rows.append(
            {
                "name": picture.name(uid),
                "uid": f"{uid:016x}",
                "state": node_state(uid, picture),
                "tcp": node.tcp_address,
                "http": node.http_address,
                "grpc": node.grpc_address,
                "peer": node.peer_address,
                "segments": node.segments_address,
                "host": node.host,
                "zone": node.zone,
                "version": node.build,
                "nsqd_version": node.version,
                "peer_levels": f"{node.peer_level_oldest}-{node.peer_level}" if node.build else "",
                "replicas": held["replicas"],
                "leaderships": held["leaderships"],
                "rebuilding": filled.get(picture.name(uid)),
            }
        )
    return rows


def node_state(uid: int, picture: Picture) -> str:
    node = picture.nodes.get(uid)
    if node is None:
        if uid in picture.replaced:
            return f"away, replaced by {picture.replaced[uid]:016x}"
        if uid not in picture.missed:
            return "away, decommissioned"
        return "away, forgotten" if uid in picture.intents.forgotten else "away"
    if why := unfit(uid, picture):
        return why
    return "decommissioned" if uid in picture.intents.decommissions else OK


def unfit(uid: int, picture: Picture) -> str:
    """What makes a node that is alive unfit, as it announced itself; empty: nothing."""
    node = picture.nodes[uid]
    if node.poisoned:
        return f"poisoned: {node.poisoned}"
    reasons = [node.declines and f"declines to lead: {node.declines}", node.trouble]
    if node.leaving:
        reasons.insert(0, f"leaving: {node.leaving_why}" if node.leaving_why else "leaving")
    if node.joining:
        reasons.insert(0, f"joining: {node.joining}")
    return "; ".join(filter(None, reasons))


def print_nodes(rows: Sequence[dict[str, Any]]) -> None:
    addresses = ("tcp", "grpc", "peer", "segments")
    keys = ("name", "uid", "state", *addresses, "host", "zone", "version", "replicas", "leaderships")
    table([key.upper() for key in keys], [[row[key] for key in keys] for row in rows])
    for row in rows:
        if row["rebuilding"] is not None:
            print(f"{row['name']}: {line_of_node(row['rebuilding'])}")


def partitions(picture: Picture, topic: str | None = None) -> list[dict[str, Any]]:
    """All partitions, or those of one topic."""
    return [
        {
            "topic": name.topic,
            "partition": name.number,
            "uid": f"{name.uid:016x}",
            "state": state(name, meta, picture),
            "why": not_led(name, meta, picture),
            "leader": picture.name(meta.leader) if meta.leader else "",
            "successor": picture.name(meta.successor) if meta.successor else "",
            "epoch": meta.epoch,
            "isr": picture.names(uid for uid in meta.replicas if uid in meta.isr),
            "replicas": picture.names(meta.replicas),
            "owed": unplaced(name, picture),
            "min_isr": meta.min_isr,
            "sync": meta.sync or picture.settings(name).sync or "",
        }
        for name, meta in picture.metas.items()
        if topic in (None, name.topic)
    ]


def print_partitions(rows: Sequence[dict[str, Any]]) -> None:
    table(
        ("PARTITION", "STATE", "LEADER", "EPOCH", "IN SYNC", "REPLICAS", "MIN_ISR"),
        [
            (
                f"{row['topic']}/{row['partition']}",
                row["state"],
                row["leader"],
                row["epoch"],
                ", ".join(row["isr"]),
                ", ".join(row["replicas"]) + (f" and {row['owed']} more" if row["owed"] else ""),
                row["min_isr"],
            )
            for row in rows
        ],
    )
    for row in rows:
        if row["why"]:
            print(f"{row['topic']}/{row['partition']}: {row['why']}")
