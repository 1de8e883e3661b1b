"""Prints a run: a line per cell while it goes on, then the table, the ratios and the targets."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from typing import Any

from .figures import Cell, Spread, ratio, summarise
from .targets import Summary, Verdict
from .workloads import WORKLOADS

# Rows that have neither a rate nor a latency say what they measured in words.
OWN_WORDS: dict[str, tuple[tuple[str, str, float, str], ...]] = {
    "verify": (("verified", "checked", 1, ""), ("out_of_order", "out of order", 1, "")),
    "idle": (
        ("ready_s", "ready", 1, " s"),
        ("idle_cpu_ms_per_s", "CPU", 1, " ms/s"),
        ("anonymous_bytes", "RssAnon", 1e6, " MB"),
    ),
    "restart-1gb": (
        ("log_bytes", "log", 1e6, " MB"),
        ("crash_ready_s", "after kill -9 ready", 1, " s"),
        ("crash_first_message_s", "first message", 1, " s"),
        ("stop_s", "stop", 1, " s"),
        ("clean_ready_s", "ready again", 1, " s"),
    ),
    "memory": (
        ("held", "held", 1, ""),
        ("anonymous_growth_bytes", "RssAnon growth", 1e6, " MB"),
        ("anonymous_peak_growth_bytes", "at most", 1e6, " MB"),
    ),
    "dead-letters": (
        ("anonymous_growth_bytes", "RssAnon growth", 1e6, " MB"),
        ("page_ms", "a page of 1,000", 1, " ms"),
        ("page_cpu_ms", "CPU of the broker", 1, " ms"),
    ),
    "always": (("disk_round_us", "disk round", 1, " us"), ("disk_single_us", "one file", 1, " us")),
    "pub-100-topics": (("topics_created_s", "topics created in", 1, " s"),),
    "consume-cold": (("resident_share", "still cached", 0.01, " %"),),
    "latency": (("late_p50_us", "generator late p50", 1, " us"), ("late_p99_us", "p99", 1, " us")),
}


def summary_of(cells: Sequence[Cell]) -> Summary:
    """Figures over the rounds, for each row and subject in the order they ran."""
    keys = dict.fromkeys((cell.workload, cell.subject) for cell in cells)
    return {key: summarise([cell for cell in cells if (cell.workload, cell.subject) == key]) for key in keys}


def cell_line(position: int, total: int, cell: Cell) -> str:
    """Progress: what one cell gave."""
    head = f"[{position}/{total}] {cell.workload} {cell.subject}"
    if cell.failure:
        return f"{head}: FAILED {cell.failure}"
    figures = {name: Spread(value, value, value) for name, value in cell.figures.items()}
    parts = [_rate(figures), _cpu(figures), _latency(figures, "ack"), _latency(figures, "delivery")]
    parts += [own_words(cell.workload, figures), " ".join(cell.marks)]
    return f"{head}: " + "  ".join(part for part in parts if part)


def table(cells: Sequence[Cell]) -> str:
    """One line per row and subject: medians, with the range of the CPU figure."""
    rows = [
        [
            "workload",
            "subject",
            "msgs/s",
            "CPU us/msg",
            "client",
            "ack us",
            "deliver us",
            "RSS MB",
            "disk B/msg",
            "notes",
        ]
    ]
    rows[0][5:7] = ["ack p50/p99/p99.9 us", "deliver p50/p99/p99.9 us"]
    for (workload, subject), figures in summary_of(cells).items():
        mine = [cell for cell in cells if (cell.workload, cell.subject) == (workload, subject)]
        failed = sum(cell.failure is not None for cell in mine)
        marks = sorted({mark for cell in mine for mark in cell.marks})
        notes = [*marks, own_words(workload, figures), f"{failed} of {len(mine)} FAILED" if failed else ""]
        rows.append(
            [
                workload,
                subject,
                _rate(figures, unit=""),
                _cpu(figures, ranged=True),
                _share(figures),
                _latency(figures, "ack", name=""),
                _latency(figures, "delivery", name=""),
                _number(figures, "rss_bytes", 1e6, "{:.0f}"),
                _number(figures, "written_bytes", 1, "{:.0f}"),
                ", ".join(note for note in notes if note),
            ]
        )
    return _aligned(rows)


def ratios(cells: Sequence[Cell], ours: str, other: str) -> str:
    """How another subject compares: above 1 means that ours is better."""
    rows = [["workload", f"CPU {other}/{ours}", f"rate {ours}/{other}", "delivery p50"]]
    for workload in dict.fromkeys(cell.workload for cell in cells):
        mine = [cell for cell in cells if (cell.workload, cell.subject) == (workload, ours)]
        theirs = [cell for cell in cells if (cell.workload, cell.subject) == (workload, other)]
        found = [
            ratio(mine, theirs, "cpu_us"),
            ratio(theirs, mine, "rate_per_s"),
            ratio(mine, theirs, "delivery_p50_us"),
        ]
        if any(found):
            rows.append([workload, *(f"{r.median:.2f} ({r.low:.2f}-{r.high:.2f})" if r else "" for r in found)])
    return _aligned(rows)


def target_table(verdicts: Iterable[Verdict]) -> str:
    """PASS, MISS or - for each target."""
    rows = [["target", "subject", "figure", "measured", "wanted", ""]]
    for verdict in verdicts:
        measured = "-" if verdict.measured is None else f"{verdict.measured:,.4g} {verdict.unit}"
        if verdict.measured is not None and verdict.measured >= 10_000:
            measured = f"{verdict.measured:,.0f} {verdict.unit}"
        word = {True: "PASS", False: "MISS", None: "not measured"}[verdict.passed]
        rows.append(
            [verdict.workload, verdict.subject, verdict.figure, measured, f"{verdict.wanted} {verdict.unit}", word]
        )
    return _aligned(rows)


def as_json(cells: Sequence[Cell], verdicts: Sequence[Verdict], about: dict[str, Any]) -> dict[str, Any]:
    """Everything, for scripts: `about`, each cell with its figures, medians with ranges, verdicts."""
    return {
        "about": about,
        "workloads": {workload.name: workload.about for workload in WORKLOADS},
        "cells": [vars(cell) for cell in cells],
        "summary": [
            {
                "workload": workload,
                "subject": subject,
                "figures": {name: vars(spread) for name, spread in figures.items()},
            }
            for (workload, subject), figures in summary_of(cells).items()
        ],
        "targets": [vars(verdict) for verdict in verdicts],
    }


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = "unknown"
    with open("/proc/cpuinfo") as text:
        for line in text:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "kernel": platform.release(),
        "processor": model,
        "python": platform.python_version(),
    }


def own_words(workload: str, figures: Any) -> str:
    """What is particular to a row."""
    for prefix, words in OWN_WORDS.items():
        if workload.startswith(prefix):
            texts = [
                f"{label} {_plain(figures[name].median / scale)}{unit}"
                for name, label, scale, unit in words
                if name in figures
            ]
            return ", ".join(texts)
    return ""


def _plain(value: float) -> str:
    """Three digits that count, and all of a large number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rate(figures: Any, unit: str = "/s") -> str:
    return f"{figures['rate_per_s'].median:,.0f}{unit}" if "rate_per_s" in figures else ""


def _cpu(figures: Any, *, ranged: bool = False) -> str:
    if "cpu_us" not in figures:
        return ""
    spread: Spread = figures["cpu_us"]
    if ranged and spread.high > spread.low:
        return f"{_short(spread.median)} ({_short(spread.low)}-{_short(spread.high)})"
    return _short(spread.median) if ranged else f"{_short(spread.median)} us CPU"


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _share(figures: Any) -> str:
    return f"{figures['client_share'].median:.0%}" if "client_share" in figures else ""


def _latency(figures: Any, which: str, name: str | None = None) -> str:
    keys = [f"{which}_{rank}_us" for rank in ("p50", "p99", "p999")]
    if keys[0] not in figures:
        return ""
    text = "/".join(f"{figures[key].median:,.0f}" for key in keys)
    return text if name == "" else f"{which} {text} us"


def _number(figures: Any, name: str, scale: float, form: str) -> str:
    return form.format(figures[name].median / scale) if name in figures else ""


def _aligned(rows: list[list[str]]) -> str:
    used = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in used}
    lines = ["  ".join(row[column].ljust(widths[column]) for column in used).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * widths[column] for column in used))
    return "\n".join(lines)
