"""What all verbs share: one-line errors, help with examples that run, near misses, and where the broker is.

A verb's help ends with its examples (tests run every one of them), the shape of its --json output and its exit
statuses. All of it is in the parser object, so that tests and completion read what people read.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.times import parse_duration

GRPC_ADDRESS = "127.0.0.1:4152"
TCP_ADDRESS = "127.0.0.1:4150"
ETCD_ENDPOINT = "127.0.0.1:2379"
LOOKUPD_ADDRESS = "127.0.0.1:4161"
COLUMNS = 118  # of running text in help; that is the width of what is written by hand

Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with a suggestion."""

    examples: tuple[str, ...] = ()
    shape: str = ""
    times: bool = False
    """Whether a separate word such as -2h is a time and not a flag."""
    usage_status = exits.USAGE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    _gathered = False  # the flags have been parsed already

    def error(self, message: str) -> NoReturn:
        if self.times:
            message = message.replace("@-", "-")
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(self.usage_status)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.times and args is not None:
            args = self._with_times(args)
        if args and args[0].startswith("-") and self.verbs():
            word = args[0].partition("=")[0]
            if word not in self.flags():  # argparse would miss a verb, or take the flag's value for one
                self.error(f"unknown flag {word}; flags of a verb come after it")
        if self.verbs() or self._gathered:
            return super().parse_known_args(args, namespace)
        rest = self._after_dashes()
        before, after = _split(args) if rest is not None and args is not None else (args, [])
        self._gathered = True
        try:  # flags may stand anywhere, also in front of an optional argument
            found, unknown = self.parse_known_intermixed_args(before, namespace)
        finally:
            self._gathered = False
        if rest is not None and after:
            setattr(found, rest.dest, [*getattr(found, rest.dest), *after])
        return found, unknown

    def _after_dashes(self) -> argparse.Action | None:
        """The argument that takes what follows `--`: argparse gives that to the first one that is left."""
        return next((action for action in self.positionals() if str(action.metavar).startswith("-- ")), None)

    def _with_times(self, args: Sequence[str]) -> list[str]:
        """Rewrite times for argparse: `-2h` after a flag becomes part of it as its value, elsewhere it is `@-2h`."""
        words: list[str] = []
        for word in args:
            if not re.fullmatch(r"-\d[\d.a-zµμ]*", word):
                words.append(word)
            elif words and self._takes_value(words[-1]):
                words[-1] += f"={word}"
            else:
                words.append(f"@{word}")
        return words

    def _takes_value(self, word: str) -> bool:
        action = self._option_string_actions.get(word)
        return action is not None and action.nargs is None

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            verb: Parser = getattr(found, "parser", self)
            kind = "flag" if unknown[0].startswith("-") else "argument"
            word = unknown[0].partition("=")[0]
            verb.error(f"unknown {kind} {word}{did_you_mean(word, verb.flags())}")
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse has no hook for this; its own message lists every choice and suggests none.
        choices = action.choices
        if choices is not None and value not in choices:
            names = [str(choice) for choice in choices]
            text = f"{value!r} is unknown{did_you_mean(str(value), names)}: one of {', '.join(names)}"
            raise argparse.ArgumentError(action, text)

    def flags(self) -> list[str]:
        """Every flag of this verb."""
        return [flag for action in self._actions for flag in action.option_strings]

    def verbs(self) -> dict[str, Parser]:
        """The verbs below this one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def positionals(self) -> list[argparse.Action]:
        """The positional arguments, in order."""
        return [action for action in self._actions if not action.option_strings and action.dest != "help"]


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What is before `--`, and what follows it."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" (did you mean x?)"`, or nothing."""
    import difflib

    close = difflib.get_close_matches(word, list(known), 1, 0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def add_verb(
    commands: Any,
    name: str,
    run: Run | None,
    *,
    help: str,
    description: str = "",
    examples: Sequence[str] = (),
    shape: str = "",
    statuses: Sequence[int] | Mapping[int, str] = (),
    times: bool = False,
) -> Parser:
    """Add a verb and its help. `shape` is one line of its --json output; `statuses` may have meanings of their own."""
    parts = []
    if examples:
        parts.append("examples:\n" + "\n".join(f"  {example}" for example in examples))
    if shape:
        parts.append("--json prints:\n" + _wrapped(shape, "  "))
    if statuses:
        meaning = statuses if isinstance(statuses, Mapping) else exits.MEANING
        words = [f"{status} {meaning[status]}".replace(" ", "\N{NO-BREAK SPACE}") for status in sorted(statuses)]
        parts.append(_wrapped(f"exit status: 0 ok, {', '.join(words)}").replace("\N{NO-BREAK SPACE}", " "))
    text = _wrapped(description or help[0].upper() + help[1:] + ".")
    parser: Parser = commands.add_parser(name, help=help, description=text, epilog="\n\n".join(parts))
    parser.examples = tuple(examples)
    parser.shape = shape
    parser.times = times
    if run is not None:
        parser.set_defaults(run=run, parser=parser)
    return parser


def _wrapped(text: str, indent: str = "") -> str:
    """Break lines that are too long; the others stay as they are."""
    lines = []
    for line in text.split("\n"):
        fits = len(indent + line) <= COLUMNS
        lines += (
            [indent + line] if fits else textwrap.wrap(line, COLUMNS, initial_indent=indent, subsequent_indent=indent)
        )
    return "\n".join(lines)


def add_json(parser: Parser, what: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=what)


def add_yes(parser: Parser) -> None:
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")


def add_address(parser: Parser) -> None:
    """Add --address, any port of a broker or the HTTP port of a lookup daemon; flags for one port go before it."""
    help = "a broker's TCP, HTTP or gRPC port, or a lookup daemon's HTTP port; the rest is found ($NSQHA_ADDRESS)"
    parser.add_argument("--address", metavar="HOST:PORT", help=help)


def add_grpc(parser: Parser) -> None:
    """Add --grpc-address: where the administration of the broker is."""
    add_address(parser)
    parser.add_argument(
        "--grpc-address", metavar="HOST:PORT", help=f"its gRPC port (default {GRPC_ADDRESS}, $NSQHA_GRPC_ADDRESS)"
    )
    add_timeout(parser)
    add_token(parser)
    add_certificate(parser)


def add_timeout(parser: Parser, default: str = "10s") -> None:
    """Add --timeout, in nanoseconds."""
    help = f"longest wait for an answer (default {default})"
    parser.add_argument("--timeout", metavar="TIME", type=timeout, default=default, help=help)


CERTIFICATE_INCOMPLETE = "--cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca go together"


class _TokenFile(argparse.Action):
    """Names the file for everything in this process that shows a token, in place of $NSQHA_TOKEN."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        os.environ["NSQHA_TOKEN_FILE"] = values
        os.environ.pop("NSQHA_TOKEN", None)


def add_token(group: Any) -> None:
    """Add --token-file; `brokers.token` reads it."""
    what = "file with a token, for daemons with an --access-file ($NSQHA_TOKEN_FILE, or the token in $NSQHA_TOKEN)"
    group.add_argument("--token-file", metavar="PATH", action=_TokenFile, help=what)


def add_certificate(parser: Parser) -> None:
    """Add flags for brokers whose gRPC port requires a certificate of their cluster's authority."""
    group = parser.add_argument_group("nodes that require a certificate or a secret")
    for name, what in (
        ("cert", "certificate of this client"),
        ("key", "key of --cluster-tls-cert"),
        ("ca", "certificate authority of the cluster"),
    ):
        variable = f"NSQHA_CLUSTER_TLS_{name.upper()}"
        default = os.environ.get(variable, "")
        group.add_argument(f"--cluster-tls-{name}", metavar="PATH", default=default, help=f"{what} (${variable})")
    variable = "NSQHA_CLUSTER_SECRET_FILE"
    what = f"file with the secret of the cluster (${variable})"
    group.add_argument("--cluster-secret-file", metavar="PATH", default=os.environ.get(variable, ""), help=what)


def add_tcp(parser: Parser) -> None:
    """Add --nsqd-tcp-address, where NSQ clients connect, and flags for TLS and AUTH."""
    add_address(parser)
    parser.add_argument(
        "--nsqd-tcp-address", metavar="HOST:PORT", help=f"its TCP port (default {TCP_ADDRESS}, $NSQHA_TCP_ADDRESS)"
    )
    add_timeout(parser)
    _add_security(parser)


def _add_security(parser: Parser) -> None:
    """Add flags for brokers and nsqds with --tls-required or --auth-http-address; `v2security.Security` reads them."""
    group = parser.add_argument_group("brokers with TLS or AUTH")
    group.add_argument("--tls", action="store_true", help="use TLS; each of the following flags implies it")
    for name, what in (
        ("root-ca-file", "certificate authority of the broker (default: those of this system)"),
        ("cert", "client certificate"),
        ("key", "key of --tls-cert"),
    ):
        variable = f"NSQHA_TLS_{name.upper().replace('-', '_')}"
        default = os.environ.get(variable, "")
        group.add_argument(f"--tls-{name}", metavar="PATH", default=default, help=f"{what} (${variable})")
    group.add_argument("--tls-insecure-skip-verify", action="store_true", help="accept any certificate")
    add_token(group)
    group.add_argument("--auth-secret", metavar="SECRET", default="", help="for AUTH ($NSQHA_AUTH_SECRET)")
    group.add_argument("--auth-secret-file", metavar="PATH", default="", help="file with the secret, hidden from `ps`")


def add_etcd(parser: Parser) -> None:
    """Add flags that say where a cluster's metadata are."""
    group = parser.add_argument_group("the cluster")
    given = os.environ.get("NSQHA_ETCD_ENDPOINT", ETCD_ENDPOINT)
    group.add_argument(
        "--etcd-endpoint",
        metavar="HOST:PORT",
        action="append",
        help=f"a member of its etcd, may be repeated (default {ETCD_ENDPOINT}, $NSQHA_ETCD_ENDPOINT)",
    )
    group.add_argument(
        "--cluster-name",
        metavar="NAME",
        default=os.environ.get("NSQHA_CLUSTER_NAME", "nsqha"),
        help="default nsqha, $NSQHA_CLUSTER_NAME",
    )
    for name, what in (
        ("etcd-ca", "certificate authority of etcd; with it TLS is used"),
        ("etcd-cert", "certificate for etcd"),
        ("etcd-key", "key of --etcd-cert"),
        ("etcd-user", "user name for etcd"),
        ("etcd-password-file", "file with the password for etcd"),
    ):
        variable = f"NSQHA_{name.upper().replace('-', '_')}"
        kind, default = "NAME" if name == "etcd-user" else "PATH", os.environ.get(variable, "")
        group.add_argument(f"--{name}", metavar=kind, default=default, help=f"{what} (${variable})")
    parser.set_defaults(etcd_endpoint_default=given)


def add_look(parser: Parser) -> None:
    """Add flags for verbs that only look at a cluster: any daemon of it is enough, else etcd and the nodes."""
    what = f"any broker or lookup daemon of the cluster, HTTP or TCP port (default {LOOKUPD_ADDRESS}, $NSQHA_ADDRESS)"
    parser.add_argument("--address", metavar="HOST:PORT", help=what)
    add_token(parser)
    add_timeout(parser, "3s")
    add_certificate(parser)
    add_etcd(parser)


# ---- types of arguments: ValueError would lose the reason


def duration(text: str) -> int:
    """Nanoseconds."""
    try:
        value = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return value


def timeout(text: str) -> int:
    """Parse a duration above zero to nanoseconds."""
    value = duration(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above zero")
    return value


def hours(text: str) -> str:
    """Check hours of the day, or the word for all of them."""
    from nsqha.election.placement import ALWAYS, Hours

    try:
        return text if text == ALWAYS else str(Hours.of(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """Parse a whole number above zero."""
    if not text.isdecimal() or not 0 < int(text[:20]) < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def count_up_to(most: int) -> Callable[[str], int]:
    """Parse a whole number from 1 to `most`."""

    def bounded(text: str) -> int:
        if (value := count(text)) > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most}")
        return value

    return bounded


def name(text: str) -> str:
    """Parse a name that NSQ accepts."""
    from nsqha.ids import valid_name

    if not valid_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: 1 to 64 of . a-z A-Z 0-9 _ -, optionally #ephemeral")
    return text


def topic_and_partition(text: str) -> tuple[str, int | None]:
    """Parse `orders` or `orders/3`."""
    topic, slash, partition = text.partition("/")
    if slash and not (re.fullmatch("[0-9]{1,9}", partition) and int(partition) < 1024):
        raise argparse.ArgumentTypeError(f"{text!r} is not TOPIC or TOPIC/PARTITION")
    return name(topic), int(partition) if slash else None
