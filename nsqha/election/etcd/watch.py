"""One thread that follows all keys of a cluster, for as long as the store is open.

    list everything at revision R -> watch from R + 1 -> events ... -> broken: pause, watch from where it stopped
           ^                                                                                    |
           '---------------- etcd has compacted that revision away, hint "" <-------------------'

Where it stopped is the last *event's* revision + 1: in the middle of a backlog the header of a response already names
the newest revision, while events up to it are still to come. A response without events is a progress notification,
sent only when there are no more events, and there the header counts.

Each attempt is a new stream on the client's current endpoint, after a back-off of 50 ms that doubles up to 1 s. The
receiver of views and hints is called on this thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc

from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.calls import list_keys
from nsqha.election.etcd.client import Compacted, EtcdClient, reason
from nsqha.election.etcd.view import KeyedRecords, Trouble
from nsqha.election.session import View
from nsqha.errors import NsqhaError, StaleMetadata

PAUSE_MIN_S = 0.05
PAUSE_MAX_S = 1.0
STOP_WAIT_S = 2.0

Publish = Callable[[View, list[str]], None]


class EtcdWatch:
    """The watch thread. `publish` gets each new view and its hints."""

    def __init__(self, client: EtcdClient, keys: etcd_keys.Keys, publish: Publish, trouble: Trouble) -> None:
        self._client = client
        self._keys = keys
        self._publish = publish
        self._trouble = trouble
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)
        self._stream: Any = None
        self._endpoint = 0  # the client's endpoint that the stream is on
        self._view = View()
        self._records = KeyedRecords(keys, trouble)
        self._next = 0  # the revision to watch from
        self._broke = False  # a stream has ended
        self._relist = False
        self._has_cluster = False  # its record was in the last list
        self._doubted = False  # and that was reported

    def start(self) -> None:
        """List, publish the first view, then follow in the background. Raises what a read raises."""
        self._list()
        self._client.on_rotate(self.reconnect)
        self._thread.start()

    def reconnect(self) -> None:
        """Close the current stream; the thread opens another. From any thread."""
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def begin_again(self) -> None:
        """List everything again: the known records are of another history. From any thread."""
        self._relist = True
        self.reconnect()

    def stop(self) -> None:
        """Stop. `publish` is not called after this returns, unless a call of it hangs."""
        self._stopped.set()
        self.reconnect()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STOP_WAIT_S)

    def _list(self) -> None:
        kvs, revision = list_keys(self._client, self._keys.all)
        records = KeyedRecords(self._keys, self._trouble, revision)
        for kv in kvs:
            records.put(kv)
        has_cluster = any(kv.key == self._keys.cluster for kv in kvs)
        if self._has_cluster and not has_cluster:
            self._wiped()
        self._has_cluster = has_cluster
        self._records, self._next = records, revision + 1
        self._view = records.whole()
        self._publish(self._view, [""])

    def _run(self) -> None:
        pause = PAUSE_MIN_S
        while not self._stopped.is_set():
            why = "etcd ended the stream"
            try:
                for response in self._responses():
                    self._take(response)
                    pause = PAUSE_MIN_S
            except Exception as error:
                # Any error, also a thread that cannot be started: without this thread no change is seen any more.
                why = reason(error)
                if isinstance(error, grpc.RpcError):
                    self._leave(error.code())
                elif isinstance(error, StaleMetadata) and not self._doubted:
                    self._doubted = True
                    self._publish(self._view, [""])  # a reader that reacts to it gets the error from the store
            if self._stopped.is_set():
                return
            self._broke = True
            if pause == PAUSE_MIN_S:  # not for every attempt
                self._trouble(f"the watch on etcd broke and continues after revision {self._next - 1}: {why}")
            self._stopped.wait(pause)
            pause = min(2 * pause, PAUSE_MAX_S)

    def _leave(self, code: grpc.StatusCode) -> None:
        if code == grpc.StatusCode.UNAUTHENTICATED:
            self._client.forget_token()
        elif code != grpc.StatusCode.CANCELLED:
            self._client.rotate(self._endpoint)

    def _responses(self) -> Iterator[Any]:
        """The responses of one stream."""
        if not self._next or self._relist:
            self._next = 0  # while that fails
            self._relist = self._doubted = False
            self._list()
        elif self._broke:
            # A watch from a revision that an older etcd does not have yet would wait silently. A read notices that.
            self._client.confirm(self._keys.cluster)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        create = rpc.WatchCreateRequest(
            key=self._keys.all,
            range_end=etcd_keys.prefix_end(self._keys.all),
            start_revision=self._next,
            progress_notify=True,
        )
        requests.put(rpc.WatchRequest(create_request=create))
        self._endpoint = self._client.endpoint
        self._stream = stream = self._client.open_stream(
            self._endpoint, lambda stubs: stubs.watch.Watch, iter(requests.get, None)
        )
        try:
            if self._stopped.is_set():
                return
            yield from stream
        finally:
            requests.put(None)  # ends gRPC's sending thread
            stream.cancel()
            self._stream = None

    def _wiped(self) -> NoReturn:
        """The record of the cluster is gone, which no command removes. The last view stays: nodes are asked for it."""
        why = f"etcd has no key {self._keys.prefix}cluster any more: it was wiped; see nsqha cluster accept-metadata"
        self._client.distrust(why)
        raise StaleMetadata(why)

    def _take(self, response: Any) -> None:
        self._client.saw(response.header, at_least=0)  # from a member that may lag
        if response.canceled:
            if response.compact_revision:
                self._next = 0
                raise Compacted(f"revision {response.compact_revision} is the oldest that etcd still has")
            self._client.forget_token()  # an expired token looks like a missing permission
            raise NsqhaError(f"etcd refuses the watch: {response.cancel_reason}")
        if response.events:
            if any(event.type == event.DELETE and event.kv.key == self._keys.cluster for event in response.events):
                self._wiped()
            for event in response.events:
                if event.type == event.DELETE:
                    self._records.remove(event.kv)
                else:
                    self._records.put(event.kv)
            self._next = response.events[-1].kv.mod_revision + 1
            self._view, hints = self._records.changed(self._view)
            self._publish(self._view, hints)
        elif not response.created:
            self._next = max(self._next, response.header.revision + 1)
