"""`nsqha stats`: the node, its topics and its channels on one screen."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import Any

from nsqha.cli.brokers.admin import Admin, record, replication
from nsqha.cli.channel.command import state_of
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_grpc, add_json, add_verb, duration, name
from nsqha.cli.terminal.screen import Cell, print_json, show_bytes, show_count, some, table
from nsqha.cli.terminal.times import show_duration
from nsqha.cli.verbs import VERBS

CLEAR = "\x1b[H\x1b[J"
CHROME_LINES = 5  # lines of a screen that are not rows of the table

SHAPE = (
    '{"node": {"version", "implementation", "data_path", "health", "node_uid", "start_time_ns", "sync", '
    '"disk_free_bytes", "publishes_refused"}, "topics": [as `topic show`], "channels": [as `channel show`], '
    '"unreachable": [{"node", "name", "why"}]}'
)


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "stats",
        run,
        help=VERBS["stats"],
        description="Show the node, its topics and its channels. --watch adds rates per second since the last sample.",
        examples=("nsqha stats", "nsqha stats orders --json", "nsqha stats --watch 5s"),
        shape=SHAPE + " per sample",
        statuses=(exits.USAGE, exits.NOT_FOUND, exits.UNREACHABLE, exits.INTERRUPTED),
    )
    verb.add_argument("topic", metavar="TOPIC", type=name, nargs="?")
    verb.add_argument(
        "--watch", type=duration, nargs="?", const=2 * 10**9, metavar="TIME", help="repeat (default every 2s)"
    )
    add_json(verb, "print JSON, one line per sample")
    add_grpc(verb)


def run(args: argparse.Namespace) -> int:
    if args.watch == 0:
        args.parser.error("--watch needs a time above zero")
    before: StatsSample | None = None
    while True:
        with Admin.of(args) as admin:  # of each sample: a broker closes connections that make no call for seconds
            now = StatsSample(admin, args.topic or "")
        if args.json:
            print_json(now.json())
        else:
            live = args.watch is not None and sys.stdout.isatty()
            sys.stdout.write(CLEAR if live else "\n" if before else "")
            now.show(before, lines_max=shutil.get_terminal_size().lines - CHROME_LINES if live else None)
        if args.watch is None:
            return exits.OK
        sys.stdout.flush()  # a pipe gets each sample at once, too
        before = now
        time.sleep(args.watch / 1e9)


class StatsSample:
    """The node, its topics and its channels at one moment."""

    def __init__(self, admin: Admin, topic: str) -> None:
        self.at = time.monotonic()
        self.node = admin.call("GetNode")
        if topic:
            answer = admin.call("DescribeTopic", topic=topic)
            self.topics = [answer.topic]
        else:
            answer = admin.call("ListTopics")
            self.topics = list(answer.topics)
        self.unreachable = list(answer.unreachable)
        self.channels = list(admin.call("ListChannels", topic=topic).channels)

    def json(self) -> dict[str, Any]:
        return {
            "node": record(self.node),
            "topics": [record(topic) for topic in self.topics],
            "channels": [record(channel) for channel in self.channels],
            "unreachable": [record(node) for node in self.unreachable],
        }

    def show(self, before: StatsSample | None, lines_max: int | None) -> None:
        """Print one screen; with rates if there was a sample before."""
        node = self.node
        up = show_duration(max(time.time() - node.start_time_ns / 1e9, 0))
        refused = "  PUBLISHES ARE REFUSED" if node.publishes_refused else ""
        print(f"nsqha {node.version} ({node.implementation})  {node.health}  up {up}  sync {node.sync}{refused}")
        print(f"data {node.data_path}  {show_bytes(node.disk_free_bytes)} free\n")
        for trouble in self.troubles():
            print(f"{trouble}\n")
        for lost in self.unreachable:
            print(f"no answer from {lost.name}: {lost.why}\n")
        rows = self._rows(before)
        if not rows:
            print("no topics yet")
            return
        headers = ["TOPIC", "CHANNEL", "DEPTH", "IN FLIGHT", "DEFERRED", "MESSAGES", "CONSUMERS", "OLDEST", "STATE"]
        if before is not None:
            headers.insert(6, "IN/S")
            headers.insert(7, "DONE/S")
        cut = len(rows) - lines_max if lines_max is not None and len(rows) > lines_max else 0
        table(headers, rows[: len(rows) - cut])
        if cut:
            print(f"and {cut} more lines")

    def troubles(self) -> list[str]:
        """Partitions that have no leader, acknowledge nothing, or have too few replicas."""
        from nsqha.election.health import BELOW, LEADERLESS, UNDER

        texts = {
            LEADERLESS: "without a leader",
            BELOW: "below min_isr, nothing is acknowledged",
            UNDER: "under-replicated",
        }
        found: dict[str, list[str]] = {}
        for topic in self.topics:
            for partition in topic.partitions:
                if state := replication(partition):
                    found.setdefault(state, []).append(f"{topic.name}/{partition.partition}")
        return [
            f"{show_count(len(places), 'partition')} {texts[state]}: {some(places)}" for state, places in found.items()
        ]

    def _rows(self, before: StatsSample | None) -> list[list[Cell]]:
        seconds = self.at - before.at if before else 0.0
        topics_before = {t.name: t for t in before.topics} if before else {}
        channels_before = {(c.topic, c.name): c for c in before.channels} if before else {}
        rows: list[list[Cell]] = []
        for topic in self.topics:
            held = sum(p.high_watermark - p.pump_offset for p in topic.partitions)
            row: list[Cell] = [topic.name, "", held, 0, 0, topic.message_count, 0, "", "paused" if topic.paused else ""]
            if before is not None:
                row[6:6] = [_rate(topic, topics_before.get(topic.name), "message_count", seconds), 0.0]
            rows.append(row)
            for channel in self.channels:
                if channel.topic != topic.name:
                    continue
                oldest = show_duration(channel.oldest_unfinished_seconds) if channel.oldest_unfinished_seconds else ""
                row = ["", channel.name, channel.depth, channel.in_flight, channel.deferred, channel.message_count]
                if before is not None:
                    earlier = channels_before.get((channel.topic, channel.name))
                    row += [_rate(channel, earlier, what, seconds) for what in ("message_count", "finished")]
                rows.append([*row, channel.consumers, oldest, state_of(channel)])
        return rows


def _rate(now: Any, before: Any, what: str, seconds: float) -> float:
    if before is None or seconds <= 0:
        return 0.0
    return float(max(getattr(now, what) - getattr(before, what), 0) / seconds)
