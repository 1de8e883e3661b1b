"""AUTH: what a secret may do is said by the access file (`token_auth`), or by an HTTP server of the operator's. The
file decides of the tokens that it has; any other secret is for the server, where there is one.

    GET http://HOST/auth?common_name=&remote_ip=10.0.0.7&secret=S&tls=false
    POST the same as JSON, each value a list of one string     (--auth-http-request-method=post)
    200 {"ttl": 3600, "identity": "joe", "identity_url": "...",
         "authorizations": [{"topic": REGEX, "channels": [REGEX], "permissions": ["subscribe", "publish"]}]}

The answer is read as nsqd reads it (`nsqha.gojson`), and holds for `ttl` seconds; the first check after that asks again
with the same secret. Servers are tried from a random one on until one gives a usable answer; none, and the client hears
only "AUTH failed", never why.

Expressions are not anchored, and are read and matched by RE2, as in nsqd: in a time that is proportional to the name,
whatever the expression is. One that RE2 can not read counts as a failed answer. A publish is checked with an empty
channel name, so some channel expression must match the empty string.

A connection's `Permissions` keep its secret and the last answer. An answer that has expired allows nothing: it is asked
for again with the same secret first. Which command asks when, and what a refusal does to the connection, is decided by
what runs the commands.
"""

from __future__ import annotations

import random
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote_plus

import msgspec

from nsqha.clock import Clock
from nsqha.nsqlog import Logger
from nsqha.server.authorization.guard import Denied
from nsqha.server.clients.token_auth import TokenAuth, TokenState
from nsqha.server.runtime.tls import common_name
from nsqha.texts import gojson

if TYPE_CHECKING:
    import aiohttp

ANSWER_BYTES_MAX = 1 << 20
_ACCEPT = "application/vnd.nsq; version=1.0"
_REFUSALS = (401, 403)  # others are of a server that does not work, or is none
_PERMISSIONS = frozenset(("subscribe", "publish"))
ANSWERS_MAX = 1000  # that are remembered of one expression
Matches = Callable[[str], bool]
"""Whether an expression matches anywhere in a name."""


class AuthFailed(Exception):
    """No server gave an answer that can be used. The text is for the log, not for the client."""


class LoginRefused(AuthFailed):
    """A server answered that the client is not to be let in."""


# ---- the decisions


@dataclass(frozen=True, slots=True)
class Authorization:
    topic: Matches
    channels: tuple[Matches, ...]
    permissions: frozenset[str]

    def allows(self, topic: str, channel: str) -> bool:
        if ("subscribe" if channel else "publish") not in self.permissions:
            return False
        return self.topic(topic) and any(matches(channel) for matches in self.channels)


@dataclass(frozen=True, slots=True)
class AuthState:
    """What one connection may do, until `expires_at` (monotonic)."""

    identity: str
    identity_url: str
    authorizations: tuple[Authorization, ...]
    expires_at: float

    def expired(self, now: float) -> bool:
        return now > self.expires_at

    def allows(self, topic: str, channel: str = "") -> bool:
        """Without a channel: may it publish? With one: may it subscribe?"""
        return any(a.allows(topic, channel) for a in self.authorizations)

    def reply_json(self) -> bytes:
        """The response to a successful AUTH."""
        return msgspec.json.encode(
            {
                "identity": self.identity,
                "identity_url": self.identity_url,
                "permission_count": len(self.authorizations),
            }
        )


def denial(state: AuthState | TokenState | None, command: str, topic: str, channel: str = "") -> bytes | None:
    """The text of the fatal error for `command`, or None if it is allowed. `state` must not be expired."""
    if state is None:
        return f"E_AUTH_FIRST AUTH required before {command}".encode()
    if not state.allows(topic, channel):
        return f'E_UNAUTHORIZED AUTH failed for {command} on "{topic}" "{channel}"'.encode()
    return None


@dataclass(frozen=True, slots=True)
class Question:
    """One question to the auth server: which client asks for what."""

    secret: bytes
    remote_ip: str
    tls: bool = False
    common_name: str = ""

    def query(self) -> str:
        """As URL parameters, by name. The secret is bytes and stays what it is."""
        secret, name, ip = quote_plus(self.secret), quote_plus(self.common_name), quote_plus(self.remote_ip)
        return f"common_name={name}&remote_ip={ip}&secret={secret}&tls={self._tls}"

    def json(self) -> bytes:
        fields = {
            "common_name": [self.common_name],
            "remote_ip": [self.remote_ip],
            "secret": [self.secret.decode("utf-8", "replace")],
            "tls": [self._tls],
        }
        return msgspec.json.encode(fields)

    @property
    def _tls(self) -> str:
        return "true" if self.tls else "false"


def endpoint(address: str) -> str:
    """`host:port` means its /auth; anything with a scheme is taken as it is."""
    return address if "://" in address else f"http://{address}/auth"


class _AuthorizationWire(msgspec.Struct):
    topic: str = ""
    channels: list[str] = []
    permissions: list[str] = []


class _AnswerWire(msgspec.Struct):
    ttl: int = 0
    identity: str = ""
    identity_url: str = ""
    authorizations: list[_AuthorizationWire] = []


def read_answer(body: bytes, now: float) -> AuthState:
    """The state that an auth server's 200 describes; AuthFailed says what is wrong with it."""
    try:
        answer = gojson.decode(body, _AnswerWire)
    except ValueError as error:
        raise AuthFailed(f"the answer is not understood: {error}") from error
    if answer.ttl <= 0:
        raise AuthFailed(f"invalid TTL {answer.ttl} (must be >0)")
    found = tuple(_authorization(a) for a in answer.authorizations)
    return AuthState(answer.identity, answer.identity_url, found, now + answer.ttl)


def _authorization(wire: _AuthorizationWire) -> Authorization:
    permissions = frozenset(wire.permissions)
    if unknown := permissions - _PERMISSIONS:
        raise AuthFailed(f"unknown permission {min(unknown)}")
    return Authorization(_expression(wire.topic), tuple(map(_expression, wire.channels)), permissions)


def _expression(text: str) -> Matches:
    import re2  # here, because a broker without AUTH needs not wait for it

    options = re2.Options()
    options.log_errors = False
    try:
        expression = re2.compile(text, options)
    except re2.error as error:
        why = error.args[0].decode("utf-8", "replace")
        raise AuthFailed(f'can not use the expression "{text}": {why}') from error
    # A search takes 6 us, and each publish is checked.
    return lru_cache(ANSWERS_MAX)(lambda name: expression.search(name) is not None)


# ---- asking


class AuthClient:
    """Asks the configured servers."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        clock: Clock,
        rng: random.Random,
        post: bool = False,
        connect_seconds: float = 2.0,
        request_seconds: float = 5.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._addresses = tuple(addresses)
        self._clock = clock
        self._rng = rng
        self._post = post
        self._seconds = (connect_seconds, request_seconds)
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._logger = Logger("auth")
        self.refused: Counter[str] = Counter()
        """How often a client was not let in: refused, no_answer that can be used, nothing_allowed."""

    async def ask(self, question: Question) -> AuthState:
        """The first usable answer; AuthFailed, after a line in the log, if there is none."""
        start = self._rng.randrange(len(self._addresses))
        failures, why = [], "no_answer"
        for address in self._addresses[start:] + self._addresses[:start]:
            try:
                state = read_answer(await self._fetch(endpoint(address), question), self._clock.monotonic())
            except AuthFailed as error:
                failures.append(f"{address}: {error}")
                why = "refused" if isinstance(error, LoginRefused) else why
                continue
            if not state.authorizations:
                self.refused["nothing_allowed"] += 1
            return state
        self.refused[why] += 1
        reasons = "; ".join(failures)
        self._logger.warning("auth_failed", "AUTH: no usable answer for %s: %s", question.remote_ip, reasons)
        raise AuthFailed(reasons)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _fetch(self, url: str, question: Question) -> bytes:
        import aiohttp
        from yarl import URL

        if self._session is None:
            connect, total = self._seconds
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=total, sock_connect=connect),
                headers={"Accept": _ACCEPT},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        method, body, content_type = "GET", None, {}
        if self._post:
            method, body, content_type = "POST", question.json(), {"Content-Type": "application/json"}
        else:
            url = f"{url}{'&' if '?' in url else '?'}{question.query()}"
        try:
            # encoded: the secret's bytes must arrive as they are, not as yarl would write them.
            request = self._session.request(
                method, URL(url, encoded=True), data=body, headers=content_type, ssl=self._tls or True
            )
            async with request as response:
                if response.status != 200:
                    kind = LoginRefused if response.status in _REFUSALS else AuthFailed
                    raise kind(f"status {response.status}")
                return await _bounded(response)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            # aiohttp may say the whole address, and the secret is in it.
            why = f"{type(error).__name__}: {error}".replace(question.query(), "...").splitlines()[0]
            raise AuthFailed(why) from None


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > ANSWER_BYTES_MAX:
            raise AuthFailed(f"the answer is larger than {ANSWER_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


# ---- one connection


class AskingClient(Protocol):
    """The client that the auth server is asked about."""

    remote_address: str
    tls: ssl.SSLObject | None


class Permissions:
    """What one connection may do: its secret, and what the access file or the auth server said of it last."""

    __slots__ = ("_auth", "_client", "_clock", "_tokens", "secret", "state")

    def __init__(
        self, auth: AuthClient | None, clock: Clock, client: AskingClient, tokens: TokenAuth | None = None
    ) -> None:
        """Without `auth` and `tokens` everything is allowed."""
        self.secret = b""
        self.state: AuthState | TokenState | None = None  # None: no AUTH yet
        self._auth = auth
        self._clock = clock
        self._client = client
        self._tokens = tokens

    @property
    def needed(self) -> bool:
        """Whether this node asks for AUTH at all."""
        return self._auth is not None or self._tokens is not None

    @property
    def asked_again(self) -> bool:
        """Whether each command has to look whether an answer still holds. The access file tells when it changes."""
        return self._auth is not None

    @property
    def expired(self) -> bool:
        """Whether the answer there is has to be asked for again."""
        return self.state is not None and self.state.expired(self._clock.monotonic())

    async def ask(self) -> bool:
        """Ask what the secret may do: the access file, and then the auth server, if that does not have it. False if no
        answer came, and the last one stays."""
        if self._tokens is not None:
            try:
                known = self._tokens.state(self.secret, self._client.remote_address, elsewhere=self._auth is not None)
            except Denied:
                return False
            if known is not None:
                self.state = known
                return True
        assert self._auth is not None
        tls = self._client.tls
        host = self._client.remote_address.rpartition(":")[0].strip("[]")
        try:
            self.state = await self._auth.ask(Question(self.secret, host, tls is not None, common_name(tls)))
        except AuthFailed:
            return False
        return True

    def judge_again(self) -> bool:
        """The access file has changed; False: the token that this client has shown is not worth anything any more."""
        if self._tokens is None or not isinstance(self.state, TokenState):
            return True
        known = self._tokens.still(self.secret)
        if known is not None:
            self.state = known
        return known is not None

    def denial(self, command: str, topic: str, channel: str = "") -> bytes | None:
        """The error with which the command is refused; None if it is allowed."""
        anonymous = None if self._tokens is None else self._tokens.anonymous
        if self.state is None and anonymous is not None and anonymous.allows(topic, channel):
            return None
        return denial(self.state, command, topic, channel)
