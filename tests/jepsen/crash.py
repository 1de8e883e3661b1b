"""kill -9 in a loop under load, then the judgement.

    python -m tests.jepsen.crash --kills 200 --sync always [--seed N] [--keep DIR] [--pace 1.0]

The seed fixes what is sent and when the broker is killed as far as the machine's timing lets it; it is printed, and
the history of a failed run is kept. `--check FILE` judges a kept history again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from tests.integration.servers import BIN, CannotStart, Node
from tests.jepsen import history
from tests.jepsen.checkers.judgement import Report, judge
from tests.jepsen.load.broker import Load

# When the broker is killed, and how often of a hundred. The last four wait until that has just been asked for.
MOMENTS = {
    "serving": 48,
    "start-up": 22,
    "topic creation": 10,
    "channel creation": 8,
    "topic deletion": 6,
    "pause": 6,
}
SERVING_SECONDS = 3.0  # at most, before a kill while serving
START_UP_SECONDS = 1.0  # at most, after exec
AFTER_HOOK_SECONDS = 0.02
HOOK_WAIT_SECONDS = 4.0
# The idle progress interval (docs/guarantees.md) and the granularity of the broker's timers.
WINDOW_SECONDS = 1.0 + 0.1
# Small files that are not kept long, so that rolls, carrying and unlinking happen under load.
FLAGS = ("--segment-bytes=400000", "--retention-bytes=1000000")
BAD_LOG = re.compile(r"\b(?:ERROR|FATAL|Traceback|log_damaged|possible_loss)\b")


@dataclass
class Result:
    seed: int
    report: Report
    complaints: list[str] = field(default_factory=list)  # what the broker logged that a kill does not excuse
    starts: list[float] = field(default_factory=list)  # seconds from exec to listening
    history: Path | None = None

    @property
    def ok(self) -> bool:
        return self.report.ok and not self.complaints

    def __str__(self) -> str:
        starts = sorted(self.starts)
        lines = [str(self.report)]
        if starts:
            lines.append(f"start-up p50 {starts[len(starts) // 2]:.2f} s, worst {starts[-1]:.2f} s")
        lines += [f"COMPLAINT: {text}" for text in self.complaints]
        if not self.ok:
            lines.append(f"seed {self.seed}; history {self.history}")
        return "\n".join(lines)


class Nemesis:
    """Kills the node at chosen moments and starts it again."""

    def __init__(self, node: Node, load: Load, rng: random.Random, pace: float) -> None:
        self._node = node
        self._load = load
        self._rng = rng
        self._pace = pace
        self._awaited = ""
        self._hooked = asyncio.Event()
        self.starts: list[float] = []
        load.hook = self._hook

    def _hook(self, moment: str) -> None:
        if moment == self._awaited:
            self._hooked.set()

    def spawn(self) -> None:
        self._node.spawn()
        self._load.gen += 1
        self._load.record(history.Started(self._load.now(), self._load.gen))

    async def ready(self) -> None:
        begun = time.monotonic()
        while not self._node.listening():
            if time.monotonic() - begun > 60:
                raise CannotStart(f"not listening after 60 s:\n{self._node.log()[-3000:]}")
            await asyncio.sleep(0.01)
        self.starts.append(time.monotonic() - begun)
        self._load.record(history.Ready(self._load.now(), self._load.gen))

    async def kill_once(self) -> None:
        rng, long = self._rng, not self.starts
        moment = "serving" if long else rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment == "start-up":
            await asyncio.sleep(rng.uniform(0, START_UP_SECONDS))
        else:
            await self.ready()
            if moment == "serving":
                # The first life is long enough for FINs that no crash may forget, whatever is drawn after it.
                await asyncio.sleep((SERVING_SECONDS if long else rng.uniform(0, SERVING_SECONDS)) * self._pace)
            else:
                self._awaited = moment
                self._hooked.clear()
                try:
                    await asyncio.wait_for(self._hooked.wait(), HOOK_WAIT_SECONDS)
                except TimeoutError:
                    moment = "serving"
                self._awaited = ""
                await asyncio.sleep(rng.uniform(0, AFTER_HOOK_SECONDS))
        self._load.record(history.Killed(self._load.now(), self._load.gen, moment))
        self._node.kill()
        self.spawn()


async def run(directory: Path, *, seed: int, kills: int, sync: str, partitions: int = 1, pace: float = 1.0) -> Result:
    """One run in `directory`; the history is there afterwards as `history.jsonl`."""
    node = Node(directory / "node", sync=sync, flags=[*FLAGS, f"--topic-partitions={partitions}"])
    load = Load(seed, node.tcp_port, node.http_port)
    nemesis = Nemesis(node, load, random.Random(f"{seed} nemesis"), pace)
    load.record(history.Run(seed, sync, WINDOW_SECONDS))
    complaints = []
    try:
        nemesis.spawn()
        await nemesis.ready()
        await load.begin()
        for _ in range(kills):
            await nemesis.kill_once()
        await nemesis.ready()
        stuck = await load.drain()
        complaints += [f"not ended well: {what}" for what in stuck]
        status = node.stop()
        if status:
            complaints.append(f"the last, ordinary stop ended with status {status}")
        complaints += await asyncio.to_thread(bad_files, node)
    except CannotStart as error:
        complaints.append(str(error))
    finally:
        node.__exit__()
    complaints += bad_lines(node)
    path = directory / "history.jsonl"
    load.history.save(path)
    return Result(seed, judge(load.history), complaints, nemesis.starts, path)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--sync", choices=("always", "interval", "none"), default="always")
    parser.add_argument("--partitions", type=int, default=1, help="of every topic (default 1)")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--pace", type=float, default=1.0, help="longer lives between kills (default 1)")
    parser.add_argument("--keep", type=Path, help="folder for data and history (default: temporary)")
    parser.add_argument("--check", type=Path, metavar="FILE", help="judge this history and do nothing else")
    args = parser.parse_args()
    if args.check:
        report = judge(history.read(args.check))
        print(report)
        return 0 if report.ok else 1
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    directory = args.keep or Path(tempfile.mkdtemp(prefix="nsqha-crash-"))
    print(f"seed {seed}, {args.kills} kills, sync={args.sync}, in {directory}", flush=True)
    result = uvloop.run(
        run(directory, seed=seed, kills=args.kills, sync=args.sync, partitions=args.partitions, pace=args.pace)
    )
    print(result)
    if result.ok and not args.keep:
        shutil.rmtree(directory)
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
