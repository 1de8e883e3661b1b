# cython: language_level=3
"""Latencies, and which ids came: what the load generator keeps of millions of messages.

Latencies are those of a stretch of intended send times, in room that is made before the clock starts. Ids are only
summed up: whether they are a gapless row can be told from their number, ends, sum and sum of squares.
"""
import array

from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from libc.stdint cimport int64_t
from libc.string cimport memset


cdef int make_room(Samples* samples, int64_t begin, int64_t end, int64_t capacity) except -1:
    free_samples(samples)
    samples.values = <int64_t*>PyMem_RawCalloc(capacity, sizeof(int64_t))
    if samples.values == NULL:
        raise MemoryError
    samples.begin, samples.end, samples.capacity = begin, end, capacity
    return 0


cdef void free_samples(Samples* samples) noexcept:
    PyMem_RawFree(samples.values)
    memset(samples, 0, sizeof(Samples))


cdef object taken(Samples* samples):
    values = array.array("q")
    if samples.count:
        values.frombytes((<char*>samples.values)[:samples.count * sizeof(int64_t)])
    samples.count = 0
    return values


cdef bint dense(Ids* ids, int copies) except -1:
    first, low, high, count = int(ids.first), int(ids.low), int(ids.high), int(ids.count)
    if count == 0 or count != copies * (high - low + 1):
        return False
    below, above = first - low, high - first
    total = copies * (above * (above + 1) - below * (below + 1)) // 2
    squares = copies * sum(n * (n + 1) * (2 * n + 1) // 6 for n in (below, above))
    return int(ids.sum) == total % 2**64 and int(ids.squares) == squares % 2**64
