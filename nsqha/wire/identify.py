"""IDENTIFY: what the client asks for, what it gets, and the JSON that tells it.

The body decodes as nsqd decodes it (`nsqha.gojson`).

A client that sends `"nsqha_ports": true`, which is ours, finds the other ports of this server under that key.

A client may IDENTIFY again before SUB: zeros then keep what was agreed before, the names are always replaced.
"""

from __future__ import annotations

import json

import msgspec

from nsqha.texts import gojson
from nsqha.wire import encoder
from nsqha.wire.limits import ProtocolLimits

BODY_BYTES_MAX = 64 << 10
"""Real clients send a few hundred bytes; decoded JSON takes many times its size, before anybody has authenticated."""

_BAD_JSON = b"E_BAD_BODY IDENTIFY failed to decode JSON body"
_TWO_CODECS = b"E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"


class _Wishes(msgspec.Struct, kw_only=True):
    """The body of an IDENTIFY; zero and empty: nothing was asked for."""

    client_id: str = ""
    hostname: str = ""
    user_agent: str = ""
    topology_region: str = ""
    topology_zone: str = ""
    feature_negotiation: bool = False
    tls_v1: bool = False
    snappy: bool = False
    deflate: bool = False
    nsqha_ports: bool = False
    heartbeat_interval: int = 0
    output_buffer_size: int = 0
    output_buffer_timeout: int = 0
    deflate_level: int = 0
    sample_rate: gojson.Int32 = 0
    msg_timeout: int = 0
    # Fields that clients of the Youzan fork send, whatever they ask for in them.
    multiplexing: gojson.Given = False
    desired_tag: gojson.Given = False
    extend_support: gojson.Given = False

    @property
    def of_fork(self) -> bool:
        return self.multiplexing or self.desired_tag or self.extend_support


class Agreed(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in force for a connection."""

    heartbeat_interval_ms: int
    """0: no heartbeats, no read deadline, no SUB."""
    msg_timeout_ms: int
    output_buffer_bytes: int
    output_buffer_timeout_ms: int
    """0: no timer."""
    deflate_level: int
    client_id: str = ""
    hostname: str = ""
    user_agent: str = ""
    topology_region: str = ""
    topology_zone: str = ""
    feature_negotiation: bool = False
    sample_rate: int = 0
    tls: bool = False
    """This IDENTIFY switches the connection to TLS."""
    of_fork: bool = False
    """The client is one of the Youzan fork."""
    codec: str = ""
    """`snappy` or `deflate` if this IDENTIFY switches to it, inside TLS if that is on."""

    @property
    def snappy(self) -> bool:
        return self.codec == "snappy"

    @property
    def deflate(self) -> bool:
        return self.codec == "deflate"


class AgreedIdentify(msgspec.Struct, frozen=True):
    """An IDENTIFY that was understood: apply `agreed`, send `reply` (a whole frame), then upgrade."""

    agreed: Agreed
    reply: bytes


def initial(limits: ProtocolLimits) -> Agreed:
    """What holds for a client that has not sent IDENTIFY."""
    return Agreed(
        heartbeat_interval_ms=limits.heartbeat_interval_default_ms,
        msg_timeout_ms=limits.msg_timeout_default_ms,
        output_buffer_bytes=limits.output_buffer_bytes_default,
        output_buffer_timeout_ms=limits.output_buffer_timeout_default_ms,
        deflate_level=min(6, limits.deflate_level_max),
    )


def negotiate(body: bytes, limits: ProtocolLimits, before: Agreed) -> AgreedIdentify | bytes:
    """What is agreed on top of `before`; an error's data if the body is refused."""
    try:
        wishes = gojson.decode(body, _Wishes)
    except ValueError:
        return _BAD_JSON
    agreed = _settings(wishes, limits, before)
    if isinstance(agreed, bytes):
        return agreed
    if not agreed.feature_negotiation:
        return AgreedIdentify(agreed, encoder.OK)
    snappy = limits.snappy and wishes.snappy
    deflate = limits.deflate and wishes.deflate
    if snappy and deflate:
        return _TWO_CODECS
    wanted = wishes.deflate_level
    level = wanted if deflate and wanted > 0 else 6
    agreed = msgspec.structs.replace(
        agreed,
        tls=limits.tls and wishes.tls_v1,
        codec="snappy" if snappy else "deflate" if deflate else "",
        deflate_level=min(level, limits.deflate_level_max),
    )
    ports = {"nsqha_ports": dict(limits.ports())} if limits.ports and wishes.nsqha_ports else {}
    return AgreedIdentify(agreed, encoder.response(_json(_reply(agreed, limits) | ports)))


def _settings(wishes: _Wishes, limits: ProtocolLimits, before: Agreed) -> Agreed | bytes:
    """The values that need no upgrade, checked in nsqd's order."""

    def invalid(what: bytes, value: int) -> bytes:
        return b"E_BAD_BODY IDENTIFY %b (%d) is invalid" % (what, value)

    heartbeat = wishes.heartbeat_interval
    interval_ms = before.heartbeat_interval_ms
    if heartbeat == -1:
        interval_ms = 0
    elif 1000 <= heartbeat <= limits.heartbeat_interval_ms_max:
        interval_ms = heartbeat
    elif heartbeat:
        return invalid(b"heartbeat interval", heartbeat)

    buffer_timeout = wishes.output_buffer_timeout
    buffer_timeout_ms = before.output_buffer_timeout_ms
    if buffer_timeout == -1:
        buffer_timeout_ms = 0
    elif (
        buffer_timeout and limits.output_buffer_timeout_ms_min <= buffer_timeout <= limits.output_buffer_timeout_ms_max
    ):
        buffer_timeout_ms = buffer_timeout
    elif buffer_timeout:
        return invalid(b"output buffer timeout", buffer_timeout)

    buffer_size = wishes.output_buffer_size
    buffer_bytes = before.output_buffer_bytes
    if buffer_size == -1:
        buffer_bytes, buffer_timeout_ms = 1, 0
    elif 64 <= buffer_size <= limits.output_buffer_bytes_max:
        buffer_bytes = buffer_size
    elif buffer_size:
        return invalid(b"output buffer size", buffer_size)

    sample_rate = wishes.sample_rate
    if not 0 <= sample_rate <= 99:
        return invalid(b"sample rate", sample_rate)

    msg_timeout = wishes.msg_timeout
    if msg_timeout and not 1000 <= msg_timeout <= limits.msg_timeout_ms_max:
        return invalid(b"msg timeout", msg_timeout)

    return Agreed(
        heartbeat_interval_ms=interval_ms,
        msg_timeout_ms=msg_timeout or before.msg_timeout_ms,
        output_buffer_bytes=buffer_bytes,
        output_buffer_timeout_ms=buffer_timeout_ms,
        deflate_level=before.deflate_level,
        sample_rate=sample_rate,
        feature_negotiation=wishes.feature_negotiation,
        of_fork=wishes.of_fork or before.of_fork,
        client_id=wishes.client_id,
        hostname=wishes.hostname,
        user_agent=wishes.user_agent,
        topology_region=wishes.topology_region,
        topology_zone=wishes.topology_zone,
    )


def _reply(agreed: Agreed, limits: ProtocolLimits) -> dict[str, object]:
    """The keys in nsqd's order, compact; the server's topology, not the client's."""
    return {
        "max_rdy_count": limits.rdy_count_max,
        "version": limits.version,
        "max_msg_timeout": limits.msg_timeout_ms_max,
        "msg_timeout": agreed.msg_timeout_ms,
        "tls_v1": agreed.tls,
        "deflate": agreed.deflate,
        "deflate_level": agreed.deflate_level,
        "max_deflate_level": limits.deflate_level_max,
        "snappy": agreed.snappy,
        "sample_rate": agreed.sample_rate,
        "auth_required": limits.asks_auth() if limits.asks_auth else limits.auth_required,
        "output_buffer_size": agreed.output_buffer_bytes,
        "output_buffer_timeout": agreed.output_buffer_timeout_ms,
        "topology_region": limits.topology_region,
        "topology_zone": limits.topology_zone,
    }


def _json(values: dict[str, object]) -> bytes:
    """Compact JSON with the escapes of Go's encoder, which makes its output safe inside HTML."""
    text = _ENCODER.encode(values)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "replace")


# Made once: to make one takes longer than to write the JSON of an answer.
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
