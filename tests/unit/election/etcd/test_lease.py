"""The lease's thread and whoever stops it share a stream: neither relies on what the other may take away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.clock import ManualClock
from nsqha.election.etcd import lease as etcd_lease
from nsqha.election.etcd.lease import EtcdLease


class LeaseClient:
    options = SimpleNamespace(call_s=1.0)

    def lease_call(self, method: Any, request: Any) -> Any:
        return SimpleNamespace(ID=7, TTL=3)

    endpoint = 0

    def rotate(self, failed: int) -> None: ...


class LeaseStream:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Dropped(EtcdLease):
    """Its stream is there at the first look, and gone at every later one."""

    stream: LeaseStream | None = None

    @property
    def _stream(self) -> Any:
        stream, self.stream = self.stream, None
        return stream

    @_stream.setter
    def _stream(self, stream: Any) -> None:
        self.stream = stream


def lease(kind: type[EtcdLease] = EtcdLease) -> Any:
    return kind(cast(Any, LeaseClient()), ManualClock(), ttl_s=3, lost=lambda: None, trouble=lambda text: None)


def test_a_stream_that_the_thread_drops_meanwhile_does_not_fail_the_stop() -> None:
    stopped = lease(Dropped)
    stopped.stream = stream = LeaseStream()
    stopped.stop(revoke=True)
    assert stream.closed and stopped.gone
    dropping = lease(Dropped)
    dropping.stream = stream = LeaseStream()
    dropping._drop_stream(ValueError("gone"))
    assert stream.closed


def test_a_stream_that_is_opened_while_the_lease_is_stopped_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[LeaseStream] = []
    stopping = lease()

    class Late(LeaseStream):
        def __init__(self, client: Any, endpoint: int, lease_id: int) -> None:
            super().__init__()
            opened.append(self)
            stopping._stopped.set()  # `stop` has looked, and found none

        def renew(self, wait_s: float) -> int:
            return 3

    monkeypatch.setattr(etcd_lease, "_Stream", Late)
    stopping._ticked = stopping._clock.monotonic() + 3
    stopping._clock.advance(3)
    stopping._run()
    assert [stream.closed for stream in opened] == [True]


def test_a_thread_that_can_not_be_started_costs_a_renewal_and_not_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    renewing = lease()
    tried: list[LeaseStream] = []

    class Short(LeaseStream):
        """Of a machine that has no threads left, once."""

        def __init__(self, client: Any, endpoint: int, lease_id: int) -> None:
            super().__init__()
            tried.append(self)
            if len(tried) == 1:
                raise RuntimeError("can't start new thread")

        def renew(self, wait_s: float) -> int:
            renewing._stopped.set()
            return 3

    monkeypatch.setattr(etcd_lease, "_Stream", Short)
    renewing._ticked = renewing._clock.monotonic() + 3
    renewing._clock.advance(3)
    renewing._run()
    assert len(tried) == 2 and renewing.fresh(renewing._clock.monotonic())


def test_the_lease_leaves_an_endpoint_that_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    moving = lease()
    opened: list[tuple[int, LeaseStream]] = []

    class Answering(LeaseStream):
        def __init__(self, client: Any, endpoint: int, lease_id: int) -> None:
            super().__init__()
            opened.append((endpoint, self))

        def renew(self, wait_s: float) -> int:
            return 3

    monkeypatch.setattr(etcd_lease, "_Stream", Answering)
    for endpoint in (0, 0, 2, 2):
        moving._client.endpoint = endpoint
        assert moving._renew(0.0)
    assert [(endpoint, stream.closed) for endpoint, stream in opened] == [(0, True), (2, False)]
