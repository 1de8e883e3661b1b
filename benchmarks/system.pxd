# Byte order, hex digits, the clock and epoll, as `system.h` has them.

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef extern from "system.h":
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
