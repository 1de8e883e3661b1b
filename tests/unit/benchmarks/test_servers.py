from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from benchmarks.disk import bytes_below, make_cold, probe, resident_share
from benchmarks.servers import NotForThisSubject, Subject, our_broker, parse_listening


def arguments(subject: Subject, sync: str = "interval") -> list[str]:
    return subject.arguments(data=Path("/d"), tcp="127.0.0.1:1", http="127.0.0.1:2", sync=sync, flags=["--x=1"])


def test_addresses_are_read_from_the_log() -> None:
    log = (
        "[nsqd] 2025/01/27 INFO: nsqd v1.3.0\n[nsqd] 2025/01/27 INFO: TCP: listening on 127.0.0.1:4150\n"
        "[nsqd] INFO: HTTP: listening on [::1]:4151\nHTTPS: listening on 127.0.0.1:4152\n"
    )
    assert parse_listening(log) == {"TCP": ("127.0.0.1", 4150), "HTTP": ("::1", 4151)}


def test_a_line_that_is_not_whole_yet_is_no_address() -> None:
    assert parse_listening("TCP: listening on 127.0.0.1:41") == {}


def test_our_broker_is_told_its_mode() -> None:
    subject = our_broker("pure", "nsqd")
    assert arguments(subject, "always") == [
        "nsqd",
        "--tcp-address=127.0.0.1:1",
        "--http-address=127.0.0.1:2",
        "--data-path=/d",
        "--sync=always",
        "--x=1",
    ]
    assert subject.environment["NSQHA_NO_EXT"] == "1"
    assert our_broker("compiled").environment["NSQHA_NO_EXT"] == ""


def test_a_peer_gets_nsqds_flags() -> None:
    peer = Subject("peer", "'/opt/n s q/nsqd' --mem-queue-size=0", ours=False)
    assert arguments(peer)[:3] == ["/opt/n s q/nsqd", "--mem-queue-size=0", "--tcp-address=127.0.0.1:1"]


def test_a_peer_that_places_its_own_flags() -> None:
    peer = Subject("peer", "other --listen {tcp} --web {http} --dir {data} --sync-every={sync_every}", ours=False)
    assert arguments(peer) == shlex.split(
        "other --listen 127.0.0.1:1 --web 127.0.0.1:2 --dir /d --sync-every=2500 --x=1"
    )
    assert "--sync-every=1" in arguments(peer, "always")


def test_a_peer_that_can_not_sync_first_is_left_out() -> None:
    with pytest.raises(NotForThisSubject):
        arguments(Subject("peer", "nsqd", ours=False), "always")


def test_the_disk_round_is_positive_and_leaves_nothing(tmp_path: Path) -> None:
    found = probe(tmp_path, rounds=3)
    assert found.round_s > 0 and found.single_s > 0
    assert list(tmp_path.iterdir()) == []


def test_cold_files_keep_their_content(tmp_path: Path) -> None:
    path = tmp_path / "below" / "file"
    path.parent.mkdir()
    path.write_bytes(b"x" * 300_000)
    (tmp_path / "empty").touch()
    assert resident_share(tmp_path) > 0.9
    assert 0.0 <= make_cold(tmp_path) <= 1.0
    assert bytes_below(tmp_path) >= 300_000
    assert path.read_bytes() == b"x" * 300_000
