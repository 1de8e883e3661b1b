"""What `nsqha cluster` changes in etcd has a record there before it is changed, wherever the command dies."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from nsqha.cli.cluster import recording
from nsqha.cli.cluster.recording import asked
from nsqha.cli.terminal import exits
from nsqha.election.memory import MemoryStore
from nsqha.election.store import MetadataIntents
from nsqha.errors import Conflict, NotFound, OutcomeUnknown, Unavailable

ARGS = argparse.Namespace(etcd_user="root", etcd_cert="")


@pytest.fixture
def intents() -> MetadataIntents:
    return MemoryStore(random.Random(1)).intents


def records(intents: MetadataIntents) -> list[Mapping[str, Any]]:
    return [intent.record for intent in intents.all().values()]


def test_the_record_is_there_before_the_change_and_says_how_it_ended(intents: MetadataIntents) -> None:
    with asked(intents, ARGS, "move", "topic=t partition=0") as found, found.change():
        (before,) = records(intents)
        assert before["outcome"] == ""
    (after,) = records(intents)
    assert after == {**before, "outcome": "done", "took": after["took"]}
    assert after["who"].endswith("(etcd user root)") and after["took"] > 0
    assert (after["method"], after["target"], after["plan"]) == ("cluster move", "topic=t partition=0", False)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Conflict("x"), "failed: CONFLICT"),
        (NotFound("x"), "failed: NOT_FOUND"),
        (Unavailable("x"), "unknown: UNAVAILABLE"),
        (OutcomeUnknown("x"), "unknown: UNAVAILABLE"),
        (KeyboardInterrupt(), "unknown: INTERRUPTED"),
        (exits.Exit(exits.UNREACHABLE, "x"), "failed: UNREACHABLE"),
        (RuntimeError("a secret"), "unknown: RuntimeError"),
    ],
)
def test_how_a_change_failed_is_recorded_once(intents: MetadataIntents, error: BaseException, outcome: str) -> None:
    with pytest.raises(type(error)), asked(intents, ARGS, "move", "") as found, found.change():
        raise error
    assert [record["outcome"] for record in records(intents)] == [outcome]


@pytest.mark.parametrize(
    ("status", "outcomes"),
    [(exits.NOT_ALLOWED, ["refused: NOT_ALLOWED"]), (exits.USAGE, []), (exits.NOT_CONFIRMED, [])],
)
def test_what_is_refused_before_it_begins_is_recorded(
    intents: MetadataIntents, status: int, outcomes: list[str]
) -> None:
    with pytest.raises(exits.Exit), asked(intents, ARGS, "move", ""):
        raise exits.Exit(status, "x")
    assert [record["outcome"] for record in records(intents)] == outcomes


def test_a_plan_is_recorded_as_one(intents: MetadataIntents) -> None:
    with asked(intents, ARGS, "balance", "limit=4") as found:
        found.planned()
    assert [(record["plan"], record["outcome"]) for record in records(intents)] == [(True, "done")]


def failing(put: Callable[..., Any], times: list[int]) -> Callable[..., Any]:
    """Fail these calls, counted from 0."""
    calls = iter(range(10))

    def failed(*args: Any, **more: Any) -> Any:
        if next(calls) in times:
            raise Unavailable("no answer")
        return put(*args, **more)

    return failed


def test_a_change_whose_record_can_not_begin_is_not_made(
    intents: MetadataIntents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intents, "put", failing(intents.put, [0]))
    with pytest.raises(Unavailable), asked(intents, ARGS, "move", "") as found, found.change():
        raise AssertionError("it was made")
    assert records(intents) == []


def test_a_change_is_made_also_when_its_end_is_not_recorded(
    intents: MetadataIntents, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(intents, "put", failing(intents.put, [1]))
    with asked(intents, ARGS, "move", "") as found, found.change():
        pass
    assert [record["outcome"] for record in records(intents)] == [""]
    assert "how this ended is not recorded for the audit" in capsys.readouterr().err


def test_records_that_nobody_takes_have_a_bound(
    intents: MetadataIntents, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "WAITING_MAX", 2)
    made = 0
    for _ in range(3):
        with asked(intents, ARGS, "move", "") as found, found.change():
            made += 1
    assert made == 3 and len(records(intents)) == 2
    assert "this change has none" in capsys.readouterr().err
