"""A node that starts: its data folder, and the address of its peer port."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from nsqha.cli.nsqd import open_grpc
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.storage import OsStorage
from nsqha.errors import ConfigError
from nsqha.options import Options
from nsqha.server.node.start import Node, advice, exposed, make_data_folder


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (errno.EROFS, "the volume is read-only: mount it for writing"),
        (errno.EACCES, "give it the folder (chown), or name another with --data-path"),
        (errno.EPERM, "give it the folder (chown)"),
        (errno.EIO, ""),
    ],
)
def test_what_to_do_about_a_folder_that_can_not_be_written(code: int, what: str) -> None:
    assert what in advice(OSError(code, "x")) and bool(what) is bool(advice(OSError(code, "x")))


@pytest.mark.parametrize(("policy", "asks"), [("", False), ("require", False), ("require-verify", True)])
def test_a_listener_that_takes_any_certificate_asks_nobody_who_it_is(policy: str, asks: bool) -> None:
    options = Options(tls_cert="c", tls_key="k", tls_client_auth_policy=policy, tls_root_ca_file="ca")
    assert ("HTTPS" not in exposed(options)) is asks


def test_a_folder_that_is_made_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nsqha.node")
    make_data_folder(str(tmp_path / "data"))
    make_data_folder(str(tmp_path / "data"))
    (record,) = caplog.records
    assert record.getMessage() == f"DATA: {tmp_path}/data was not there: made a new, empty data folder"
    assert (tmp_path / "data").is_dir()


def test_folders_above_it_are_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nsqha.node")
    make_data_folder(str(tmp_path / "vra" / "lib" / "data"))
    (record,) = caplog.records
    assert record.getMessage().endswith(f", with the folders from {tmp_path}/vra on")


def test_the_names_of_folders_are_on_the_disk_before_anything_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(OsStorage, "sync_dir", lambda self, path: synced.append(path))
    make_data_folder(str(tmp_path / "lib" / "data"))
    assert synced[-2:] == [f"{tmp_path}", f"{tmp_path}/lib"]


@pytest.mark.parametrize("path", ["file", "file/data"])
def test_a_file_in_its_place_is_an_error(tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        make_data_folder(str(tmp_path / path))
    assert not caplog.records


def test_a_folder_of_a_cluster_is_not_led_by_a_node_that_is_alone(tmp_path: Path) -> None:
    journal = NodeJournal.open(OsStorage(), str(tmp_path), random.Random(1), page_cache="")
    journal.node.join(0xC1, etcd_cluster_id=0xE1)
    journal.commit()
    journal.close()
    options = Options(
        data_path=str(tmp_path), tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", broadcast_address="127.0.0.1"
    )
    with pytest.raises(ConfigError, match="belongs to cluster 00000000000000c1"):
        asyncio.run(Node(options, open_grpc).start())


@pytest.mark.parametrize("peer", ["somewhere", "unix:/run/peers", "taken"])
def test_a_peer_address_that_can_not_be_used_is_named(tmp_path: Path, peer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}" if peer == "taken" else peer
        options = Options(
            data_path=str(tmp_path), tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", peer_address=address
        )
        clustered = replace(options, etcd_endpoints=("127.0.0.1:1",))
        with pytest.raises(ConfigError, match=f"^--peer-address={address}: "):
            asyncio.run(Node(clustered, open_grpc).start())
