"""The flags of a daemon as a verb of `nsqha`: the table in `nsqha.options`, in groups, read by the daemon's own reader.

The verb's parser only finds wrong flags, prints help and completes words. `load_nsqd` and `load_nsqlookupd` get the
same words and handle their meaning, limits, the environment and the config file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from nsqha.cli.terminal.parser import Parser
from nsqha.goflags import BOOL, DURATION, Flag, format_duration
from nsqha.options import LookupdOptions, Options, flags_of

OTHERS = "other settings"
GIVEN = "given"  # argv of the daemon, in a parsed namespace


class _Keep(argparse.Action):
    """Keep a flag and its value in the form that the daemon's own reader expects."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        words = getattr(namespace, GIVEN, None) or []
        setattr(namespace, GIVEN, [*words, f"{self.option_strings[0]}={values}"])


def add_daemon_flags(
    verb: Parser, options: type[Options] | type[LookupdOptions], groups: Mapping[str, Sequence[str]]
) -> None:
    """Add every flag of the table; `groups` names those that belong together, the rest comes last."""
    table = {flag.name: flag for flag in flags_of(options) if flag.name not in ("version", "verbose", "worker-id")}
    for title, names in groups.items():
        _add_group(verb, title, [table.pop(name) for name in names])
    _add_group(verb, OTHERS, [flag for flag in table.values() if not flag.inert])
    for flag in table.values():
        if flag.inert:  # accepted, so that an existing command line works; the daemon logs that it does nothing
            _add(verb, flag, argparse.SUPPRESS)
    verb.set_defaults(**{GIVEN: []})


def _add_group(verb: Parser, title: str, flags: Sequence[Flag]) -> None:
    group = verb.add_argument_group(title)
    for flag in flags:
        _add(group, flag, _help(flag))


def _add(group: argparse._ActionsContainer, flag: Flag, text: str) -> None:
    # A boolean takes its value after "=" only; without one it is true.
    optional: dict[str, Any] = {"nargs": "?", "const": "true"} if flag.kind.is_bool else {}
    metavar = "BOOL" if flag.kind.is_bool else flag.kind.word.upper()
    group.add_argument(
        f"--{flag.name}", action=_Keep, metavar=metavar, default=argparse.SUPPRESS, help=text, **optional
    )


def _help(flag: Flag) -> str:
    default = flag.default
    if default in ("", 0, ()) or "(default" in flag.usage:
        shown = ""
    elif flag.kind is DURATION:
        shown = f" (default {format_duration(default)})"
    elif flag.kind is BOOL:
        shown = " (default true)"
    else:
        shown = f" (default {default})"
    return f"{flag.usage}{shown}".replace("%", "%%")
