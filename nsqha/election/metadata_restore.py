"""Metadata that went back to an older state follows the nodes again: what `nsqha cluster accept-metadata` decides.

    metadata as it was put back  +  {node: NodeEvidence}  ->  Plan: topics and partitions as they are to be

A node that finds an etcd which is not the one it belonged to, or is older than what it has seen, does not believe it.
It announces itself under `waiting/` there, and answers what it has (`Evidence`). The command shows the plan, and then

    hold      put: every node stops to lead and to follow; logs are recovered, nothing changes any more
    evidence  asked again, the plan made again
    records   changed, each by compare-and-set
    accepted  generation + 1 with the nodes that were heard; in the same transaction the hold goes

in that order, so that whatever ends it half way leaves the nodes waiting, and the command is simply run again.

Per partition, of everything that was heard:

- the epoch is above every promise, every entry and every record: what an old leader still sends is refused;
- the ISR is the replicas with the highest (last epoch, log end). A message that was acknowledged in epoch e is on all
  of the ISR of e, and later leaders had it. So of replicas with one last epoch the longest has it, and with a later one
  whoever has the latest; two with the same (last epoch, end) have the same log. That holds if one of the last ISR was
  heard, which is certain when fewer than `min_isr` replicas are missing;
- nobody leads: the controller elects from that ISR, as ever.

Topics that the metadata does not have come back as a node knew them, else as their logs tell. One that nobody has
anything of, and that a node saw deleted, is deleted again. Generations count acceptances; a node that was away follows
a later one without a hold if no promise of it reaches the epochs that were decided without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from nsqha.election.elect import ReplicaReport
from nsqha.election.model import ChannelList, PartitionMeta, StoredRecord, TopicRecord, Versioned
from nsqha.election.placement import PartitionName, min_isr_of
from nsqha.ids import PartitionKey, is_ephemeral, topic_salt

CHANNELS_MARGIN = 1000
"""Changes of a channel list that the uncommitted ends of logs may hold, of which nobody can know yet."""


@dataclass(frozen=True)
class WaitingNode(StoredRecord):
    """A node that does not believe this metadata. Lives as long as the node does."""

    node_uid: int
    name: str = ""
    grpc_address: str = ""
    cluster_id: int = 0
    generation: int = 0  # that it follows
    held: bool = False  # it leads and follows nothing any more
    why: str = ""


@dataclass(frozen=True)
class Hold(StoredRecord):
    """An acceptance is under way: no node leads or follows, nobody elects."""

    by: str = ""


@dataclass(frozen=True)
class AcceptedMetadata(StoredRecord):
    """An operator accepted the metadata for these nodes."""

    generation: int = 0
    nodes: tuple[int, ...] = ()  # uids


@dataclass(frozen=True)
class Known:
    """A topic as a node knows it; its partitions without leaders count, their leaders do not."""

    record: TopicRecord
    version: int = 0  # in the metadata it was read from; 0: put together from a log


@dataclass(frozen=True)
class NodeInventory:
    """What one node has, and knows."""

    uid: int
    name: str
    waiting: bool = True  # False: it believes the metadata as they are
    held: bool = False
    generation: int = 0
    view_revision: int = 0  # `topics` are all that there were at this revision; 0: only those it has logs of
    poisoned: str = ""
    replicas: Mapping[PartitionKey, ReplicaReport] = field(default_factory=dict)
    topics: tuple[Known, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What becomes of one partition."""

    name: PartitionName
    before: PartitionMeta | None  # in the metadata; None: it is not there
    after: PartitionMeta | None  # None: it stays as it is
    have: Mapping[int, ReplicaReport]
    missing: tuple[int, ...] = ()  # replicas that were not heard
    loss: str = ""  # why acknowledged messages may be gone

    @property
    def waits(self) -> bool:
        """For a replica that was not heard: nobody who was has anything."""
        return not self.have and bool(self.missing)


@dataclass(frozen=True)
class TopicPlan:
    """What becomes of one topic."""

    record: TopicRecord  # as it is to be
    version: int  # of the record in the metadata that is replaced; 0: it is put back
    decisions: tuple[Decision, ...]

    @property
    def restored(self) -> bool:
        return not self.version


@dataclass(frozen=True)
class RestorePlan:
    """Everything that is to be done."""

    topics: tuple[TopicPlan, ...]
    delete: Mapping[str, Versioned[TopicRecord]]  # names -> lives of topics that are over
    left: tuple[tuple[int, str], ...]  # (node, topic): logs of an earlier life of a topic, left where they are
    unheard: tuple[int, ...]  # nodes that records name and nobody answers for
    generation: int
    nodes: tuple[int, ...]  # that were heard
    hold: bool  # no: nodes that were away only follow what was decided without them

    @property
    def decisions(self) -> list[Decision]:
        return [decision for topic in self.topics for decision in topic.decisions]

    @property
    def losses(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.loss]


def plan(
    topics: Mapping[str, Versioned[TopicRecord]],
    tombstones: Iterable[int],
    accepted: int,
    evidence: Mapping[int, NodeInventory],
    *,
    salt_constant: int,
    also_named: Iterable[int] = (),
) -> RestorePlan:
    """Decide. `accepted`: the generation in the metadata; `also_named`: nodes that are known from elsewhere."""
    stored = {topic.record.uid: topic for name, topic in topics.items() if not is_ephemeral(name)}
    known = _newest(evidence.values())
    held = {key[0] for node in evidence.values() for key in node.replicas}
    buried = set(tombstones)
    seen = {uid: topic.record for uid, topic in known.items() if topic.version}
    named = {uid for record in ({u: t.record for u, t in stored.items()} | seen).values() for uid in _nodes(record)}
    unheard = tuple(sorted((named | set(also_named)) - set(evidence)))

    over = {uid for uid, topic in stored.items() if uid not in held and _seen_deleted(topic, evidence.values())}
    if unheard:
        over = set()  # one of them may have it
    lives: dict[str, list[int]] = {}
    for uid in (set(stored) | set(known)) - buried - over:
        record = stored[uid].record if uid in stored else known[uid].record
        if not is_ephemeral(record.name):
            lives.setdefault(record.name, []).append(uid)
    chosen = {}
    left = []
    for name, uids in lives.items():
        # A name is free again only when its topic is deleted: the one that was made last is the one that lives.
        best = max(uids, key=lambda uid: (uid in held, _made(_record(uid, stored, known), salt_constant)))
        chosen[best] = name
        over |= {uid for uid in uids if uid != best and uid in stored}
        # Of what the metadata have, a tombstone is written, and with that the files go.
        earlier = [uid for uid in uids if uid != best and uid not in stored]
        left += [(n.uid, name) for n in evidence.values() for uid in earlier if _has(n, uid)]

    hold = _needs_hold(stored, chosen, accepted, evidence)
    plans = [_topic(uid, stored.get(uid), known.get(uid), evidence, unheard, hold) for uid in chosen]
    return RestorePlan(
        tuple(sorted(plans, key=lambda topic: topic.record.name)),
        {stored[uid].record.name: stored[uid] for uid in sorted(over)},
        tuple(sorted(set(left))),
        unheard,
        max([accepted, *(node.generation for node in evidence.values())]) + 1,
        tuple(sorted(evidence)),
        hold,
    )


def _needs_hold(
    stored: Mapping[int, Versioned[TopicRecord]],
    chosen: Mapping[int, str],
    accepted: int,
    evidence: Mapping[int, NodeInventory],
) -> bool:
    """Whether anything is to be decided, and not only followed."""
    if any(uid not in stored for uid in chosen):
        return True
    for node in evidence.values():
        if not node.waiting:
            continue
        if node.generation >= accepted:
            return True  # nothing was decided since it believed: what it has counts
        for (uid, number), report in node.replicas.items():
            meta = stored[uid].record.partitions.get(number) if uid in stored else None
            if uid in chosen and (meta is None or report.promise >= meta.epoch):
                return True
    return False


def _topic(
    uid: int,
    before: Versioned[TopicRecord] | None,
    known: Known | None,
    evidence: Mapping[int, NodeInventory],
    unheard: tuple[int, ...],
    hold: bool,
) -> TopicPlan:
    have: dict[int, dict[int, ReplicaReport]] = {}
    for node in evidence.values():
        for (topic, number), report in node.replicas.items():
            if topic == uid:
                have.setdefault(number, {})[node.uid] = report
    # What a node read is newer than what was put back, but what a log tells is less than either.
    newest = known.record if known is not None and (known.version or before is None) else None
    base = newest or (before.record if before is not None else None)
    assert base is not None, "a topic that nobody knows"
    if before is not None and not hold:
        metas = before.record.partitions
        whole = tuple(
            Decision(PartitionName(base.name, uid, number), meta, None, have.get(number, {}))
            for number, meta in sorted(metas.items())
        )
        return TopicPlan(before.record, before.version, whole)
    decisions = []
    count = max([*base.partitions, *(before.record.partitions if before is not None else ()), *have], default=-1) + 1
    for number in range(count):
        decisions.append(
            _partition(
                PartitionName(base.name, uid, number),
                base,
                before.record.partitions.get(number) if before is not None else None,
                have.get(number, {}),
                unheard,
                any(node.view_revision for node in evidence.values()),
            )
        )
    record = replace(
        base,
        settings=replace(base.settings, partitions=count),
        channels=_channels(before, known, evidence.values(), uid),
        partitions={d.name.number: d.after for d in decisions if d.after is not None},
    )
    return TopicPlan(record, 0 if before is None else before.version, tuple(decisions))


def _partition(
    name: PartitionName,
    base: TopicRecord,
    before: PartitionMeta | None,
    have: Mapping[int, ReplicaReport],
    unheard: tuple[int, ...],
    informed: bool,
) -> Decision:
    """`informed`: a node that was heard saw all records until they were doubted, so nothing was moved without it."""
    known = base.partitions.get(name.number) or before or PartitionMeta()
    named = dict.fromkeys((*known.replicas, *known.isr))
    missing = tuple(uid for uid in named if uid in unheard)
    begun = {uid: report for uid, report in have.items() if report.log_uid}
    reach = max((report.reach for report in begun.values()), default=(0, 0))
    isr = {uid: report.log_uid for uid, report in sorted(begun.items()) if report.reach == reach}
    if not begun and missing:
        isr = {uid: log_uid for uid, log_uid in known.isr.items() if uid in missing} or dict.fromkeys(missing, 0)
    replicas = _replicas(known.replicas, isr, begun, missing)
    epoch = max(
        [
            known.epoch,
            before.epoch if before is not None else 0,
            *(max(report.promise, report.last_epoch) for report in have.values()),
        ]
    )
    after = PartitionMeta(
        leader=0,
        epoch=epoch + 1,
        isr=isr,
        replicas=replicas,
        min_isr=known.min_isr if known.replicas else min_isr_of(base.settings, len(replicas)),
        sync=known.sync,
        moved_from=known.moved_from,
        version=0 if before is None else before.version,
        unknown=known.unknown,
    )
    kept = {uid for uid, report in begun.items() if known.isr.get(uid, report.log_uid) == report.log_uid}
    gone = sum(uid not in kept for uid in named)
    loss = _loss(begun, isr, missing, gone, after.min_isr)
    others = tuple(uid for uid in unheard if uid not in named)
    if begun and not loss and others and not informed and gone + len(others) >= after.min_isr:
        loss = "every node that was heard was started since; replicas may have been moved to nodes that were not heard"
    return Decision(name, before, after, have, missing, loss)


def _replicas(
    wanted: tuple[int, ...], isr: Mapping[int, int], begun: Mapping[int, ReplicaReport], missing: tuple[int, ...]
) -> tuple[int, ...]:
    """Who has it, in the order that was wanted; others that were wanted only as long as there are too few."""
    kept = {uid for uid in (*wanted, *begun, *isr) if uid in begun or uid in missing or uid in isr}
    spare = [uid for uid in wanted if uid not in kept]
    kept |= set(spare[: max(0, len(wanted) - len(kept))])
    others = sorted(kept - set(wanted), key=lambda uid: (uid not in isr, uid))
    return (*(uid for uid in wanted if uid in kept), *others)


def _loss(
    begun: Mapping[int, ReplicaReport], isr: Iterable[int], missing: tuple[int, ...], gone: int, min_isr: int
) -> str:
    """Why acknowledged messages may be gone, if so. `gone`: replicas that were not heard or do not have the log that
    they had, which a node makes anew where its disk was replaced, or its host went down before all was synced."""
    if not begun:
        return "" if missing else "no node has anything of it"
    if all(begun[uid].corrupt or begun[uid].poisoned for uid in isr):
        # A log that lost its end is whole again at the next start, and is elected: nobody would say it then.
        return "every replica that has most has damage"
    if not gone:
        return ""
    if gone >= min_isr:
        whose = "were not heard or have lost their log" if missing else "have lost their log"
        return f"{gone} of its replicas {whose}, and {min_isr} are enough to acknowledge"
    doubtful = [report for report in begun.values() if report.cut or report.corrupt or report.poisoned]
    return "not all of its replicas were heard and have their log, and one that has it has damage" if doubtful else ""


def _channels(
    before: Versioned[TopicRecord] | None, known: Known | None, nodes: Iterable[NodeInventory], uid: int
) -> ChannelList:
    """The newest list that anybody knows, newer than every copy in a log."""
    lists = [topic.record.channels for node in nodes for topic in node.topics if topic.record.uid == uid]
    if before is not None:
        lists.append(before.record.channels)
    if known is not None:
        lists.append(known.record.channels)
    newest = max(lists, key=lambda channels: channels.version)
    return newest.above(newest.version + CHANNELS_MARGIN)


def _newest(nodes: Iterable[NodeInventory]) -> dict[int, Known]:
    """Of each topic what the best informed node knows: partitions are as new as their own versions."""
    found: dict[int, Known] = {}
    for node in nodes:
        for topic in node.topics:
            uid = topic.record.uid
            other = found.get(uid)
            if other is None:
                found[uid] = topic
                continue
            newer, older = (topic, other) if _age(topic) > _age(other) else (other, topic)
            partitions = dict(older.record.partitions) | dict(newer.record.partitions)
            for number, meta in older.record.partitions.items():
                if older.version and meta.version > partitions[number].version:
                    partitions[number] = meta
            found[uid] = replace(newer, record=replace(newer.record, partitions=partitions))
    return found


def _age(topic: Known) -> tuple[int, int, int]:
    # A salt is in the ids of messages: a log without any does not tell it.
    return topic.version, topic.record.salt != 0, topic.record.channels.version


def _seen_deleted(topic: Versioned[TopicRecord], nodes: Iterable[NodeInventory]) -> bool:
    """A node that has seen the metadata when they were newer than this record saw no such topic any more."""
    views = [node for node in nodes if node.view_revision >= topic.version]
    newest = max(views, key=lambda node: node.view_revision, default=None)
    return newest is not None and all(seen.record.uid != topic.record.uid for seen in newest.topics)


def _made(record: TopicRecord, salt_constant: int) -> int:
    """When a topic was made, counted in topics; -1: its salt is not known."""
    return topic_salt(record.salt ^ salt_constant, 0) if record.salt else -1


def _record(uid: int, stored: Mapping[int, Versioned[TopicRecord]], known: Mapping[int, Known]) -> TopicRecord:
    return stored[uid].record if uid in stored else known[uid].record


def _has(node: NodeInventory, uid: int) -> bool:
    return any(key[0] == uid for key in node.replicas)


def _nodes(record: TopicRecord) -> set[int]:
    return {uid for meta in record.partitions.values() for uid in (*meta.replicas, *meta.isr) if uid}
