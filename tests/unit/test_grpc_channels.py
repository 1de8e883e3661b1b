"""What a channel of gRPC's client costs while nothing happens on it."""

from __future__ import annotations

from grpc import _common

from nsqha.grpc_channels import LOOK_SECONDS


def test_a_thread_that_waits_in_grpc_looks_up_once_a_second():
    waited: list[float] = []
    _common.wait(lambda timeout: waited.append(timeout), lambda: len(waited) == 3)
    assert waited == [LOOK_SECONDS] * 3 == [1.0] * 3


def test_a_deadline_is_kept_all_the_same():
    waited: list[float] = []
    assert _common.wait(lambda timeout: waited.append(timeout), lambda: False, timeout=0.0)
    assert all(each <= 0.0 for each in waited)
