"""`nsqha import nsqd`: take over topics, channels, pauses and queued messages of an nsqd that was stopped."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_json, add_timeout, add_verb, add_yes
from nsqha.cli.terminal.screen import confirm, print_json, say, show_bytes, show_count, table
from nsqha.cli.verbs import VERBS

HTTP_ADDRESS = "127.0.0.1:4151"
DESCRIPTION = """\
Take over topics, channels, pauses and queued messages from the data folder of an nsqd that was stopped. The folder is
only read. Shows the plan, then asks.

Messages get new ids and the time of the import; attempts begin again. Every channel gets all it had; one gets messages
that it had finished where the plan counts repeats. Topics that exist at the broker are refused. An import that was
interrupted goes on when the same command is given again; at most 200 messages then come twice.

The status is 7 if bytes of a file cannot be read, and 1 if there are fewer messages than nsqd has counted: files are
missing or cut. All others are published."""

SHAPE = (
    '{"done", "topics": [{"topic", "paused", "messages", "bytes", "channels": [{"channel", "paused", "messages", '
    '"repeats"}], "waiting", "damage": [...]}], "remarks": [...]}'
)


def add_parser(commands: Any) -> None:
    verb = add_verb(commands, "import", None, help=VERBS["import"])
    sources = verb.add_subparsers(title="sources", metavar="SOURCE", required=True)
    nsqd = add_verb(
        sources,
        "nsqd",
        run,
        help="the data folder of an nsqd",
        description=DESCRIPTION,
        examples=(
            "nsqha import nsqd /var/lib/nsqd --plan",
            "nsqha import nsqd /var/lib/nsqd --to 127.0.0.1:4151 --yes",
        ),
        shape=SHAPE,
        statuses=(
            *(exits.FAILED, exits.USAGE, exits.NOT_FOUND, exits.CONFLICT, exits.UNREACHABLE),
            *(exits.PARTLY, exits.NOT_CONFIRMED, exits.INTERRUPTED),
        ),
    )
    nsqd.add_argument("folder", metavar="DIR", help="nsqd's --data-path")
    nsqd.add_argument(
        "--to", metavar="HOST:PORT", default=HTTP_ADDRESS, help=f"HTTP address of a broker (default {HTTP_ADDRESS})"
    )
    nsqd.add_argument("--plan", action="store_true", help="show what would be done and stop")
    nsqd.add_argument("--state", metavar="PATH", help="where it notes how far it is (default ./NAME.nsqha-import.json)")
    add_yes(nsqd)
    add_timeout(nsqd)
    add_json(nsqd)


def run(args: argparse.Namespace) -> int:
    from nsqha.cli.imports.http_target import HttpTarget
    from nsqha.cli.imports.layout import lay_out
    from nsqha.cli.imports.nsqd_folder import NsqdFolder
    from nsqha.cli.imports.takeover import ImportState, take_over

    with NsqdFolder(args.folder) as folder:
        layouts = [lay_out(folder, topic) for _, topic in sorted(folder.topics.items()) if _kept(topic.name)]
        damage = [each for layout in layouts for each in layout.damage]
        status = exits.FAILED if any(each.lost for each in damage) else exits.PARTLY if damage else exits.OK
        if args.plan:
            _show(args, folder, layouts, done=False)
            return status
        name = os.path.basename(folder.path) or "root"
        state = ImportState(args.state or f"{name}.nsqha-import.json", folder, args.to)
        target = HttpTarget(args.to, args.timeout / 1e9)
        taken = sorted({layout.topic.name for layout in layouts} & target.topics() - state.begun.keys())
        if taken:
            why = "its channels would get messages of others; delete it, or import into another cluster"
            raise exits.Exit(exits.CONFLICT, f"topic {taken[0]} exists at {args.to} already: {why}")
        if not args.yes:
            _show(args, folder, layouts, done=False, out=sys.stderr)
            confirm(f"publish {show_count(sum(one.messages for one in layouts))} to {args.to}?", yes=False)
        published = 0

        def told(count: int) -> None:
            nonlocal published
            published += count

        try:
            for layout in layouts:
                take_over(folder, layout, target, state, told)
        except exits.Exit as error:
            what = f"after {show_count(published)}: {error}; the same command goes on from there"
            raise exits.Exit(exits.PARTLY if state.begun else error.status, what) from None
        finally:
            target.close()
        _show(args, folder, layouts, done=True)
        say(f"published {show_count(published)} to {args.to}")
        return status


def _kept(topic: str) -> bool:
    return not topic.endswith("#ephemeral")


def _show(args: argparse.Namespace, folder: Any, layouts: list[Any], *, done: bool, out: Any = None) -> None:
    if args.json and out is None:
        print_json({"done": done, "topics": [_record(layout) for layout in layouts], "remarks": folder.remarks})
    else:
        rows = [row for layout in layouts for row in _rows(layout)]
        table(("TOPIC", "CHANNEL", "MESSAGES", "REPEATS", "BYTES", ""), rows, out)
    for line in [*folder.remarks, *(str(damage) for layout in layouts for damage in layout.damage)]:
        say(f"{args.parser.prog}: {line}")


def _rows(layout: Any) -> list[tuple[Any, ...]]:
    topic = layout.topic
    rows = [(topic.name, "-", layout.waiting, 0, show_bytes(layout.bytes), "paused" if topic.paused else "")]
    for name in layout.channels:
        paused = "paused" if topic.channels[name].paused else ""
        rows.append((topic.name, name, layout.counts[name], layout.repeats[name], "", paused))
    return rows


def _record(layout: Any) -> dict[str, Any]:
    topic = layout.topic
    channels = [
        {
            "channel": name,
            "paused": topic.channels[name].paused,
            "messages": layout.counts[name],
            "repeats": layout.repeats[name],
        }
        for name in layout.channels
    ]
    return {
        "topic": topic.name,
        "paused": topic.paused,
        "messages": layout.messages,
        "bytes": layout.bytes,
        "channels": channels,
        "waiting": layout.waiting,
        "damage": [str(damage) for damage in layout.damage],
    }
