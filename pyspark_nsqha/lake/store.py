"""Files at a URI: a local folder, or an object store that pyarrow supports. A file is whole, or it does not exist.

    local     written under tmp/, synced, then linked or renamed to its name; the folder is synced too
    objects   one upload from memory; a store shows an object when the upload is complete

Commits depend on `create`: of several runs that create one name, one succeeds. Locally the kernel guarantees that. On
objects the runs agree by votes (lake.agree), as pyarrow has no conditional upload: about ten requests instead of one.
The next run may complete what a dead run has proposed.

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
PAUSE_SECONDS = 0.2  # at most, of a voter that was overtaken once; it grows with each time


class StoreFailed(Exception):
    """The store failed; the message says which operation failed, where, and why."""


class Exists(Exception):
    """Another run has created this name."""


class ListedFile(NamedTuple):
    """A file of a listing."""

    path: str
    size: int
    modified_ns: int


class Store:
    """The files below one URI; paths are relative to it. It can be pickled."""

    def __init__(self, uri: str, filesystem: Any = None) -> None:
        """`filesystem`: a pyarrow.fs.FileSystem in which `uri` is a path, instead of the one of the URI."""
        self.uri = uri
        self._given = filesystem
        self._open: tuple[Any, str] | None = None
        if filesystem is None and re.match(r"[a-zA-Z0-9+]+://[^/]*@", uri):
            raise StoreFailed(
                "a lake's URI must not have a user or password: set them in the environment of driver and executors, "
                "for S3 as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if filesystem is None and "://" not in uri:
            self.uri = os.path.abspath(uri)

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "_given": self._given, "_open": None}

    @property
    def local(self) -> str | None:
        """The path of the folder if it is local, else None."""
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
                raise StoreFailed(f"{self.uri} cannot be used for a lake: {_line(error)}") from None
            self._open = found[0], found[1].rstrip("/")
        return self._open

    def _at(self, path: str) -> tuple[Any, str]:
        filesystem, root = self._filesystem()
        return filesystem, f"{root}/{path}"

    # ---- reading

    def read(self, path: str) -> bytes:
        """The content of a file. FileNotFoundError if it does not exist."""
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
        """A seekable pyarrow file to read from. FileNotFoundError if it does not exist."""
        filesystem, full = self._at(path)
        try:
            return filesystem.open_input_file(full)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreFailed(f"cannot open {path} of {self.uri}: {_line(error)}") from None

    def list(self, folder: str, *, recursive: bool = False) -> Iterator[ListedFile]:
        """The files of a folder, by path; none if the folder does not exist."""
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
        """Write a file atomically and durably; an existing one is replaced. `run` is part of its temporary name."""
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
        """As `write`, for a new name. Exists if the name exists. StoreFailed: the outcome is unknown."""
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
        """The time of the clock that sets `modified_ns` of files. StoreFailed."""
        path = f"{names.TEMPORARY}/{run}-clock"
        self.write(path, b"1", run=run)
        try:
            return max((file.modified_ns for file in self.list(names.TEMPORARY) if file.path == path), default=0)
        finally:
            self.remove(path)

    def sync(self, folder: str) -> None:
        """Make everything visible in a folder durable, whichever run wrote it. StoreFailed."""
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
        """Remove a file, if it exists."""
        filesystem, full = self._at(path)
        try:
            filesystem.delete_file(full)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreFailed(f"cannot remove {path} of {self.uri}: {_line(error)}") from None

    def proposed(self, path: str) -> tuple[bytes, ...]:
        """Contents that `path` may get from a run that is creating it, or died meanwhile."""
        if self.local is not None:
            return ()
        folder = names.votes(path)
        found = [self._read_if_there(f"{folder}/{vote.name}") for vote in self._votes(folder) if vote.accepted]
        return tuple(data for data in found if data is not None)

    def _agreed(self, path: str, data: bytes) -> bytes:
        """The agreed content of an object: ours, or that of a run that was first."""
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
                    raise StoreFailed(f"other runs commit to {self.uri} all the time: let one archiver run at a time")
                time.sleep(random.uniform(0, PAUSE_SECONDS * min(pauses, 10)))
            answer = self._vote(step, path, folder)

    def _vote(self, step: Step, path: str, folder: str) -> Any:
        """Execute one step of an agreement."""
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
                pass  # the content is agreed on; a remaining vote does no harm
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
        """Write a synced file in `tmp/` and return its path; missing folders are created."""
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
    """Create a folder and those above it. An existing one may be of a process that died before its entry was durable,
    so its parent is synced, once per process; no folder is created in one whose own entry is not durable."""
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
        pass  # another user, who may write there, made it
    _durable.add(path)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _line(error: BaseException) -> str:
    """The text of an error, in one line."""
    return " ".join(str(error).split())[:400] or type(error).__name__
