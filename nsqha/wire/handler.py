"""What a session of the V2 protocol asks of the shell, one interface for each group of commands.

Whatever is answered must leave in the order of these calls. After any call `FlowHandler.blocked` may be True: the
session keeps the remaining bytes until `Session.resume`. A handler that ends the connection calls `Session.kill`.
"""

from __future__ import annotations

from typing import Protocol

from nsqha.wire.identify import AgreedIdentify


class FlowHandler(Protocol):
    """Whether the next command may run, and the end of the connection."""

    @property
    def blocked(self) -> bool: ...

    def enter(self) -> bool:
        """Whether commands may be run one by one now, until `leave`. If not, the handler is `blocked` until then."""

    def leave(self) -> None:
        """They were run."""

    def rest(self) -> None:
        """Many commands were run, and there may be many more: the handler may be `blocked` until others had a turn."""

    def fatal(self, data: bytes) -> None:
        """Send this error frame after all replies owed, then close."""

    def hang_up(self) -> None:
        """Close after all replies owed, without a frame."""


class PublishHandler(Protocol):
    """PUB, MPUB and DPUB."""

    def check_publish(self, command: str, topic: str) -> bool:
        """Whether the client may publish; asked while `PublishCommands.checks`. If not: the handler has refused it and
        ended the connection, or is `blocked` until it knows; then the command runs again, this check first."""

    def named_partitions(self, topic: str) -> int:
        """How many partitions of the topic a command may name, as clients of the Youzan fork do: 0 if such words are
        ignored."""

    def ensure_topic(self, topic: str) -> None:
        """MPUB creates its topic before it looks at the body."""

    def publish(self, topic: str, frames: bytes, count: int, command: str, partition: int | None) -> None:
        """Store `count` blank frames, in any partition if none is named; answer OK `count` times for PUB, once for
        MPUB."""

    def publish_deferred(self, topic: str, frame: bytes, delay_ms: int, partition: int | None) -> None:
        """Store one blank frame; answer OK."""


class ConsumeHandler(Protocol):
    """SUB, RDY and CLS."""

    def subscribe(self, topic: str, channel: str, partition: int | None) -> None:
        """Deliver from one partition, or from all if none is named.

        Check authorization and limits, then answer OK or fail fatally. Sets `ConsumeCommands.acks` before the OK."""

    def named_partitions(self, topic: str) -> int:
        """As `PublishHandler.named_partitions`."""

    def ready(self, count: int) -> None:
        """RDY; no answer."""

    def cls(self) -> None:
        """Deliver nothing more; answer CLOSE_WAIT."""


class AckHandler(Protocol):
    """FIN, REQ and TOUCH of a client that has subscribed."""

    def fin_run(self, data: bytes, pos: int, end: int, singly: int) -> int:
        """Complete lines `FIN <16 bytes>`, 21 bytes each; answer only what fails. Where it stopped: at the end, or
        behind as many as had to be looked at one by one, where others are to have their turn."""

    def req(self, message_id: bytes, delay_ms: int) -> None:
        """No answer unless it fails."""

    def touch(self, message_id: bytes) -> None:
        """No answer unless it fails."""


class NegotiationHandler(Protocol):
    """IDENTIFY and AUTH."""

    def identify(self, request: AgreedIdentify) -> None:
        """Apply, answer with the request's reply, upgrade (`UnreadBytes.take` tells what came too early)."""

    def auth(self, secret: bytes) -> None:
        """Ask the authorization server; answer or fail fatally."""
