"""Calls to etcd: which endpoint, how long, how often, and what a failure means.

One channel per endpoint; all calls use the same one until it fails, then the first of the others that answers, as one
of them may be dead too (`on_rotate` reports it: a stream that hangs on a frozen member must move as well). Each call
has a deadline, after which

    a read                       is repeated, at most ATTEMPTS times, then Unavailable
    a change that was not sent   is repeated likewise
    a change that etcd refused   Unavailable or ConfigError; nothing was done
    a change without space       Full; it was carried out, or never will be, and a read shows which
    any other failed change      OutcomeUnknown; etcd may still carry it out, even after the next read

gRPC's own retries are off: a compare-and-set that is sent twice would report a conflict with itself.

Certificate files are read again whenever an endpoint fails, as with an expired certificate the next connection would.
If they changed and can be used, new connections use them; calls and streams that are under way stay on the old ones.

With a password, a token is requested when it is needed, and again when etcd does not know it any more (tokens expire
after some idle minutes). An etcd that was put back to an older state does not say so: a simple token names a log index
that it has not reached, and it lets the call wait. So whenever an endpoint fails or refuses a permission, a token that
is older than TOKEN_TRUSTED_S is dropped, too. The token is sent as plain metadata: gRPC refuses call credentials
without TLS.
"""

from __future__ import annotations

import contextlib
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nsqha import grpc_channels
from nsqha.clock import SystemClock

# isort: split
import grpc

from nsqha.election.etcd.bridge import rpc
from nsqha.errors import ConfigError, NsqhaError, OutcomeUnknown, StaleMetadata, Unavailable

CALL_S = 1.0  # longest time for one call; a member that died holds a call in flight for this long
ATTEMPTS = 4
LOGINS = 2  # call deadlines that a login may take
TOKEN_TRUSTED_S = 5.0  # a failure in this time after the login is not the token's; a login costs etcd 0.1 s of CPU
CONNECT_S = 1.0  # at most this long for one of the other endpoints to answer
PAUSE_S = 0.1  # before a call is tried again on the last endpoint of a round
MESSAGE_BYTES_MAX = 64 << 20  # of an answer; a page of records is far smaller

Metadata = tuple[tuple[str, str], ...]
Pems = tuple[bytes | None, bytes | None, bytes | None]  # CA, key, certificate
_Code = grpc.StatusCode

# Both ping options are needed: with the first alone a frozen member was noticed after 70 s. Below 5 s between pings
# etcd ends the connection (too_many_pings), and likewise after three of them without a call under way, which gRPC sends
# only with an option. gRPC's own back-off before it connects again grows to two minutes. The lowest back-off is also
# the longest time of one attempt to connect.
GRPC_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),
    # No pings that measure how much the connection takes: one for each renewal of a lease, and they wake threads. What
    # a page of records may take instead is given at once.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
)


class LoginToken(NamedTuple):
    """A login at etcd."""

    text: str
    since: float  # of the monotonic clock

    @property
    def may_be_why(self) -> bool:
        """True if a failure may be explained by this token."""
        return bool(self.text) and CLOCK.monotonic() - self.since > TOKEN_TRUSTED_S


NO_LOGIN = LoginToken("", 0.0)
CLOCK = SystemClock()


@dataclass(frozen=True)
class EtcdOptions:
    """How to reach etcd."""

    endpoints: tuple[str, ...]  # host:port, also http://host:port and https://host:port
    ca: str = ""  # files; a CA, or https:// in an endpoint, means TLS
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    call_s: float = CALL_S

    def __post_init__(self) -> None:
        """Raise ConfigError if options contradict each other."""
        if not self.endpoints:
            raise ConfigError("no etcd endpoint is given; name at least one host:port")
        for endpoint in self.endpoints:
            _target(endpoint)
        if len({_scheme(endpoint) for endpoint in self.endpoints} - {""}) > 1:
            raise ConfigError("some etcd endpoints are http://, some https://; use one of them")
        if bool(self.cert) != bool(self.key):
            raise ConfigError("a client certificate for etcd needs both its file and its key's file")
        if self.cert and not self.tls:
            raise ConfigError("a client certificate for etcd needs TLS; name the CA's file or use https:// endpoints")
        if any(_scheme(endpoint) == "http" for endpoint in self.endpoints) and self.ca:
            raise ConfigError("http:// endpoints do not use TLS; leave out the CA or write https://")
        if bool(self.user) != bool(self.password):
            raise ConfigError("etcd's user and password must be given together")
        if not 0 < self.call_s <= CALL_S:
            raise ConfigError(f"the deadline of a call to etcd is {self.call_s} s; must be above 0, at most {CALL_S}")

    @property
    def tls(self) -> bool:
        return bool(self.ca) or any(_scheme(endpoint) == "https" for endpoint in self.endpoints)


class EtcdClient:
    """Channels and calls, from any thread. A call blocks at most ATTEMPTS times its deadline plus CONNECT_S."""

    def __init__(self, options: EtcdOptions, *, etcd_cluster_id: int = 0, revision_seen: int = 0) -> None:
        """`etcd_cluster_id` and `revision_seen` (0: none) come from the node's journal. Nothing is sent yet."""
        self.options = options
        self._pems = _pems(options)
        self._unusable = ""  # why the present certificate files are not used
        self._lock = threading.Lock()
        self._stubs: list[Stubs | None] = [None] * len(options.endpoints)
        self._current = 0
        self._rotating = threading.Lock()
        self._token = NO_LOGIN
        self._login = threading.Lock()
        self._cluster_id = etcd_cluster_id
        self._revision = revision_seen
        self._stale = ""
        self.foreign = False  # the reason of `doubt` is another etcd, not an older state of ours
        self._closed = threading.Event()
        self._rotated: list[Callable[[], None]] = []

    # State of the other side

    @property
    def etcd_cluster_id(self) -> int:
        return self._cluster_id

    @property
    def revision(self) -> int:
        """The highest revision that this process has seen."""
        return self._revision

    @property
    def doubt(self) -> str:
        """Why this etcd is not trusted; empty: it is."""
        return self._stale

    def forget(self) -> None:
        """Trust the next etcd that answers, as if nothing had been seen yet."""
        with self._lock:
            self._stale, self.foreign, self._cluster_id, self._revision = "", False, 0, 0
            self._token = NO_LOGIN

    def check(self) -> None:
        """Raise StaleMetadata if any answer so far came from a foreign or older etcd."""
        if self._stale:
            raise StaleMetadata(self._stale)

    def distrust(self, why: str) -> None:
        """Raise StaleMetadata from now on, for this reason: an older state of our etcd was found by other signs."""
        with self._lock:
            self._stale = self._stale or why

    def saw(self, header: Any, *, at_least: int) -> None:
        """Check an answer's header: it must be of our etcd, and not older than `at_least`, the revision known before.

        Raises StaleMetadata, now and from now on."""
        with self._lock:
            if self._stale:
                raise StaleMetadata(self._stale)
            if not self._cluster_id:
                self._cluster_id = header.cluster_id
            if header.cluster_id != self._cluster_id:
                self.foreign = True
                self._stale = (
                    f"etcd {', '.join(self.options.endpoints)} is cluster {header.cluster_id:016x}, this node belongs "
                    f"to {self._cluster_id:016x}; connect it to the right one, or see nsqha cluster accept-metadata"
                )
            elif header.revision < at_least:
                self._stale = (
                    f"etcd {', '.join(self.options.endpoints)} is at revision {header.revision}, this node has seen "
                    f"{at_least}: it was restored to an older state; see nsqha cluster accept-metadata"
                )
            if self._stale:
                raise StaleMetadata(self._stale)
            self._revision = max(self._revision, header.revision)

    # Calls

    def read(self, method: Callable[[Stubs], Any], request: Any) -> Any:
        """A linearizable read, repeated until it succeeds or ATTEMPTS are used up. Unavailable, StaleMetadata."""
        return self._checked(method, request, repeatable=True)

    def change(self, method: Callable[[Stubs], Any], request: Any) -> Any:
        """Send a change at most once. OutcomeUnknown, Unavailable (nothing was done), StaleMetadata (likewise, if
        `check` raised it first; if an answer from a foreign etcd did, that etcd was changed)."""
        return self._checked(method, request, repeatable=False)

    def lease_call(self, method: Callable[[Stubs], Any], request: Any, *, repeatable: bool = True) -> Any:
        """Make a call whose answer's revision is not checked: leases are not data and any member may answer."""
        self.check()
        answer = self._call(method, request, repeatable)
        self.saw(answer.header, at_least=0)
        return answer

    def _checked(self, method: Callable[[Stubs], Any], request: Any, *, repeatable: bool) -> Any:
        self.check()
        at_least = self._revision  # before the call: answers may overtake each other
        answer = self._call(method, request, repeatable)
        self.saw(answer.header, at_least=at_least)
        return answer

    def _call(self, method: Callable[[Stubs], Any], request: Any, repeatable: bool) -> Any:
        failure: NsqhaError = Unavailable("etcd was not asked")
        for attempt in range(ATTEMPTS):
            if self._closed.is_set():
                raise Unavailable("the connection to etcd was closed")
            index, token = self._current, ""
            try:
                token = self.token()
                return method(self._stubs_of(index))(request, timeout=self.options.call_s, metadata=_metadata(token))
            except ValueError:
                # What gRPC says when the channel was closed meanwhile; before anything is sent.
                if not self._closed.is_set():
                    raise
            except grpc.RpcError as error:
                if _token_expired(error):
                    self.forget_token(token)
                    failure = Unavailable(f"etcd does not take the login of {self.options.user}: {_text(error)}")
                    continue
                failure = _meaning(error, self._unusable)
                if isinstance(failure, ConfigError) and self._token.may_be_why:
                    self.forget_token(token)
                    continue
                if isinstance(failure, Full) or not (isinstance(failure, OutcomeUnknown) or _not_sent(error)):
                    raise failure from None
                self.rotate(index)
                if isinstance(failure, OutcomeUnknown):
                    if not repeatable:
                        raise failure from None
                    failure = Unavailable(f"etcd does not answer: {_text(error)}")
            if attempt % len(self._stubs) == len(self._stubs) - 1:
                self._closed.wait(PAUSE_S)
        raise failure

    def confirm(self, key: bytes) -> None:
        """Read only to check the answer's header, which reveals an older etcd. Unavailable, StaleMetadata.

        `key`: one that the login may read; in a secured etcd that is only the cluster's prefix."""
        self.read(lambda stubs: stubs.kv.Range, rpc.RangeRequest(key=key, count_only=True))

    # Streams

    @property
    def endpoint(self) -> int:
        """The endpoint in use now, to open a stream on it and to leave it when that stream breaks."""
        return self._current

    def open_stream(self, endpoint: int, method: Callable[[Stubs], Any], requests: Any) -> Any:
        """Open a stream with a valid token; errors come while it is read."""
        return method(self._stubs_of(endpoint))(requests, metadata=_metadata(self.token()))

    def on_rotate(self, moved: Callable[[], None]) -> None:
        """Call `moved` when another endpoint is used from now on; from any thread, must not block."""
        self._rotated.append(moved)

    def rotate(self, failed: int) -> None:
        """Use another endpoint, unless `failed` was left already: streams and calls notice one after the other that a
        member died, and without this check they would rotate back to it."""
        self._renew()
        if self._token.may_be_why:
            self.forget_token()
        with self._rotating:
            if len(self._stubs) == 1 or failed != self._current:
                return
            count = len(self._stubs)
            with self._lock:
                self._stubs[failed] = None  # the channel to a frozen member would still look connected
            self._current = self._speaking([(failed + n) % count for n in range(1, count)])
        for moved in self._rotated:
            moved()

    def _speaking(self, endpoints: list[int]) -> int:
        """The first of them to answer anything; the first in the list if that takes too long, or none does."""
        if len(endpoints) == 1:
            return endpoints[0]
        speaking: list[int] = []
        silent: set[int] = set()
        decided = threading.Event()

        def ended(endpoint: int, asked: Any) -> None:
            if asked.code() in (_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.CANCELLED):
                silent.add(endpoint)
            else:
                speaking.append(endpoint)
            if speaking or len(silent) == len(endpoints):
                decided.set()

        asked = []
        with contextlib.suppress(Unavailable, ValueError):  # the client was closed; gRPC raises ValueError then
            for endpoint in endpoints:
                asked.append(self._stubs_of(endpoint).health.future(b"", timeout=CONNECT_S))
                asked[-1].add_done_callback(partial(ended, endpoint))
            decided.wait(CONNECT_S)
        for each in asked:
            each.cancel()
        found = next(iter(speaking), endpoints[0])
        with self._lock:
            for endpoint in set(endpoints) - {found}:
                self._stubs[endpoint] = None
        return found

    def _renew(self) -> None:
        """Connect with the present certificate files, if they changed."""
        try:
            pems = _pems(self.options)
        except ConfigError as error:
            self._unusable = f"; {error}"
            return
        with self._lock:
            self._unusable = ""
            if pems != self._pems:
                self._pems = pems
                # Not closed: calls and streams under way keep their channel, which is freed with the last of them.
                self._stubs = [None] * len(self._stubs)

    # Login

    def token(self) -> str:
        """The login token; empty without a user. Raises what a call raises; ConfigError for a wrong password."""
        if not self.options.user or self._token.text:
            return self._token.text
        # A login costs etcd a tenth of a second of CPU, by design: threads that need one share it.
        if not self._login.acquire(timeout=LOGINS * self.options.call_s):
            raise Unavailable("etcd does not answer: a login is under way")
        try:
            return self._token.text or self._authenticate()
        finally:
            self._login.release()

    def _authenticate(self) -> str:
        request = rpc.AuthenticateRequest(name=self.options.user, password=self.options.password)
        timeout = LOGINS * self.options.call_s
        try:
            answer = self._stubs_of(self._current).auth.Authenticate(request, timeout=timeout)
        except grpc.RpcError as error:
            if error.code() == _Code.INVALID_ARGUMENT and "authentication failed" in _text(error):
                raise ConfigError(f"etcd refuses user {self.options.user} with this password") from None
            raise
        self._token = LoginToken(answer.token, CLOCK.monotonic())
        return answer.token  # type: ignore[no-any-return]

    def forget_token(self, token: str | None = None) -> None:
        """Log in again before the next call, unless `token` has been replaced already."""
        if token is None or token == self._token.text:
            self._token = NO_LOGIN

    def close(self) -> None:
        """Calls that wait end with Unavailable, streams with an error."""
        self._closed.set()
        with self._lock:
            for stubs in self._stubs:
                if stubs is not None:
                    stubs.channel.close()

    def _stubs_of(self, index: int) -> Stubs:
        with self._lock:
            if self._closed.is_set():
                raise Unavailable("the connection to etcd was closed")
            stubs = self._stubs[index]
            if stubs is None:
                target = _target(self.options.endpoints[index])
                tls = None
                if self._pems is not None:
                    ca, key, certificate = self._pems
                    tls = grpc_channels.credentials(ca=ca, key=key, certificate=certificate)
                self._stubs[index] = stubs = Stubs(grpc_channels.channel(target, GRPC_OPTIONS, tls))
            return stubs


class Stubs:
    """etcd3's stubs over one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.kv: Any = rpc.KVStub(channel)
        self.lease: Any = rpc.LeaseStub(channel)
        self.watch: Any = rpc.WatchStub(channel)
        self.auth: Any = rpc.AuthStub(channel)
        # Needs no login. An etcd that does not know this call answers with an error, which is an answer too.
        self.health: Any = channel.unary_unary("/grpc.health.v1.Health/Check")


def _metadata(token: str) -> Metadata:
    return (("token", token),) if token else ()


def _scheme(endpoint: str) -> str:
    return endpoint.split("://", 1)[0] if "://" in endpoint else ""


def _target(endpoint: str) -> str:
    """host:port for gRPC. ConfigError."""
    scheme, address = _scheme(endpoint), endpoint.split("://", 1)[-1]
    host, colon, port = address.rpartition(":")
    if scheme not in ("", "http", "https") or not host or not colon or not port.isdecimal() or int(port[:9]) > 65535:
        raise ConfigError(f"{endpoint!r} is not an endpoint of etcd; write host:port or https://host:port")
    return address


def _pems(options: EtcdOptions) -> Pems | None:
    """The contents of the files, None without TLS. ConfigError if they cannot be used: gRPC says "handshake failed"."""
    if not options.tls:
        return None
    pems = _file(options.ca), _file(options.key), _file(options.cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if options.ca:
            context.load_verify_locations(cafile=options.ca)
        if options.cert:
            # For an encrypted key OpenSSL would ask on the terminal. gRPC cannot use one either.
            context.load_cert_chain(options.cert, options.key, password="")
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (options.ca, options.cert, options.key)))
        why = error.strerror or getattr(error, "reason", None) or str(error)
        raise ConfigError(f"{files} for the connection to etcd cannot be used: {why}") from None
    return pems


def _file(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} for the connection to etcd cannot be read: {error.strerror}") from error


def _text(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"


def reason(error: Exception) -> str:
    """The text of an error for a log line."""
    if isinstance(error, grpc.RpcError):
        return _text(error)
    return str(error) if isinstance(error, (NsqhaError, ValueError)) else f"{type(error).__name__}: {error}"


def _token_expired(error: grpc.RpcError) -> bool:
    """Whether etcd refused the token, which it checks before it does anything."""
    details = error.details() or ""
    return "invalid auth token" in details or "revision of auth store is old" in details


def _cause(details: str) -> str:
    """`127.0.0.1:2379: Connection refused` from gRPC's whole sentence."""
    cause = re.sub(r"^[A-Z_]+: (ipv[46]:)?", "", details.rpartition("last error: ")[2])
    return cause.replace("Failed to connect to remote host: ", "")


def _not_sent(error: grpc.RpcError) -> bool:
    return error.code() == _Code.UNAVAILABLE and "failed to connect to all addresses" in (error.details() or "")


def _meaning(error: grpc.RpcError, remark: str = "") -> NsqhaError:
    """OutcomeUnknown unless it is certain that nothing was done. `remark`: another possible reason of a failure."""
    code, details = error.code(), error.details() or ""
    if _not_sent(error):
        return Unavailable(f"etcd cannot be reached: {_cause(details)}{remark}")
    if code == _Code.PERMISSION_DENIED or (code == _Code.INVALID_ARGUMENT and "user name is empty" in details):
        return ConfigError(f"etcd refuses this user: {details}")
    if details.startswith("etcdserver:") and "space exceeded" in details:
        return Full(f"etcd is full: {details}")
    if details.startswith("etcdserver:") and code not in (_Code.UNAVAILABLE, _Code.UNKNOWN, _Code.DEADLINE_EXCEEDED):
        # Too large, compacted, lease gone: etcd itself refused. Its "request timed out" is UNAVAILABLE.
        return Compacted(details) if "compacted" in details else Unavailable(f"etcd refuses: {details}")
    return OutcomeUnknown(f"etcd did not answer: {_text(error)}")


class Full(OutcomeUnknown):
    """etcd has no space left. It answers this to a change that it refuses, and to the first ones that it carries out
    over its quota: those are in force."""


class Compacted(Unavailable):
    """The asked-for revision is no longer kept."""
