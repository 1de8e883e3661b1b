"""All checkers over one history, in one pass: `judge(events) -> Report`, a pure function of what was seen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from tests.jepsen.checkers.attempts import Attempts
from tests.jepsen.checkers.availability import Availability
from tests.jepsen.checkers.cursors import Cursors
from tests.jepsen.checkers.deaths import Deaths
from tests.jepsen.checkers.delays import Delays
from tests.jepsen.checkers.duplicates import Duplicates
from tests.jepsen.checkers.findings import Findings, Promise
from tests.jepsen.checkers.liveness import Liveness
from tests.jepsen.checkers.lives import Lives
from tests.jepsen.checkers.log_agreement import LogAgreement
from tests.jepsen.checkers.ordered import Ordered
from tests.jepsen.checkers.removal import Removal
from tests.jepsen.checkers.replay import Replay
from tests.jepsen.checkers.total_queue import TotalQueue
from tests.jepsen.checkers.unseen import Unseen
from tests.jepsen.checkers.view import Checker, Figures, View, fold
from tests.jepsen.history import AnyEvent, Run

ALL: tuple[type[Checker], ...] = (
    TotalQueue,
    LogAgreement,
    Duplicates,
    Attempts,
    Ordered,
    Unseen,
    Cursors,
    Replay,
    Availability,
    Liveness,
    Delays,
    Lives,
    Removal,
    Deaths,
)


class Report:
    """What all of them found."""

    def __init__(self, view: View, findings: list[Findings]) -> None:
        self.run: Run = view.run
        self.seconds = view.t
        self.figures: Figures = view.figures
        self.moments: Counter[str] = view.moments
        self.findings = findings

    @property
    def problems(self) -> Counter[str]:
        return sum((each.problems for each in self.findings), Counter())

    @property
    def promises(self) -> list[Promise]:
        return [promise for each in self.findings for promise in each.promises]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        f, problems = self.figures, self.problems
        lines = [
            f"kills {f.kills} ({', '.join(f'{name} {n}' for name, n in sorted(self.moments.items()))})",
            f"published {f.attempted}: OK {f.ok}, failed {f.failed}, unknown {f.unknown} (came out: {f.recovered}); "
            f"{f.mpubs} MPUBs; {f.topics_deleted} topics deleted",
            f"delivered {f.delivered}: first {f.first}, redelivered {f.redelivered}, "
            f"repeated after FIN {f.repeated} (oldest forgotten FIN {f.oldest_forgotten:.2f} s before the kill)",
            f"finished {f.finished}, of which beyond any crash {f.settled}",
            f"lost {problems['lost']}, dropped {problems['dropped']}, torn {problems['torn']}, "
            f"backwards {problems['backwards']}, unexpected {problems['unexpected']}",
        ]
        for each in self.findings:
            for kind, n in sorted(each.problems.items()):
                lines.append(f"{kind.upper()}: {n}")
                lines += [f"    {text}" for text in each.examples.get(kind, ())]
        return "\n".join(lines)


def report_of(view: View) -> Report:
    """Of a view whose history has ended."""
    return Report(view, [checker.findings for checker in view.checkers])


def judge(events: Iterable[AnyEvent], kinds: Iterable[type[Checker]] = ALL) -> Report:
    """Judge a whole history."""
    return report_of(fold(events, *kinds))


def summary(report: Report) -> str:
    """One line of figures."""
    f = report.figures
    return json.dumps(
        {
            "published": f.attempted,
            "ok": f.ok,
            "failed": f.failed,
            "unknown": f.unknown,
            "came_out_though_unknown": f.recovered,
            "delivered": f.delivered,
            "repeated": f.redelivered + f.repeated,
            "problems": dict(report.problems),
        }
    )
