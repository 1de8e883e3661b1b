"""`nsqha cluster move`, `decommission`, `forget`, `balance`, `elect`: they store a request and show its progress."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from lookupd.changes import MetadataChanges
from nsqha.cli.cluster import show
from nsqha.cli.cluster.access import Picture, ask_nodes, look, opened
from nsqha.cli.cluster.recording import Asked, asked
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.screen import confirm, print_json, say, show_count, some, table
from nsqha.election.elect import MAY_BE_LOST, NOTHING_LOST, ReplicaReport
from nsqha.election.model import PartitionMeta
from nsqha.election.placement import PartitionName, balance, host_of, replicas_wanted, spread
from nsqha.election.store import MetadataStore
from nsqha.election.unclean import Unclean, elect_unclean

LOOK_SECONDS = 0.3
CONTROLLER_HINT = "there is no controller now; this begins when a lookup daemon of this cluster runs"


def move(args: argparse.Namespace) -> int:
    target = f"{_target(args)} replicas={args.nodes}"
    with opened(args) as store, asked(store.intents, args, "move", target) as change:
        picture = look(store, args)
        name, meta = picture.partition(*args.topic)
        wanted = [picture.node(text.strip()) for text in args.nodes.split(",") if text.strip()]
        _check_replicas(wanted, picture)
        _check_joined(set(wanted).difference(meta.replicas), picture)
        enough = replicas_wanted(picture.settings(name), picture.able)
        if len(wanted) < enough:
            text = f"{name.topic} needs {enough} replicas and the controller would add the rest again; name {enough}"
            raise exits.Exit(exits.USAGE, text)
        with change.change():
            _changes(store).move({name: tuple(wanted)})
        _warn(picture)

        def left(now: Picture) -> str:
            if name not in now.intents.moves:
                return ""
            shown = show.move(name, wanted, now)
            return f"joining: {', '.join(shown['joining'])}" if shown["joining"] else "all are in sync"

        now = _wait(store, args, left) if args.wait else look(store, args)
        shown = show.move(name, wanted, now)
    if args.json:
        print_json(shown)
    elif args.wait:
        print(f"{show.place(name)} is on {', '.join(shown['replicas'])}")
    else:
        before, after = ", ".join(picture.names(meta.replicas)), ", ".join(shown["wanted"])
        print(f"{show.place(name)} moves from {before or 'nowhere'} to {after}; see nsqha cluster status")
    return exits.OK


def _target(args: argparse.Namespace) -> str:
    """The partition that is meant, for the audit."""
    topic, number = args.topic
    return f"topic={topic} partition={number or 0}"


def _check_replicas(wanted: list[int], picture: Picture) -> None:
    if not wanted:
        raise exits.Exit(exits.USAGE, "name at least one node")
    if len(set(wanted)) != len(wanted):
        raise exits.Exit(exits.USAGE, "a node is named twice")
    hosts = [host_of(picture.nodes[uid]) for uid in wanted]
    for host in hosts:
        if hosts.count(host) > 1:
            raise exits.Exit(exits.USAGE, f"two of the nodes are on host {host}; replicas are never on the same host")


def _check_joined(added: Iterable[int], picture: Picture) -> None:
    for uid in added:
        if why := picture.nodes[uid].joining:
            raise exits.Exit(exits.FAILED, f"{picture.name(uid)} gets no replicas before it has joined: {why}")


def decommission(args: argparse.Namespace) -> int:
    verb = "decommission --undo" if args.undo else "decommission"
    with opened(args) as store, asked(store.intents, args, verb, f"node={args.node}") as change:
        picture = look(store, args)
        uid = picture.node(args.node, alive=False)
        changes = _changes(store)
        if args.undo:
            back = _undo_decommission(uid, picture, changes, args, change)
        elif uid not in picture.intents.decommissions:
            planned = show.decommission(uid, picture)
            _say_plan(planned)
            confirm(f"empty {planned['node']}, and place no more on it?", yes=args.yes or not planned["replicas"])
            with change.change():
                changes.decommission(uid)
            _warn(picture)

        def left(now: Picture) -> str:
            found = show.decommission(uid, now)
            if len(found["stuck"]) == found["replicas"]:
                return ""  # waiting for the rest would not help
            lines = [f"cannot be moved: {line}" for line in show.stuck_lines(found["stuck"])]
            return "\n".join([f"{show_count(found['replicas'], 'replica')} left, {found['moving']} under way", *lines])

        now = _wait(store, args, left) if args.wait and not args.undo else look(store, args)
        shown = show.decommission(uid, now)
    if args.undo:
        shown |= {"stuck": {}, "moving": len(back)}
    if args.json:
        print_json(shown)
    elif args.undo:
        print(f"{shown['node']} can get replicas again{f'; {len(back):,} come back' if back else ''}")
    elif shown["replicas"]:
        left_there = show_count(shown["replicas"], "replica")
        print(f"{shown['node']} is being emptied, {left_there} left; see nsqha cluster status")
    else:
        print(f"{shown['node']} is empty; it can be stopped for good")
    for line in show.stuck_lines(shown["stuck"]):
        say(f"{args.parser.prog}: cannot be moved: {line}")
    if not shown["stuck"]:
        return exits.OK
    say("to continue: start a node on another host, or choose fewer replicas with nsqha topic set; or use --undo")
    return exits.PARTLY if args.wait else exits.OK


def _say_plan(planned: dict[str, Any]) -> None:
    """Say what emptying a node will do."""
    held, led, stuck = planned["replicas"], planned["leaderships"], planned["stuck"]
    say(f"{planned['node']} has {show_count(held, 'replica')}, {show_count(led, 'leadership')}")
    if held:
        say(f"{held - len(stuck):,} move to other nodes, {len(stuck):,} cannot be moved now")
    for line in show.stuck_lines(stuck):
        say(f"cannot be moved: {line}")


def _undo_decommission(
    uid: int, picture: Picture, changes: MetadataChanges, args: argparse.Namespace, change: Asked
) -> dict[PartitionName, tuple[int, ...]]:
    """Show what comes back to a node, ask, and bring it back."""
    called = picture.name(uid)
    if uid not in picture.intents.decommissions:
        raise exits.Exit(exits.NOT_FOUND, f"{called} is not being decommissioned")
    back = changes.brought_back(uid)
    kept = sum(uid in picture.intents.moves.get(name, meta.replicas) for name, meta in picture.metas.items())
    away = "" if uid in picture.nodes else "; it is away, so nothing comes back to it"
    say(f"{called} keeps {show_count(kept, 'replica')}, and {len(back):,} that were moved away come back{away}")
    if back:
        confirm(f"bring {show_count(len(back), 'replica')} back to {called}?", yes=args.yes)
    with change.change():
        if not changes.recommission(uid):
            raise exits.Exit(exits.NOT_FOUND, f"{called} is not being decommissioned")
    return back


def forget(args: argparse.Namespace) -> int:
    with opened(args) as store, asked(store.intents, args, "forget", f"node={args.node}") as change:
        picture = look(store, args)
        uid = picture.node(args.node, alive=False)
        called = picture.name(uid)
        if uid in picture.nodes:
            why = f"{called} is alive; empty it with nsqha cluster decommission, or stop it for good first"
            raise exits.Exit(exits.NOT_ALLOWED, why)
        plan = show.forgetting(uid, picture)
        if only := plan["only"]:
            why = f"no other in-sync replica of {some(only)} is alive: forgetting {called} would lose messages; "
            raise exits.Exit(
                exits.NOT_ALLOWED, f"{why}start it or another member, or use nsqha cluster elect --unclean"
            )
        for key, what in (
            ("rebuilt", "created again on other nodes"),
            ("dropped", "given up: no other host has room, and enough are in sync without them"),
            ("waiting", "wait for a node on another host: without them too few would be in sync"),
        ):
            if plan[key]:
                say(f"{show_count(len(plan[key]), 'replica')} {what}: {some(plan[key])}")
        confirm(f"forget {called}? If it comes back, its copies of these are removed.", yes=args.yes)
        with change.change():
            _changes(store).forget(uid)
        _warn(picture)
        if args.wait:

            def left(now: Picture) -> str:
                held = show.forgetting(uid, now)
                count = sum(map(len, held.values()))
                return "" if count == len(held["waiting"]) else f"{show_count(count, 'replica')} left"

            plan = show.forgetting(uid, _wait(store, args, left))
    if args.json:
        print_json({"node": called, **plan, "forgotten": True})
    else:
        print(f"{called} is forgotten; see nsqha cluster status")
    return exits.PARTLY if args.wait and plan["waiting"] else exits.OK


def balance_(args: argparse.Namespace) -> int:
    verb = "balance --pause" if args.pause else "balance --resume" if args.resume else "balance"
    only_set = args.pause or args.resume or args.window is not None
    target = f"limit={args.limit}" if args.window is None else f"window={args.window}"
    with opened(args) as store, asked(store.intents, args, verb, target) as change:
        changes = _changes(store)
        if only_set:
            paused = args.pause if args.pause or args.resume else None
            with change.change():
                changes.change_balance(paused=paused, window=args.window)
        picture = look(store, args)
        nodes = picture.able
        metas = {name: meta for name, meta in picture.metas.items() if name not in picture.intents.moves}
        found = [] if only_set else spread(metas, nodes, args.limit)
        if args.dry_run:
            change.planned()
        elif found:
            with change.change():
                changes.move({planned.name: planned.replicas for planned in found})
            _warn(picture)
    transfers = balance(metas, nodes, len(metas))
    shown = {
        "dry_run": args.dry_run,
        "paused": picture.intents.balance_paused,
        "window": None if picture.intents.balance_window is None else str(picture.intents.balance_window),
        "transfers": [
            {
                "topic": transfer.name.topic,
                "partition": transfer.name.number,
                "from": picture.name(transfer.source),
                "to": picture.name(transfer.target),
            }
            for transfer in transfers
        ],
        "moves": [show.move(planned.name, planned.replicas, picture) for planned in found],
    }
    if args.json:
        print_json(shown)
    else:
        _print_balance(shown)
    return exits.OK


def _print_balance(shown: dict[str, Any]) -> None:
    would = "would move" if shown["dry_run"] or shown["paused"] or shown["window"] else "moves"
    for found in shown["transfers"]:
        print(f"{found['topic']}/{found['partition']}: the leadership {would} from {found['from']} to {found['to']}")
    for found in shown["moves"]:
        verb = "would move" if shown["dry_run"] else "moves"
        before, after = ", ".join(found["replicas"]), ", ".join(found["wanted"])
        print(f"{found['topic']}/{found['partition']}: {verb} from {before} to {after}")
    if not shown["transfers"] and not shown["moves"]:
        print("nothing to balance")
    if shown["paused"]:
        print("balancing is paused: leaderships stay where they are until nsqha cluster balance --resume")
    elif shown["window"]:
        print(f"leaderships go back within {shown['window']} UTC only, until nsqha cluster balance --window always")


def elect(args: argparse.Namespace) -> int:
    if not args.unclean and args.node is None:
        raise exits.Exit(exits.USAGE, "name the new leader, --node NODE; or use --unclean if no replica may lead")
    target = _target(args) + (f" node={args.node}" if args.node is not None else "")
    verb = "elect --unclean" if args.unclean else "elect"
    with opened(args) as store, asked(store.intents, args, verb, target) as change:
        picture = look(store, args)
        name, meta = picture.partition(*args.topic)
        wanted = picture.node(args.node) if args.node is not None else 0
        begin = _unclean if args.unclean else _hand_over
        shown = begin(store, picture, name, meta, wanted, args, change)
    if args.json:
        print_json(shown)
    elif shown["done"]:
        print(f"{show.place(name)} is led by {shown['leader']} in epoch {shown['epoch']}")
    else:
        print(f"{show.place(name)} is handed over to {shown['leader']}; see nsqha cluster topics {name.topic}")
    return exits.OK


def _hand_over(
    store: MetadataStore,
    picture: Picture,
    name: PartitionName,
    meta: PartitionMeta,
    wanted: int,
    args: argparse.Namespace,
    change: Asked,
) -> dict[str, Any]:
    """Name the successor; the controller elects it when it has everything that the leader has."""
    if meta.leader != wanted:
        if wanted not in meta.isr:
            members = ", ".join(picture.names(meta.isr)) or "none"
            raise exits.Exit(exits.NOT_ALLOWED, f"{picture.name(wanted)} is not in sync; in sync: {members}")
        if meta.leader not in picture.nodes:
            raise exits.Exit(
                exits.NOT_ALLOWED, f"{show.place(name)} has no leader to hand over; the controller elects one if it can"
            )
        with change.change():
            store.records.replace_partition(name.topic, name.uid, name.number, replace(meta, successor=wanted))
        _warn(picture)

    def left(now: Picture) -> str:
        found = now.metas.get(name)
        if found is None or found.leader == wanted:
            return ""
        if found.successor != wanted:
            raise exits.Exit(exits.FAILED, f"{show.place(name)}: the hand-over was given up; see the controller's log")
        return f"still led by {now.name(found.leader)}"

    now = (_wait(store, args, left) if args.wait else look(store, args)).metas.get(name, meta)
    return {
        "topic": name.topic,
        "partition": name.number,
        "leader": picture.name(wanted),
        "epoch": now.epoch,
        "unclean": False,
        "answers": {},
        "ahead": {},
        "unheard": [],
        "lossless": True,
        "known": [],
        "done": now.leader == wanted,
    }


def _unclean(
    store: MetadataStore,
    picture: Picture,
    name: PartitionName,
    meta: PartitionMeta,
    wanted: int,
    args: argparse.Namespace,
    change: Asked,
) -> dict[str, Any]:
    answers = ask_nodes(picture, name, args)
    reports = {uid: answer for uid, answer in answers.items() if isinstance(answer, ReplicaReport)}
    found = elect_unclean(meta, reports, picture.nodes, wanted, name=picture.name)
    if not args.json:
        _print_answers(answers, meta, picture)
    if isinstance(found, str):
        raise exits.Exit(exits.NOT_ALLOWED, f"{show.place(name)}: {found}")
    for line in cost(found, reports, picture):
        say(line)
    leader = picture.name(found.meta.leader)
    confirm(f"make {leader} the leader of {show.place(name)} with what it has?", yes=args.yes)
    registered = {found.meta.leader: found.meta.registration}
    with change.change():
        put = store.records.replace_partition(name.topic, name.uid, name.number, found.meta, registered=registered)
    return {
        "topic": name.topic,
        "partition": name.number,
        "leader": leader,
        "epoch": put.epoch,
        "unclean": True,
        "answers": {
            picture.name(uid): {"last_epoch": answer.last_epoch, "end": answer.end, "committed": answer.committed}
            if isinstance(answer, ReplicaReport)
            else answer
            for uid, answer in answers.items()
        },
        "ahead": {picture.name(uid): end for uid, end in found.ahead.items()},
        "unheard": picture.names(found.unheard),
        "lossless": found.lossless,
        "known": [*filter(None, [found.evidence.proof]), *found.evidence.facts],
        "done": True,
    }


def _print_answers(answers: dict[int, ReplicaReport | str], meta: PartitionMeta, picture: Picture) -> None:
    rows: list[tuple[str | int, ...]] = []
    for uid, answer in answers.items():
        member = "in the ISR" if uid in meta.isr else ""
        if isinstance(answer, ReplicaReport):
            remarks = [
                text
                for text, holds in (
                    ("its end was cut", answer.cut),
                    ("has damage", answer.corrupt),
                    (f"poisoned: {answer.poisoned}", bool(answer.poisoned)),
                    ("another log than the record names", uid in meta.isr and meta.isr[uid] != answer.log_uid),
                )
                if holds
            ]
            rows.append(
                (
                    picture.name(uid),
                    member,
                    str(answer.last_epoch),
                    str(answer.end),
                    f"{answer.chain:016x}" if answer.chain else "",
                    str(answer.committed),
                    ", ".join(remarks),
                )
            )
        else:
            rows.append((picture.name(uid), member, "", "", "", "", answer))
    table(("NODE", "", "LAST EPOCH", "LOG END", "CHAIN", "COMMITTED", ""), rows)


def cost(found: Unclean, reports: dict[int, ReplicaReport], picture: Picture) -> list[str]:
    """Lines that say what an unclean election may lose."""
    leader = picture.name(found.meta.leader)
    chosen = reports[found.meta.leader]
    if found.lossless:
        return [f"{found.evidence.proof}: {NOTHING_LOST}"]
    lines = [f"{MAY_BE_LOST}: no log that answered proves that {leader} has all of them", *found.evidence.facts]
    for uid, other in found.ahead.items():
        lines.append(f"{picture.name(uid)} has {other:,} entries: its later entries are deleted")
    if found.unheard:
        names = ", ".join(picture.names(found.unheard))
        lines.append(f"no answer, may have acknowledged more and loses it when it comes back: {names}")
    return lines + _damage(leader, chosen)


def _damage(leader: str, chosen: ReplicaReport) -> list[str]:
    """Lines that say what a leader with damage cannot read, as far as it knows."""
    if not chosen.corrupt:
        return []
    lines = []
    for first, end, first_offset, end_offset in chosen.damage:
        text = f"{leader} cannot read batches {first:,} to {end - 1:,}"
        if first_offset < end_offset:
            text += f": messages at offsets {first_offset:,} to {end_offset - 1:,}"
        lines.append(text)
    if chosen.damaged_ranges > len(chosen.damage):
        lines.append(f"... and {chosen.damaged_ranges - len(chosen.damage):,} more ranges")
    if not lines:
        lines.append(f"{leader} cannot say where its channels are, or what of its log is damaged")
    lines.append("the other live replicas are asked for it first; what none has is given up")
    lines.append("channels stop before it until nsqha log skip; their progress there is lost:")
    lines.append("messages may come again, deferred ones may be lost; a node that returns with the bytes restores them")
    return lines


def _changes(store: MetadataStore) -> MetadataChanges:
    return MetadataChanges(store.records, store.intents, random.SystemRandom())


def _warn(picture: Picture) -> None:
    if picture.controller is None:
        say(CONTROLLER_HINT)


def _wait(store: MetadataStore, args: argparse.Namespace, left: Callable[[Picture], str]) -> Picture:
    """Wait until `left` is empty; print it whenever it changes. The work continues if this is interrupted."""
    said = ""
    while True:
        now = look(store, args)
        text = left(now)
        if not text:
            return now
        if now.controller is None:
            text += f"\n{CONTROLLER_HINT}"
        if text != said:
            say(text)
            said = text
        time.sleep(LOOK_SECONDS)


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "move": move,
    "decommission": decommission,
    "forget": forget,
    "balance": balance_,
    "elect": elect,
}
