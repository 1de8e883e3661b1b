"""How far a led partition has come."""

from __future__ import annotations

from nsqha.server.partition.context import PartitionLifecycle


def test_the_first_reason_to_close_stands() -> None:
    life = PartitionLifecycle()
    life.close("shutting down")
    life.end("the topic was deleted")
    assert (life.closed, life.ended, life.why) == (True, True, "shutting down")


def test_nothing_is_delivered_before_the_epoch_has_begun_and_while_it_is_handed_over() -> None:
    life = PartitionLifecycle()
    assert not life.delivers
    life.serving = True
    assert life.delivers
    life.handing_over = True
    assert not life.delivers
    life.handing_over = False
    assert life.delivers


def test_what_ends_is_closed() -> None:
    life = PartitionLifecycle()
    life.serving = True
    life.end("another leads")
    assert (life.closed, life.why) == (True, "another leads")
    assert life.serving, "who asks why nothing is delivered looks at both"
