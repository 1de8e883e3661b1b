"""Completion for shells, where the shells of an installation look for it.

`nsqha` is asked for candidates when a word is completed (`nsqha.cli.completion`); the daemons have flags only, which
are written into the scripts.
"""

from __future__ import annotations

import argparse

from nsqha.cli.completion import SCRIPTS
from nsqha.cli.terminal.parser import Parser

BASH, ZSH, FISH = "share/bash-completion/completions", "share/zsh/site-functions", "share/fish/vendor_completions.d"


_OF_ZSH = str.maketrans({"\\": "", "'": "'\\''", "[": "(", "]": ")", ":": "\\:"})
"""What has a meaning in a specification for _arguments."""


def files(*daemons: Parser) -> dict[str, str]:
    """Scripts for `nsqha` and for other programs."""
    found = {
        f"{BASH}/nsqha": SCRIPTS["bash"] + "\n",
        f"{ZSH}/_nsqha": _autoloaded(SCRIPTS["zsh"]),
        f"{FISH}/nsqha.fish": SCRIPTS["fish"] + "\n",
    }
    for daemon in daemons:
        found[f"{BASH}/{daemon.prog}"] = _bash(daemon)
        found[f"{ZSH}/_{daemon.prog}"] = _zsh(daemon)
        found[f"{FISH}/{daemon.prog}.fish"] = _fish(daemon)
    return found


def _autoloaded(script: str) -> str:
    """zsh reads a file of its path at the first completion: this one has to answer then, too."""
    head, _, _ = script.rpartition("\n")  # compdef, which such a file does without
    return f'{head}\n_nsqha "$@"\n'


def _flags(daemon: Parser) -> list[argparse.Action]:
    return [action for action in daemon._actions if action.help is not argparse.SUPPRESS and action.option_strings]


def _bash(daemon: Parser) -> str:
    name = f"_{daemon.prog}"
    words = " ".join(action.option_strings[-1] + ("" if action.nargs in (0, "?") else "=") for action in _flags(daemon))
    return f"""\
{name}() {{
    compopt -o nospace
    COMPREPLY=($(compgen -W '{words}' -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F {name} {daemon.prog}
"""


def _zsh(daemon: Parser) -> str:
    lines = [f"#compdef {daemon.prog}", "_arguments \\"]
    for action in _flags(daemon):
        what = _help(daemon, action).translate(_OF_ZSH)
        value = "" if action.nargs in (0, "?") else ":value:_files"
        lines.append(f"    '{action.option_strings[-1]}{'=' if value else ''}[{what}]{value}' \\")
    return "\n".join(lines).removesuffix(" \\") + "\n"


def _fish(daemon: Parser) -> str:
    lines = []
    for action in _flags(daemon):
        what = _help(daemon, action).replace("\\", "").replace("'", "\\'")
        value = "" if action.nargs in (0, "?") else " -r"
        lines.append(f"complete -c {daemon.prog} -l {action.option_strings[-1].lstrip('-')}{value} -d '{what}'")
    return "\n".join(lines) + "\n"


def _help(daemon: Parser, action: argparse.Action) -> str:
    return daemon._get_formatter()._expand_help(action) if action.help else ""
