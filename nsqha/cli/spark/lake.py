"""`nsqha spark archive`, `backfill`, `compact` and `verify`: the command line of `pyspark_nsqha.lake`."""

from __future__ import annotations

import argparse
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from nsqha.cli.spark.checks import check_lake, check_target, near_misses, status_of
from nsqha.cli.spark.flags import (
    TIME_HELP,
    add_common,
    add_spark,
    add_split_bytes,
    connection,
    is_place,
    say_range,
    started,
    time_range,
)
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import Parser, add_verb, duration, name
from nsqha.cli.terminal.screen import ProgressLine, print_json, say, show_bytes, show_count
from nsqha.cli.terminal.times import show_duration
from nsqha.cli.topic import size

AGAIN_SECONDS_MAX = 300.0  # unless --interval is longer
STATUSES = (exits.FAILED, exits.USAGE, exits.NOT_FOUND, exits.UNREACHABLE, exits.PARTLY, exits.INTERRUPTED)
TOTALS = (
    '{"files", "rows", "bytes", "log_bytes", "missing": [{"topic", "topic_uid", "partition", "first", "end", '
    '"reason"}], "failed": {"TOPIC/PARTITION": why}, "seconds"}'
)
REPORT = (
    '{"ok", "partitions": [{"topic", "topic_uid", "partition", "first", "end", "files", "rows", "bytes", "behind"}], '
    '"problems": [{"kind", "topic", "partition", "first", "end", "file", "why"}], "missing": [{"topic", "topic_uid", '
    '"partition", "first", "end", "reason"}], "notes": [text], "failed": [why], "anchors", "rows_read", '
    '"rows_compared", "seconds"}'
)


def add_archive(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "archive",
        run_archive,
        help="copy everything committed into Parquet files; retention waits for it",
        description="Copy everything committed into Parquet files below a folder or an object store's URI. A reader "
        "channel per topic keeps the log until it is copied. Repeats every --interval until it is stopped, unless "
        "--once. The next run completes a run that was killed.",
        examples=("nsqha spark archive orders --to lake --once",),
        shape=TOTALS,
        statuses=STATUSES,
    )
    _add_topics(verb)
    verb.add_argument("--to", metavar="URI", required=True, help="the lake: a folder, file://, s3://bucket/path")
    verb.add_argument("--once", action="store_true", help="archive what is committed now, then end")
    verb.add_argument("--interval", metavar="TIME", type=duration, default="60s", help="between rounds (default 60s)")
    verb.add_argument(
        "--channel", metavar="NAME", type=name, default="archive", help="reader channel (default archive)"
    )
    verb.add_argument("--strict", action="store_true", help="fail where messages are missing, instead of recording it")
    _add_format(verb)
    add_split_bytes(verb)
    add_common(verb)


def add_backfill(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "backfill",
        run_backfill,
        help="write a range of time into Parquet files",
        description="Write the messages of a range of time into Parquet files below a folder or an object store's URI. "
        "What the lake has already is skipped: a backfill that was stopped continues where it was. Retention is held "
        f"back only while it runs.\n\n{TIME_HELP}",
        examples=(
            "nsqha spark backfill orders --from -2d --to lake",
            "nsqha spark backfill orders --from 2026-11-20 --until 2026-11-21 --to lake --json",
        ),
        shape=TOTALS,
        statuses=STATUSES,
        times=True,
    )
    _add_topics(verb)
    verb.add_argument("--to", metavar="URI", required=True, help="the lake: a folder, file://, s3://bucket/path")
    verb.add_argument("--from", metavar="TIME", dest="since", default="start", help="default start")
    verb.add_argument("--until", metavar="TIME", default="end", help="default end: what is committed now")
    verb.add_argument("--strict", action="store_true", help="fail where messages are missing, instead of recording it")
    _add_format(verb)
    add_split_bytes(verb)
    add_common(verb)


def add_compact(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "compact",
        run_compact,
        help="merge the small files of a day into large ones",
        description="Merge small files of a partition and day into files of --target-bytes. At every moment each "
        "message is in exactly one live file. Old files are removed by a later compact, when both its own --keep and "
        "that of the compact that replaced them are over: readers that began before may still need them. A lake whose "
        "commits are an Iceberg table is refused.",
        examples=("nsqha spark compact --lake lake",),
        shape='{"merged", "files", "bytes", "removed", "seconds"}',
        statuses=(exits.FAILED, exits.USAGE, exits.NOT_FOUND, exits.INTERRUPTED),
    )
    verb.add_argument("topic", metavar="TOPIC", nargs="*", type=name, help="default all")
    verb.add_argument("--lake", metavar="URI", required=True, help="the URI that archive has as --to")
    verb.add_argument("--target-bytes", metavar="SIZE", type=size, default="128MB", help="default 128MB")
    verb.add_argument(
        "--keep", metavar="TIME", type=duration, default="1h", help="keep old files this long (default 1h)"
    )
    add_spark(verb)


def add_verify(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "verify",
        run_verify,
        help="prove that the lake has what the log has",
        description="Prove that a lake is the log: ranges without gaps, files as they were written, chains that end in "
        "the broker's own. --full reads every byte and row, and compares it with what the log still has. "
        "Gaps and mismatches are listed, with topic, partition and offsets; then the exit status is 1.",
        examples=("nsqha spark verify orders --lake lake",),
        shape=REPORT,
        statuses=STATUSES,
    )
    verb.add_argument("topic", metavar="TOPIC", nargs="+", type=name)
    verb.add_argument("--lake", metavar="URI", required=True, help="the URI that archive has as --to")
    verb.add_argument("--full", action="store_true", help="read every file, and the log where it has the same messages")
    verb.add_argument("--lake-only", action="store_true", help="ask no broker; check only the lake itself")
    verb.add_argument("--strict", action="store_true", help="fail also for messages that were recorded as missing")
    add_common(verb)


def _add_format(verb: Parser) -> None:
    group = verb.add_argument_group("Iceberg")
    group.add_argument("--format", choices=("manifest", "iceberg"), default="manifest", help="default manifest")
    what = "of .pyiceberg.yaml, or of PYICEBERG_CATALOG__NAME__.. in the environment (default default)"
    group.add_argument("--catalog", metavar="NAME", default="default", help=what)
    group.add_argument("--table", metavar="NAMESPACE.TABLE", default="nsqha.messages", help="default nsqha.messages")


def _add_topics(verb: Parser) -> None:
    verb.add_argument("topic", metavar="TOPIC", nargs="*", type=name)
    verb.add_argument("--pattern", metavar="REGEX", help="all topics whose whole name matches, instead of TOPIC")


# ---- archive


def run_archive(args: argparse.Namespace) -> int:
    from pyspark_nsqha import jobs
    from pyspark_nsqha.lake.archive import Subject, once
    from pyspark_nsqha.snapshot import Segments

    subject = Subject(*_topics(args), args.channel)
    _look(args, subject.topics, subject.pattern)
    progress = ProgressLine("archive")
    worked: list[str] = []  # steps that succeeded: a later failure is taken for a temporary one

    def step(name: str) -> None:
        if name == "committed":
            worked.append(name)

    with started(args, "nsqha archive") as session:
        log = Segments(connection(args))
        failures = 0
        while True:
            begun = time.monotonic()
            rounds, far = _rounds(args, session, progress, step)
            try:
                totals = _failures(lambda rounds=rounds, far=far: once(log, rounds, subject, progress=far, warn=say))
            except (exits.Exit, jobs.CannotStart) as error:
                if args.once or not worked or not jobs.is_running(session):
                    raise
                failures += 1
                pause = again_after(args.interval / 1e9, failures)
                say(f"{args.parser.prog}: {error}; trying again in {show_duration(pause)}")
                time.sleep(pause)
                continue
            progress.close()
            if args.once or totals.rows or totals.failed:
                status = _tell(args, totals, time.monotonic() - begun)
            if args.once:
                return status
            worked.append("once")
            failures = 0
            time.sleep(max(args.interval / 1e9 - (time.monotonic() - begun), 0))


def again_after(interval: float, failures: int) -> float:
    """Seconds until the next try: doubled after each failure."""
    return max(min(interval * 2.0 ** min(failures - 1, 20), AGAIN_SECONDS_MAX), interval)


# ---- backfill


def run_backfill(args: argparse.Namespace) -> int:
    from pyspark_nsqha.lake.backfill import backfill
    from pyspark_nsqha.snapshot import Segments

    topics, pattern = _topics(args)
    _check_place(args)
    within = time_range(args.parser, args.since, args.until, time.time_ns())
    if not args.json:
        say_range(within)
    since, until = within
    _look(args, topics, pattern)
    progress = ProgressLine("backfill")
    with started(args, "nsqha backfill") as session:
        log = Segments(connection(args))
        begun = time.monotonic()
        rounds, far = _rounds(args, session, progress)
        asked = {"topics": topics, "pattern": pattern, "since_ns": since, "until_ns": until, "strict": args.strict}
        totals = _failures(lambda: backfill(log, rounds, **asked, progress=far, warn=say))
        progress.close()
        return _tell(args, totals, time.monotonic() - begun)


def _check_place(args: argparse.Namespace) -> None:
    """Refuse a time as --to: here it is the lake, in other commands the end of a range."""
    if not is_place(args.to, time.time_ns()):
        return
    args.parser.error(f"--to {args.to!r} is a time, not a lake: use --until for the end; for a folder: ./{args.to}")


# ---- compact


def run_compact(args: argparse.Namespace) -> int:
    from pyspark_nsqha import jobs
    from pyspark_nsqha.lake.commits.commit import ManifestCommits
    from pyspark_nsqha.lake.compact import MergeTask, compact
    from pyspark_nsqha.lake.store import Store

    begun = time.monotonic()
    store = Store(args.lake)
    commits = ManifestCommits(store)
    check_lake(args.lake)
    _failures(commits.state)
    if commits.of_table:
        args.parser.error(f"{store.uri} is an Iceberg table: its files are not merged")
    progress, run = ProgressLine("compact"), uuid.uuid4().hex[:16]
    with started(args, "nsqha compact") as session:
        totals = _failures(
            lambda: compact(
                commits,
                store,
                lambda groups, tag: jobs.run_tasks(session, MergeTask(store, run, tag), groups),
                run=run,
                topics=args.topic,
                target_bytes=args.target_bytes,
                keep_ns=args.keep,
                progress=progress,
            )
        )
    progress.close()
    if args.json:
        print_json({**vars(totals), "seconds": round(time.monotonic() - begun, 3)})
    else:
        what = f"{show_count(totals.merged, 'file')} merged into {totals.files:,}, {show_bytes(totals.bytes)}"
        print(f"{what}; {show_count(totals.removed, 'old file')} removed", flush=True)
    return exits.OK


def _topics(args: argparse.Namespace) -> tuple[tuple[str, ...], str]:
    if bool(args.topic) == bool(args.pattern):
        args.parser.error("give topics by name, or --pattern")
    if ephemeral := [topic for topic in args.topic if topic.endswith("#ephemeral")]:
        args.parser.error(f"{ephemeral[0]} is never archived: ephemeral topics do not keep their log")
    return tuple(args.topic), args.pattern or ""


def _rounds(
    args: argparse.Namespace, session: Any, progress: ProgressLine, step: Callable[[str], None] = lambda name: None
) -> tuple[Any, Any]:
    """Return the rounds that write into the lake by Spark's tasks, and a function that shows their progress."""
    from pyspark_nsqha import jobs
    from pyspark_nsqha.lake.rounds import Rounds, RoundSettings
    from pyspark_nsqha.lake.store import Store
    from pyspark_nsqha.lake.task import PieceTask

    asked = connection(args)
    store = Store(args.to)
    done = left = 0

    def far(totals: Any, still: int) -> None:
        nonlocal done, left
        done, left = totals.log_bytes, still
        progress(done, done + left)

    def write(splits: Any, run: str) -> Any:
        task = PieceTask(store, run, asked.tls, asked.timeout_ms / 1000, asked.retries)
        return jobs.run_tasks(session, task, splits, progress=lambda some: progress(done + some, done + left))

    settings = RoundSettings(uuid.uuid4().hex[:16], split_bytes=args.split_bytes, strict=args.strict)
    return Rounds(_commits(args, store), store, write, settings, step=step), far


def _look(args: argparse.Namespace, topics: tuple[str, ...], pattern: str) -> None:
    """Report what is wrong with lake, topics or brokers before Spark starts."""
    from pyspark_nsqha.lake.store import Store
    from pyspark_nsqha.snapshot import Segments, SnapshotRequest

    store = Store(args.to)
    # Before the commits: with a table, opening them creates it.
    _failures(lambda: check_target(store))
    _failures(lambda: _commits(args, store).state())
    with near_misses(args, topics):
        _failures(lambda: Segments(connection(args)).snapshot(SnapshotRequest(topics, pattern)))


def _commits(args: argparse.Namespace, store: Any) -> Any:
    """The commits of the lake: its manifest, or an Iceberg table."""
    if args.format == "manifest":
        from pyspark_nsqha.lake.commits.commit import ManifestCommits

        return ManifestCommits(store)
    from pyspark_nsqha.lake.commits.iceberg import IcebergCommits

    # pyiceberg logs this for every file, for the columns in which Parquet keeps no statistics.
    logging.getLogger("pyiceberg.io.pyarrow").addFilter(_says_more_than_statistics)
    namespace, dot, table = args.table.rpartition(".")
    if not (namespace and dot and table):
        args.parser.error(f"--table {args.table!r} is not NAMESPACE.TABLE")
    return IcebergCommits(store, args.catalog, args.table)


def _says_more_than_statistics(record: logging.LogRecord) -> bool:
    return "PyArrow statistics missing" not in str(record.msg)


def _failures(work: Any) -> Any:
    """Return the result of `work`; errors become exit statuses."""
    from pyspark_nsqha.lake.commits.manifest import BadManifest, Overlap
    from pyspark_nsqha.lake.compact import CannotMerge
    from pyspark_nsqha.lake.rounds import DataLoss
    from pyspark_nsqha.lake.store import StoreFailed
    from pyspark_nsqha.model import ReadFailed

    try:
        return work()
    except ReadFailed as error:
        raise exits.Exit(status_of(error), str(error)) from None
    except (StoreFailed, BadManifest, Overlap, DataLoss, CannotMerge) as error:
        raise exits.Exit(exits.FAILED, str(error)) from None


def _tell(args: argparse.Namespace, totals: Any, seconds: float) -> int:
    """Print what was done on stdout and what failed on stderr."""
    from pyspark_nsqha.lake.commits.manifest import record

    for why in totals.failed.values():
        say(f"{args.parser.prog}: {why}")
    missing = sum(gap.end - gap.first for gap in totals.missing)
    if args.json:
        print_json(
            {
                "files": totals.files,
                "rows": totals.rows,
                "bytes": totals.bytes,
                "log_bytes": totals.log_bytes,
                "missing": [record(gap) for gap in totals.missing],
                "failed": {str(life): why for life, why in totals.failed.items()},
                "seconds": round(seconds, 3),
            }
        )
    else:
        rate = show_bytes(int(totals.log_bytes / seconds)) if seconds else "0 B"
        what = f"{show_count(totals.rows)} in {show_count(totals.files, 'file')}, {show_bytes(totals.bytes)}, {rate}/s"
        print(what + (f"; {show_count(missing)} missing" if missing else ""), flush=True)
    if not totals.failed:
        return exits.OK
    return exits.PARTLY if totals.rows or len(totals.failed) < totals.partitions else exits.FAILED


# ---- verify


def run_verify(args: argparse.Namespace) -> int:
    from pyspark_nsqha.snapshot import Segments, SnapshotRequest

    check_lake(args.lake)
    with near_misses(args, args.topic):
        if not args.full:
            return _verify(args, None)
        if not args.lake_only:  # errors are reported before Spark starts
            _failures(lambda: Segments(connection(args)).snapshot(SnapshotRequest(tuple(args.topic))))
        with started(args, "nsqha verify") as session:
            return _verify(args, session)


def _verify(args: argparse.Namespace, session: Any) -> int:
    from functools import partial

    from pyspark_nsqha import jobs
    from pyspark_nsqha.lake.archive import HOLD_MS, check_cluster, release
    from pyspark_nsqha.lake.commits.commit import ManifestCommits
    from pyspark_nsqha.lake.contents import CheckTask
    from pyspark_nsqha.lake.store import Store
    from pyspark_nsqha.lake.task import read_log
    from pyspark_nsqha.lake.verify import verify
    from pyspark_nsqha.snapshot import Segments, SnapshotRequest

    begun = time.monotonic()
    asked = connection(args)
    store = Store(args.lake)
    progress = ProgressLine("verify")
    transport = {"tls": asked.tls, "timeout_seconds": asked.timeout_ms / 1000, "retries": asked.retries}

    def check(work: Any) -> Any:
        total = sum(file.bytes for file, _ in work)
        far = lambda done: progress(done, total)  # noqa: E731
        return jobs.run_tasks(
            session, CheckTask(store, **transport), work, size=lambda item: item[0].bytes, progress=far
        )

    log, topics = Segments(asked), tuple(args.topic)

    def work() -> Any:
        if args.lake_only:
            state = ManifestCommits(store).state()
            return verify(state, store, topics, check=None if session is None else check, progress=progress)
        # Before the state: what retention removes meanwhile was in the lake before, and is not compared.
        found = log.snapshot(SnapshotRequest(topics, hold_ms=HOLD_MS))
        try:
            state = ManifestCommits(store).state()
            check_cluster(found, state, store.uri)
            return verify(
                state,
                store,
                topics,
                pins=found.pins,
                read=partial(read_log, **transport),
                check=None if session is None else check,
                hold_id=found.hold_id,
                now_again=lambda: log.snapshot(SnapshotRequest(topics)).pins,
                progress=progress,
            )
        finally:
            release(log, found.hold_id)

    report = _failures(work)
    progress.close()
    return _tell_report(args, report, time.monotonic() - begun)


def _tell_report(args: argparse.Namespace, report: Any, seconds: float) -> int:
    """Print what was found on stdout and what could not be checked on stderr."""
    from pyspark_nsqha.lake.commits.manifest import record

    ok = not (report.problems or report.failed or (args.strict and report.missing))
    for why in report.failed:
        say(f"{args.parser.prog}: {why}")
    if args.json:
        print_json(
            {
                "ok": ok,
                "partitions": [_partition_record(partition) for partition in report.partitions],
                "problems": [problem._asdict() for problem in report.problems],
                "missing": [record(gap) for gap in report.missing],
                "notes": report.notes,
                "failed": report.failed,
                "anchors": report.anchors,
                "rows_read": report.rows_read,
                "rows_compared": report.rows_compared,
                "seconds": round(seconds, 3),
            }
        )
        return exits.OK if ok else exits.FAILED
    for problem in report.problems:
        print(problem)
    for gap in report.missing:
        say(f"missing: {gap.life}: offsets [{gap.first}, {gap.end}): {gap.reason}")
    for note in report.notes:
        say(note)
    for partition in report.partitions:
        behind = f", {show_count(partition.behind)} behind the log" if partition.behind else ""
        what = f"{show_count(partition.rows)} in {show_count(partition.files, 'file')}, {show_bytes(partition.bytes)}"
        which = f"{partition.life}{_which(partition, report.partitions)}"
        print(f"{which}: offsets [{partition.first}, {partition.end}), {what}{behind}")
    if ok:
        compared = f", {show_count(report.rows_compared)} compared with the log" if args.full else ""
        print(f"ok: {show_count(report.anchors, 'chain')} compared with the broker{compared}", flush=True)
    return exits.OK if ok else exits.FAILED


def _which(partition: Any, others: list[Any]) -> str:
    """A remark that distinguishes it from another life of the same partition, after its topic was deleted."""
    same = [one for one in others if str(one.life) == str(partition.life)]
    if len(same) == 1 or partition.behind is not None:
        return ""
    if any(one.behind is not None for one in same):
        return " (earlier topic of this name)"
    return f" (topic uid {partition.life.topic_uid:016x})"


def _partition_record(partition: Any) -> dict[str, Any]:
    life = partition.life
    return {
        "topic": life.topic,
        "topic_uid": f"{life.topic_uid:016x}",
        "partition": life.partition,
        "first": partition.first,
        "end": partition.end,
        "files": partition.files,
        "rows": partition.rows,
        "bytes": partition.bytes,
        "behind": partition.behind,
    }
