# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The compiled twin of `_publishing_py.py`, where every class is described.

A PUB that waits for its OK costs a publisher's round trip, and the broker a `Slot`, its frames and two entries of a
list: no Python frame. The slots of a client are a chain.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t

from nsqha.hot._hot cimport Run, find_run, frames_of
from collections import deque

from nsqha.hot._publishing_py import FIRST_TURNS, TURNS, Taken

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
cdef class Lane:
    cdef object source
    cdef object runs
    cdef Py_ssize_t credit


@cython.final
cdef class Lanes:
    cdef Py_ssize_t runs
    cdef Py_ssize_t bytes
    cdef Py_ssize_t _most
    cdef Py_ssize_t _first
    cdef Py_ssize_t _turn_bytes
    cdef Py_ssize_t _size
    cdef dict _of
    cdef object _fresh
    cdef object _ring
    cdef list _taken

    def __init__(self, Py_ssize_t most):
        self._most = most
        self._first = max(1, most // <Py_ssize_t>FIRST_TURNS)
        self._turn_bytes = max(1, most // <Py_ssize_t>TURNS)
        self._of = {}
        self._fresh = deque()
        self._ring = deque()
        self._taken = []

    cdef list all(self):
        cdef Lane lane
        entries = []
        for lane in self._of.values():
            entries.extend(lane.runs)
        return entries

    cdef int add(self, bytes run, tuple waiter, delay_ms) except -1:
        cdef Lane lane
        reply = waiter[0]
        source = (<Slot>reply)._replies if type(reply) is Slot else getattr(reply, "source", None)
        lane = self._of.get(source)
        if lane is None:
            lane = Lane.__new__(Lane)
            lane.source = source
            lane.runs = deque()
            lane.credit = self._first
            self._of[source] = lane
            (self._fresh if PyBytes_GET_SIZE(run) <= self._first else self._ring).append(lane)
        lane.runs.append((run, waiter, delay_ms))
        self.runs += 1
        self.bytes += PyBytes_GET_SIZE(run)
        return 0

    cdef list fill(self, Py_ssize_t size):
        cdef Py_ssize_t least
        self._size = size
        while self._fresh and self._size < self._most // 2:
            self._turn(self._fresh.popleft(), 0)
        least = 0 if size else len(self._taken) + 1
        while self._ring and self._turn(self._ring.popleft(), least):
            pass
        return self._end()

    cdef bint _turn(self, Lane lane, Py_ssize_t least) except? False:
        cdef Py_ssize_t size
        while lane.runs:
            size = PyBytes_GET_SIZE(<bytes>(<tuple>lane.runs[0])[0])
            if size > lane.credit:
                break
            if len(self._taken) >= least and self._size + size > self._most:
                self._ring.appendleft(lane)
                return False
            lane.credit -= size
            self._take(lane)
        if lane.runs:
            lane.credit += self._turn_bytes
            self._ring.append(lane)
        else:
            del self._of[lane.source]
        return True

    cdef list take_since(self, double overdue):
        cdef Lane lane
        for lane in self._of.values():
            while lane.runs and <double>(<tuple>(<tuple>lane.runs[0])[1])[1] < overdue:
                self._take(lane)
        return self._end()

    cdef int _take(self, Lane lane) except -1:
        cdef tuple entry = lane.runs.popleft()
        cdef Py_ssize_t size = PyBytes_GET_SIZE(<bytes>entry[0])
        self.runs -= 1
        self.bytes -= size
        self._size += size
        self._taken.append(entry)
        return 0

    cdef list _end(self):
        taken, self._taken = self._taken, []
        return taken


@cython.final
cdef class PublishQueue:
    cdef readonly Py_ssize_t bytes_waiting
    cdef public bint closed
    cdef public object write_lone
    cdef int64_t _alone
    cdef object _budget
    cdef Py_ssize_t _bytes_max
    cdef Py_ssize_t _most
    cdef object _schedule
    cdef list _runs
    cdef list _waiters
    cdef list _delays
    cdef Lanes _lanes
    cdef bint _scheduled
    cdef object _tick  # the loop's time, as a `Publisher` has read it since `scheduled` was reset; None: not yet

    def __init__(self, budget, schedule, Py_ssize_t most):
        self.bytes_waiting = 0
        self._budget = budget
        self._bytes_max = budget.bytes_max
        self._most = most
        self._schedule = schedule
        self._runs = []
        self._waiters = []
        self._delays = []
        self._lanes = Lanes(most)

    @property
    def scheduled(self):
        return self._scheduled

    @scheduled.setter
    def scheduled(self, bint scheduled):
        self._scheduled = scheduled
        if not scheduled:
            self._tick = None

    @property
    def count(self):
        return len(self._runs) + self._lanes.runs

    @property
    def runs(self):
        return [*self._runs, *[entry[0] for entry in self._lanes.all()]]

    def add(self, bytes frames not None, reply, since, delay_ms):
        self._add(frames, reply, since, delay_ms)

    cdef inline int _add(self, bytes frames, reply, since, delay_ms) except -1:
        """Whether the budget is used up now."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(frames), used = self._budget.used + size
        if self._lanes._of or (self._runs and self.bytes_waiting + size > self._most):
            self._lanes.add(frames, (reply, since), delay_ms)
        else:
            self._put(frames, (reply, since), delay_ms)
        self.bytes_waiting += size
        self._budget.used = used
        if not self._scheduled:
            self._scheduled = True
            self._schedule()
        return used > self._bytes_max

    cdef inline int _put(self, bytes run, tuple waiter, delay_ms) except -1:
        if delay_ms is not None:
            self._delays.append((len(self._runs), delay_ms))
        self._runs.append(run)
        self._waiters.append(waiter)
        return 0

    @property
    def full(self):
        return self._budget.used > self._bytes_max

    def take(self):
        if self._lanes._of:
            self._put_all(self._lanes.fill(self.bytes_waiting - self._lanes.bytes))
        return self._take_next()

    cdef int _put_all(self, list entries) except -1:
        for entry in entries:
            self._put((<tuple>entry)[0], (<tuple>entry)[1], (<tuple>entry)[2])
        return 0

    def take_all(self):
        cdef Lanes lanes = self._lanes
        self._lanes = Lanes(self._most)
        self._put_all(lanes.all())
        return self._take_next()

    cdef object _take_next(self):
        global batches_alone
        taken = Taken(self._runs, self._waiters, self._delays, self.bytes_waiting - self._lanes.bytes)
        if self._runs:
            reply = (<tuple>self._waiters[0])[0]
            self._alone = 0
            if len(self._runs) + self._lanes.runs == 1 and type(reply) is Slot:
                batches_alone += 1
                self._alone = (<Slot>reply)._replies._alone = batches_alone
        self._runs, self._waiters, self._delays = [], [], []
        self.bytes_waiting = self._lanes.bytes
        return taken

    def take_since(self, double overdue):
        cdef Py_ssize_t n = 0, size = 0
        cdef bytes run
        cdef list runs, waiters, delays
        for waiter in self._waiters:
            if <double>(<tuple>waiter)[1] >= overdue:
                break
            n += 1
        runs, waiters = self._runs[n:], self._waiters[n:]
        delays = [(index - n, delay) for index, delay in self._delays if index >= n]
        del self._runs[n:]
        del self._waiters[n:]
        self._delays = [delay for delay in self._delays if delay[0] < n]
        if not runs:
            self._put_all(self._lanes.take_since(overdue))
        for run in self._runs:
            size += PyBytes_GET_SIZE(run)
        taken = Taken(self._runs, self._waiters, self._delays, size)
        self._alone = 0
        self.bytes_waiting -= size
        self._runs, self._waiters, self._delays = runs, waiters, delays
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
        if (queue._alone and queue._alone == self._replies._alone and not queue._runs
                and not queue._lanes._of and not queue._scheduled
                and queue.write_lone is not None):
            self.taken_at = self._time()
            if queue.write_lone(frames, slot):
                return True
        if queue._tick is None:
            queue._tick = self._time()
        self.taken_at = queue._tick
        if queue._add(frames, slot, self.taken_at, None):
            self._on_full()
        return True
