"""Man pages of `nsqha`, one for each command, and of the daemons with upstream's names; all from the parsers.

What --help prints is what a page says: description, flags in their groups, examples, shapes of JSON, exit statuses.
"""

from __future__ import annotations

import argparse
import re

from nsqha import __version__
from nsqha.cli.terminal.parser import Parser

FOLDER = "share/man/man1"


def files(parser: Parser, *daemons: Parser) -> dict[str, str]:
    """Pages of the whole `nsqha`, given with all its verbs, and of other programs."""
    verbs = parser.verbs()
    pages = [_page(parser, see=[f"nsqha-{name}" for name in verbs])]
    pages += [_page(verb, see=["nsqha"]) for verb in verbs.values()]
    pages += [_page(daemon, see=["nsqha"]) for daemon in daemons]
    programs = [parser, *verbs.values(), *daemons]
    return {f"{FOLDER}/{_name(program)}.1": page for program, page in zip(programs, pages, strict=True)}


def _name(program: Parser) -> str:
    return program.prog.replace(" ", "-")


def _page(program: Parser, see: list[str]) -> str:
    name = _name(program)
    first, _, rest = (program.description or "").partition("\n\n")
    summary = re.split(r"[.:;](?:\s|$)", " ".join(first.split()))[0]
    lines = [
        f'.TH "{name.upper()}" "1" "" "nsqha {__version__}" "User Commands"',
        *(".SH NAME", f"{_text(name)} \\- {_text(summary[:1].lower() + summary[1:])}"),
        *(".SH SYNOPSIS", *_usage(program)),
        *(".SH DESCRIPTION", *_paragraphs(first)),
        *(line for part in rest.split("\n\n") if part for line in (".PP", *_paragraphs(part))),
        *_options(program, ".SH"),
    ]
    for verb in program.verbs().values():
        if program.prog != "nsqha":
            lines += _verb(verb)
    lines += _ends(program, ".SH")
    lines += [".SH SEE ALSO", ",\n".join(f".BR {_text(other)} (1)" for other in sorted(see)).replace("(1),", "(1) ,")]
    return "\n".join(lines) + "\n"


def _verb(verb: Parser) -> list[str]:
    """A verb below the command that the page is about, with all that is below it."""
    lines = [f'.SH "{_text(verb.prog.partition(" ")[2].upper())}"', *_usage(verb), ".PP"]
    lines += _paragraphs(verb.description or "")
    lines += _options(verb, ".SS")
    lines += _ends(verb, ".SS")
    for below in verb.verbs().values():
        lines += _verb(below)
    return lines


def _usage(program: Parser) -> list[str]:
    usage = " ".join(program.format_usage().removeprefix("usage: ").split())
    return [".nh", ".ad l", f"{_text(usage)}", ".ad", ".hy"]


def _options(program: Parser, heading: str) -> list[str]:
    lines = []
    for group in program._action_groups:
        shown = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if not shown:
            continue
        lines.append(f'{heading} "{_text((group.title or "").upper())}"')
        for action in shown:
            if isinstance(action, argparse._SubParsersAction):
                for choice in action._choices_actions:
                    lines += [".TP", f"\\fB{_text(choice.dest)}\\fR", _text(choice.help or "")]
            else:
                lines += [".TP", _invocation(action), _text(_help(program, action)) or "\\&"]
    return lines


def _invocation(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return f"\\fI{_text(metavar)}\\fR"
    flags = ", ".join(f"\\fB{_text(flag)}\\fR" for flag in action.option_strings)
    if action.nargs == 0:
        return flags
    value = f"\\fI{_text('|'.join(map(str, action.choices)) if action.choices else metavar)}\\fR"
    return f"{flags}[={value}]" if action.nargs == "?" else f"{flags} {value}"


def _help(program: Parser, action: argparse.Action) -> str:
    return program._get_formatter()._expand_help(action) if action.help else ""


def _ends(program: Parser, heading: str) -> list[str]:
    """Examples, the shape of JSON, exit statuses."""
    lines = []
    if program.examples:
        lines += [f"{heading} EXAMPLES", ".nf", *map(_text, program.examples), ".fi"]
    if program.shape:
        lines += [f'{heading} "OUTPUT OF \\-\\-JSON"', _text(program.shape)]
    last = (program.epilog or "").split("\n\n")[-1]
    if last.startswith("exit status: "):
        lines += [f'{heading} "EXIT STATUS"', _text(" ".join(last.removeprefix("exit status: ").split()))]
    return lines


def _paragraphs(text: str) -> list[str]:
    return [_text(" ".join(text.split()))] if text.strip() else []


def _text(text: str) -> str:
    """Text as roff takes it: no character of it is a command."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("\N{NO-BREAK SPACE}", " ").replace("`", "\\(ga")
    escaped = escaped.replace("'", "\\(aq").replace("^", "\\(ha").replace("~", "\\(ti").replace("µ", "\\[u00B5]")
    return f"\\&{escaped}" if escaped.startswith(".") else escaped
