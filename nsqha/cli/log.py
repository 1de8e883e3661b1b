"""`nsqha log dump` and `nsqha log verify` read the log files themselves, whether a broker runs on them or not.
`nsqha log skip` asks a broker to continue behind a damaged range.

The first two write, lock and recover nothing. They ignore what a running broker appends after they began.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nsqha.cli.peek import body_line
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import (
    Parser,
    add_grpc,
    add_json,
    add_verb,
    add_yes,
    count,
    did_you_mean,
    topic_and_partition,
)
from nsqha.cli.terminal.screen import (
    ProgressLine,
    body_json,
    bold,
    confirm,
    print_json,
    say,
    show_bytes,
    show_count,
    table,
)
from nsqha.cli.terminal.times import show_time
from nsqha.cli.verbs import VERBS
from nsqha.errors import ConfigError, LogCorrupt, NotFound, NsqhaError
from nsqha.ids import PARTITIONS_MAX

if TYPE_CHECKING:
    from nsqha.commitlog.corruption.verify import Verification
    from nsqha.commitlog.entry import BatchCorrupt
    from nsqha.commitlog.reading.dump import DumpedBatch, DumpedFrame
    from nsqha.commitlog.reading.lookup import LogReader

_FOLDER = re.compile(r"(.+)-([0-9a-f]{16})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")
UNDER_WAY_SECONDS = 0.1  # a running broker has written the entry of a batch by then
LAST_LOG_ID = 1 << 63
WHAT_NOW = (
    "The next start cuts off a torn end. Any other range stops channels until its files are restored, or "
    "`nsqha log skip` gives up its messages."
)

DUMP_SHAPE = (
    '{"topic", "partition", "log_id", "epoch", "first_offset", "count", "position", "size", "timestamp_ns", "durable", '
    '"problem", "frames": [{"type", "position", "size", "offset", "id", "timestamp_ns", "body" | "event"}]} per batch'
)
VERIFY_SHAPE = (
    '{"topic", "topic_uid", "partition", "start_offset", "end_offset", "batches", "messages", "bytes", '
    '"problems": [{"first_offset", "end_offset", "why"}]} per partition'
)

SKIP_SHAPE = (
    '{"topic", "skipped": [{"channel", "partition", "first_offset", "end_offset", "messages_lost"}], '
    '"given_up": [{"partition", "first_offset", "end_offset"}]}'
)


def add_parser(commands: Any) -> None:
    noun = add_verb(commands, "log", None, help=VERBS["log"])
    verbs = noun.add_subparsers(title="verbs", metavar="VERB", required=True)

    verb = _of_folder(
        verbs,
        "dump",
        run_dump,
        "print the batches of a log: messages and channel events",
        (
            "nsqha log dump data orders",
            "nsqha log dump data orders/0 --from 1 -n 5 --batches",
            "nsqha log dump data orders --json",
        ),
        shape=DUMP_SHAPE,
    )
    verb.add_argument("--from", dest="first", type=int, metavar="OFFSET", help="begin with the batch that holds it")
    verb.add_argument("-n", "--count", type=count, metavar="N", help="at most N batches of each partition")
    verb.add_argument("--batches", action="store_true", help="batches only, without their frames")

    verb = add_verb(
        verbs,
        "skip",
        run_skip,
        help="let channels that stopped at a damaged range continue behind it",
        description=(
            "Let the channels of a running broker continue behind a range of the log that cannot be read. They lose\n"
            "its messages: restore the files instead if you can. `nsqha log verify` shows the ranges.\n"
            "In a cluster, without CHANNEL, a range that no other replica has is given up: new replicas are made\n"
            "without it (move, decommission). A node that still has it gives it back when it returns."
        ),
        examples=("nsqha log skip orders --yes", "nsqha log skip orders/0 billing --yes --json"),
        shape=SKIP_SHAPE,
        statuses=(exits.FAILED, exits.USAGE, exits.NOT_FOUND, exits.UNREACHABLE, exits.PARTLY, exits.NOT_CONFIRMED),
    )
    verb.add_argument("topic", metavar="TOPIC[/PARTITION]", type=topic_and_partition)
    verb.add_argument("channel", metavar="CHANNEL", nargs="?", help="only this one")
    add_yes(verb)
    add_json(verb)
    add_grpc(verb)
    _of_folder(
        verbs,
        "verify",
        run_verify,
        "read logs whole and check every checksum, chain and frame",
        ("nsqha log verify data", "nsqha log verify data orders/0 --json"),
        shape=VERIFY_SHAPE,
    )


def _of_folder(verbs: Any, word: str, run: Any, help: str, examples: tuple[str, ...], *, shape: str) -> Parser:
    description = (
        f"{help[0].upper()}{help[1:]}. Writes nothing; a broker may be running.\n"
        "After a crash the end of a log may be torn. That is reported as a problem until the next start cuts it off."
    )
    statuses = (exits.FAILED, exits.USAGE, exits.NOT_FOUND)
    verb = add_verb(
        verbs, word, run, help=help, description=description, examples=examples, shape=shape, statuses=statuses
    )
    verb.add_argument("data_dir", metavar="DATA_DIR", help="--data-path of nsqd, --data-dir of nsqha dev")
    verb.add_argument("topic", metavar="TOPIC[/PARTITION]", type=topic_and_partition, nargs="?", default=("", None))
    add_json(verb, "print one line of JSON each")
    return verb


# ---- damage


def run_skip(args: argparse.Namespace) -> int:
    from nsqha.cli.brokers.admin import Admin, record

    topic, partition = args.topic
    chosen: dict[str, Any] = {"topic": topic}
    if partition is not None:
        chosen["partition"] = partition
    if args.channel is not None:
        chosen["channel"] = args.channel
    with Admin.of(args) as admin:
        if not args.yes:
            if args.channel is None:
                admin.call("DescribeTopic", topic=topic)
            else:
                admin.call("DescribeChannel", topic=topic, channel=args.channel)
            question = f"Give up what cannot be read in {topic}? The channels that wait lose its messages."
            confirm(question, yes=False)
        answer = admin.call("SkipDamage", **chosen)
    skipped = [record(item) for item in answer.skipped]
    given_up = [record(item) for item in answer.given_up]
    for failed in answer.errors:
        say(f"{args.parser.prog}: partition {failed.partition}: {failed.error}")
    if args.json:
        print_json({"topic": topic, "skipped": skipped, "given_up": given_up})
    elif not skipped and not given_up and not answer.errors:
        say("no channel is stopped")
    for item in () if args.json else skipped:
        offsets = f"offsets {item['first_offset']}-{item['end_offset'] - 1}"
        lost = f"{item['messages_lost']} messages lost"
        print(f"{topic}/{item['partition']} {item['channel']}: skipped {offsets}, {lost}")
    for item in () if args.json else given_up:
        print(f"{topic}/{item['partition']}: {_messages(item)} given up: new replicas are made without them")
    if answer.errors:
        return exits.PARTLY if skipped or given_up else exits.FAILED
    return exits.OK


def _messages(item: dict[str, Any]) -> str:
    first, end = item["first_offset"], item["end_offset"]
    return f"offsets {first}-{end - 1}" if first < end else "a batch without messages"


# ---- finding logs


class Folder(NamedTuple):
    """The folder of one partition's files."""

    topic: str
    topic_uid: int
    partition: int
    path: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


def folders(data_dir: str, topic: str, partition: int | None) -> list[Folder]:
    """Return the folders of the wanted partitions. Raises NotFound if there are none."""
    top = os.path.join(data_dir, "topics")
    if not os.path.isdir(data_dir):
        is_file = os.path.exists(data_dir)
        raise NotFound(f"{data_dir} is a file, not a folder" if is_file else f"there is no folder {data_dir}")
    found = []
    try:
        for name in sorted(os.listdir(top)) if os.path.isdir(top) else []:
            matched = _FOLDER.fullmatch(name)
            if matched is None:
                continue
            path = os.path.join(top, name)
            numbers = sorted(int(n) for n in os.listdir(path) if _NUMBER.fullmatch(n) and int(n) < PARTITIONS_MAX)
            found += [Folder(matched[1], int(matched[2], 16), n, os.path.join(path, str(n))) for n in numbers]
    except OSError as error:
        raise exits.Exit(exits.FAILED, f"{error.filename}: {error.strerror}") from None
    chosen = [f for f in found if topic in ("", f.topic) and partition in (None, f.partition)]
    if not chosen and topic:
        names = {f.topic for f in found}
        what = f"topic {topic}" if topic not in names else f"partition {partition} of topic {topic}"
        raise NotFound(f"there is no {what} in {data_dir}{did_you_mean(topic, names - {topic})}")
    inside = nodes_inside(data_dir)
    if not chosen:
        hint = f"; its folders {', '.join(inside)} have some: name one of them" if inside else ""
        raise NotFound(f"there are no logs in {data_dir}{hint}")
    if inside:
        say(f"not read: the logs of {', '.join(inside)} in {data_dir}; name one of these folders")
    return chosen


def nodes_inside(data_dir: str) -> list[str]:
    """Return the folders in it that are data folders themselves, as `nsqha dev --nodes 3` makes them."""
    return sorted(name for name in os.listdir(data_dir) if os.path.isdir(os.path.join(data_dir, name, "topics")))


@contextmanager
def opened(folder: Folder) -> Iterator[LogReader]:
    from nsqha.commitlog.reading.lookup import LogIdentity, LogReader
    from nsqha.commitlog.storage import File, OsStorage

    class Looked(OsStorage):
        """Reports a file that was listed and is gone as taken by a broker; one that was never there is damage."""

        def list_dir(self, path: str) -> list[str]:
            self.names = super().list_dir(path)
            return self.names

        def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
            try:
                return super().open(path, create=create, read_only=read_only)
            except FileNotFoundError as error:
                if os.path.basename(path) in self.names:
                    raise _went_away(folder, error) from None
                raise

    try:
        log = LogReader.open(Looked(), folder.path, LogIdentity(folder.topic_uid, folder.partition))
        try:
            yield log
        finally:
            log.close()
    except FileNotFoundError as error:
        raise _went_away(folder, error) from None
    except OSError as error:
        raise exits.Exit(exits.FAILED, f"{folder}: {error.filename or folder.path}: {error.strerror}") from None
    except LogCorrupt as error:
        raise exits.Exit(exits.FAILED, f"{folder}: {error}") from None


def _went_away(folder: Folder, error: FileNotFoundError) -> NotFound:
    return NotFound(f"{folder}: {error.filename} is gone: retention or a delete removed it; try again")


# ---- verify


def run_verify(args: argparse.Namespace) -> int:
    results: list[tuple[Folder, Verification]] = []
    unread = Unread()
    for folder in folders(args.data_dir, *args.topic):
        with unread.noted():
            results.append((folder, _verify(args.data_dir, folder)))
            if args.json:
                print_json(_verified(*results[-1]))
    if not args.json and results:
        headers = ("TOPIC", "PARTITION", "START", "END", "BATCHES", "MESSAGES", "BYTES", "PROBLEMS")
        table(
            headers,
            [
                (f.topic, f.partition, v.start.offset, v.end.offset, v.batches, v.messages, v.size, len(v.problems))
                for f, v in results
            ],
        )
    bad = 0
    for folder, verification in results:
        for problem in verification.problems:
            bad += 1
            say(f"{args.parser.prog}: {folder}: {problem}")
    if bad:
        say(WHAT_NOW)
    elif not unread.errors:
        total = sum(v.size for _, v in results)
        say(f"everything verifies: {show_count(len(results), 'partition')}, {show_bytes(total)}")
    return unread.report(args.parser.prog, bad=bool(bad))


class Unread:
    """Partitions that could not be read. The command reads the others all the same."""

    def __init__(self) -> None:
        self.errors: list[NsqhaError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except (NotFound, exits.Exit) as error:
            self.errors.append(error)

    def report(self, prog: str, *, bad: bool) -> int:
        """Print them and return the command's exit status; `bad`: it found problems in the others."""
        for error in self.errors:
            say(f"{prog}: {error}")
        statuses = {exits.status_of(error) for error in self.errors} | ({exits.FAILED} if bad else set())
        return exits.OK if not statuses else statuses.pop() if len(statuses) == 1 else exits.FAILED


def _verify(data_dir: str, folder: Folder) -> Verification:
    from nsqha.commitlog.corruption.verify import verify

    synced = _synced(data_dir, folder)  # before the log is looked at: it grows
    with opened(folder) as log:
        progress = ProgressLine(f"verify {folder}")
        try:
            found = verify(log, progress)
        finally:
            progress.close()
        end = _bad_end(data_dir, folder, log, synced)
        return found if end is None else replace(found, problems=(*found.problems, end))


def _synced(data_dir: str, folder: Folder) -> tuple[int, int]:
    """Return a log's log_uid and the end of what its node's journal knows to be on this disk; zeros if the journal
    does not say, as while the log is being cut."""
    from nsqha.commitlog.journal import inspect
    from nsqha.commitlog.storage import OsStorage

    try:
        record = inspect(OsStorage(), data_dir).partitions.get((folder.topic_uid, folder.partition))
    except FileNotFoundError:
        return 0, 0  # a copy of the logs alone
    except OSError as error:
        raise exits.Exit(exits.FAILED, f"{error.filename or data_dir}: {error.strerror}") from None
    except ConfigError as error:
        raise exits.Exit(exits.FAILED, str(error)) from None
    return (0, 0) if record is None or record.cut is not None else (record.log_uid, record.local_durable)


def _bad_end(data_dir: str, folder: Folder, log: LogReader, synced: tuple[int, int]) -> BatchCorrupt | None:
    """Return what is missing or torn at the end of a log, or None."""
    from nsqha.commitlog.corruption.verify import torn_end
    from nsqha.commitlog.entry import BatchCorrupt

    end = log.end
    if synced[1] > end.log_id:
        now = _synced(data_dir, folder)
        if now[0] == synced[0] and now[1] >= synced[1]:  # else it was cut since, or replaced by a new log
            return BatchCorrupt(end, end._replace(log_id=synced[1]), "they were synced to this disk and are missing")
    torn = torn_end(log)
    if torn is not None:
        time.sleep(UNDER_WAY_SECONDS)
        torn = torn_end(log)
    return torn


def _verified(folder: Folder, verification: Verification) -> dict[str, Any]:
    return {
        "topic": folder.topic,
        "topic_uid": folder.topic_uid,
        "partition": folder.partition,
        "start_offset": verification.start.offset,
        "end_offset": verification.end.offset,
        "batches": verification.batches,
        "messages": verification.messages,
        "bytes": verification.size,
        "problems": [_problem(problem) for problem in verification.problems],
    }


def _problem(problem: BatchCorrupt) -> dict[str, Any]:
    return {"first_offset": problem.first_offset, "end_offset": problem.end_offset, "why": problem.why}


# ---- dump


def run_dump(args: argparse.Namespace) -> int:
    from nsqha.commitlog.corruption.verify import unusable
    from nsqha.commitlog.reading.dump import DumpedBatch, dump

    bad = False
    unread = Unread()
    for folder in folders(args.data_dir, *args.topic):
        with unread.noted(), opened(folder) as log:
            for problem in unusable(log):
                bad = True
                _show(args, folder, DumpedBatch(None, (), problem))
            for n, batch in enumerate(dump(log, _first(log, args.first), LAST_LOG_ID, frames=not args.batches)):
                if n == args.count:
                    break
                bad = bad or batch.problem is not None
                _show(args, folder, batch)
    return unread.report(args.parser.prog, bad=bad)


def _show(args: argparse.Namespace, folder: Folder, batch: DumpedBatch) -> None:
    if args.json:
        print_json(_dumped(folder, batch))
    else:
        _print(folder, batch)


def _first(log: LogReader, offset: int | None) -> int:
    """Return the log id to begin with."""
    from nsqha.commitlog.entry import BatchCorrupt

    if offset is None or offset <= log.start.offset:
        return log.start.log_id
    try:
        entry = log.entry_for_offset(offset)
    except BatchCorrupt as damage:
        return damage.first.log_id
    return entry.log_id if entry is not None else log.end.log_id


def _dumped(folder: Folder, batch: DumpedBatch) -> dict[str, Any]:
    entry, problem = batch.entry, batch.problem
    shown: dict[str, Any] = {"topic": folder.topic, "partition": folder.partition}
    for name in ("log_id", "epoch", "first_offset", "count", "position", "size", "timestamp_ns", "durable"):
        shown[name] = getattr(entry, name) if entry is not None else None
    shown["problem"] = str(problem) if problem is not None else None
    shown["frames"] = [_frame(frame) for frame in batch.frames]
    return shown


def _frame(frame: DumpedFrame) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": frame.type, "position": frame.position, "size": frame.size}
    if frame.offset is not None:
        return shown | {
            "offset": frame.offset,
            "id": frame.message_id,
            "timestamp_ns": frame.timestamp_ns,
            **body_json(frame.payload),
        }
    return shown | {"event": _event(frame)}


def _event(frame: DumpedFrame) -> dict[str, Any] | None:
    """Return the content of a control frame; None if its type is not known here."""
    from dataclasses import asdict

    from nsqha.commitlog.control import NAMES
    from nsqha.cursor import events

    number = next((number for number, name in NAMES.items() if name == frame.type), 0)
    try:
        event = events.decode(number, frame.payload)
    except LogCorrupt:
        return None
    return {key: _plain(value) for key, value in asdict(event).items()} if event is not None else None


def _plain(value: Any) -> Any:
    """Convert a value for JSON: bytes become hex digits."""
    from nsqha.cursor.listing import Listing

    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Listing):
        return [list(channel) for channel in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _print(folder: Folder, batch: DumpedBatch) -> None:
    import sys

    entry = batch.entry
    if entry is not None:
        offsets = f"offsets {entry.first_offset}-{entry.end_offset - 1}" if entry.count else "no messages"
        place = f"{folder}  log id {entry.log_id}  epoch {entry.epoch}  {offsets}"
        print(f"{bold(place, sys.stdout)}  {show_time(entry.timestamp_ns)}  {entry.size} bytes at {entry.position}")
    if batch.problem is not None:
        print(f"{folder}  PROBLEM: {batch.problem}")
    for frame in batch.frames:
        if frame.offset is not None:
            print(f"  {frame.offset}  {frame.message_id}  {body_line(frame.payload)}")
        else:
            event = _event(frame)
            said = "  ".join(f"{key}={value}" for key, value in event.items()) if event is not None else ""
            print(f"  {frame.type}  {said if len(said) <= 300 else said[:300] + '…'}")
