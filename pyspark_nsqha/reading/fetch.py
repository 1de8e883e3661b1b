"""Fetches bytes of the log for one task: whole batches from any replica that serves them (docs/segments.md).

    Split -> GET [first, end) -> entries of 80 bytes, frames -> FetchedRun, .. -> GET what is left -> ..

One answer ends where a file of the log ends, so a split takes several requests. An answer is divided into runs while it
arrives: about `run_bytes` each, always whole batches; where these end is computed with numpy, for a whole answer at
once. Frames of all runs use the same memory, which stays in the processor's cache: a run is valid until the next one is
requested.

A replica on this host is tried first, then followers, in an order that differs per split so that all are used. It is
used until it fails: it is unreachable, behind, busy, or the caller reports that its bytes do not verify
(`retry_other`). Then the next one continues after the last run. Bytes that do not verify count as what all replicas
have only when each of them has sent them itself: an unreachable or busy one may have correct bytes. After `retries`
more rounds over all of them the fetch raises ReadFailed, or Gone if the leader says so, or if one replica does and no
other has it. Rounds in which one of them is only busy do not count, for at most `timeout_seconds`.

Only sizes are checked here: the entries, the head and the body of an answer must agree. Memory is allocated for bytes
that have arrived, not for announced ones. A connection is kept for the next task of the process.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final

from pyspark_nsqha.model import ENTRY_BYTES, FetchedRun, Gone, ReadFailed, ReplicaAddress, Split
from pyspark_nsqha.reading.runs import RUN_BYTES, Frames, Runs, borders_of, run_end
from pyspark_nsqha.token import headers

if TYPE_CHECKING:
    from pyspark_nsqha.options import Tls

ENTRIES_BYTES_MAX: Final = 16 << 20  # of one answer; the broker sends less
WHY_CHARACTERS_MAX: Final = 300
IDLE_MAX: Final = 4  # connections that are kept
IDLE_SECONDS: Final = 20.0  # less than a broker keeps one
PAUSE_SECONDS: Final = 0.5  # after the first round over all replicas; doubles with each round
PAUSE_SECONDS_MAX: Final = 5.0


def runs(
    split: Split,
    *,
    run_bytes: int = RUN_BYTES,
    tls: Tls | None = None,
    timeout_seconds: float = 30.0,
    retries: int = 3,
    host: str = "",
) -> Runs:
    """The runs of `split`, from its replicas or its files. `host` is the label of this machine (default: its name).

    The iterator raises ReadFailed if no replica serves what is left, Gone if none has it any more."""
    if split.path:
        from pyspark_nsqha.reading.files import FileRuns

        return FileRuns(split, run_bytes=run_bytes)
    return Fetch(split, run_bytes=run_bytes, tls=tls, timeout_seconds=timeout_seconds, retries=retries, host=host)


def in_order(split: Split, host: str) -> tuple[ReplicaAddress, ...]:
    """The replicas in the order in which this split tries them."""
    n = len(split.replicas)
    if not n:
        return ()
    turn = zlib.crc32(f"{split.identity.topic}/{split.identity.partition}/{split.first_log_id}".encode()) % n
    rotated = split.replicas[turn:] + split.replicas[:turn]
    return tuple(sorted(rotated, key=lambda replica: (replica.host != host, replica.leader)))


class _Refused(Exception):
    """A replica does not serve what is requested, and why."""

    def __init__(
        self,
        why: str,
        *,
        gone: tuple[int, int | None] | None = None,
        busy: bool = False,
        absent: bool = False,
        behind: bool = False,
    ) -> None:
        super().__init__(why)
        self.gone = gone  # (log id, offset) where its log starts
        self.busy = busy
        self.absent = absent  # the node has no such replica
        self.lacks = gone is not None or absent or behind  # it answered that it does not have it


class ReplicaTurns:
    """Which replica is asked, and what was wrong with each of them since the last accepted run."""

    def __init__(self, replicas: Sequence[ReplicaAddress]) -> None:
        self.replicas = replicas
        self.refusals: dict[str, _Refused] = {}  # by address
        self._turn = 0  # rises with each change of replica
        self._failures = 0
        self._rejected: Counter[str] = Counter()  # runs that began at the last one's log id, by address

    @property
    def replica(self) -> ReplicaAddress:
        return self.replicas[self._turn % len(self.replicas)]

    @property
    def addresses(self) -> set[str]:
        return {replica.address for replica in self.replicas}

    @property
    def round_over(self) -> bool:
        """Whether all of them have failed as often."""
        return self._failures % len(self.replicas) == 0

    @property
    def others_refused(self) -> bool:
        """Whether one refused that did not send what was rejected."""
        return any(address not in self._rejected for address in self.refusals)

    def accepted(self) -> None:
        """A run was good: begin to count again."""
        self._failures = 0
        self._rejected.clear()
        self.refusals.clear()

    def refused(self, refused: _Refused) -> None:
        """Go to the next replica."""
        self.refusals[self.replica.address] = refused
        self._failures += 1
        self._turn += 1

    def reject(self) -> bool:
        """Reject what this replica sent; returns whether it is wrong everywhere: only if each replica sent it, as an
        unreachable one may have correct ones."""
        self._rejected[self.replica.address] += 1
        return self._rejected.keys() == self.addresses and self._rejected.total() >= 2

    def removed(self) -> bool:
        """Whether retention has removed it. At least one replica says so: either the leader does, or no replica that
        may have it is left. One that did not answer may have it."""
        leaders = {replica.address for replica in self.replicas if replica.leader}
        return any(self.refusals[address].gone is not None for address in leaders & self.refusals.keys()) or all(
            refusal.lacks for refusal in self.refusals.values()
        )


class Fetch:
    """The runs of one split, fetched over HTTP."""

    def __init__(
        self, split: Split, *, run_bytes: int, tls: Tls | None, timeout_seconds: float, retries: int, host: str
    ) -> None:
        self._split = split
        self._run_bytes = run_bytes
        self._tls = tls
        self._timeout = timeout_seconds
        self._retries = retries
        self._turns = ReplicaTurns(in_order(split, host or socket.gethostname()))
        self._next = split.first_log_id
        self._last: FetchedRun | None = None
        self._rounds = 0  # over all replicas, since the last accepted run
        self._since = 0.0  # the time of the first of these rounds
        self._round_over = False  # a rejection ended it
        self._answer: _Answer | None = None
        self._frames = Frames()

    def __iter__(self) -> Iterator[FetchedRun]:
        return self

    def __next__(self) -> FetchedRun:
        if self._last is not None:
            self._last = None
            self._rounds = 0
            self._round_over = False
            self._turns.accepted()
        if self._round_over:
            self._end_round()
        while self._next < self._split.end_log_id:
            if not self._turns.replicas:
                raise ReadFailed(f"{self._what()}: the snapshot names no replica; check that its nodes are running")
            try:
                if self._answer is None:
                    self._answer = self._ask()
                run = self._answer.next_run(self._frames, self._run_bytes)
            except _Refused as refused:
                self._failed(refused)
                continue
            self._next += len(run.entries) // ENTRY_BYTES
            if self._answer.ended:
                _keep(self._answer.release())
                self._answer = None
            self._last = run
            return run
        self.close()
        raise StopIteration

    def retry_other(self, why: str) -> bool:
        """See `Runs`."""
        run = self._last
        if run is None:
            return False
        if self._turns.reject():
            return False
        self._last = None
        self._next = run.first_log_id
        self._count(_Refused(why))
        self._round_over = self._turns.others_refused and self._turns.round_over
        return True

    def close(self) -> None:
        """See `Runs`."""
        if self._answer is not None:
            self._answer.release().close()
            self._answer = None

    # ---- replicas

    def _failed(self, refused: _Refused) -> None:
        """Go to the next replica; ReadFailed after the last round."""
        self._count(refused)
        if self._turns.round_over:
            self._end_round()

    def _end_round(self) -> None:
        """End a round over all replicas: raise ReadFailed or Gone, or pause before the next round."""
        self._round_over = False
        refusals = self._turns.refusals
        starts = [refusal.gone for refusal in refusals.values() if refusal.gone is not None]
        if len(starts) == len(self._turns.addresses):
            raise self._gone(starts)
        now = monotonic()
        self._since = self._since if self._rounds else now
        busy = any(refusal.busy for refusal in refusals.values())
        if not self._rounds or not busy or now > self._since + self._timeout:
            self._rounds += 1
        if self._rounds > self._retries:
            if all(refusal.absent for refusal in refusals.values()):
                raise ReadFailed(
                    f"{self._what()}: no node has it any more: the topic was deleted or created again since load(), or "
                    "its replicas moved; load it again",
                    planned=self._planned,
                )
            if starts and self._turns.removed():
                raise self._gone(starts)
            reasons = "; ".join(f"{address}: {refusal}" for address, refusal in refusals.items())
            raise ReadFailed(f"{self._what()} cannot be read from any replica: {reasons}", planned=self._planned)
        sleep(min(PAUSE_SECONDS * 2 ** (self._rounds - 1), PAUSE_SECONDS_MAX))

    def _count(self, refused: _Refused) -> None:
        self.close()
        self._turns.refused(refused)

    @property
    def _planned(self) -> tuple[int, int]:
        return self._split.first, self._split.end

    def _gone(self, starts: Sequence[tuple[int, int | None]]) -> Gone:
        split = self._split
        log_id, offset = min(starts)
        available = None if offset is None else (min(max(offset, split.first), split.end), split.end)
        there = "" if available is None else f", there is [{available[0]}, {available[1]})"
        return Gone(
            f"{self._what()} is gone: retention has removed it, the log starts at log id {log_id}{there}; read from "
            "there, or keep it by a hold (holdMs) or a reader channel (commitChannel)",
            planned=self._planned,
            available=available,
        )

    def _what(self) -> str:
        split = self._split
        return (
            f"{split.identity.topic}/{split.identity.partition} offsets [{split.first}, {split.end}), from log id "
            f"{self._next}"
        )

    # ---- one request

    def _ask(self) -> _Answer:
        """Request the rest of the split from the current replica. _Refused."""
        split = self._split
        target = (
            f"/segments/{split.identity.topic_uid:016x}/{split.identity.partition}?first={self._next}"
            f"&end={split.end_log_id}&at={split.at_log_id}&chain={split.chain:016x}"
        )
        if split.hold_id:
            target += f"&hold={split.hold_id}"
        address = self._turns.replica.address
        try:
            used = _kept(address, self._tls)
            if used is not None:
                try:
                    return self._request(used, target)
                except (ConnectionError, http.client.HTTPException):
                    used.close()  # the broker had closed an idle connection: that is not a failure of the broker
            return self._request(_connect(address, self._tls, self._timeout), target)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Refused(_words(error)) from None

    def _request(self, connection: _FetchConnection, target: str) -> _Answer:
        try:
            connection.http.request("GET", target, headers=headers())
            response = connection.http.getresponse()
            if response.status != 200:
                raise _refusal(response)
            return _Answer(connection, response, self._next, self._split.end_log_id)
        except BaseException:
            connection.close()
            raise


class _Answer:
    """One answer with status 200, while it arrives."""

    def __init__(self, connection: _FetchConnection, response: http.client.HTTPResponse, first: int, end: int) -> None:
        """_Refused if its head and its entries do not agree."""
        self._connection = connection
        self._response = response
        self._log_id = first
        length = _header(response, "Content-Length")
        head_end = _header(response, "Nsqha-End")
        if _header(response, "Nsqha-First") != first or not first < head_end <= end:
            raise _Refused(f"it sent [{response.headers.get('Nsqha-First')}, {head_end}) instead of [{first}, {end})")
        size = (head_end - first) * ENTRY_BYTES
        if size > min(length, ENTRIES_BYTES_MAX):
            raise _Refused(f"it announced {size} bytes of entries in an answer of {length}")
        self._entries = memoryview(bytearray(size))
        self._fill(self._entries)
        self._borders = borders_of(self._entries)
        self._index = 0  # of the next batch
        announced = int(self._borders[-1])
        if size + announced != length:
            raise _Refused(f"its entries announce {announced} bytes of frames, but its head {length - size}")

    @property
    def ended(self) -> bool:
        """Whether all of it has been taken."""
        return self._index == len(self._borders) - 1

    def next_run(self, frames: Frames, run_bytes: int) -> FetchedRun:
        """The next batches; `frames` grows as their bytes arrive. _Refused: the answer breaks off."""
        first, end = self._index, run_end(self._borders, self._index, run_bytes)
        size = int(self._borders[end] - self._borders[first])
        have = 0
        while have < size:
            room = frames.room(have, size)
            self._fill(room)
            have += len(room)
        entries = self._entries[first * ENTRY_BYTES : end * ENTRY_BYTES]
        self._index = end
        return FetchedRun(self._log_id + first, entries, frames.view[:size])

    def _fill(self, view: memoryview) -> None:
        try:
            while view:
                n = self._response.readinto(view)
                if not n:
                    raise _Refused("it ended in the middle of an answer")
                view = view[n:]
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Refused(_words(error)) from None

    def release(self) -> _FetchConnection:
        """The connection, for another request if all was taken."""
        return self._connection


def _header(response: http.client.HTTPResponse, name: str) -> int:
    text = response.headers.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise _Refused(f"its answer has no {name}: it is not a segment service")
    return int(text)


def _refusal(response: http.client.HTTPResponse) -> _Refused:
    text = " ".join(response.read(4 * WHY_CHARACTERS_MAX).decode("utf-8", "replace").split())[:WHY_CHARACTERS_MAX]
    gone = None
    if response.status == 410:
        offset = response.headers.get("Nsqha-Start-Offset", "")
        gone = _header(response, "Nsqha-Log-Start"), int(offset) if offset.isdecimal() else None
    status = response.status
    why = f"{status} {text or response.reason}"
    return _Refused(why, gone=gone, busy=status == 503, absent=status == 404, behind=status == 409)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}; a reader needs nsqha.tls.cert, nsqha.tls.key and nsqha.tls.ca"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return " ".join(f"{type(error).__name__}: {error}".split())[:WHY_CHARACTERS_MAX]


# ---- connections


class _FetchConnection:
    """One connection to a broker, and when it was last used."""

    def __init__(self, http_: http.client.HTTPConnection, key: tuple[str, Any]) -> None:
        self.http = http_
        self.key = key
        self.since = 0.0

    def close(self) -> None:
        self.http.close()


def _connect(address: str, tls: Tls | None, timeout: float) -> _FetchConnection:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not host:port")
    if tls is None:
        plain = http.client.HTTPConnection(host, int(port), timeout=timeout)
        return _FetchConnection(plain, (address, None))
    return _FetchConnection(
        http.client.HTTPSConnection(host, int(port), timeout=timeout, context=_context(tls)), (address, tls)
    )


def _context(tls: Tls) -> ssl.SSLContext:
    """ReadFailed names the option whose file cannot be used: another replica or a retry would not help."""
    for option, path in (("nsqha.tls.cert", tls.cert), ("nsqha.tls.key", tls.key), ("nsqha.tls.ca", tls.ca)):
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            raise ReadFailed(f"{option}: {path} cannot be read on this machine: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cafile=tls.ca)
    except ssl.SSLError:
        raise ReadFailed(f"nsqha.tls.ca: {tls.ca} on this machine has no certificate (PEM)") from None
    try:
        # An encrypted key must not ask at a terminal that a worker does not have.
        context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
    except ssl.SSLError as error:
        why = (error.reason or str(error)).replace("_", " ").lower()
        raise ReadFailed(
            f"nsqha.tls.cert and nsqha.tls.key: {tls.cert} and {tls.key} on this machine are not a certificate and its "
            f"key (PEM, not encrypted): {why}"
        ) from None
    return context


_idle: list[_FetchConnection] = []
_idle_lock = threading.Lock()


def _kept(address: str, tls: Tls | None) -> _FetchConnection | None:
    """An idle connection that the broker has probably not closed yet, or None."""
    now = monotonic()
    with _idle_lock:
        for connection in [*_idle]:
            if now - connection.since > IDLE_SECONDS:
                _idle.remove(connection)
                connection.close()
        for connection in _idle:
            if connection.key == (address, tls):
                _idle.remove(connection)
                return connection
    return None


def _keep(connection: _FetchConnection) -> None:
    connection.since = monotonic()
    with _idle_lock:
        _idle.append(connection)
        surplus = _idle.pop(0) if len(_idle) > IDLE_MAX else None
    if surplus is not None:
        surplus.close()


def _forget_kept() -> None:
    """Drop all idle connections in a child process: they belong to the parent."""
    global _idle_lock
    _idle_lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget_kept)
