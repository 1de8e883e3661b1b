"""What is missing is said in one line."""

from __future__ import annotations

import os

import pytest

from tests.jepsen.hosts import probe
from tests.jepsen.hosts.namespaces import NotPossible

EACH = dict(probe.CAPABILITIES)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NotPossible("there is no\nmkfs program")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(probe, "CAPABILITIES", {"disks": none, "links": lambda: None, "groups": none})
    probe.why_not.cache_clear()


def test_what_is_missing_is_said_in_one_line() -> None:
    assert probe.capabilities() == {"links"}
    assert probe.lacking({"links"}) == ""
    assert probe.lacking({"links", "disks", "groups"}) == "no disks, groups: there is no mkfs program"


def test_without_root_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert probe.capabilities() == frozenset()
    assert probe.lacking({"links"}) == "no links: this is not root"


def test_this_machine_has_each_of_them_or_says_why_not() -> None:
    for name, look in EACH.items():
        try:
            look()
        except (NotPossible, OSError) as error:
            assert str(error), f"{name} is missing without a reason"
