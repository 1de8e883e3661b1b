"""Where the watch resumes and what it tells, against an etcd that is a list of answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from nsqha.election.codec import encode
from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.watch import EtcdWatch
from nsqha.election.model import NodeInfo, TopicRecord
from nsqha.election.session import View
from nsqha.errors import NsqhaError, StaleMetadata, Unavailable

KEYS = etcd_keys.Keys("test")


class WatchClient:
    """Lists `kvs` at `revision`; each stream that is opened gives the next of `streams`, then ends."""

    def __init__(self, *streams: list[Any], revision: int = 1, kvs: list[Any] | None = None) -> None:
        self.streams = list(streams)
        self.answers = rpc.RangeResponse(header=rpc.ResponseHeader(revision=revision), kvs=kvs or [])
        self.listed = 0
        self.watched_from: list[int] = []
        self.tokens_forgotten = 0
        self.confirmed = 0
        self.distrusted: list[str] = []
        self.older = False
        self.away_at = 0  # which list fails
        self.done = threading.Event()

    def read(self, method: Callable[[Any], Any], request: Any) -> Any:
        self.listed += 1
        if self.listed == self.away_at:
            raise Unavailable("etcd does not answer")
        return self.answers

    def distrust(self, why: str) -> None:
        self.older = True
        self.distrusted.append(why)

    def confirm(self, key: bytes) -> None:
        assert key.startswith(KEYS.prefix.encode()), "a login that may read the cluster's keys may read no other"
        self.confirmed += 1
        if self.older:
            if self.confirmed > 2:
                self.done.set()
            raise StaleMetadata("an older etcd")

    def open_stream(self, endpoint: int, method: Callable[[Any], Any], requests: Iterator[Any]) -> Any:
        if not self.streams:
            self.done.set()
            raise NsqhaError("nothing is left")
        self.watched_from.append(next(requests).create_request.start_revision)
        return WatchStream(self.streams.pop(0))

    def saw(self, header: Any, *, at_least: int) -> None:
        """Believed."""

    def on_rotate(self, moved: Callable[[], None]) -> None:
        """There is one endpoint."""

    endpoint = 0

    def rotate(self, failed: int) -> None:
        """There is one endpoint."""

    def forget_token(self) -> None:
        self.tokens_forgotten += 1


class WatchStream:
    def __init__(self, responses: list[Any]) -> None:
        self._responses = responses

    def __iter__(self) -> Iterator[Any]:
        return iter(self._responses)

    def cancel(self) -> None:
        """It ends by itself."""


def kv(key: bytes, value: bytes, revision: int) -> Any:
    # mvccpb has no stub module of its own in etcd3.etcdrpc; a range's answer knows its class.
    return rpc.RangeResponse().kvs.add(key=key, value=value, mod_revision=revision, create_revision=revision)


def put(key: bytes, value: bytes, revision: int) -> Any:
    event = rpc.WatchResponse().events.add()
    event.kv.CopyFrom(kv(key, value, revision))
    return event


def deleted(key: bytes, revision: int) -> Any:
    event = put(key, b"", revision)
    event.type = event.DELETE
    return event


def response(revision: int, *events: Any, **fields: Any) -> Any:
    return rpc.WatchResponse(header=rpc.ResponseHeader(revision=revision), events=list(events), **fields)


def intent(n: int) -> Any:
    return put(KEYS.intent(f"n{n}"), b"{}", n)


def run(client: WatchClient) -> tuple[list[View], list[list[str]], list[str]]:
    views: list[View] = []
    hints: list[list[str]] = []
    trouble: list[str] = []

    def publish(view: View, names: list[str]) -> None:
        views.append(view)
        hints.append(names)

    watch = EtcdWatch(client, KEYS, publish, trouble.append)  # type: ignore[arg-type]
    watch.start()
    assert client.done.wait(20)
    watch.stop()
    return views, hints, trouble


def test_in_a_backlog_it_resumes_behind_the_last_event_not_the_header() -> None:
    backlog = [response(5001, created=True), response(5001, *(intent(n) for n in range(2, 1002)))]
    client = WatchClient(backlog, [])
    run(client)
    assert client.watched_from == [2, 1002]
    assert client.listed == 1
    assert client.confirmed, "an etcd that was put back behind the watch would be waited for without a word"


def test_an_etcd_that_was_put_back_is_a_hint_once_and_is_not_watched() -> None:
    client = WatchClient([response(3, created=True), response(3, intent(3))], [response(2, intent(2))])
    client.older = True
    views, hints, _ = run(client)
    assert hints == [[""], ["intents/n3"], [""]]
    assert client.watched_from == [2] and views[-1] is views[-2], "nothing of it is taken"


def test_an_etcd_whose_cluster_was_removed_is_not_followed() -> None:
    """Whoever deletes keys deletes this one before the topics: what nodes have seen of them stays."""
    wiped = response(4, deleted(KEYS.cluster, 4), deleted(KEYS.intent("n3"), 4))
    client = WatchClient([response(3, created=True), response(3, intent(3)), wiped], [response(5, intent(5))])
    views, hints, trouble = run(client)
    assert hints == [[""], ["intents/n3"], [""]]
    assert views[-1] is views[-2], "nothing of it is taken"
    assert len(client.distrusted) == 1 and "it was wiped; see nsqha cluster accept-metadata" in client.distrusted[0]
    assert any("it was wiped" in text for text in trouble)


def test_a_list_without_the_cluster_that_was_there_is_not_taken() -> None:
    client = WatchClient([response(9, canceled=True, compact_revision=8)], kvs=[kv(KEYS.cluster, b"{}", 1)])

    def read(method: Callable[[Any], Any], request: Any) -> Any:
        client.listed += 1
        return client.answers if client.listed == 1 else rpc.RangeResponse(header=rpc.ResponseHeader(revision=9))

    client.read = read  # type: ignore[method-assign]
    client.distrust = lambda why: client.done.set()  # type: ignore[method-assign]
    views, hints, _ = run(client)
    assert set(map(tuple, hints)) == {("",)} and all(view is views[0] for view in views)


def test_a_progress_notification_moves_it_to_its_header() -> None:
    client = WatchClient([response(3, created=True), response(3, intent(3)), response(90)], [])
    run(client)
    assert client.watched_from == [2, 91]


def test_that_a_watch_was_created_says_nothing_about_events() -> None:
    client = WatchClient([response(500, created=True)], [])
    run(client)
    assert client.watched_from == [2, 2]


def test_after_a_compaction_everything_is_read_again() -> None:
    client = WatchClient([response(900, canceled=True, compact_revision=800)], [], revision=1)
    _, hints, trouble = run(client)
    assert client.listed == 2
    assert hints == [[""], [""]]
    assert "revision 800" in trouble[0]


def test_what_is_to_be_read_again_is_read_again_though_the_first_attempt_fails() -> None:
    """Else it goes on behind a revision of another past, and waits there without a word."""
    client = WatchClient([response(900, intent(900))], [], [], revision=1)
    client.away_at = 2
    watch = EtcdWatch(client, KEYS, lambda view, names: watch.begin_again() if names != [""] else None, print)  # type: ignore[arg-type]
    watch.start()
    assert client.done.wait(20)
    watch.stop()
    assert client.listed == 3 and client.watched_from == [2, 2, 2]


def test_a_thread_that_can_not_be_started_does_not_end_the_watch() -> None:
    class Short(WatchClient):
        """Of a machine that has no threads left, once."""

        tried = 0

        def open_stream(self, endpoint: int, method: Callable[[Any], Any], requests: Iterator[Any]) -> Any:
            self.tried += 1
            if self.tried == 1:
                raise RuntimeError("can't start new thread")
            return super().open_stream(endpoint, method, requests)

    _, hints, trouble = run(Short([response(7, intent(7))]))
    assert hints == [[""], ["intents/n7"]] and "RuntimeError" in trouble[0]


def test_a_watch_that_is_refused_logs_in_again_and_goes_on() -> None:
    refused = response(1, canceled=True, cancel_reason="permission denied")
    client = WatchClient([refused], [response(7, intent(7))], [])
    _, hints, trouble = run(client)
    assert client.tokens_forgotten == 1
    assert client.watched_from == [2, 2, 8]
    assert hints == [[""], ["intents/n7"]]
    assert "permission denied" in trouble[0]


def test_a_new_topic_is_one_hint_though_its_partitions_come_first() -> None:
    topic = TopicRecord("orders", 5, 0)
    created = response(
        2,
        put(KEYS.partition(5, 0), b'{"format": 1, "leader": 7}', 2),
        put(KEYS.partition(5, 1), b'{"format": 1}', 2),
        put(KEYS.topic("orders"), etcd_keys.topic_value(topic), 2),
    )
    moved = response(3, put(KEYS.partition(5, 1), b'{"format": 1, "leader": 8}', 3))
    gone = response(
        4, deleted(KEYS.partition(5, 0), 4), deleted(KEYS.partition(5, 1), 4), deleted(KEYS.topic("orders"), 4)
    )
    views, hints, trouble = run(WatchClient([created, moved, gone]))
    assert hints == [[""], ["topics/orders"], ["topics/orders"], ["topics/orders"]]
    leaders = [{n: meta.leader for n, meta in view.topics["orders"].record.partitions.items()} for view in views[1:3]]
    assert leaders == [{0: 7, 1: 0}, {0: 7, 1: 8}]
    assert [view.revision for view in views] == [1, 2, 3, 4]
    assert views[3].topics == {}
    assert len(trouble) == 1, "only that the stream ended"


def test_a_topic_that_was_deleted_and_created_again_has_only_its_new_partitions() -> None:
    first, second = (etcd_keys.topic_value(TopicRecord("orders", uid, 0)) for uid in (5, 6))
    before = [kv(KEYS.topic("orders"), first, 1), kv(KEYS.partition(5, 0), b'{"format": 1, "leader": 7}', 1)]
    again = response(
        3,
        deleted(KEYS.partition(5, 0), 2),
        deleted(KEYS.topic("orders"), 2),
        put(KEYS.partition(6, 0), b'{"format": 1, "leader": 8}', 3),
        put(KEYS.topic("orders"), second, 3),
    )
    views, _, _ = run(WatchClient([again], kvs=before))
    assert [view.partition("orders", 0) and view.partition("orders", 0).leader for view in views] == [7, 8]  # type: ignore[union-attr]
    assert views[1].topics["orders"].record.uid == 6


def test_a_record_that_can_not_be_read_is_left_as_it_was_and_the_rest_goes_on() -> None:
    node = KEYS.node(7)
    newer = response(3, put(node, b'{"format": 99}', 3), put(KEYS.node(8), encode(NodeInfo(8)), 3))
    views, hints, trouble = run(WatchClient([newer], kvs=[kv(node, encode(NodeInfo(7, name="a")), 1)]))
    assert {uid: info.name for uid, info in views[1].nodes.items()} == {7: "a", 8: ""}
    assert hints[1] == [f"nodes/{7:016x}", f"nodes/{8:016x}"]
    assert "/nsqha/test/nodes/0000000000000007" in trouble[0]


def test_a_view_names_the_records_that_can_not_be_read_until_they_can_or_go() -> None:
    intent, node = KEYS.intent("moves/x"), KEYS.node(7)
    changes = [
        response(2, put(intent, b"?", 2), put(node, b"{", 2)),
        response(3, put(node, encode(NodeInfo(7)), 3)),
        response(4, deleted(intent, 4)),
    ]
    views, _, trouble = run(WatchClient(changes))
    assert [sorted(view.unreadable) for view in views] == [
        [],
        ["intents/moves/x", f"nodes/{7:016x}"],
        ["intents/moves/x"],
        [],
    ]
    assert "/nsqha/test/intents/moves/x" in trouble[0] and views[1].unreadable["intents/moves/x"] == trouble[0]
    assert len(trouble) == 3, "each is said once; and that the stream ended"


def test_keys_that_are_not_ours_are_left_alone() -> None:
    strange = response(
        2, *(put(KEYS.prefix.encode() + key, b"?", 2) for key in (b"new/kind", b"nodes/x", b"partitions/5"))
    )
    views, hints, trouble = run(WatchClient([strange]))
    assert (views[1].nodes, views[1].topics) == ({}, {})
    assert hints[1] == ["new/kind", "nodes/x", "partitions/5"]
    assert len(trouble) == 1, "only that the stream ended"
