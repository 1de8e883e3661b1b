"""The data folder of a node that starts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nsqha.server.node import make_data_folder


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


@pytest.mark.parametrize("path", ["file", "file/data"])
def test_a_file_in_its_place_is_an_error(tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        make_data_folder(str(tmp_path / path))
    assert not caplog.records
