"""What a session of the V2 protocol asks of the shell."""

from __future__ import annotations

from typing import Protocol

from nsqha.wire.identify import AgreedIdentify


class Handler(Protocol):
    """What a session calls; the shell's connection.

    Whatever is answered must leave in the order of these calls. After any call `blocked` may be True: the session
    keeps the remaining bytes until `Session.resume`. A handler that ends the connection itself calls `Session.kill`.
    """

    @property
    def blocked(self) -> bool: ...

    def rest(self) -> None:
        """Many commands were run, and there may be many more: the handler may be `blocked` until others had a turn."""

    def fatal(self, data: bytes) -> None:
        """Send this error frame after all replies owed, then close."""

    def hang_up(self) -> None:
        """Close after all replies owed, without a frame."""

    def check_publish(self, command: str, topic: str) -> bool:
        """Whether the client may publish; asked while `Session.checks_publish`. If not: the handler has refused it, or
        is `blocked` until it knows; then the command runs again, this check first."""

    def ensure_topic(self, topic: str) -> None:
        """MPUB creates its topic before it looks at the body."""

    def publish(self, topic: str, frames: bytes, count: int, command: str) -> None:
        """Store `count` blank frames; answer OK `count` times for PUB, once for MPUB."""

    def publish_deferred(self, topic: str, frame: bytes, delay_ms: int) -> None:
        """Store one blank frame; answer OK."""

    def subscribe(self, topic: str, channel: str) -> None:
        """Check authorization and limits, then answer OK or fail fatally."""

    def ready(self, count: int) -> None:
        """RDY; no answer."""

    def fin_run(self, data: bytes, pos: int, end: int) -> None:
        """Complete lines `FIN <16 bytes>`, 21 bytes each; answer only what fails."""

    def req(self, message_id: bytes, delay_ms: int) -> None:
        """No answer unless it fails."""

    def touch(self, message_id: bytes) -> None:
        """No answer unless it fails."""

    def cls(self) -> None:
        """Deliver nothing more; answer CLOSE_WAIT."""

    def identify(self, request: AgreedIdentify) -> None:
        """Apply, answer with the request's reply, upgrade (`Session.take_unread` tells what came too early)."""

    def auth(self, secret: bytes) -> None:
        """Ask the authorization server; answer or fail fatally."""
