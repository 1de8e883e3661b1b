"""Files at a URI: a local folder, or an object store that pyarrow knows. A file is there whole, or it is not there.

    local     written under tmp/, synced, then linked or renamed to its name; the folder is synced too
    objects   one upload from memory; a store shows an object when the upload is complete

`create` is what commits rest on: of several that create one name, one succeeds. Locally the kernel sees to that. On
objects they agree by votes (lake.agree), as pyarrow has no conditional upload: about ten requests instead of one. What
was proposed by somebody who died may be completed by whoever comes next.

Credentials come from the environment of the process that reads or writes, never from the URI.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.agree import FINAL, Step, Vote, agree, votes

OVERTAKEN_MAX = 50
PAUSE_SECONDS = 0.2  # of one that was overtaken, about; more each time


class StoreFailed(Exception):
    """The store refused; the message says what was to be done, where, and what it answered."""


class Exists(Exception):
    """Somebody else created this name."""


class ListedFile(NamedTuple):
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

    def list(self, folder: str, *, recursive: bool = False) -> Iterator[ListedFile]:
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
                yield ListedFile(info.path[start:], info.size, info.mtime_ns or 0)

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
        """As `write`, for a name that is not there. Exists if it is. Behind StoreFailed nobody knows."""
        if self.local is None:
            if self._agreed(path, data) != data:
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

    def now_ns(self, run: str) -> int:
        """The time by the clock that `modified_ns` of files is from. StoreFailed."""
        path = f"{names.TEMPORARY}/{run}-clock"
        self.write(path, b"1", run=run)
        try:
            return max((file.modified_ns for file in self.list(names.TEMPORARY) if file.path == path), default=0)
        finally:
            self.remove(path)

    def sync(self, folder: str) -> None:
        """What is seen in a folder is durable from now on, whoever put it there. StoreFailed."""
        if self.local is None:
            return
        full = self._at(folder)[1]
        try:
            if os.path.isdir(full):
                _make_folder(full)
                _sync_folder(full)
        except OSError as error:
            raise self._refused(folder, error) from None

    def remove(self, path: str) -> None:
        """Nothing happens if it is not there."""
        filesystem, full = self._at(path)
        try:
            filesystem.delete_file(full)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreFailed(f"cannot remove {path} of {self.uri}: {_line(error)}") from None

    def proposed(self, path: str) -> tuple[bytes, ...]:
        """Contents that `path` may get from somebody who creates it now, or died in the middle of it."""
        if self.local is not None:
            return ()
        folder = names.votes(path)
        found = [self._read_if_there(f"{folder}/{vote.name}") for vote in self._votes(folder) if vote.accepted]
        return tuple(data for data in found if data is not None)

    def _agreed(self, path: str, data: bytes) -> bytes:
        """The content of an object, ours or that of somebody who was first."""
        folder = names.votes(path)
        voting = agree(data, os.urandom(8).hex())
        answer: Any = None
        pauses = 0
        while True:
            try:
                step: Step = voting.send(answer)
            except StopIteration as end:
                result: bytes = end.value
                return result
            if step.kind == "pause":
                pauses += 1
                if pauses > OVERTAKEN_MAX:
                    raise StoreFailed(f"others commit to {self.uri} without end: let one archiver run at a time")
                time.sleep(random.uniform(0, PAUSE_SECONDS * min(pauses, 10)))
            answer = self._vote(step, path, folder)

    def _vote(self, step: Step, path: str, folder: str) -> Any:
        """One step of an agreement."""
        full = path if step.name == FINAL else f"{folder}/{step.name}"
        if step.kind == "list":
            return [vote.name for vote in self._votes(folder)]
        if step.kind == "read":
            return self._read_if_there(full)
        if step.kind == "write":
            self._upload(full, step.data)
        elif step.kind == "remove":
            try:
                self.remove(full)
            except StoreFailed:
                pass  # it is agreed on; this vote does no harm
        return None

    def _votes(self, folder: str) -> tuple[Vote, ...]:
        return tuple(votes(file.path.rpartition("/")[2] for file in self.list(folder)))

    def _read_if_there(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except FileNotFoundError:
            return None

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


_durable: set[str] = set()  # folders whose entries this process has synced


def _make_folder(path: str) -> None:
    """With those above it. One that is there may be of somebody who died before its entry was durable, so the one above
    is synced, once by each process; no folder is made in one whose own entry is not durable."""
    there = os.path.isdir(path)
    if there and path in _durable:
        return
    parent = os.path.dirname(path)
    if not there:
        _make_folder(parent)
        try:
            os.mkdir(path)
        except FileExistsError:
            pass
    try:
        _sync_folder(parent)
    except PermissionError:
        pass  # whoever may write there made it
    _durable.add(path)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _line(error: BaseException) -> str:
    """What it says, in one line."""
    return " ".join(str(error).split())[:400] or type(error).__name__
