"""Who is silent, and who may say so."""

from __future__ import annotations

from nsqha.replication.silence import ASK_LOOKS, LATE_SECONDS, LOOK_SECONDS, SILENT_LOOKS, LookTimes, SilenceDetector


def quiet(looks: int) -> SilenceDetector:
    """After something came, and then nothing for so many looks."""
    detector = SilenceDetector()
    detector.look(5.0, late=False)
    for _ in range(looks):
        detector.look(5.0, late=False)
    return detector


def test_looks_in_vain_add_up_to_a_silence() -> None:
    assert not quiet(SILENT_LOOKS - 1).silent
    assert quiet(SILENT_LOOKS).silent


def test_whatever_comes_ends_it() -> None:
    detector = quiet(SILENT_LOOKS + 5)
    detector.look(6.0, late=False)
    assert not detector.silent and detector.looks == 0


def test_who_says_nothing_is_pinged_once() -> None:
    detector = SilenceDetector()
    asked = [detector.look(5.0, late=False) for _ in range(SILENT_LOOKS)]
    assert asked.index(True) == ASK_LOOKS and asked.count(True) == 1


def test_who_answered_is_pinged_again_at_the_next_silence() -> None:
    detector = quiet(ASK_LOOKS)
    asked = [detector.look(6.0, late=False) for _ in range(SILENT_LOOKS)]
    assert asked.count(True) == 1


def test_a_witness_that_was_late_begins_anew() -> None:
    detector = quiet(SILENT_LOOKS - 1)
    detector.look(5.0, late=True)
    for _ in range(SILENT_LOOKS - 1):
        assert not detector.silent
        detector.look(5.0, late=False)
    detector.look(5.0, late=False)
    assert detector.silent, "it ran all the time since then"


def test_a_witness_that_is_always_late_says_nothing() -> None:
    detector = quiet(0)
    for _ in range(10 * SILENT_LOOKS):
        detector.look(5.0, late=True)
    assert not detector.silent


def test_a_late_look_does_not_hide_what_came() -> None:
    detector = quiet(SILENT_LOOKS)
    detector.look(6.0, late=True)
    assert not detector.silent
    assert [detector.look(6.0, late=False) for _ in range(ASK_LOOKS)][-1], "it is pinged as ever"


def test_looks_are_late_by_the_one_before() -> None:
    times = LookTimes()
    assert times.late(100.0), "there is no look before it"
    assert not times.late(100.0 + LOOK_SECONDS)
    assert not times.late(100.0 + LOOK_SECONDS + LATE_SECONDS)
    assert times.late(101.0)
    assert not times.late(101.0 + LOOK_SECONDS)
