"""What one connection may do: its secret, and what the auth server said of it last.

Owner of the answer for as long as the connection lives. It holds for its time to live; whoever finds it expired asks
again with the same secret before anything else is allowed (`auth` has the protocol and the expressions). Which command
asks when, and what a refusal does to the connection, is the connection's.
"""

from __future__ import annotations

import ssl

from nsqha.clock import Clock
from nsqha.server.clients.auth import AuthClient, AuthFailed, AuthState, Question, denial
from nsqha.server.runtime.tls import common_name


class Permissions:
    """The permissions of one connection."""

    __slots__ = ("_client", "_clock", "secret", "state")

    def __init__(self, client: AuthClient | None, clock: Clock) -> None:
        self.secret = b""
        self.state: AuthState | None = None  # None: no AUTH yet
        self._client = client
        self._clock = clock

    @property
    def needed(self) -> bool:
        """Whether this node asks for AUTH at all."""
        return self._client is not None

    @property
    def expired(self) -> bool:
        """Whether the answer there is has to be asked for again."""
        return self.state is not None and self.state.expired(self._clock.monotonic())

    async def ask(self, remote_address: str, tls: ssl.SSLObject | None) -> bool:
        """Ask the auth server what the secret may do; False if no answer came, and the last one stays."""
        assert self._client is not None
        host = remote_address.rpartition(":")[0].strip("[]")
        try:
            self.state = await self._client.ask(Question(self.secret, host, tls is not None, common_name(tls)))
        except AuthFailed:
            return False
        return True

    def denial(self, command: str, topic: str, channel: str = "") -> bytes | None:
        """The error with which the command is refused; None if it is allowed."""
        return denial(self.state, command, topic, channel)
