"""From flags to the metadata of a cluster: what brokers, lookup daemons and `nsqha cluster` share.

The password is read from a file, so that it is in no list of processes, no environment and no log. If etcd does not
answer, one line says so and what to check.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol

from nsqha.clock import Clock
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from nsqha.election.etcd.keys import ROOT, Keys, prefix_end, valid_cluster_name
from nsqha.election.etcd.metadata_restore import EtcdAcceptance, EtcdSnapshot, look
from nsqha.election.etcd.store import EtcdStore
from nsqha.election.etcd.view import Trouble
from nsqha.election.model import TopicRecord, Versioned
from nsqha.election.session import StoreIdentity
from nsqha.errors import ConfigError, NotFound, NsqhaError, OutcomeUnknown, StaleMetadata, Unavailable
from nsqha.private_file import read_private

PASSWORD_BYTES_MAX = 4096
NAMES_SHOWN = 10  # of other clusters, in an error


class EtcdFlags(Protocol):
    """The options that say how to reach etcd; `Options` and `LookupdOptions` have them."""

    @property
    def etcd_endpoints(self) -> tuple[str, ...]: ...
    @property
    def etcd_ca(self) -> str: ...
    @property
    def etcd_cert(self) -> str: ...
    @property
    def etcd_key(self) -> str: ...
    @property
    def etcd_user(self) -> str: ...
    @property
    def etcd_password_file(self) -> str: ...
    @property
    def cluster_name(self) -> str: ...


def etcd_options(flags: EtcdFlags) -> EtcdOptions:
    """How to reach etcd. ConfigError: flags that do not go together, a file that cannot be read."""
    if bool(flags.etcd_user) != bool(flags.etcd_password_file):
        raise ConfigError("--etcd-user and --etcd-password-file go together")
    for name, path in (("ca", flags.etcd_ca), ("cert", flags.etcd_cert), ("key", flags.etcd_key)):
        if path and not Path(path).is_file():
            raise ConfigError(f"--etcd-{name}={path}: there is no such file")
    password = _password(flags.etcd_password_file) if flags.etcd_password_file else ""
    return EtcdOptions(
        tuple(endpoint.rstrip("/") for endpoint in flags.etcd_endpoints),
        ca=flags.etcd_ca,
        cert=flags.etcd_cert,
        key=flags.etcd_key,
        user=flags.etcd_user,
        password=password,
    )


def open_store(
    flags: EtcdFlags,
    clock: Clock,
    rng: random.Random,
    *,
    cluster_id: int = 0,
    seen: StoreIdentity = StoreIdentity(0, 0),
    trouble: Trouble = lambda text: None,
    begin: bool = True,
    new_cluster: bool = False,
) -> EtcdStore:
    """Open the metadata of the cluster; blocks up to a few seconds. Errors are `EtcdStore`'s, and name the flags.

    Without `begin` a cluster that does not exist is not created: NotFound, or StaleMetadata if nodes of it wait for an
    operator. Without `new_cluster` it is not created either, ConfigError, if etcd has other clusters: the name may be
    misspelled. That is not asked of a process that has been in a cluster (`seen`); an id alone is that of a folder that
    ran without one."""
    options = etcd_options(flags)
    try:
        if not begin:
            _check_exists(options, flags.cluster_name)
        elif not new_cluster and not seen.etcd_cluster_id:
            _check_alone(options, flags.cluster_name)
        return EtcdStore(options, flags.cluster_name, clock, rng, cluster_id=cluster_id, seen=seen, trouble=trouble)
    except (Unavailable, OutcomeUnknown) as error:
        raise _unusable(flags, error) from None


def _unusable(flags: EtcdFlags, error: NsqhaError) -> Unavailable:
    where = ", ".join(etcd_options(flags).endpoints)
    what = str(error).removeprefix("etcd ").replace(f": {where}: ", ": ")  # gRPC repeats the address of one endpoint
    return Unavailable(f"etcd at {where} {what}; start it, or correct --etcd-endpoint")


def look_at(flags: EtcdFlags, clock: Clock) -> EtcdSnapshot:
    """Read what nodes and operators wrote about this etcd's metadata, trusted or not. Raises Unavailable."""
    acceptance = EtcdAcceptance(etcd_options(flags), flags.cluster_name, clock, lambda text: None)
    try:
        return acceptance.look()
    except (Unavailable, OutcomeUnknown) as error:
        raise _unusable(flags, error) from None
    finally:
        acceptance.close()


def stored_topics(flags: EtcdFlags, clock: Clock) -> dict[str, Versioned[TopicRecord]]:
    """Read the topics in this etcd, trusted or not; empty if it has no such cluster. Raises Unavailable."""
    try:
        store = open_store(flags, clock, random.Random(), begin=False)
    except (NotFound, StaleMetadata):
        return {}
    try:
        return store.records.topics()
    finally:
        store.close()


def _check_alone(options: EtcdOptions, name: str) -> None:
    """Raise ConfigError if etcd has clusters, but none of this name."""
    client = EtcdClient(options)
    try:
        others = [] if _exists(client, name) else _clusters(client)
        if others and _exists(client, name):  # another node has begun it meanwhile
            others = []
    finally:
        client.close()
    if others:
        more = ", .." if len(others) > NAMES_SHOWN else ""
        raise ConfigError(
            f"etcd at {', '.join(options.endpoints)} has no cluster {name}, but it has "
            f"{', '.join(others[:NAMES_SHOWN])}{more}; correct --cluster-name, or begin another with --new-cluster"
        )


def _clusters(client: EtcdClient) -> list[str]:
    """The names of the clusters in this etcd; empty if etcd's user may not see them."""
    names: list[str] = []
    start = ROOT
    while len(names) <= NAMES_SHOWN:
        request = rpc.RangeRequest(key=start, range_end=prefix_end(ROOT), limit=1, keys_only=True)
        try:
            found = client.read(lambda stubs: stubs.kv.Range, request).kvs
        except ConfigError:
            return []
        if not found:
            break
        name = found[0].key[len(ROOT) :].partition(b"/")[0]
        if valid_cluster_name(text := name.decode("utf-8", "replace")) and _exists(client, text):
            names.append(text)
        start = prefix_end(ROOT + name + b"/")
    return sorted(names)


def _exists(client: EtcdClient, name: str) -> bool:
    request = rpc.RangeRequest(key=Keys(name).cluster, keys_only=True)
    return bool(client.read(lambda stubs: stubs.kv.Range, request).kvs)


def _check_exists(options: EtcdOptions, name: str) -> None:
    client = EtcdClient(options)
    try:
        found = _exists(client, name)
        why_not = "" if found else look(client, Keys(name)).why_not
    finally:
        client.close()
    if not found:
        where = ", ".join(options.endpoints)
        if why_not:
            raise StaleMetadata(f"etcd at {where} was wiped, it has no cluster {name}: {why_not}")
        raise NotFound(f"etcd at {where} has no cluster {name}; check --cluster-name, or start a broker to begin it")


def _password(path: str) -> str:
    """Read one line; a file with more is refused, not cut off."""
    data = read_private("--etcd-password-file", path, PASSWORD_BYTES_MAX)
    try:
        text = data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        text = ""
    if not text or "\n" in text:
        raise ConfigError(f"--etcd-password-file={path}: must hold the password in one line, and nothing else")
    return text
