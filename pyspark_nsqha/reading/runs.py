"""Runs: the batches of a split, some at a time, in memory that is reused. `fetch` and `files` both make them.

A run has about `run_bytes` and always whole batches: where it ends is computed with numpy, for many entries at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol

from pyspark_nsqha.model import ENTRY_BYTES, FetchedRun

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RUN_BYTES: Final = 2 << 20
GROW_BYTES: Final = 16 << 20  # memory that is allocated ahead of what has arrived

_UNREADABLE: Final = (1 << 29) | (1 << 31)  # LOST, FAULTY: such entries come without frames


class Runs(Protocol):
    """The runs of one split, in order, once. A run is valid until the next one is requested."""

    def __iter__(self) -> Iterator[FetchedRun]: ...
    def __next__(self) -> FetchedRun: ...

    def retry_other(self, why: str) -> bool:
        """Report that the last run does not verify. True: the next one begins where it began, and comes from another
        replica if there is one. False: every replica has sent it so; the run counts, and the next one follows it."""

    def close(self) -> None:
        """Release the resources: no more runs are needed."""


class Frames:
    """Memory for the frames of one run, reused for the next one."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(RUN_BYTES))

    def room(self, have: int, size: int) -> memoryview:
        """The memory for the bytes from `have` on of a run of `size`: all, or limited by what has arrived so far."""
        if have == len(self.view):
            # Not the old memory, resized: views of the last run may still refer to it.
            larger = memoryview(bytearray(min(size, 2 * have + GROW_BYTES)))
            larger[:have] = self.view
            self.view = larger
        return self.view[have : min(size, len(self.view))]


def borders_of(entries: memoryview | bytes) -> npt.NDArray[np.int64]:
    """Where each batch's frames begin in the bytes after these entries, and where the last ones end."""
    import numpy as np

    table = np.frombuffer(entries, np.uint8).reshape(-1, ENTRY_BYTES)
    sizes = np.ascontiguousarray(table[:, 44:48]).view(">u4").ravel().astype(np.int64)
    flags = np.ascontiguousarray(table[:, 52:56]).view(">u4").ravel()
    borders = np.zeros(len(table) + 1, np.int64)
    np.cumsum(np.where(flags & _UNREADABLE, 0, sizes), out=borders[1:])
    return borders


def run_end(borders: npt.NDArray[np.int64], first: int, run_bytes: int) -> int:
    """The end (exclusive) of a run that begins with batch `first`: at `run_bytes`, and with one batch at least."""
    end = int(borders.searchsorted(borders[first] + run_bytes, "right")) - 1
    return min(max(end, first + 1), len(borders) - 1)
