"""The rules for batch readers, switched off: holds and reader channels (see `mutants`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from nsqha.cursor import events
from nsqha.cursor.committed import checkpoint
from nsqha.cursor.committed.holds import NEVER_PASSED, Holds
from nsqha.cursor.committed.state import ChannelState, ChannelTable, PartitionState
from nsqha.cursor.listing import Listing
from nsqha.cursor.requests import ChannelRequests
from tests.mutation import Patch, instead
from tests.unit.cursor.mutant import mutant


@mutant("log start is capped by every live hold when it is applied")
def log_start_passes_holds() -> list[Patch]:
    return [instead(Holds, "lowest", lambda self, timestamp_ns: NEVER_PASSED)]


@mutant("a hold whose time is over holds nothing")
def holds_never_end() -> list[Patch]:
    return [instead(Holds, "live", lambda self, timestamp_ns: dict(self._by_id))]


@mutant("a known hold keeps what it held")
def a_renewed_hold_rises() -> list[Patch]:
    apply = Holds.apply

    def wrong(self: Holds, event: events.LogHold, *, log_start: int, timestamp_ns: int) -> None:
        self._by_id.pop(event.id, None)
        apply(self, event, log_start=log_start, timestamp_ns=timestamp_ns)

    return [instead(Holds, "apply", wrong)]


@mutant("a checkpoint has the holds")
def checkpoint_without_holds() -> list[Patch]:
    write = checkpoint.write

    def wrong(state: PartitionState, body_bytes_max: int) -> Iterator[bytes]:
        copy = state.snapshot()
        copy.holds = Holds()
        return write(copy, body_bytes_max)

    return [patch.object(checkpoint, "write", wrong)]


# ---- reader channels


@mutant("a reader's channel hands out nothing")
def readers_are_served() -> list[Patch]:
    return [instead(ChannelState, "silent", property(lambda self: self.paused))]


@mutant("nothing is deferred in a reader's channel")
def readers_defer() -> list[Patch]:
    move = PartitionState._move_pump

    def wrong(self: PartitionState, offset: int, effects: list[Any]) -> None:
        readers = [channel for channel in self.channels.values() if channel.reader]
        for channel in readers:
            channel.reader = False
        move(self, offset, effects)
        for channel in readers:
            channel.reader = True

    return [instead(PartitionState, "_move_pump", wrong)]


@mutant("a reader's channel is nobody's first channel")
def readers_take_the_backlog() -> list[Patch]:
    return [instead(ChannelTable, "consumed", property(lambda self: bool(self)))]


@mutant("a reader's floor does not go back unless it is asked to")
def readers_go_back() -> list[Patch]:
    return [instead(ChannelRequests, "advance", ChannelRequests.seek)]


@mutant("the kind of a channel is in the log")
def kinds_are_not_written() -> list[Patch]:
    encode = events.ChannelsEvent.encode

    def wrong(self: events.ChannelsEvent) -> bytes:
        return encode(replace(self, channels=Listing.of(c._replace(reader=False) for c in self.channels)))

    return [instead(events.ChannelsEvent, "encode", wrong)]


@mutant("the kind of a channel is in the checkpoint")
def checkpoint_without_kinds() -> list[Patch]:
    write = checkpoint.write

    def wrong(state: PartitionState, body_bytes_max: int) -> Iterator[bytes]:
        copy = state.snapshot()
        for channel in copy.channels.values():
            channel.reader = False
        return write(copy, body_bytes_max)

    return [patch.object(checkpoint, "write", wrong)]
