"""What others may cause as often as they like takes one line in a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nsqha.nsqlog import Logger
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.peers.identity import MembersOnly
from nsqha.server.runtime.rare_warnings import ADDRESSES_MAX, PAUSE_SECONDS, RareWarnings, RefusalLog, host_of, shown
from tests.fakes.loop import VirtualLoop


class Lines(Logger):
    """Keeps its warnings."""

    def __init__(self) -> None:
        super().__init__("test")
        self.written: list[tuple[str, str]] = []

    def warning(self, event: str, text: str, *args: object, **fields: object) -> None:
        self.written.append((event, text % args))


def test_one_line_in_a_while_says_how_many_there_were():
    lines = Lines()

    now = 5.0
    warnings = RareWarnings(lines, "stranger_refused", lambda: now)
    for number in range(1000):
        warnings.warning("from %s", number)
    now += PAUSE_SECONDS
    warnings.warning("from %s", "b")
    more = "from b; 999 more since the last of these lines"
    assert lines.written == [("stranger_refused", "from 0"), ("stranger_refused", more)]


class Refusals(Lines):
    """A RefusalLog with a clock and timers of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 5.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.log = RefusalLog(self.warning, "refused", now=lambda: self.now, call_later=self._call_later)

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, callback))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timers and min(self.timers)[0] <= end:
            self.now, callback = self.timers.pop(self.timers.index(min(self.timers)))
            callback()
        self.now = end

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.written]


def test_refusals_are_counted_for_each_address_and_summed_up_without_another_one():
    it = Refusals()
    for number in range(1000):
        it.log.refused(f"10.0.0.7:{number}", "%d GET %s", 404, f"/{number}")
    it.pass_time(3.0)
    it.log.refused("[fd00::1]:5", "%d GET %s", 401, "/other")
    assert it.texts == ["404 GET /0", "401 GET /other"]
    it.pass_time(7.0)
    assert it.texts[2:] == ["10.0.0.7: 999 more in 10 s, the last: 404 GET /999"]
    it.pass_time(PAUSE_SECONDS * 2)
    assert len(it.texts) == 3 and not it.timers, "nothing is left behind"
    it.log.refused("10.0.0.7:1", "%d GET %s", 404, "/again")
    assert it.texts[3:] == ["404 GET /again"]


def test_an_address_that_goes_on_has_a_line_in_ten_seconds():
    it = Refusals()
    for _ in range(100):
        it.log.refused("10.0.0.7:1", "no")
        it.pass_time(0.25)
    assert it.texts == ["no", "10.0.0.7: 39 more in 10 s, the last: no", "10.0.0.7: 40 more in 10 s, the last: no"]


def test_however_many_addresses_there_are_the_lines_are_bounded():
    it = Refusals()
    for number in range(3 * ADDRESSES_MAX):
        it.log.refused(f"[fd00::{number:x}]:1", "no")
    it.pass_time(PAUSE_SECONDS)
    assert len(it.texts) == ADDRESSES_MAX + 2
    assert it.texts[-1] == f"other addresses: {2 * ADDRESSES_MAX - 1} more in 10 s, the last: no"


def test_what_a_peer_sent_is_cut():
    assert shown("a" * 200) == "a" * 200
    assert shown("a" * 15_000) == "a" * 200 + "..."


@pytest.mark.parametrize(("address", "host"), [("1.2.3.4:5", "1.2.3.4"), ("[::1]:5", "::1"), ("@", "@")])
def test_the_host_of_an_address(address: str, host: str):
    assert host_of(address) == host


def test_strangers_that_call_again_and_again_take_one_line(monkeypatch: pytest.MonkeyPatch):
    from nsqha.server.peers import identity

    lines = Lines()
    monkeypatch.setattr(identity, "logger", lines)
    monkeypatch.setattr(identity, "may_call", lambda view, peer, method: False)

    class Server:
        def on_call(self, method: str, answer: object) -> None:
            self.answer = answer

    async def calls() -> None:
        server = Server()
        MembersOnly(server, lambda: None).on_call("Open", None)  # type: ignore[arg-type]
        for _ in range(100):
            with pytest.raises(Exception, match="for nodes of this cluster"):
                await server.answer(PeerIdentity("10.0.0.9:5"), None)  # type: ignore[operator]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(calls())
    assert len(lines.written) == 1
