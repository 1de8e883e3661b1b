"""The client of the segment service: what is committed, its borders, holds (proto/nsqha/v1/segments.proto).

Calls are synchronous. Each opens a channel and closes it: planners and tasks are processes that Spark forks and reuses,
and gRPC's threads do not survive a fork. Brokers are asked in turn, each within `timeoutMs`, and all of them again up
to `numRetries` times if a retry can help; a broker that did not answer is asked last from then on, also in later calls
of this process, and the whole call ends after `numRetries` + 1 times `timeoutMs`, however many brokers are silent.
Answers are checked before use: every plan depends on them.

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
from pyspark_nsqha.token import token

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
    """The checked answer of a Snapshot call."""

    pins: tuple[PinnedPartition, ...]  # by topic and number
    times: Mapping[Key, Mapping[int, int]] = field(default_factory=dict)  # time -> first offset that is not older
    floors: Mapping[Key, int] = field(default_factory=dict)  # of the channel, in partitions that have it
    hold_id: str = ""
    cluster: str = ""  # 16 hex digits
    failed: Mapping[Key, str] = field(default_factory=dict)  # the reason; only in a partial snapshot


@dataclass(frozen=True)
class SnapshotRequest:
    """What a snapshot shall contain besides ends and identities."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    times_ns: tuple[int, ...] = ()
    channel: str = ""
    ranges: tuple[tuple[str, int, int, int], ...] | None = None  # topic, partition, first, end: with borders there
    hold_ms: int = 0
    hold_id: str = ""


class Segments:
    """Calls the segment service at any of the brokers."""

    def __init__(self, connection: ConnectOptions) -> None:
        self._connection = connection

    def snapshot(self, asked: SnapshotRequest, *, partial: bool = False) -> Snapshot:
        """Take a snapshot. It waits for partitions without a leader as long as retries last; with `partial`, those that
        have none then are in `failed`. ReadFailed."""
        if asked.hold_ms and not asked.hold_id:
            # The id is made here: so retries and other brokers get the same hold.
            asked = replace(asked, hold_id=f"{secrets.randbits(64) or 1:016x}")
            try:
                return self._with_all_times(asked, partial)
            except ReadFailed:
                self._forget(asked.hold_id)
                raise
        return self._with_all_times(asked, partial)

    def _forget(self, hold_id: str) -> None:
        """Release a hold that the caller will not get; one attempt, as it ends by itself."""
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
            return f"no snapshot of {_some(failed)}; `nsqha topic show` shows their leaders" if failed else ""

        try:
            return checked(self._call("Snapshot", request, complete), asked)
        except ReadFailed:
            if not partial or last is None or not any(said.error for said in last.partitions):
                raise
        return checked(last, asked)

    def renew_hold(self, hold_id: str) -> int:
        """Renew a hold; returns the number of partitions that it holds, 0 if it has ended."""
        from nsqha.pb.v1 import segments_pb2

        return int(self._call("RenewHold", segments_pb2.RenewHoldRequest(hold_id=hold_id)).partitions)

    def release_hold(self, hold_id: str) -> int:
        """Release a hold; returns the number of partitions that it held."""
        from nsqha.pb.v1 import segments_pb2

        return int(self._call("ReleaseHold", segments_pb2.ReleaseHoldRequest(hold_id=hold_id)).partitions)

    def commit_reader(
        self, topic: str, channel: str, offsets: Mapping[int, int], *, back: bool = False, topic_uid: int = 0
    ) -> dict[int, int]:
        """Move the floors of a reader channel; returns the new floors per partition. `topic_uid`: nothing is moved in a
        topic that was created again since; 0: in any."""
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
        """The first complete answer: one for which `complete` returns no error. ReadFailed has the last error."""
        import grpc

        from nsqha.errors import Unavailable

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
                except Unavailable as error:  # it is away, or it and we do not share the cluster's secret
                    failures[broker] = f"gave no proof of the secret in nsqha.clusterSecretFile: {error}"
                    continue
                except grpc.RpcError as error:
                    if final := _final(error, broker, rpc, self._connection):
                        absent = error.code() is grpc.StatusCode.NOT_FOUND
                        raise (NotThere if absent else ReadFailed)(final) from None
                    failures[broker] = _why_not(error, broker, self._connection)
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        _ask_last(broker, brokers)
                    continue
                failures.clear()
                why = complete(answer)
                if not why:
                    return answer
        if not why or len(failures) == len({*brokers}):
            silent = [f"{broker} {failures.get(broker, 'was not tried')}" for broker in self._connection.brokers]
            raise NoBroker(f"no broker answers: {_some(silent)}; brokers takes addresses of --grpc-address")
        raise ReadFailed(why)


_orders: dict[tuple[str, ...], tuple[str, ...]] = {}
"""The order in which this process asks a set of brokers. A query calls all the time, and a silent broker would cost
each of its calls `timeoutMs`."""


def _ask_last(silent: str, brokers: tuple[str, ...]) -> None:
    if len(_orders) >= ORDERS_MAX and brokers not in _orders:
        _orders.clear()
    others = [broker for broker in _orders.get(brokers, brokers) if broker != silent]
    _orders[brokers] = (*others, silent)


@contextmanager
def _stub(connection: ConnectOptions, broker: str) -> Iterator[Any]:
    from nsqha import grpc_channels
    from nsqha.cluster_secret import read_secret
    from nsqha.errors import ConfigError
    from nsqha.pb.v1 import segments_pb2_grpc

    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", ANSWER_BYTES_MAX)]
    tls = None
    if connection.tls is not None:
        tls = grpc_channels.credentials(
            ca=_file("nsqha.tls.ca", connection.tls.ca),
            key=_file("nsqha.tls.key", connection.tls.key),
            certificate=_file("nsqha.tls.cert", connection.tls.cert),
        )
    try:
        secret = read_secret(connection.secret_file)
    except ConfigError as error:
        why = str(error).removeprefix("--cluster-secret-file=")
        raise ReadFailed(f"option nsqha.clusterSecretFile: {why}") from None
    with grpc_channels.channel(broker, options, tls, secret, token()) as channel:
        yield segments_pb2_grpc.SegmentsStub(channel)


def _file(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ReadFailed(f"{option}: the file cannot be read on this machine: {error.strerror}") from None


def _final(error: Any, broker: str, rpc: str, connection: ConnectOptions) -> str:
    """The message of a permanent error; empty if another broker or a retry may help."""
    import grpc

    code, text = error.code(), _line(error.details() or "")
    codes = grpc.StatusCode
    passing = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "UNKNOWN", "INTERNAL")
    if code.name in passing:
        return ""
    if code is codes.UNIMPLEMENTED:
        return f"{broker} has no segment service: it is another program, or a broker older than this package"
    if code is codes.UNAUTHENTICATED:
        return f"{broker} refuses this machine: {text} (option nsqha.clusterSecretFile, or $NSQHA_TOKEN_FILE)"
    if code is codes.PERMISSION_DENIED:
        if token():
            return f"{broker} refuses this token: {text}; a reader's has the role reader"
        return f"{broker} refuses this certificate: {text}; a reader's has URI:nsqha:reader"
    if code is codes.RESOURCE_EXHAUSTED and rpc == "Snapshot":
        return f"{broker} cannot answer: {text}; ask for fewer topics, or fewer offsets of them"
    if code is codes.NOT_FOUND:
        return f"{text}; `nsqha topic list` shows what there is"
    return text or f"{rpc} at {broker} failed: {code.name}"


def _why_not(error: Any, broker: str, connection: ConnectOptions) -> str:
    """Why a broker could not answer, as the end of a sentence after its address."""
    import grpc

    from nsqha import grpc_channels

    text = error.details() or ""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"did not answer within {connection.timeout_ms} ms (timeoutMs)"
    if "refused" in text.lower():
        return "refused the connection"
    if "HTTP/2" in text or "http1" in text.lower():
        return "does not speak gRPC"
    if "Socket closed" in text and not grpc_channels.has_room(broker):
        return grpc_channels.NO_ROOM
    if connection.tls is None and any(sign in text for sign in ("Socket closed", "Connection reset", "GOAWAY")):
        return "closed the connection (if it requires a certificate: nsqha.tls.cert, nsqha.tls.key, nsqha.tls.ca)"
    if "Hostname Verification" in text:
        return "has a certificate without this name; give the name in its certificate in option brokers"
    if "handshake" in text.lower() or "certificate" in text.lower():
        return f"and this machine did not agree on TLS ({_line(text)})"
    return f"cannot answer now: {_line(text)}" if text else f"failed with {error.code().name}"


def checked(answer: Any, asked: SnapshotRequest) -> Snapshot:
    """The answer as plain values. ReadFailed if it contradicts itself or the request."""
    pins, times, floors, failed = [], {}, {}, {}
    before: Key = ("", -1)
    for said in answer.partitions:
        key = (str(said.topic), int(said.partition))
        where = f"the snapshot of {key[0]!r}/{key[1]}"
        if not valid_name(key[0]) or key[1] >= PARTITIONS_MAX or not said.topic_uid:
            raise ReadFailed(f"{where} is not of a valid partition; check that the broker has this version")
        if key <= before:
            raise ReadFailed(f"{where} is out of order or duplicated; check that the broker has this version")
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
    """The first snapshot with the times of a later one, limited to the ends of the first."""
    lives = {pin.identity for pin in later.pins}
    times = {}
    for pin in first.pins:
        key = (pin.identity.topic, pin.identity.partition)
        if pin.identity not in lives:
            raise ReadFailed(f"{key[0]}/{key[1]}: the topic was deleted or created again meanwhile; try again")
        found = {at: min(offset, pin.end.offset) for at, offset in later.times[key].items()}
        times[key] = {**first.times[key], **found}
    return replace(first, times=times)


def of_subscription(subscription: TopicSelection, **more: Any) -> SnapshotRequest:
    """The request for all topics that are subscribed to."""
    return SnapshotRequest(topics=subscription.names, pattern=subscription.pattern, **more)


def _cut(said: Any) -> CutPoint:
    return CutPoint(int(said.offset), int(said.log_id), int(said.position), int(said.timestamp_ns))


def _check_ascending(where: str, cuts: Sequence[CutPoint]) -> None:
    """ReadFailed unless log ids rise, and positions and offsets do not fall. An empty log has its one border twice."""
    for left, right in pairwise(cuts):
        if left[:3] == right[:3]:
            continue
        if left.log_id >= right.log_id or left.offset > right.offset or left.position > right.position:
            raise ReadFailed(f"{where} has borders that do not ascend: {left} before {right}; run `nsqha log verify`")


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _line(text: str) -> str:
    """The text as one line, shortened."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."
