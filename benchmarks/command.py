"""The command line: which rows, against what, how long; then the figures and the targets.

python -m benchmarks                                  the whole table, about ten minutes
python -m benchmarks --quick                          shorter windows, one round, under two minutes
python -m benchmarks -k mpub,consume --rounds 5       rows by name
python -m benchmarks --peer 'nsqd --mem-queue-size=0' another daemon side by side
python -m benchmarks --many 300                       three nodes with so many topics: idle cost, failover, starts
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import many, place, report, runner, servers, targets, workloads
from .figures import Cell
from .targets import Verdict

EXIT_MISSED, EXIT_FAILED, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """0: ran. 1: with --check, a target was missed. 2: a cell failed or gave a wrong result. 130: interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        for workload in workloads.WORKLOADS:
            print(f"{workload.name:<26} {workload.about}")
        return 0
    if options.many:
        peers = [_peer(text, number) for number, text in enumerate(options.peer)]
        return _many(options.many, options.data_dir, peers)
    selected = workloads.select(options.k)
    if not selected:
        parser.error(f"no workload matches {options.k!r}; --list shows them")
    scale = place.QUICK if options.quick else place.FULL
    if options.seconds:
        scale = replace(scale, seconds=options.seconds)
    names = servers.IMPLEMENTATIONS if options.implementation == "both" else (options.implementation,)
    ours = [servers.our_broker(name, options.server) for name in names]
    ours += [servers.our_cluster(nodes) for nodes in options.nodes]
    peers = [_peer(text, number) for number, text in enumerate(options.peer)]
    plan = runner.Plan(
        subjects=[*ours, *peers],
        workloads=selected,
        scale=scale,
        sync=options.sync,
        rounds=options.rounds or scale.rounds,
        pinned=options.pin,
    )
    about = {
        **report.machine(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "sync": options.sync,
        "scale": "quick" if options.quick else "full",
        "rounds": plan.rounds,
        "pinned": options.pin,
        "load_average_at_start": os.getloadavg()[0],
        "subjects": {subject.name: subject.command for subject in peers},
    }
    try:
        with runner.temporary_workspace(options.data_dir) as workspace:
            about["filesystem"] = runner.filesystem_of(workspace)
            cells = runner.run(plan, workspace, lambda *cell: runner.say(report.cell_line(*cell)))
    except KeyboardInterrupt:
        runner.say("interrupted; the server was ended and its data removed")
        return EXIT_INTERRUPTED
    about["load_average_at_end"] = os.getloadavg()[0]
    summary = report.summary_of(cells)
    verdicts = [
        verdict
        for subject in ours
        for verdict in _judged(summary, subject)
        if options.sync == "interval" and (not options.k or verdict.passed is not None)
    ]
    _print(about, cells, [subject.name for subject in ours], [subject.name for subject in peers], verdicts)
    if options.json:
        options.json.write_text(json.dumps(report.as_json(cells, verdicts, about), indent=1) + "\n")
    if any(cell.failure for cell in cells):
        return EXIT_FAILED
    return EXIT_MISSED if options.check and any(verdict.passed is False for verdict in verdicts) else 0


def _many(count: int, parent: Path | None, peers: Sequence[servers.Subject]) -> int:
    try:
        with runner.temporary_workspace(parent) as workspace:
            for name, figure in many.run(count, workspace, peers).items():
                print(f"{name:<34} {figure:10.3f}")
    except servers.CannotStart as failure:
        runner.say(f"FAILED many: {failure}")
        return EXIT_FAILED
    return 0


def _print(
    about: dict[str, Any], cells: list[Cell], ours: list[str], peers: list[str], verdicts: list[Verdict]
) -> None:
    print("  ".join(f"{name}={value}" for name, value in about.items() if name != "subjects"))
    print()
    print(report.table(cells))
    for other in [*ours[1:], *peers]:
        print(f"\n{other} beside {ours[0]}, median of the rounds (min-max); above 1: {ours[0]} is better\n")
        print(report.ratios(cells, ours[0], other))
    if verdicts:
        print()
        print(report.target_table(verdicts))
    for cell in cells:
        if cell.failure:
            first, *rest = cell.failure.splitlines()
            why = " ... ".join([first, *rest[-1:]])
            print(f"\nFAILED {cell.workload} {cell.subject} round {cell.round + 1}: {why}")


def _judged(summary: targets.Summary, subject: servers.Subject) -> list[Verdict]:
    if not subject.nodes:
        return targets.judge(summary, subject.name, relaxed=subject.name == "pure")
    return targets.judge_cluster(summary, subject.name) if subject.nodes == targets.CLUSTER_NODES else []


def _peer(text: str, number: int) -> servers.Subject:
    name, separator, command = text.partition("=>")
    if not separator:
        name, command = "peer" if number == 0 else f"peer{number + 1}", text
    return servers.Subject(name.strip(), command.strip(), ours=False)


def _node_counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if any(not 1 <= count <= 15 for count in counts):
        raise argparse.ArgumentTypeError(f"{text}: 1 to 15 nodes")
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "-k",
        metavar="WORDS",
        help="rows whose name holds one of these comma-separated words or globs; !word leaves out",
    )
    add("--list", action="store_true", help="print the rows and what they do")
    add("--quick", action="store_true", help="shorter windows, smaller backlogs, one round")
    add("--rounds", type=_at_least_one, help="rounds per row (default 3, quick 1)")
    add("--seconds", type=float, help="length of a measured window")
    add("--implementation", choices=(*servers.IMPLEMENTATIONS, "both"), default="compiled", help="our hot functions")
    add("--sync", choices=("interval", "always", "none"), default="interval", help="mode of rows that do not name one")
    add(
        "--nodes",
        type=_node_counts,
        metavar="N,..",
        default=[],
        help="clusters of so many nodes, each topic with as many replicas (at most 3), beside the broker that is alone",
    )
    add(
        "--peer",
        metavar="CMD",
        action="append",
        default=[],
        help="another NSQ V2 daemon, measured alternately; NAME=>CMD names it. {data} {tcp} {http} are filled in, "
        "without {data} nsqd's flags are appended; {sync_every} (1 or 2500) lets it take part in sync=always rows",
    )
    add("--server", metavar="CMD", help="start our broker with this command instead of the installed nsqd")
    add("--many", metavar="N", type=_at_least_one, nargs="?", const=300, help="only the rows about N topics (300)")
    add("--pin", action="store_true", help="server on the first core, load generator on the others")
    add("--data-dir", type=Path, metavar="DIR", help="parent of the data directories (default: temporary)")
    add("--json", type=Path, metavar="FILE", help="write every figure of every cell")
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number
