"""Whose wall clock is believed: of most nodes, of a node alone, of a log that has stamps from the future."""

from __future__ import annotations

import pytest

from nsqha.clock import ManualClock
from nsqha.replication.clocks import (
    BEYOND_LOOKS,
    CALM_LOOKS,
    EXACT,
    FRESH_SECONDS,
    STEP_SECONDS,
    UNKNOWN_LOOKS,
    BoundedClock,
    DistrustNews,
    PeerClocks,
    SkewDecision,
    agreed,
)

S = 10**9
BOUND = 10 * S
HOUR = 3600 * S
YEARS = 10 * 365 * 24 * HOUR


class NodesRig:
    """One node and its peers, which the true time is told of; the monotonic clock is right."""

    def __init__(self, peers: int, bound: int = BOUND) -> None:
        self.raw = ManualClock()
        self.true = ManualClock()
        self.clock = BoundedClock(self.raw, bound)
        self.off = dict.fromkeys(range(1, peers + 1), 0)
        self.members = peers + 1
        self.look()

    def look(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.raw.advance(1.0)
            self.true.advance(1.0)
            for node, off in self.off.items():
                self.clock.peers.heard(node, self.true.wall + off, asked=self.raw.mono, answered=self.raw.mono)
            self.clock.look(self.members)

    @property
    def wrong(self) -> int:
        return self.clock.wall_ns() - self.true.wall


def test_what_most_nodes_agree_on_is_in_the_middle() -> None:
    assert agreed([0, 0, YEARS], 3, BOUND) == 0
    assert agreed([-HOUR, -HOUR + S, 0], 3, BOUND) == -HOUR + S
    assert agreed([0, S], 3, BOUND) is not None, "two of three"
    assert agreed([0, HOUR], 3, BOUND) is None
    assert agreed([0], 3, BOUND) is None, "one of three"
    assert agreed([0, HOUR], 2, BOUND) is None
    assert agreed([0, 0, HOUR, HOUR], 4, BOUND) is None
    assert agreed([0, 0, 0, HOUR], 4, BOUND) == 0
    assert agreed([], 1, BOUND) is None


def test_a_peer_is_read_half_way_between_question_and_answer() -> None:
    peers = PeerClocks(BOUND)
    peers.heard(7, 1000 * S, asked=10.0, answered=14.0)
    assert peers.aheads(14.0) == {7: 988 * S}
    peers.heard(7, 2000 * S, asked=20.0, answered=31.0)
    assert peers.aheads(31.0 - 11) == {7: 988 * S}, "an answer that took longer than the bound says nothing"
    assert peers.aheads(14.1 + FRESH_SECONDS) == {}
    peers.keep({8})
    assert peers.aheads(14.0) == {}


def test_an_answer_of_a_peer_that_stood_still_replaces_no_better_one() -> None:
    """Else what most nodes agree on is off by half of that time, in the direction in which one clock is wrong."""
    slow = 2.0 * EXACT * BOUND / S
    peers = PeerClocks(BOUND)
    peers.heard(7, 1000 * S, asked=10.0, answered=10.0)
    peers.heard(7, 1001 * S, asked=11.0, answered=11.0 + slow)
    assert peers.aheads(12.0 + slow) == {7: 990 * S}
    assert peers.aheads(10.1 + FRESH_SECONDS) == {}, "it is as old as it was"
    peers.heard(7, 1001 * S, asked=20.0, answered=20.0 + slow / 4)
    assert peers.aheads(21.0) == {7: 981 * S - round(slow * S / 8)}, "answers within EXACT are all the same"
    later = 20.1 + slow / 4 + FRESH_SECONDS
    peers.heard(7, 3000 * S, asked=later, answered=later + slow)
    assert peers.aheads(later + slow) == {7: 3000 * S - round((later + slow / 2) * S)}, "nothing better is known"


@pytest.mark.parametrize("step", [HOUR, -HOUR, YEARS])
@pytest.mark.parametrize("peers", [0, 1, 2])
def test_a_step_of_the_own_clock_is_one_of_the_bound_at_most(step: int, peers: int) -> None:
    rig = NodesRig(peers)
    rig.raw.wall += step
    assert abs(rig.wrong) == BOUND, "at once: no look has come between"
    rig.look(60)
    assert abs(rig.wrong) == BOUND
    assert rig.clock.trusted is (peers == 2), "two of three agree on the time; else no one knows"
    rig.raw.wall -= step
    rig.look()
    assert (rig.wrong, rig.clock.trusted) == (0, True)


def test_a_node_alone_believes_a_step_that_lasts() -> None:
    rig = NodesRig(0)
    rig.raw.wall += HOUR
    rig.look(int(STEP_SECONDS) - 1)
    assert not rig.clock.trusted
    rig.look(3)
    assert (rig.wrong, rig.clock.trusted) == (HOUR, True)


def test_two_nodes_that_disagree_never_believe_the_step_however_long_it_lasts() -> None:
    rig = NodesRig(1)
    rig.raw.wall += HOUR
    rig.look(2 * int(STEP_SECONDS))
    assert (rig.wrong, rig.clock.trusted, rig.clock.off_ns) == (BOUND, False, None)


def test_a_node_that_starts_with_a_wrong_clock_follows_the_others_at_once() -> None:
    rig = NodesRig(0)
    rig.raw.wall += YEARS
    rig.clock = BoundedClock(rig.raw, BOUND)
    rig.off, rig.members = {1: 0, 2: 0}, 3
    rig.look()
    assert (rig.wrong, rig.clock.off_ns) == (BOUND, YEARS)


def test_a_step_of_most_nodes_at_once_is_believed_after_a_while() -> None:
    """Their time server lies, or lied before."""
    rig = NodesRig(2)
    rig.raw.wall += YEARS
    rig.off = {1: YEARS, 2: YEARS}
    rig.look(int(STEP_SECONDS) - 1)
    assert (rig.wrong, rig.clock.trusted) == (BOUND, False)
    rig.look(3)
    assert (rig.wrong, rig.clock.trusted) == (YEARS, True)


def test_a_peer_that_is_wrong_alone_changes_nothing() -> None:
    rig = NodesRig(2)
    rig.off[1] = YEARS
    rig.look(60)
    assert (rig.wrong, rig.clock.trusted, rig.clock.off_ns) == (0, True, 0)
    assert rig.clock.offsets() == {1: YEARS, 2: 0}


def test_peers_that_are_silent_leave_the_time_as_it_was() -> None:
    rig = NodesRig(2)
    rig.off = {}
    rig.look(int(FRESH_SECONDS) + 5)
    assert (rig.wrong, rig.clock.trusted, rig.clock.off_ns) == (0, True, None)
    rig.raw.wall += HOUR
    rig.look(5)
    assert rig.wrong == BOUND


def test_a_node_of_a_cluster_removes_nothing_before_it_has_compared_clocks() -> None:
    clock = BoundedClock(ManualClock(), BOUND)
    clock.look(3)
    assert not clock.trusted


def test_a_clock_that_drifts_is_followed() -> None:
    rig = NodesRig(0)
    for _ in range(1000):
        rig.raw.wall += S
        rig.look()
    assert (rig.wrong, rig.clock.trusted) == (1000 * S, True)


def test_a_bound_of_zero_checks_nothing() -> None:
    rig = NodesRig(2, bound=0)
    rig.raw.wall += YEARS
    rig.look(5)
    assert (rig.wrong, rig.clock.trusted) == (YEARS, True)


def looks(decision: SkewDecision, off_ns: int | None, times: int) -> list[bool]:
    return [decision.look(off_ns, BOUND) for _ in range(times)]


def test_a_node_declines_after_some_looks_and_again_leads_after_others() -> None:
    decision = SkewDecision()
    assert not any(looks(decision, YEARS, BEYOND_LOOKS - 1)), "a step that is taken back is no reason"
    assert not any(looks(decision, 0, 1))
    assert looks(decision, -HOUR, BEYOND_LOOKS)[-1] and decision.declines
    assert not any(looks(decision, 0, CALM_LOOKS - 1) + looks(decision, HOUR, 1))
    assert looks(decision, 0, CALM_LOOKS)[-1] and not decision.declines


def test_no_majority_is_no_reason_to_decline() -> None:
    decision = SkewDecision()
    assert not any(looks(decision, None, 3 * BEYOND_LOOKS))
    assert not any(decision.look(YEARS, 0) for _ in range(3 * BEYOND_LOOKS)), "it is off"
    assert not decision.declines


def test_a_start_is_no_reason_to_warn_of_clocks_and_a_disagreement_is() -> None:
    """A node that starts trusts no clock until it has compared them: it says nothing of that, also not that it ends."""
    news = DistrustNews()
    for _ in range(UNKNOWN_LOOKS - 1):
        assert not news.look(trusted=False, compared=False)
    assert not news.look(trusted=True, compared=True)
    for _ in range(BEYOND_LOOKS - 1):
        assert not news.look(trusted=False, compared=True)
    assert news.look(trusted=False, compared=True)
    assert not news.look(trusted=False, compared=True), "once"
    assert news.look(trusted=True, compared=True)
    assert not news.look(trusted=True, compared=True), "once"


def test_clocks_that_stay_unknown_are_a_reason_to_warn_at_last() -> None:
    news = DistrustNews()
    assert [news.look(trusted=False, compared=False) for _ in range(UNKNOWN_LOOKS)].count(True) == 1


def test_most_clocks_are_known_with_the_own_one() -> None:
    clock = BoundedClock(ManualClock(), BOUND)
    assert clock.compared_with(1) and not clock.compared_with(2) and not clock.compared_with(3)
    clock.peers.heard(2, clock.raw_wall_ns(), asked=clock.monotonic(), answered=clock.monotonic())
    assert clock.compared_with(3) and not clock.compared_with(4)
