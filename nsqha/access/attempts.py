"""How many wrong tokens one address may try: WRONG_PER_SECOND. Those beyond that are told to wait until the second is
over.

The table of addresses is bounded: the one that erred longest ago goes first. An IPv6 address counts as its /64, which
is what one host has.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

WRONG_PER_SECOND = 20
ADDRESSES_MAX = 10_000


class WrongTokens:
    """Wrong tokens by address, of the second that runs."""

    def __init__(self, *, per_second: int = WRONG_PER_SECOND, addresses_max: int = ADDRESSES_MAX) -> None:
        self._per_second = per_second
        self._max = addresses_max
        self._seconds: OrderedDict[str, tuple[int, int]] = OrderedDict()  # -> the second, and how many were wrong in it

    def __len__(self) -> int:
        return len(self._seconds)

    def too_many(self, host: str, now: float) -> bool:
        """Whether the host has used up this second."""
        if not self._seconds:
            return False
        found = self._seconds.get(_network(host))
        return found is not None and found[0] == int(now) and found[1] >= self._per_second

    def wrong(self, host: str, now: float) -> None:
        """It showed a wrong one."""
        key, second = _network(host), int(now)
        of, count = self._seconds.pop(key, (second, 0))
        self._seconds[key] = (second, count + 1 if of == second else 1)
        if len(self._seconds) > self._max:
            self._seconds.popitem(last=False)


def _network(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host[:64]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)
