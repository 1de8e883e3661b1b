# A connection, of which `loadgen.pyx` has many.

from cpython.ref cimport PyObject
from libc.stdint cimport uint32_t


cdef struct Connection:
    int fd
    int poll                            # the epoll set that it is in,
    uint32_t number                     # its number there,
    uint32_t events                     # and what is watched for
    PyObject* tls                       # borrowed, NULL for plain TCP
    int broken_errno                    # of the call that failed
    # received bytes; the front holds an incomplete frame between reads
    char* inbox
    Py_ssize_t in_len
    Py_ssize_t in_cap
    # bytes to send that are made here: FIN, REQ, RDY, NOP and paced commands
    char* outbox
    Py_ssize_t out_pos
    Py_ssize_t out_len
    Py_ssize_t out_cap
    Py_ssize_t out_piece                # bytes per send call; 0: everything that one read produced

cdef int open_connection(Connection* c, sock, Py_ssize_t read_bytes, int poll, uint32_t number) except -1
cdef void free_connection(Connection* c) noexcept
cdef Py_ssize_t receive_bytes(Connection* c, char* into, Py_ssize_t room) noexcept nogil
cdef Py_ssize_t send_bytes(Connection* c, const char* data, Py_ssize_t size) noexcept nogil
cdef bint watch_for(Connection* c, uint32_t events) noexcept nogil
cdef bint flush(Connection* c) noexcept nogil
cdef bint queue(Connection* c, const char* data, Py_ssize_t size) noexcept nogil
cdef bint outbox_room(Connection* c, Py_ssize_t size) noexcept nogil
