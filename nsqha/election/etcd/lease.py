"""A lease and the thread that renews it, over one stream.

Renewals stop when the process's loop stops: `ticked` must be called more often than every `ttl_s / 3`, else nothing is
sent until it is called again. A lease that was last renewed by a request *sent* at t is certainly alive on etcd's side
until t + ttl, whatever happened to the answer; `fresh` ends at t + 2/3 ttl, which leaves a third for clock drift. A TTL
of 0 in an answer means that etcd has no such lease any more: `lost` is called once, the thread ends. No answer means
nothing; the thread keeps asking, on another endpoint if there is one.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import grpc

from nsqha.clock import Clock
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, reason
from nsqha.election.etcd.view import Trouble
from nsqha.election.session import Lost
from nsqha.errors import NsqhaError

FRESH = 2 / 3  # of the TTL
RENEWALS = 3  # per TTL, while all is well
CHECK_S = 0.1  # how soon it is noticed that the loop runs again
STOP_WAIT_S = 2.0


class EtcdLease:
    """A lease that is granted when this is created, and renewed after `start`."""

    def __init__(
        self,
        client: EtcdClient,
        clock: Clock,
        *,
        ttl_s: float,
        lost: Lost,
        trouble: Trouble,
        needs_ticks: bool = True,
    ) -> None:
        """Raises what a call raises. Without `needs_ticks` it is renewed as long as the process lives."""
        self._client = client
        self._clock = clock
        self._lost = lost
        self._trouble = trouble
        self._needs_ticks = needs_ticks
        self._renewed = self._ticked = clock.monotonic()
        # If the answer to a first request was lost, that lease expires unused.
        granted = client.lease_call(
            lambda stubs: stubs.lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=max(1, round(ttl_s)))
        )
        self.id: int = granted.ID
        self.ttl_s: float = granted.TTL  # at least what was asked for; etcd has a minimum
        self._stopped = threading.Event()
        self._gone = False
        self._failing = False  # reported already
        self._stream: _Stream | None = None
        self._endpoint = 0  # the client's endpoint that the stream is on
        self._thread = threading.Thread(target=self._run, name="etcd-lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ticked(self) -> None:
        self._ticked = self._clock.monotonic()

    def fresh(self, now: float) -> bool:
        return not self._gone and now - self._renewed < FRESH * self.ttl_s

    def seconds_left(self, now: float) -> float:
        return 0.0 if self._gone else max(0.0, self._renewed + self.ttl_s - now)

    @property
    def gone(self) -> bool:
        """Whether etcd has reported the lease as gone, or it was revoked."""
        return self._gone

    def stop(self, *, revoke: bool) -> None:
        """Stop renewing. `revoke`: keys on the lease are removed at once, else when its TTL is over."""
        self._stopped.set()
        stream = self._stream  # the thread may drop it at any moment
        if stream is not None:
            stream.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STOP_WAIT_S)
        if revoke and not self._gone:
            try:
                self._client.lease_call(lambda stubs: stubs.lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=self.id))
            except NsqhaError as error:
                self._trouble(f"the lease was not revoked and ends in {self.ttl_s:g} s: {error}")
        self._gone = True

    def _run(self) -> None:
        try:
            self._renew_on()
        finally:
            self._close_stream()  # also one that was opened while `stop` ran

    def _renew_on(self) -> None:
        interval = self.ttl_s / RENEWALS
        due = self._renewed + interval
        check = min(CHECK_S, interval / 4)
        while not self._stopped.wait(max(check, due - self._clock.monotonic())):
            now = self._clock.monotonic()
            if now < due or (self._needs_ticks and now - self._ticked > interval):
                continue
            due = now + interval
            if not self._renew(now):
                due = now  # try again at once, on a fresh stream
            if self._gone:
                self._lost()
                return

    def _renew(self, now: float) -> bool:
        try:
            if self._stream is not None and self._endpoint != self._client.endpoint:
                # Other calls have left that endpoint. A renewal on a frozen member would wait for its time-out.
                self._close_stream()
            if self._stream is None:
                self._endpoint = self._client.endpoint
                self._stream = _Stream(self._client, self._endpoint, self.id)
            ttl = self._stream.renew(self._client.options.call_s)
        except Exception as error:
            # Any error, also a thread that cannot be started: this thread ends only with the lease.
            if self._stopped.is_set():
                return False
            if not self._failing:
                self._trouble(f"the lease could not be renewed, trying again: {reason(error)}")
            self._failing = True
            self._drop_stream(error)
            return False
        self._failing = False
        if ttl > 0:
            self._renewed = now
        else:
            self._gone = True
        return True

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _drop_stream(self, error: Exception) -> None:
        self._close_stream()
        if isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.UNAUTHENTICATED:
            self._client.forget_token()
        else:
            self._client.rotate(self._endpoint)


class _Stream:
    """A stream of requests and answers in turn. A second thread reads, so that waiting for an answer has a limit. It
    reads only while one is due, as a thread that waits in gRPC looks up again and again."""

    def __init__(self, client: EtcdClient, endpoint: int, lease: int) -> None:
        self._client = client
        self._lease = lease
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._due: queue.SimpleQueue[bool] = queue.SimpleQueue()  # answers to read; False: no more
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests = iter(self._requests.get, None)
        self._call = client.open_stream(endpoint, lambda stubs: stubs.lease.LeaseKeepAlive, requests)
        threading.Thread(target=self._read, name="etcd-lease-reader", daemon=True).start()

    def renew(self, wait_s: float) -> int:
        """Renew; return the TTL that etcd answers, 0: no such lease. NsqhaError after `wait_s`, RpcError."""
        self._requests.put(rpc.LeaseKeepAliveRequest(ID=self._lease))
        self._due.put(True)
        try:
            answer = self._answers.get(timeout=wait_s)
        except queue.Empty:
            raise NsqhaError(f"no answer within {wait_s:g} s") from None
        if isinstance(answer, Exception):
            raise answer
        self._client.saw(answer.header, at_least=0)
        return int(answer.TTL)

    def close(self) -> None:
        self._requests.put(None)
        self._due.put(False)
        self._call.cancel()

    def _read(self) -> None:
        try:
            while self._due.get():
                self._answers.put(next(self._call))
        except StopIteration:
            self._answers.put(NsqhaError("etcd ended the stream"))
        except grpc.RpcError as error:
            self._answers.put(error)
