"""Finding logs in a data folder; how a skip of damage ends."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsqha.cli import build_parser
from nsqha.cli.brokers.admin import Admin
from nsqha.cli.log import folders
from nsqha.cli.terminal import exits
from nsqha.errors import NotFound
from nsqha.pb.v1 import admin_pb2 as pb


@pytest.fixture
def data(tmp_path: Path) -> str:
    for name in ("orders-00000000000000aa/0", "orders-00000000000000aa/10", "a-b-00000000000000bb/0", "stray/0"):
        (tmp_path / "topics" / name).mkdir(parents=True)
    (tmp_path / "topics" / "orders-00000000000000aa" / "lost").touch()
    return str(tmp_path)


def test_folders_name_topic_uid_and_partition(data: str) -> None:
    found = [(f.topic, f.topic_uid, f.partition) for f in folders(data, "", None)]
    assert found == [("a-b", 0xBB, 0), ("orders", 0xAA, 0), ("orders", 0xAA, 10)]
    assert [str(f) for f in folders(data, "orders", None)] == ["orders/0", "orders/10"]
    assert [f.partition for f in folders(data, "orders", 10)] == [10]


def test_what_is_not_there_is_named(data: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="did you mean orders"):
        folders(data, "order", None)
    with pytest.raises(NotFound, match="partition 3 of topic orders"):
        folders(data, "orders", 3)
    with pytest.raises(NotFound, match="no folder"):
        folders(f"{data}/nowhere", "", None)
    with pytest.raises(NotFound, match="no logs"):
        folders(f"{data}/topics/stray", "", None)
    with pytest.raises(NotFound, match="lost is a file, not a folder"):
        folders(f"{data}/topics/orders-00000000000000aa/lost", "", None)


def test_what_can_not_be_listed_is_named(data: str) -> None:
    Path(data, "topics", "x-00000000000000cc").touch()
    with pytest.raises(exits.Exit, match="topics/x-00000000000000cc: Not a directory"):
        folders(data, "", None)


@pytest.mark.parametrize(
    ("skipped", "given_up", "errors", "status"),
    [
        (1, 0, 0, exits.OK),
        (0, 0, 0, exits.OK),
        (1, 0, 1, exits.PARTLY),
        (0, 1, 1, exits.PARTLY),
        (0, 0, 2, exits.FAILED),
    ],
)
def test_a_skip_that_no_partition_did_has_failed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    skipped: int,
    given_up: int,
    errors: int,
    status: int,
) -> None:
    answer = pb.SkipDamageResponse(
        skipped=[pb.SkippedDamage(channel="c", partition=n, first_offset=3, end_offset=5) for n in range(skipped)],
        errors=[pb.PartitionError(partition=9, error="it is away")] * errors,
        given_up=[pb.GivenUp(partition=n, first_offset=3, end_offset=5) for n in range(given_up)],
    )
    broker = nullcontext(SimpleNamespace(call=lambda *_, **__: answer))
    monkeypatch.setattr(Admin, "of", lambda _: broker)
    args = build_parser("log").parse_args(["log", "skip", "orders", "--yes"])
    assert args.run(args) == status
    assert ("orders/0: offsets 3-4 given up" in capsys.readouterr().out) == bool(given_up)
