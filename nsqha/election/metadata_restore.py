"""How metadata that were restored to an older state follow the nodes: the plan of `nsqha cluster accept-metadata`.

    restored metadata  +  {node: NodeInventory}  ->  RestorePlan: topics and partitions as they will be

A node that finds an etcd which is not the one it belonged to, or is older than what it has seen, does not trust it. It
announces itself under `waiting/` there, and answers what it has (`NodeInventory`). The command shows the plan, and then

    hold       put: every node stops leading and following; logs are recovered, nothing changes any more
    inventory  asked for again, the plan made again
    records    changed, each by compare-and-set
    accepted   generation + 1 with the nodes that answered; the same transaction removes the hold

in that order, so that an interruption leaves the nodes waiting, and the command can be run again.

Per partition, from all answers:

- the epoch is above every promise, every entry and every record: what an old leader still sends is refused;
- the ISR is the replicas with the highest (last epoch, log end). A message that was acknowledged in epoch e is on all
  of the ISR of e, and later leaders had it. So of replicas with one last epoch the longest has it, and of several last
  epochs the replicas with the latest; two with the same (last epoch, end) have the same log. That holds if one of the
  last ISR answered, which is certain when fewer than `min_isr` replicas are missing;
- there is no leader: the controller elects one from that ISR, as always.

Topics that the metadata do not have come back as a node knew them, else as their logs describe them. A topic of which
no node has anything, and that a node saw deleted, is deleted again. Generations count acceptances; a node that was away
follows a later one without a hold if no promise of it reaches the epochs that were decided without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from nsqha.election.elect import ReplicaReport
from nsqha.election.model import ChannelList, PartitionMeta, StoredRecord, TopicRecord, Versioned
from nsqha.election.placement import PartitionName, min_isr_of
from nsqha.ids import PartitionKey, is_ephemeral, topic_salt

CHANNELS_MARGIN = 1000
"""Changes of a channel list that the uncommitted ends of logs may have, and that no node knows yet."""


@dataclass(frozen=True)
class WaitingNode(StoredRecord):
    """A node that does not trust these metadata. The record exists as long as the node is alive."""

    node_uid: int
    name: str = ""
    grpc_address: str = ""
    cluster_id: int = 0
    generation: int = 0  # the one that it follows
    held: bool = False  # it leads and follows nothing any more
    why: str = ""


@dataclass(frozen=True)
class Hold(StoredRecord):
    """An acceptance is under way: no node leads or follows, and there are no elections."""

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
    version: int = 0  # in the metadata it was read from; 0: rebuilt from a log


@dataclass(frozen=True)
class NodeInventory:
    """What one node has and knows."""

    uid: int
    name: str
    waiting: bool = True  # False: it trusts the metadata as they are
    held: bool = False
    generation: int = 0
    view_revision: int = 0  # `topics` are all topics at this revision; 0: only those it has logs of
    poisoned: str = ""
    replicas: Mapping[PartitionKey, ReplicaReport] = field(default_factory=dict)
    topics: tuple[Known, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The plan for one partition."""

    name: PartitionName
    before: PartitionMeta | None  # in the metadata; None: it is not there
    after: PartitionMeta | None  # None: it stays as it is
    have: Mapping[int, ReplicaReport]
    missing: tuple[int, ...] = ()  # replicas that did not answer
    loss: str = ""  # why acknowledged messages may be lost

    @property
    def waits(self) -> bool:
        """Whether it waits for a replica that did not answer, because no replica that answered has anything."""
        return not self.have and bool(self.missing)


@dataclass(frozen=True)
class TopicPlan:
    """The plan for one topic."""

    record: TopicRecord  # as it will be
    version: int  # of the record in the metadata that is replaced; 0: there is none
    decisions: tuple[Decision, ...]

    @property
    def restored(self) -> bool:
        return not self.version


@dataclass(frozen=True)
class RestorePlan:
    """All changes of one acceptance."""

    topics: tuple[TopicPlan, ...]
    delete: Mapping[str, Versioned[TopicRecord]]  # names -> lives of topics that are over
    left: tuple[tuple[int, str], ...]  # (node, topic): logs of an earlier life of a topic, which are not touched
    unheard: tuple[int, ...]  # nodes that records name and that did not answer
    generation: int
    nodes: tuple[int, ...]  # nodes that answered
    hold: bool  # False: nodes that were away only follow what was decided without them

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
    """Make the plan. `accepted`: the generation in the metadata; `also_named`: nodes that are known from elsewhere."""
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
        # A name is free again only when its topic is deleted: the topic that was created last is the live one.
        best = max(uids, key=lambda uid: (uid in held, _made(_record(uid, stored, known), salt_constant)))
        chosen[best] = name
        over |= {uid for uid in uids if uid != best and uid in stored}
        # For a topic in the metadata a tombstone is written, which has its files removed.
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
    """Whether anything must be decided, and not only followed."""
    if any(uid not in stored for uid in chosen):
        return True
    for node in evidence.values():
        if not node.waiting:
            continue
        if node.generation >= accepted:
            return True  # nothing was decided since it trusted the metadata: what it has counts
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
    # A node's record is newer than the restored one; one rebuilt from a log has less than both.
    newest = known.record if known is not None and (known.version or before is None) else None
    base = newest or (before.record if before is not None else None)
    assert base is not None, "a topic that no node and no record has"
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
    """`informed`: a node that answered saw all records until they were doubted, so nothing was moved without it."""
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
        loss = "every node that answered was started since; replicas may have been moved to nodes that did not answer"
    return Decision(name, before, after, have, missing, loss)


def _replicas(
    wanted: tuple[int, ...], isr: Mapping[int, int], begun: Mapping[int, ReplicaReport], missing: tuple[int, ...]
) -> tuple[int, ...]:
    """The replicas that have it, in the wanted order; others that were wanted only if there are too few."""
    kept = {uid for uid in (*wanted, *begun, *isr) if uid in begun or uid in missing or uid in isr}
    spare = [uid for uid in wanted if uid not in kept]
    kept |= set(spare[: max(0, len(wanted) - len(kept))])
    others = sorted(kept - set(wanted), key=lambda uid: (uid not in isr, uid))
    return (*(uid for uid in wanted if uid in kept), *others)


def _loss(
    begun: Mapping[int, ReplicaReport], isr: Iterable[int], missing: tuple[int, ...], gone: int, min_isr: int
) -> str:
    """Why acknowledged messages may be lost; empty: they are not. `gone`: replicas that did not answer or do not have
    the log that they had: a new log begins if the disk was replaced, or the host crashed before all was synced."""
    if not begun:
        return "" if missing else "no node has anything of it"
    if all(begun[uid].corrupt or begun[uid].poisoned for uid in isr):
        # The next start repairs a log that lost its end, and it can be elected: the loss must be reported now.
        return "every replica that has most has damage"
    if not gone:
        return ""
    if gone >= min_isr:
        whose = "did not answer or have lost their log" if missing else "have lost their log"
        return f"{gone} of its replicas {whose}, and {min_isr} are enough to acknowledge"
    doubtful = [report for report in begun.values() if report.cut or report.corrupt or report.poisoned]
    return "not all of its replicas answered and have their log, and one that has it has damage" if doubtful else ""


def _channels(
    before: Versioned[TopicRecord] | None, known: Known | None, nodes: Iterable[NodeInventory], uid: int
) -> ChannelList:
    """The newest list that any node knows, newer than every copy in a log, with the policies of the newest record."""
    found = [topic for node in nodes for topic in node.topics if topic.record.uid == uid]
    if known is not None:
        found.append(known)
    records = [topic.record.channels for topic in found if topic.version]  # the others are from logs alone
    if before is not None:
        records.append(before.record.channels)
    newest = max([*records, *(topic.record.channels for topic in found)], key=lambda channels: channels.version)
    if records:
        newest = newest.with_policies_of(max(records, key=lambda channels: channels.version))
    return newest.above(newest.version + CHANNELS_MARGIN)


def _newest(nodes: Iterable[NodeInventory]) -> dict[int, Known]:
    """The newest record of each topic that a node knows; each partition has its own version."""
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
    # The salt is in the ids of messages: a log without messages does not show it.
    return topic.version, topic.record.salt != 0, topic.record.channels.version


def _seen_deleted(topic: Versioned[TopicRecord], nodes: Iterable[NodeInventory]) -> bool:
    """Whether a node that saw newer metadata than this record saw no such topic in them."""
    views = [node for node in nodes if node.view_revision >= topic.version]
    newest = max(views, key=lambda node: node.view_revision, default=None)
    return newest is not None and all(seen.record.uid != topic.record.uid for seen in newest.topics)


def _made(record: TopicRecord, salt_constant: int) -> int:
    """When a topic was created, counted in topics; -1: its salt is not known."""
    return topic_salt(record.salt ^ salt_constant, 0) if record.salt else -1


def _record(uid: int, stored: Mapping[int, Versioned[TopicRecord]], known: Mapping[int, Known]) -> TopicRecord:
    return stored[uid].record if uid in stored else known[uid].record


def _has(node: NodeInventory, uid: int) -> bool:
    return any(key[0] == uid for key in node.replicas)


def _nodes(record: TopicRecord) -> set[int]:
    return {uid for meta in record.partitions.values() for uid in (*meta.replicas, *meta.isr) if uid}
