"""Kills under publishing and archiving: the lake has every acknowledged message once.

    python -m tests.jepsen.spark_crash --kills 50 [--seed N] [--keep DIR]

Three brokers with tiny files and tiny retention, publishers that never send a message twice, and `nsqha spark archive`
in a loop. What is killed with -9 is drawn by lot:

    broker      the leader of a partition, or another one; started again up to two seconds later
    driver      the archiver with its JVM and workers, in whatever moment it is; started again
    executor    one of its Python workers: the task fails, and the round with it, or Spark tries again
    compact     `nsqha spark compact`, beside the archiver, in whatever moment it is; every second one may end

Then everything heals, the archive is completed, and the lake is compared with the ledger: a message that was OK'd is
there once, one whose outcome is unknown at most once, and no other. `verify --full` says the same of lake and log.
Retention runs all the time, so what was unlinked before it was archived is missed here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO

import grpc
import pyarrow.parquet as pq

from nsqha.cli.brokers.v2client import RefusedByServer, V2Publisher
from nsqha.cli.terminal import exits
from nsqha.pb.v1 import segments_pb2_grpc
from nsqha.pb.v1.segments_pb2 import SnapshotRequest
from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.store import Store
from tests.integration.cluster import Cluster, Member, pause
from tests.integration.servers import BIN, wait_until

TOPIC = "orders"
PARTITIONS = 3
FLAGS = ("--max-bytes-per-file=262144", "--retention-bytes=524288", "--retention=2s")
KINDS = {"broker": 2, "driver": 2, "executor": 1, "compact": 1}
COMPACT_SECONDS = 40.0  # in which it is killed; on a busy machine Spark takes most of that to start
ROUND_FIRST = 0.7  # of the kills come after a commit; the others at any time, while Spark starts, too
COMMIT_SECONDS = 300.0  # on a busy machine Spark takes a minute to start
BURST = 20
PAD = b"x" * 400


class Ledger:
    """What publishers were told of each of their messages."""

    def __init__(self) -> None:
        self.ok: set[bytes] = set()
        self.unknown: set[bytes] = set()
        self._lock = threading.Lock()

    def told(self, bodies: list[bytes], published: int, *, refused: bool) -> None:
        """The first `published` were OK'd; of the rest nothing is known, but that one was refused as not stored."""
        with self._lock:
            self.ok.update(bodies[:published])
            self.unknown.update(bodies[published + refused :])


class Publishing:
    """A publisher that goes from node to node."""

    def __init__(self, name: int, cluster: Cluster, ledger: Ledger, seed: int) -> None:
        self._name = name
        self._cluster = cluster
        self._ledger = ledger
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._n = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.is_set():
            node = self._rng.choice(self._cluster.nodes)
            try:
                publisher = V2Publisher(node.tcp, 10)
            except exits.Exit:
                time.sleep(0.05)
                continue
            with suppress(exits.Exit, RefusedByServer):
                while not self._stop.is_set():
                    self._burst(publisher)
                    time.sleep(0.01)
            publisher.close()

    def _burst(self, publisher: V2Publisher) -> None:
        bodies = [b"%d:%d:%s" % (self._name, self._n + i, PAD) for i in range(BURST)]
        self._n += BURST
        before = publisher.published
        try:
            publisher.publish(TOPIC, bodies)
        except RefusedByServer as refusal:
            self._ledger.told(bodies, publisher.published - before, refused="not stored" in str(refusal))
            raise
        except exits.Exit:
            self._ledger.told(bodies, publisher.published - before, refused=False)
            raise
        self._ledger.told(bodies, BURST, refused=False)


class Archiver:
    """`nsqha spark archive`, in a process group of its own; started again whenever it ends."""

    def __init__(self, cluster: Cluster, lake: Path, log: IO[bytes]) -> None:
        self._brokers = [word for node in cluster.nodes for word in ("--broker", node.grpc)]
        self._lake = lake
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.ends: Counter[int] = Counter()

    def command(self, *words: str) -> list[str]:
        return [str(BIN / "nsqha"), "spark", *words, *self._brokers, "--json"]

    def see_to_it(self) -> None:
        """Start it, if it does not run."""
        if self._process is not None and self._process.poll() is not None:
            self.ends[self._process.returncode] += 1
            self._process = None
        if self._process is None:
            words = ("archive", TOPIC, "--to", str(self._lake), "--interval", "1s", "--master", "local[2]")
            self._process = subprocess.Popen(
                self.command(*words),
                stdout=self._log,
                stderr=self._log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def commits(self) -> int:
        """How many there are in the lake."""
        return len(list((self._lake / "manifest").glob("*.json")))

    def wait_for_commit(self) -> None:
        """Until there is one more, whatever becomes of the process meanwhile."""
        before = self.commits

        def one_more() -> bool:
            self.see_to_it()
            return self.commits > before

        wait_until(one_more, "a round of the archive is committed", COMMIT_SECONDS)

    def kill(self) -> None:
        """All of it, with -9."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def workers(self) -> list[int]:
        """Pids of Spark's Python workers: children of its daemon."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, ValueError):
                head, _, tail = path.read_text().rpartition(")")
                session = int(tail.split()[3])
                if self._process is not None and session == self._process.pid and "python" in head:
                    command = (path.parent / "cmdline").read_bytes()
                    if b"pyspark.daemon" in command or b"pyspark/daemon" in command:
                        found.append(int(path.parent.name))
        return found

    def compact(self, kill_after: float | None) -> int:
        """Merge small files beside the archiver; the exit status."""
        words = ("compact", TOPIC, "--lake", str(self._lake), "--keep", "1s", "--target-bytes", "4MB")
        process = subprocess.Popen(
            [str(BIN / "nsqha"), "spark", *words, "--master", "local[1]", "--json"],
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(300 if kill_after is None else kill_after)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    def once(self) -> None:
        """A whole archive of what is there now."""
        self.kill()
        command = self.command("archive", TOPIC, "--to", str(self._lake), "--once", "--master", "local[2]")
        subprocess.run(command, check=True, stdout=self._log, stderr=self._log, timeout=300)

    def verified(self) -> dict[str, object]:
        """What `verify --full` says."""
        command = self.command("verify", TOPIC, "--lake", str(self._lake), "--full", "--master", "local[2]")
        done = subprocess.run(command, capture_output=True, timeout=300)
        found: dict[str, object] = json.loads(done.stdout)
        return found | {"exit": done.returncode}


class Kills:
    """One after the other, by lot."""

    def __init__(self, cluster: Cluster, archiver: Archiver, rng: random.Random) -> None:
        self._cluster = cluster
        self._archiver = archiver
        self._rng = rng
        self.kinds: Counter[str] = Counter()
        self.compacted = 0

    def once(self) -> None:
        [kind] = self._rng.choices(list(KINDS), list(KINDS.values()))
        if kind == "executor" and not (workers := self._archiver.workers()):
            kind = "broker"
        self.kinds[kind] += 1
        if kind == "broker":
            self._broker()
        elif kind == "driver":
            self._archiver.kill()
        elif kind == "compact":
            whole = self.kinds["compact"] % 2 == 1
            status = self._archiver.compact(None if whole else self._rng.uniform(0.0, COMPACT_SECONDS))
            self.compacted += status == 0
        else:
            with suppress(ProcessLookupError):
                os.kill(self._rng.choice(workers), signal.SIGKILL)
        self._archiver.see_to_it()

    def _broker(self) -> None:
        victim: Member = self._rng.choice(self._cluster.nodes)
        victim.kill()
        pause(self._rng.uniform(0.0, 2.0))
        victim.start()
        self._cluster.wait_listening([victim])


def lake_bodies(uri: Path) -> Counter[bytes]:
    """Every message of the lake, by its body, and how often it is there."""
    store = Store(str(uri))
    found: Counter[bytes] = Counter()
    places: Counter[tuple[int, int]] = Counter()
    for files in ManifestCommits(store).state().files.values():
        for file in files:
            table = pq.read_table(uri / file.path, columns=["value", "partition", "offset"])
            found.update(table["value"].to_pylist())
            places.update(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
    assert not [place for place, n in places.items() if n > 1], "an offset is in the lake twice"
    return found


def judge(ledger: Ledger, found: Counter[bytes]) -> list[str]:
    """What is wrong; nothing, if all is well."""
    lost = [body for body in ledger.ok if body not in found]
    twice = [body for body, n in found.items() if n > 1]
    strange = [body for body in found if body not in ledger.ok and body not in ledger.unknown]
    wrong = []
    for what, bodies in (("OK'd and not in the lake", lost), ("more than once", twice), ("never sent", strange)):
        if bodies:
            wrong.append(f"{len(bodies)} messages {what}, as {[body[:20] for body in bodies[:3]]}")
    return wrong


def run(folder: Path, *, kills: int, seed: int) -> list[str]:
    """Kill so many times; what is wrong then."""
    rng = random.Random(seed)
    ledger = Ledger()
    with Cluster.running(folder, sync="interval", flags=FLAGS) as cluster, (folder / "archive.log").open("wb") as log:
        make_topic(cluster)
        archiver = Archiver(cluster, folder / "lake", log)
        publishers = [Publishing(n, cluster, ledger, rng.randrange(1 << 30)) for n in range(3)]
        breaker = Kills(cluster, archiver, rng)
        try:
            for publisher in publishers:
                publisher.start()
            archiver.see_to_it()
            for n in range(kills):
                if rng.random() < ROUND_FIRST:
                    archiver.wait_for_commit()
                pause(rng.uniform(0.0, 3.0))
                archiver.see_to_it()
                breaker.once()
                print(f"{n + 1}/{kills} {dict(breaker.kinds)}, OK {len(ledger.ok):,}", flush=True)
        finally:
            for publisher in publishers:
                publisher.stop()
            archiver.kill()
        wait_until(cluster.all_in_sync, "all in sync", 60)
        commits = archiver.commits
        archiver.once()
        found = lake_bodies(folder / "lake")
        verified = archiver.verified()
        print(f"kills {dict(breaker.kinds)}, archiver ended by itself {dict(archiver.ends)}")
        gone = unlinked(cluster)
        print(f"OK {len(ledger.ok):,}, unknown {len(ledger.unknown):,}, in the lake {found.total():,}")
        print(f"compact came to its end {breaker.compacted} times")
        print(f"{commits} commits under way; the log has unlinked {gone:,} messages")
        wrong = judge(ledger, found)
        if not gone or not commits:
            wrong.append("nothing was unlinked or committed under way: this run shows nothing")
        if verified["exit"]:
            wrong.append(f"verify --full: {verified['problems']} {verified['failed']}")
        return wrong


def unlinked(cluster: Cluster) -> int:
    """How many messages the log has no more."""
    with grpc.insecure_channel(cluster.nodes[0].grpc) as channel:
        stub = segments_pb2_grpc.SegmentsStub(channel)
        return sum(pin.start.offset for pin in stub.Snapshot(SnapshotRequest(topics=[TOPIC]), timeout=30).partitions)


def make_topic(cluster: Cluster) -> None:
    """With a reader channel from its first message on, as an operator does who wants all of it in the lake."""
    node = cluster.nodes[0]
    for words in (
        ("topic", "create", TOPIC, "--partitions", str(PARTITIONS)),
        ("channel", "create", TOPIC, "archive", "--reader"),
    ):
        subprocess.run([str(BIN / "nsqha"), *words, "--grpc-address", node.grpc], check=True, stdout=subprocess.DEVNULL)
    wait_until(cluster.all_in_sync, "the topic is in sync")


def main() -> int:
    parser = argparse.ArgumentParser(description="kills under publishing and archiving")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--keep", type=Path, default=None, help="a folder that stays, instead of a temporary one")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.randrange(1 << 30)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="nsqha-spark-crash-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}", flush=True)
    wrong = run(folder, kills=args.kills, seed=seed)
    for line in wrong:
        print(line)
    print("lost or doubled: see above" if wrong else "nothing lost, nothing twice")
    if not wrong and args.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif wrong:
        print(f"kept: {folder}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
