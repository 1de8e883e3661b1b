/* Byte order, hex digits, and calls of Linux that are one line in C. */

#pragma once

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
