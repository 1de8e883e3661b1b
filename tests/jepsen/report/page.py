"""A report of one run: an HTML file that needs nothing else, and the same figures as JSON.

    python -m tests.jepsen.report HISTORY [--out FOLDER]

A person reads it from top to bottom: the verdict in a sentence, eight numbers, the timeline; then promises beside what
was seen, kinds of faults with their times, problems with examples, and every other figure folded away.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from tests.jepsen.checkers.judgement import ALL, Report, report_of
from tests.jepsen.checkers.view import fold
from tests.jepsen.history import AnyEvent
from tests.jepsen.report.drawing import draw
from tests.jepsen.report.timeline import Timeline

_KIND = re.compile(r"^(\w+) (gap|failover|to full ISR) (p50|p99|worst) s$")
COLUMNS = (
    ("gap p50", "gap", "p50"),
    ("gap p99", "gap", "p99"),
    ("gap worst", "gap", "worst"),
    ("one publish p50", "failover", "p50"),
    ("one publish worst", "failover", "worst"),
    ("to full ISR p50", "to full ISR", "p50"),
    ("to full ISR worst", "to full ISR", "worst"),
)


class RunReport:
    """The judgement of a run, and what happened when."""

    def __init__(self, events: Iterable[AnyEvent]) -> None:
        view = fold(events, *ALL, Timeline)
        timeline = view.checkers[-1]
        assert isinstance(timeline, Timeline)
        self.timeline = timeline
        self.judged: Report = report_of(view)

    def write(self, folder: Path, name: str = "report") -> Path:
        """The HTML file; the JSON file is beside it."""
        page = folder / f"{name}.html"
        page.write_text(self.html())
        (folder / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(self.figures()), indent=2))
        return page

    # ---- figures

    def figures(self) -> dict[str, Any]:
        judged, line = self.judged, self.timeline
        return {
            "ok": judged.ok,
            "seed": judged.run.seed,
            "schedule": judged.run.name,
            "sync": judged.run.sync,
            "seconds": round(line.seconds, 1),
            "messages": dict(vars(judged.figures)),
            "problems": dict(judged.problems),
            "examples": {kind: texts for each in judged.findings for kind, texts in each.examples.items()},
            "promises": [vars(promise) for promise in judged.promises],
            "kinds": self.kinds(),
            "times": {
                what: [round(value, 3) for value in values]
                for each in judged.findings
                for what, values in each.times.items()
            },
            "figures": {each.name: each.figures for each in judged.findings if each.figures},
            "faults": [vars(fault) for fault in line.faults],
            "moves": line.moves,
            "series": {
                "published": sorted(line.oks.items()),
                "not ok": sorted(line.unknown.items()),
                "delivered": sorted(line.deliveries.items()),
                "again": sorted(line.repeated.items()),
                "memory MiB": line.memory,
                "descriptors": line.descriptors,
            },
            "partitions": {
                f"{topic}/{number}": [vars(state) for state in states]
                for (topic, number), states in sorted(line.partitions.items())
            },
            "gaps": self._series("availability"),
            "unseen": self._series("unseen"),
        }

    def kinds(self) -> dict[str, dict[str, float]]:
        """By kind of fault: how often, and its times in seconds."""
        rows: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for kind, number in Counter(fault.fault for fault in self.timeline.faults).items():
            rows[kind]["runs"] = number
        for each in self.judged.findings:
            for name, value in each.figures.items():
                if found := _KIND.match(name):
                    rows[found[1]][f"{found[2]} {found[3]}"] = value
        return dict(sorted(rows.items()))

    def _series(self, name: str) -> dict[str, list[tuple[float, float]]]:
        return next((each.series for each in self.judged.findings if each.name == name), {})

    # ---- the page

    def html(self) -> str:
        judged = self.judged
        title = f"{judged.run.name or 'run'}, seed {judged.run.seed}, sync={judged.run.sync or '-'}"
        body = "\n".join(
            (
                f"<h1>{escape(title)}</h1>",
                self._verdict(),
                self._numbers(),
                draw(self.timeline, self._series("availability"), self._series("unseen")),
                f'<p class="how">{HOW}</p>',
                self._problems(),
                self._promises(),
                self._kinds(),
                self._rest(),
            )
        )
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light">'
            f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
        )

    def _verdict(self) -> str:
        judged, faults = self.judged, len(self.timeline.faults)
        if judged.ok:
            text = f"✓ Nothing is wrong: {judged.figures.ok:,} messages OK'd under {faults} faults, and all came out."
        else:
            what = ", ".join(f"{kind} {number:,}" for kind, number in judged.problems.most_common())
            text = f"✗ Wrong: {what}. {judged.figures.ok:,} messages were OK'd, there were {faults} faults."
        return f'<p class="{"good" if judged.ok else "bad"}">{escape(text)}</p>'

    def _numbers(self) -> str:
        judged, figures = self.judged, self.judged.figures
        found = {name: value for each in judged.findings for name, value in each.figures.items()}
        problems = judged.problems
        gaps = [seconds for points in self._series("availability").values() for _, seconds in points]
        again = figures.redelivered + figures.repeated
        numbers = [
            ("lasted", f"{self.timeline.seconds:.0f} s"),
            ("lost", f"{problems['lost'] + problems['dropped']:,}"),
            ("forks", f"{problems['forked'] + problems['missing'] + problems['altered'] + problems['reused']:,}"),
            ("unexpected", f"{problems['unexpected']:,}"),
            ("order broken", f"{problems['order'] + problems['overlap'] + problems['disorder']:,}"),
            ("unneeded again", f"{found.get('again after a settled FIN', 0):,.0f}"),
            ("delivered again", f"{again / max(figures.delivered, 1):.1%}"),
            ("longest gap", f"{max(gaps, default=0.0):.1f} s"),
            ("unknown outcome", f"{figures.unknown / max(figures.attempted, 1):.2%}"),
            ("changes of leader", f"{found.get('changes of leader', 0):.0f}"),
        ]
        return '<div class="numbers">' + "".join(f"<div><b>{v}</b>{escape(k)}</div>" for k, v in numbers) + "</div>"

    def _problems(self) -> str:
        items = [
            f"<h3>{escape(kind)}: {number:,} ({escape(each.name)})</h3><ul>"
            + "".join(f"<li><code>{escape(text)}</code></li>" for text in each.examples.get(kind, ()))
            + "</ul>"
            for each in self.judged.findings
            for kind, number in sorted(each.problems.items())
        ]
        return f"<h2>Problems</h2>{''.join(items)}" if items else ""

    def _promises(self) -> str:
        rows = [
            ("✓ kept" if promise.kept else "✗ not kept", promise.text, promise.bound, promise.seen)
            for promise in sorted(self.judged.promises, key=lambda promise: promise.kept)
        ]
        return "<h2>What is promised, and what was seen</h2>" + table(("", "promise", "bound", "seen"), rows)

    def _kinds(self) -> str:
        rows = [
            (
                kind,
                f"{figures.get('runs', 0):.0f}",
                *(f"{figures[f'{what} {q}']:.2f} s" if f"{what} {q}" in figures else "" for _, what, q in COLUMNS),
            )
            for kind, figures in self.kinds().items()
        ]
        head = ("fault", "times", *(name for name, _, _ in COLUMNS))
        return f"<h2>Kinds of faults</h2>{table(head, rows)}" if rows else ""

    def _rest(self) -> str:
        rows = [("messages", name, f"{value:,.6g}") for name, value in vars(self.judged.figures).items()]
        rows += [
            (each.name, name, f"{value:,.6g}")
            for each in self.judged.findings
            for name, value in each.figures.items()
            if not _KIND.match(name)
        ]
        faults = [
            (
                fault.fault,
                f"{fault.begin:.2f}",
                "" if fault.end is None else f"{fault.end:.2f}",
                fault.what,
                fault.proof,
            )
            for fault in self.timeline.faults
        ]
        return (
            f"<details><summary>Every figure</summary>{table(('checker', 'figure', 'value'), rows)}</details>"
            "<details><summary>Every fault, with what proves that it bit</summary>"
            f"{table(('fault', 'from s', 'to s', 'what', 'proof'), faults)}</details>"
        )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{lines}</table>"


HOW = (
    "All lanes have the same time, in seconds from the beginning; it is grey where something is broken. Orange bars "
    "are faults (point at one to read what it was and what proves it). An ISR in orange is not full, in red one "
    "replica is alone. Bars in a partition's leader lane have the name of the node and the epoch."
)
STYLE = """
body{font:14px/1.45 Helvetica,Arial,sans-serif;color:#111;background:#fff;max-width:1280px;margin:1em auto;
padding:0 1em}
h1{font-size:20px;margin:.2em 0}h2{font-size:16px;margin:1.4em 0 .4em}h3{font-size:14px;margin:.8em 0 .2em}
.good,.bad{font-size:17px;padding:.5em .8em;border-left:8px solid #009E73;background:#e9f6f1;margin:.6em 0}
.bad{border-color:#D55E00;background:#fbeee6;font-weight:bold}
.numbers{display:flex;flex-wrap:wrap;gap:.4em 1.6em;margin:.6em 0}.numbers div{color:#444}
.numbers b{display:block;font-size:20px;color:#111}
table{border-collapse:collapse;margin:.3em 0}th,td{text-align:left;padding:.15em .8em .15em 0;vertical-align:top;
border-bottom:1px solid #ddd}.how{color:#444;max-width:70em}svg{width:100%;height:auto}summary{cursor:pointer;
margin:.8em 0}code{font-size:12px}
"""
