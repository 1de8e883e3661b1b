"""Files at a URI: a local folder, or an object store that pyarrow knows. A file is there whole, or it is not there.

    local     written under tmp/, synced, then linked or renamed to its name; the folder is synced too
    objects   one upload from memory; a store shows an object when the upload is complete

`create` is what commits rest on: of several that create one name, one succeeds. Locally the kernel sees to that. Object
stores are asked first and read back afterwards, as pyarrow has no conditional upload: two that commit within the same
round trip are told apart by what is read back, and by the reader channel, whose floor then is not where the lake ends.

Credentials come from the environment of the process that reads or writes, never from the URI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pyspark_nsqha.lake import names


class StoreFailed(Exception):
    """The store refused; the message says what was to be done, where, and what it answered."""


class Exists(Exception):
    """Somebody else created this name."""


class Found(NamedTuple):
    """A file of a listing."""

    path: str
    size: int
    modified_ns: int


class Store:
    """The files below one URI; paths are relative to it. It can be pickled."""

    def __init__(self, uri: str, filesystem: Any = None) -> None:
        """`filesystem`: a pyarrow.fs.FileSystem for which `uri` is a path, instead of what the URI says."""
        self.uri = uri
        self._given = filesystem
        self._open: tuple[Any, str] | None = None
        if filesystem is None and re.match(r"[a-zA-Z0-9+]+://[^/]*@", uri):
            raise StoreFailed(
                "a lake's URI has no user or password: give them to driver and executors by the environment, "
                "for S3 as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if filesystem is None and "://" not in uri:
            self.uri = os.path.abspath(uri)

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "_given": self._given, "_open": None}

    @property
    def local(self) -> str | None:
        """The folder, if it is a local one."""
        if self._given is not None:
            return None
        if "://" not in self.uri:
            return self.uri
        return self._root if self.uri.startswith("file://") else None

    @property
    def _root(self) -> str:
        return self._filesystem()[1]

    def _filesystem(self) -> tuple[Any, str]:
        if self._open is None:
            from pyarrow import fs

            try:
                found = (self._given, self.uri) if self._given is not None else fs.FileSystem.from_uri(self.uri)
            except (ValueError, OSError, ImportError, NotImplementedError) as error:
                raise StoreFailed(f"{self.uri} is no place for a lake: {_line(error)}") from None
            self._open = found[0], found[1].rstrip("/")
        return self._open

    def _at(self, path: str) -> tuple[Any, str]:
        filesystem, root = self._filesystem()
        return filesystem, f"{root}/{path}"

    # ---- reading

    def read(self, path: str) -> bytes:
        """FileNotFoundError if it is not there."""
        filesystem, full = self._at(path)
        try:
            with filesystem.open_input_stream(full, compression=None) as stream:
                data: bytes = stream.read()
                return data
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreFailed(f"cannot read {path} of {self.uri}: {_line(error)}") from None

    def open(self, path: str) -> Any:
        """A pyarrow file for reading anywhere in it. FileNotFoundError if it is not there."""
        filesystem, full = self._at(path)
        try:
            return filesystem.open_input_file(full)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreFailed(f"cannot open {path} of {self.uri}: {_line(error)}") from None

    def list(self, folder: str, *, recursive: bool = False) -> Iterator[Found]:
        """Its files, by path; nothing if there is no such folder."""
        from pyarrow import fs

        filesystem, full = self._at(folder)
        selector = fs.FileSelector(full, allow_not_found=True, recursive=recursive)
        try:
            found = filesystem.get_file_info(selector)
        except OSError as error:
            raise StoreFailed(f"cannot list {folder} of {self.uri}: {_line(error)}") from None
        start = len(self._root) + 1
        for info in sorted(found, key=lambda info: str(info.path)):
            if info.type == fs.FileType.File:
                yield Found(info.path[start:], info.size, info.mtime_ns or 0)

    # ---- writing

    def write(self, path: str, data: Any, *, run: str) -> None:
        """The file, whole and durable; one of that name is replaced. `run` is part of the name while it is written."""
        if self.local is None:
            self._upload(path, data)
            return
        try:
            temporary = self._write_temporary(path, data, run)
            os.replace(temporary, self._at(path)[1])
            _sync_folder(os.path.dirname(self._at(path)[1]))
        except OSError as error:
            raise self._refused(path, error) from None

    def create(self, path: str, data: bytes, *, run: str) -> None:
        """As `write`, for a name that is not there. Exists if it is."""
        if self.local is None:
            if self._is_there(path):
                raise Exists(path)
            self._upload(path, data)
            if self.read(path) != data:
                raise Exists(path)
            return
        try:
            temporary = self._write_temporary(path, data, run)
            try:
                os.link(temporary, self._at(path)[1])
            finally:
                os.unlink(temporary)
            _sync_folder(os.path.dirname(self._at(path)[1]))
        except FileExistsError:
            raise Exists(path) from None
        except OSError as error:
            raise self._refused(path, error) from None

    def remove(self, path: str) -> None:
        """Nothing happens if it is not there."""
        filesystem, full = self._at(path)
        try:
            filesystem.delete_file(full)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreFailed(f"cannot remove {path} of {self.uri}: {_line(error)}") from None

    def _is_there(self, path: str) -> bool:
        from pyarrow import fs

        filesystem, full = self._at(path)
        try:
            return bool(filesystem.get_file_info(full).type != fs.FileType.NotFound)
        except OSError as error:
            raise StoreFailed(f"cannot look for {path} in {self.uri}: {_line(error)}") from None

    def _upload(self, path: str, data: Any) -> None:
        filesystem, full = self._at(path)
        try:
            if "://" not in self.uri or not self.uri.startswith(("s3:", "gs:")):
                filesystem.create_dir(full.rpartition("/")[0], recursive=True)
            with filesystem.open_output_stream(full, compression=None) as stream:
                stream.write(data)
        except OSError as error:
            raise self._refused(path, error) from None

    def _write_temporary(self, path: str, data: Any, run: str) -> str:
        """The path of a synced file in `tmp/`; folders on the way are made."""
        final = self._at(path)[1]
        folder = self._at(names.TEMPORARY)[1]
        for needed in (folder, os.path.dirname(final)):
            _make_folder(needed)
        temporary = f"{folder}/{run}-{os.getpid()}-{os.urandom(4).hex()}-{os.path.basename(path)}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
        return temporary

    def _refused(self, path: str, error: OSError) -> StoreFailed:
        return StoreFailed(f"cannot write {path} of {self.uri}: {_line(error)}")


def _make_folder(path: str) -> None:
    """With those above it; what is new is synced."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_folder(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    _sync_folder(parent)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _line(error: BaseException) -> str:
    """What it says, in one line."""
    return " ".join(str(error).split())[:400] or type(error).__name__
