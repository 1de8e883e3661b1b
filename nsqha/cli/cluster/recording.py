"""The audit of the verbs that write into etcd: a record there, which the controller takes (`nsqha.election.recorded`).

    with asked(store.intents, args, "move", "topic=orders partition=0") as asked_for:
        ...                                # what is refused here is recorded as refused
        with asked_for.change():           # recorded first, without an outcome
            ...                            # the change

A change whose record can not be begun is not made. Of what was asked for, a mistyped command line is not recorded, nor
what the user did not confirm.
"""

from __future__ import annotations

import argparse
import os
import pwd
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.screen import say
from nsqha.election.recorded import WAITING_MAX, RecordedChange, recorded_name, waiting
from nsqha.election.store import MetadataIntents
from nsqha.errors import Conflict, NotFound, NsqhaError, OutcomeUnknown, Unavailable
from nsqha.options import host_name

DONE = "done"
_CODES = {
    exits.FAILED: "FAILED",
    exits.CONFLICT: "CONFLICT",
    exits.NOT_ALLOWED: "NOT_ALLOWED",
    exits.NOT_FOUND: "NOT_FOUND",
    exits.UNREACHABLE: "UNREACHABLE",
}
UNRECORDED = f"more than {WAITING_MAX} records of changes wait for a controller in etcd: this change has none"


class Asked:
    """One change that a verb was asked for."""

    def __init__(self, intents: MetadataIntents, record: RecordedChange) -> None:
        self.recorded = False
        self._intents = intents
        self._record = record
        self._name = recorded_name(secrets.randbits(64))
        self._version = 0
        self._began = time.perf_counter()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Within it the change is made. Raises what the store raises, and then the change was not begun."""
        self.recorded = True
        if not self._has_room():
            yield
            return
        self._version = self._intents.put(self._name, self._record.intent()).version
        try:
            yield
        except BaseException as error:
            self._end(_outcome(error))
            raise
        self._end(DONE)

    def refused(self, outcome: str) -> None:
        """Nothing was changed."""
        self.recorded = True
        if self._has_room():
            self._end(outcome)

    def planned(self) -> None:
        """Only the plan was asked for."""
        self._record = replace(self._record, plan=True)
        self.refused(DONE)

    def _has_room(self) -> bool:
        room = waiting(self._intents.all()) < WAITING_MAX
        if not room:
            say(UNRECORDED)
        return room

    def _end(self, outcome: str) -> None:
        """Say how it ended. Where etcd does not take that, the record says that it is not known."""
        record = replace(self._record, outcome=outcome, took=time.perf_counter() - self._began)
        try:
            self._intents.put(self._name, record.intent(), expected_version=self._version)
        except NsqhaError as error:
            say(f"how this ended is not recorded for the audit: {error}")


@contextmanager
def asked(intents: MetadataIntents, args: argparse.Namespace, method: str, target: str) -> Iterator[Asked]:
    """A verb is asked for a change; what it refuses before it changes anything is recorded, too."""
    found = Asked(intents, RecordedChange(_who(args), host_name(), f"cluster {method}", target))
    try:
        yield found
    except exits.Exit as error:
        if not found.recorded and (code := _CODES.get(error.status)):
            with suppress(NsqhaError):  # the refusal is what the user has to see
                found.refused(f"refused: {code}")
        raise


def _outcome(error: BaseException) -> str:
    if isinstance(error, Conflict):
        return "failed: CONFLICT"
    if isinstance(error, NotFound):
        return "failed: NOT_FOUND"
    if isinstance(error, exits.Exit) and (code := _CODES.get(error.status)):
        return f"failed: {code}"
    if isinstance(error, OutcomeUnknown | Unavailable):
        return "unknown: UNAVAILABLE"
    return "unknown: INTERRUPTED" if isinstance(error, KeyboardInterrupt) else f"unknown: {type(error).__name__}"


def _who(args: argparse.Namespace) -> str:
    """The user of this host, and what etcd is shown: nobody has verified the first."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = f"uid {os.getuid()}"
    if args.etcd_user:
        return f"{user} (etcd user {args.etcd_user})"
    return f"{user} (etcd certificate {os.path.basename(args.etcd_cert)})" if args.etcd_cert else user
