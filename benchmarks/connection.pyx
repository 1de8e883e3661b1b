# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""One connection of the load generator: its buffers, its place in an epoll set, and the calls that move bytes.

A TLS connection is the same with the two system calls replaced by the `ssl` object's; it takes the GIL once per TLS
record. Nothing is allocated but buffers that grow. What can fail says so by what it returns, as there is no GIL to
raise with; `broken_errno` says why.
"""
import ssl

from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport PyObject
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint32_t
from libc.string cimport memcpy, memset

from .system cimport EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLLIN, EPOLLOUT, MSG_NOSIGNAL, recv, send, watch


cdef int open_connection(Connection* c, sock, Py_ssize_t read_bytes, int poll, uint32_t number) except -1:
    """`sock` is connected, and kept alive by the caller."""
    memset(c, 0, sizeof(Connection))
    c.inbox = <char*>PyMem_RawMalloc(read_bytes)
    if c.inbox == NULL:
        raise MemoryError
    c.in_cap = read_bytes
    sock.setblocking(False)
    c.fd, c.poll, c.number, c.events = sock.fileno(), poll, number, EPOLLIN
    if watch(EPOLL_CTL_ADD, poll, c.fd, c.events, number) < 0:
        PyMem_RawFree(c.inbox)
        raise OSError(errno, "epoll_ctl")
    if isinstance(sock, ssl.SSLSocket):
        c.tls = <PyObject*>sock
    return 0


cdef void free_connection(Connection* c) noexcept:
    PyMem_RawFree(c.inbox)
    PyMem_RawFree(c.outbox)


# ------------------------------------------------------------------------------------------ what is to be sent
# False: it could not be; memory for `queue` and `outbox_room`, else `broken_errno`.

cdef bint queue(Connection* c, const char* data, Py_ssize_t size) noexcept nogil:
    if not outbox_room(c, size):
        return False
    memcpy(c.outbox + c.out_len, data, size)
    c.out_len += size
    return True


cdef bint outbox_room(Connection* c, Py_ssize_t size) noexcept nogil:
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


cdef bint flush(Connection* c) noexcept nogil:
    """Send the outbox, in pieces of `out_piece` bytes where one is set."""
    cdef Py_ssize_t count, piece
    while c.out_pos < c.out_len:
        piece = c.out_len - c.out_pos
        if c.out_piece and piece > c.out_piece:
            piece = c.out_piece
        count = send_bytes(c, c.outbox + c.out_pos, piece)
        if count == -EAGAIN:
            return watch_for(c, EPOLLIN | EPOLLOUT)
        if count < 0:
            c.broken_errno = <int>-count
            return False
        c.out_pos += count
    c.out_pos = c.out_len = 0
    return watch_for(c, EPOLLIN)


cdef bint watch_for(Connection* c, uint32_t events) noexcept nogil:
    if c.events != events:
        c.events = events
        if watch(EPOLL_CTL_MOD, c.poll, c.fd, events, c.number) < 0:
            c.broken_errno = errno
            return False
    return True


# ------------------------------------------------------------------------------------------ system calls
# Both return the number of bytes, or minus the errno.

cdef Py_ssize_t receive_bytes(Connection* c, char* into, Py_ssize_t room) noexcept nogil:
    cdef Py_ssize_t count
    if c.tls != NULL:
        return _tls_receive(c, into, room)
    while True:
        count = recv(c.fd, into, room, 0)
        if count >= 0:
            return count
        if errno != EINTR:
            return -errno


cdef Py_ssize_t send_bytes(Connection* c, const char* data, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t count
    if c.tls != NULL:
        return _tls_send(c, data, size)
    while True:
        count = send(c.fd, data, size, MSG_NOSIGNAL)
        if count >= 0:
            return count
        if errno != EINTR:
            return -errno


cdef Py_ssize_t _tls_receive(Connection* c, char* into, Py_ssize_t room) noexcept with gil:
    try:
        return (<object>c.tls).recv_into(PyMemoryView_FromMemory(into, room, PyBUF_WRITE))
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return -EAGAIN
    except OSError as error:
        return -(error.errno or 5)


cdef Py_ssize_t _tls_send(Connection* c, const char* data, Py_ssize_t size) noexcept with gil:
    try:
        return (<object>c.tls).send(PyMemoryView_FromMemory(<char*>data, size, PyBUF_READ))
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return -EAGAIN
    except OSError as error:
        return -(error.errno or 5)
