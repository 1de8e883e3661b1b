"""What the tests with a real etcd share; the fixtures are in conftest.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from nsqha.election.etcd.store import EtcdStore
from nsqha.election.model import TopicSettings
from nsqha.errors import ConfigError, OutcomeUnknown, Unavailable
from tests.etcd_server import eventually

Open = Callable[..., EtcdStore]


def put_intents(store: EtcdStore, names: range) -> None:
    for n in names:
        store.intents.put(f"n{n}", {"n": n})


class Seen:
    """What a watcher was told, in order."""

    def __init__(self, store: EtcdStore) -> None:
        self.names: list[str] = []
        store.watch.on_change(self.names.append)

    def told(self, names: range) -> Callable[[], bool]:
        return lambda: {f"intents/n{n}" for n in names} <= set(self.names)


class Ticking:
    """A loop that runs, and renews leases, whatever the test waits for."""

    def __init__(self, *ticked: Callable[[], None]) -> None:
        self._ticked = ticked
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            for ticked in self._ticked:
                ticked()


def answers(store: EtcdStore) -> bool:
    return not raises(Unavailable, store.records.topics)


def created(store: EtcdStore, topic: str) -> bool:
    """Whether it is there: made now, or by an earlier call whose answer came too late."""
    return not raises(Unavailable, lambda: store.records.create_topic(topic, TopicSettings())) and (
        store.records.topic(topic) is not None
    )


def raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    except OutcomeUnknown:
        pass
    return False


def guard(options: EtcdOptions, password: str) -> None:
    """Let in only users root (all) and nsqha (/nsqha/ only), both with this password."""
    client = EtcdClient(options)
    permission = {"permType": 2, "key": b"/nsqha/", "range_end": b"/nsqha0"}
    for call, request in [
        ("UserAdd", rpc.AuthUserAddRequest(name="root", password=password)),
        ("UserGrantRole", rpc.AuthUserGrantRoleRequest(user="root", role="root")),
        ("UserAdd", rpc.AuthUserAddRequest(name="nsqha", password=password)),
        ("RoleAdd", rpc.AuthRoleAddRequest(name="broker")),
        ("RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name="broker", perm=permission)),
        ("UserGrantRole", rpc.AuthUserGrantRoleRequest(user="nsqha", role="broker")),
        ("AuthEnable", rpc.AuthEnableRequest()),
    ]:
        eventually(lambda call=call, request=request: _granted(client, call, request))
    client.close()


def _granted(client: EtcdClient, call: str, request: Any) -> bool:
    """Whether it is done: now, or by an earlier call whose answer came too late."""
    try:
        client.lease_call(lambda stubs: getattr(stubs.auth, call), request)
    except Unavailable as error:
        return "already" in str(error)
    except ConfigError:
        return call == "AuthEnable"  # it asks for a user now
    return True
