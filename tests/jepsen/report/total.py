"""Many runs told as one: what was done to the cluster in all of them together, and what came of it.

    python -m tests.jepsen.report.total FOLDER...

Reads the JSON files of reports in these folders and below. Tables are in Markdown, as docs/reliability.md has them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.jepsen.checkers.findings import quantile

TIMES = ("gap", "failover", "to full ISR")


class Total:
    """What reports of loads say together."""

    def __init__(self, reports: Iterable[Path]) -> None:
        self.loads: Counter[str] = Counter()  # by sync mode, as the next four
        self.seconds: Counter[str] = Counter()
        self.ok: Counter[str] = Counter()
        self.delivered: Counter[str] = Counter()
        self.unneeded: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)  # faults by kind, then by sync mode
        self.times: defaultdict[str, list[float]] = defaultdict(list)  # seconds, by kind and what it is
        for path in reports:
            self._add(json.loads(path.read_text()))

    def _add(self, report: dict[str, Any]) -> None:
        sync = report["sync"]
        self.loads[sync] += 1
        self.seconds[sync] += report["seconds"]
        self.ok[sync] += report["messages"]["ok"]
        self.delivered[sync] += report["messages"]["delivered"]
        found = {name: value for figures in report["figures"].values() for name, value in figures.items()}
        self.unneeded[sync] += int(found.get("again after a settled FIN", 0))
        self.problems.update(report["problems"])
        for fault in report["faults"]:
            self.kinds[fault["fault"]][sync] += 1
        for what, values in report["times"].items():
            self.times[what] += values

    def __str__(self) -> str:
        syncs = sorted(self.loads)
        lines = ["| sync | loads | hours | OK | delivered | again though settled |", "|---|---|---|---|---|---|"]
        lines += [self._mode(sync) for sync in syncs]
        wrong = ", ".join(f"{kind} {number}" for kind, number in self.problems.most_common())
        lines += ["", f"problems: {wrong or 'none'}", ""]
        head = ["fault", *syncs, *(f"{what} p50, p99, worst s" for what in TIMES)]
        lines += [row(head), "|" + "---|" * len(head)]
        return "\n".join(lines + [self._kind(kind, syncs) for kind in sorted(self.kinds)])

    def _mode(self, sync: str) -> str:
        hours = f"{self.seconds[sync] / 3600:.2f}"
        counts = (self.ok[sync], self.delivered[sync], self.unneeded[sync])
        return row([sync, str(self.loads[sync]), hours, *(f"{count:,}" for count in counts)])

    def _kind(self, kind: str, syncs: Sequence[str]) -> str:
        numbers = [str(self.kinds[kind][sync] or "") for sync in syncs]
        return row([kind, *numbers, *(told(self.times[f"{kind} {what}"]) for what in TIMES)])


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def told(values: Sequence[float]) -> str:
    return " ".join(f"{quantile(values, q):.2f}" for q in (0.5, 0.99, 1.0)) if values else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    found = sorted({path for folder in parser.parse_args().folders for path in folder.rglob("*report*.json")})
    if not found:
        print("no reports there")
        return 1
    print(Total(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
