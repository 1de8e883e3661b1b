"""What a client may ask for: the server's options as far as the protocol checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nsqha import NSQ_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolLimits:
    """Bounds, defaults and offers of this server; the defaults are nsqd's."""

    msg_bytes_max: int = 1 << 20
    body_bytes_max: int = 5 << 20
    rdy_count_max: int = 2500
    req_timeout_ms_max: int = 3_600_000

    heartbeat_interval_default_ms: int = 30_000
    heartbeat_interval_ms_max: int = 60_000
    msg_timeout_default_ms: int = 60_000
    msg_timeout_ms_max: int = 900_000
    output_buffer_bytes_default: int = 16 << 10
    output_buffer_bytes_max: int = 64 << 10
    output_buffer_timeout_default_ms: int = 250
    output_buffer_timeout_ms_min: int = 25
    output_buffer_timeout_ms_max: int = 30_000

    tls: bool = False
    snappy: bool = True
    deflate: bool = True
    deflate_level_max: int = 6
    auth_required: bool = False
    asks_auth: Callable[[], bool] | None = None
    """Whether AUTH is required at the moment, where that may change; `auth_required` is then not looked at."""
    topology_region: str = ""
    topology_zone: str = ""
    version: str = NSQ_VERSION
    ports: Callable[[], Mapping[str, object]] | None = None
    """The other ports of this server, for a client that asks for them with `nsqha_ports`."""
