"""When a process notices that it stood still, and when it may go on."""

from __future__ import annotations

from nsqha.replication.pauses import HEARING_TICKS, PAUSED_SECONDS, SLOW_SECONDS, ProcessPause


def fit(pause: ProcessPause, now: float) -> bool:
    return now <= pause.fit_until


def test_who_is_never_ticked_is_alone_and_fit() -> None:
    assert fit(ProcessPause(), 1e9)


def test_who_runs_is_fit() -> None:
    pause = ProcessPause()
    for n in range(50):
        assert not pause.tick(n / 10)
        assert fit(pause, n / 10 + 0.1)
    assert not pause.tick(5.5) and fit(pause, 5.5), "half a second is too short to be replaced"


def test_who_stood_still_is_not_fit_before_it_is_ticked() -> None:
    pause = ProcessPause()
    pause.tick(1.0)
    assert fit(pause, 1.0 + PAUSED_SECONDS) and not fit(pause, 1.01 + PAUSED_SECONDS)


def test_after_a_pause_the_loop_turns_a_while_before_anything_is_handed_out() -> None:
    pause = ProcessPause()
    pause.tick(1.0)
    assert [pause.tick(9.0), fit(pause, 9.0)] == [False, False]
    for n in range(1, HEARING_TICKS):
        assert [pause.tick(9.0 + n / 10), fit(pause, 9.05 + n / 10)] == [False, False]
    assert [pause.tick(9.2), fit(pause, 9.2)] == [True, True]
    assert [pause.tick(9.3), fit(pause, 9.3)] == [False, True], "it is said once"


def test_who_is_slow_all_the_time_goes_on_now_and_then() -> None:
    pause = ProcessPause()
    fits = 0
    for n in range(100):
        over = pause.tick(float(n))
        fits += fit(pause, n + 0.9)
        assert not over or fit(pause, n + SLOW_SECONDS), "its turns may be long"
    assert fits > 40


def test_a_second_pause_begins_anew() -> None:
    pause = ProcessPause()
    pause.tick(1.0)
    pause.tick(5.0)
    assert not pause.tick(9.0), "it would be over, but the process stood again"
    assert not pause.tick(9.1) and pause.tick(9.2)
