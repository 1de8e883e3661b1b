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

Sockets arrive connected and past their handshake (`client.py`), with nothing unread. How bytes get to and from them,
also over TLS, is in `connection.pyx`.

Every message is checked as it passes: frame shape, attempts, and its body against the one that was published. Ids
are summed up, so that a server which numbers its messages densely can be held to "each once" over millions of them.
A run ends at its deadline at the latest, wakes every 50 ms for Ctrl-C, and raises `LoadError` on anything odd.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport INT64_MAX, int64_t, uint32_t
from libc.string cimport memcmp, memcpy, memmove, memset

from .connection cimport (
    Connection, flush, free_connection, open_connection, outbox_room, queue, receive_bytes, send_bytes, watch_for
)
from .measures cimport Ids, Samples, count_id, dense, free_samples, make_room, record, taken
from .system cimport (
    CLOCK_MONOTONIC, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, PR_SET_TIMERSLACK,
    TFD_CLOEXEC, TFD_NONBLOCK, clock_ns, close, epoll_create1, epoll_event, epoll_wait, event_tag, hex8, load32, load64,
    prctl, read, store64, timerfd_create, wake_at, watch
)


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

cdef struct Client:
    Connection wire
    int role
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

    cdef Client* clients
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
    cdef Samples acks
    cdef Samples deliveries
    cdef Samples late
    cdef Ids ids                        # of first deliveries
    cdef int broken                     # the connection that ended a run
    cdef int broken_errno               # of epoll itself
    cdef char error_text[256]
    cdef Py_ssize_t error_len
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
            free_connection(&self.clients[i].wire)
            PyMem_RawFree(self.clients[i].waiting)
        PyMem_RawFree(self.clients)
        self.clients = NULL
        self.count = self.capacity = 0
        free_samples(&self.acks)
        free_samples(&self.deliveries)
        free_samples(&self.late)
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
        cdef Client* c = self._add(sock, PUBLISHER, 1 << 16)
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
        cdef Client* c = self._add(sock, CONSUMER, read_bytes)
        cdef bytes tail = b" %d\n" % req_delay_ms
        c.wire.out_piece = fins_per_send * FIN_BYTES
        c.req_every = req_every
        c.holds = holds
        c.req_tail_len = len(tail)
        memcpy(c.req_tail, PyBytes_AS_STRING(tail), len(tail))

    def add_paced(self, sock, bytes unit, *, Py_ssize_t stamp_at, double per_second, double phase=0.0):
        """An open loop: one `unit` every 1/per_second, its intended time (ns, big endian) written at `stamp_at`.

        `phase` (a part of the interval) keeps several such connections from firing together."""
        if not 0 <= stamp_at <= len(unit) - 8 or per_second <= 0:
            raise ValueError("the stamp lies inside the unit, the rate is positive")
        cdef Client* c = self._add(sock, PACED, 1 << 16)
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

    cdef Client* _add(self, sock, int role, Py_ssize_t read_bytes) except NULL:
        cdef Client* grown
        cdef Client* c
        cdef int capacity
        if self.poll < 0:
            raise ValueError("the engine is closed")
        if self.count == self.capacity:
            capacity = max(16, 2 * self.capacity)
            grown = <Client*>PyMem_RawRealloc(self.clients, capacity * sizeof(Client))
            if grown == NULL:
                raise MemoryError
            self.clients, self.capacity = grown, capacity
        c = &self.clients[self.count]
        memset(c, 0, sizeof(Client))
        open_connection(&c.wire, sock, read_bytes, self.poll, self.count)
        c.role = role
        self.sockets.append(sock)
        self.count += 1
        return c

    # ------------------------------------------------------------------------------------------ what to do

    def publish(self, int64_t units=-1):
        """Let the publishers send `units` more in all, shared evenly; without a number until `stop`."""
        cdef int i, left = 0
        cdef int64_t share
        cdef Client* c
        for i in range(self.count):
            left += self.clients[i].role == PUBLISHER
        for i in range(self.count):
            c = &self.clients[i]
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
        cdef Client* c
        self.pacing = False
        for i in range(self.count):
            c = &self.clients[i]
            if c.role == PUBLISHER:
                c.limit = (c.sent + c.unit_len - 1) // c.unit_len

    @property
    def outstanding(self):
        """Messages begun and not yet answered."""
        cdef int64_t messages = 0
        cdef int i
        cdef Client* c
        for i in range(self.count):
            c = &self.clients[i]
            if c.role == PUBLISHER:
                messages += ((c.sent + c.unit_len - 1) // c.unit_len - c.acked) * c.unit_messages
            elif c.role == PACED:
                messages += c.waiting_end - c.waiting_first
        return messages

    @property
    def received_per_consumer(self):
        return [self.clients[i].received for i in range(self.count) if self.clients[i].role == CONSUMER]

    def ids_dense(self, int copies=1):
        """Were the first deliveries a gapless row of ids, each exactly `copies` times? (Equal count, sum and sum of
        squares between the same ends; an accident that keeps all of them is not a thing to plan for.)"""
        return dense(&self.ids, copies)

    def ready(self, int rdy):
        """Send RDY on every consumer."""
        cdef bytes line = b"RDY %d\n" % rdy
        cdef int i, outcome
        for i in range(self.count):
            if self.clients[i].role == CONSUMER:
                outcome = self._queue(&self.clients[i], PyBytes_AS_STRING(line), len(line))
                if outcome == GOING:
                    outcome = self._flush(&self.clients[i])
                if outcome < 0:
                    self.broken = i
                    self._raise(outcome)

    def pace(self, *, double record_after=0.0, double record_for=0.0):
        """Start the open loops. Latencies of commands due in the given stretch are kept."""
        cdef int64_t now = clock_ns(), begin, end, room
        cdef double rate = 0
        cdef int i
        cdef Client* c
        for i in range(self.count):
            c = &self.clients[i]
            if c.role == PACED:
                c.due = now + c.interval + c.due % c.interval
                rate += 1e9 / c.interval
        begin = now + <int64_t>(record_after * 1e9)
        end = begin + <int64_t>(record_for * 1e9)
        room = <int64_t>(rate * record_for * 1.1) + 1000
        make_room(&self.acks, begin, end, room)
        make_room(&self.deliveries, begin, end, 4 * room)     # up to four channels
        make_room(&self.late, begin, end, room)
        self.pacing = True

    def ack_ns(self):
        """From intended send time to OK, in order of arrival."""
        return taken(&self.acks)

    def delivery_ns(self):
        """From intended send time to the consumer's socket."""
        return taken(&self.deliveries)

    def late_ns(self):
        """From intended to actual send time: the generator's own delay, part of both others."""
        return taken(&self.late)

    # ------------------------------------------------------------------------------------------ running

    def run(self, double seconds, *, int64_t acked=-1, int64_t received=-1, int64_t finished=-1):
        """Serve all connections for `seconds`, or until the totals named are reached. Returns seconds taken.

        The totals are those of the engine's life. Whether they were reached is for the caller to see."""
        cdef int64_t begun = clock_ns(), end = begun + <int64_t>(seconds * 1e9), now = begun, until
        cdef int outcome = GOING, i
        if self.poll < 0:
            raise ValueError("the engine is closed")
        for i in range(self.count):
            if self.clients[i].role == PUBLISHER:
                outcome = self._pump(&self.clients[i])
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
            text += f" (errno {self.broken_errno or self.clients[self.broken].wire.broken_errno})"
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
                    outcome = self._receive(&self.clients[tag])
                if outcome >= 0 and events[i].events & EPOLLOUT:
                    outcome = self._pump(&self.clients[tag])
                if outcome < 0:
                    self.broken = <int>tag
                    return outcome

    cdef int _issue_due(self, int64_t* wait) noexcept nogil:
        """Send every paced command that is due; shorten `wait` to the next one (0: poll, it is close)."""
        cdef int64_t now, nearest = INT64_MAX
        cdef int i, outcome
        cdef Client* c
        for i in range(self.count):
            c = &self.clients[i]
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
                    store64(c.wire.outbox + c.wire.out_len - c.unit_len + c.stamp_at, c.due)
                    c.waiting[c.waiting_end & (PACED_WAITING_MAX - 1)] = c.due
                    c.waiting_end += 1
                    self.paced += 1
                    record(&self.late, c.due, now)
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

    # ------------------------------------------------------------------------------------------ receiving

    cdef int _receive(self, Client* c) noexcept nogil:
        cdef Py_ssize_t count, room
        cdef int outcome
        while True:
            room = c.wire.in_cap - c.wire.in_len
            count = receive_bytes(&c.wire, c.wire.inbox + c.wire.in_len, room)
            if count == 0:
                return CLOSED
            if count == -EAGAIN:
                break
            if count < 0:
                c.wire.broken_errno = <int>-count
                return SYSTEM
            c.wire.in_len += count
            outcome = self._frames(c)
            if outcome < 0:
                return outcome
            # A plain socket that gave less than asked is empty; a TLS one gives a record at a time.
            if c.wire.tls == NULL and count < room:
                break
        return self._pump(c)

    cdef int _frames(self, Client* c) noexcept nogil:
        """Take every whole frame off the inbox and keep the rest at its front."""
        cdef char* at = c.wire.inbox
        cdef char* end = c.wire.inbox + c.wire.in_len
        cdef char* grown
        cdef int64_t now = clock_ns(), size
        cdef int outcome
        while end - at >= 8:
            size = 4 + <int64_t>load32(at)
            if size < 8 or size > FRAME_MAX:
                return BAD_FRAME
            if end - at < size:
                if size > c.wire.in_cap:
                    grown = <char*>PyMem_RawMalloc(size)
                    if grown == NULL:
                        return NO_MEMORY
                    memcpy(grown, at, end - at)
                    c.wire.in_len = end - at
                    PyMem_RawFree(c.wire.inbox)
                    c.wire.inbox, c.wire.in_cap = grown, size
                    return GOING
                break
            outcome = self._frame(c, at, size, now)
            if outcome < 0:
                return outcome
            at += size
        c.wire.in_len = end - at
        if c.wire.in_len and at != c.wire.inbox:
            memmove(c.wire.inbox, at, c.wire.in_len)
        return GOING

    cdef int _frame(self, Client* c, const char* at, int64_t size, int64_t now) noexcept nogil:
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

    cdef int _answered(self, Client* c, int64_t now) noexcept nogil:
        if c.role == PUBLISHER:
            # More answers than commands would otherwise widen the window for ever.
            if (c.acked + 1) * c.unit_len > c.sent:
                return BAD_FRAME
            c.acked += 1
        elif c.role == PACED:
            if c.waiting_first == c.waiting_end:
                return BAD_FRAME
            record(&self.acks, c.waiting[c.waiting_first & (PACED_WAITING_MAX - 1)], now)
            c.waiting_first += 1
        else:
            return BAD_FRAME
        self.acked += c.unit_messages
        return GOING

    cdef int _message(self, Client* c, const char* at, int64_t size, int64_t now) noexcept nogil:
        cdef int64_t body_len = size - MESSAGE_HEAD
        cdef bint first = at[16] == 0 and at[17] == 1
        if body_len < 0 or c.role != CONSUMER:
            return BAD_FRAME
        c.received += 1
        self.received += 1
        if first:
            count_id(&self.ids, hex8(at + 18) << 32 | hex8(at + 26))
        else:
            self.redelivered += 1
        if self.body_len and (body_len != self.body_len or memcmp(
                at + MESSAGE_HEAD + self.body_skip, self.body_at + self.body_skip, body_len - self.body_skip) != 0):
            self.corrupt += 1
        elif self.stamped and first:
            record(&self.deliveries, load64(at + MESSAGE_HEAD), now)
        if c.holds:
            return GOING
        if not outbox_room(&c.wire, 48):
            return NO_MEMORY
        cdef char* line = c.wire.outbox + c.wire.out_len
        if c.req_every and first and c.received % c.req_every == 0:
            memcpy(line, b"REQ ", 4)
            memcpy(line + 4, at + 18, 16)
            memcpy(line + 20, c.req_tail, c.req_tail_len)
            c.wire.out_len += 20 + c.req_tail_len
            self.requeued += 1
        else:
            memcpy(line, b"FIN ", 4)
            memcpy(line + 4, at + 18, 16)
            line[20] = 10
            c.wire.out_len += FIN_BYTES
            self.finished += 1
        return GOING

    # ------------------------------------------------------------------------------------------ sending

    cdef int _pump(self, Client* c) noexcept nogil:
        """Send what may be sent now."""
        cdef int64_t todo, at
        cdef Py_ssize_t count
        if c.role != PUBLISHER:
            return self._flush(c)
        while True:
            if c.pongs and c.sent % c.unit_len == 0:
                count = send_bytes(&c.wire, b"NOP\n", 4)
                if count == -EAGAIN:
                    return self._watch(c, EPOLLIN | EPOLLOUT)
                if count != 4:
                    c.wire.broken_errno = <int>-count
                    return SYSTEM
                c.pongs -= 1
                continue
            todo = min(c.acked + c.window, c.limit) * c.unit_len - c.sent
            if todo <= 0:
                return self._watch(c, EPOLLIN)
            at = c.sent % c.units_len
            count = send_bytes(&c.wire, c.units + at, min(todo, c.units_len - at))
            if count == -EAGAIN:
                return self._watch(c, EPOLLIN | EPOLLOUT)
            if count < 0:
                c.wire.broken_errno = <int>-count
                return SYSTEM
            c.sent += count

    cdef int _flush(self, Client* c) noexcept nogil:
        return GOING if flush(&c.wire) else SYSTEM

    cdef int _queue(self, Client* c, const char* data, Py_ssize_t size) noexcept nogil:
        return GOING if queue(&c.wire, data, size) else NO_MEMORY

    cdef int _watch(self, Client* c, uint32_t events) noexcept nogil:
        return GOING if watch_for(&c.wire, events) else SYSTEM
