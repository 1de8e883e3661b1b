"""What logs prove about acknowledged messages when none of them may be elected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsqha.election.elect import MAY_BE_LOST, NOTHING_LOST, Elected, Evidence, ReplicaReport, Wait, choose, evidence
from nsqha.election.model import PartitionMeta
from tests.unit.election.test_elect import ISR, META, A, B, C, ballot, said

CHAIN = 0xC4A1


def copy_of(uid: int, end: int = 10, **changes: object) -> ReplicaReport:
    """The answer of a node whose log is not the one that the record names."""
    return said(uid, end, **{"log_uid": 0xC0 + uid, "chain": CHAIN, **changes})


def found(reports: dict[int, ReplicaReport], chosen: int = A, meta: PartitionMeta = META) -> Evidence:
    return evidence(meta, reports, chosen, lambda uid: f"n{uid}")


def test_older_copies_with_equal_ends_prove_nothing() -> None:
    known = found({uid: copy_of(uid) for uid in ISR})
    assert not known.proof and known.text.startswith(MAY_BE_LOST)
    assert known.facts == (
        f"n1 has the log up to entry 10 (epoch 5, chain {CHAIN:016x})",
        "n2 ends with the same entry",
        "n3 ends with the same entry",
    )


def test_the_end_of_a_log_that_is_trusted_proves_it() -> None:
    closed = said(B, chain=CHAIN, poisoned="EIO")
    known = found({A: copy_of(A), B: closed})
    assert known.proof == "the log of n2, which has all of it, ends with the same entry"
    assert known.text.startswith(NOTHING_LOST)
    assert "no answer of n3" in known.facts


@pytest.mark.parametrize(
    "other",
    [
        {"chain": CHAIN + 1},
        {"end": 11},
        {"last_epoch": 6},
        {"cut": True},
        {"log_uid": 0xC2},
        {"log_uid": 0},
    ],
)
def test_no_other_end_proves_it(other: dict[str, object]) -> None:
    assert not found({A: copy_of(A), B: replace(said(B, chain=CHAIN), **other)}).proof  # type: ignore[arg-type]


def test_a_replica_outside_the_isr_proves_nothing() -> None:
    fewer = replace(META, isr={A: 0xA})
    assert not found({A: copy_of(A), B: said(B, chain=CHAIN)}, meta=fewer).proof


def test_a_build_that_says_no_chain_proves_nothing() -> None:
    assert not found({A: copy_of(A, chain=0), B: said(B, poisoned="EIO")}).proof


def test_a_partition_that_never_acknowledged_anything_loses_nothing() -> None:
    new = PartitionMeta(isr={A: 0xA}, replicas=(A, B, C), min_isr=2, nothing_acked=True)
    assert found({A: copy_of(A)}, meta=new).proof == "the partition has never acknowledged anything"


def test_what_was_committed_and_is_missing_is_said() -> None:
    known = found({A: copy_of(A, 10), B: copy_of(B, 9, committed=12)})
    assert "entries up to 12 were committed, and n1 lacks the last of them" in known.facts
    assert "n2 ends at entry 9 (epoch 5, " in known.text


def test_the_controller_says_what_is_known_where_it_waits_for_an_operator() -> None:
    copies = [(uid, copy_of(uid)) for uid in ISR]
    wait = choose(ballot(*copies, failed=()))
    assert isinstance(wait, Wait) and wait.operator
    assert MAY_BE_LOST in wait.why and "ends with the same entry" in wait.why and "cluster elect" in wait.why
    one_closed = [(A, copy_of(A)), (B, said(B, chain=CHAIN, poisoned="EIO")), (C, copy_of(C))]
    wait = choose(ballot(*one_closed, failed=()))
    assert isinstance(wait, Wait) and wait.operator and NOTHING_LOST in wait.why
    chosen = choose(ballot(*copies, failed=(), sync="interval"))
    assert isinstance(chosen, Elected) and MAY_BE_LOST in chosen.loss
