"""The committed part of a followed log: what is applied, in which order, and what stops it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from nsqha.commitlog.entry import BatchCorrupt, Place
from nsqha.cursor.committed.state import PartitionState
from nsqha.server.replica.following import applier as applier_module
from nsqha.server.replica.following.applier import Applier
from tests.fakes.loop import VirtualLoop
from tests.unit.server.replica_rig import add, log_of


class Applying:
    """An applier over a log of `batches` batches."""

    def __init__(self, batches: int, *, state: bool = True) -> None:
        self.loop = VirtualLoop()
        self.log = log_of()
        for _ in range(batches):
            add(self.log, 1, b"m")
        self.allowed = True
        self.damage: list[tuple[int, int]] = []
        self.fit_changes = 0
        self.failures: list[Exception] = []
        self.applier = Applier(
            self.log,
            PartitionState() if state else None,
            loop=cast(Any, self.loop),
            may_apply=lambda: self.allowed,
            on_damage=lambda first, end: self.damage.append((first, end)),
            on_fit=self._fit_changed,
            on_failure=self.failures.append,
        )

    def _fit_changed(self) -> None:
        self.fit_changes += 1

    @property
    def applied(self) -> int:
        assert self.applier.state is not None
        return self.applier.state.applied.log_id


def test_only_what_is_committed_is_applied() -> None:
    rig = Applying(3)
    rig.applier.apply(3)
    assert (rig.applied, rig.applier.committed) == (2, 3)


def test_the_high_watermark_does_not_go_back() -> None:
    rig = Applying(3)
    rig.applier.apply(4)
    rig.applier.apply(2)
    assert (rig.applied, rig.applier.committed) == (3, 4)


def test_what_was_appended_is_applied_without_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Applying(2)
    for entry in rig.log.entries(1, 3):
        rig.applier.wrote((entry, b""))
    monkeypatch.setattr(rig.log, "entries", None)
    rig.applier.apply(3)
    assert rig.applied == 2 and not rig.failures


def test_what_can_not_be_opened_just_now_vouches_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Applying(3)
    rig.applier.apply(3)
    with monkeypatch.context() as patched:
        patched.setattr(rig.log, "entry_before", too_many_files)
        assert not rig.applier.vouched_for
    assert rig.applier.vouched_for and not rig.failures


def too_many_files(log_id: int) -> None:
    raise OSError(24, "too many open files")


def test_a_long_run_is_applied_in_turns_and_only_while_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier_module, "APPLY_SLICE", 2)
    rig = Applying(5)
    rig.applier.apply(6)
    assert rig.applied == 2, "the rest of the loop has its turn"
    rig.allowed = False
    rig.loop.turn()
    assert rig.applied == 2
    rig.allowed = True
    rig.applier.apply()
    rig.loop.turn()
    assert rig.applied == 5


def test_damage_stops_it_until_it_is_mended() -> None:
    rig = Applying(3)
    rig.applier.found(BatchCorrupt(Place(1, 0, 0), Place(2, 1, 36), "planted"))
    assert rig.damage == [(1, 2)] and not rig.applier.fit and rig.fit_changes == 1
    rig.applier.apply(4)
    assert rig.applied < 1
    rig.applier.mended()
    assert rig.applier.fit and rig.applied == 3 and rig.fit_changes == 2


def test_without_a_state_damage_is_reported_again_and_nothing_is_applied() -> None:
    rig = Applying(2, state=False)
    rig.applier.found(BatchCorrupt(Place(1, 0, 0), Place(2, 1, 36), "planted"))
    rig.applier.look_again()
    assert rig.damage == [(1, 2), (1, 2)] and rig.applier.damage == (1, 2)


def test_a_state_that_was_found_goes_on_from_where_it_is() -> None:
    rig = Applying(4, state=False)
    rig.applier.apply(5)
    found = PartitionState()
    for entry in rig.log.entries(1, 3):
        found.apply(entry, b"")
    rig.applier.know(found)
    assert rig.applier.state is found and rig.applied == 4 and rig.applier.fit


def test_another_log_begins_with_nothing_known() -> None:
    rig = Applying(3)
    rig.applier.apply(4)
    rig.applier.restart_with(other := log_of(1))
    assert rig.applier.log is other
    assert (rig.applier.state, rig.applier.committed, rig.applier.fit) == (None, 0, False)
