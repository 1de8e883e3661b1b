"""`nsqha cluster accept-metadata` makes an etcd that was restored to an older state follow the nodes.

`nsqha.election.metadata_restore` decides what is written and in which order. This module asks the nodes, shows the
plan and carries it out. If it is interrupted, the nodes keep waiting and the command has to be run again.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nsqha.cli.cluster.access import EtcdArguments, ask_each, opened
from nsqha.cli.cluster.recording import Asked, asked
from nsqha.cli.cluster.show import place
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.screen import confirm, print_json, say, some, table
from nsqha.clock import SystemClock
from nsqha.election.etcd.metadata_restore import EtcdAcceptance, EtcdSnapshot
from nsqha.election.metadata_restore import (
    AcceptedMetadata,
    Decision,
    Hold,
    NodeInventory,
    RestorePlan,
    WaitingNode,
    plan,
)
from nsqha.election.model import NodeInfo
from nsqha.election.store import MetadataRecords, MetadataStore
from nsqha.errors import Conflict, NotFound, StaleMetadata

LOOK_SECONDS = 0.3
ANSWER_SECONDS = 15.0
"""How long the command waits for nodes that do not answer, or do not report yet that they wait."""
HELD_SECONDS = 60.0
"""How long nodes may take to stop what they lead and to recover their logs."""


def run(args: argparse.Namespace) -> int:
    from nsqha.election.etcd.access import etcd_options

    flags = EtcdArguments.of(args)
    acceptance = EtcdAcceptance(etcd_options(flags), flags.cluster_name, SystemClock(), lambda text: None)
    try:
        with _store(args, flags, acceptance.look()) as store:
            without = " ".join(f"without={text}" for text in args.without or ())
            with asked(store.intents, args, "accept-metadata", without) as change:
                shown = _accept(args, store.records, acceptance, change)
    except StaleMetadata as error:
        raise exits.Exit(exits.CONFLICT, f"etcd was restored once more meanwhile ({error}); run this again") from None
    finally:
        acceptance.close()
    if args.json:
        print_json(shown)
    elif shown["done"]:
        print(f"accepted for {len(shown['nodes'])} nodes; they go on by themselves, see nsqha cluster status")
    else:
        print("no node waits for this: all running nodes use these metadata")
    return exits.OK


@contextmanager
def _store(args: argparse.Namespace, flags: EtcdArguments, look: EtcdSnapshot) -> Iterator[MetadataStore]:
    """Open the metadata; if etcd has no such cluster, they are created with the id that the nodes know."""
    from nsqha.election.etcd.access import open_store

    known = {node.cluster_id for node in look.waiting.values() if node.cluster_id}
    if look.cluster_id or len(known) != 1:
        with opened(args) as store:
            yield store
        return
    say(f"etcd has no cluster {flags.cluster_name}: everything comes from the nodes")
    begun = open_store(flags, SystemClock(), random.SystemRandom(), cluster_id=known.pop())
    try:
        yield begun
    finally:
        begun.close()


def _accept(
    args: argparse.Namespace, records: MetadataRecords, acceptance: EtcdAcceptance, change: Asked
) -> dict[str, Any]:
    cluster_id = records.cluster().record.cluster_id
    look = acceptance.look()
    if not look.waiting and look.hold is None:
        return _shown(None, {}, done=False)
    look, found, planned = _gather(args, records, acceptance, cluster_id)
    if not args.json:
        _print(planned, found)
    for line in _costs(planned, found):
        say(line)
    confirm(_question(planned, look), yes=args.yes)
    with change.change():
        planned, found = _change(args, records, acceptance, planned, look, found)
    return _shown(planned, found, done=True)


def _change(
    args: argparse.Namespace,
    records: MetadataRecords,
    acceptance: EtcdAcceptance,
    planned: RestorePlan,
    look: EtcdSnapshot,
    found: dict[int, NodeInventory | str],
) -> tuple[RestorePlan, dict[int, NodeInventory | str]]:
    """Make the metadata follow the nodes; returns the plan as it was carried out, and what nodes said then."""
    if planned.hold:
        acceptance.hold(Hold(by="nsqha cluster accept-metadata"))
        look, found = _held(records, acceptance, set(_heard(found)), records.cluster().record.cluster_id, args)
        before, planned = planned, _plan(records, look, found)
        _refuse_if_unheard(planned, found, args)
        worse = {d.name for d in planned.losses} - {d.name for d in before.losses}
        if worse:
            names = some(sorted(place(name) for name in worse))
            raise exits.Exit(
                exits.CONFLICT,
                f"more would be lost than was shown ({names}); nothing was changed, and the nodes wait: run this again",
            )
        _carry_out(records, planned)
    nodes = tuple(uid for uid in planned.nodes if uid in look.waiting)
    acceptance.accept(look.accepted, AcceptedMetadata(planned.generation, nodes))
    return planned, found


def _gather(
    args: argparse.Namespace, records: MetadataRecords, acceptance: EtcdAcceptance, cluster_id: int
) -> tuple[EtcdSnapshot, dict[int, NodeInventory | str], RestorePlan]:
    """Ask every node, and wait for those that do not answer yet: nodes notice an older etcd after seconds."""
    deadline = time.monotonic() + ANSWER_SECONDS
    said = ""
    while True:
        look = acceptance.look()
        found = _ask(look.waiting, records.nodes(), cluster_id, args)
        planned = _plan(records, look, found)
        late = sorted(set(planned.unheard) - _given_up(planned.unheard, args))
        if not late or time.monotonic() > deadline:
            _refuse_if_unheard(planned, found, args)
            return look, found, planned
        text = f"waiting for {', '.join(f'{uid:016x}' for uid in late)}"
        if text != said:
            say(text)
            said = text
        time.sleep(LOOK_SECONDS)


def _question(planned: RestorePlan, look: EtcdSnapshot) -> str:
    names = ", ".join(node.name or f"{uid:016x}" for uid, node in sorted(look.waiting.items()))
    if not planned.hold:
        return f"let {names or 'no node'} follow the metadata as they are?"
    return "let the metadata follow these nodes? All of them stop for some seconds; clients have to reconnect."


# ---- what there is


def _ask(
    waiting: Mapping[int, WaitingNode], nodes: Mapping[int, NodeInfo], cluster_id: int, args: argparse.Namespace
) -> dict[int, NodeInventory | str]:
    """Ask each node for its inventory; a text instead says why there is none."""
    from nsqha.pb.v1 import replication_pb2 as pb

    addresses = {uid: node.grpc_address for uid, node in nodes.items()}
    addresses |= {uid: node.grpc_address for uid, node in waiting.items()}
    request = pb.EvidenceRequest(cluster_id=cluster_id)
    return ask_each(addresses, "Evidence", request, lambda reply, uid: _evidence(reply, uid, uid in waiting), args)


def _evidence(reply: Any, uid: int, waiting: bool) -> NodeInventory | str:
    from nsqha.server.replica.replica_reports import reports_in
    from nsqha.server.safe_mode.inventory import known_of

    if reply.status.node_uid != uid:
        return f"node {reply.status.node_uid:016x} answers at its address"
    return NodeInventory(
        uid,
        reply.name or f"{uid:016x}",
        waiting=waiting,
        held=reply.held,
        generation=reply.generation,
        view_revision=reply.view_revision,
        poisoned=reply.status.poisoned,
        replicas=reports_in(reply.status),
        topics=tuple(known_of(topic) for topic in reply.topics),
    )


def _heard(found: Mapping[int, NodeInventory | str]) -> dict[int, NodeInventory]:
    return {uid: answer for uid, answer in found.items() if isinstance(answer, NodeInventory)}


def _plan(records: MetadataRecords, look: EtcdSnapshot, found: Mapping[int, NodeInventory | str]) -> RestorePlan:
    return plan(
        records.topics(),
        records.tombstones(),
        look.accepted.record.generation,
        _heard(found),
        salt_constant=records.cluster().record.salt_constant,
        also_named=found,
    )


def _held(
    records: MetadataRecords, acceptance: EtcdAcceptance, expected: set[int], cluster_id: int, args: argparse.Namespace
) -> tuple[EtcdSnapshot, dict[int, NodeInventory | str]]:
    """Wait until every node that answered is held and no other runs; then ask again."""
    deadline = time.monotonic() + HELD_SECONDS
    said = ""
    while True:
        look = acceptance.look()
        held = {uid for uid, node in look.waiting.items() if node.held}
        run = set(records.nodes()) | (set(look.waiting) - held)
        late = sorted((expected - held) | run)
        if not late and records.controller() is None:
            return look, _ask(look.waiting, {}, cluster_id, args)
        if time.monotonic() > deadline:
            names = ", ".join(f"{uid:016x}" for uid in late) or "the controller"
            raise exits.Exit(
                exits.UNREACHABLE,
                f"{names} did not stop within {HELD_SECONDS:.0f} s; nothing was changed, and the nodes that did stop "
                "wait: see its log and run this again, or use --without",
            )
        text = f"waiting for {len(late)} nodes to stop and recover their logs"
        if text != said:
            say(text)
            said = text
        time.sleep(LOOK_SECONDS)


def _refuse_if_unheard(
    planned: RestorePlan, found: Mapping[int, NodeInventory | str], args: argparse.Namespace
) -> None:
    unheard = set(planned.unheard)
    left = sorted(unheard - _given_up(unheard, args))
    if not left:
        return
    why = [f"{uid:016x}" + (f" ({found[uid]})" if uid in found else " (away)") for uid in left]
    partitions = [decision for decision in planned.decisions if set(decision.missing) & set(left)]
    raise exits.Exit(
        exits.UNREACHABLE,
        f"no answer: {', '.join(why)}; {len(partitions)} partitions have a replica there. Start the node, or continue "
        "without it: --without UID",
    )


def _given_up(uids: Iterable[int], args: argparse.Namespace) -> set[int]:
    named = {text.strip().lower() for given in args.without or () for text in given.split(",")}
    return {uid for uid in uids if f"{uid:016x}" in named}


# ---- what is done


def _carry_out(records: MetadataRecords, planned: RestorePlan) -> None:
    """Write every record by compare-and-set; the next run repeats this if it is interrupted. Raises Exit."""
    try:
        for name, topic in planned.delete.items():
            try:
                records.delete_topic(name, expected_version=topic.version)
            except NotFound:
                pass
        for topic_plan in planned.topics:
            record = topic_plan.record
            if topic_plan.restored:
                records.put_recovered(record)
            else:
                records.replace(record.name, topic_plan.version, record)
    except Conflict as error:
        raise exits.Exit(exits.CONFLICT, f"{error}; the nodes wait and nothing is lost: run this again") from None


# ---- what is shown


def _costs(planned: RestorePlan, found: Mapping[int, NodeInventory | str]) -> list[str]:
    """Lines that say what may be lost, or is given up."""
    lines = [f"{place(lost.name)}: acknowledged messages may be lost: {lost.loss}" for lost in planned.losses]
    for decision in planned.decisions:
        if decision.waits:
            lines.append(f"{place(decision.name)}: only nodes that did not answer have it; it waits for them")
    for name in planned.delete:
        lines.append(f"{name}: was deleted after this state of the metadata; it and its files are deleted again")
    for uid, name in planned.left:
        lines.append(f"{name}: {_name(uid, found)} has files of an earlier topic of that name; they stay")
    return lines


def _name(uid: int, found: Mapping[int, NodeInventory | str]) -> str:
    answer = found.get(uid)
    return answer.name if isinstance(answer, NodeInventory) else f"{uid:016x}"


def _print(planned: RestorePlan, found: Mapping[int, NodeInventory | str]) -> None:
    rows: list[tuple[str | int, ...]] = []
    for decision in planned.decisions:
        before, after = decision.before, decision.after
        named = {uid for meta in (before, after) if meta is not None for uid in meta.replicas}
        for uid in sorted({*decision.have, *decision.missing, *named}):
            report = decision.have.get(uid)
            without = "no answer" if uid in planned.unheard else "nothing"
            has = f"{report.last_epoch}:{report.end}" if report is not None and report.log_uid else without
            doubts = [] if report is None else [t for t, on in (("cut", report.cut), ("damaged", report.corrupt)) if on]
            rows.append(
                (
                    place(decision.name),
                    _name(uid, found),
                    has + (f" ({', '.join(doubts)})" if doubts else ""),
                    "" if report is None else str(report.promise),
                    "missing" if before is None else str(before.epoch),
                    "stays" if after is None else str(after.epoch),
                    "in sync" if after is not None and uid in after.isr else "",
                )
            )
    table(("PARTITION", "NODE", "HAS EPOCH:END", "PROMISED", "METADATA SAY", "WILL BE", ""), rows)


def _shown(planned: RestorePlan | None, found: Mapping[int, NodeInventory | str], *, done: bool) -> dict[str, Any]:
    decisions = planned.decisions if planned is not None else []
    return {
        "done": done,
        "generation": planned.generation if planned is not None and done else 0,
        "nodes": [_name(uid, found) for uid in planned.nodes] if planned is not None else [],
        "unheard": [f"{uid:016x}" for uid in planned.unheard] if planned is not None else [],
        "restored": [t.record.name for t in planned.topics if t.restored] if planned is not None else [],
        "deleted": sorted(planned.delete) if planned is not None else [],
        "partitions": [_shown_partition(decision, found) for decision in decisions],
    }


def _shown_partition(decision: Decision, found: Mapping[int, NodeInventory | str]) -> dict[str, Any]:
    after = decision.after or decision.before
    return {
        "topic": decision.name.topic,
        "partition": decision.name.number,
        "before_epoch": None if decision.before is None else decision.before.epoch,
        "epoch": after.epoch if after is not None else None,
        "isr": [] if after is None else [_name(uid, found) for uid in after.isr],
        "has": {
            _name(uid, found): {"last_epoch": report.last_epoch, "end": report.end, "promise": report.promise}
            for uid, report in decision.have.items()
        },
        "missing": [_name(uid, found) for uid in decision.missing],
        "loss": decision.loss,
    }
