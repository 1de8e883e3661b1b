"""The `nsqha` command. Each verb is a module with `add_parser`; it imports what is slow to import only when it runs.

Data goes to stdout, remarks go to stderr. Exit status: 0 ok, 1 failed, 2 usage, 3 not found, 4 exists already or was
changed, 5 not allowed, 6 unreachable or timed out, 7 partly done (stdout lists what), 8 not confirmed,
130 interrupted, 141 stdout was closed (`nsqha.cli.terminal.exits`).

Downwards:

    stats         node, topics and channels on one screen
    pub           publish arguments, lines or files
    tail          what is published from now on
    sub           messages of a channel
    log           log files, offline
    peek          stored messages, without a channel
    seek          move a channel, and undo that
    generate      man pages, completion, and the files of deploy/, from the tables in the code
    check         node, cluster or channel, with the exit statuses of monitoring
    config        settings of a daemon
    explain       what names in logs and answers mean
    completion    scripts for shells
    dev           a broker, or a whole cluster, on this machine
    cluster       the verbs that talk to etcd
    spark         jobs that read the log in parallel
    imports       what another broker has on disk, taken over
    topic         list, show, create, change, pause, empty and delete topics
    channel       the same for channels
    message       single messages of a channel; dead letters
    access        tokens of the access file
    broker        one node of a cluster
    nsqd          the broker with nsqd's flags
    lookupd       a lookup daemon
    daemon_flags  the flags of a daemon as a verb of `nsqha`
    verbs         what `nsqha --help` lists, and where each verb is
    brokers       how verbs reach brokers
    terminal      arguments, tables, times, exit statuses
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

if sys.version_info < (3, 11):  # noqa: UP036 - pip refuses it; somebody may run a checkout, or force it
    sys.exit("nsqha needs Python 3.11 or newer; this is {}.{} ({})".format(*sys.version_info[:2], sys.executable))

if TYPE_CHECKING:
    from nsqha.cli.terminal.parser import Parser


def build_parser(verb: str | None = None) -> Parser:
    """Build the whole command line; or, if `verb` is one, only what that verb needs: the others are only a name."""
    from nsqha import __version__
    from nsqha.cli.terminal.parser import Parser
    from nsqha.cli.verbs import VERBS, module_of

    parser = Parser(
        prog="nsqha",
        description="A durable message broker that unchanged NSQ clients use as if it were nsqd.",
        epilog="`nsqha COMMAND --help` has examples and exit statuses. First steps: nsqha dev",
    )
    parser.add_argument("--version", action="version", version=f"nsqha {__version__}")
    parser.set_defaults(build_parser=build_parser)  # `completion` wants all verbs, and is itself one of them
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, help in VERBS.items():
        if verb in (None, name):
            import_module(module_of(name)).add_parser(commands)
        else:
            commands.add_parser(name, help=help)
    return parser


def main() -> NoReturn:
    """Run one command; ends the process with its exit status."""
    from nsqha.cli.terminal import exits

    exits.run(lambda: _status(sys.argv[1:]))


def _status(argv: list[str]) -> int:
    from nsqha.cli.terminal import exits
    from nsqha.errors import NsqhaError

    prog = "nsqha"
    try:
        args = build_parser(argv[0] if argv else "").parse_args(argv)
        prog = args.parser.prog
        status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = exits.INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; /dev/null takes that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = exits.BROKEN_PIPE
    except NsqhaError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        status = exits.status_of(error)
    return status
