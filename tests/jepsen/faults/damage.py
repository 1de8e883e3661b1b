"""D8-D13: files that rot, are cut, rolled back, torn, lost or exchanged, on one broker while the others are whole.

    D8   bits flip: in a segment, a commitlog, the journal, the cursor cache; while it is down, or runs
    D9   the end of a file is missing: a little of it most of the time, all of it sometimes
    D10  a chunk of a file was written elsewhere, or never; or the whole disk is an older copy
    D11  the last write is torn: its first sectors are on the disk when power is lost
    D12  the data directory is gone
    D13  two brokers have each other's directories

What is damaged is to be found, never served, and mended from other replicas. So a fault is over when the files of its
victim verify again, and nothing else is broken until then: what is damaged at two replicas, the third may not have yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsqha.commitlog.entry import ENTRY_BYTES
from tests.integration.cluster import pause
from tests.integration.servers import CannotStart, wait_until
from tests.jepsen.deployment import SCRUB_BYTES_PER_SECOND, Broker, Deployment, NotNow, one_of
from tests.jepsen.faults.disks import DISKS, SYNCED, Inject, all_well, ended, frozen_names
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.faults.processes import kill

CHUNK = 4096
MENDED_SECONDS = 90.0
TORN_SECONDS = 20.0  # in which a broker under load has come to the write that is torn
TORN_VISITS = 40  # one of so many writes is
COPY_SECONDS = (1.0, 4.0)  # what an older copy lacks
SEGMENT, COMMITLOG = ".segment", ".commitlog"
JOURNAL, CURSORS = "journal", "cursors.lmdb/data.mdb"


@dataclass(frozen=True)
class Change:
    """What is different in a file now."""

    path: Path
    what: str
    at: int
    good: bytes  # what was there

    def bit(self) -> bool:
        """Whether the disk has something else there."""
        with self.path.open("rb") as file:
            file.seek(self.at)
            return file.read(len(self.good)) != self.good


def flipped(path: Path, rng: random.Random) -> Change:
    """One to three bits of a byte, not behind what was written into a file that is longer."""
    at = rng.randrange(max(1, len(path.read_bytes().rstrip(b"\0"))))
    with path.open("r+b", buffering=0) as file:
        good = os.pread(file.fileno(), 1, at)
        mask = sum({1 << rng.randrange(8) for _ in range(rng.randint(1, 3))})
        os.pwrite(file.fileno(), bytes([good[0] ^ mask]), at)
        os.fsync(file.fileno())
    return Change(path, f"bits of byte {at} flipped", at, good)


def cut_short(path: Path, rng: random.Random) -> Change:
    """The tail is gone: each size is as likely as each of twice the size."""
    size = path.stat().st_size
    tail = min(size, int(2 ** rng.uniform(0, size.bit_length())))
    with path.open("r+b", buffering=0) as file:
        good = os.pread(file.fileno(), tail, size - tail)
        os.ftruncate(file.fileno(), size - tail)
        os.fsync(file.fileno())
    return Change(path, f"the last {tail} bytes cut off", size - tail, good)


def misplaced(path: Path, rng: random.Random) -> Change:
    """A chunk has what another one has, or zeros: a write that went elsewhere, or nowhere."""
    chunks = path.stat().st_size // CHUNK
    if chunks < 2:
        raise NotNow("a file of less than two chunks")
    to, of = rng.sample(range(chunks), 2)
    with path.open("r+b", buffering=0) as file:
        good = os.pread(file.fileno(), CHUNK, to * CHUNK)
        bad = os.pread(file.fileno(), CHUNK, of * CHUNK) if rng.random() < 0.5 else bytes(CHUNK)
        os.pwrite(file.fileno(), bad, to * CHUNK)
        os.fsync(file.fileno())
    return Change(path, f"chunk {to} has the content of another one", to * CHUNK, good)


def logs(broker: Broker, suffix: str) -> list[Path]:
    return sorted(path for path in broker.data.glob(f"topics/*/*/*{suffix}") if size_now(path))


def size_now(path: Path) -> int:
    """0 for a file that retention has taken meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def one_log(suffix: str) -> Callable[[Broker, random.Random], Path]:
    return lambda broker, rng: one_of(rng, logs(broker, suffix))


def last_log(suffix: str) -> Callable[[Broker, random.Random], Path]:
    """The one that is written to now, of some partition."""
    return lambda broker, rng: max(logs(one_whole(broker), suffix), key=lambda path: path.stat().st_mtime)


def one_whole(broker: Broker) -> Broker:
    if not logs(broker, SEGMENT):
        raise NotNow("it has no log")
    return broker


def named(name: str) -> Callable[[Broker, random.Random], Path]:
    def find(broker: Broker, rng: random.Random) -> Path:
        if not (broker.data / name).exists():
            raise NotNow(f"it has no {name}")
        return broker.data / name

    return find


# ---- D8, D9, D10


def damaged(
    change: Callable[[Path, random.Random], Change],
    choose: Callable[[Broker, random.Random], Path],
    *,
    running: bool = False,
) -> Inject:
    """`running`: the broker does not stop for it."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        all_well(deployment)
        broker = one_of(rng, deployment.whole_nodes)
        choose(broker, rng)  # NotNow, before it is killed
        if not running:
            kill(broker)
        try:
            made = change(choose(broker, rng), rng)
        except NotNow:  # the file is too short, as it turned out
            if not running:
                started(broker)
            raise
        if running:
            forget_cached(made.path)
        else:
            deployment.disks[broker.name].remount()  # what is read next comes from the disk
        bit, told = made.bit(), list[str]()

        def heal() -> None:
            if not running:
                told.append(started(broker))
            deployment.settle(MENDED_SECONDS)
            told.append(whole_again(broker))

        def proof() -> str:
            bitten(bit, f"{made.path.name} is as it was")
            return f"{made.what}; {', '.join(filter(None, told))}"

        what = f"{made.path.name} of {broker}{' while it runs' if running else ''}: {made.what}"
        return Injected(what, frozen_names([broker]), heal, proof)

    return inject


def forget_cached(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def started(broker: Broker) -> str:
    """Started as an operator does: a directory that can not be used any more is given up for an empty one."""
    broker.spawn()
    try:
        wait_until(broker.listening, f"{broker} listens", 60)
    except CannotStart:
        said = broker.log()
        assert "--data-path" in said or "journal" in said, said[-2000:]
        broker.kill()
        broker.wipe()
        broker.spawn()
        return "it refused to start and was given an empty directory"
    return ""


def whole_again(broker: Broker) -> str:
    """Returns when all files of its logs verify. AssertionError with what does not."""
    began, limit = time.monotonic(), MENDED_SECONDS + 2 * round_seconds(broker)
    while problems := unverified(broker):
        assert time.monotonic() - began < limit, f"the logs of {broker} are not mended: {problems}"
        pause(0.5)
    return f"whole after {time.monotonic() - began:.1f} s"


def round_seconds(broker: Broker) -> float:
    """How long it takes to read all of its logs once, as it does to find damage: small batches count as a chunk."""
    batches = sum(map(size_now, logs(broker, COMMITLOG))) / ENTRY_BYTES
    return (size_of(broker) + CHUNK * batches) / SCRUB_BYTES_PER_SECOND


def unverified(broker: Broker) -> list[dict[str, Any]]:
    """What `nsqha log verify` finds; the end of a log that is being written may be among it."""
    command = [sys.executable, "-m", "nsqha", "log", "verify", str(broker.data), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        return []
    try:
        return list(json.loads(done.stdout)["problems"]) or [{"said": done.stdout[-500:]}]
    except ValueError:
        return [{"said": done.stderr[-500:]}]


def older_disk(deployment: Deployment, rng: random.Random) -> Injected:
    """As a virtual machine that is restored. It was started once since the copy: a younger one is not recognised."""
    all_well(deployment)
    broker = one_of(rng, deployment.whole_nodes)
    disk = deployment.disks[broker.name]
    snapshot = disk.snapshot()
    broker.stop()
    broker.start()
    deployment.settle(60)
    pause(rng.uniform(*COPY_SECONDS))
    before = size_of(broker)
    kill(broker)
    disk.put_back(snapshot)
    snapshot.unlink()
    lacking = before - size_of(broker)

    def heal() -> None:
        started(broker)
        deployment.settle(MENDED_SECONDS)

    def proof() -> str:
        bitten(lacking > 0, "the copy has all that there was")
        bitten("older copy" in broker.log() or "old_directory" in broker.log(), "it did not notice")
        return f"its logs lack {lacking} bytes, and it knows"

    return Injected(f"the disk of {broker} is an older copy", frozen_names([broker]), heal, proof)


def size_of(broker: Broker) -> int:
    return sum(map(size_now, logs(broker, SEGMENT)))


# ---- D11


def torn(suffix: str) -> Inject:
    """The broker dies in the middle of a write, whose first half gets to the disk; then power is lost."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        all_well(deployment)
        broker = one_of(rng, deployment.whole_nodes)
        point = f"half-write@{suffix}:{rng.randint(1, TORN_VISITS)}"
        broker.stop()
        usual = broker.program
        broker.program = (*usual[:-1], f"--failpoint={point}", usual[-1])
        broker.spawn()
        reached = waited_for(broker)
        broker.program = usual
        if reached:
            for path in logs(broker, suffix):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            deployment.disks[broker.name].power_loss()
        broker.kill()

        def heal() -> None:
            started(broker)
            deployment.settle(MENDED_SECONDS)
            whole_again(broker)

        def proof() -> str:
            bitten(reached, f"it did not come to {point}")
            return f"it died at {point}"

        return Injected(f"a torn write to a {suffix[1:]} of {broker}", frozen_names([broker]), heal, proof)

    return inject


def waited_for(broker: Broker) -> bool:
    """Whether it ends by itself in time."""
    until = time.monotonic() + TORN_SECONDS
    while ended(broker) is None and time.monotonic() < until:
        pause(0.02)
    if ended(broker) is None:
        return False
    died = "is reached" in broker.log()
    broker.kill()
    return died


# ---- D12, D13


def emptied(deployment: Deployment, rng: random.Random) -> Injected:
    all_well(deployment)
    broker = one_of(rng, deployment.whole_nodes)
    before, lost = size_of(broker), deployment.uid(broker)
    kill(broker)
    broker.wipe()

    def heal() -> None:
        broker.spawn()
        wait_until(broker.listening, f"{broker} listens", 60)
        wait_until(lambda: deployment.uid(broker) not in (0, lost), f"{broker} is another node now", 30)
        wait_until(lambda: lost not in deployment.named_in_records(), "it has its predecessor's place", MENDED_SECONDS)

    def proof() -> str:
        bitten(before, "there was nothing in it")
        return f"{before} bytes of logs are gone; it is another node, with the place of the old one"

    return Injected(f"the data directory of {broker} is gone", frozen_names([broker]), heal, proof)


def exchanged(deployment: Deployment, rng: random.Random) -> Injected:
    """Until it is healed each runs in the other's directory, or refuses to."""
    all_well(deployment)
    two = rng.sample(deployment.whole_nodes, 2)
    uids = [deployment.uid(broker) for broker in two]
    for broker in two:
        kill(broker)
    swap(two)
    for broker in two:
        broker.spawn()
    found: list[str] = []

    def became() -> list[str]:
        """What each of them is with the other's directory; of one that still starts, nothing yet."""
        pairs = zip(two, reversed(uids), strict=True)
        said = [
            f"{broker} {'refused' if ended(broker) is not None else 'was the other node'}"
            for broker, uid in pairs
            if ended(broker) is not None or deployment.uid(broker) == uid
        ]
        return said if len(said) == len(two) else []

    def heal() -> None:
        with contextlib.suppress(AssertionError):  # then it has not bitten
            found[:] = wait_until(became, "both run with the other's directory, or refuse to", MENDED_SECONDS)
        for broker in two:
            broker.kill()
        swap(two)
        for broker in two:
            started(broker)
        deployment.settle(MENDED_SECONDS)

    def proof() -> str:
        bitten(found, "they did not both run with the other's directory, nor refuse to")
        return ", ".join(found)

    what = f"{two[0]} and {two[1]} have each other's directories"
    return Injected(what, frozen_names(two), heal, proof)


def swap(two: Sequence[Broker]) -> None:
    """Their `--data-path`; nobody runs."""
    one, other = two
    for broker in two:
        assert not broker.running, "it still runs"
    flags = [next(n for n, flag in enumerate(broker.flags) if flag.startswith("--data-path=")) for broker in two]
    one.data, other.data = other.data, one.data
    for broker, at in zip(two, flags, strict=True):
        broker.flags[at] = f"--data-path={broker.data}"


def kind(number: str, title: str, promise: str, inject: Inject, **others: Any) -> FaultKind:
    usual: dict[str, Any] = {"seconds": (0.5, 3.0), "needs": DISKS, "settle": 60.0, "alone": True, "weight": 1}
    return FaultKind(number, title, promise, inject, **{**usual, **others})


FOUND = "found, mended, never served"
KINDS = (
    kind("D8-segment", "a bit flips in a segment", FOUND, damaged(flipped, one_log(SEGMENT))),
    kind(
        "D8-running", "a bit flips in a segment that is in use", FOUND, damaged(flipped, one_log(SEGMENT), running=True)
    ),
    kind("D8-commitlog", "a bit flips in a commitlog", FOUND, damaged(flipped, one_log(COMMITLOG))),
    kind("D8-journal", "a bit flips in the journal", FOUND, damaged(flipped, named(JOURNAL)), syncs=SYNCED),
    kind("D8-cursors", "a bit flips in the cursor cache", "dropped", damaged(flipped, named(CURSORS))),
    kind("D9-segment", "the end of a segment is missing", FOUND, damaged(cut_short, last_log(SEGMENT))),
    kind("D9-commitlog", "the end of a commitlog is missing", FOUND, damaged(cut_short, last_log(COMMITLOG))),
    kind("D10-segment", "a chunk of a segment is misplaced", FOUND, damaged(misplaced, one_log(SEGMENT))),
    kind("D10-commitlog", "a chunk of a commitlog is misplaced", FOUND, damaged(misplaced, one_log(COMMITLOG))),
    kind("D10-disk", "a disk is put back to an older copy", "not elected, compared", older_disk),
    kind("D11-segment", "a torn write to a segment, power lost", "cut and fetched", torn(SEGMENT)),
    kind("D11-commitlog", "a torn write to a commitlog, power lost", "cut and fetched", torn(COMMITLOG)),
    kind("D12", "a data directory is gone", "another node in its place", emptied, seconds=(0.5, 6.0)),
    kind("D13", "two brokers have each other's directories", "no fork", exchanged, seconds=(6.0, 9.0)),
)
