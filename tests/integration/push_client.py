"""The push stream of a node, opened by a plain gRPC client."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import grpc

from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.pb.v1.replication_pb2_grpc import ReplicationStub

SECONDS = 20.0  # until a stream that does not answer is given up


def answers(channel: grpc.Channel, messages: Sequence[pb.PushMessage], count: int) -> list[pb.PushReply]:
    """The first answers to these messages. grpc.RpcError if the stream ends earlier."""
    done = threading.Event()

    def requests() -> Iterator[pb.PushMessage]:
        yield from messages
        done.wait(SECONDS)  # the end of the requests would be the end of the stream

    call = ReplicationStub(channel).Push(requests(), timeout=SECONDS)
    try:
        return [next(call) for _ in range(count)]
    finally:
        done.set()
        call.cancel()
