"""Taking over nsqd's files: what is read, in which order it is published, what a kill costs."""

from __future__ import annotations

import fcntl
import json
import os
import struct
from pathlib import Path

import pytest

from nsqha.cli import build_parser
from nsqha.cli.imports import takeover
from nsqha.cli.imports.layout import lay_out
from nsqha.cli.imports.nsqd_folder import NsqdFolder
from nsqha.cli.imports.takeover import ImportState, take_over
from nsqha.cli.terminal import exits


def record(number: int) -> bytes:
    data = struct.pack(">qH16s", number, 1, b"%016x" % number) + b"body-%d" % number
    return struct.pack(">i", len(data)) + data


def write_queue(folder: Path, queue: str, numbers: list[int], *, read: int = 0) -> Path:
    data = b"".join(map(record, numbers))
    path = folder / f"{queue}.diskqueue.000000.dat"
    path.write_bytes(data)
    position = sum(len(record(number)) for number in numbers[:read])
    meta = f"{len(numbers) - read}\n0,{position}\n0,{len(data)}\n"
    (folder / f"{queue}.diskqueue.meta.dat").write_text(meta)
    return path


def nsqd_data(folder: Path, *, channels: dict[str, bool], topic_paused: bool = False) -> None:
    listed = [{"name": name, "paused": paused} for name, paused in channels.items()]
    topics = [{"name": "t", "paused": topic_paused, "channels": listed}]
    (folder / "nsqd.dat").write_text(json.dumps({"version": "1.3.0", "topics": topics}))


class FakeTarget:
    """A broker where a channel begins at the end of what was published, but for the first of a topic."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.channels: dict[str, int] = {}
        self.paused: list[str] = []
        self.runs_left = 1 << 30

    def create_topic(self, topic: str) -> None: ...

    def create_channel(self, topic: str, channel: str) -> None:
        self.channels.setdefault(channel, len(self.log) if self.channels else 0)

    def pause_topic(self, topic: str) -> None:
        self.paused.append(f"{topic} at {len(self.log)}")

    def pause_channel(self, topic: str, channel: str) -> None:
        self.paused.append(channel)

    def publish(self, topic: str, bodies: list[bytes]) -> None:
        self.log += bodies
        self.runs_left -= 1
        if self.runs_left == 0:
            raise KeyboardInterrupt  # stored, and the answer never came

    def got(self, channel: str) -> list[int]:
        return sorted(int(body[5:]) for body in self.log[self.channels[channel] :])


def imported(source: Path, target: FakeTarget, state: Path) -> dict[str, int]:
    with NsqdFolder(str(source)) as folder:
        layout = lay_out(folder, folder.topics["t"])
        take_over(folder, layout, target, ImportState(str(state), folder, "x:1"), lambda count: None)  # type: ignore[arg-type]
        return layout.repeats


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "nsqd"
    folder.mkdir()
    return folder


def test_channels_that_lag_behind_each_other_get_exactly_their_own(source, tmp_path):
    nsqd_data(source, channels={"fast": False, "slow": True, "idle": False}, topic_paused=True)
    write_queue(source, "t:slow", [1, 2, 3, 4])
    write_queue(source, "t:fast", [1, 2, 3, 4], read=2)
    write_queue(source, "t", [5])
    target = FakeTarget()
    assert imported(source, target, tmp_path / "state") == {"fast": 0, "slow": 0, "idle": 0}
    assert {name: target.got(name) for name in target.channels} == {
        "slow": [1, 2, 3, 4, 5],
        "fast": [3, 4, 5],
        "idle": [5],
    }
    assert target.paused == ["slow", "t at 4"]
    assert len(target.log) == 5, "each message once"


def test_the_metadata_is_read_as_nsqd_reads_it(source):
    (source / "nsqd.dat").write_bytes(
        b'{"Topics":[null,{"NAME":"t","paused":null,"channels":[null,{"name":"c","PAUSED":true},{"name":"caf\xe9"}]},'
        b'{"name":"t","channels":[{"name":"d"}]},{"name":"u","channels":null}],"version":null}'
    )
    with NsqdFolder(str(source)) as folder:
        found = {t.name: {c.name: c.paused for c in t.channels.values()} for t in folder.topics.values()}
        assert found == {"t": {"c": True, "d": False}, "u": {}}
        assert len(folder.remarks) == 3 and all("not valid; it is skipped" in remark for remark in folder.remarks)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"topics":{}}', b'{"topics":[{"name":7}]}', b"[" * 100_000])
def test_metadata_that_nsqd_refuses_are_refused_in_one_line(source, text):
    (source / "nsqd.dat").write_bytes(text)
    with pytest.raises(exits.Exit, match=r"nsqd\.dat cannot be read as nsqd's metadata: [^\n]+$"):
        NsqdFolder(str(source))


def test_channels_that_overlap_miss_nothing_and_the_plan_counts_repeats(source, tmp_path):
    nsqd_data(source, channels={"a": False, "b": False})
    write_queue(source, "t:a", [1, 2, 3])
    write_queue(source, "t:b", [3, 4])
    target = FakeTarget()
    assert imported(source, target, tmp_path / "state") == {"a": 1, "b": 0}
    assert (target.got("a"), target.got("b")) == ([1, 2, 3, 4], [3, 4])


def test_after_a_kill_the_same_command_goes_on_and_then_does_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(takeover, "RUN_MESSAGES", 2)
    nsqd_data(source, channels={"c": False})
    write_queue(source, "t:c", list(range(9)))
    target = FakeTarget()
    target.runs_left = 3
    with pytest.raises(KeyboardInterrupt):
        imported(source, target, tmp_path / "state")
    imported(source, target, tmp_path / "state")
    assert target.got("c") == [0, 1, 2, 3, 4, 4, 5, 5, 6, 7, 8], "the run without an answer comes twice"
    imported(source, target, tmp_path / "state")
    assert len(target.log) == 11
    write_queue(source, "t:c", [1])
    with pytest.raises(exits.Exit, match="nsqd has written to the folder since"):
        imported(source, target, tmp_path / "state")


def test_damage_is_reported_and_the_next_file_is_read(source):
    nsqd_data(source, channels={"c": False})
    path = write_queue(source, "t:c", [1, 2])
    path.write_bytes(path.read_bytes()[:-3])
    (source / "t:c.diskqueue.000002.dat").write_bytes(record(3))
    (source / "t:c.diskqueue.000000.dat.bad").write_bytes(b"12345")
    with NsqdFolder(str(source)) as folder:
        layout = lay_out(folder, folder.topics["t"])
        assert sorted(layout.level_of) == [b"%016x" % 1, b"%016x" % 3]
    assert [(d.file, d.position, d.size) for d in layout.damage] == [
        ("t:c.diskqueue.000001.dat", 0, 0),
        ("t:c.diskqueue.000000.dat", len(record(1)), len(record(2)) - 3),
        ("t:c.diskqueue.000000.dat.bad", 0, 5),
    ]


def test_a_folder_in_use_is_refused_and_nothing_in_it_is_changed(source):
    nsqd_data(source, channels={"c": False})
    write_queue(source, "t:c", [1])
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()}
    running = os.open(source, os.O_RDONLY)
    fcntl.flock(running, fcntl.LOCK_EX)
    with pytest.raises(exits.Exit, match="stop it first with SIGTERM"):
        NsqdFolder(str(source))
    os.close(running)
    with NsqdFolder(str(source)) as folder:
        lay_out(folder, folder.topics["t"])
    assert before == {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()}


def three_files(source: Path, *, missing: tuple[int, ...] = ()) -> None:
    nsqd_data(source, channels={"c": False})
    for number in range(3):
        data = b"".join(record(100 * number + one) for one in range(100))
        if number not in missing:
            (source / f"t:c.diskqueue.{number:06d}.dat").write_bytes(data)
    (source / "t:c.diskqueue.meta.dat").write_text(f"300\n0,0\n2,{len(data)}\n")


def damage_of(source: Path) -> list[str]:
    with NsqdFolder(str(source)) as folder:
        return [str(damage) for damage in lay_out(folder, folder.topics["t"]).damage]


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ((), None),
        ((0,), "t:c.diskqueue.000000.dat: the file is missing"),
        ((1,), "t:c.diskqueue.000001.dat: the file is missing"),
        ((2,), "t:c.diskqueue.000002.dat: the file is missing"),
        ((1, 2), "t:c.diskqueue.000001.dat: the file is missing, and so are the next 1"),
        ((0, 1, 2), "t:c.diskqueue.000000.dat: the file is missing, and so are the next 2"),
    ],
)
def test_files_that_nsqd_counts_and_that_are_not_there_are_damage(
    source: Path, missing: tuple[int, ...], said: str | None
) -> None:
    three_files(source, missing=missing)
    count = f"t:c.diskqueue.meta.dat: it counts 300 messages, and the files have {300 - 100 * len(missing)}"
    assert damage_of(source) == ([] if said is None else [said, count])
    args = build_parser("import").parse_args(["import", "nsqd", str(source), "--plan"])
    assert args.run(args) == (exits.OK if said is None else exits.FAILED)


def test_a_file_that_was_cut_between_two_records_is_damage(source: Path) -> None:
    nsqd_data(source, channels={"c": False})
    path = write_queue(source, "t:c", [1, 2])
    path.write_bytes(record(1))
    assert damage_of(source) == [
        f"t:c.diskqueue.000000.dat: it has {len(record(1))} bytes, and nsqd was at {2 * len(record(1))}",
        "t:c.diskqueue.meta.dat: it counts 2 messages, and the files have 1",
    ]


def test_a_read_position_behind_the_end_is_damage(source: Path) -> None:
    nsqd_data(source, channels={"c": False})
    path = write_queue(source, "t:c", [1, 2], read=2)
    assert damage_of(source) == []
    path.write_bytes(b"")
    assert len(damage_of(source)) == 1


def test_more_than_nsqd_counted_is_none(source: Path) -> None:
    """It was written before a crash, and the meta file was not written any more."""
    nsqd_data(source, channels={"c": False})
    path = write_queue(source, "t:c", [1, 2])
    path.write_bytes(path.read_bytes() + record(3))
    (source / "t:c.diskqueue.000001.dat").write_bytes(record(4))
    assert damage_of(source) == []


def test_an_empty_queue_needs_no_file(source: Path) -> None:
    nsqd_data(source, channels={"c": False})
    for meta in ("0\n0,0\n0,0\n", "0\n7,0\n7,0\n", "0\n7,99\n7,99\n"):
        (source / "t:c.diskqueue.meta.dat").write_text(meta)
        assert damage_of(source) == []


def test_a_queue_of_which_only_the_meta_file_is_left_is_seen(source: Path) -> None:
    (source / "t:c.diskqueue.meta.dat").write_text("5\n0,0\n0,99\n")
    assert len(damage_of(source)) == 2


@pytest.mark.parametrize("meta", ["", "1\n0,0\n", "1\n0\n0\n", "-1\n0,0\n0,0\n", f"1\n0,{10**30}\n0,0\n", "\xff"])
def test_a_meta_file_without_sense_is_one_line(source: Path, meta: str) -> None:
    nsqd_data(source, channels={"c": False})
    write_queue(source, "t:c", [1])
    (source / "t:c.diskqueue.meta.dat").write_text(meta)
    (line,) = damage_of(source)
    assert line == "t:c.diskqueue.meta.dat: it makes no sense; the queue is read from the beginning of its files"


def test_numbers_far_apart_are_one_gap(source: Path) -> None:
    nsqd_data(source, channels={"c": False})
    write_queue(source, "t:c", [1])
    (source / "t:c.diskqueue.999999999999999.dat").write_bytes(record(2))
    (line,) = damage_of(source)
    assert "and so are the next 999,999,999,999,997" in line


@pytest.mark.parametrize("name", ["t:c.diskqueue.000000.dat", "t:c.diskqueue.meta.dat"])
def test_a_pipe_or_a_device_in_place_of_a_queue_is_not_read(source: Path, name: str) -> None:
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir):
        nsqd_data(source, channels={"c": False})
        write_queue(source, "t:c", [1])
        (source / name).unlink()
        make(source / name)
        assert "this is no regular file" in damage_of(source)[0]
        (source / name).rmdir() if make is os.mkdir else (source / name).unlink()


def test_metadata_that_cannot_be_read_is_one_line(source: Path) -> None:
    path = source / "nsqd.dat"
    for make in (
        os.mkfifo,
        lambda path: os.symlink("/dev/zero", path),
        lambda path: path.write_text("[" * 1_000_000),
        lambda path: path.write_text('{"topics":' + "[" * 1_000_000),
    ):
        make(path)
        with pytest.raises(exits.Exit, match="cannot be read as nsqd's metadata") as caught:
            NsqdFolder(str(source))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
        path.unlink()


def test_a_state_that_cannot_be_read_is_one_line(source: Path, tmp_path: Path) -> None:
    nsqd_data(source, channels={"c": False})
    os.mkfifo(tmp_path / "state")
    with NsqdFolder(str(source)) as folder, pytest.raises(exits.Exit, match="cannot be read as the state"):
        ImportState(str(tmp_path / "state"), folder, "x:1")
