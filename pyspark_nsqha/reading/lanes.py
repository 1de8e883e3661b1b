"""Finds where frames begin: many searches in parallel, without a Python step per frame.

    frames  |size|2|ts|1|id|body .....|size|16|..|size|2|ts|1|id|body ...|size|2|..     batches, back to back
             ^ lane 0         ^ lane 1                  ^ lane 2          ^ lane 3

Each frame's size says where the next one begins, so frames are found one after the other. Here each step is a few numpy
calls for all lanes at once. Lanes begin at batches, which the entries name, and in large batches at guesses: places
with the type, timestamp and attempts of a message, all known from the entry. A lane that ends exactly where the next
one begins proves that guess, as its own begin was proven. Where lanes do not meet, a body looked like a frame: that
batch is searched once more in a single lane from its beginning. A body can make this slow, but never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FRAME_BYTES_MIN", "batch_at", "frame_starts", "integers"]

Integers = npt.NDArray[np.int64]

FRAME_BYTES_MIN = 8

_LANE_MESSAGES = 24  # 0.23 CPU-s/GB for finding all frames; 0.33 with 8, 0.25 with 48
_STEPS = 24  # between two checks of which lanes have arrived


def integers(frames: Any, width: int) -> npt.NDArray[Any]:
    """The big endian integers at every byte of the frames: 4 bytes unsigned, 8 signed."""
    places = max(len(frames) - width + 1, 0)
    return np.ndarray((places,), f">{'u' if width == 4 else 'i'}{width}", frames, strides=(1,))


def batch_at(starts: Integers, position: int) -> int:
    """The batch that has this byte; `starts` are the batches' first bytes, and the end."""
    return int(np.searchsorted(starts, position, "right")) - 1


def frame_starts(
    frames: Any, starts: Integers, counts: Integers, timestamps: Integers, left_out: list[int]
) -> tuple[Integers, list[int]]:
    """Where frames begin, ascending, and the batches that their frames do not fill exactly.

    The first result has no frames of those batches, nor of the batches that are `left_out`. Sizes of control frames and
    types of frames are not checked: each frame is within its batch and has 8 bytes at least, no more is known.
    """
    filled = np.diff(starts) > 0
    filled[left_out] = False
    batches = np.flatnonzero(filled)
    if not len(batches):
        return np.empty(0, np.int64), []
    batch_of, begins = _lanes(frames, starts, counts, timestamps, batches)
    ends = np.append(begins[1:], starts[-1:])
    last = np.append(batch_of[1:] != batch_of[:-1], True)
    ends[last] = starts[batch_of[last] + 1]
    sizes = integers(frames, 4)
    found, unmet = _chase(sizes, begins, ends, _first_look(counts[batches]))
    if not unmet.any():
        return found, []
    again = np.unique(batch_of[unmet])
    found = _outside(found, starts[again], starts[again + 1])
    alone, unmet = _chase(sizes, starts[again], starts[again + 1], _STEPS)
    torn = again[unmet]
    alone = _outside(alone, starts[torn], starts[torn + 1])
    return np.sort(np.concatenate((found, alone))), torn.tolist()


def _lanes(
    frames: Any, starts: Integers, counts: Integers, timestamps: Integers, batches: Integers
) -> tuple[Integers, Integers]:
    """The batch of each lane, and where it begins, ascending."""
    large = batches[counts[batches] >= 2 * _LANE_MESSAGES]
    if not len(large):
        return batches, starts[batches]
    find, shift = _finder(frames)
    guesses: list[int] = []
    for batch in large.tolist():
        begin, end = int(starts[batch]) + shift, int(starts[batch + 1]) + shift
        mark = b"\0\0\0\2" + int(timestamps[batch]).to_bytes(8, "big") + b"\0\1"
        step = (end - begin) * _LANE_MESSAGES // int(counts[batch]) + 1
        guesses += [find(mark, place, end) for place in range(begin + step, end, step)]
    # find() returns the place of the type, 4 bytes into the frame; -1 is no place.
    places = np.array(guesses, np.int64) - 4 - shift
    begins = np.concatenate((starts[batches], places[places >= 0]))
    begins.sort()
    begins = begins[np.append(True, begins[1:] > begins[:-1])]
    return np.searchsorted(starts, begins, "right") - 1, begins


def _first_look(counts: Integers) -> int:
    """The number of steps after which nearly all lanes have arrived: a needless step costs as much as a needed one."""
    small = counts[counts < 2 * _LANE_MESSAGES]
    return max(int(small.max()) if len(small) else 1, 1 if len(small) == len(counts) else _LANE_MESSAGES * 5 // 4)


def _chase(
    sizes: npt.NDArray[Any], begins: Integers, ends: Integers, look: int
) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Where frames begin in lanes [begin, end), ascending, and which lanes do not end where a frame does.

    `sizes` are the integers at every byte. A lane that has arrived continues into the next one until all are checked,
    after `look` steps. A frame has 8 bytes at least, so a lane that has not moved on at a check is given up.
    """
    unmet = np.zeros(len(begins), bool)
    limit = len(sizes) - 1  # a frame that begins behind it is cut off in any case
    if limit < 0:
        return np.empty(0, np.int64), ~unmet
    lanes, places, found = np.arange(len(begins)), begins.copy(), []
    while len(lanes):
        steps = np.empty((look + 1, len(lanes)), np.int64)
        steps[0] = places
        for step in range(1, look + 1):
            np.minimum(places, limit, out=places)
            places += sizes[places]
            places += 4
            steps[step] = places
        under_way = steps < ends
        found.append(steps[:-1].T[under_way[:-1].T])  # lane by lane, so they ascend
        arrived = under_way.sum(axis=0)
        left = under_way[-1]
        done = np.flatnonzero(~left)
        last, behind = steps[arrived[done] - 1, done], steps[arrived[done], done]
        unmet[lanes[done]] = (behind != ends[done]) | (last > ends[done] - FRAME_BYTES_MIN)
        stuck = left & (steps[-1] - steps[0] < look * FRAME_BYTES_MIN)
        unmet[lanes[stuck]] = True
        left &= ~stuck
        lanes, places, ends, look = lanes[left], places[left], ends[left], _STEPS
    every = np.concatenate(found)
    every.sort(kind="stable")  # fast, as there are few ascending runs: one per check
    return every, unmet


def _outside(at: Integers, begins: Integers, ends: Integers) -> Integers:
    """The places that are in none of these ranges; both ascend."""
    if not len(begins):
        return at
    index = np.searchsorted(begins, at, "right") - 1
    return at[(index < 0) | (at >= ends[index])]


def _finder(frames: Any) -> tuple[Callable[[bytes, int, int], int], int]:
    """The find() of the object that owns these bytes, and where in it they begin."""
    if isinstance(frames, (bytes, bytearray, mmap)):
        return frames.find, 0
    owner = frames.obj if isinstance(frames, memoryview) else None
    if isinstance(owner, (bytes, bytearray, mmap)) and frames.contiguous and len(frames):
        shift = np.frombuffer(frames, np.uint8).ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
        return owner.find, shift
    return bytes(frames).find, 0
