"""Hours of the day in UTC."""

from __future__ import annotations

import pytest

from nsqha.election.moves import BALANCE, read_intents
from nsqha.election.placement import Hours

DAY = 24 * 3600.0


def at(hour: int, minute: int = 0) -> float:
    return 20_000 * DAY + hour * 3600 + minute * 60


@pytest.mark.parametrize(
    ("text", "within", "outside"),
    [
        ("01:00-05:00", (at(1), at(4, 59)), (at(0, 59), at(5), at(23))),
        ("22:30-04:00", (at(22, 30), at(23, 59), at(0), at(3, 59)), (at(4), at(12), at(22, 29))),
        ("00:00-24:00", (at(0), at(23, 59)), ()),
    ],
)
def test_what_is_within(text: str, within: tuple[float, ...], outside: tuple[float, ...]) -> None:
    hours = Hours.of(text)
    assert all(map(hours.has, within)) and not any(map(hours.has, outside))
    assert str(hours) == text


@pytest.mark.parametrize("text", ["", "1:00-5:00", "01:00", "24:00-05:00", "01:60-05:00", "01:00-25:00", "05:00-05:00"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"HH:MM|time"):
        Hours.of(text)


def test_an_intent_of_another_version_that_cannot_be_read_allows_every_hour() -> None:
    assert read_intents({BALANCE: {"paused": False, "window": "01:00-05:00"}}).balance_window == Hours(60, 300)
    assert read_intents({BALANCE: {"paused": True, "window": "sundays"}}).balance_window is None
    assert read_intents({BALANCE: {"paused": True}}).balance_window is None
