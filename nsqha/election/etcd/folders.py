"""Records of data directories in etcd, which stay when their nodes are gone (`server.node.cluster.folder_life`)."""

from __future__ import annotations

from nsqha.election.codec import encode
from nsqha.election.etcd.calls import read_key, transact
from nsqha.election.etcd.client import EtcdClient
from nsqha.election.etcd.keys import Keys, put, record_of, unchanged
from nsqha.election.model import FolderUse
from nsqha.errors import Conflict


class EtcdFolders:
    """Of all nodes of one cluster. Any number of threads."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    def read(self, node: int) -> FolderUse | None:
        """The record of a node's directory. Unavailable, StaleMetadata."""
        kv = read_key(self._client, self._keys.folder(node))
        return None if kv is None else record_of(FolderUse, kv)

    def write(self, use: FolderUse) -> None:
        """Store it. Conflict: there is one with more uses, or it was changed meanwhile. OutcomeUnknown."""
        key = self._keys.folder(use.node_uid)
        kv = read_key(self._client, key)
        if kv is not None and (stored := record_of(FolderUse, kv)).uses > use.uses:
            raise Conflict(
                f"the data directory of node {use.node_uid:016x} is in its use {stored.uses}, not {use.uses}: another "
                "process has it, or a copy of it"
            )
        answer = transact(self._client, [unchanged(key, 0 if kv is None else kv.mod_revision)], [put(key, encode(use))])
        if not answer.succeeded:
            raise Conflict(f"the record of the data directory of node {use.node_uid:016x} was changed meanwhile")
