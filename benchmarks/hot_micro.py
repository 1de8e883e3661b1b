"""Nanoseconds per message of every function of nsqha.hot, for both twins: `python -m benchmarks.hot_micro`.

    uniform   100-byte bodies                        what a benchmark or a telemetry producer sends
    mixed     bodies of 50 to 150 bytes, at random   no two neighbours alike: the twin's slow path
    single    one message per call                   clients that wait for each OK, or answer one message at a time

The best of several rounds, so that other load on the machine matters little. A few seconds in all.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

COUNT = 2000
SINGLES = 100
BASE = (3 << 50) | (12345 << 30)
PREFIX = b"PUB benchmark\n"
ROUNDS = 7
ROUND_S = 0.02

# Budgets of the design for the pure twin: ns per message of 100 bytes.
BUDGETS = {
    "publish: pub_run + stamp": 800,
    "mpublish: mpub_body + stamp": 700,
    "consume: walk + deliver + fin_run": 400,
}


def best_ns(call: Callable[[], object], count: int) -> float:
    """Nanoseconds per message of `call`, which handles `count`."""
    loops, spent = 1, 0.0
    while True:
        started = time.process_time()
        for _ in range(loops):
            call()
        spent = time.process_time() - started
        if spent > ROUND_S / 4:
            break
        loops *= 4
    loops = max(1, round(loops * ROUND_S / spent))
    best = spent / loops
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(loops):
            call()
        best = min(best, (time.process_time() - started) / loops)
    return best / count * 1e9


def fin_lines(offsets: Iterator[int] | range | list[int]) -> bytes:
    return b"".join(b"FIN %016x\n" % (BASE + offset) for offset in offsets)


def cases(hot: ModuleType, bodies: list[bytes]) -> Iterator[tuple[str, Callable[[], object]]]:
    """The functions over a whole run of messages."""
    pubs = b"".join(PREFIX + len(body).to_bytes(4) + body for body in bodies)
    mpub = len(bodies).to_bytes(4) + b"".join(len(body).to_bytes(4) + body for body in bodies)
    batch = bytearray(hot.mpub_body(mpub, 0, len(mpub), 1 << 20)[1])
    hot.stamp(batch, 0, BASE, 1)
    data = bytes(batch)
    fins = fin_lines(range(len(bodies)))
    swapped = [n ^ 1 for n in range(len(bodies))]
    out_of_order = fin_lines(swapped)
    ring = hot.Ring(0)

    def publish() -> None:
        frames = hot.pub_run(pubs, 0, len(pubs), PREFIX, 1 << 20)[2]
        hot.stamp(bytearray(frames), 0, BASE, 1)

    def mpublish() -> None:
        hot.stamp(bytearray(hot.mpub_body(mpub, 0, len(mpub), 1 << 20)[1]), 0, BASE, 1)

    def deliver_and_fin(lines: bytes) -> None:
        ring.reset(0)
        ring.deliver(0, len(bodies), 7)
        assert ring.fin_run(lines, 0, len(lines), BASE, 7)[1] == len(bodies)

    def consume() -> None:
        hot.walk(data, 0, len(data), len(bodies))
        deliver_and_fin(fins)

    def deliver_and_settle() -> None:
        ring.reset(0)
        ring.deliver(0, len(bodies), 7)
        ring.settle(0, len(bodies), hot.FINISHED)

    yield "pub_run", lambda: hot.pub_run(pubs, 0, len(pubs), PREFIX, 1 << 20)
    yield "mpub_body", lambda: hot.mpub_body(mpub, 0, len(mpub), 1 << 20)
    yield "stamp", lambda: hot.stamp(batch, 0, BASE, 1)
    yield "walk", lambda: hot.walk(data, 0, len(data), len(bodies))
    yield "crc32", lambda: hot.crc32(data)
    yield "fins_end", lambda: hot.fins_end(fins, 0, len(fins))
    yield "deliver, settle", deliver_and_settle
    yield "deliver, fin_run in order", lambda: deliver_and_fin(fins)
    yield "deliver, fin_run out of order", lambda: deliver_and_fin(out_of_order)
    yield "publish: pub_run + stamp", publish
    yield "mpublish: mpub_body + stamp", mpublish
    yield "consume: walk + deliver + fin_run", consume


def single_cases(hot: ModuleType) -> Iterator[tuple[str, Callable[[], object]]]:
    """One message per call."""
    body = bytes(100)
    pub = PREFIX + len(body).to_bytes(4) + body
    mpub = b"\0\0\0\1" + len(body).to_bytes(4) + body
    frame = hot.frame(body)
    batch = bytearray(frame)
    fins = [fin_lines([offset]) for offset in range(SINGLES)]
    ring = hot.Ring(0)

    def deliver_and_fin() -> None:
        ring.reset(0)
        for offset, fin in enumerate(fins):
            ring.deliver(offset, offset + 1, 7)
            ring.fin_run(fin, 0, 21, BASE, 7)

    yield "pub_run", lambda: hot.pub_run(pub, 0, len(pub), PREFIX, 1 << 20)
    yield "mpub_body", lambda: hot.mpub_body(mpub, 0, len(mpub), 1 << 20)
    yield "frame", lambda: hot.frame(body)
    yield "stamp", lambda: hot.stamp(batch, 0, BASE, 1)
    yield "walk", lambda: hot.walk(frame, 0, len(frame), 1)
    yield "patch_attempts", lambda: hot.patch_attempts(frame, 2)
    yield "fins_end", lambda: hot.fins_end(fins[0], 0, 21)
    yield f"{SINGLES} x (deliver, fin_run)", deliver_and_fin


def measure() -> dict[tuple[str, str], dict[str, float]]:
    """(kind of traffic, function) -> twin -> ns per message."""
    draw = random.Random(1)
    traffic = {
        "uniform": [draw.randbytes(100) for _ in range(COUNT)],
        "mixed": [draw.randbytes(draw.randint(50, 150)) for _ in range(COUNT)],
    }
    found: dict[tuple[str, str], dict[str, float]] = {}
    for twin in ("_hot", "_hot_py"):
        try:
            hot: Any = importlib.import_module(f"nsqha.hot.{twin}")
        except ImportError:
            print("the extension is not built; the twin alone", file=sys.stderr)
            continue
        for kind, bodies in traffic.items():
            for name, call in cases(hot, bodies):
                found.setdefault((kind, name), {})[twin] = best_ns(call, COUNT)
        for name, call in single_cases(hot):
            found.setdefault(("single", name), {})[twin] = best_ns(call, SINGLES if " x " in name else 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="ns per message of nsqha.hot, both twins")
    parser.add_argument("--check", action="store_true", help="fail if the twin misses a budget")
    arguments = parser.parse_args()
    missed = 0
    print(f"{'ns per message':46}{'compiled':>10}{'pure':>10}{'budget':>10}")
    for (kind, name), twins in measure().items():
        budget = BUDGETS.get(name)
        missed += budget is not None and twins["_hot_py"] > budget
        compiled = f"{twins['_hot']:10.1f}" if "_hot" in twins else f"{'-':>10}"
        print(f"{kind:9}{name:37}{compiled}{twins['_hot_py']:10.1f}{budget or '':>10}")
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
