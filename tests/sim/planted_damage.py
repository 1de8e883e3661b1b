"""Planted bugs: damage, its repair, logs that can not be vouched for, and what an operator gives up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from nsqha.commitlog import recovery
from nsqha.commitlog.corruption.scan import scan_entries
from nsqha.commitlog.corruption.verdict import judge as judge_damage
from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.reading import lookup
from nsqha.commitlog.reading.lookup import LogReader
from nsqha.cursor.committed import loading
from nsqha.election import elect
from nsqha.election.controller import elections
from nsqha.election.unclean import elect_unclean
from nsqha.server.integrity.corrupt_ranges import CorruptRanges
from nsqha.server.integrity.peer_repair import Repairer, is_lost
from nsqha.server.integrity.suspect_logs import SuspectLogs
from nsqha.server.replica.follower_roles import FollowerRoles
from nsqha.server.replica.leader_roles import LeaderRoles
from nsqha.server.replica.status import ReplicaAnswers
from tests.sim.planting import damage, losses, mutant

# ---- found and mended


@mutant(damage)
def damage_delivered() -> Iterator[None]:
    """Nobody looks at the CRC of a batch."""
    with (
        patch.object(lookup, "verifies", lambda entry, data: True),
        patch.object(lookup, "_verified_run", lambda pair, first, fields: None),
    ):
        yield


@mutant(damage)
def damage_not_repaired() -> Iterator[None]:
    """Damage is found, and that is all."""
    with patch.object(Repairer, "damaged", lambda self, key, first, end: None):
        yield


@mutant(scene=("test_a_damaged_batch_that_nobody_has_is_looked_behind", True))
def checkpoints_sought_by_the_block() -> Iterator[None]:
    """The search for a checkpoint ends at damage that it has not come to."""

    def backwards(log: Any, end_log_id: int) -> Iterator[Any]:
        end, start = end_log_id, log.start.log_id
        while end > start:
            first = max(start, end - loading._BLOCK)
            yield from reversed(list(log.entries(first, end)))
            end = first

    with patch.object(loading, "_backwards", backwards):
        yield


@mutant(scene=("test_a_damaged_batch_that_nobody_has_is_looked_behind", False))
def nobody_looks_behind() -> Iterator[None]:
    """A follower waits for a batch that retention took from everybody else."""

    async def look(self: FollowerRoles, key: Any) -> None:
        pass

    with patch.object(FollowerRoles, "look_behind_damage", look):
        yield


# ---- logs that can not be vouched for


@mutant(damage)
def damaged_log_keeps_its_name() -> Iterator[None]:
    """The ISR counts on a log that recovery found damaged."""

    def judge(watermark: int, bad: Any, circumstances: Any) -> Any:
        verdict = original(watermark, bad, circumstances)
        lost = not circumstances.sync_always and circumstances.page_cache_lost
        return replace(verdict, new_log_uid=not circumstances.known or lost)

    original = judge_damage
    with patch.object(recovery, "judge", judge):
        yield


@mutant(scene=("test_a_last_batch_that_was_written_whole_is_not_cut_like_a_torn_one",))
def written_whole_taken_for_torn() -> Iterator[None]:
    """What was written whole, may have been acknowledged and does not verify is cut like a torn end."""

    def scan(pairs: Any, *, alone: bool) -> Any:
        return replace(original(pairs, alone=alone), written=0)

    original = scan_entries
    with patch.object(recovery, "scan_entries", scan):
        yield


@mutant(scene=("test_damage_is_found_at_each_start_until_it_is_mended", True))
def marked_once_and_forgotten() -> Iterator[None]:
    """What one recovery marked as lost is whole to the next one."""

    def scan(pairs: Any, *, alone: bool) -> Any:
        return original(pairs, alone=True)

    original = scan_entries
    with patch.object(recovery, "scan_entries", scan):
        yield


@mutant(scene=("test_damage_is_found_at_each_start_until_it_is_mended", False))
def damage_journalled_as_durable() -> Iterator[None]:
    """The journal says that doubtful batches are durable, so the next recovery does not look."""
    with patch.object(PartitionLog, "vouched_durable", property(lambda self: self.local_durable)):
        yield


@mutant(scene=("test_members_with_damage_of_their_own_mend_one_another_and_one_leads", True))
def old_name_never_taken_back() -> Iterator[None]:
    """A log that was mended is another one for ever."""

    async def whole(self: FollowerRoles, key: Any, name: int) -> None:
        await original(self, key, 0)

    original = FollowerRoles.whole_again
    with patch.object(FollowerRoles, "whole_again", whole):
        yield


@mutant(damage)
def old_name_taken_back_at_once() -> Iterator[None]:
    """... or goes by its old name before it is mended."""

    def look(self: SuspectLogs, key: Any) -> None:
        if (doubted := self._doubted.get(key)) is not None:
            self.on_whole(key, doubted.name)

    with patch.object(SuspectLogs, "look", look):
        yield


@mutant(losses)
def elected_without_an_operator() -> Iterator[None]:
    """Where every member is damaged the controller takes the best of them."""

    def choose(ballot: elect.Ballot) -> Any:
        chosen = original(ballot)
        if not (isinstance(chosen, elect.Wait) and chosen.operator):
            return chosen
        heard = {uid: report for uid, report in ballot.reports.items() if report.log_uid}
        best = max(heard, key=lambda uid: heard[uid].reach, default=0)
        unclean = elect_unclean(ballot.meta, heard, ballot.nodes, best)
        return chosen if isinstance(unclean, str) else elect.Elected(unclean.meta)

    original = elect.choose
    with patch.object(elections, "choose", choose):
        yield


# ---- given up


@mutant(losses)
def operator_not_heard() -> Iterator[None]:
    """A damaged replica does not lead, whatever the record says of its epoch."""

    async def before_leading(self: LeaderRoles, follower: Any, epoch: int) -> None:
        pass

    with patch.object(LeaderRoles, "_before_leading", before_leading):
        yield


@mutant(losses)
def given_up_not_copied() -> Iterator[None]:
    """No replica can be made of a log that has given something up."""

    async def read(self: ReplicaAnswers, log: Any, request: Any, end: int, *, lost: bool = False) -> Any:
        return await original(self, log, request, end)

    original = ReplicaAnswers._read
    with patch.object(ReplicaAnswers, "_read", read):
        yield


@mutant(losses)
def given_up_and_still_waited_for() -> Iterator[None]:
    """Channels of followers stop in front of what was given up."""
    with patch.object(LogReader, "events", LogReader.read):
        yield


@mutant(losses)
def given_up_by_the_leader_alone() -> Iterator[None]:
    """Followers with the same damage go on waiting for it."""

    async def as_leader(self: CorruptRanges, *arguments: Any) -> None:
        pass

    with patch.object(CorruptRanges, "_as_leader", as_leader):
        yield


@mutant(scene=("test_nothing_is_given_up_that_somebody_has",))
def given_up_unasked() -> Iterator[None]:
    """Nobody is asked for what is given up."""

    async def ask(self: CorruptRanges, key: Any, log: Any) -> None:
        pass

    with patch.object(CorruptRanges, "ask_all", ask):
        yield


@mutant(scene=("test_what_was_given_up_is_written_back_when_somebody_has_it",))
def given_up_for_good() -> Iterator[None]:
    """What was given up is asked for no more."""

    async def mend(self: Repairer, key: Any, log: Any, first: int, end: int) -> bool:
        return all(is_lost(log, n) for n in range(first, end)) or await original(self, key, log, first, end)

    original = Repairer.mend
    with patch.object(Repairer, "mend", mend):
        yield
