"""What one node has under way at another one, without a stream."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.server.routing import forward_client
from nsqha.server.routing.forward_client import ForwardWindow


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_client, "WINDOW_BYTES", 100)
    monkeypatch.setattr(forward_client, "MESSAGE_BYTES", 40)


def queue_of(*sizes: int) -> Any:
    return deque((f"key {n}", SimpleNamespace(frames=bytes(size), at=float(n))) for n, size in enumerate(sizes))


def sequences(sent: list[Any]) -> list[int]:
    return [one.sequence for one in sent]


def test_a_message_holds_what_fits_and_at_least_one():
    window, queue = ForwardWindow(), queue_of(20, 20, 1, 60)
    assert sequences(window.fill(queue)) == [1, 2]
    assert sequences(window.fill(queue)) == [3]
    assert window.bytes == 41 and len(queue) == 1


def test_a_full_window_takes_nothing_until_an_answer_comes():
    window, queue = ForwardWindow(), queue_of(90, 20)
    assert sequences(window.fill(queue)) == [1]
    assert window.fill(queue) == []
    found = window.take_back(1)
    assert found is not None and found.key == "key 0" and window.bytes == 0
    assert sequences(window.fill(queue)) == [2]


def test_a_publish_that_is_larger_than_the_window_goes_alone():
    window, queue = ForwardWindow(), queue_of(1, 200)
    assert sequences(window.fill(queue)) == [1]
    assert window.fill(queue) == []
    window.take_back(1)
    assert sequences(window.fill(queue)) == [2]


def test_what_was_given_up_still_counts_until_its_answer_comes():
    window, queue = ForwardWindow(), queue_of(20, 20)
    window.fill(queue)
    assert [publish.at for publish in window.give_up(lambda publish: publish.at < 1.0)] == [0.0]
    assert list(window.sent) == [2] and window.bytes == 40
    assert window.take_back(1) is None and window.bytes == 20
    assert window.take_back(1) is None and window.bytes == 20


def test_the_end_of_the_stream_leaves_nothing_under_way():
    window, queue = ForwardWindow(), queue_of(20, 20)
    window.fill(queue)
    assert len(window.clear()) == 2 and not window.sent and window.bytes == 0
