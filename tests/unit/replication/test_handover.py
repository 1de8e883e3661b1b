"""Who leaves because it shuts down, and whom a leader names as the next one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsqha.election.model import PartitionMeta
from nsqha.replication.isr import Applied, Fence, ProposalRefused, Propose, Reread, StepDown, Unknown
from tests.unit.replication.isr_rig import A, B, C, IsrRig, newer, proposal, record


def departing(*nodes: int, meta: PartitionMeta | None = None) -> IsrRig:
    """Everybody has everything, and these nodes shut down."""
    rig = IsrRig(meta)
    rig.in_sync(B, C)
    rig.committed = rig.end
    rig.keeper.depart(frozenset(nodes), rig.now)
    return rig


def test_a_member_that_shuts_down_leaves_before_its_stream_ends() -> None:
    rig = departing(C)
    shrink = proposal(rig.step())
    assert (shrink.change, set(shrink.meta.isr), shrink.meta.leader) == ("shrink", {A, B}, A)
    rig.keeper.replied(Applied(newer(shrink.meta)), rig.now)
    rig.heard(C, rig.end)
    assert not rig.step(3.0)
    rig.keeper.depart(frozenset(), rig.now)
    assert proposal(rig.step(1.5)).change == "expand"


def test_at_the_floor_a_member_that_shuts_down_stays() -> None:
    assert not departing(B, meta=record((A, B), replicas=(A, B))).step(3.0)


def test_a_leader_that_shuts_down_names_the_next_one_and_is_not_waited_for() -> None:
    rig = departing(A)
    assert rig.keeper.heir == B
    transfer = proposal(rig.step())
    meta = transfer.meta
    assert (transfer.change, meta.leader, meta.epoch, meta.registration) == ("transfer", B, 4, 1)
    assert set(meta.isr) == {B, C} and transfer.registered == {B: 1} and meta.version == 10
    (end,) = rig.keeper.replied(Applied(newer(meta)), rig.now)
    assert isinstance(end, StepDown)


def test_whom_a_proposal_names_may_lead_until_it_is_refused() -> None:
    rig = departing(A)
    assert proposal(rig.step()).meta.leader == B
    rig.keeper.followers.lost(B, rig.now)
    rig.keeper.followers.lost(C, rig.now)
    assert rig.keeper.heir == B, "lost because it leads, perhaps"
    rig.keeper.replied(Unknown(), rig.now)
    assert rig.keeper.heir == B
    rig.keeper.replied(ProposalRefused(newer(rig.keeper.meta)), rig.now)
    assert rig.keeper.heir == 0


def test_at_the_floor_a_leader_that_shuts_down_stays_in_the_isr() -> None:
    rig = departing(A, meta=record((A, C)))
    assert set(proposal(rig.step()).meta.isr) == {A, C}


def test_nobody_is_named_before_everything_is_committed() -> None:
    rig = departing(A)
    rig.committed = rig.end - 1
    assert not rig.step(1.0)
    rig.committed = rig.end
    assert proposal(rig.step()).meta.leader == B


def test_a_successor_that_the_record_names_is_elected_and_the_isr_stays() -> None:
    rig = departing(meta=replace(record(), successor=C))
    meta = proposal(rig.step()).meta
    assert (meta.leader, meta.successor, set(meta.isr)) == (C, 0, {A, B, C})


@pytest.mark.parametrize("trouble", ["lost", "another log", "shuts down", "unheard", "outside", "unfit"])
def test_who_can_not_lead_is_not_named(trouble: str) -> None:
    rig = departing(A, B if trouble == "shuts down" else A, meta=record((A, C)) if trouble == "outside" else None)
    match trouble:
        case "lost":
            rig.keeper.followers.lost(B, rig.now)
        case "another log":
            rig.heard(B, rig.end, log_uid=7)
        case "unheard":
            rig.heard(B, rig.end, registration=0)
        case "unfit":
            rig.heard(B, rig.end, fit=False)
    assert rig.keeper.heir == C
    assert proposal(rig.step()).meta.leader == C


def test_a_named_successor_that_says_that_it_is_unfit_is_not_waited_for() -> None:
    rig = departing(meta=replace(record(), successor=C))
    rig.heard(C, rig.end, fit=False)
    assert rig.keeper.heir == 0 and not rig.step(1.0), "publishing goes on; the controller gives it up"
    rig.heard(C, rig.end)
    assert rig.keeper.heir == C and proposal(rig.step()).meta.leader == C


def test_a_successor_that_does_not_take_over_is_taken_out_of_the_record() -> None:
    """Other nodes send their publishes nowhere meanwhile, and there may be no controller that gives it up."""
    rig = IsrRig()
    rig.committed = rig.end
    rig.in_sync(B, C)
    rig.step(20.0)
    rig.keeper.refreshed(newer(rig.keeper.meta, successor=C), rig.now)
    rig.keeper.followers.lost(C, rig.now)
    rig.keeper.refreshed(newer(rig.keeper.meta, isr={A: 100, B: 200}), rig.now)  # it left the ISR and stays away
    rig.now += 0.1
    assert not rig.step(9.0)
    given_up = proposal(rig.step(3.0))
    assert given_up.change == "transfer_given_up" and given_up.meta.successor == 0
    assert given_up.meta == replace(rig.keeper.meta, successor=0)
    assert not rig.keeper.replied(Applied(newer(given_up.meta)), rig.now) and rig.keeper.heir == 0
    assert not rig.step(30.0)


def test_a_successor_has_its_time_from_when_it_was_named() -> None:
    rig = IsrRig(replace(record(), successor=C))
    rig.in_sync(B)
    rig.committed = rig.end
    rig.keeper.followers.lost(C, rig.now)
    rig.keeper.refreshed(newer(rig.keeper.meta, isr={A: 100, B: 200}), rig.now)
    assert not rig.step(8.0)
    rig.keeper.refreshed(newer(rig.keeper.meta, successor=B), rig.now)
    rig.heard(B, rig.end - 1)
    rig.committed = rig.end - 1
    assert not [a for a in rig.step(1.5) if isinstance(a, Propose)]
    assert not [a for a in rig.step(5.0) if isinstance(a, Propose) and a.change == "transfer_given_up"]


def test_a_leader_that_shuts_down_passes_over_a_named_successor_that_is_unfit() -> None:
    rig = departing(A, meta=replace(record(), successor=C))
    rig.heard(C, rig.end, fit=False)
    meta = proposal(rig.step()).meta
    assert (meta.leader, meta.successor) == (B, 0)


def test_nobody_is_named_while_all_are_unfit() -> None:
    rig = departing(A)
    for node in (B, C):
        rig.heard(node, rig.end, fit=False)
    assert rig.keeper.heir == 0 and not rig.step(3.0)


def test_who_has_lost_its_registration_is_passed_over_for_a_while() -> None:
    rig = departing(A)
    rig.step()
    assert Reread() in rig.keeper.replied(ProposalRefused(), rig.now)
    rig.keeper.refreshed(rig.keeper.meta, rig.now)
    assert proposal(rig.step()).meta.leader == C


def test_a_transfer_of_unknown_outcome_is_fenced() -> None:
    rig = departing(A)
    meta = proposal(rig.step()).meta
    (fence,) = rig.keeper.replied(Unknown(), rig.now)
    assert fence == Fence(10)
    assert rig.keeper.effective == {A, B, C}
    (end,) = rig.keeper.replied(Applied(newer(meta)), rig.now)
    assert isinstance(end, StepDown)


# ---- a leader that declines


def declining(*nodes: int, meta: PartitionMeta | None = None) -> IsrRig:
    """All have everything, and these nodes should lead only where no other can."""
    rig = IsrRig(meta)
    rig.in_sync(B, C)
    rig.committed = rig.end
    rig.keeper.depart(frozenset(), rig.now, declining=frozenset(nodes))
    return rig


def test_a_leader_that_declines_names_the_next_one_and_stays_in_the_isr() -> None:
    transfer = proposal(declining(A).step())
    assert (transfer.change, transfer.meta.leader, set(transfer.meta.isr)) == ("transfer", B, {A, B, C})


def test_one_that_declines_is_not_named_and_stays_in_the_isr() -> None:
    assert proposal(declining(A, B).step()).meta.leader == C
    assert not declining(B).step(3.0)


def test_where_all_decline_the_leader_goes_on() -> None:
    rig = declining(A, B, C)
    assert rig.keeper.heir == 0 and not rig.step(3.0)


def test_a_successor_that_declines_is_not_waited_for() -> None:
    rig = declining(B, meta=replace(record(), successor=B))
    assert rig.keeper.heir == 0
    assert declining(A, B, meta=replace(record(), successor=B)).keeper.heir == C
