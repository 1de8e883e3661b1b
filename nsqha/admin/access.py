"""Checks before a call is carried out: the caller may do this (`nsqha.access`), and the request can be read; and the
record of what was changed.

Who a caller is, first come, first served:

    a token in `authorization`     what the access file says of it
    a proof of the cluster's       a process of the cluster: everything. Without an access file every caller has one
    secret, a node's certificate   where there is a secret, see `nsqha.server.peers.calls`
    another certificate            the roles of its URIs (`nsqha.access.certificates`)
    nothing                        `anonymous` of the access file; without one everything, where there is no TLS

Methods between nodes check their callers themselves (`nsqha.server.peers.calls`). What a node asks another one on
behalf of its caller (`here`) was judged and is recorded where it came in.

The caller of a single request is checked when the request has arrived, as what it needs may depend on it. So no method
of our own services takes a stream of requests; of others (reflection) the stream is checked as it begins.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from nsqha.access.certificates import certified
from nsqha.access.roles import Grant, Need, Role, granted
from nsqha.access.surfaces import ADMINISTER, BODIES_TOO, DEAD_LETTER_TOPIC, GRPC, INSPECT, need_of, writes_audit
from nsqha.election.policy import target_topic
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import admin_pb2, segments_pb2
from nsqha.server.authorization.audit import AdminAction, Audit, skips_text
from nsqha.server.authorization.guard import FORBIDDEN, TOO_MANY, UNAUTHORIZED, UNKNOWN, Denied, Guard, bearer
from nsqha.server.peers import calls as peer_grpc
from nsqha.server.peers.api import ADMINISTRATOR_URI, PeerIdentity
from nsqha.server.peers.identity import is_member
from nsqha.server.runtime.rare_warnings import RareWarnings

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

    from nsqha.election.session import View

_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
_SEGMENTS = segments_pb2.DESCRIPTOR.services_by_name["Segments"]
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
JUDGED = (_ADMIN.full_name, _SEGMENTS.full_name, REFLECTION)
"""The services whose callers this gate looks at."""
_LIST_MESSAGES = f"/{_ADMIN.full_name}/ListMessages"
_UPDATE_POLICY = f"/{_ADMIN.full_name}/UpdateChannelPolicy"
_SNAPSHOT = f"/{_SEGMENTS.full_name}/Snapshot"
_STATUS = {
    UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    TOO_MANY: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_REFUSED = frozenset(code.name for code in _STATUS.values())
_UNKNOWN = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "CANCELLED"))
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
TARGETS = ("topic", "topics", "pattern", "channel", "partition", "action", "paused", "hold_id", "hold_ms")
"""The fields of requests that the audit shows."""
SHOWN_BYTES_MAX = 64 * 1024

ANYBODY = granted("anonymous", (Role.NODE,))
"""A caller where nobody is asked who it is."""
PROCESS = granted("cluster secret", (Role.NODE,))
"""A process of the cluster, or somebody who has its secret."""

logger = Logger("admin")

Context = Any  # grpc.aio.ServicerContext, which has no usable types


def only_single_requests(service: ServiceDescriptor) -> None:
    """TypeError if a method of it takes a stream of requests."""
    for method in service.methods:
        if method.client_streaming:
            raise TypeError(f"{service.full_name}/{method.name}: the caller would not be checked")


class CallFacts(NamedTuple):
    """What is known of a call before its request arrives."""

    method: str
    need: Need
    details: Any

    @property
    def metadata(self) -> dict[str, str]:
        return peer_grpc.metadata_of(self.details)


class AdminGate(aio.ServerInterceptor):  # type: ignore[misc]  # untyped
    """Ends calls of callers that may not do this with UNAUTHENTICATED or PERMISSION_DENIED. A request that cannot be
    parsed ends any call with INVALID_ARGUMENT."""

    def __init__(
        self,
        view: Callable[[], View],
        guard: Guard | None = None,
        audit: Audit | None = None,
        *,
        proofs: bool = False,
        audit_topic: str = "",
    ) -> None:
        """`view` returns the cluster's view; that of a node without a cluster is empty. `proofs`: there is a gate in
        front that passes on only those proofs of the cluster's secret that are right."""
        for service in (_ADMIN, _SEGMENTS):
            only_single_requests(service)
        self._view = view
        self._guard = guard
        self._audit = audit
        self._proofs = proofs
        self._audit_topic = audit_topic  # that only daemons and administrators change
        self._refused = RareWarnings(logger, "stranger_refused")

    @staticmethod
    def check_table(services: Iterable[ServiceDescriptor]) -> None:
        """ConfigError: it is not said what one of their methods needs."""
        for service in services:
            for method in service.methods:
                need_of(GRPC, f"{service.full_name}/{method.name}")

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = await continuation(details)
        method: str = details.method
        if handler is None:
            return None
        judged = method.startswith(tuple(f"/{service}/" for service in JUDGED))
        call = CallFacts(method, GRPC.get(method[1:], INSPECT), details) if judged else None
        if handler.request_streaming or handler.request_deserializer is None:
            return handler if call is None else self._streaming(call, handler)
        if handler.unary_unary is not None:

            async def answer(data: bytes, context: Context) -> Any:
                return await self._answer(call, method, handler, data, context)

            return grpc.unary_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)

        if inspect.iscoroutinefunction(handler.unary_stream):

            async def writes(data: bytes, context: Context) -> None:
                await handler.unary_stream(await self._read(call, method, handler, data, context), context)

            return grpc.unary_stream_rpc_method_handler(writes, response_serializer=handler.response_serializer)

        async def answers(data: bytes, context: Context) -> AsyncIterator[Any]:
            async for message in handler.unary_stream(await self._read(call, method, handler, data, context), context):
                yield message

        return grpc.unary_stream_rpc_method_handler(answers, response_serializer=handler.response_serializer)

    def _streaming(self, call: CallFacts, handler: Any) -> Any:
        if not call.method.startswith(f"/{REFLECTION}/") or handler.stream_stream is None:
            raise TypeError(f"{call.method}: the caller would not be checked")

        async def answers(requests: Any, context: Context) -> AsyncIterator[Any]:
            if self._guard is not None:  # else whoever can connect may ask, as ever
                await self._admitted(call, context)
            async for message in handler.stream_stream(requests, context):
                yield message

        return grpc.stream_stream_rpc_method_handler(
            answers, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    async def _read(self, call: CallFacts | None, method: str, handler: Any, data: bytes, context: Context) -> Any:
        """The request of a caller that may ask this; `call` None: everybody may."""
        if call is None:
            return await _parsed(handler, data, context, method)
        grant = await self._admitted(call, context)
        request = await _parsed(handler, data, context, method)
        for need in self._needed_too(call, request):
            await self._check(need, grant, context)
        return request

    def _needed_too(self, call: CallFacts, request: Any) -> Iterator[Need]:
        """What this request needs beside the need of its method."""
        if call.method == _LIST_MESSAGES and request.bodies:
            yield BODIES_TOO
        if self._audit_topic and getattr(request, "topic", "") == self._audit_topic:
            yield writes_audit(call.need)
        if call.method == _UPDATE_POLICY and (target := target_topic({"dead_letter": request.set.dead_letter})):
            yield DEAD_LETTER_TOPIC
            if target == self._audit_topic:
                yield ADMINISTER

    async def _answer(self, call: CallFacts | None, method: str, handler: Any, data: bytes, context: Context) -> Any:
        if call is None or not call.need.change or self._audit is None:
            return await handler.unary_unary(await self._read(call, method, handler, data, context), context)
        attempt = Attempt(call)
        try:
            grant = await self._admitted(call, context, attempt)
            request = attempt.request = await _parsed(handler, data, context, method)
            for need in self._needed_too(call, request):
                attempt.need = need if need.roles else attempt.need
                await self._check(need, grant, context)
            attempt.answer = answer = await handler.unary_unary(request, context)
            return answer
        finally:
            attempt.read(handler, data)
            if not attempt.passed_on and not attempt.looks_only:
                self._audit.record(attempt.action(context))

    # ---- who it is

    async def _admitted(self, call: CallFacts, context: Context, attempt: Attempt | None = None) -> Grant:
        """What the caller was granted; ends the call if that does not do."""
        peer = peer_grpc.identity_of(context.auth_context(), peer_grpc.address_of(context))
        guard, token = self._guard, call.metadata.get("authorization")
        if guard is not None and token is not None:
            try:
                grant = guard.token(bearer(token), peer.address).grant
            except Denied as denied:
                if attempt is not None:
                    attempt.who = denied.who
                await _abort(context, denied)
                raise
        else:
            grant = self._without_token(call, peer)
        if attempt is not None:
            attempt.who, attempt.by_node = grant.who, Role.NODE in grant.roles
        await self._check(call.need, grant, context)
        return grant

    def _without_token(self, call: CallFacts, peer: PeerIdentity) -> Grant:
        guard = self._guard
        if peer.verified:
            if is_member(self._view(), peer):
                return granted(str(peer), (Role.NODE,))
            of_certificate = certified(peer.name, peer.uris)
            if of_certificate.roles or guard is None:
                return of_certificate
        if self._proofs and peer_grpc.has_proof(call.metadata):
            return PROCESS
        return ANYBODY if guard is None else guard.table.anonymous

    async def _check(self, need: Need, grant: Grant, context: Context) -> None:
        if grant.may(need):
            return
        address = peer_grpc.address_of(context)
        if self._guard is not None:
            try:
                self._guard.check(need, grant, address)
            except Denied as denied:
                await _abort(context, denied)
        self._refused.warning("%s from %s may not do this: it needs the role %s", grant.who, address, need)
        why = (
            f"{grant.who} at {address} is no administrator's ({ADMINISTRATOR_URI}), gives the role {need} in no other "
            "way, and is no node's of this cluster"
        )
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)


class Attempt:
    """One change that is asked for, for the audit."""

    __slots__ = ("_began", "_call", "answer", "by_node", "need", "request", "who")

    def __init__(self, call: CallFacts) -> None:
        self.who = UNKNOWN
        self.by_node = False
        self.request: Any = None
        self.answer: Any = None
        self.need = call.need
        self._call = call
        self._began = time.perf_counter()

    def read(self, handler: Any, data: bytes) -> None:
        """Read the request of a call that was refused before that, if it is not a large one."""
        if self.request is None and len(data) <= SHOWN_BYTES_MAX:
            with suppress(DecodeError):
                self.request = handler.request_deserializer(data)

    @property
    def passed_on(self) -> bool:
        """Whether a node asks on behalf of its caller."""
        request = self.request
        if request is None or "here" not in request.DESCRIPTOR.fields_by_name:
            return False
        return self.by_node and bool(request.HasField("here"))

    @property
    def looks_only(self) -> bool:
        """Whether nothing would have changed in any case: a snapshot that holds nothing."""
        return self._call.method == _SNAPSHOT and self.request is not None and not self.request.hold_ms

    def action(self, context: Context) -> AdminAction:
        request, answer = self.request, self.answer
        target = "" if request is None else target_of(request)
        if self._call.method == _SNAPSHOT and answer is not None and not request.hold_id:
            target += f" hold_id={answer.hold_id}"
        return AdminAction(
            who=self.who,
            role=str(self.need),
            address=peer_grpc.address_of(context),
            surface="grpc",
            method=self._call.method[1:],
            target=target,
            plan=bool(getattr(request, "plan_only", False)),
            outcome=_outcome(context.code()) if answer is None else outcome_of(answer),
            took=time.perf_counter() - self._began,
        )


def target_of(request: Any) -> str:
    """What a change is about: the names in its request."""
    fields = request.DESCRIPTOR.fields_by_name
    shown = []
    for name in TARGETS:
        if name not in fields or (fields[name].has_presence and not request.HasField(name)):
            continue
        value: Any = getattr(request, name)
        if fields[name].is_repeated:
            value = ",".join(value)
        elif fields[name].enum_type is not None:
            known = fields[name].enum_type.values_by_number.get(value)
            value = value if known is None else known.name
        elif isinstance(value, bool):
            value = str(value).lower()
        if value or fields[name].has_presence:
            shown.append(f"{name}={value}")
    return " ".join(shown)


def outcome_of(answer: Any) -> str:
    """`done`, or in how many partitions, or for how many messages that were named, it failed: an answer has a line for
    each; and how many messages that were never finished it skips."""
    lists = [getattr(answer, field.name) for field in answer.DESCRIPTOR.fields if field.is_repeated]
    parts = [part for parts in lists for part in parts]
    failed = sum(bool(getattr(part, "error", "")) for part in parts)
    messages = sum(len(getattr(part, "failed", ())) for part in parts)
    why = f"PARTITIONS ({failed})" if failed else f"MESSAGES ({messages})" if messages else ""
    return (f"failed: {why}" if why else "done") + skips_text(sum(_skips_of(one) for one in (answer, *parts)))


def _skips_of(answer: Any) -> int:
    counts = (getattr(answer, name, 0) for name in ("skipped", "messages_lost"))
    return sum(count for count in counts if isinstance(count, int))


def _outcome(code: Any) -> str:
    code = getattr(code, "name", None) or str(_CODES.get(code, "UNKNOWN"))
    kind = "refused" if code in _REFUSED else "unknown" if code in _UNKNOWN else "failed"
    return f"{kind}: {code}"


async def _abort(context: Context, denied: Denied) -> None:
    await context.abort(_STATUS[denied.status], denied.why)


async def _parsed(handler: Any, data: bytes, context: Context, method: str) -> Any:
    try:
        return handler.request_deserializer(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{len(data)} bytes that are no request of {method}")
