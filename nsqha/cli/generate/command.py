"""The verb `generate`, and the table of generators: a new one is a module with `files`, and a line here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsqha.cli import broker, lookupd
from nsqha.cli.daemon_flags import add_daemon_flags
from nsqha.cli.generate import (
    alerts,
    completions,
    compose,
    configuration,
    dashboards,
    errors,
    k8s,
    man,
    metrics_page,
    systemd,
)
from nsqha.cli.generate.writing import Files, differences, write
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import Parser, add_verb
from nsqha.cli.terminal.screen import say
from nsqha.cli.verbs import VERBS
from nsqha.options import LookupdOptions, Options

DESCRIPTION = """\
Write files that the code knows best, below the folder of --to. A file that is there and says something else is shown
as a diff and left alone, and nothing is written, unless --force is given."""


@dataclass(frozen=True)
class Generator:
    """One kind of files."""

    what: str
    files: Callable[[Parser], Files]
    """Gets the parser of the whole `nsqha`, which most do not need."""


GENERATORS = {
    "man": Generator("man pages of all commands and daemons: share/man", lambda nsqha: man.files(nsqha, *daemons())),
    "completion": Generator("completion for bash, zsh and fish: share/", lambda _: completions.files(*daemons())),
    "systemd": Generator("units and settings: deploy/systemd", lambda _: systemd.files()),
    "compose": Generator("image and Compose files: deploy/Dockerfile, deploy/compose", lambda _: compose.files()),
    "prometheus": Generator("alert rules and their page: deploy/prometheus, docs", lambda _: alerts.files()),
    "grafana": Generator("dashboards: deploy/grafana", lambda _: dashboards.files()),
    "docs": Generator("pages of settings, metrics, errors and events: docs", lambda _: pages()),
    "k8s": Generator("manifests for Kubernetes: deploy/k8s", lambda _: k8s.files()),
}


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "generate",
        run,
        help=VERBS["generate"],
        description=f"{DESCRIPTION}\n\n" + "\n".join(f"  {name:12}{g.what}" for name, g in GENERATORS.items()),
        examples=("nsqha generate man --to ~/.local", "nsqha generate completion --to ~/.local"),
        statuses=(exits.FAILED, exits.USAGE, exits.CONFLICT),
    )
    verb.add_argument("what", metavar="WHAT", choices=tuple(GENERATORS), help=", ".join(GENERATORS))
    verb.add_argument("--to", metavar="PATH", type=Path, default=Path(), help="folder (default: the current one)")
    verb.add_argument("--force", action="store_true", help="replace files that say something else")


def run(args: argparse.Namespace) -> int:
    files = GENERATORS[args.what].files(args.build_parser())
    folder: Path = args.to.expanduser()
    if not args.force and (changed := differences(folder, files)):
        sys.stdout.write("".join(changed.values()))
        text = f"{len(changed)} of {len(files)} files below {folder} say something else (the diff is above); "
        raise exits.Exit(exits.CONFLICT, f"{text}nothing was written: --force replaces them")
    written = write(folder, files)
    for name in written:
        print(folder / name)
    if len(written) < len(files):
        say(f"{len(files) - len(written)} files are as they should be")
    return exits.OK


def pages() -> dict[str, str]:
    """The pages of docs/ that are made of tables alone."""
    return configuration.files() | metrics_page.files() | errors.files()


def daemons() -> list[Parser]:
    """`nsqd` and `nsqlookupd` as parsers, which only describe them: their own reader takes flags in Go's manner."""
    return [
        _daemon("nsqd", "The broker, with the flags and config files of nsqd.", Options, broker.GROUPS),
        _daemon("nsqlookupd", "The lookup daemon, with nsqlookupd's flags.", LookupdOptions, lookupd.GROUPS),
    ]


def _daemon(prog: str, description: str, options: Any, groups: Any) -> Parser:
    parser = Parser(prog=prog, description=description, usage=f"{prog} [flags]")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    add_daemon_flags(parser, options, groups)
    return parser
