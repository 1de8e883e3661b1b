"""Replies to one client leave in the order of its commands.

The outcome of a publish is not known when the command is read, so each publish takes a `Slot`; whatever is known at the
front of the queue leaves. Messages and heartbeats are not replies and do not wait for it.

Invariants: one frame per command that has a reply, in command order; after a fatal error nothing but it is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.wire import encoder, errors

if TYPE_CHECKING:
    from nsqha.server.connection import Connection

_OK = [encoder.OK * n for n in range(256)]


class Slot:
    """A place in the queue; a publish's outcome fills it."""

    __slots__ = ("close", "command", "data", "ready", "replies")

    def __init__(self, replies: Replies, command: str, data: bytes, *, ready: bool = False) -> None:
        self.replies = replies
        self.command = command
        self.data = data
        self.ready = ready
        self.close = False  # close after writing

    def stored(self) -> None:
        self.ready = True
        self.replies.settle(self)

    def failed(self, why: str) -> None:
        self.data = errors.publish_failed(self.command, why)
        self.ready = self.close = True
        self.replies.publish_failed(self)


class Replies:
    """The replies that one connection owes, in command order."""

    def __init__(self, connection: Connection) -> None:
        self.on_empty: Callable[[], None] | None = None
        self._connection = connection
        self._slots: deque[Slot] = deque()

    def __bool__(self) -> bool:
        return bool(self._slots)

    def publish(self, command: str, count: int) -> Slot:
        """The place of a publish; `count` commands in a row have one outcome, and a reply each if they are PUB."""
        if command == "PUB" and count != 1:
            slot = Slot(self, command, _OK[count] if count < 256 else encoder.OK * count)
        else:
            slot = Slot(self, command, encoder.OK)
        self._slots.append(slot)
        return slot

    def reply(self, data: bytes) -> None:
        """A frame that leaves after the replies of all earlier commands."""
        if self._slots:
            self._slots.append(Slot(self, "", data, ready=True))
        else:
            self._connection.send_reply(data)

    def fatal(self, data: bytes) -> None:
        """An error frame in its turn, then the end."""
        if self._slots:
            slot = Slot(self, "", data, ready=True)
            slot.close = True
            self._slots.append(slot)
        else:
            self._connection.send_messages(data)
            self._connection.close()

    def publish_failed(self, slot: Slot) -> None:
        self._connection.broker.measures.publish_errors[f"E_{slot.command}_FAILED"] += 1
        self.settle(slot)

    def settle(self, slot: Slot) -> None:
        """A slot became ready: write what has no unready reply before it."""
        slots = self._slots
        if not slots or slots[0] is not slot:
            return
        if len(slots) == 1 and not slot.close:
            slots.popleft()
            self._connection.send_reply(slot.data)
        else:
            out = []
            closing = False
            while slots and slots[0].ready and not closing:
                first = slots.popleft()
                out.append(first.data)
                closing = first.close
            if closing:
                slots.clear()
                self._connection.send_messages(b"".join(out))
                self._connection.close()
                return
            self._connection.send_reply(b"".join(out))
        if not slots and self.on_empty is not None:
            self.on_empty()

    def clear(self) -> None:
        """The client is gone."""
        self._slots.clear()
