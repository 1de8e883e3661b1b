"""How much of what one HTTP connection sent is parsed in a turn; time is what the test says that parsing takes."""

from __future__ import annotations

from collections.abc import Callable

from nsqha.server.http.reading import FAST_BYTES, PART_SECONDS, PIECE_BYTES, ReadParts
from nsqha.server.runtime.budget import FRESH_SECONDS, SharedTurns

READ_BYTES = 256 << 10


class Parsing:
    """A connection whose parser takes `cost` for each piece, and a loop that runs turn by turn."""

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.now = 0.0
        self.fed = b""
        self.reading = True
        self.soon: list[Callable[[], None]] = []
        self.parts = ReadParts(self, SharedTurns(self, lambda: self.now), lambda: self.now)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        due, self.soon = self.soon, []
        for callback in due:
            callback()

    def feed(self, data: bytes) -> None:
        self.fed += data
        self.now += self.cost

    def pause_source(self) -> None:
        self.reading = False

    def resume_source(self) -> None:
        self.reading = True


def data_of(size: int) -> bytes:
    return bytes(n % 251 for n in range(size))


def test_what_is_dear_to_parse_is_parsed_over_many_turns_and_in_order() -> None:
    rig, sent = Parsing(cost=PART_SECONDS), data_of(READ_BYTES)
    rig.parts.take(sent)
    assert rig.fed == sent[:PIECE_BYTES] and not rig.reading
    turns = 0
    while not rig.reading:
        before = len(rig.fed)
        rig.turn()
        assert len(rig.fed) - before <= PIECE_BYTES
        turns += 1
    assert rig.fed == sent and turns == READ_BYTES // PIECE_BYTES - 1


def test_what_is_cheap_is_parsed_at_once_and_then_others_have_their_turn() -> None:
    rig, sent = Parsing(cost=0.0), data_of(READ_BYTES)
    rig.parts.take(sent)
    assert rig.fed == sent and not rig.reading, "there is more in the socket"
    rig.turn()
    assert rig.reading and not rig.soon


def test_an_ordinary_request_never_rests() -> None:
    rig = Parsing(cost=2 * PART_SECONDS)
    for size in (1, 100, PIECE_BYTES):
        rig.parts.take(data_of(size))
        assert rig.reading and not rig.parts.resting
    rig.cost = 0.0
    rig.parts.take(data_of(FAST_BYTES))
    assert rig.reading and not rig.parts.resting
    rig.turn()
    assert not rig.soon


def test_reads_that_are_small_but_many_rest_and_stay_in_order() -> None:
    rig, sent = Parsing(cost=FRESH_SECONDS), data_of(1_000)
    for part in (sent[:100], sent[100:200]):
        assert rig.reading
        rig.parts.take(part)
    assert rig.fed == sent[:100] and not rig.reading
    rig.parts.take(sent[200:])
    while not rig.reading:
        rig.turn()
    assert rig.fed == sent


def test_what_comes_meanwhile_is_behind_what_is_kept() -> None:
    rig, sent = Parsing(cost=PART_SECONDS), data_of(3 * PIECE_BYTES)
    rig.parts.take(sent)
    rig.reading = True  # the parser's owner had its own reasons
    rig.parts.take(b"more")
    assert not rig.reading
    rig.parts.take(b"")
    for _ in range(5):
        rig.turn()
    assert rig.fed == sent + b"more" and rig.reading


def test_what_a_connection_leaves_is_not_parsed() -> None:
    rig = Parsing(cost=PART_SECONDS)
    rig.parts.take(data_of(READ_BYTES))
    fed = rig.fed
    rig.parts.end()
    rig.turn()
    assert rig.fed == fed and not rig.soon
