"""An operator's election: the leader of a partition when the rules of `nsqha.election.elect` allow none.

The best of the replicas that answered is chosen, in the ISR or not, or the one that the operator names. The partition
loses what that replica does not have, acknowledged or not; `Unclean` says what is known about that, so that it can be
shown before the decision. The new ISR is that replica alone: the others join it again and cut their logs to its.

A replica with damage may lead only if the record says so for this epoch (`damage_accepted`): it asks the others for the
damaged ranges first, and gives up what no replica has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nsqha.election.elect import Evidence, NameOf, ReplicaReport, evidence
from nsqha.election.model import NodeInfo, PartitionMeta


@dataclass(frozen=True, slots=True)
class Unclean:
    """A choice, and what it may lose."""

    meta: PartitionMeta  # to be put by compare-and-set, with the registration of its leader
    unheard: tuple[int, ...]  # members of the ISR that did not answer: they may have acknowledged more
    ahead: Mapping[int, int]  # replicas that answered and have more: their log end
    evidence: Evidence  # what the logs say about acknowledged messages

    @property
    def lossless(self) -> bool:
        """True only if nothing acknowledged is missing, which is proven."""
        return bool(self.evidence.proof)


def elect_unclean(
    meta: PartitionMeta,
    reports: Mapping[int, ReplicaReport],
    nodes: Mapping[int, NodeInfo],
    wanted: int = 0,
    *,
    name: NameOf = lambda uid: f"{uid:016x}",
) -> Unclean | str:
    """Choose among `reports`, live answers; or say why none can be chosen. `wanted` 0: the replica that has most.

    A replica with a range that does not verify is chosen only if it is named; it may lead then, in this epoch."""
    heard = {
        uid: report
        for uid, report in reports.items()
        if uid in meta.replicas and uid in nodes and report.registration == nodes[uid].registration
    }
    leading = heard.get(meta.leader)
    if leading is not None and leading.leading and leading.promise == meta.epoch:
        return "its leader is alive and leads"
    able = {uid: r for uid, r in heard.items() if r.log_uid and not r.poisoned and (not r.corrupt or uid == wanted)}
    if wanted and wanted not in able:
        return "that node did not answer, does not have the partition, or its disk is closed"
    if not able and any(r.log_uid and not r.poisoned for r in heard.values()):
        return "every replica that answered has damage; name the one that shall lead with it"
    if not able:
        return "no replica that can lead has answered"
    uid = wanted or max(able, key=lambda u: (able[u].reach, u in meta.isr, -meta.replicas.index(u)))
    chosen = able[uid]
    new = replace(
        meta,
        leader=uid,
        epoch=max([meta.epoch, *(report.promise for report in reports.values())]) + 1,
        registration=nodes[uid].registration,
        isr={uid: chosen.log_uid},
        successor=0,
    )
    if chosen.corrupt:
        new = replace(new, damage_accepted=new.epoch)
    return Unclean(
        new,
        tuple(sorted(member for member in meta.isr if member not in heard)),
        {other: report.end for other, report in sorted(heard.items()) if report.reach > chosen.reach},
        evidence(meta, heard, uid, name),
    )
