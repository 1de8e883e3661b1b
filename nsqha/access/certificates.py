"""What a verified certificate grants, by the URIs in its subjectAltName.

    nsqha:viewer  nsqha:operator  nsqha:administrator     these roles
    nsqha:reader                                          the Segments service and the bytes of segments, nothing else

Certificates of nodes are known by `nsqha.server.peers.identity`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nsqha.access.roles import Grant, Role, granted

CERTIFICATE_ROLES = {
    "nsqha:viewer": Role.VIEWER,
    "nsqha:operator": Role.OPERATOR,
    "nsqha:administrator": Role.ADMIN,
    "nsqha:reader": Role.SEGMENTS,
}


def certified(name: str, uris: Iterable[str]) -> Grant:
    """What the holder of a certificate with these URIs may do; `name`: what else it calls itself."""
    who = f"certificate {name}" if name else "a certificate"
    return granted(who, {CERTIFICATE_ROLES[uri] for uri in uris if uri in CERTIFICATE_ROLES})


def grant_of(found: Mapping[str, Any]) -> Grant:
    """The same of what `ssl.SSLSocket.getpeercert` says."""
    named = [(str(entry[0]), str(entry[1])) for entry in found.get("subjectAltName", ())]
    names = [value for kind, value in named if kind == "DNS"]
    names += [str(value) for part in found.get("subject", ()) for key, value in part if key == "commonName"]
    return certified(names[0] if names else "", [value for kind, value in named if kind == "URI"])
