"""Times and places as people write them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha.cli.terminal.times import (
    DAY_NS,
    LogTarget,
    parse_duration,
    parse_instant,
    parse_place,
    show_duration,
    show_time,
)

S = 10**9
NOW = 1_795_262_005 * S


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("2d", 2 * DAY_NS),
        ("1d12h", DAY_NS + 12 * 3600 * S),
        ("1h30m", 5400 * S),
        ("1.5d", DAY_NS * 3 // 2),
        ("250ms", S // 4),
        ("0", 0),
        ("-2h", -7200 * S),
        ("-1d2h", -(DAY_NS + 7200 * S)),
    ],
)
def test_durations_are_gos_and_days(text: str, ns: int) -> None:
    assert parse_duration(text) == ns


@pytest.mark.parametrize("text", ["", "d", "2", "1d-2h", "--2h", "2 h", "1h2d", "soon", "1dd", "9" * 30 + "d", "1d5"])
def test_what_is_no_duration_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@given(st.text(max_size=12))
@settings(max_examples=200)
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    try:
        assert isinstance(parse_duration(text), int)
    except ValueError as error:
        assert "duration" in str(error)


def test_places() -> None:
    assert parse_place("start", NOW) == LogTarget("start")
    assert parse_place("end", NOW) == LogTarget("end")
    assert parse_place("-2h", NOW) == parse_place("@-2h", NOW) == LogTarget("time", NOW - 7200 * S)
    assert parse_place("12345", NOW) == LogTarget("offset", 12345)
    assert parse_place("00019708c0000002", NOW) == LogTarget("id", id="00019708c0000002")
    assert parse_place("0000000000001234", NOW) == LogTarget("id", id="0000000000001234")


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("2026-11-20T10:00Z", 1_795_168_800 * S),
        ("2026-11-20T11:00+01:00", 1_795_168_800 * S),
        ("2026-11-20T10:00:00.250Z", 1_795_168_800 * S + S // 4),
        ("1795168800", 1_795_168_800 * S),
        ("1795168800250", 1_795_168_800 * S + S // 4),
        ("1795168800250001", 1_795_168_800 * S + 250_001_000),
        ("1795168800250000001", 1_795_168_800 * S + 250_000_001),
        ("-999999d", 0),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_instants(text: str, ns: int) -> None:
    assert parse_instant(text, NOW) == ns


def test_a_time_without_a_zone_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert parse_instant("2026-11-20T19:00", NOW) == 1_795_168_800 * S
        assert show_time(1_795_168_800 * S + 5_000_000) == "2026-11-20 19:00:00.005"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "text",
    ["yesterday", "2h", "@noon", "@", "-", "@2026-13-01", "@1969-01-01T00:00Z", "ABCDEF0123456789", "999999999999999"],
)
def test_what_is_no_place_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is "):
        parse_place(text, NOW)


@pytest.mark.parametrize("text", ["@9999-12-31T23:59:59Z", "@9999999999", "@9223372036854775808"])
def test_a_time_that_no_broker_could_be_told_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text} is after 2262-04-11$"):
        parse_place(text, NOW)


@given(st.text(alphabet="@-0123456789abcdefhTZ:+.", max_size=24))
@settings(max_examples=300)
def test_any_text_is_a_place_or_a_value_error(text: str) -> None:
    try:
        place = parse_place(text, NOW)
    except ValueError:
        return
    assert 0 <= place.value < 1 << 63


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0ms"),
        (0.85, "850ms"),
        (12.4, "12s"),
        (59.7, "1m00s"),
        (185, "3m05s"),
        (7800, "2h10m"),
        (86_399.9, "1d0h"),
        (99 * 3600, "4d3h"),
    ],
)
def test_shown_durations(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text
