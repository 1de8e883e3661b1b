"""Requests of a leadership to the metadata store: what becomes of each, and how often is read."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from nsqha.election.model import PartitionMeta
from nsqha.errors import Conflict, NotFound, StaleMetadata, Unavailable
from nsqha.replication.isr import Applied, Outcome, ProposalRefused, Unknown
from nsqha.server.replica.leading.records import RecordRequests

META = PartitionMeta(version=3)


class ScriptedRecords:
    """Answers with the record, or fails; `calls` is what it was asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[str] = []

    async def propose(self, meta: PartitionMeta, registered: Any) -> PartitionMeta:
        return self._answer("propose")

    async def fence(self, version: int) -> PartitionMeta:
        return self._answer("fence")

    async def read(self) -> PartitionMeta | None:
        return self._answer("read")

    def _answer(self, call: str) -> PartitionMeta:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return META


class Asking:
    """Requests whose tasks run when `run` says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.records = ScriptedRecords(error)
        self.tasks: list[Coroutine[Any, Any, None]] = []
        self.replies: list[Outcome] = []
        self.found: list[PartitionMeta | None] = []
        self.unreadable: list[int] = []
        self.requests = RecordRequests(
            self.records,
            partition="t/0",
            spawn=self.tasks.append,
            replied=self.replies.append,
            found=self.found.append,
            unreadable=self.unreadable.append,
        )

    def run(self) -> None:
        """Run every task that was begun, to its end."""
        while self.tasks:
            with pytest.raises(StopIteration):
                self.tasks.pop(0).send(None)


@pytest.mark.parametrize(
    ("error", "proposed", "fenced"),
    [
        (None, Applied(META), Applied(META)),
        (Conflict("another version"), ProposalRefused(), ProposalRefused()),
        (NotFound("no such topic"), ProposalRefused(), ProposalRefused()),
        (Unavailable("definitely not done"), ProposalRefused(), Unknown()),
        (StaleMetadata("perhaps done, by a store that is not the right one"), Unknown(), Unknown()),
        (RuntimeError("a fault of ours"), Unknown(), Unknown()),
    ],
)
def test_what_becomes_of_a_request(error: Exception | None, proposed: Outcome, fenced: Outcome) -> None:
    rig = Asking(error)
    rig.requests.propose(META, {})
    rig.requests.fence(3)
    rig.run()
    assert rig.replies == [proposed, fenced]


def test_the_record_is_read_once_at_a_time() -> None:
    rig = Asking()
    rig.requests.reread()
    rig.requests.reread()
    rig.run()
    assert rig.records.calls == ["read"] and rig.found == [META]
    rig.requests.reread()
    rig.run()
    assert rig.records.calls == ["read", "read"]


def test_a_promise_has_the_record_read_again_after_a_read_under_way() -> None:
    rig = Asking()
    rig.requests.reread()
    rig.requests.reread(promised=5)
    rig.run()
    assert rig.records.calls == ["read", "read"]


def test_the_highest_promise_is_known_when_nothing_can_be_read() -> None:
    rig = Asking(Unavailable("etcd is away"))
    rig.requests.reread(promised=5)
    rig.requests.reread(promised=4)
    rig.run()
    assert rig.unreadable == [5, 5] and not rig.found


def test_after_the_end_nothing_is_passed_on() -> None:
    rig = Asking()
    rig.requests.propose(META, {})
    rig.requests.reread(promised=2)
    rig.requests.close()
    rig.run()
    assert rig.records.calls == ["propose", "read"] and not (rig.replies or rig.found or rig.unreadable)
