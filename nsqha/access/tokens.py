"""The access file: tokens by name, what each may do, and until when.

    anonymous = ["viewer"]                  # what callers without a token may do; nothing, unless it is said

    [tokens.billing]
    sha256 = "9f86d081884c7d65..."          # of the token; `nsqha access token billing --role publisher` makes one
    roles = ["publisher"]
    topics = ["invoices", "invoices.*"]     # of publisher and consumer; all topics, unless it is said
    expires = 2027-01-01                    # a date, or a time with its zone; never, unless it is said

The file has no secret that can be used: a token is 256 random bits, so its SHA-256 can not be searched for. Anything
in the file that is not understood makes the whole file unusable: a token that does less than was meant is noticed, one
that does more is not.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from typing import Any

from nsqha.access.roles import BY_TOPIC, GRANTED, Grant, Role, TopicPatterns, granted
from nsqha.errors import ConfigError
from nsqha.texts.toml_text import parse_toml

FILE_BYTES_MAX = 4 << 20
WHY_CHARACTERS_MAX = 600
TOKENS_MAX = 10_000
TOKEN_BYTES_MAX = 4096
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
NEVER = float("inf")
ANONYMOUS = "anonymous"
PREFIX = "nsqha_"
"""What tokens that `nsqha access token` makes begin with, so that a search for leaked secrets finds them."""

_DIGEST = re.compile("[0-9a-f]{64}")
_KEYS = ("sha256", "roles", "topics", "expires")
_NOBODY = bytes(32)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the file."""

    name: str
    sha256: bytes
    grant: Grant
    expires: float = NEVER  # seconds since 1970

    def expired(self, now: float) -> bool:
        return now >= self.expires


class AccessTable:
    """What one version of the file says."""

    __slots__ = ("_tokens", "anonymous")

    def __init__(self, tokens: Iterable[Token] = (), anonymous: Grant | None = None) -> None:
        self.anonymous = anonymous or granted(ANONYMOUS, ())
        self._tokens: Mapping[bytes, Token] = {token.sha256: token for token in tokens}

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(self._tokens.values())

    def find(self, token: bytes) -> Token | None:
        """The token with this text, also one that has expired. Equally fast for a right and a wrong one: it is looked
        for by its digest, of which whoever guesses controls nothing, and digests are compared in constant time."""
        digest = hashlib.sha256(token).digest()
        found = self._tokens.get(digest)
        same = hmac.compare_digest(_NOBODY if found is None else found.sha256, digest)
        return found if same else None

    def expired(self, now: float) -> list[Token]:
        return [token for token in self._tokens.values() if token.expired(now)]


def parse(text: bytes) -> AccessTable:
    """The table of a file. ConfigError: one line, not a long one, what is wrong and what to do."""
    try:
        return _table(text)
    except ConfigError as error:
        why = str(error)  # it may show a name of any length
        raise ConfigError(why if len(why) <= WHY_CHARACTERS_MAX else f"{why[:WHY_CHARACTERS_MAX]}...") from None


def _table(text: bytes) -> AccessTable:
    found = parse_toml(text, FILE_BYTES_MAX)
    _only("", found, (ANONYMOUS, "tokens"))
    anonymous = granted(ANONYMOUS, _roles(ANONYMOUS, found.get(ANONYMOUS, []), some=False))
    tables = found.get("tokens", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError("tokens: each token is a table of its own, as in [tokens.NAME]")
    if len(tables) > TOKENS_MAX:
        raise ConfigError(f"it has {len(tables)} tokens, and at most {TOKENS_MAX:,} are read")
    tokens = [_token(name, table) for name, table in tables.items()]
    _check_different(tokens)
    return AccessTable(tokens, anonymous)


def _token(name: str, table: Mapping[str, Any]) -> Token:
    where = f"tokens.{name}"
    if not NAME.fullmatch(name) or name == ANONYMOUS:
        raise ConfigError(f"{name!r} is no name for a token: 1 to 64 of A-Z a-z 0-9 . _ -, and not {ANONYMOUS}")
    _only(where, table, _KEYS)
    digest = table.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        made = "64 lower-case hex digits, as `nsqha access token` prints them; never the token itself"
        raise ConfigError(f"{where}.sha256: it has to be the SHA-256 of the token, {made}")
    roles = _roles(f"{where}.roles", table.get("roles", []), some=True)
    topics = _topics(f"{where}.topics", table["topics"], roles) if "topics" in table else TopicPatterns()
    expires = _expires(f"{where}.expires", table["expires"]) if "expires" in table else NEVER
    return Token(name, bytes.fromhex(digest), granted(name, roles, topics), expires)


def _check_different(tokens: Iterable[Token]) -> None:
    names: dict[bytes, str] = {}
    for token in tokens:
        first = names.setdefault(token.sha256, token.name)
        if first != token.name:
            raise ConfigError(
                f"tokens.{first} and tokens.{token.name} have one sha256, so nobody could tell who used it: "
                f"make another token with `nsqha access token {token.name}`"
            )


def _only(where: str, table: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in table:
        if key not in keys:
            name = f"{where}.{key}" if where else key
            raise ConfigError(f"{name}: there is no such key{_nearest(key, keys)}; known are {', '.join(keys)}")


def _roles(where: str, value: object, *, some: bool) -> frozenset[Role]:
    if not isinstance(value, list) or (some and not value):
        raise ConfigError(f'{where}: it has to be a list of roles, as in ["viewer"]')
    return frozenset(role_of(where, name) for name in value)


def role_of(where: str, name: object) -> Role:
    """The role of this name. ConfigError with the nearest one."""
    for role in GRANTED:
        if role == name:
            return role
    known = ", ".join(GRANTED)
    raise ConfigError(f"{where}: {name!r} is no role{_nearest(str(name), GRANTED)}; roles are {known}")


def _topics(where: str, value: object, roles: Iterable[Role]) -> TopicPatterns:
    if not isinstance(value, list) or not value or not all(isinstance(pattern, str) for pattern in value):
        raise ConfigError(f'{where}: it has to be a list of topics, as in ["orders", "orders.*"]')
    wide = sorted(set(roles) - BY_TOPIC - {Role.VIEWER})
    if wide:
        raise ConfigError(
            f"{where}: topics bound publisher and consumer only, and {wide[0]} is for all topics: "
            f"give {wide[0]} to a token of its own"
        )
    try:
        return TopicPatterns(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _expires(where: str, value: object) -> float:
    """The beginning of a day in UTC, or a moment."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ConfigError(f"{where}: a time needs its zone, as in 2027-01-01T00:00:00Z")
        return value.timestamp()
    if isinstance(value, date):
        return datetime.combine(value, time(), UTC).timestamp()
    raise ConfigError(f"{where}: it has to be a date without quotation marks, as in 2027-01-01")


def _nearest(word: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, [str(name) for name in known], 1, 0.5)
    return f" (did you mean {close[0]}?)" if close else ""


# ---- made by the command line


def entry(name: str, token: str, roles: Iterable[Role], topics: Iterable[str] = (), expires: str = "") -> str:
    """The lines of the file for a new token."""

    def listed(values: Iterable[str]) -> str:
        return "[" + ", ".join(f'"{value}"' for value in values) + "]"

    lines = [
        f"[tokens.{name}]" if "." not in name else f'[tokens."{name}"]',
        f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"',
        f"roles = {listed(roles)}",
    ]
    if topics := tuple(topics):
        lines.append(f"topics = {listed(topics)}")
    if expires:
        lines.append(f"expires = {expires}")
    return "\n".join(lines) + "\n"
