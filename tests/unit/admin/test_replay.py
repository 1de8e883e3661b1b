"""Where a seek to a time goes to, in one partition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.admin import replay
from nsqha.pb.v1 import admin_pb2


@pytest.mark.parametrize(("time", "offset"), [(0, 0), (100, 0), (101, 3), (200, 3), (201, 5)])
def test_a_time_later_than_the_log_is_its_end_as_it_is(
    time: int, offset: int
) -> None:
    """Not the end as it will be: what is written until the seek is, too, must not be passed over."""
    batches = [SimpleNamespace(timestamp_ns=100, first_offset=0), SimpleNamespace(timestamp_ns=200, first_offset=3)]
    log = SimpleNamespace(
        entry_for_time=lambda time: next((each for each in batches if each.timestamp_ns >= time), None),
        end=SimpleNamespace(offset=5),
    )
    target = admin_pb2.SeekTarget(timestamp_ns=time, clock_skew_ns=0)
    partition = cast(Any, SimpleNamespace(log=log))
    assert replay._offset_of(partition, target, 0, "t") == offset
