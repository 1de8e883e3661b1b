"""A daemon without an access file that other hosts reach says so once: like nsqd, it does what anybody asks."""

from __future__ import annotations

from collections.abc import Mapping

from nsqha.nsqlog import Logger
from nsqha.options import is_loopback
from nsqha.server.runtime.listen import is_tcp

logger = Logger("access")


def warn_if_open(listeners: Mapping[str, str]) -> None:
    """Log which of these listeners, by name, does what anybody on another host asks."""
    open_ones = [
        f"{name} at {address}"
        for name, address in listeners.items()
        if address and is_tcp(address) and not is_loopback(address.rpartition(":")[0])
    ]
    if open_ones:
        text = "everybody who reaches %s may do everything there: --access-file says who may do what"
        logger.warning("open_to_everybody", text, ", ".join(open_ones))
