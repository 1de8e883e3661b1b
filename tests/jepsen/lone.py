"""A node without a cluster, on loopback, and its run in the fault suite: `make crash`.

    with LoneNode.started(folder, sync="always", load=..) as node:
        node.kill_and_start("serving")

Its clients are those of tests.jepsen.load.broker: topics and channels that come and go, pauses, ephemeral channels,
HTTP. They and the checkers know its lives, which a kill ends: what was finished `WINDOW_SECONDS` before it stays
finished, and attempts count on within a life. Segments are small and not kept long, so that rolls, carrying and
unlinking happen under load.

Judged is the history; and what the broker said in any life that being killed does not explain, its files when it was
stopped, and what topics have left that were deleted.
"""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.integration.cluster import pause
from tests.integration.servers import BIN, CannotStart, Node
from tests.jepsen import history
from tests.jepsen.injection import FaultFigures, Injector
from tests.jepsen.load.background import Background
from tests.jepsen.load.broker import Load
from tests.jepsen.report.page import RunReport
from tests.jepsen.schedules import Schedule

# The idle progress interval (docs/guarantees.md) and the granularity of the broker's timers.
WINDOW_SECONDS = 1.0 + 0.1
FIRST_SECONDS = 3.0  # the first life is long enough for FINs that no crash may forget
FLAGS = ("--segment-bytes=400000", "--retention-bytes=1000000")
BAD_LOG = re.compile(r"\b(?:ERROR|FATAL|Traceback|log_damaged|possible_loss)\b")
READY_SECONDS = 60.0


class LoneNode(Node):
    """What schedules break: it is its own leader, and all of the deployment."""

    def __init__(self, folder: Path, *, sync: str, partitions: int = 1, pace: float = 1.0) -> None:
        super().__init__(folder / "node", sync=sync, flags=[*FLAGS, f"--topic-partitions={partitions}"])
        self.name = "node"
        self.sync_mode = sync
        self.pace = pace  # of lives: longer with a larger one
        self.broken: set[str] = set()
        self.kills = 0
        self.start_seconds: list[float] = []  # from exec to listening
        self.load: Load | None = None  # from its begin on
        self._awaited = ""
        self._came = threading.Event()
        self._spawned = 0.0

    @property
    def nodes(self) -> Sequence[LoneNode]:
        return [self]

    def leader_of(self) -> LoneNode:
        return self

    def epoch_and_isr(self) -> tuple[int, int]:
        return 1, 1

    def settle(self, seconds: float) -> float:
        """It listens; how long that took."""
        began = time.monotonic()
        while not self.listening():
            if time.monotonic() - began > seconds:
                raise CannotStart(f"not listening after {seconds:.0f} s:\n{self.log()[-3000:]}")
            pause(0.01)
        if len(self.start_seconds) < self.starts:
            self.start_seconds += [time.monotonic() - self._spawned] * (self.starts - len(self.start_seconds))
            if self.load is not None:
                self.load.record(history.Ready(self.load.now(), self.load.gen))
        return time.monotonic() - began

    def spawn(self) -> None:
        super().spawn()
        self._spawned = time.monotonic()

    def kill_and_start(self, moment: str) -> int:
        """The exit status of the life that ends."""
        load = self.load
        assert load is not None
        load.record(history.Killed(load.now(), load.gen, moment))
        process = self._process
        self.kill()
        self.kills += 1
        self.spawn()
        load.gen += 1
        load.record(history.Started(load.now(), load.gen))
        return process.returncode if process is not None else 0

    # ---- moments

    def told(self, moment: str) -> None:
        """By the load, in its thread: a client has just sent something delicate."""
        if moment == self._awaited:
            self._came.set()

    def moment(self, name: str, seconds: float) -> bool:
        """Waits for one; whether it came."""
        self._came.clear()
        self._awaited = name
        try:
            return self._came.wait(seconds)
        finally:
            self._awaited = ""


@contextlib.contextmanager
def loaded(node: LoneNode, seed: int, path: Path) -> Iterator[Background[Load]]:
    """The node serves, and so many clients use it; `finish` of what is yielded ends them."""
    node.spawn()
    node.settle(READY_SECONDS)

    def made() -> Load:
        load = Load(seed, node.tcp_port, node.http_port, path=path, sync=node.sync_mode, window=WINDOW_SECONDS)
        load.hook = node.told
        return load

    background = Background(made)
    with contextlib.closing(background):
        node.load = background.start()
        yield background


def run(
    folder: Path,
    schedule: Schedule,
    figures: FaultFigures,
    *,
    seed: int,
    sync: str,
    partitions: int = 1,
    pace: float = 1.0,
) -> RunReport:
    """A whole run. AssertionError with everything that is known, if something is wrong."""
    node = LoneNode(folder, sync=sync, partitions=partitions, pace=pace)
    complaints: list[str] = []
    try:
        with loaded(node, seed, folder / "history-1.jsonl") as background:
            pause(FIRST_SECONDS * pace)
            injector = Injector(node, random.Random(f"{seed} suite"), background.load, figures)
            injector.gaps = False  # lives are short, and nobody else leads meanwhile
            schedule.run(injector)
            node.settle(READY_SECONDS)
            background.finish()
            complaints += [f"not ended well: {what}" for what in background.stuck]
            status = node.stop()
            if status:
                complaints.append(f"the last, ordinary stop ended with status {status}")
        complaints += bad_files(node)
    except CannotStart as error:
        complaints.append(str(error))
    finally:
        node.__exit__()
    complaints += bad_lines(node)
    report = RunReport(background.load.history)
    report.write(folder, "report-1")
    told = "\n".join([str(report.judged), *(f"COMPLAINT: {each}" for each in complaints)])
    assert report.judged.ok and not complaints, told
    return report


def bad_files(node: Node) -> list[str]:
    """What is wrong with the files of a node that was stopped."""
    verify = subprocess.run(
        [BIN / "nsqha", "log", "verify", node.data], capture_output=True, text=True, timeout=120, check=False
    )
    found = [] if verify.returncode == 0 else [f"log verify: {verify.stdout[-1000:]}{verify.stderr[-1000:]}"]
    left = [path.name for path in (node.data / "topics").iterdir() if path.name.startswith("fresh-")]
    if left:
        found.append(f"files of deleted topics are still there: {left}")
    return found


def bad_lines(node: Node) -> list[str]:
    """What the broker said in any of its lives that being killed does not explain."""
    found = []
    for n in range(1, node.starts + 1):
        path = node.directory / f"log.{n}"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        for at, line in enumerate(lines):
            if BAD_LOG.search(line):
                found.append(f"life {n}: " + "\n        ".join(lines[at : at + 25]))
                break
    return found[:5]
