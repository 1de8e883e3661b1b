"""`nsqha tail`: print what is published from now on, without touching any channel."""

from __future__ import annotations

import argparse
import os
from typing import Any

from nsqha.cli.sub import SHAPE, STATUSES, add_common, consume
from nsqha.cli.terminal.parser import add_verb, name
from nsqha.cli.verbs import VERBS

DESCRIPTION = """\
Print messages as they are published, from now on, through an ephemeral channel of its own, which is removed at the
end. Other channels are not affected. As with any NSQ broker, the first channel of a topic gets the messages that
waited in the topic, and this may be the first: to look at stored messages, use `nsqha peek`."""


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "tail",
        run,
        help=VERBS["tail"],
        description=DESCRIPTION,
        examples=("nsqha tail orders", "nsqha tail orders --idle 1s --json"),
        shape=SHAPE,
        statuses=STATUSES,
    )
    verb.add_argument("topic", metavar="TOPIC", type=name)
    add_common(verb)


def run(args: argparse.Namespace) -> int:
    return consume(args, args.topic, f"tail-{os.urandom(6).hex()}#ephemeral", None)
