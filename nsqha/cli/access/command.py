"""`nsqha access`: make a token for the file of --access-file, and check such a file."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any

from nsqha.access.roles import BY_TOPIC, GRANTED
from nsqha.access.tokens import FILE_BYTES_MAX, NAME, PREFIX, AccessTable, entry, parse
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_json, add_verb, did_you_mean, duration
from nsqha.cli.terminal.screen import print_json, say
from nsqha.errors import ConfigError

TOKEN_BYTES = 32


def add_parser(commands: Any) -> None:
    group = add_verb(commands, "access", None, help="tokens of the access file: make one, check the file")
    verbs = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_token(verbs)
    _add_check(verbs)


def _add_token(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "token",
        run_token,
        help="make a token, show it once, and write its lines for the access file",
        examples=(
            "nsqha access token prometheus --role viewer",
            "nsqha access token billing --role publisher --topics invoices --topics 'invoices.*' --expires 90d",
            "nsqha access token ops --role operator --role reader --file access.toml --output ops.token",
        ),
        description="Make a token, and show it once, or write it to --output, which only its owner can read. Its lines "
        "for the access file have only its SHA-256: they are printed, or appended to --file, which running daemons "
        "read within two seconds.",
        shape='{"name", "token": null with --output, "entry", "file", "output"}',
        statuses=(exits.USAGE, exits.CONFLICT),
    )
    verb.add_argument("name", metavar="NAME", type=_name, help="who will use it; audit records show it")
    roles = ", ".join(GRANTED)
    verb.add_argument("--role", metavar="ROLE", action="append", required=True, type=_role, help=f"one of {roles}")
    verb.add_argument(
        "--topics",
        metavar="PATTERN",
        action="append",
        default=[],
        help="of publisher and consumer; * is any text; not given: all topics",
    )
    verb.add_argument("--expires", metavar="WHEN", type=_expires, help="2027-01-31, or 90d from now on")
    verb.add_argument("--file", metavar="PATH", default="", help="append the lines to this access file")
    verb.add_argument("--output", metavar="PATH", default="", help="write the token to this file, and do not show it")
    add_json(verb)


def _add_check(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "check",
        run_check,
        help="say whether a daemon would take an access file, and what is in it",
        examples=("nsqha access check access.toml",),
        shape='{"anonymous", "tokens": [{"name", "roles", "topics", "expires", "expired"}]}',
        statuses=(exits.USAGE,),
    )
    verb.add_argument("file", metavar="PATH")
    add_json(verb)


def run_token(args: argparse.Namespace) -> int:
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    lines = entry(args.name, token, dict.fromkeys(args.role), args.topics, args.expires or "")
    try:
        parse(lines.encode())
    except ConfigError as error:
        raise exits.Exit(exits.USAGE, str(error)) from None
    with contextlib.ExitStack() as written:
        # Replaced in the other order: a token that daemons do not know yet must not take the place of one that they do.
        if args.output:
            _write(written, "--output", args.output, f"{token}\n", new_mode=True)
        if args.file:
            _write(written, "--file", args.file, _with_entry(args.file, args.name, lines))
    if (by_topic := sorted(BY_TOPIC.intersection(args.role))) and not args.topics:
        say(f"without --topics {args.name} is {' and '.join(by_topic)} of all topics")
    if args.json:
        shown = None if args.output else token
        print_json(
            {
                "name": args.name,
                "token": shown,
                "entry": lines,
                "file": args.file or None,
                "output": args.output or None,
            }
        )
        return exits.OK
    if not args.output:
        print(token)
    where = f"the token is in {args.output}" if args.output else "the token is shown this once"
    if args.file:
        say(f"{where}; {args.file} has its SHA-256 as tokens.{args.name}")
    else:
        say(f"{where}; these lines are for the access file:\n\n{lines}")
    return exits.OK


def run_check(args: argparse.Namespace) -> int:
    from nsqha.server.authorization.access_file import read_table

    try:
        table, now = read_table(args.file), datetime.now(UTC).timestamp()
    except ConfigError as error:
        raise exits.Exit(exits.USAGE, str(error)) from None
    shown: list[dict[str, Any]] = [
        {
            "name": token.name,
            "roles": [role.value for role in GRANTED if role in token.grant.roles],
            "topics": list(token.grant.topics.patterns),
            "expires": None if token.expires == float("inf") else _written(token.expires),
            "expired": token.expired(now),
        }
        for token in table.tokens
    ]
    anonymous = [role.value for role in GRANTED if role in table.anonymous.roles]
    if args.json:
        print_json({"anonymous": anonymous, "tokens": shown})
        return exits.OK
    print(f"anonymous: {', '.join(anonymous) or 'nothing'}")
    for token in shown:
        until = f", {'expired' if token['expired'] else 'until'} {token['expires']}" if token["expires"] else ""
        print(f"{token['name']}: {', '.join(token['roles'])} ({', '.join(token['topics'])}){until}")
    return exits.OK


def _with_entry(path: str, name: str, lines: str) -> str:
    """What the access file has with these lines too."""
    there = _read(path) if os.path.exists(path) else b""
    table = _parsed(path, there)
    if any(token.name == name for token in table.tokens):
        raise exits.Exit(
            exits.CONFLICT, f"{path} has a token {name} already; remove its table first, or take another name"
        )
    text = there.decode()
    return text + ("" if not text else "\n" if text.endswith("\n") else "\n\n") + lines


def _write(written: contextlib.ExitStack, flag: str, path: str, text: str, *, new_mode: bool = False) -> None:
    """Write beside the file, and replace it when `written` closes without an error: no daemon ever reads a half of it,
    and where anything fails it is what it was. A link stays one. It keeps its owner and mode, or with `new_mode` is for
    its owner alone, as one that is new."""
    path = os.path.realpath(path)
    new = f"{path}.new"

    def replace(kind: object, *_: object) -> None:
        if kind is not None:
            os.unlink(new)
            return
        try:
            os.replace(new, path)
        except OSError as error:
            raise exits.Exit(exits.USAGE, f"{flag}={path}: {error.strerror}") from None

    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            if os.path.exists(path) and not new_mode:
                found = os.stat(path)
                os.fchmod(file.fileno(), found.st_mode & 0o770)
                if (found.st_uid, found.st_gid) != (os.getuid(), os.getgid()):
                    os.fchown(file.fileno(), found.st_uid, found.st_gid)
            os.fsync(file.fileno())
        written.push(replace)
    except OSError as error:
        raise exits.Exit(exits.USAGE, f"{flag}={path}: {error.strerror}") from None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise exits.Exit(exits.USAGE, f"{path}: {error.strerror}") from None


def _parsed(path: str, text: bytes) -> AccessTable:
    try:
        return parse(text)
    except ConfigError as error:
        raise exits.Exit(exits.USAGE, f"{path}: {error}") from None


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- types of arguments


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name: 1 to 64 of A-Z a-z 0-9 . _ -")
    return text


def _role(text: str) -> Any:
    for role in GRANTED:
        if role == text:
            return role
    known = ", ".join(GRANTED)
    raise argparse.ArgumentTypeError(f"{text!r} is no role{did_you_mean(text, GRANTED)}: one of {known}")


def _expires(text: str) -> str:
    """As the file has it: a date, or a time."""
    now, given = datetime.now(UTC), text
    try:
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        pass
    else:
        if day <= now:
            raise argparse.ArgumentTypeError(f"{text} has begun already (UTC): a token ends with the beginning of it")
        return day.strftime("%Y-%m-%d")
    if text.endswith("d") and text[:-1].isdecimal() and len(text) < 7:
        text = f"{int(text[:-1]) * 24}h"
    if text[:1].isdecimal() and not text[-1:].isdecimal():
        lifetime = timedelta(microseconds=duration(text) // 1000)
        if lifetime < timedelta(seconds=1):
            raise argparse.ArgumentTypeError(f"{given!r} would have expired at once")
        return _written((now + lifetime).timestamp())
    raise argparse.ArgumentTypeError(f"{text!r} is neither a date, as in 2027-01-31, nor a time from now on, as in 90d")
