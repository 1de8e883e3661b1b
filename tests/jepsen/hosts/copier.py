"""Copies packets between two taps, and treats them badly on the way: the process behind `tests.jepsen.hosts.links`.

    python copier.py TAP TAP          in the namespace of the switch

Each line of stdin is a JSON object with what happens to packets of each direction (fields of `links.Trouble`); each is
answered by a line of counters. It ends with its stdin. It runs for each packet, so it has no classes and no layers: a
packet is read, gets the time at which it goes on, waits in a heap, and is written. Imports are those of the standard
library only, as it is started with every fault.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import sys
import time
from typing import Any

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME = 65_535
READ_AT_ONCE = 64
HELD_MAX = 20_000  # packets under way; more are lost, as in a router
COUNTERS = ("packets", "lost", "duplicated", "reordered", "delayed", "overflowed")
WHOLE = {
    "delay": 0.0,
    "jitter": 0.0,
    "loss": 0.0,
    "duplicate": 0.0,
    "reorder": 0.0,
    "hold": 0.0,
    "rate": 0.0,
    "queue": 0,
}


def tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


def main(names: list[str]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with who started it
    taps = [tap(name) for name in names]
    others = {taps[0]: taps[1], taps[1]: taps[0]}
    troubles: dict[int, dict[str, Any]] = {fd: dict(WHOLE) for fd in taps}
    counts = {fd: dict.fromkeys(COUNTERS, 0) for fd in taps}
    order = dict.fromkeys(taps, 0)  # numbers of packets, as they came
    passed = dict.fromkeys(taps, 0)  # the highest that went on
    last_due = dict.fromkeys(taps, 0.0)  # of one that is not held back
    line_free = dict.fromkeys(taps, 0.0)  # when a line of some rate has sent what it has
    held: list[tuple[float, int, int, bytes]] = []
    chance, now_s = random.Random().random, time.monotonic
    poller = select.epoll()
    poller.register(0, select.EPOLLIN)
    for fd in taps:
        poller.register(fd, select.EPOLLIN)
    commands = b""

    def take(fd: int, packet: bytes) -> None:
        """Decide when a packet goes on; at once if there is no reason for another time."""
        trouble, count, now = troubles[fd], counts[fd], now_s()
        count["packets"] += 1
        order[fd] += 1
        if trouble["loss"] and chance() < trouble["loss"]:
            count["lost"] += 1
            return
        due = now
        if trouble["rate"]:
            begins = max(now, line_free[fd])
            if (begins - now) * trouble["rate"] > trouble["queue"]:
                count["overflowed"] += 1
                return
            due = line_free[fd] = begins + len(packet) / trouble["rate"]
        if trouble["delay"] or trouble["jitter"]:
            due += max(0.0, trouble["delay"] + trouble["jitter"] * (2 * chance() - 1))
        if trouble["reorder"] and chance() < trouble["reorder"]:
            due += trouble["hold"]  # others overtake it
        else:
            due = last_due[fd] = max(due, last_due[fd])
        if due > now:
            count["delayed"] += 1
        elif not held and not trouble["duplicate"]:
            send(fd, order[fd], packet)
            return
        copies = 1
        if trouble["duplicate"] and chance() < trouble["duplicate"]:
            count["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            if len(held) < HELD_MAX:
                heapq.heappush(held, (due, order[fd], fd, packet))
            else:
                count["overflowed"] += 1

    def send(fd: int, number: int, packet: bytes) -> None:
        if number < passed[fd]:
            counts[fd]["reordered"] += 1
        else:
            passed[fd] = number
        try:
            os.write(others[fd], packet)
        except OSError:
            counts[fd]["overflowed"] += 1  # the interface is not up, or has no room

    print("ready", flush=True)
    while True:
        wait = max(0.0, held[0][0] - now_s()) if held else -1
        for fd, _ in poller.poll(wait):
            if fd == 0:
                data = os.read(0, 65_536)
                if not data:
                    return
                *lines, commands = (commands + data).split(b"\n")
                for line in lines:
                    for each, trouble in zip(taps, json.loads(line) or [], strict=False):
                        troubles[each] = {**WHOLE, **trouble}
                        last_due[each] = line_free[each] = 0.0
                    print(json.dumps([counts[each] for each in taps]), flush=True)
                continue
            try:
                for _ in range(READ_AT_ONCE):
                    take(fd, os.read(fd, FRAME))
            except BlockingIOError:
                pass
        now = now_s()
        while held and held[0][0] <= now:
            _, number, fd, packet = heapq.heappop(held)
            send(fd, number, packet)


if __name__ == "__main__":
    main(sys.argv[1:])
