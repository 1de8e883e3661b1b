# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The load generator: many NSQ V2 connections driven by one epoll loop without the GIL.

A benchmark client must be much cheaper than the server it measures. So everything sent is built before the clock
starts: a publisher owns one buffer of equal *units* (a unit is a whole PUB or MPUB command) and sends slices of it,
as far as its window allows; a consumer turns every frame it reads into a FIN line in place. Nothing is allocated,
and no Python object is made, per message.

    publisher   sent ----- acked + window            bytes to send = (min(acked + window, limit)) * unit - sent
                |  in flight  |
    consumer    socket -> in[0:in_len) -> frames -> out[out_pos:out_len) -> socket
    paced       due, due + interval, ...             every command carries its *intended* time in its body

Latencies are counted from the intended send time: a server that stalls for a second delays a thousand messages at
1,000/s, not one. How late the generator itself was is kept beside it (`late`), so its own share is visible.

Sockets arrive connected and past their handshake (`client.py`), with nothing unread. A TLS connection is the same
connection with the two system calls replaced by the `ssl` object's; it takes the GIL once per TLS record.

Every message is checked as it passes: frame shape, attempts, and its body against the one that was published. Ids
are summed up, so that a server which numbers its messages densely can be held to "each once" over millions of them.
A run ends at its deadline at the latest, wakes every 50 ms for Ctrl-C, and raises `LoadError` on anything odd.
"""
import array
import ssl
import time

from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport PyObject
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memmove, memset


cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #include <time.h>
    #include <unistd.h>
    #include <sys/epoll.h>
    #include <sys/prctl.h>
    #include <sys/socket.h>
    #include <sys/timerfd.h>

    static inline uint32_t load32(const char *at) { uint32_t v; memcpy(&v, at, 4); return __builtin_bswap32(v); }
    static inline int64_t load64(const char *at) { uint64_t v; memcpy(&v, at, 8); return (int64_t)__builtin_bswap64(v); }
    static inline void store64(char *at, int64_t value) {
        uint64_t v = __builtin_bswap64((uint64_t)value); memcpy(at, &v, 8);
    }
    /* eight lowercase hex digits: a letter has bit 6 set and 1..6 in its low half */
    static inline uint64_t hex8(const char *at) {
        uint64_t v; memcpy(&v, at, 8); v = __builtin_bswap64(v);
        v = (v & 0x0f0f0f0f0f0f0f0fULL) + ((v >> 6) & 0x0101010101010101ULL) * 9;
        v = (v | v >> 4) & 0x00ff00ff00ff00ffULL;
        v = (v | v >> 8) & 0x0000ffff0000ffffULL;
        return (v | v >> 16) & 0xffffffffULL;
    }
    static inline int64_t clock_ns(void) {
        struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000LL + t.tv_nsec;
    }
    static inline int watch(int op, int poll, int fd, uint32_t events, uint32_t tag) {
        struct epoll_event e; memset(&e, 0, sizeof e); e.events = events; e.data.u32 = tag;
        return epoll_ctl(poll, op, fd, &e);
    }
    static inline int wake_at(int timer, int64_t at) {
        struct itimerspec t; memset(&t, 0, sizeof t);
        t.it_value.tv_sec = at / 1000000000LL; t.it_value.tv_nsec = at % 1000000000LL;
        return timerfd_settime(timer, TFD_TIMER_ABSTIME, &t, 0);
    }
    static inline uint32_t event_tag(const struct epoll_event *e) { return e->data.u32; }
    """
    struct epoll_event:
        uint32_t events
    uint32_t EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP
    int EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLL_CTL_DEL, EPOLL_CLOEXEC, MSG_NOSIGNAL
    int CLOCK_MONOTONIC, TFD_NONBLOCK, TFD_CLOEXEC, PR_SET_TIMERSLACK
    int epoll_create1(int flags)
    int epoll_wait(int poll, epoll_event* events, int count_max, int timeout_ms) nogil
    int timerfd_create(int clock, int flags)
    int prctl(int option, unsigned long value)
    int close(int fd) nogil
    ssize_t read(int fd, void* into, size_t room) nogil
    ssize_t recv(int fd, void* into, size_t room, int flags) nogil
    ssize_t send(int fd, const void* data, size_t size, int flags) nogil
    uint32_t load32(const char* at) nogil
    int64_t load64(const char* at) nogil
    void store64(char* at, int64_t value) nogil
    uint64_t hex8(const char* at) nogil
    int64_t clock_ns() nogil
    int watch(int op, int poll, int fd, uint32_t events, uint32_t tag) nogil
    int wake_at(int timer, int64_t at) nogil
    uint32_t event_tag(const epoll_event* event) nogil


cdef enum:
    EVENTS = 256
    FIN_BYTES = 21                      # "FIN " + 16 + "\n"
    FRAME_MAX = 64 << 20                # a size word beyond this is garbage, not a frame
    MESSAGE_HEAD = 34                   # size, type, timestamp, attempts, id
    PACED_WAITING_MAX = 1 << 20         # unanswered paced commands per connection; a power of two
    SLICE_NS = 50000000
    SPIN_NS = 60000                     # a timer fires this long before the due time; the rest is polled
    TIMER_TAG = 0x7fffffff              # in epoll's data, where connections have their number

cdef enum Role:
    PUBLISHER = 1
    CONSUMER = 2
    PACED = 3

cdef enum Outcome:
    GOING = 0
    REACHED = 1
    CLOSED = -1
    ERROR_FRAME = -2
    BAD_FRAME = -3
    SYSTEM = -4
    NO_MEMORY = -5
    TOO_MANY_WAITING = -6

cdef dict OUTCOME_TEXT = {
    CLOSED: "the server closed the connection",
    ERROR_FRAME: "the server answered with an error",
    BAD_FRAME: "the server sent bytes that are no V2 frame",
    SYSTEM: "a system call failed",
    NO_MEMORY: "out of memory",
    TOO_MANY_WAITING: "more than a million paced commands are unanswered",
}

cdef struct Samples:
    int64_t* values
    int64_t count
    int64_t capacity

cdef struct Connection:
    int fd
    int role
    uint32_t events                     # what epoll watches for
    PyObject* tls                       # borrowed from Engine.sockets, NULL for plain TCP
    # received bytes; the front holds an incomplete frame between reads
    char* inbox
    Py_ssize_t in_len
    Py_ssize_t in_cap
    # bytes to send that are made here: FIN, REQ, RDY, NOP and paced commands
    char* outbox
    Py_ssize_t out_pos
    Py_ssize_t out_len
    Py_ssize_t out_cap
    # publisher
    const char* units
    int64_t units_len
    int64_t unit_len
    int64_t unit_messages
    int64_t window
    int64_t limit                       # units that may be sent in all
    int64_t sent                        # bytes
    int64_t acked                       # units
    int64_t pongs                       # heartbeats to answer at the next unit boundary
    # consumer
    int64_t received
    Py_ssize_t fin_piece                # bytes per send call; 0: everything that one read produced
    int64_t req_every                   # every n-th first delivery is requeued; 0: none
    int holds                           # receives and never answers
    char req_tail[24]
    Py_ssize_t req_tail_len
    # paced
    int64_t due
    int64_t interval
    Py_ssize_t stamp_at                 # where in the unit the intended time goes
    int64_t* waiting                    # ring of intended times, one per unanswered command
    int64_t waiting_first
    int64_t waiting_end


class LoadError(Exception):
    """A connection did something that a benchmark can not go on from."""


cdef class Engine:
    """Connections and their counters. Add connections, then `publish`/`ready`/`pace`, then `run`."""

    cdef Connection* connections
    cdef int count
    cdef int capacity
    cdef int poll
    cdef int timer
    cdef list sockets                   # keeps descriptors, ssl objects and unit buffers alive
    cdef list units
    cdef bytes body
    cdef const char* body_at
    cdef Py_ssize_t body_len
    cdef Py_ssize_t body_skip           # bytes at the front of a body that differ (the intended time)
    cdef bint stamped
    cdef bint pacing
    cdef int64_t record_from
    cdef int64_t record_end
    cdef Samples ack_samples
    cdef Samples delivery_samples
    cdef Samples late_samples
    cdef int broken                     # the connection that ended a run
    cdef int broken_errno
    cdef char error_text[256]
    cdef Py_ssize_t error_len
    cdef uint64_t id_first              # of first deliveries: the first id seen, the lowest and the highest,
    cdef uint64_t id_low                # and sums of distances from the first and of their squares, modulo 2^64
    cdef uint64_t id_high
    cdef uint64_t id_sum
    cdef uint64_t id_squares
    cdef readonly int64_t acked         # messages answered with OK
    cdef readonly int64_t received      # messages delivered, redeliveries included
    cdef readonly int64_t finished      # messages answered with FIN
    cdef readonly int64_t requeued
    cdef readonly int64_t redelivered   # attempts > 1
    cdef readonly int64_t corrupt       # bodies that are not the published one
    cdef readonly int64_t refused       # FIN, REQ or TOUCH that the server refused
    cdef readonly int64_t paced         # paced commands issued

    def __cinit__(self):
        self.poll = self.timer = -1
        self.sockets = []
        self.units = []
        self.poll = epoll_create1(EPOLL_CLOEXEC)
        self.timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
        if self.poll < 0 or self.timer < 0 or watch(EPOLL_CTL_ADD, self.poll, self.timer, EPOLLIN, TIMER_TAG) < 0:
            raise OSError(errno, "epoll or timerfd")
        prctl(PR_SET_TIMERSLACK, 1)

    def __dealloc__(self):
        self._free()

    def close(self):
        """Close every socket and free all buffers."""
        for sock in self.sockets:
            sock.close()
        self.sockets = []
        self._free()

    cdef void _free(self):
        cdef int i
        for i in range(self.count):
            PyMem_RawFree(self.connections[i].inbox)
            PyMem_RawFree(self.connections[i].outbox)
            PyMem_RawFree(self.connections[i].waiting)
        PyMem_RawFree(self.connections)
        self.connections = NULL
        self.count = self.capacity = 0
        PyMem_RawFree(self.ack_samples.values)
        PyMem_RawFree(self.delivery_samples.values)
        PyMem_RawFree(self.late_samples.values)
        memset(&self.ack_samples, 0, sizeof(Samples))
        memset(&self.delivery_samples, 0, sizeof(Samples))
        memset(&self.late_samples, 0, sizeof(Samples))
        if self.poll >= 0:
            close(self.poll)
        if self.timer >= 0:
            close(self.timer)
        self.poll = self.timer = -1

    # ------------------------------------------------------------------------------------------ connections

    def add_publisher(self, sock, bytes units, Py_ssize_t unit_bytes, *, int window, int unit_messages=1):
        """A closed loop: at most `window` unanswered units of `units`, which is one or more units of equal length."""
        if unit_bytes <= 0 or len(units) == 0 or len(units) % unit_bytes:
            raise ValueError(f"units of {len(units)} bytes do not tile into {unit_bytes}")
        if window < 1 or unit_messages < 1:
            raise ValueError("window and unit_messages are at least 1")
        cdef Connection* c = self._add(sock, PUBLISHER, 1 << 16)
        self.units.append(units)
        c.units = PyBytes_AS_STRING(units)
        c.units_len = len(units)
        c.unit_len = unit_bytes
        c.unit_messages = unit_messages
        c.window = window

    def add_consumer(self, sock, *, int fins_per_send=0, int req_every=0, int req_delay_ms=0, bint holds=False,
                     Py_ssize_t read_bytes=1 << 18):
        """A subscribed connection. It gets nothing until `ready`."""
        if fins_per_send < 0 or req_every < 0 or read_bytes < 4096:
            raise ValueError("fins_per_send and req_every are not negative, read_bytes is at least 4096")
        cdef Connection* c = self._add(sock, CONSUMER, read_bytes)
        cdef bytes tail = b" %d\n" % req_delay_ms
        c.fin_piece = fins_per_send * FIN_BYTES
        c.req_every = req_every
        c.holds = holds
        c.req_tail_len = len(tail)
        memcpy(c.req_tail, PyBytes_AS_STRING(tail), len(tail))

    def add_paced(self, sock, bytes unit, *, Py_ssize_t stamp_at, double per_second, double phase=0.0):
        """An open loop: one `unit` every 1/per_second, its intended time (ns, big endian) written at `stamp_at`.

        `phase` (a part of the interval) keeps several such connections from firing together."""
        if not 0 <= stamp_at <= len(unit) - 8 or per_second <= 0:
            raise ValueError("the stamp lies inside the unit, the rate is positive")
        cdef Connection* c = self._add(sock, PACED, 1 << 16)
        self.units.append(unit)
        c.units = PyBytes_AS_STRING(unit)
        c.units_len = c.unit_len = len(unit)
        c.unit_messages = 1
        c.stamp_at = stamp_at
        c.interval = <int64_t>(1e9 / per_second)
        c.due = <int64_t>(phase * c.interval)
        c.waiting = <int64_t*>PyMem_RawMalloc(PACED_WAITING_MAX * sizeof(int64_t))
        if c.waiting == NULL:
            raise MemoryError

    def expect(self, bytes body, *, bint stamped=False):
        """Every delivered body must equal `body`; when stamped, from its ninth byte on."""
        if stamped and len(body) < 8:
            raise ValueError("a stamped body has at least 8 bytes")
        self.body = body
        self.body_at = PyBytes_AS_STRING(body)
        self.body_len = len(body)
        self.body_skip = 8 if stamped else 0
        self.stamped = stamped

    cdef Connection* _add(self, sock, int role, Py_ssize_t read_bytes) except NULL:
        cdef Connection* grown
        cdef Connection* c
        cdef int capacity
        if self.poll < 0:
            raise ValueError("the engine is closed")
        if self.count == self.capacity:
            capacity = max(16, 2 * self.capacity)
            grown = <Connection*>PyMem_RawRealloc(self.connections, capacity * sizeof(Connection))
            if grown == NULL:
                raise MemoryError
            self.connections, self.capacity = grown, capacity
        c = &self.connections[self.count]
        memset(c, 0, sizeof(Connection))
        c.inbox = <char*>PyMem_RawMalloc(read_bytes)
        if c.inbox == NULL:
            raise MemoryError
        c.in_cap = read_bytes
        sock.setblocking(False)
        c.fd = sock.fileno()
        c.role = role
        c.events = EPOLLIN
        if watch(EPOLL_CTL_ADD, self.poll, c.fd, c.events, self.count) < 0:
            PyMem_RawFree(c.inbox)
            raise OSError(errno, "epoll_ctl")
        if isinstance(sock, ssl.SSLSocket):
            c.tls = <PyObject*>sock
        self.sockets.append(sock)
        self.count += 1
        return c

    # ------------------------------------------------------------------------------------------ what to do

    def publish(self, int64_t units=-1):
        """Let the publishers send `units` more in all, shared evenly; without a number until `stop`."""
        cdef int i, left = 0
        cdef int64_t share
        cdef Connection* c
        for i in range(self.count):
            left += self.connections[i].role == PUBLISHER
        for i in range(self.count):
            c = &self.connections[i]
            if c.role != PUBLISHER:
                continue
            if units < 0:
                c.limit = INT64_MAX
                continue
            share = units // left
            units -= share
            left -= 1
            c.limit = (c.sent + c.unit_len - 1) // c.unit_len + share

    def stop(self):
        """Send no further unit. What is under way is still answered: `run` until `outstanding` is 0."""
        cdef int i
        cdef Connection* c
        self.pacing = False
        for i in range(self.count):
            c = &self.connections[i]
            if c.role == PUBLISHER:
                c.limit = (c.sent + c.unit_len - 1) // c.unit_len

    @property
    def outstanding(self):
        """Messages begun and not yet answered."""
        cdef int64_t messages = 0
        cdef int i
        cdef Connection* c
        for i in range(self.count):
            c = &self.connections[i]
            if c.role == PUBLISHER:
                messages += ((c.sent + c.unit_len - 1) // c.unit_len - c.acked) * c.unit_messages
            elif c.role == PACED:
                messages += c.waiting_end - c.waiting_first
        return messages

    @property
    def received_per_consumer(self):
        return [self.connections[i].received for i in range(self.count) if self.connections[i].role == CONSUMER]

    def ids_dense(self, int copies=1):
        """Were the first deliveries a gapless row of ids, each exactly `copies` times? (Equal count, sum and sum of
        squares between the same ends; an accident that keeps all of them is not a thing to plan for.)"""
        first, low, high = int(self.id_first), int(self.id_low), int(self.id_high)
        count = self.received - self.redelivered
        if count == 0 or count != copies * (high - low + 1):
            return False
        below, above = first - low, high - first
        total = copies * (above * (above + 1) - below * (below + 1)) // 2
        squares = copies * sum(n * (n + 1) * (2 * n + 1) // 6 for n in (below, above))
        return int(self.id_sum) == total % 2**64 and int(self.id_squares) == squares % 2**64

    def ready(self, int rdy):
        """Send RDY on every consumer."""
        cdef bytes line = b"RDY %d\n" % rdy
        cdef int i, outcome
        for i in range(self.count):
            if self.connections[i].role == CONSUMER:
                outcome = self._queue(&self.connections[i], PyBytes_AS_STRING(line), len(line))
                if outcome == GOING:
                    outcome = self._flush(&self.connections[i])
                if outcome < 0:
                    self.broken = i
                    self._raise(outcome)

    def pace(self, *, double record_after=0.0, double record_for=0.0):
        """Start the open loops. Latencies of commands due in the given stretch are kept."""
        cdef int64_t now = clock_ns()
        cdef double rate = 0
        cdef int64_t room
        cdef int i
        cdef Connection* c
        for i in range(self.count):
            c = &self.connections[i]
            if c.role == PACED:
                c.due = now + c.interval + c.due % c.interval
                rate += 1e9 / c.interval
        self.record_from = now + <int64_t>(record_after * 1e9)
        self.record_end = self.record_from + <int64_t>(record_for * 1e9)
        room = <int64_t>(rate * record_for * 1.1) + 1000
        self._make_room(&self.ack_samples, room)
        self._make_room(&self.delivery_samples, 4 * room)     # up to four channels
        self._make_room(&self.late_samples, room)
        self.pacing = True

    cdef int _make_room(self, Samples* samples, int64_t capacity) except -1:
        PyMem_RawFree(samples.values)
        memset(samples, 0, sizeof(Samples))
        samples.values = <int64_t*>PyMem_RawCalloc(capacity, sizeof(int64_t))
        if samples.values == NULL:
            raise MemoryError
        samples.capacity = capacity
        return 0

    def ack_ns(self):
        """From intended send time to OK, in order of arrival."""
        return _taken(&self.ack_samples)

    def delivery_ns(self):
        """From intended send time to the consumer's socket."""
        return _taken(&self.delivery_samples)

    def late_ns(self):
        """From intended to actual send time: the generator's own delay, part of both others."""
        return _taken(&self.late_samples)

    # ------------------------------------------------------------------------------------------ running

    def run(self, double seconds, *, int64_t acked=-1, int64_t received=-1, int64_t finished=-1):
        """Serve all connections for `seconds`, or until the totals named are reached. Returns seconds taken.

        The totals are those of the engine's life. Whether they were reached is for the caller to see."""
        cdef int64_t begun = clock_ns(), end = begun + <int64_t>(seconds * 1e9), now = begun, until
        cdef int outcome = GOING, i
        if self.poll < 0:
            raise ValueError("the engine is closed")
        for i in range(self.count):
            if self.connections[i].role == PUBLISHER:
                outcome = self._pump(&self.connections[i])
                if outcome < 0:
                    self.broken = i
                    self._raise(outcome)
        while now < end:
            until = min(end, now + SLICE_NS)
            with nogil:
                outcome = self._serve(until, acked, received, finished)
                now = clock_ns()
            if outcome < 0:
                self._raise(outcome)
            if outcome == REACHED:
                break
            PyErr_CheckSignals()
        return (now - begun) / 1e9

    cdef int _raise(self, int outcome) except -1:
        cdef str text = f"connection {self.broken}: {OUTCOME_TEXT[outcome]}"
        if outcome == ERROR_FRAME:
            text += ": " + self.error_text[:self.error_len].decode("utf-8", "replace")
        if outcome == SYSTEM:
            text += f" (errno {self.broken_errno})"
        raise LoadError(text)

    cdef bint _reached(self, int64_t acked, int64_t received, int64_t finished) noexcept nogil:
        return ((acked >= 0 or received >= 0 or finished >= 0)
                and self.acked >= acked and self.received >= received and self.finished >= finished)

    cdef int _serve(self, int64_t until, int64_t acked, int64_t received, int64_t finished) noexcept nogil:
        cdef epoll_event events[EVENTS]
        cdef int64_t now, wait
        cdef int count, i, outcome
        cdef uint32_t tag
        cdef char expirations[8]
        while True:
            if self._reached(acked, received, finished):
                return REACHED
            now = clock_ns()
            if now >= until:
                return GOING
            wait = until - now
            if self.pacing:
                outcome = self._issue_due(&wait)
                if outcome < 0:
                    return outcome
            # Rounded up, or the last millisecond of a slice would be polled.
            count = epoll_wait(self.poll, events, EVENTS, <int>((wait + 999999) // 1000000) if wait > 0 else 0)
            if count < 0:
                if errno == EINTR:
                    return GOING
                self.broken_errno = errno
                return SYSTEM
            for i in range(count):
                tag = event_tag(&events[i])
                if tag == TIMER_TAG:
                    read(self.timer, expirations, 8)
                    continue
                outcome = GOING
                if events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP):
                    outcome = self._receive(&self.connections[tag])
                if outcome >= 0 and events[i].events & EPOLLOUT:
                    outcome = self._pump(&self.connections[tag])
                if outcome < 0:
                    self.broken = <int>tag
                    return outcome

    cdef int _issue_due(self, int64_t* wait) noexcept nogil:
        """Send every paced command that is due; shorten `wait` to the next one (0: poll, it is close)."""
        cdef int64_t now, nearest = INT64_MAX
        cdef int i, outcome
        cdef Connection* c
        for i in range(self.count):
            c = &self.connections[i]
            if c.role != PACED:
                continue
            now = clock_ns()
            if c.due <= now:
                while c.due <= now:
                    if c.waiting_end - c.waiting_first == PACED_WAITING_MAX:
                        self.broken = i
                        return TOO_MANY_WAITING
                    outcome = self._queue(c, c.units, c.unit_len)
                    if outcome < 0:
                        self.broken = i
                        return outcome
                    store64(c.outbox + c.out_len - c.unit_len + c.stamp_at, c.due)
                    c.waiting[c.waiting_end & (PACED_WAITING_MAX - 1)] = c.due
                    c.waiting_end += 1
                    self.paced += 1
                    self._record(&self.late_samples, c.due, now)
                    c.due += c.interval
                outcome = self._flush(c)
                if outcome < 0:
                    self.broken = i
                    return outcome
            nearest = min(nearest, c.due)
        if nearest == INT64_MAX:
            return GOING
        now = clock_ns()
        if nearest - now <= SPIN_NS:
            wait[0] = 0
        elif nearest - SPIN_NS < now + wait[0]:
            wake_at(self.timer, nearest - SPIN_NS)
        return GOING

    cdef void _record(self, Samples* samples, int64_t intended, int64_t now) noexcept nogil:
        if self.record_from <= intended < self.record_end and samples.count < samples.capacity:
            samples.values[samples.count] = now - intended
            samples.count += 1

    # ------------------------------------------------------------------------------------------ receiving

    cdef int _receive(self, Connection* c) noexcept nogil:
        cdef Py_ssize_t count, room
        cdef int outcome
        while True:
            room = c.in_cap - c.in_len
            count = self._recv(c, c.inbox + c.in_len, room)
            if count == 0:
                return CLOSED
            if count == -EAGAIN:
                break
            if count < 0:
                self.broken_errno = <int>-count
                return SYSTEM
            c.in_len += count
            outcome = self._frames(c)
            if outcome < 0:
                return outcome
            # A plain socket that gave less than asked is empty; a TLS one gives a record at a time.
            if c.tls == NULL and count < room:
                break
        return self._pump(c)

    cdef int _frames(self, Connection* c) noexcept nogil:
        """Take every whole frame off the inbox and keep the rest at its front."""
        cdef char* at = c.inbox
        cdef char* end = c.inbox + c.in_len
        cdef char* grown
        cdef int64_t now = clock_ns(), size
        cdef int outcome
        while end - at >= 8:
            size = 4 + <int64_t>load32(at)
            if size < 8 or size > FRAME_MAX:
                return BAD_FRAME
            if end - at < size:
                if size > c.in_cap:
                    grown = <char*>PyMem_RawMalloc(size)
                    if grown == NULL:
                        return NO_MEMORY
                    memcpy(grown, at, end - at)
                    c.in_len = end - at
                    PyMem_RawFree(c.inbox)
                    c.inbox, c.in_cap = grown, size
                    return GOING
                break
            outcome = self._frame(c, at, size, now)
            if outcome < 0:
                return outcome
            at += size
        c.in_len = end - at
        if c.in_len and at != c.inbox:
            memmove(c.inbox, at, c.in_len)
        return GOING

    cdef int _frame(self, Connection* c, const char* at, int64_t size, int64_t now) noexcept nogil:
        cdef uint32_t kind = load32(at + 4)
        if kind == 2:
            return self._message(c, at, size, now)
        if kind == 0:
            if size == 10 and memcmp(at + 8, b"OK", 2) == 0:
                return self._answered(c, now)
            if size == 19 and memcmp(at + 8, b"_heartbeat_", 11) == 0:
                if c.role == CONSUMER or c.role == PACED:
                    return self._queue(c, b"NOP\n", 4)
                c.pongs += 1
                return GOING
            return BAD_FRAME
        if kind != 1:
            return BAD_FRAME
        # The three errors that leave a connection open all belong to a consumer's answers.
        if (size >= 20 and (memcmp(at + 8, b"E_FIN_FAILED", 12) == 0 or memcmp(at + 8, b"E_REQ_FAILED", 12) == 0)):
            self.refused += 1
            return GOING
        self.error_len = min(<int64_t>sizeof(self.error_text), size - 8)
        memcpy(self.error_text, at + 8, self.error_len)
        return ERROR_FRAME

    cdef int _answered(self, Connection* c, int64_t now) noexcept nogil:
        if c.role == PUBLISHER:
            # More answers than commands would otherwise widen the window for ever.
            if (c.acked + 1) * c.unit_len > c.sent:
                return BAD_FRAME
            c.acked += 1
        elif c.role == PACED:
            if c.waiting_first == c.waiting_end:
                return BAD_FRAME
            self._record(&self.ack_samples, c.waiting[c.waiting_first & (PACED_WAITING_MAX - 1)], now)
            c.waiting_first += 1
        else:
            return BAD_FRAME
        self.acked += c.unit_messages
        return GOING

    cdef int _message(self, Connection* c, const char* at, int64_t size, int64_t now) noexcept nogil:
        cdef int64_t body_len = size - MESSAGE_HEAD
        cdef bint first = at[16] == 0 and at[17] == 1
        if body_len < 0 or c.role != CONSUMER:
            return BAD_FRAME
        c.received += 1
        self.received += 1
        if first:
            self._count_id(hex8(at + 18) << 32 | hex8(at + 26))
        else:
            self.redelivered += 1
        if self.body_len and (body_len != self.body_len or memcmp(
                at + MESSAGE_HEAD + self.body_skip, self.body_at + self.body_skip, body_len - self.body_skip) != 0):
            self.corrupt += 1
        elif self.stamped and first:
            self._record(&self.delivery_samples, load64(at + MESSAGE_HEAD), now)
        if c.holds:
            return GOING
        if not self._outbox_room(c, 48):
            return NO_MEMORY
        cdef char* line = c.outbox + c.out_len
        if c.req_every and first and c.received % c.req_every == 0:
            memcpy(line, b"REQ ", 4)
            memcpy(line + 4, at + 18, 16)
            memcpy(line + 20, c.req_tail, c.req_tail_len)
            c.out_len += 20 + c.req_tail_len
            self.requeued += 1
        else:
            memcpy(line, b"FIN ", 4)
            memcpy(line + 4, at + 18, 16)
            line[20] = 10
            c.out_len += FIN_BYTES
            self.finished += 1
        return GOING

    cdef void _count_id(self, uint64_t message_id) noexcept nogil:
        cdef uint64_t distance
        if self.received - self.redelivered == 1:
            self.id_first = self.id_low = self.id_high = message_id
        distance = message_id - self.id_first
        self.id_low = min(self.id_low, message_id)
        self.id_high = max(self.id_high, message_id)
        self.id_sum += distance
        self.id_squares += distance * distance

    # ------------------------------------------------------------------------------------------ sending

    cdef int _pump(self, Connection* c) noexcept nogil:
        """Send what may be sent now."""
        cdef int64_t todo, at
        cdef Py_ssize_t count
        if c.role != PUBLISHER:
            return self._flush(c)
        while True:
            if c.pongs and c.sent % c.unit_len == 0:
                count = self._send(c, b"NOP\n", 4)
                if count == -EAGAIN:
                    return self._watch(c, EPOLLIN | EPOLLOUT)
                if count != 4:
                    self.broken_errno = <int>-count
                    return SYSTEM
                c.pongs -= 1
                continue
            todo = min(c.acked + c.window, c.limit) * c.unit_len - c.sent
            if todo <= 0:
                return self._watch(c, EPOLLIN)
            at = c.sent % c.units_len
            count = self._send(c, c.units + at, min(todo, c.units_len - at))
            if count == -EAGAIN:
                return self._watch(c, EPOLLIN | EPOLLOUT)
            if count < 0:
                self.broken_errno = <int>-count
                return SYSTEM
            c.sent += count

    cdef int _flush(self, Connection* c) noexcept nogil:
        """Send the outbox, in pieces of `fin_piece` bytes where one is set."""
        cdef Py_ssize_t count, piece
        while c.out_pos < c.out_len:
            piece = c.out_len - c.out_pos
            if c.fin_piece and piece > c.fin_piece:
                piece = c.fin_piece
            count = self._send(c, c.outbox + c.out_pos, piece)
            if count == -EAGAIN:
                return self._watch(c, EPOLLIN | EPOLLOUT)
            if count < 0:
                self.broken_errno = <int>-count
                return SYSTEM
            c.out_pos += count
        c.out_pos = c.out_len = 0
        return self._watch(c, EPOLLIN)

    cdef int _queue(self, Connection* c, const char* data, Py_ssize_t size) noexcept nogil:
        if not self._outbox_room(c, size):
            return NO_MEMORY
        memcpy(c.outbox + c.out_len, data, size)
        c.out_len += size
        return GOING

    cdef bint _outbox_room(self, Connection* c, Py_ssize_t size) noexcept nogil:
        cdef Py_ssize_t capacity
        cdef char* grown
        if c.out_len + size <= c.out_cap:
            return True
        capacity = max(c.out_cap * 2, c.out_len + size, <Py_ssize_t>65536)
        grown = <char*>PyMem_RawRealloc(c.outbox, capacity)
        if grown == NULL:
            return False
        c.outbox, c.out_cap = grown, capacity
        return True

    cdef int _watch(self, Connection* c, uint32_t events) noexcept nogil:
        if c.events != events:
            c.events = events
            if watch(EPOLL_CTL_MOD, self.poll, c.fd, events, <uint32_t>(c - self.connections)) < 0:
                self.broken_errno = errno
                return SYSTEM
        return GOING

    # ------------------------------------------------------------------------------------------ system calls
    # Both return the number of bytes, or minus the errno.

    cdef Py_ssize_t _recv(self, Connection* c, char* into, Py_ssize_t room) noexcept nogil:
        cdef Py_ssize_t count
        if c.tls != NULL:
            return self._tls_recv(c, into, room)
        while True:
            count = recv(c.fd, into, room, 0)
            if count >= 0:
                return count
            if errno != EINTR:
                return -errno

    cdef Py_ssize_t _send(self, Connection* c, const char* data, Py_ssize_t size) noexcept nogil:
        cdef Py_ssize_t count
        if c.tls != NULL:
            return self._tls_send(c, data, size)
        while True:
            count = send(c.fd, data, size, MSG_NOSIGNAL)
            if count >= 0:
                return count
            if errno != EINTR:
                return -errno

    cdef Py_ssize_t _tls_recv(self, Connection* c, char* into, Py_ssize_t room) noexcept with gil:
        try:
            return (<object>c.tls).recv_into(PyMemoryView_FromMemory(into, room, PyBUF_WRITE))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return -EAGAIN
        except OSError as error:
            return -(error.errno or 5)

    cdef Py_ssize_t _tls_send(self, Connection* c, const char* data, Py_ssize_t size) noexcept with gil:
        try:
            return (<object>c.tls).send(PyMemoryView_FromMemory(<char*>data, size, PyBUF_READ))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return -EAGAIN
        except OSError as error:
            return -(error.errno or 5)


cdef object _taken(Samples* samples):
    values = array.array("q")
    if samples.count:
        values.frombytes((<char*>samples.values)[:samples.count * sizeof(int64_t)])
    samples.count = 0
    return values
