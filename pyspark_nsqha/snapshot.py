"""The client of the segment service: what is committed, how to divide it, holds (proto/nsqha/v1/segments.proto).

Calls are synchronous. Each makes its channel and closes it: planners and tasks are processes that Spark forks and
reuses, and what gRPC keeps running does not outlive a fork. Brokers are asked in turn, each within `timeoutMs`, and all
again up to `numRetries` times where asking again can help; a broker that was silent comes last from then on, in later
calls of this process as well, and the whole call ends after `numRetries` + 1 times `timeoutMs`, however many brokers
are silent. What comes is checked before it is used: everything that is planned rests on it.

All errors are ReadFailed with one line.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from nsqha.ids import PARTITIONS_MAX, is_ephemeral, valid_name
from pyspark_nsqha.model import CutPoint, NoBroker, NotThere, PartitionLife, PinnedPartition, ReadFailed, ReplicaAddress
from pyspark_nsqha.options import ConnectOptions, TopicSelection

ANSWER_BYTES_MAX: Final = 256 << 20
TIMES_MAX: Final = 16  # in one request
PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 2.0
NAMED_MAX: Final = 5  # partitions in one line
ORDERS_MAX: Final = 64  # sets of brokers whose order is remembered

Key = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True)
class Snapshot:
    """What one Snapshot call answered, checked."""

    pins: tuple[PinnedPartition, ...]  # by topic and number
    times: Mapping[Key, Mapping[int, int]] = field(default_factory=dict)  # time -> first offset that is not older
    floors: Mapping[Key, int] = field(default_factory=dict)  # of the channel, where the partition has it
    hold_id: str = ""
    cluster: str = ""  # 16 hex digits
    failed: Mapping[Key, str] = field(default_factory=dict)  # why; only of a partial one


@dataclass(frozen=True)
class SnapshotRequest:
    """What a snapshot is to say beside ends and identities."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    times_ns: tuple[int, ...] = ()
    channel: str = ""
    ranges: tuple[tuple[str, int, int, int], ...] | None = None  # topic, partition, first, end: with borders there
    hold_ms: int = 0
    hold_id: str = ""


class Segments:
    """The service, wherever one of the brokers answers."""

    def __init__(self, connection: ConnectOptions) -> None:
        self._connection = connection

    def snapshot(self, asked: SnapshotRequest, *, partial: bool = False) -> Snapshot:
        """Partitions that have no leader now are waited for as long as retries last; with `partial`, those that have
        none then are in `failed`."""
        if asked.hold_ms and not asked.hold_id:
            # Drawn here: whichever broker is asked, and however often, it is one hold.
            asked = replace(asked, hold_id=f"{secrets.randbits(64) or 1:016x}")
            try:
                return self._with_all_times(asked, partial)
            except ReadFailed:
                self._forget(asked.hold_id)
                raise
        return self._with_all_times(asked, partial)

    def _forget(self, hold_id: str) -> None:
        """Nobody will hear of this hold; one attempt, as it ends by itself."""
        with suppress(ReadFailed):
            Segments(replace(self._connection, retries=0)).release_hold(hold_id)

    def _with_all_times(self, asked: SnapshotRequest, partial: bool) -> Snapshot:
        first = self._snapshot(replace(asked, times_ns=asked.times_ns[:TIMES_MAX]), partial)
        for at in range(TIMES_MAX, len(asked.times_ns), TIMES_MAX):
            more = SnapshotRequest(asked.topics, asked.pattern, times_ns=asked.times_ns[at : at + TIMES_MAX])
            first = _with_times(first, self._snapshot(more))
        return first

    def _snapshot(self, asked: SnapshotRequest, partial: bool = False) -> Snapshot:
        from nsqha.pb.v1 import segments_pb2

        request = segments_pb2.SnapshotRequest(
            topics=asked.topics,
            pattern=asked.pattern,
            timestamps_ns=asked.times_ns,
            cut_points=asked.ranges is not None,
            hold_ms=asked.hold_ms,
            hold_id=asked.hold_id,
            channel=asked.channel,
        )
        for topic, partition, first, end in asked.ranges or ():
            request.ranges.add(topic=topic, partition=partition, first=first, end=end)

        last: Any = None

        def complete(answer: Any) -> str:
            nonlocal last
            last = answer
            failed = [f"{p.topic}/{p.partition} ({_line(p.error)})" for p in answer.partitions if p.error]
            return f"no snapshot of {_some(failed)}; is a leader there? `nsqha topic show` tells" if failed else ""

        try:
            return checked(self._call("Snapshot", request, complete), asked)
        except ReadFailed:
            if not partial or last is None or not any(said.error for said in last.partitions):
                raise
        return checked(last, asked)

    def renew_hold(self, hold_id: str) -> int:
        """How many partitions it holds; 0: it is over."""
        from nsqha.pb.v1 import segments_pb2

        return int(self._call("RenewHold", segments_pb2.RenewHoldRequest(hold_id=hold_id)).partitions)

    def release_hold(self, hold_id: str) -> int:
        """How many partitions it held."""
        from nsqha.pb.v1 import segments_pb2

        return int(self._call("ReleaseHold", segments_pb2.ReleaseHoldRequest(hold_id=hold_id)).partitions)

    def commit_reader(
        self, topic: str, channel: str, offsets: Mapping[int, int], *, back: bool = False, topic_uid: int = 0
    ) -> dict[int, int]:
        """The floors of a reader channel after they were moved, per partition. `topic_uid`: of the topic whose offsets
        these are, not of one that was made anew; 0: of any."""
        from nsqha.pb.v1 import segments_pb2

        request = segments_pb2.CommitReaderRequest(
            topic=topic, channel=channel, offsets=dict(offsets), back=back, topic_uid=topic_uid
        )

        def complete(answer: Any) -> str:
            failed = [f"{topic}/{f.partition} ({_line(f.error)})" for f in answer.floors if f.error]
            return f"the floor of channel {channel} was not moved in {_some(failed)}" if failed else ""

        answer = self._call("CommitReader", request, complete)
        return {int(floor.partition): int(floor.offset) for floor in answer.floors}

    def _call(
        self,
        rpc: str,
        request: Any,
        complete: Callable[[Any], str] = lambda _: "",
    ) -> Any:
        """The first answer that is complete: of which `complete` says nothing. ReadFailed has what the last lacked."""
        import grpc

        seconds = self._connection.timeout_ms / 1000
        give_up_at = time.monotonic() + seconds * (self._connection.retries + 1)
        brokers = self._connection.brokers
        pause, why = PAUSE_S, ""
        failures: dict[str, str] = {}  # since one of them answered
        for attempt in range(self._connection.retries + 1):
            if attempt:
                if give_up_at - time.monotonic() <= pause:
                    break
                time.sleep(pause)
                pause = min(2 * pause, PAUSE_S_MAX)
            for broker in _orders.get(brokers, brokers):
                left = give_up_at - time.monotonic()
                if left <= 0:
                    break
                try:
                    with _stub(self._connection, broker) as stub:
                        answer = getattr(stub, rpc)(request, timeout=min(seconds, left))
                except grpc.RpcError as error:
                    if final := _final(error, broker, rpc, self._connection):
                        absent = error.code() is grpc.StatusCode.NOT_FOUND
                        raise (NotThere if absent else ReadFailed)(final) from None
                    failures[broker] = _why_not(error, self._connection)
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        _ask_last(broker, brokers)
                    continue
                failures.clear()
                why = complete(answer)
                if not why:
                    return answer
        if not why or len(failures) == len({*brokers}):
            silent = [f"{broker} {failures.get(broker, 'was not asked')}" for broker in self._connection.brokers]
            raise NoBroker(f"no broker answers: {_some(silent)}; brokers takes addresses of --grpc-address")
        raise ReadFailed(why)


_orders: dict[tuple[str, ...], tuple[str, ...]] = {}
"""Of this process: in which order to ask brokers that are given like this. A query asks all the time, and a broker that
is silent would cost each of its calls `timeoutMs`."""


def _ask_last(silent: str, brokers: tuple[str, ...]) -> None:
    if len(_orders) >= ORDERS_MAX and brokers not in _orders:
        _orders.clear()
    others = [broker for broker in _orders.get(brokers, brokers) if broker != silent]
    _orders[brokers] = (*others, silent)


@contextmanager
def _stub(connection: ConnectOptions, broker: str) -> Iterator[Any]:
    from nsqha import grpc_channels
    from nsqha.pb.v1 import segments_pb2_grpc

    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", ANSWER_BYTES_MAX)]
    tls = None
    if connection.tls is not None:
        tls = grpc_channels.credentials(
            ca=_file("nsqha.tls.ca", connection.tls.ca),
            key=_file("nsqha.tls.key", connection.tls.key),
            certificate=_file("nsqha.tls.cert", connection.tls.cert),
        )
    with grpc_channels.channel(broker, options, tls) as channel:
        yield segments_pb2_grpc.SegmentsStub(channel)


def _file(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ReadFailed(f"{option}: its file cannot be read on this machine: {error.strerror}") from None


def _final(error: Any, broker: str, rpc: str, connection: ConnectOptions) -> str:
    """The line to give up with; empty where another broker, or time, may help."""
    import grpc

    code, text = error.code(), _line(error.details() or "")
    codes = grpc.StatusCode
    passing = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "UNKNOWN", "INTERNAL")
    if code.name in passing:
        return ""
    if code is codes.UNIMPLEMENTED:
        return f"{broker} has no segment service: another program, or a broker that is older than this package"
    if code in (codes.PERMISSION_DENIED, codes.UNAUTHENTICATED):
        return f"{broker} refuses this certificate: {text}; a reader's has URI:nsqha:reader"
    if code is codes.RESOURCE_EXHAUSTED and rpc == "Snapshot":
        return f"{broker} cannot answer: {text}; fewer topics, or fewer offsets of them, make a shorter answer"
    if code is codes.NOT_FOUND:
        return f"{text}; `nsqha topic list` shows what there is"
    return text or f"{rpc} at {broker} failed: {code.name}"


def _why_not(error: Any, connection: ConnectOptions) -> str:
    """Why a broker was of no use, in some words."""
    import grpc

    text = error.details() or ""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"said nothing within {connection.timeout_ms} ms (timeoutMs)"
    if "refused" in text.lower():
        return "refused the connection"
    if "HTTP/2" in text or "http1" in text.lower():
        return "does not speak gRPC"
    if connection.tls is None and any(sign in text for sign in ("Socket closed", "Connection reset", "GOAWAY")):
        return "closed the connection (if it wants a certificate: nsqha.tls.cert, nsqha.tls.key, nsqha.tls.ca)"
    if "Hostname Verification" in text:
        return "has a certificate that does not name it so; write it in brokers as its certificate does"
    if "handshake" in text.lower() or "certificate" in text.lower():
        return f"and this machine did not agree on TLS ({_line(text)})"
    return f"cannot now: {_line(text)}" if text else f"failed with {error.code().name}"


def checked(answer: Any, asked: SnapshotRequest) -> Snapshot:
    """An answer as plain values. ReadFailed if it contradicts itself or what was asked."""
    pins, times, floors, failed = [], {}, {}, {}
    before: Key = ("", -1)
    for said in answer.partitions:
        key = (str(said.topic), int(said.partition))
        where = f"the snapshot of {key[0]!r}/{key[1]}"
        if not valid_name(key[0]) or key[1] >= PARTITIONS_MAX or not said.topic_uid:
            raise ReadFailed(f"{where} is of no partition; is that broker of this version?")
        if key <= before:
            raise ReadFailed(f"{where} is out of order or there twice; is that broker of this version?")
        before = key
        if is_ephemeral(key[0]):
            continue  # a pattern matches it as well
        if said.error:
            failed[key] = _line(said.error)
            continue
        start, end = _cut(said.start), _cut(said.end)
        cuts = tuple(_cut(cut) for cut in said.cuts)
        _check_ascending(where, (start, end))
        _check_ascending(where, cuts)
        if cuts and not (start.log_id <= cuts[0].log_id and cuts[-1].log_id <= end.log_id):
            raise ReadFailed(f"{where} has borders outside of what is committed; try again")
        if len(said.offsets_for_times) != len(asked.times_ns):
            raise ReadFailed(f"{where} answers {len(said.offsets_for_times)} of {len(asked.times_ns)} times")
        pins.append(
            PinnedPartition(
                identity=PartitionLife(key[0], int(said.topic_uid), key[1], int(said.id_base)),
                start=start,
                end=end,
                epoch=int(said.epoch),
                chain=int(said.chain),
                cuts=cuts,
                replicas=tuple(
                    ReplicaAddress(str(replica.address), str(replica.host), bool(replica.leader))
                    for replica in said.replicas
                    if replica.address
                ),
            )
        )
        times[key] = {
            at: min(max(int(offset), start.offset), end.offset)
            for at, offset in zip(asked.times_ns, said.offsets_for_times, strict=True)
        }
        if said.HasField("channel_floor"):
            floors[key] = int(said.channel_floor)
    there = {pin.identity.topic for pin in pins} | {topic for topic, _ in failed}
    if missing := sorted(set(asked.topics) - there):
        raise NotThere(f"there is no topic {_some(missing)}; `nsqha topic list` shows what there is")
    return Snapshot(tuple(pins), times, floors, str(answer.hold_id), str(answer.cluster_id), failed)


def _with_times(first: Snapshot, later: Snapshot) -> Snapshot:
    """A snapshot with the times of another that was taken after it: what is newer than its end is not in it."""
    lives = {pin.identity for pin in later.pins}
    times = {}
    for pin in first.pins:
        key = (pin.identity.topic, pin.identity.partition)
        if pin.identity not in lives:
            raise ReadFailed(f"{key[0]}/{key[1]}: the topic was deleted or made anew while it was looked at; try again")
        found = {at: min(offset, pin.end.offset) for at, offset in later.times[key].items()}
        times[key] = {**first.times[key], **found}
    return replace(first, times=times)


def of_subscription(subscription: TopicSelection, **more: Any) -> SnapshotRequest:
    """Everything that is subscribed to."""
    return SnapshotRequest(topics=subscription.names, pattern=subscription.pattern, **more)


def _cut(said: Any) -> CutPoint:
    return CutPoint(int(said.offset), int(said.log_id), int(said.position), int(said.timestamp_ns))


def _check_ascending(where: str, cuts: Sequence[CutPoint]) -> None:
    """Log ids rise, positions and offsets do not fall. An empty log has its one border twice."""
    for left, right in pairwise(cuts):
        if left[:3] == right[:3]:
            continue
        if left.log_id >= right.log_id or left.offset > right.offset or left.position > right.position:
            raise ReadFailed(f"{where} has borders that do not ascend: {left} before {right}; is that broker damaged?")


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _line(text: str) -> str:
    """At most one line of it."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."
