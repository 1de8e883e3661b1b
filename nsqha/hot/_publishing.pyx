# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The compiled twin of `_publishing_py.py`, where every class is described.

A PUB that waits for its OK costs a publisher's round trip, and the broker a `Slot`, its frames and two entries of a
list: no Python frame. The slots of a client are a chain.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t

from nsqha.hot._hot cimport Run, find_run, frames_of
from nsqha.hot._publishing_py import Taken

cdef bytes OK = b"\0\0\0\6\0\0\0\0OK"
cdef int64_t batches_alone = 0
cdef list OKS = [OK * n for n in range(256)]


@cython.final
@cython.trashcan(True)
cdef class Slot:
    cdef Replies _replies
    cdef Slot _next
    cdef str _command
    cdef bytes _data
    cdef bint _ready
    cdef bint _close

    def __init__(self, Replies replies not None, str command not None, bytes data not None, bint ready=False,
                 bint close=False):
        self._fill(replies, command, data, ready, close)

    cdef inline void _fill(self, Replies replies, str command, bytes data, bint ready, bint close):
        self._replies = replies
        self._command = command
        self._data = data
        self._ready = ready
        self._close = close

    def stored(self):
        self._stored()

    cdef inline int _stored(self) except -1:
        self._ready = True
        return self._replies._settle(self)

    def failed(self, str why not None):
        self._data = self._replies._client.publish_failed(self._command, why)
        self._ready = self._close = True
        self._replies._settle(self)


@cython.final
cdef class Replies:
    cdef public object write
    cdef public bint behind
    cdef public object on_empty
    cdef object _client
    cdef int64_t _alone
    cdef Slot _first
    cdef Slot _last

    def __init__(self, client, write):
        self._client = client
        self.write = write

    def __bool__(self):
        return self._first is not None

    cdef inline Slot _place(self, str command, bytes data, bint ready, bint close):
        cdef Slot slot = Slot.__new__(Slot)
        slot._fill(self, command, data, ready, close)
        if self._last is None:
            self._first = slot
        else:
            self._last._next = slot
        self._last = slot
        return slot

    def publish(self, str command not None, Py_ssize_t count):
        if count != 1 and command == "PUB":
            return self._place(command, <bytes>OKS[count] if count < 256 else OK * count, False, False)
        return self._place(command, OK, False, False)

    def reply(self, bytes data not None):
        if self._first is not None:
            self._place("", data, True, False)
        else:
            self._send(data)

    def fatal(self, bytes data not None):
        if self._first is not None:
            self._place("", data, True, True)
        else:
            self.write(data)
            self._client.close()

    def clear(self):
        cdef Slot slot = self._first
        self._first = self._last = None
        while slot is not None:  # one by one: freeing a whole chain at once would recurse
            slot._next, slot = None, slot._next

    cdef inline int _send(self, bytes data) except -1:
        self.write(data)
        if self.behind:
            self._client.heed_unread()
        return 0

    cdef int _settle(self, Slot slot) except -1:
        cdef list out
        cdef bytes data = slot._data
        cdef bint closing = slot._close
        if self._first is not slot:
            return 0
        self._pop()
        if self._first is not None and self._first._ready and not closing:
            out = [data]
            while self._first is not None and self._first._ready and not closing:
                out.append(self._first._data)
                closing = self._first._close
                self._pop()
            data = b"".join(out)
        if closing:
            self.clear()
            self.write(data)
            self._client.close()
            return 0
        self._send(data)
        if self._first is None and self.on_empty is not None:
            self.on_empty()
        return 0

    cdef inline void _pop(self):
        cdef Slot slot = self._first
        self._first = slot._next
        slot._next = None
        if self._first is None:
            self._last = None


def tell_stored(list waiters not None, on_error not None):
    cdef Py_ssize_t i
    cdef object reply
    for i in range(len(waiters) - 1, -1, -1):
        reply = (<tuple>waiters[i])[0]
        try:
            if type(reply) is Slot:
                (<Slot>reply)._stored()
            else:
                reply.stored()
        except Exception as error:
            on_error(error)


@cython.final
cdef class PublishQueue:
    cdef public list runs
    cdef public Py_ssize_t bytes_waiting
    cdef public bint closed
    cdef public object write_lone
    cdef int64_t _alone
    cdef object _budget
    cdef Py_ssize_t _bytes_max
    cdef object _schedule
    cdef list _waiters
    cdef list _delays
    cdef bint _scheduled
    cdef object _tick  # the loop's time, as a `Publisher` has read it since `scheduled` was reset; None: not yet

    def __init__(self, budget, schedule):
        self.runs = []
        self.bytes_waiting = 0
        self._budget = budget
        self._bytes_max = budget.bytes_max
        self._schedule = schedule
        self._waiters = []
        self._delays = []

    @property
    def scheduled(self):
        return self._scheduled

    @scheduled.setter
    def scheduled(self, bint scheduled):
        self._scheduled = scheduled
        if not scheduled:
            self._tick = None

    def add(self, bytes frames not None, reply, since, delay_ms):
        if delay_ms is not None:
            self._delays.append((len(self.runs), delay_ms))
        self._add(frames, reply, since)

    cdef inline int _add(self, bytes frames, reply, since) except -1:
        """Whether the budget is used up now."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(frames), used = self._budget.used + size
        self.runs.append(frames)
        self._waiters.append((reply, since))
        self.bytes_waiting += size
        self._budget.used = used
        if not self._scheduled:
            self._scheduled = True
            self._schedule()
        return used > self._bytes_max

    @property
    def full(self):
        return self._budget.used > self._bytes_max

    def take(self, Py_ssize_t most):
        cdef Py_ssize_t size = 0, n = 0
        cdef bytes run
        if self.bytes_waiting <= most:
            return self.take_all()
        for run in self.runs:
            if n and size + PyBytes_GET_SIZE(run) > most:
                break
            size += PyBytes_GET_SIZE(run)
            n += 1
        return self._take_first(n, size)

    def take_all(self):
        global batches_alone
        taken = Taken(self.runs, self._waiters, self._delays, self.bytes_waiting)
        if self.runs:
            reply = (<tuple>self._waiters[0])[0]
            self._alone = 0
            if len(self.runs) == 1 and type(reply) is Slot:
                batches_alone += 1
                self._alone = (<Slot>reply)._replies._alone = batches_alone
        self.runs, self._waiters, self._delays = [], [], []
        self.bytes_waiting = 0
        return taken

    def take_since(self, double overdue):
        cdef Py_ssize_t n = 0, size = 0
        for waiter in self._waiters:
            if <double>(<tuple>waiter)[1] >= overdue:
                break
            size += PyBytes_GET_SIZE(<bytes>self.runs[n])
            n += 1
        return self._take_first(n, size)

    cdef object _take_first(self, Py_ssize_t n, Py_ssize_t size):
        self._alone = 0
        taken = Taken(self.runs[:n], self._waiters[:n], [d for d in self._delays if d[0] < n], size)
        del self.runs[:n]
        del self._waiters[:n]
        self._delays = [(index - n, delay) for index, delay in self._delays if index >= n]
        self.bytes_waiting -= size
        return taken


@cython.final
cdef class Publisher:
    cdef readonly object taken_at
    cdef bytes _line
    cdef str _topic
    cdef int64_t _size_max
    cdef PublishQueue _queue
    cdef Replies _replies
    cdef dict _counts
    cdef object _time
    cdef object _on_full

    def __init__(self, bytes line not None, str topic not None, int64_t size_max, PublishQueue queue not None,
                 Replies replies not None, dict counts not None, time not None, on_full not None):
        self.taken_at = 0.0
        self._line = line
        self._topic = topic
        self._size_max = size_max
        self._queue = queue
        self._replies = replies
        self._counts = counts
        self._time = time
        self._on_full = on_full

    def take(self, bytes data not None):
        cdef const uint8_t* d = <const uint8_t*>PyBytes_AS_STRING(data)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data), prefix_size = PyBytes_GET_SIZE(self._line)
        cdef Run run
        cdef bytes frames
        cdef PublishQueue queue = self._queue
        if queue.closed:
            return False
        run = find_run(d, 0, size, <const uint8_t*>PyBytes_AS_STRING(self._line), prefix_size, self._size_max, size)
        if run.end != size or not run.count:
            return False
        frames = frames_of(d, prefix_size, run)  # what may fail comes before a reply is queued
        slot = self._replies._place("PUB", OK if run.count == 1 else OK * run.count, False, False)
        self._counts[self._topic] += run.count
        if (queue._alone and queue._alone == self._replies._alone and not queue.runs and not queue._scheduled
                and queue.write_lone is not None):
            self.taken_at = self._time()
            if queue.write_lone(frames, slot):
                return True
        if queue._tick is None:
            queue._tick = self._time()
        self.taken_at = queue._tick
        if queue._add(frames, slot, self.taken_at):
            self._on_full()
        return True
