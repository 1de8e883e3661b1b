# What `_publishing.pyx` shares with `_hot.pyx`.

from libc.stdint cimport int64_t, uint8_t

cdef struct Run:
    Py_ssize_t end
    Py_ssize_t count
    Py_ssize_t body_bytes

cdef Run find_run(const uint8_t* data, Py_ssize_t pos, Py_ssize_t end, const uint8_t* prefix, Py_ssize_t prefix_size,
                  int64_t size_max, int64_t count_max) noexcept
cdef bytes frames_of(const uint8_t* data, Py_ssize_t prefix_size, Run run)
