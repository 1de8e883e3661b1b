"""The metadata of a cluster, in etcd.

    EtcdStore        whether this etcd is the cluster's, and its parts
      EtcdRecords      reads and compare-and-set transactions, in the caller's thread
      EtcdIntents      likewise
      EtcdFolders      likewise, of data directories
      EtcdSessions     of which each has a thread that keeps the process's lease
      WatchedView      the copy of all records and who hears of changes; EtcdWatch, with a thread, keeps it up to date
      EtcdClient       endpoints, deadlines, login, what a failure means

etcd is believed only as long as it is the one that this node belongs to and never goes back: see `StoreIdentity`.
"""

from __future__ import annotations

import random

from nsqha.clock import Clock
from nsqha.election.codec import encode
from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.calls import read_key, transact
from nsqha.election.etcd.client import EtcdClient, EtcdOptions, Full
from nsqha.election.etcd.folders import EtcdFolders
from nsqha.election.etcd.keys import created, put
from nsqha.election.etcd.metadata_restore import EtcdSnapshot, look
from nsqha.election.etcd.records import EtcdIntents, EtcdRecords
from nsqha.election.etcd.session import EtcdSessions
from nsqha.election.etcd.view import Trouble, WatchedView
from nsqha.election.etcd.watch import EtcdWatch
from nsqha.election.model import FEATURE_LEVEL, ClusterRecord, foreign_folder
from nsqha.election.session import StoreIdentity
from nsqha.errors import ConfigError, OutcomeUnknown, StaleMetadata
from nsqha.ids import new_uid


class EtcdStore:
    """The cluster's store. Any number of threads."""

    def __init__(
        self,
        options: EtcdOptions,
        cluster_name: str,
        clock: Clock,
        rng: random.Random,
        *,
        cluster_id: int = 0,
        seen: StoreIdentity = StoreIdentity(0, 0),
        trouble: Trouble = lambda text: None,
    ) -> None:
        """Connect, check who it is, read everything and begin to watch.

        `cluster_id` and `seen` are what this node's journal says. A cluster that is not there yet begins, unless this
        node has been in one. `trouble` gets a line for a log whenever a background thread has to start over.

        Unavailable: etcd can not be reached. StaleMetadata: it is another one or was put back to an older state.
        ConfigError: another cluster, another version's, or etcd refuses us.
        """
        self._keys = keys = etcd_keys.Keys(cluster_name)
        self._rng = rng
        self._generation = 0  # of the acceptance that is believed
        self._client = client = EtcdClient(options, etcd_cluster_id=seen.etcd_cluster_id, revision_seen=seen.revision)
        self.watch = WatchedView(trouble)
        self.sessions = EtcdSessions(client, keys, clock, trouble)
        self.records = EtcdRecords(client, keys, rng, sessions=self.sessions, known=self.watch.view)
        self.intents = EtcdIntents(client, keys)
        self.folders = EtcdFolders(client, keys)
        self._thread = EtcdWatch(client, keys, self.watch.publish, trouble)
        try:
            self._check_cluster(cluster_id, known=seen.etcd_cluster_id != 0)
            self._thread.start()
        except BaseException:
            client.close()
            raise

    def identity(self) -> StoreIdentity:
        return StoreIdentity(self._client.etcd_cluster_id, self._client.revision)

    @property
    def doubt(self) -> str:
        """Why etcd is not believed any more, which no call can change; empty: it is."""
        return self._client.doubt

    @property
    def foreign(self) -> bool:
        """The doubt is that it is another etcd, and not an older state of ours."""
        return self._client.foreign

    def close(self) -> None:
        self.watch.close()
        self.sessions.close()
        self._thread.stop()
        self._client.close()

    # Acceptance (nsqha.election.metadata_restore)

    def why_not(self) -> str:
        """Why nobody may decide by the metadata now; empty: nothing is known against it."""
        return self._looked().why_not

    def believe_accepted(self) -> bool:
        """If this etcd is doubted and an operator has accepted it since: believe it again, from the beginning.

        For a process that has no state of its own which could be ahead of the metadata: a lookup daemon."""
        if not self.doubt:
            return False
        client = EtcdClient(self._client.options)
        try:
            found = look(client, self._keys)
        finally:
            client.close()
        if found.why_not or found.accepted.record.generation <= self._generation:
            return False
        self._client.forget()
        self._thread.begin_again()
        return True

    def _looked(self) -> EtcdSnapshot:
        found = look(self._client, self._keys)
        self._generation = found.accepted.record.generation
        return found

    def _check_cluster(self, cluster_id: int, *, known: bool) -> None:
        kv = read_key(self._client, self._keys.cluster)
        if kv is None and known:
            raise ConfigError(
                f"etcd has no cluster under {self._keys.prefix}, though this node has been in one there; "
                "check the cluster's name, or put etcd's data back from a backup"
            )
        if kv is None:
            if not cluster_id and (why := look(self._client, self._keys).why_not):
                raise StaleMetadata(f"etcd has no cluster under {self._keys.prefix}, and it is not to be begun: {why}")
            record = ClusterRecord(cluster_id or new_uid(self._rng))
            begun = [put(self._keys.cluster, encode(record))]
            try:
                transact(self._client, [created(self._keys.cluster, 0)], begun)
            except Full:
                raise
            except OutcomeUnknown:
                pass  # somebody began it, or nobody; the next read says
        cluster = self.records.cluster().record
        if cluster_id not in (0, cluster.cluster_id):
            raise ConfigError(
                f"{self._keys.prefix} in etcd is cluster {cluster.cluster_id:016x}, "
                + foreign_folder(cluster_id, has_joined=known)
            )
        if cluster.feature_level > FEATURE_LEVEL:
            raise ConfigError(
                f"{self._keys.prefix} in etcd needs feature level {cluster.feature_level}, this version has "
                f"{FEATURE_LEVEL}; start a newer version"
            )
