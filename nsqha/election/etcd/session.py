"""A process's life in a cluster: the keys on its lease, and how they are created.

A node's key is created only if it is absent, so that its create_revision is a unique registration. A key that exists
already belongs to an earlier life of this node, and registration waits until its lease ends; or, if it is still renewed
after twice that time, to another process that runs on a copy of the data directory.

    check that no other process is this node -> claim -> count the use, recover, listen -> registered -> claim released

The claim comes before anything is written, so that a copy is refused without a trace. A predecessor that held the very
lock file that this process holds now has ended: nothing waits for its lease before the registration.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nsqha.clock import Clock
from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.calls import list_keys, read_key
from nsqha.election.etcd.client import EtcdClient, Full
from nsqha.election.etcd.keys import created, delete, get, put, txn, unchanged
from nsqha.election.etcd.lease import EtcdLease
from nsqha.election.etcd.view import Trouble
from nsqha.election.model import Controller, NodeInfo, name_taken
from nsqha.election.session import Lost
from nsqha.errors import ConfigError, Conflict, LogCorrupt, NotFound, OutcomeUnknown, Unavailable
from nsqha.ids import is_ephemeral

WAIT_S = 0.25  # between two reads of a key that must go
CLONE_TTLS = 2
LESSOR_S = 1.0  # etcd checks for ended leases every half second


class EtcdSessions:
    """The sessions of this process, one at a time."""

    def __init__(self, client: EtcdClient, keys: etcd_keys.Keys, clock: Clock, trouble: Trouble) -> None:
        self._client = client
        self._keys = keys
        self._clock = clock
        self._trouble = trouble
        self.last: EtcdSession | None = None
        self._claim: EtcdClaim | None = None

    def claim(self, node: NodeInfo, *, ttl_s: float) -> EtcdClaim:
        """See that no other process is this node, or starts as it, and keep it so until the claim is released. Blocks.

        Waits for the lease of a predecessor as `ClusterSession.register` does. ConfigError: another process is this
        node. Unavailable, OutcomeUnknown, StaleMetadata."""
        self._claim = EtcdClaim(self._client, self._keys, self._clock, ttl_s=ttl_s, trouble=self._trouble)
        try:
            self._claim.take(node)
        except BaseException:
            self._claim.release()
            raise
        return self._claim

    def open(self, *, ttl_s: float, lost: Lost) -> EtcdSession:
        if self.last is not None and not self.last.over:
            raise Conflict("this store has a session already")
        self.last = EtcdSession(self._client, self._keys, self._clock, ttl_s=ttl_s, lost=lost, trouble=self._trouble)
        return self.last

    def lease_for(self, topic: str) -> int:
        """The lease on which a topic's records are put; 0: they stay. Unavailable."""
        if not is_ephemeral(topic):
            return 0
        if self.last is None or self.last.over:
            raise Unavailable(f"topic {topic} would end with this process's session, and there is none now")
        return self.last.lease_id

    def close(self) -> None:
        if self._claim is not None:
            self._claim.release()
        if self.last is not None:
            self.last.close()


class EtcdClaim:
    """The right to start as one node, on a lease of its own."""

    def __init__(
        self, client: EtcdClient, keys: etcd_keys.Keys, clock: Clock, *, ttl_s: float, trouble: Trouble
    ) -> None:
        """Raises what a call raises."""
        self._client = client
        self._keys = keys
        self._clock = clock
        self._released = threading.Event()
        lost: Lost = lambda: None  # noqa: E731  the registration still keeps another process out
        # A recovery may keep the loop busy for longer than a lease lasts, and nothing is led meanwhile.
        self._lease = EtcdLease(client, clock, ttl_s=ttl_s, lost=lost, trouble=trouble, needs_ticks=False)
        self._lease.start()

    def take(self, node: NodeInfo) -> None:
        """Wait until no other process has the node's key or its claim, and have the claim then."""
        registered, starting = self._keys.node(node.node_uid), self._keys.starting(node.node_uid)
        patience = _CloneWait(self._client, self._clock, self._lease.ttl_s)
        while not self._released.is_set():
            found = {key: read_key(self._client, key) for key in (registered, starting)}
            others = [(kv, "") for kv in found.values() if kv is not None and not self._of_this_folder(kv, node)]
            namesake, why = _namesake(self._client, self._keys, node)
            if namesake is not None:
                others.append((namesake, why))
            if not others and self._put(starting, found, node):
                return
            for kv, why in others:
                patience.check(kv, why)
            self._released.wait(WAIT_S)
        raise Unavailable("the claim was released")

    def _put(self, key: bytes, found: Mapping[bytes, Any], node: NodeInfo) -> bool:
        """Put the claim if nothing has changed since it was `found`. False: something has, or may have."""
        as_found = [unchanged(each, 0 if kv is None else kv.mod_revision) for each, kv in found.items()]
        value = put(key, etcd_keys.node_value(node), lease=self._lease.id)
        try:
            answer = self._client.change(lambda stubs: stubs.kv.Txn, txn(as_found, [value]))
        except OutcomeUnknown as error:
            if isinstance(error, Full):  # needs an operator
                raise
            return False
        return bool(answer.succeeded)

    def _of_this_folder(self, kv: Any, node: NodeInfo) -> bool:
        """The process that put this key had the lock file that this process holds: it has ended, or is this one."""
        return kv.lease == self._lease.id or bool(node.folder and etcd_keys.node_info(kv).folder == node.folder)

    def release(self) -> None:
        """End it; no error if that was done. Others that wait go on at once."""
        if not self._released.is_set():
            self._released.set()
            self._lease.stop(revoke=True)


class _CloneWait:
    """How long to wait until another process's key goes: twice the time for which a key on its lease can exist without
    a renewal."""

    def __init__(self, client: EtcdClient, clock: Clock, ttl_s: float) -> None:
        self._client = client
        self._clock = clock
        self._ttl_s = ttl_s
        self._deadline = 0.0

    def check(self, kv: Any, why: str = "") -> None:
        """ConfigError if the key has been there for too long since the first call. `why`: what it is, if not a copy."""
        now = self._clock.monotonic()
        if not self._deadline:
            request = rpc.LeaseTimeToLiveRequest(ID=kv.lease)
            answer = self._client.lease_call(lambda stubs: stubs.lease.LeaseTimeToLive, request)
            self._deadline = now + CLONE_TTLS * max(float(answer.grantedTTL), self._ttl_s) + LESSOR_S
        if now > self._deadline:
            other = etcd_keys.node_info(kv)
            raise ConfigError(
                why or f"another process is node {other.node_uid:016x} ({other.name or 'no name'} on "
                f"{other.host or 'no host'}, {other.tcp_address}) and still alive: this data directory is a copy; stop "
                "that node, or start this one with an empty data directory"
            )


def _namesake(client: EtcdClient, keys: etcd_keys.Keys, node: NodeInfo) -> tuple[Any, str]:
    """The key of another node that has this one's name, and registered earlier, and what is wrong with that."""
    kvs, _ = list_keys(client, keys.nodes)
    for kv in kvs:
        if not node.registration or kv.create_revision < node.registration:
            with suppress(LogCorrupt, ConfigError):  # one that this version cannot read has no name
                if why := name_taken(node, [etcd_keys.node_info(kv)]):
                    return kv, why
    return None, ""


class EtcdSession:
    """One lease and the keys on it."""

    def __init__(
        self, client: EtcdClient, keys: etcd_keys.Keys, clock: Clock, *, ttl_s: float, lost: Lost, trouble: Trouble
    ) -> None:
        """Raises what a call raises."""
        self._client = client
        self._keys = keys
        self._clock = clock
        self._closed = threading.Event()
        self._node: NodeInfo | None = None
        self._lease = EtcdLease(client, clock, ttl_s=ttl_s, lost=lost, trouble=trouble)
        self._lease.start()

    @property
    def ttl_s(self) -> float:
        return self._lease.ttl_s

    @property
    def lease_id(self) -> int:
        return self._lease.id

    @property
    def over(self) -> bool:
        return self._lease.gone

    def ticked(self) -> None:
        self._lease.ticked()

    def fresh(self, now: float) -> bool:
        return self._lease.fresh(now)

    def seconds_left(self, now: float) -> float:
        return self._lease.seconds_left(now)

    def register(self, node: NodeInfo) -> NodeInfo:
        self._check_open()
        if self._node is not None:
            raise Conflict("this session has registered its node already")
        key = self._keys.node(node.node_uid)
        patience = _CloneWait(self._client, self._clock, self._lease.ttl_s)
        while True:
            self._check_open()
            kv, why = _namesake(self._client, self._keys, node)
            if kv is None:  # first: no other node is to see one that is refused
                kv = self._create(key, etcd_keys.node_value(node))
                if kv is not None and kv.lease == self._lease.id:
                    registered = etcd_keys.node_info(kv)
                    kv, why = _namesake(self._client, self._keys, registered)
                    if kv is None:
                        self._node = registered
                        return self._node
                    self._withdraw(key, registered.registration)  # of two that came together the later one
            if kv is not None:
                patience.check(kv, why)
            self._closed.wait(WAIT_S)

    def _withdraw(self, key: bytes, registration: int) -> None:
        self._client.change(lambda stubs: stubs.kv.Txn, txn([created(key, registration)], [delete(key)]))

    def update(self, node: NodeInfo) -> NodeInfo:
        if self._node is None or self._node.node_uid != node.node_uid:
            raise NotFound(f"node {node.node_uid:016x} is not registered by this session")
        self._check_open()
        registration = self._node.registration
        key = self._keys.node(node.node_uid)
        change = put(key, etcd_keys.node_value(node), lease=self._lease.id)
        answer = self._client.change(lambda stubs: stubs.kv.Txn, txn([created(key, registration)], [change]))
        if not answer.succeeded:
            raise NotFound(f"node {node.node_uid:016x} lost its registration {registration}")
        self._node = replace(node, registration=registration)
        return self._node

    def campaign(self, candidate: Controller) -> Controller | None:
        self._check_open()
        kv = self._create(self._keys.controller, etcd_keys.controller_value(candidate), wait_out_doubt=False)
        return etcd_keys.controller_of(kv) if kv.lease == self._lease.id else None

    def resign(self) -> None:
        key = self._keys.controller
        answer = self._client.read(lambda stubs: stubs.kv.Range, rpc.RangeRequest(key=key))
        if answer.kvs and answer.kvs[0].lease == self._lease.id:
            ours = created(key, answer.kvs[0].create_revision)
            self._client.change(lambda stubs: stubs.kv.Txn, txn([ours], [delete(key)]))

    def depose(self, controller: Controller) -> None:
        key = self._keys.controller
        self._client.change(lambda stubs: stubs.kv.Txn, txn([created(key, controller.epoch)], [delete(key)]))

    def close(self) -> None:
        self._closed.set()
        self._lease.stop(revoke=True)

    def _create(self, key: bytes, value: bytes, *, wait_out_doubt: bool = True) -> Any:
        """Create the key on our lease if it is absent; return it as it is now. None: outcome unknown, ask again."""
        request = txn([created(key, 0)], [put(key, value, lease=self._lease.id), get(key)], [get(key)])
        try:
            answer = self._client.change(lambda stubs: stubs.kv.Txn, request)
        except OutcomeUnknown as error:
            if wait_out_doubt and not isinstance(error, Full):  # Full needs an operator
                return None
            raise
        return answer.responses[-1].response_range.kvs[0]

    def _check_open(self) -> None:
        if self._closed.is_set() or self._lease.gone:
            raise NotFound("this session is over; open another one")
