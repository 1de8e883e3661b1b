"""Whether a request that changes something was sent by a page of another site, in a browser that can reach this node.

Any page that a developer has open can make the browser send a POST to `localhost:4151`, and a page whose name resolves
to this node (DNS rebinding) even reads the answer. Browsers say in headers who asks; programs send none of these, and
are not asked for any:

    Sec-Fetch-Site   cross-site: a page of another site (Fetch Metadata, https://www.w3.org/TR/fetch-metadata)
    Origin           the page's scheme, host and port; null: a page that hides them
    Host             what the browser takes this node for: an address, localhost, or a name that this node has

A proxy may put its own idea of this node into Host; then Origin differs from it, and `Sec-Fetch-Site: same-origin` says
that the page came from the proxy as well. No page can set that header. It is believed as far as Host names this node:
after DNS rebinding the browser says same-origin, too, with the other site's name as Host. A page that is rebound to a
proxy has plain HTTP, as the proxy has no certificate for its name, and there browsers send no Sec-Fetch-Site.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping

SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))


def refusal(method: str, headers: Mapping[str, str], names: Collection[str]) -> str:
    """Why a request is refused; empty: it is not. `headers` by case-insensitive name; `names`: the host names of this
    node, in lower case."""
    site, origin = headers.get("Sec-Fetch-Site", "").lower(), headers.get("Origin", "")
    if method in SAFE_METHODS or not (site or origin):
        return ""
    host = headers.get("Host", "").lower()
    if site == "cross-site":
        return "a page of another site asks for a change"
    if origin and site != "same-origin" and origin.lower().partition("://")[2] != host:
        return f"a page of {origin} asks for a change"
    if not is_ours(host, names):
        return f"a browser asks for a change at {host or 'no host'}, which is no name of this node"
    return ""


def is_ours(host: str, names: Collection[str]) -> bool:
    """Whether a Host header, in lower case, names an address, localhost, or one of these."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    name = name.removesuffix(".")
    if name in names or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True
