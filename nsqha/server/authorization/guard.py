"""Who calls, and whether they may: the question that every surface of a daemon with an access file asks.

    a token that is shown          decides alone, also where its holder could do more without it
    else a verified certificate    by the URIs in its subjectAltName, if they give it a role
    else                           `anonymous`

A token that is wrong, or has expired, is refused even where nobody needs one: a deployment with a stale token fails on
the day it goes stale. Nothing is awaited; a check costs one SHA-256 and two look-ups.
"""

from __future__ import annotations

from collections import Counter

from nsqha.access.attempts import WrongTokens
from nsqha.access.roles import Grant, Need
from nsqha.access.surfaces import writes_audit
from nsqha.access.tokens import NEVER, TOKEN_BYTES_MAX, AccessTable, Token
from nsqha.clock import Clock
from nsqha.nsqlog import Logger
from nsqha.server.authorization.access_file import AccessFile
from nsqha.server.runtime.rare_warnings import RareWarnings, host_of

UNAUTHORIZED, FORBIDDEN, TOO_MANY = 401, 403, 429

_CODES = {UNAUTHORIZED: "UNAUTHORIZED", FORBIDDEN: "FORBIDDEN", TOO_MANY: "TOO_MANY_WRONG_TOKENS"}
CODES = frozenset(_CODES.values())

UNKNOWN = "unknown"
"""Who showed a token that the file does not have."""

logger = Logger("access")


class Denied(Exception):
    """A request is refused; `why` may be shown to who asked, who is `who` as far as that is known."""

    def __init__(self, status: int, why: str, who: str) -> None:
        super().__init__(why)
        self.status = status
        self.code = _CODES[status]
        self.why = why
        self.who = who


class Guard:
    """The access of one daemon."""

    def __init__(self, file: AccessFile, clock: Clock, audit_topic: str = "") -> None:
        """`audit_topic`: the topic that only the daemons and administrators change; empty: there is none."""
        self.file = file
        self.audit_topic = audit_topic
        self.refused: Counter[int] = Counter()  # requests, by status
        self._clock = clock
        self._wrong = WrongTokens()
        self._said = RareWarnings(logger, "access_refused")

    @classmethod
    def of(cls, path: str, clock: Clock, audit_topic: str = "") -> Guard | None:
        """None without a file. ConfigError if it can not be used."""
        return cls(AccessFile(path, clock), clock, audit_topic) if path else None

    @property
    def table(self) -> AccessTable:
        return self.file.table

    @property
    def figures(self) -> tuple[tuple[str, int], ...]:
        """Requests that were refused, by status."""
        return tuple((str(status), count) for status, count in sorted(self.refused.items()))

    def allow(
        self,
        need: Need,
        address: str,
        authorization: str | None,
        topic: str | None = None,
        *,
        certified: Grant | None = None,
    ) -> Grant:
        """Who may do this. Denied. `address`: host:port; `authorization`: the value of such a header; `topic`: what
        the request names; `certified`: what a verified certificate grants."""
        if authorization is not None:
            grant = self.token(bearer(authorization), address).grant
        elif certified is not None and certified.roles:
            grant = certified
        else:
            grant = self.table.anonymous
        self.check(need, grant, address, topic)
        return grant

    def check(self, need: Need, grant: Grant, address: str, topic: str | None = None) -> None:
        """Denied, unless the caller has what is needed."""
        if grant.may(need, topic):
            if topic is None or topic != self.audit_topic:
                return
            need = writes_audit(need)
            if grant.may(need):
                return
        anonymous = grant is self.table.anonymous
        which = f" for the topic {topic}" if topic is not None and need.roles & grant.roles else ""
        who = "callers without a token" if anonymous else grant.who
        why = f"this needs the role {need}{which}, which {who} {'do' if anonymous else 'does'} not have"
        raise self.denied(UNAUTHORIZED if anonymous else FORBIDDEN, address, why, grant.who)

    def may(self, need: Need, grant: Grant, topic: str) -> bool:
        """As `check`; nothing is counted or logged."""
        if topic == self.audit_topic and not grant.may(writes_audit(need)):
            return False
        return grant.may(need, topic)

    def token(self, text: bytes, address: str) -> Token:
        """The token with this text. Denied: there is none, its time is over, or the address has guessed too often; that
        is nothing to others there who show a right one, as behind a proxy all have one address."""
        found = self.file.table.find(text) if len(text) <= TOKEN_BYTES_MAX else None
        if found is None:
            host, now = host_of(address), self._clock.monotonic()
            if self._wrong and self._wrong.too_many(host, now):
                why = "too many wrong tokens came from this address; try again in a second"
                raise self.denied(TOO_MANY, address, why)
            self._wrong.wrong(host, now)
            raise self.denied(UNAUTHORIZED, address, "the access file does not have this token")
        if found.expires != NEVER and found.expired(self.file.seconds):
            why = f"the token {found.name} has expired: `nsqha access token {found.name}` makes another"
            raise self.denied(UNAUTHORIZED, address, why, found.name)
        return found

    def denied(self, status: int, address: str, why: str, who: str = UNKNOWN) -> Denied:
        """Count a refusal; the error to raise."""
        self.refused[status] += 1
        self._said.warning("%s: %s", address, why)
        return Denied(status, why, who)


def bearer(authorization: str) -> bytes:
    """The token of `Authorization: Bearer TOKEN`; what is of another form is a wrong token."""
    scheme, _, token = authorization.partition(" ")
    return token.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
