# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled twin of `_hot_py.py`, where every function is described.

Raw pointers, no Python object per message. Each function has the same two steps: a pass that looks at every length and
allows for nothing but what fits, then a pass that copies or writes without asking again. Lengths are compared with
what is left, never added to a position first, so no sum can overflow. Nothing runs between the passes that could change
a buffer: the GIL is held throughout.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

import zlib

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    static inline uint32_t load32(const uint8_t *p) {
        return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | (uint32_t)p[3];
    }
    static inline void store16(uint8_t *p, uint16_t v) { p[0] = (uint8_t)(v >> 8); p[1] = (uint8_t)v; }
    static inline void store32(uint8_t *p, uint32_t v) { store16(p, (uint16_t)(v >> 16)); store16(p + 2, (uint16_t)v); }
    static inline void store64(uint8_t *p, uint64_t v) { store32(p, (uint32_t)(v >> 32)); store32(p + 4, (uint32_t)v); }

    #define EACH(byte) (0x0101010101010101u * (byte))
    static inline uint64_t load64(const uint8_t *p) { return (uint64_t)load32(p) << 32 | load32(p + 4); }

    /* Eight hex digits at a time, one in each byte. A letter has bit 6 set and is worth 9 more than its low bits. */
    static inline int parse_digits(const uint8_t *p, uint64_t *value) {
        uint64_t digits = load64(p);
        uint64_t letter = digits >> 6 & EACH(1);
        uint64_t v = (digits & EACH(15)) + letter * 9;
        /* 0x3. or 0x6. in the upper half; below 16; and from 10 on if and only if it is a letter. */
        uint64_t wrong = ((digits & EACH(0xf0)) ^ (EACH(0x30) + letter * 0x30)) | (v & EACH(16))
            | (((v + EACH(6)) >> 4 & EACH(1)) ^ letter);
        v = (v | v >> 4) & 0x00ff00ff00ff00ffu;
        v = (v | v >> 8) & 0x0000ffff0000ffffu;
        *value = (v | v >> 16) & 0xffffffffu;
        return wrong == 0;
    }
    static inline int parse_id(const uint8_t *p, uint64_t *value) {
        uint64_t upper, lower;
        int good = parse_digits(p, &upper) & parse_digits(p + 8, &lower);
        *value = upper << 32 | lower;
        return good;
    }
    static inline void format_id(uint8_t *p, uint64_t v) {
        for (int i = 15; i >= 0; i--, v >>= 4) p[i] = (uint8_t)"0123456789abcdef"[v & 15];
    }
    /* Ids are consecutive: adding one to the digits is far cheaper than formatting each number. */
    static inline void next_id(uint8_t *p) {
        int i = 15;
        while (p[i] == 'f' && i > 0) p[i--] = '0';
        p[i] = p[i] == '9' ? 'a' : (uint8_t)(p[i] + 1);
    }
    /* Not 0 if any byte of the word is `byte`: only a byte that is 0 borrows from its top bit without having it. */
    static inline uint64_t holds(uint64_t word, uint8_t byte) {
        word ^= EACH(byte);
        return (word - EACH(1)) & ~word & EACH(0x80);
    }
    static inline uint64_t breaks_line(uint64_t word) {
        return holds(word, ' ') | holds(word, '\\r') | holds(word, '\\n');
    }
    static inline int plain_id(const uint8_t *p) { return !(breaks_line(load64(p)) | breaks_line(load64(p + 8))); }
    """
    uint32_t load32(const uint8_t* p) noexcept
    uint64_t load64(const uint8_t* p) noexcept
    void store16(uint8_t* p, uint16_t v) noexcept
    void store32(uint8_t* p, uint32_t v) noexcept
    void store64(uint8_t* p, uint64_t v) noexcept
    bint parse_id(const uint8_t* p, uint64_t* value) noexcept
    void format_id(uint8_t* p, uint64_t v) noexcept
    void next_id(uint8_t* p) noexcept
    bint plain_id(const uint8_t* p) noexcept

cdef extern from "crc32.h":
    bint crc32_can_fold() noexcept
    void crc32_init() noexcept
    uint32_t crc32_of(uint32_t crc, const uint8_t* p, size_t n) noexcept

cdef extern from "blake2b.h":
    void blake2b_short(uint8_t* out, int size, const uint8_t* data, size_t n) noexcept

cdef enum:
    HEADER_BYTES = 34
    FIN_BYTES = 21
    TYPE_MESSAGE = 2
    TYPE_CONTROL = 16
    SLOT_FREE = 0
    SLOT_IN_FLIGHT = 1
    SLOT_FINISHED = 2
    SLOT_SINGLE = 3
    SLOT_WAITING = 4
    SLOT_DEFERRED = 5
    CAPACITY_MIN = 64
    ENTRY_BYTES = 80
    LINKED_BYTES = 60
    SPAN_LIMIT = 1 << 26

cdef int64_t SIZE_LIMIT = 0x7FFFFFFF
cdef uint64_t PLACE_END = 0x4000000000000000

HEADER = HEADER_BYTES
SPAN_MAX = SPAN_LIMIT
FREE = SLOT_FREE
IN_FLIGHT = SLOT_IN_FLIGHT
FINISHED = SLOT_FINISHED
SINGLE = SLOT_SINGLE
WAITING = SLOT_WAITING
DEFERRED = SLOT_DEFERRED


cdef int check(Py_ssize_t pos, Py_ssize_t end, Py_ssize_t size) except -1:
    if not 0 <= pos <= end <= size:
        raise ValueError(f"[{pos}, {end}) is not within a buffer of {size} bytes")
    return 0


# Commands to frames

cdef inline void write_blank(uint8_t* out, uint32_t size) noexcept:
    store32(out, 30 + size)
    store32(out + 4, TYPE_MESSAGE)
    store64(out + 8, 0)
    store16(out + 16, 1)
    store64(out + 18, 0)
    store64(out + 26, 0)


def frame(bytes body not None):
    cdef Py_ssize_t size = PyBytes_GET_SIZE(body)
    if size > SIZE_LIMIT:
        raise ValueError("body too large for a frame")
    frames = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + size)
    cdef uint8_t* out = <uint8_t*>PyBytes_AS_STRING(frames)
    write_blank(out, <uint32_t>size)
    memcpy(out + HEADER_BYTES, PyBytes_AS_STRING(body), size)
    return frames


cdef Run find_run(const uint8_t* data, Py_ssize_t pos, Py_ssize_t end, const uint8_t* prefix, Py_ssize_t prefix_size,
                  int64_t size_max, int64_t count_max) noexcept:
    cdef Run run = Run(pos, 0, 0)
    cdef Py_ssize_t lead = prefix_size + 4
    cdef uint32_t size
    size_max = min(size_max, SIZE_LIMIT)
    while run.count < count_max and end - run.end > lead and memcmp(data + run.end, prefix, prefix_size) == 0:
        size = load32(data + run.end + prefix_size)
        if size == 0 or <int64_t>size > size_max or <int64_t>size > <int64_t>(end - run.end - lead):
            break
        run.end += lead + <Py_ssize_t>size
        run.body_bytes += <Py_ssize_t>size
        run.count += 1
    return run


cdef bytes frames_of(const uint8_t* data, Py_ssize_t prefix_size, Run run):
    """The frames of `run.count` commands that `find_run` has checked; `data` points at the first."""
    cdef Py_ssize_t i
    cdef uint32_t size
    frames = PyBytes_FromStringAndSize(NULL, HEADER_BYTES * run.count + run.body_bytes)
    cdef uint8_t* out = <uint8_t*>PyBytes_AS_STRING(frames)
    for i in range(run.count):
        data += prefix_size
        size = load32(data)
        write_blank(out, size)
        memcpy(out + HEADER_BYTES, data + 4, size)
        out += HEADER_BYTES + <Py_ssize_t>size
        data += 4 + <Py_ssize_t>size
    return frames


def pub_run(bytes data not None, Py_ssize_t pos, Py_ssize_t end, bytes prefix not None, int64_t size_max):
    check(pos, end, PyBytes_GET_SIZE(data))
    cdef const uint8_t* d = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef Py_ssize_t prefix_size = PyBytes_GET_SIZE(prefix)
    cdef Run run = find_run(
        d, pos, end, <const uint8_t*>PyBytes_AS_STRING(prefix), prefix_size, size_max, end - pos
    )
    return run.end, run.count, frames_of(d + pos, prefix_size, run)


def mpub_body(bytes data not None, Py_ssize_t pos, Py_ssize_t end, int64_t size_max):
    check(pos, end, PyBytes_GET_SIZE(data))
    cdef const uint8_t* d = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef int64_t wanted
    cdef Run run
    if end - pos < 4:
        return None
    wanted = load32(d + pos)
    if wanted == 0 or wanted > (end - pos - 4) // 5:
        return None
    run = find_run(d, pos + 4, end, d, 0, size_max, wanted)
    if run.count != wanted:
        return None
    return run.count, frames_of(d + pos + 4, 0, run)


# Frames of a batch

cdef inline Py_ssize_t frame_bytes(const uint8_t* data, Py_ssize_t pos, Py_ssize_t end, uint32_t* kind) except -1:
    """The whole size of the frame at `pos`, and its type; ValueError if it is not a frame or does not fit."""
    cdef int64_t size
    if end - pos < 8:
        raise ValueError(f"a frame is cut off at {pos}")
    size = load32(data + pos)
    kind[0] = load32(data + pos + 4)
    if size > <int64_t>(end - pos - 4):
        raise ValueError(f"a frame is cut off at {pos}")
    if kind[0] == TYPE_MESSAGE:
        if size < 30:
            raise ValueError(f"no frame at {pos}: size {size}, type {kind[0]}")
    elif size < 4 or kind[0] < TYPE_CONTROL:
        raise ValueError(f"no frame at {pos}: size {size}, type {kind[0]}")
    return 4 + <Py_ssize_t>size


def stamp(bytearray batch not None, Py_ssize_t pos, uint64_t id_value, int64_t timestamp_ns):
    cdef Py_ssize_t end = PyByteArray_GET_SIZE(batch)
    check(pos, end, end)
    cdef uint8_t* d = <uint8_t*>PyByteArray_AS_STRING(batch)
    cdef Py_ssize_t at = pos, n, count = 0
    cdef uint32_t kind = 0
    cdef uint8_t[16] digits
    while at < end:
        n = frame_bytes(d, at, end, &kind)
        count += kind == TYPE_MESSAGE
        at += n
    if count > 0 and <uint64_t>(count - 1) > <uint64_t>0xFFFFFFFFFFFFFFFF - id_value:
        raise ValueError("ids do not fit 64 bits")
    format_id(digits, id_value)
    at = pos
    while at < end:
        if load32(d + at + 4) == TYPE_MESSAGE:
            store64(d + at + 8, <uint64_t>timestamp_ns)
            store16(d + at + 16, 1)
            memcpy(d + at + 18, digits, 16)
            next_id(digits)
        at += 4 + <Py_ssize_t>load32(d + at)
    return count


def walk(data, Py_ssize_t pos, Py_ssize_t end, int64_t count_max):
    cdef Py_buffer view
    cdef Py_ssize_t n, count = 0
    cdef uint32_t kind = 0
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        check(pos, end, view.len)
        while pos < end and count < count_max:
            n = frame_bytes(<const uint8_t*>view.buf, pos, end, &kind)
            if kind != TYPE_MESSAGE:
                break
            pos += n
            count += 1
    finally:
        PyBuffer_Release(&view)
    return pos, count


def skip_control(data, Py_ssize_t pos, Py_ssize_t end):
    cdef Py_buffer view
    cdef Py_ssize_t n
    cdef uint32_t kind = 0
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        check(pos, end, view.len)
        while pos < end:
            n = frame_bytes(<const uint8_t*>view.buf, pos, end, &kind)
            if kind == TYPE_MESSAGE:
                break
            pos += n
    finally:
        PyBuffer_Release(&view)
    return pos


def patch_attempts(frame, uint16_t attempts):
    cdef Py_buffer view
    cdef const uint8_t* d
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    try:
        d = <const uint8_t*>view.buf
        if view.len < HEADER_BYTES or <int64_t>load32(d) != view.len - 4 or load32(d + 4) != TYPE_MESSAGE:
            raise ValueError("not one whole message frame")
        patched = PyBytes_FromStringAndSize(<const char*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    store16(<uint8_t*>PyBytes_AS_STRING(patched) + 16, attempts)
    return patched


# Checksum

def crc32(data):
    cdef Py_buffer view
    cdef uint32_t value
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    value = crc32_of(0, <const uint8_t*>view.buf, view.len)
    PyBuffer_Release(&view)
    return value


crc32_init()
cdef bint FOLDS = crc32_can_fold()
if not FOLDS:
    crc32 = zlib.crc32


cdef object new_tuple = tuple.__new__


cdef uint32_t crc_of(const uint8_t* p, Py_ssize_t n) except? 0:
    return crc32_of(0, p, n) if FOLDS else <uint32_t>zlib.crc32(p[:n])


def next_entry(type cls not None, previous, data, uint32_t count, uint32_t flags, uint64_t timestamp_ns, uint64_t epoch,
               uint64_t durable):
    cdef uint8_t[8 + LINKED_BYTES] linked
    cdef Py_buffer view
    cdef uint32_t crc, size
    if not isinstance(previous, tuple) or len(previous) != 13:
        raise ValueError("an entry has 13 fields")
    cdef tuple last = <tuple>previous  # or a subclass: its fields lie in the same places
    cdef uint64_t log_id = <uint64_t>last[0] + 1, offset = <uint64_t>last[2] + <uint64_t>last[5]
    cdef uint64_t position = <uint64_t>last[3] + <uint64_t>last[6]
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len > 0xFFFFFFFF:
            raise OverflowError("a batch of 4 GiB")
        size = <uint32_t>view.len
        crc = crc_of(<const uint8_t*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    store64(linked, last[11])
    store64(linked + 8, log_id)
    store64(linked + 16, epoch)
    store64(linked + 24, offset)
    store64(linked + 32, position)
    store64(linked + 40, timestamp_ns)
    store32(linked + 48, count)
    store32(linked + 52, size)
    store32(linked + 56, crc)
    store32(linked + 60, flags)
    store16(linked + 64, 1)
    store16(linked + 66, 1)
    raw = PyBytes_FromStringAndSize(NULL, ENTRY_BYTES)
    cdef uint8_t* out = <uint8_t*>PyBytes_AS_STRING(raw)
    memcpy(out, linked + 8, LINKED_BYTES)
    blake2b_short(out + LINKED_BYTES, 8, linked, 8 + LINKED_BYTES)
    cdef uint64_t chain = load64(out + LINKED_BYTES)
    store64(out + LINKED_BYTES + 8, durable)
    store32(out + ENTRY_BYTES - 4, crc_of(out, ENTRY_BYTES - 4))
    fields = (log_id, epoch, offset, position, timestamp_ns, count, size, crc, flags, 1, 1, chain, durable)
    return new_tuple(cls, fields), raw  # what cls(...) does, in half the time


def copied_entry(type cls not None, previous, bytes raw not None, data, uint32_t odd):
    cdef uint8_t[8 + LINKED_BYTES] linked
    cdef Py_buffer view
    cdef bint same
    if not isinstance(previous, tuple) or len(previous) != 13:
        raise ValueError("an entry has 13 fields")
    if PyBytes_GET_SIZE(raw) != ENTRY_BYTES:
        return None
    cdef tuple last = <tuple>previous
    cdef const uint8_t* d = <const uint8_t*>PyBytes_AS_STRING(raw)
    cdef uint64_t log_id = load64(d), epoch = load64(d + 8), offset = load64(d + 16), position = load64(d + 24)
    cdef uint64_t timestamp_ns = load64(d + 32), chain = load64(d + LINKED_BYTES)
    cdef uint32_t count = load32(d + 40), size = load32(d + 44), crc = load32(d + 48), flags = load32(d + 52)
    if load32(d + ENTRY_BYTES - 4) != crc_of(d, ENTRY_BYTES - 4):
        return None
    if flags & odd or load32(d + 56) != 0x10001 or log_id >= PLACE_END or offset >= PLACE_END or position >= PLACE_END:
        return None
    if (timestamp_ns >> 63 or log_id != <uint64_t>last[0] + 1 or offset != <uint64_t>last[2] + <uint64_t>last[5]
            or position != <uint64_t>last[3] + <uint64_t>last[6] or timestamp_ns < <uint64_t>last[4]
            or epoch < <uint64_t>last[1]):
        return None
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        same = view.len == size and crc_of(<const uint8_t*>view.buf, view.len) == crc
    finally:
        PyBuffer_Release(&view)
    if not same:
        return None
    store64(linked, last[11])
    memcpy(linked + 8, d, LINKED_BYTES)
    cdef uint8_t[8] digest
    blake2b_short(digest, 8, linked, 8 + LINKED_BYTES)
    if load64(digest) != chain:
        return None
    fields = (log_id, epoch, offset, position, timestamp_ns, count, size, crc, flags, 1, 1, chain,
              load64(d + LINKED_BYTES + 8))
    return new_tuple(cls, fields)


# In flight

def fins_end(bytes data not None, Py_ssize_t pos, Py_ssize_t end):
    check(pos, end, PyBytes_GET_SIZE(data))
    cdef const uint8_t* d = <const uint8_t*>PyBytes_AS_STRING(data)
    while (
        end - pos >= FIN_BYTES
        and memcmp(d + pos, <const char*>b"FIN ", 4) == 0
        and d[pos + 20] == c"\n"
        and plain_id(d + pos + 4)
    ):
        pos += FIN_BYTES
    return pos


cdef inline bint settled(uint8_t state) noexcept:
    return state == SLOT_FINISHED or state == SLOT_DEFERRED


@cython.final
cdef class Ring:
    """See `_hot_py.Ring`. The slot of an offset is its low bits: capacity is a power of two, at least `next - low`."""

    FREE = SLOT_FREE
    IN_FLIGHT = SLOT_IN_FLIGHT
    FINISHED = SLOT_FINISHED
    SINGLE = SLOT_SINGLE
    WAITING = SLOT_WAITING
    DEFERRED = SLOT_DEFERRED

    cdef readonly int64_t low
    cdef readonly int64_t next
    cdef int64_t capacity
    cdef uint8_t* states
    cdef uint16_t* owners  # one allocation: the owners, then the states

    def __cinit__(self):
        self.owners = NULL
        self.resize(CAPACITY_MIN)

    def __init__(self, int64_t low):
        self.reset(low)

    def __dealloc__(self):
        PyMem_Free(self.owners)

    cdef int resize(self, int64_t capacity) except -1:
        cdef uint16_t* owners = <uint16_t*>PyMem_Malloc(capacity * 3)
        cdef uint8_t* states
        cdef int64_t offset
        if owners == NULL:
            raise MemoryError
        states = <uint8_t*>(owners + capacity)
        for offset in range(self.low, self.next):
            states[offset & (capacity - 1)] = self.states[offset & (self.capacity - 1)]
            owners[offset & (capacity - 1)] = self.owners[offset & (self.capacity - 1)]
        PyMem_Free(self.owners)
        self.owners = owners
        self.states = states
        self.capacity = capacity
        return 0

    cdef int reserve(self, int64_t low, int64_t end) except -1:
        """Room for [low, end)."""
        cdef int64_t span = end - low, capacity = self.capacity
        if span > SPAN_LIMIT:
            raise ValueError(f"a ring can not span {span} slots")
        while capacity < span:
            capacity *= 2
        if capacity != self.capacity:
            self.resize(capacity)
        return 0

    cdef void fill(self, int64_t first, int64_t end, uint8_t state, uint16_t owner) noexcept:
        cdef int64_t offset, mask = self.capacity - 1
        for offset in range(first, end):
            self.states[offset & mask] = state
            self.owners[offset & mask] = owner

    cdef int advance(self) except -1:
        cdef int64_t mask = self.capacity - 1, span, capacity = CAPACITY_MIN
        while self.low < self.next and settled(self.states[self.low & mask]):
            self.low += 1
        span = self.next - self.low
        if self.capacity > CAPACITY_MIN and span <= self.capacity // 8:
            while capacity < 4 * span:
                capacity *= 2
            self.resize(capacity)
        return 0

    def reset(self, int64_t low):
        if low < 0:
            raise ValueError(f"offset {low} is negative")
        self.low = self.next = low
        self.advance()

    def deliver(self, int64_t first, int64_t end, uint16_t owner):
        if not self.next <= first <= end:
            raise ValueError(f"deliver [{first}, {end}) to a ring whose next is {self.next}")
        if first == end:
            return
        cdef int64_t low = self.low if self.low < self.next else first
        self.reserve(low, end)
        if low > self.low:
            self.low = self.next = low  # an empty ring passes over any distance
        self.fill(self.next, first, SLOT_FINISHED, 0)
        self.fill(first, end, SLOT_IN_FLIGHT, owner)
        self.next = end

    def settle(self, int64_t first, int64_t end, int64_t state):
        if state != SLOT_FINISHED and state != SLOT_DEFERRED:
            raise ValueError(f"state {state} does not settle")
        first = max(first, self.low)
        if first >= end:
            return
        if first == self.low and end >= self.next:
            self.low = self.next = end
        else:
            self.reserve(self.low, end)
            self.fill(self.next, first, SLOT_FINISHED, 0)
            self.fill(first, end, <uint8_t>state, 0)
            self.next = max(self.next, end)
        self.advance()

    def fin_run(self, bytes data not None, Py_ssize_t pos, Py_ssize_t end, uint64_t id_base, uint16_t owner):
        check(pos, end, PyBytes_GET_SIZE(data))
        cdef const uint8_t* d = <const uint8_t*>PyBytes_AS_STRING(data)
        cdef int64_t mask = self.capacity - 1
        cdef uint64_t number = 0, slot
        cdef Py_ssize_t count = 0
        while (
            end - pos >= FIN_BYTES
            and memcmp(d + pos, <const char*>b"FIN ", 4) == 0
            and d[pos + 20] == c"\n"
            and parse_id(d + pos + 4, &number)
        ):
            if number < id_base:
                break
            number -= id_base
            if number < <uint64_t>self.low or number >= <uint64_t>self.next:
                break
            slot = number & <uint64_t>mask
            if self.states[slot] != SLOT_IN_FLIGHT or self.owners[slot] != owner:
                break
            self.states[slot] = SLOT_FINISHED
            pos += FIN_BYTES
            count += 1
        self.advance()
        return pos, count

    def get(self, int64_t offset):
        if not self.low <= offset < self.next:
            return SLOT_FREE
        return self.states[offset & (self.capacity - 1)]

    def owner(self, int64_t offset):
        if not self.low <= offset < self.next:
            return 0
        return self.owners[offset & (self.capacity - 1)]

    def set(self, int64_t offset, int64_t state, uint16_t owner=0):
        if not self.low <= offset < self.next:
            raise ValueError(f"offset {offset} is outside [{self.low}, {self.next})")
        if not SLOT_FREE <= state <= SLOT_DEFERRED:
            raise ValueError(f"no state {state}")
        self.fill(offset, offset + 1, <uint8_t>state, owner)
        self.advance()

    def expire(self, int64_t first, int64_t end, uint16_t owner):
        found = self.in_flight(first, end, owner)
        for offset in found:
            self.states[<int64_t>offset & (self.capacity - 1)] = SLOT_WAITING
        return found

    def owned(self, uint16_t owner):
        return self.in_flight(self.low, self.next, owner)

    cdef list in_flight(self, int64_t first, int64_t end, uint16_t owner):
        cdef int64_t offset, mask = self.capacity - 1
        cdef list found = []
        for offset in range(max(first, self.low), min(end, self.next)):
            if self.states[offset & mask] == SLOT_IN_FLIGHT and self.owners[offset & mask] == owner:
                found.append(offset)
        return found

    def unfinished(self, int64_t first, int64_t end):
        cdef int64_t offset, count, mask = self.capacity - 1
        first = max(first, self.low)
        if first >= end:
            return 0
        count = end - first
        for offset in range(first, min(end, self.next)):
            count -= settled(self.states[offset & mask])
        return count

    def finished_ranges(self, int64_t first, int64_t end):
        cdef int64_t offset, start, mask = self.capacity - 1
        cdef list ranges = []
        offset = max(first, self.low)
        end = min(end, self.next)
        while offset < end:
            if self.states[offset & mask] != SLOT_FINISHED:
                offset += 1
                continue
            start = offset
            while offset < end and self.states[offset & mask] == SLOT_FINISHED:
                offset += 1
            ranges.append((start, offset))
        return ranges

    def __sizeof__(self):
        return sizeof(Ring) + 3 * self.capacity

    def __repr__(self):
        return f"Ring(low={self.low}, next={self.next}, unfinished={self.unfinished(self.low, self.next)})"
