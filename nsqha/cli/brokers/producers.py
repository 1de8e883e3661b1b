"""The brokers that `pub`, `sub` and `tail` connect to: one, or the producers of the topic that a lookup daemon names.

A `ProducerGroup` consumes from all of them, as NSQ's own clients do, and asks the lookup daemon every minute for more.
"""

from __future__ import annotations

import argparse
import select
import time
from collections.abc import Callable, Sequence

from nsqha.cli.brokers.discovery import BrokerPorts, LookupDaemon, discover, given, host_and_port
from nsqha.cli.brokers.v2client import Message, Subscriber
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import TCP_ADDRESS

PRODUCERS_MAX = 100
LOOKUP_SECONDS = 60.0  # as NSQ's clients ask their lookup daemons
REST_SECONDS = 0.05  # for the rest of a frame whose beginning has arrived
ANSWER_SECONDS = 5.0


def tcp_addresses(args: argparse.Namespace, topic: str) -> list[str]:
    """Where NSQ clients of the topic connect. A topic that a lookup daemon does not know will be at one of its
    brokers. Raises Exit."""
    address, any_port = given(args, "--nsqd-tcp-address", TCP_ADDRESS)
    if not any_port:
        return [address]
    timeout_s = args.timeout / 1e9
    found = discover(address, timeout_s)
    if isinstance(found, LookupDaemon):
        listed = found.producers(topic, timeout_s)[:PRODUCERS_MAX] or found.brokers(timeout_s)[:1]
        return [broker.tcp for broker in listed]
    return [found.tcp or _asked(found, timeout_s)]


def _asked(broker: BrokerPorts, timeout_s: float) -> str:
    """The TCP port of a broker whose gRPC port is known."""
    from nsqha.cli.brokers.admin import Admin

    with Admin(broker.grpc, timeout_s) as admin:
        port = admin.call("GetNode").tcp_port
    if not port:
        raise exits.Exit(exits.FAILED, f"{broker.grpc} does not say where its TCP port is; give --nsqd-tcp-address")
    host, _ = host_and_port(broker.grpc, "--address")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ProducerGroup:
    """One subscriber for each producer. It looks like one: `messages` are those of one connection at a time, and
    `answer` is for the messages that were returned last."""

    def __init__(self, lookup: Callable[[], Sequence[str]], connect: Callable[[str, int], Subscriber]) -> None:
        """`connect` gets an address and how many connections share the window."""
        self._lookup = lookup
        self._connect = connect
        self._members: dict[str, Subscriber] = {}
        self._order: list[str] = []
        self._last: Subscriber | None = None
        self._wait_s: float | None = None
        try:
            self._add(lookup())
        except BaseException:
            self.close()
            raise
        self._looked = time.monotonic()

    def _add(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            if address not in self._members and len(self._members) < PRODUCERS_MAX:
                self._members[address] = self._connect(address, len(addresses))
                self._order.append(address)

    def wait_at_most(self, seconds: float | None) -> None:
        self._wait_s = seconds

    def messages(self) -> list[Message]:
        """Return what arrived at one of the connections, at each in turn; empty if nothing came in time."""
        if time.monotonic() - self._looked >= LOOKUP_SECONDS:
            self._look_again()
        for address in self._ready():
            self._order.remove(address)
            self._order.append(address)
            member = self._members[address]
            member.wait_at_most(REST_SECONDS)
            if found := member.messages():
                self._last = member
                return found
        return []

    def _ready(self) -> list[str]:
        """The connections with something to read, the one that was read longest ago first."""
        if any(member.buffered for member in self._members.values()):
            return [address for address in self._order if self._members[address].buffered]
        sockets = {member.fileno(): address for address, member in self._members.items()}
        found = {sockets[number] for number in select.select(list(sockets), [], [], self._wait_s)[0]}
        return [address for address in self._order if address in found]

    def _look_again(self) -> None:
        self._looked = time.monotonic()
        try:
            self._add(self._lookup())
        except exits.Exit as error:
            if error.status != exits.UNREACHABLE:
                raise

    def answer(self, messages: Sequence[Message], requeue_ms: int | None, wanted: int | None) -> None:
        assert self._last is not None
        self._last.wait_at_most(ANSWER_SECONDS)
        self._last.answer(messages, requeue_ms, wanted)

    def leave(self) -> None:
        for member in self._members.values():
            member.wait_at_most(self._wait_s)
            member.leave()

    def close(self) -> None:
        for member in self._members.values():
            member.close()
