"""Candidates come from the parser; names come from the broker, if there is one."""

from __future__ import annotations

import pytest

from nsqha.cli import build_parser, completion
from nsqha.cli.completion import candidates
from nsqha.cli.terminal import exits
from nsqha.cli.verbs import VERBS


@pytest.fixture(autouse=True)
def broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_ask", lambda: {"orders": ["billing", "audit"], "payments": []})


def words(*given: str) -> list[str]:
    return candidates(build_parser(), list(given))


def test_verbs_and_flags() -> None:
    assert words("") == sorted(VERBS)
    assert words("channel", "p") == ["pause"]
    assert words("pub", "orders", "--d") == ["--delay"]
    assert words("topic", "create", "--sync", "") == ["always", "interval", "none"]
    assert words("completion", "z") == ["zsh"]


def test_topics_and_channels() -> None:
    assert words("seek", "") == ["orders", "payments"]
    assert words("seek", "orders/0", "b") == ["billing"]
    assert words("channel", "delete", "--yes", "orders", "") == ["audit", "billing"]
    assert words("sub", "--timeout", "5s", "orders", "") == ["audit", "billing"]
    assert words("topic", "show", "orders", "") == []


def test_no_broker_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> dict[str, list[str]]:
        raise exits.Exit(exits.UNREACHABLE, "nobody")

    monkeypatch.setattr(completion, "_ask", nobody)
    assert words("seek", "") == []
