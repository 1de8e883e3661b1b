"""Reads and transactions of keys, as calls of the client."""

from __future__ import annotations

from typing import Any

from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import Compacted, EtcdClient
from nsqha.election.etcd.keys import prefix_end, txn

PAGE = 500  # records per answer of a list


def read_key(client: EtcdClient, key: bytes) -> Any:
    """One key; None if there is none. Unavailable, StaleMetadata."""
    answer = client.read(lambda stubs: stubs.kv.Range, rpc.RangeRequest(key=key))
    return answer.kvs[0] if answer.kvs else None


def read_revision(client: EtcdClient, key: bytes) -> int:
    """The revision of the store at a moment after this was called, by a read of which only that is wanted.
    Unavailable, StaleMetadata."""
    request = rpc.RangeRequest(key=key, count_only=True)
    revision: int = client.read(lambda stubs: stubs.kv.Range, request).header.revision
    return revision


def read_ranges(client: EtcdClient, *gets: Any) -> tuple[list[Any], Any]:
    """The keys of each `get`, all at one revision, and a header with it. Unavailable, StaleMetadata.

    It is not one transaction: etcd 3.5.1 panics if a client disconnects during one that only reads.
    """
    requests = [op.request_range for op in gets]
    while True:
        first = client.read(lambda stubs: stubs.kv.Range, requests[0])
        revision = first.header.revision
        try:
            return [first.kvs, *(_range_at(client, revision, request) for request in requests[1:])], first.header
        except Compacted:
            continue  # there were changes, and a compaction, meanwhile


def _range_at(client: EtcdClient, revision: int, request: Any) -> Any:
    then = rpc.RangeRequest()
    then.CopyFrom(request)
    then.revision = revision
    return client.read(lambda stubs: stubs.kv.Range, then).kvs


def transact(client: EtcdClient, compares: list[Any], then: list[Any], otherwise: list[Any] | None = None) -> Any:
    """One transaction. OutcomeUnknown and what else a change raises."""
    return client.change(lambda stubs: stubs.kv.Txn, txn(compares, then, otherwise or ()))


def list_keys(client: EtcdClient, prefix: bytes, *, revision: int = 0) -> tuple[list[Any], int]:
    """All keys with a prefix, at one revision (0: now), page by page. Unavailable, StaleMetadata."""
    while True:
        try:
            return _list_at(client, prefix, revision)
        except Compacted:
            if revision:
                raise
            # There were changes, and a compaction, during the listing; begin again.


def list_newer(client: EtcdClient, prefix: bytes, since: int, *, revision: int = 0) -> tuple[Any, int]:
    """Keys with a prefix that were put after the revision `since`, with the count of all that have the prefix, at one
    revision (0: now); None instead if they are more than a page. Compacted, Unavailable, StaleMetadata."""
    request = rpc.RangeRequest(
        key=prefix, range_end=prefix_end(prefix), limit=PAGE, min_mod_revision=since + 1, revision=revision
    )
    answer = client.read(lambda stubs: stubs.kv.Range, request)
    return None if answer.more or len(answer.kvs) >= PAGE else answer, revision or answer.header.revision


def _list_at(client: EtcdClient, prefix: bytes, revision: int) -> tuple[list[Any], int]:
    kvs: list[Any] = []
    start, end = prefix, prefix_end(prefix)
    while True:
        request = rpc.RangeRequest(key=start, range_end=end, limit=PAGE, revision=revision)
        answer = client.read(lambda stubs: stubs.kv.Range, request)
        kvs += answer.kvs
        revision = revision or answer.header.revision
        if not answer.more:
            return kvs, revision
        start = answer.kvs[-1].key + b"\0"
