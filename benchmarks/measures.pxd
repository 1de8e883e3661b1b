# What `loadgen.pyx` counts for each message; in line, as it is called for each.

from libc.stdint cimport int64_t, uint64_t


cdef struct Samples:
    int64_t begin                       # of what is kept: intended times in [begin, end)
    int64_t end
    int64_t* values
    int64_t count
    int64_t capacity

cdef inline void record(Samples* samples, int64_t intended, int64_t now) noexcept nogil:
    if samples.begin <= intended < samples.end and samples.count < samples.capacity:
        samples.values[samples.count] = now - intended
        samples.count += 1

cdef int make_room(Samples* samples, int64_t begin, int64_t end, int64_t capacity) except -1
cdef void free_samples(Samples* samples) noexcept
cdef object taken(Samples* samples)


cdef struct Ids:
    uint64_t count
    uint64_t first                      # that was seen
    uint64_t low
    uint64_t high
    uint64_t sum                        # of distances from the first, modulo 2^64
    uint64_t squares                    # and of their squares

cdef inline void count_id(Ids* ids, uint64_t message_id) noexcept nogil:
    cdef uint64_t distance
    if ids.count == 0:
        ids.first = ids.low = ids.high = message_id
    distance = message_id - ids.first
    ids.count += 1
    ids.low = min(ids.low, message_id)
    ids.high = max(ids.high, message_id)
    ids.sum += distance
    ids.squares += distance * distance

cdef bint dense(Ids* ids, int copies) except -1
