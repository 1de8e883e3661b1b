"""Negotiation: bounds, what is kept, Go's way of decoding, the reply byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha import NSQ_VERSION
from nsqha.wire import encoder
from nsqha.wire.identify import Agreed, AgreedIdentify, initial, negotiate
from nsqha.wire.limits import ProtocolLimits

DEFAULTS = ProtocolLimits()
BAD_JSON = b"E_BAD_BODY IDENTIFY failed to decode JSON body"


def refusal(body: bytes | dict[str, object], limits: ProtocolLimits = DEFAULTS) -> bytes | None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    result = negotiate(raw, limits, initial(limits))
    return result if isinstance(result, bytes) else None


def agree(body: bytes | dict[str, object], limits: ProtocolLimits = DEFAULTS, before: Agreed | None = None) -> Agreed:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    result = negotiate(raw, limits, before or initial(limits))
    assert isinstance(result, AgreedIdentify), result
    return result.agreed


def reply(limits: ProtocolLimits = DEFAULTS, **wishes: object) -> Any:
    result = negotiate(json.dumps({"feature_negotiation": True, **wishes}).encode(), limits, initial(limits))
    assert isinstance(result, AgreedIdentify)
    return json.loads(result.reply[8:])


# ---- values

FIELDS = {
    "heartbeat_interval": (b"heartbeat interval", "heartbeat_interval_ms", 1000, 60000),
    "output_buffer_timeout": (b"output buffer timeout", "output_buffer_timeout_ms", 25, 30000),
    "output_buffer_size": (b"output buffer size", "output_buffer_bytes", 64, 65536),
    "msg_timeout": (b"msg timeout", "msg_timeout_ms", 1000, 900000),
    "sample_rate": (b"sample rate", "sample_rate", 0, 99),
}


@pytest.mark.parametrize("key", FIELDS)
def test_bounds(key: str) -> None:
    what, field, least, most = FIELDS[key]
    for value in (least, most):
        assert getattr(agree({key: value}), field) == value
    outside = [least - 1, most + 1, -2, (1 << 31) - 1] if key != "sample_rate" else [-1, 100, -(1 << 31)]
    for value in outside:
        assert refusal({key: value}) == b"E_BAD_BODY IDENTIFY %b (%d) is invalid" % (what, value)


def test_the_options_move_the_bounds() -> None:
    limits = ProtocolLimits(
        heartbeat_interval_ms_max=2000,
        output_buffer_bytes_max=1000,
        output_buffer_timeout_ms_min=10,
        output_buffer_timeout_ms_max=2000,
        msg_timeout_ms_max=5000,
    )
    good = {"heartbeat_interval": 2000, "output_buffer_size": 1000, "output_buffer_timeout": 10, "msg_timeout": 5000}
    assert refusal(good, limits) is None
    for key, value in (("heartbeat_interval", 2001), ("output_buffer_size", 1001), ("msg_timeout", 5001)):
        assert refusal({key: value}, limits) is not None
    for value in (9, 2001):
        assert refusal({"output_buffer_timeout": value}, limits) is not None


def test_minus_one_switches_off() -> None:
    agreed = agree({"heartbeat_interval": -1, "output_buffer_timeout": -1})
    assert agreed.heartbeat_interval_ms == 0
    assert agreed.output_buffer_timeout_ms == 0


def test_no_buffer_has_no_timer_either() -> None:
    agreed = agree({"output_buffer_size": -1, "output_buffer_timeout": 500})
    assert (agreed.output_buffer_bytes, agreed.output_buffer_timeout_ms) == (1, 0)


def test_minus_one_is_no_message_timeout() -> None:
    assert refusal({"msg_timeout": -1}) == b"E_BAD_BODY IDENTIFY msg timeout (-1) is invalid"


def test_zeros_and_nothing_are_the_defaults() -> None:
    zeros = agree(dict.fromkeys(FIELDS, 0))
    assert zeros == agree(b"{}") == initial(DEFAULTS)
    assert zeros.heartbeat_interval_ms == 30_000
    assert zeros.msg_timeout_ms == 60_000


def test_errors_come_in_the_order_of_nsqd() -> None:
    keys = ["heartbeat_interval", "output_buffer_timeout", "output_buffer_size", "sample_rate", "msg_timeout"]
    for n, key in enumerate(keys):
        text = refusal(dict.fromkeys(keys[n:], -5))
        assert text is not None
        assert FIELDS[key][0] in text


def test_a_second_identify_keeps_settings_and_replaces_names() -> None:
    first = agree({"client_id": "a", "heartbeat_interval": 5000, "sample_rate": 7, "output_buffer_size": -1})
    second = agree({"hostname": "h"}, before=first)
    assert (second.client_id, second.hostname, second.sample_rate) == ("", "h", 0)
    assert (second.heartbeat_interval_ms, second.output_buffer_bytes, second.output_buffer_timeout_ms) == (5000, 1, 0)


# ---- Go's encoding/json


@pytest.mark.parametrize(
    "body",
    [
        b"hello",
        b"",
        b"[1]",
        b"7",
        b'"x"',
        b'{"client_id":',
        b"{} {}",
        b'{"client_id":7}',
        b'{"client_id":["a"]}',
        b'{"feature_negotiation":"yes"}',
        b'{"feature_negotiation":1}',
        b'{"heartbeat_interval":"30000"}',
        b'{"heartbeat_interval":true}',
        b'{"msg_timeout":1000.5}',
        b'{"msg_timeout":1000.0}',
        b'{"msg_timeout":1e3}',
        b'{"msg_timeout":{}}',
        b'{"sample_rate":2147483648}',
        b'{"msg_timeout":9223372036854775808}',
        b'{"msg_timeout":' + b"9" * 10_000 + b"}",
        b'{"msg_timeout":"x","msg_timeout":1000}',
        b'{"x":NaN}',
        b'{"x":Infinity}',
        b'{"x":01}',
        b'{"client_id":"a\nb"}',
        b'{"client_id":"a",}',
        b"\xef\xbb\xbf{}",
        b"[" * 60_000,
        b'{"x":' * 10_000,
    ],
)
def test_bodies_that_do_not_decode(body: bytes) -> None:
    assert refusal(body) == BAD_JSON


@pytest.mark.parametrize(
    ("body", "client_id"),
    [
        (b'{"client_id":"c"}', "c"),
        (b' \r\n\t{ "client_id" : "c" } \n', "c"),
        (b'{"CLIENT_ID":"c"}', "c"),
        (b'{"client_id":"a","Client_Id":"c"}', "c"),
        (b'{"client_id":"c","client_id":null}', "c"),
        (b'{"client_id":null}', ""),
        (b"null", ""),
        (b'{"client_id":"\xff"}', "\ufffd"),
        (b'{"client_id":"\\ud800"}', "\ufffd"),
        (b'{"client_id":"\\ud83d\\ude00"}', "\U0001f600"),
        (b'{"short_id":"s","long_id":"l","x":[1,{"client_id":"a"}],"client_id":"c"}', "c"),
        (b'{"x":' + b"9" * 10_000 + b',"client_id":"c"}', "c"),
    ],
)
def test_bodies_that_decode(body: bytes, client_id: str) -> None:
    assert agree(body).client_id == client_id


def test_the_largest_integers_are_refused_by_their_range() -> None:
    assert refusal(b'{"msg_timeout":9223372036854775807}') == (
        b"E_BAD_BODY IDENTIFY msg timeout (9223372036854775807) is invalid"
    )
    assert refusal(b'{"msg_timeout":-9223372036854775808}') is not None
    assert agree(b'{"msg_timeout":-0}').msg_timeout_ms == 60_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = [*FIELDS, "client_id", "tls_v1", "snappy", "deflate", "deflate_level", "feature_negotiation", "other"]


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=50),
        st.dictionaries(st.sampled_from(KEYS), json_values).map(lambda d: json.dumps(d).encode()),
    )
)
def test_whatever_the_body_there_is_an_answer(body: bytes) -> None:
    result = negotiate(body, ProtocolLimits(tls=True), initial(DEFAULTS))
    if isinstance(result, bytes):
        assert result.startswith((b"E_BAD_BODY IDENTIFY ", b"E_IDENTIFY_FAILED "))
    else:
        assert result.reply[:8] == (len(result.reply) - 4).to_bytes(4, "big") + bytes(4)


# ---- the reply


def test_without_negotiation_the_reply_is_ok_and_nothing_is_upgraded() -> None:
    result = negotiate(b'{"tls_v1":true,"snappy":true,"deflate":true}', ProtocolLimits(tls=True), initial(DEFAULTS))
    assert isinstance(result, AgreedIdentify)
    assert result.reply == encoder.OK
    assert not result.agreed.tls
    assert result.agreed.codec == ""


def test_the_reply_byte_for_byte() -> None:
    result = negotiate(b'{"feature_negotiation":true}', DEFAULTS, initial(DEFAULTS))
    assert isinstance(result, AgreedIdentify)
    assert result.reply[8:].decode() == (
        '{"max_rdy_count":2500,"version":"' + NSQ_VERSION + '","max_msg_timeout":900000,"msg_timeout":60000,'
        '"tls_v1":false,"deflate":false,"deflate_level":6,"max_deflate_level":6,"snappy":false,"sample_rate":0,'
        '"auth_required":false,"output_buffer_size":16384,"output_buffer_timeout":250,"topology_region":"",'
        '"topology_zone":""}'
    )


def test_the_reply_says_what_is_in_force() -> None:
    wishes = {"msg_timeout": 1500, "output_buffer_size": 512, "output_buffer_timeout": 100, "sample_rate": 10}
    said = reply(**wishes)
    assert {key: said[key] for key in wishes} == wishes
    unbuffered = reply(output_buffer_size=-1)
    assert (unbuffered["output_buffer_size"], unbuffered["output_buffer_timeout"]) == (1, 0)


def test_the_reply_shows_the_servers_options_and_topology() -> None:
    limits = ProtocolLimits(
        rdy_count_max=77,
        msg_timeout_ms_max=120_000,
        msg_timeout_default_ms=7000,
        deflate_level_max=3,
        output_buffer_timeout_default_ms=300,
        topology_region="reg",
        topology_zone="<z>",
        auth_required=True,
    )
    said = reply(limits, topology_region="client's")
    assert said["max_rdy_count"] == 77
    assert (said["max_msg_timeout"], said["msg_timeout"], said["output_buffer_timeout"]) == (120_000, 7000, 300)
    assert (said["deflate_level"], said["max_deflate_level"]) == (3, 3)
    assert (said["topology_region"], said["topology_zone"], said["auth_required"]) == ("reg", "<z>", True)
    raw = negotiate(b'{"feature_negotiation":true}', limits, initial(limits))
    assert isinstance(raw, AgreedIdentify)
    assert b'"\\u003cz\\u003e"' in raw.reply


@pytest.mark.parametrize(
    ("wanted", "most", "granted"),
    [(1, 6, 1), (5, 6, 5), (9, 6, 6), (0, 6, 6), (-3, 6, 6), (9, 9, 9), (0, 9, 6), (0, 3, 3)],
)
def test_deflate_levels(wanted: int, most: int, granted: int) -> None:
    said = reply(ProtocolLimits(deflate_level_max=most), deflate=True, deflate_level=wanted)
    assert (said["deflate"], said["deflate_level"], said["max_deflate_level"]) == (True, granted, most)


def test_a_level_without_deflate_is_not_echoed() -> None:
    assert reply(deflate_level=2)["deflate_level"] == 6
    assert reply(ProtocolLimits(deflate=False), deflate=True, deflate_level=3)["deflate_level"] == 6


def test_only_what_the_server_offers_is_granted() -> None:
    assert reply(tls_v1=True)["tls_v1"] is False
    assert reply(ProtocolLimits(tls=True), tls_v1=True)["tls_v1"] is True
    assert reply(ProtocolLimits(tls=True))["tls_v1"] is False
    assert reply(snappy=True)["snappy"] is True
    assert reply(ProtocolLimits(snappy=False), snappy=True)["snappy"] is False
    assert reply(ProtocolLimits(deflate=False), snappy=True, deflate=True)["snappy"] is True


def test_one_compression_at_most() -> None:
    body = {"feature_negotiation": True, "snappy": True, "deflate": True}
    assert refusal(body) == b"E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"


def test_tls_and_a_compression_go_together() -> None:
    agreed = agree(
        {"feature_negotiation": True, "tls_v1": True, "deflate": True, "deflate_level": 2}, ProtocolLimits(tls=True)
    )
    assert (agreed.tls, agreed.codec, agreed.deflate, agreed.snappy, agreed.deflate_level) == (
        True, "deflate", True, False, 2,
    )  # fmt: skip
