"""AUTH with a token of the access file as the secret, and what clients without AUTH may do.

A token is judged at AUTH, and again when the file has changed or a token has expired: then whoever may not do any more
what it does is dropped with an error (`server.clients.connection.Connections.judge_again`). In between nothing is asked
per message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nsqha.access.roles import BY_TOPIC, Grant, Role
from nsqha.access.surfaces import CONSUME, PUBLISH

if TYPE_CHECKING:
    from nsqha.access.tokens import Token
    from nsqha.server.authorization.guard import Guard


class TokenState:
    """What the holder of one token may do, as `server.clients.auth.AuthState` says it of an auth server's answer."""

    __slots__ = ("_guard", "_token", "authorizations", "generation", "identity", "identity_url")

    def __init__(self, guard: Guard, token: Token) -> None:
        self.identity = token.name
        self.identity_url = ""
        self.authorizations = tuple(sorted(token.grant.roles & BY_TOPIC))
        self.generation = guard.file.generation
        self._guard = guard
        self._token = token

    def expired(self, _now: float) -> bool:
        """Whether the file has changed meanwhile."""
        return self.generation != self._guard.file.generation

    def allows(self, topic: str, channel: str = "") -> bool:
        """Without a channel: may it publish? With one: may it subscribe?"""
        return allows(self._guard, self._token.grant, topic, channel)

    def reply_json(self) -> bytes:
        """The response to a successful AUTH."""
        return msgspec.json.encode(
            {"identity": self.identity, "identity_url": "", "permission_count": len(self.authorizations)}
        )


class AnonymousState:
    """What clients without AUTH may do, now."""

    __slots__ = ("_guard",)

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def allows(self, topic: str, channel: str = "") -> bool:
        return allows(self._guard, self._guard.table.anonymous, topic, channel)

    @property
    def needs_no_auth(self) -> bool:
        """Whether clients may publish and consume without."""
        return self._guard.table.anonymous.roles >= {Role.PUBLISHER, Role.CONSUMER}


class TokenAuth:
    """The tokens of one node, for its clients."""

    def __init__(self, guard: Guard) -> None:
        self.anonymous = AnonymousState(guard)
        self._guard = guard

    def state(self, secret: bytes, address: str, *, elsewhere: bool = False) -> TokenState | None:
        """What this secret may do. Denied. `elsewhere`: one that the file does not have is for others: None."""
        if elsewhere and self._guard.table.find(secret) is None:
            return None
        return TokenState(self._guard, self._guard.token(secret, address))

    def still(self, secret: bytes) -> TokenState | None:
        """The same for a client that has shown it before; None: it is not worth anything any more."""
        found = self._guard.table.find(secret)
        return None if found is None or found.expired(self._guard.file.seconds) else TokenState(self._guard, found)


def allows(guard: Guard, grant: Grant, topic: str, channel: str) -> bool:
    return guard.may(CONSUME if channel else PUBLISH, grant, topic)
