"""One connection as the record of `server.http.stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsqha.server.http.stats import ClientStats
from nsqha.server.runtime.tls import describe

if TYPE_CHECKING:
    from nsqha.server.clients.connection import Connection
    from nsqha.server.partition.delivery import Consumer


def client_stats(connection: Connection | Any, consumer: Consumer | None) -> ClientStats:
    """A connection; `consumer`: what it is shown as, None: whatever it is."""
    agreed = connection.negotiation.agreed
    address = connection.transport.remote_address
    auth = connection.negotiation.permissions.state
    counts: dict[str, Any] = {}
    if consumer is not None:
        counts = {
            "ready_count": consumer.rdy,
            "in_flight_count": consumer.in_flight + consumer.remote.in_flight,
            "message_count": consumer.message_count,
            "finish_count": consumer.finish_count,
            "requeue_count": consumer.requeue_count,
        }
    elif connection.consuming.consumer is not None:
        return client_stats(connection, connection.consuming.consumer)
    identity: dict[str, Any]
    if agreed is None:
        # Never identified: nsqd shows the peer's address instead.
        host = address.rpartition(":")[0].strip("[]") or address
        identity = {"client_id": host, "hostname": host}
    else:
        identity = {
            "client_id": agreed.client_id,
            "hostname": agreed.hostname,
            "user_agent": agreed.user_agent,
            "topology_zone": agreed.topology_zone,
            "topology_region": agreed.topology_region,
        }
    return ClientStats(
        remote_address=address,
        state=connection.session.consuming.state,
        connect_ts=connection.connected_at,
        sample_rate=agreed.sample_rate if agreed else 0,
        deflate=bool(agreed and agreed.deflate),
        snappy=bool(agreed and agreed.snappy),
        authed=auth is not None,
        auth_identity=auth.identity if auth else "",
        auth_identity_url=auth.identity_url if auth else "",
        pub_counts=tuple(connection.publisher.counts.items()),
        **tls_fields(connection.transport.tls),
        **identity,
        **counts,
    )


def tls_fields(session: Any) -> dict[str, Any]:
    """What /stats says of a TLS session."""
    info = describe(session)
    return {
        "tls": session is not None,
        "tls_cipher_suite": info.cipher_suite,
        "tls_version": info.version,
        "tls_negotiated_protocol": info.negotiated_protocol,
        "tls_negotiated_protocol_is_mutual": info.negotiated_protocol_is_mutual,
    }
