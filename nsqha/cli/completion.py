"""`nsqha completion`: scripts for shells that ask this program for candidates.

    completion bash | zsh | fish     prints a script
    completion words WORD..          prints the candidates for the last word, one a line; the scripts call this

Verbs and flags come from the parser itself. Names of topics and channels come from the broker, which has 300 ms to
answer: a shell must not hang because no broker runs.
"""

from __future__ import annotations

import argparse
from typing import Any

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import Parser, add_verb
from nsqha.cli.verbs import VERBS
from nsqha.errors import NsqhaError

ASK_SECONDS = 0.3

SCRIPTS = {
    "bash": """\
_nsqha() {
    local IFS=$'\\n'
    COMPREPLY=($(nsqha completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _nsqha nsqha""",
    "zsh": """\
#compdef nsqha
_nsqha() {
    local -a candidates
    candidates=("${(@f)$(nsqha completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    [[ -n "$candidates" ]] && compadd -a candidates || _files
}
compdef _nsqha nsqha""",
    "fish": """\
complete -c nsqha -f -a '(nsqha completion words -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'""",
}


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "completion",
        run,
        help=VERBS["completion"],
        examples=(
            "nsqha completion bash >> ~/.bash_completion",
            "nsqha completion fish > ~/.config/fish/completions/nsqha.fish",
            "nsqha completion words -- topic sh",
        ),
        statuses=(exits.USAGE,),
    )
    verb.add_argument("shell", metavar="SHELL", choices=(*SCRIPTS, "words"), help="bash, zsh or fish")
    verb.add_argument("words", metavar="WORD", nargs="*", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.shell != "words":
        print(SCRIPTS[args.shell])
        return exits.OK
    for candidate in candidates(args.build_parser(), args.words):
        print(candidate)
    return exits.OK


def candidates(parser: Parser, words: list[str]) -> list[str]:
    """Candidates for the last word."""
    *before, last = words or [""]
    given: list[str] = []
    value_of: argparse.Action | None = None  # the flag whose value comes next
    for word in before:
        if value_of is not None:
            value_of = None
        elif word.startswith("-") and word != "-":
            value_of = _takes_value(parser, word)
        elif word in (below := parser.verbs()):
            parser, given = below[word], []
        else:
            given.append(word)
    if value_of is not None:
        found = [str(choice) for choice in value_of.choices or ()]
    elif last.startswith("-"):
        found = parser.flags()
    elif verbs := parser.verbs():
        found = list(verbs)
    else:
        found = _names(parser, given)
    return sorted(word for word in found if word.startswith(last))


def _takes_value(parser: Parser, word: str) -> argparse.Action | None:
    """Return the flag `word` if its value is a separate word, else None."""
    for action in parser._actions:
        if word in action.option_strings:
            return action if action.nargs != 0 else None
    return None


def _names(parser: Parser, given: list[str]) -> list[str]:
    """Return topics, channels or fixed choices, whichever the verb expects at this place."""
    wanted = parser.positionals()
    if len(given) >= len(wanted):
        return []
    action = wanted[len(given)]
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest not in ("topic", "channel"):
        return []
    try:
        channels = _ask()
    except NsqhaError:
        return []
    return list(channels) if action.dest == "topic" else channels.get(given[0].partition("/")[0], [])


def _ask() -> dict[str, list[str]]:
    """Ask the broker that the environment names for topics and their channels."""
    import os

    from nsqha.cli.brokers.admin import Admin
    from nsqha.cli.terminal.parser import GRPC_ADDRESS

    with Admin(os.environ.get("NSQHA_GRPC_ADDRESS", GRPC_ADDRESS), ASK_SECONDS) as admin:
        return {topic.name: list(topic.channels) for topic in admin.call("ListTopics").topics}
