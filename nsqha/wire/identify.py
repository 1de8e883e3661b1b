"""IDENTIFY: what the client asks for, what it gets, and the JSON that tells it.

The body decodes as Go's encoding/json does it into a struct: keys match without regard to case, unknown keys are
skipped, null leaves a value alone, the last of several equal keys wins, and a value of another type anywhere fails
the whole body; 1.0 and 1e3 are not integers.

A client that sends `"nsqha_ports": true`, which is ours, finds the other ports of this server under that key.

A client may IDENTIFY again before SUB: zeros then keep what was agreed before, the names are always replaced.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec

from nsqha.wire import encoder
from nsqha.wire.limits import ProtocolLimits

BODY_BYTES_MAX = 64 << 10
"""Real clients send a few hundred bytes; decoded JSON takes many times its size, before anybody has authenticated."""

_STRINGS = frozenset(("client_id", "hostname", "user_agent", "topology_region", "topology_zone"))
_BOOLS = frozenset(("feature_negotiation", "tls_v1", "snappy", "deflate", "nsqha_ports"))
_INTS = {
    "heartbeat_interval": 64,
    "output_buffer_size": 64,
    "output_buffer_timeout": 64,
    "deflate_level": 64,
    "sample_rate": 32,
    "msg_timeout": 64,
}

_BAD_JSON = b"E_BAD_BODY IDENTIFY failed to decode JSON body"
_TWO_CODECS = b"E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"


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
        wishes = _decode(body)
    except (ValueError, RecursionError):
        return _BAD_JSON
    agreed = _settings(wishes, limits, before)
    if isinstance(agreed, bytes):
        return agreed
    if not agreed.feature_negotiation:
        return AgreedIdentify(agreed, encoder.OK)
    snappy = limits.snappy and wishes.get("snappy", False)
    deflate = limits.deflate and wishes.get("deflate", False)
    if snappy and deflate:
        return _TWO_CODECS
    wanted = wishes.get("deflate_level", 0)
    level = wanted if deflate and wanted > 0 else 6
    agreed = msgspec.structs.replace(
        agreed,
        tls=limits.tls and wishes.get("tls_v1", False),
        codec="snappy" if snappy else "deflate" if deflate else "",
        deflate_level=min(level, limits.deflate_level_max),
    )
    ports = {"nsqha_ports": dict(limits.ports())} if limits.ports and wishes.get("nsqha_ports") else {}
    return AgreedIdentify(agreed, encoder.response(_json(_reply(agreed, limits) | ports)))


def _settings(wishes: dict[str, Any], limits: ProtocolLimits, before: Agreed) -> Agreed | bytes:
    """The values that need no upgrade, checked in nsqd's order."""

    def invalid(what: bytes, value: int) -> bytes:
        return b"E_BAD_BODY IDENTIFY %b (%d) is invalid" % (what, value)

    heartbeat = wishes.get("heartbeat_interval", 0)
    interval_ms = before.heartbeat_interval_ms
    if heartbeat == -1:
        interval_ms = 0
    elif 1000 <= heartbeat <= limits.heartbeat_interval_ms_max:
        interval_ms = heartbeat
    elif heartbeat:
        return invalid(b"heartbeat interval", heartbeat)

    buffer_timeout = wishes.get("output_buffer_timeout", 0)
    buffer_timeout_ms = before.output_buffer_timeout_ms
    if buffer_timeout == -1:
        buffer_timeout_ms = 0
    elif (
        buffer_timeout and limits.output_buffer_timeout_ms_min <= buffer_timeout <= limits.output_buffer_timeout_ms_max
    ):
        buffer_timeout_ms = buffer_timeout
    elif buffer_timeout:
        return invalid(b"output buffer timeout", buffer_timeout)

    buffer_size = wishes.get("output_buffer_size", 0)
    buffer_bytes = before.output_buffer_bytes
    if buffer_size == -1:
        buffer_bytes, buffer_timeout_ms = 1, 0
    elif 64 <= buffer_size <= limits.output_buffer_bytes_max:
        buffer_bytes = buffer_size
    elif buffer_size:
        return invalid(b"output buffer size", buffer_size)

    sample_rate = wishes.get("sample_rate", 0)
    if not 0 <= sample_rate <= 99:
        return invalid(b"sample rate", sample_rate)

    msg_timeout = wishes.get("msg_timeout", 0)
    if msg_timeout and not 1000 <= msg_timeout <= limits.msg_timeout_ms_max:
        return invalid(b"msg timeout", msg_timeout)

    return Agreed(
        heartbeat_interval_ms=interval_ms,
        msg_timeout_ms=msg_timeout or before.msg_timeout_ms,
        output_buffer_bytes=buffer_bytes,
        output_buffer_timeout_ms=buffer_timeout_ms,
        deflate_level=before.deflate_level,
        sample_rate=sample_rate,
        feature_negotiation=wishes.get("feature_negotiation", False),
        **{key: wishes.get(key, "") for key in _STRINGS},
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


class _Object(list[tuple[str, Any]]):
    """A JSON object as the pairs it was written in, so that a repeated key is seen."""


def _decode(body: bytes) -> dict[str, Any]:
    """The known fields that are set; ValueError if the body is not an object with the right types."""
    text = body.decode("utf-8", "replace")
    pairs = _DECODER.decode(text)
    if pairs is None:
        return {}
    if not isinstance(pairs, _Object):
        raise ValueError("not an object")
    wishes: dict[str, Any] = {}
    for key, value in pairs:
        name = key.lower()
        if value is not None and (name in _STRINGS or name in _BOOLS or name in _INTS):
            wishes[name] = _typed(name, value)
    return wishes


def _typed(name: str, value: Any) -> Any:
    if name in _STRINGS:
        if isinstance(value, str):
            if value.isascii():
                return value
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half a surrogate pair
    elif name in _BOOLS:
        if isinstance(value, bool):
            return value
    elif type(value) is int and -(1 << _INTS[name] - 1) <= value < 1 << _INTS[name] - 1:
        return value
    raise ValueError(f"{name} has the wrong type")


def _integer(digits: str) -> int:
    # Beyond 64 bits the value can only be refused or skipped; int() refuses thousands of digits.
    return int(digits) if len(digits) <= 20 else 1 << 64


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


# Made once: to make one takes longer than to read or write the JSON of an IDENTIFY.
_DECODER = json.JSONDecoder(object_pairs_hook=_Object, parse_constant=_no_number, parse_int=_integer)
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
