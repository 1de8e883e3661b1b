"""`nsqha log verify` and `nsqha log dump` over folders that are damaged in every way that files can be."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from nsqha.cli import _status
from nsqha.cli.terminal import exits
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.log import LogIdentity, LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import OsStorage
from tests.unit.commitlog.logs import add, event, roll, sync

ORDERS = LogIdentity(0xAA, 0)
SEGMENTS = "00000000000000000000", "00000000000000001257", "00000000000000002519", "00000000000000003786"


def build(data: Path, identity: LogIdentity = ORDERS) -> Path:
    folder = data / f"topics/orders-{identity.topic_uid:016x}/{identity.partition}"
    log = PartitionLog.create(
        OsStorage(), str(folder), identity, cache=BatchCache(1), limits=LogLimits(segment_bytes=1200)
    )
    for n in range(40):
        add(log, b"a" * (n % 13 + 1) * 5, b"b", events=event() if n % 4 == 0 else b"")
        if log.needs_roll:
            roll(log)
    sync(log)
    log.close()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("log") / "data"
    folder = build(data)
    assert sorted(path.stem for path in folder.glob("*.segment")) == list(SEGMENTS)
    return data


@pytest.fixture
def data(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "data"))


@pytest.fixture
def folder(data: Path) -> Path:
    return data / "topics/orders-00000000000000aa/0"


def journal(data: Path, local_durable: int) -> None:
    written = NodeJournal.open(OsStorage(), str(data), random.Random(1))
    written.stage((ORDERS.topic_uid, ORDERS.partition), log_uid=7, local_durable=local_durable)
    written.stop()


def verified(data: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = _status(["log", "verify", str(data)])
    return status, capsys.readouterr().err


def test_nothing_is_wrong(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal(data, 41)
    status, said = verified(data, capsys)
    assert status == exits.OK and "everything verifies: 1 partition" in said


@pytest.mark.parametrize("suffix", ["commitlog", "segment"])
def test_synced_batches_that_are_gone(
    data: Path, folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal knows how much there was, whatever is left of the last files."""
    journal(data, 41)
    (folder / f"{SEGMENTS[-1]}.{suffix}").unlink()
    status, said = verified(data, capsys)
    assert status == exits.FAILED
    assert ("log ids [37, 41)" in said and "missing" in said) if suffix == "commitlog" else "log ids [40, 41)" in said
    for path in folder.glob(f"{SEGMENTS[-1]}.*"):
        path.unlink()
    status, said = verified(data, capsys)
    assert status == exits.FAILED and "log ids [37, 41)" in said and "synced to this disk" in said


def test_the_last_entry_is_gone(data: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / f"{SEGMENTS[-1]}.commitlog"
    os.truncate(path, path.stat().st_size - 80)
    status, said = verified(data, capsys)
    assert status == exits.FAILED and "positions [4186, 4260)" in said and "a torn end" in said
    journal(data, 41)
    status, said = verified(data, capsys)
    assert status == exits.FAILED and "log ids [40, 41)" in said and "synced to this disk" in said


def test_a_log_that_is_being_cut_lacks_nothing(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nsqha.commitlog.journal import CutIntent

    written = NodeJournal.open(OsStorage(), str(data), random.Random(1))
    written.stage((0xAA, 0), log_uid=7, local_durable=50)
    written.stage_cut((0xAA, 0), CutIntent(41, 80, 4260, 1, 1))
    written.commit()
    written.close()
    assert verified(data, capsys)[0] == exits.OK


@pytest.mark.parametrize("where", [0, 1, 3])
def test_files_that_can_not_be_used_are_told(
    data: Path, folder: Path, where: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the beginning of what can be read, in the middle, and behind its end."""
    if where == 0:  # the first ones went, by retention
        for path in folder.glob(f"{SEGMENTS[0]}.*"):
            path.unlink()
        (folder / f"{SEGMENTS[1]}.commitlog").unlink()
    elif where == 1:
        (folder / f"{SEGMENTS[1]}.commitlog").write_bytes(b"")
    else:
        (folder / f"{SEGMENTS[2]}.commitlog").write_bytes(b"")
        (folder / f"{SEGMENTS[3]}.commitlog").write_bytes(b"")
    status, said = verified(data, capsys)
    assert status == exits.FAILED and said.count("cannot be read") >= 1
    assert _status(["log", "dump", str(data)]) == exits.FAILED
    shown = capsys.readouterr().out
    assert "PROBLEM" in shown
    if where == 0:
        assert "the commitlog at position 1257 cannot be used" in said and "position 1257" in shown


def test_nothing_can_be_used(data: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in folder.glob(f"{SEGMENTS[0]}.*"):
        path.unlink()
    for path in folder.glob("*.commitlog"):
        path.write_bytes(b"")
    status, said = verified(data, capsys)
    assert status == exits.FAILED and "no commitlog of this partition can be read" in said


def test_one_bad_folder_hides_nothing_of_the_others(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = build(data, LogIdentity(0xAB, 0))
    path = data / f"topics/orders-00000000000000aa/0/{SEGMENTS[0]}.commitlog"
    path.unlink()
    path.mkdir()
    last = other / f"{SEGMENTS[-1]}.segment"
    last.write_bytes(last.read_bytes()[:-1])
    for verb in ("verify", "dump"):
        assert _status(["log", verb, str(data)]) == exits.FAILED
        found = capsys.readouterr()
        assert f"{path}: Is a directory" in found.err
        assert "log ids [40, 41)" in (found.err if verb == "verify" else found.out)


def test_names_that_are_no_partitions_are_left_alone(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("1023", "99999999999", "٣", "00", "1²"):
        (data / "topics/orders-00000000000000aa" / name).mkdir()
    assert verified(data, capsys)[0] == exits.OK


def test_a_dump_begins_at_the_damage_that_holds_its_offset(
    data: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / f"{SEGMENTS[2]}.commitlog"
    content = bytearray(path.read_bytes())
    content[80 * 3 : 80 * 5] = bytes(160)
    path.write_bytes(content)
    assert _status(["log", "dump", str(data), "--from", "55", "-n", "2", "--json", "--batches"]) == exits.FAILED
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert "log ids [27, 29)" in first["problem"] and second["log_id"] == 29


def damage(rng: random.Random, folder: Path) -> None:
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content) + 1)
    match rng.randrange(9):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(content[: rng.choice((0, at))])
        case 2:
            path.write_bytes(content[:at] + bytes(min(len(content) - at, 512)) + content[at + 512 :])
        case 3:
            path.write_bytes(content[:at] + rng.randbytes(100) + content[at:])
        case 4:
            path.write_bytes(rng.randbytes(at))
        case 5:
            path.unlink()
            path.mkdir()
        case 6:
            path.rename(path.with_name(f"{rng.randrange(10**19):020d}{path.suffix}"))
        case 7:
            path.with_suffix(".dropping").touch()
        case _:
            other = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)


@pytest.mark.parametrize("seed", range(120))
def test_whatever_is_there_is_told_in_lines(
    data: Path, folder: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No error that nobody expected; and nothing verifies that is not what was written, or a part of it."""
    rng = random.Random(seed)
    journal(data, 41)
    for _ in range(rng.choice((1, 1, 2, 3))):
        damage(rng, folder)
    going = any(path.suffix == ".dropping" for path in folder.iterdir())
    assert _status(["log", "dump", str(data), "--json"]) in (exits.OK, exits.FAILED, exits.NOT_FOUND)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    whole = [batch for batch in told if not batch["problem"]]
    status = _status(["log", "verify", str(data), "--json"])
    out, err = capsys.readouterr()
    assert status in (exits.OK, exits.FAILED, exits.NOT_FOUND) and err.strip()
    if status == exits.OK:
        (found,) = (json.loads(line) for line in out.splitlines())
        assert found["end_offset"] == 80 and found["batches"] == len(whole) == len(told)
        assert found["start_offset"] == 0 or going


def test_data_folders_inside_are_named_and_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for node in ("node-2", "node-1"):
        build(tmp_path / node)
    assert _status(["log", "verify", str(tmp_path)]) == exits.NOT_FOUND
    assert "node-1, node-2 have some: name one of them" in capsys.readouterr().err
    build(tmp_path)
    assert _status(["log", "verify", str(tmp_path)]) == 0
    assert "not read: the logs of node-1, node-2" in capsys.readouterr().err
