"""The lease's thread and whoever stops it share a stream: neither relies on what the other may take away."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.clock import ManualClock
from nsqha.election.etcd import lease as etcd_lease
from nsqha.election.etcd.lease import EtcdLease
from nsqha.errors import NsqhaError


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


def test_the_thread_of_a_healthy_lease_wakes_once_for_each_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = lease()
    waits: list[float] = []
    renewed: list[float] = []

    class Answering(LeaseStream):
        def __init__(self, client: Any, endpoint: int, lease_id: int) -> None:
            super().__init__()

        def renew(self, wait_s: float) -> int:
            renewed.append(idle._clock.monotonic())
            return 3

    class Stopped:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            idle._clock.advance(seconds)
            idle.ticked()
            return len(renewed) == 5

        is_set = staticmethod(lambda: False)

    monkeypatch.setattr(etcd_lease, "_Stream", Answering)
    idle._stopped = Stopped()
    begun = idle._clock.monotonic()
    idle._run()
    assert [at - begun for at in renewed] == pytest.approx([1, 2, 3, 4, 5])
    assert len(waits) == len(renewed) + 1


def test_a_loop_that_stands_still_is_looked_at_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stalled = lease()
    waits: list[float] = []
    begun = stalled._clock.monotonic()
    stalled._ticked = begun - 1

    class Answering(LeaseStream):
        def __init__(self, client: Any, endpoint: int, lease_id: int) -> None:
            super().__init__()

        def renew(self, wait_s: float) -> int:
            stalled._stopped.over = True
            return 3

    class Stopped:
        over = False

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            stalled._clock.advance(seconds)
            if stalled._clock.monotonic() - begun > 1.75:
                stalled.ticked()
            return self.over

        is_set = staticmethod(lambda: False)

    monkeypatch.setattr(etcd_lease, "_Stream", Answering)
    stalled._stopped = Stopped()
    stalled._run()
    assert waits[0] == 1 and waits[1:-1] == [etcd_lease.CHECK_S] * 8
    assert stalled._renewed - begun == pytest.approx(1.8)


def test_answers_are_read_only_while_one_is_due() -> None:
    read: list[int] = []
    asked = threading.Event()

    class Call:
        def __init__(self, requests: Any) -> None:
            self._requests = requests

        def __next__(self) -> Any:
            asked.set()
            read.append(next(self._requests).ID)
            return SimpleNamespace(header=None, TTL=3)

        def cancel(self) -> None: ...

    class Client(LeaseClient):
        def open_stream(self, endpoint: int, method: Any, requests: Any) -> Call:
            return Call(requests)

        def saw(self, header: Any, *, at_least: int) -> None: ...

    stream = etcd_lease._Stream(cast(Any, Client()), 0, 7)
    reader = next(thread for thread in threading.enumerate() if thread.name == "etcd-lease-reader")
    assert not asked.is_set()
    assert [stream.renew(30.0), stream.renew(30.0)] == [3, 3]
    stream.close()
    reader.join(30)
    assert read == [7, 7] and not reader.is_alive()


def test_a_stream_that_etcd_ends_fails_the_renewal() -> None:
    class Client(LeaseClient):
        def open_stream(self, endpoint: int, method: Any, requests: Any) -> Any:
            return iter(())

    stream = etcd_lease._Stream(cast(Any, Client()), 0, 7)
    with pytest.raises(NsqhaError, match="ended the stream"):
        stream.renew(30.0)
