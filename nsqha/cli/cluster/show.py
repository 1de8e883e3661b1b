"""The output of `nsqha cluster status`, `nodes` and `topics`, made from one `Picture`, and its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsqha.cli.cluster.access import Picture
from nsqha.cli.cluster.rebuilding import by_node, line_of, line_of_node
from nsqha.cli.terminal.screen import show_count, some, table
from nsqha.election.health import BELOW, LEADERLESS, OK, UNDER, owed, progress, state_of, stays
from nsqha.election.model import NodeInfo
from nsqha.election.moves import without
from nsqha.election.placement import Load, PartitionName, fill, replicas_due
from nsqha.ids import is_ephemeral


def status(picture: Picture, doubt: str = "", rebuilding: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """One page about the cluster. `doubt`: why these metadata are not trusted now; empty: they are. `rebuilding`: as
    `rebuilding.progress` found it."""
    metas = picture.metas
    states: dict[str, list[str]] = {UNDER: [], BELOW: [], LEADERLESS: []}
    without_node: dict[str, int] = {}
    for name, meta in metas.items():
        states.setdefault(state_of(meta, picture.nodes), []).append(place(name))
        if missing := unplaced(name, picture):
            without_node[place(name)] = missing
    controller, intents = picture.controller, picture.intents
    return {
        "cluster": picture.cluster_name,
        "cluster_id": f"{picture.cluster_id:016x}",
        "revision": picture.revision,
        "controller": {"name": controller.name, "epoch": controller.epoch} if controller else None,
        "nodes": sorted(picture.names(picture.nodes)),
        "away": sorted(picture.names(picture.missed)),
        "partitions": len(metas),
        "leaderless": states[LEADERLESS],
        "below_min_isr": states[BELOW],
        "under_replicated": states[UNDER],
        "owed": without_node,
        "replacements": [replacement(uid, by, picture) for uid, by in sorted(picture.replaced.items())],
        "rebuilding": list(rebuilding),
        "moves": [move(name, wanted, picture) for name, wanted in sorted(intents.moves.items())],
        "decommissions": [decommission(uid, picture) for uid in sorted(intents.decommissions)],
        "balance_paused": intents.balance_paused,
        "doubt": doubt,
        "unreadable": list(picture.unreadable),
        "healthy": not (controller is None or doubt or picture.unreadable or states[LEADERLESS] or states[BELOW]),
    }


def remembered(cluster_name: str, known: Mapping[str, Any], doubt: str) -> dict[str, Any]:
    """The same page from the answer of a lookup daemon to /controller; None is what only etcd knows."""

    def places(key: str) -> list[str]:
        return [f"{found['topic']}/{found['partition']}" for found in known.get(key, ())]

    return {
        "cluster": cluster_name,
        "cluster_id": None,
        "revision": known.get("revision", 0),
        "controller": known.get("controller"),
        "nodes": sorted(node.get("name") or node["uid"] for node in known.get("nodes", ())),
        "away": None,
        "partitions": known.get("partitions", 0),
        "leaderless": places("leaderless"),
        "below_min_isr": places("below_min_isr"),
        "under_replicated": places("under_replicated"),
        "owed": None,
        "replacements": None,
        "rebuilding": None,
        "moves": None,
        "decommissions": None,
        "balance_paused": None,
        "doubt": doubt,
        "unreadable": list(known.get("unreadable", ())),
        "healthy": False,
    }


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


def print_status(shown: dict[str, Any], etcd: str) -> None:
    controller = shown["controller"]
    cluster_id = shown["cluster_id"] or "id unknown"
    print(f"cluster     {shown['cluster']} ({cluster_id}), etcd {etcd}, revision {shown['revision']:,}")
    who = f"{controller['name']}, epoch {controller['epoch']}" if controller else "none: start nsqha lookupd"
    print(f"controller  {who}")
    away = f"; away: {', '.join(shown['away'])}" if shown["away"] else ""
    print(f"nodes       {len(shown['nodes'])} alive: {', '.join(shown['nodes']) or 'none'}{away}")
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


def stuck_lines(stuck: Mapping[str, str]) -> list[str]:
    """`orders/0, orders/1: why`, one line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for where, why in stuck.items():
        by_reason.setdefault(why, []).append(where)
    return [f"{some(places)}: {why}" for why, places in by_reason.items()]


def _troubles(shown: dict[str, Any]) -> str:
    texts = []
    for key, what in (
        ("leaderless", "without a leader"),
        ("below_min_isr", "below min_isr"),
        ("under_replicated", "under-replicated"),
    ):
        places = shown[key]
        if places:
            texts.append(f"\n            {len(places):,} {what}: {some(places)}")
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
    if node.poisoned:
        return f"poisoned: {node.poisoned}"
    if node.leaving:
        return f"leaving: {node.leaving_why}" if node.leaving_why else "leaving"
    if node.joining:
        return f"joining: {node.joining}"
    if node.declines:
        return f"declines to lead: {node.declines}"
    return "decommissioned" if uid in picture.intents.decommissions else OK


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
            "state": state_of(meta, picture.nodes),
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
