"""What others may cause as often as they like takes one line in a while."""

from __future__ import annotations

import asyncio

import pytest

from nsqha.nsqlog import Logger
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.peers.identity import MembersOnly
from nsqha.server.runtime.rare_warnings import PAUSE_SECONDS, RareWarnings
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
