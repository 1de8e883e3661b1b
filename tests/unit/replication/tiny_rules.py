"""What can happen in the tiny cluster, and what must always hold.

    NoLoss           an electable replica has every acknowledged batch
    LeaderComplete   so has the leader that the metadata names
    NoFork           a log id is acknowledged with one content only
    OnePerEpoch      no two nodes lead in one epoch
    Floor            the metadata never loses members below min_isr
    NamedCopies      what is acknowledged was held by every log that the metadata names, and these are min_isr at least

Of these `Tiny` itself looks after what only the moment shows: NoFork, Floor, NamedCopies.
"""

from __future__ import annotations

from collections.abc import Callable

from nsqha.commitlog.entry import Entry
from tests.unit.replication.tiny import Tiny
from tests.unit.replication.tiny_parts import require


def possible(tiny: Tiny) -> list[tuple[str, Callable[[], None]]]:
    """(kind, do it) for every operation that makes sense now."""
    found: list[tuple[str, Callable[[], None]]] = []
    for uid, node in tiny.nodes.items():
        if not node.up:
            found.append(("restart", lambda uid=uid: tiny.restart(uid)))  # type: ignore[misc]
            if node.durable < node.end and tiny.may_lose(uid):
                found.append(("power", lambda uid=uid, node=node: tiny.crash(uid, node.durable)))  # type: ignore[misc]
            continue
        if node.durable < node.end:
            found.append(("sync", lambda uid=uid: tiny.sync(uid)))  # type: ignore[misc]
        for keep in range(node.durable, node.end + 1):
            if keep == node.end or tiny.may_lose(uid):
                found.append(("crash", lambda uid=uid, keep=keep: tiny.crash(uid, keep)))  # type: ignore[misc]
        found.append(("kill", lambda uid=uid: tiny.kill(uid)))  # type: ignore[misc]
        if not tiny.lossy:
            found.append(("wipe", lambda uid=uid: tiny.wipe(uid)))  # type: ignore[misc]
        if tiny.may_become(uid):
            found.append(("become", lambda uid=uid: tiny.become(uid)))  # type: ignore[misc]
        if tiny.electable(uid) and not (uid == tiny.meta.leader and node.leading):
            for keep_old in (False, True):
                found.append(("elect", lambda uid=uid, keep=keep_old: tiny.elect(uid, keep=keep)))  # type: ignore[misc]
        if (leading := node.leading) is not None:
            if tiny.values < 12:
                found.append(("write", lambda uid=uid: tiny.write(uid)))  # type: ignore[misc]
            found.append(("refresh", lambda uid=uid: tiny.refresh(uid)))  # type: ignore[misc]
            for other in tiny.nodes.values():
                if other.uid != uid and other.up:
                    stream = leading.streams.get(other.uid)
                    kind = "connect" if stream is None or stream.closed else "reconnect"
                    found.append((kind, lambda uid=uid, to=other.uid: tiny.connect(uid, to)))  # type: ignore[misc]
            for stream in leading.streams.values():
                if stream.closed:
                    found.append(("noticed", lambda stream=stream: tiny.cut(stream)))  # type: ignore[misc]
    for uid in tiny.meta.isr:
        if uid != tiny.meta.leader and not tiny.nodes[uid].up and len(tiny.meta.isr) > tiny.meta.min_isr:
            found.append(("expel", lambda uid=uid: tiny.expel(uid)))  # type: ignore[misc]
    if tiny.hands_over:
        for uid in tiny.nodes:
            found.append(("depart", lambda uid=uid: tiny.depart(uid)))  # type: ignore[misc]
        for uid in {0, *tiny.meta.isr} - {tiny.meta.leader, tiny.meta.successor}:
            found.append(("successor", lambda uid=uid: tiny.name_successor(uid)))  # type: ignore[misc]
    for stream in tiny.streams:
        if stream.down:
            found.append(("arrives", lambda stream=stream: tiny.arrives(stream)))  # type: ignore[misc]
        if stream.up:
            found.append(("returns", lambda stream=stream: tiny.returns(stream)))  # type: ignore[misc]
        found.append(("cut", lambda stream=stream: tiny.cut(stream)))  # type: ignore[misc]
    for request in tiny.requests:
        if request.outcome is None:
            found.append(("settle", lambda request=request: tiny.settle(request)))  # type: ignore[misc]
            if request.told:
                found.append(("drop", lambda request=request: tiny.drop(request)))  # type: ignore[misc]
        if not request.told:
            if request.outcome is not None:
                for bare in (False, True):
                    found.append(("answer", lambda r=request, bare=bare: tiny.answer(r, bare=bare)))  # type: ignore[misc]
            found.append(("give_up", lambda request=request: tiny.give_up(request)))  # type: ignore[misc]
    found.append(("tick", tiny.tick))
    found.append(("long tick", lambda: tiny.wait(0.5)))
    found.append(("longest tick", lambda: tiny.wait(2.5)))
    return found


def check(tiny: Tiny) -> None:
    for log_id, entry in tiny.acked.items():
        for uid in tiny.meta.isr:
            if tiny.electable(uid):
                _has(tiny, uid, log_id, entry, "NoLoss")
    epochs: dict[int, int] = {}
    for node in tiny.nodes.values():
        if node.leading is None:
            continue
        other = epochs.setdefault(node.leading.epoch, node.uid)
        require(other == node.uid, f"OnePerEpoch: {tiny.names({other, node.uid})} lead epoch {node.leading.epoch}")
        if node.leading.epoch == tiny.meta.epoch and tiny.meta.leader == node.uid:
            for log_id, entry in tiny.acked.items():
                _has(tiny, node.uid, log_id, entry, "LeaderComplete")


def _has(tiny: Tiny, uid: int, log_id: int, entry: Entry, rule: str) -> None:
    here = tiny.nodes[uid].entry(log_id)
    require(here is not None and here.chain == entry.chain, f"{rule}: {tiny.name(uid)} lacks {entry}; it has {here}")
