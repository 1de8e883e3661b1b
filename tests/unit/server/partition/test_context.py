"""How far a led partition has come."""

from __future__ import annotations

from nsqha.replication.pauses import ProcessPause
from nsqha.server.partition.context import PartitionLifecycle


def test_the_first_reason_to_close_stands() -> None:
    life = PartitionLifecycle(ProcessPause())
    life.close("shutting down")
    life.end("the topic was deleted")
    assert (life.closed, life.ended, life.why) == (True, True, "shutting down")


def test_nothing_is_delivered_before_the_epoch_has_begun_and_while_it_is_handed_over() -> None:
    life = PartitionLifecycle(ProcessPause())
    assert not life.delivers(5.0)
    life.serving = True
    assert life.delivers(5.0)
    life.handing_over = True
    assert not life.delivers(5.0)
    life.handing_over = False
    assert life.delivers(5.0)


def test_nothing_is_delivered_by_a_process_that_stood_still() -> None:
    pause = ProcessPause()
    life = PartitionLifecycle(pause)
    life.serving = True
    pause.tick(5.0)
    assert life.delivers(5.5) and not life.delivers(6.5)


def test_what_ends_is_closed() -> None:
    life = PartitionLifecycle(ProcessPause())
    life.serving = True
    life.end("another leads")
    assert (life.closed, life.why) == (True, "another leads")
    assert life.serving, "who asks why nothing is delivered looks at both"
