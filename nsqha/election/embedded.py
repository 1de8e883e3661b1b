"""The metadata of a single node, in one file: a `MemoryStore` whose changes are on disk before they become visible.

The file is a `recordfile` of JSON texts, one per change. It is rewritten when it has grown past 1 MiB or four times its
content. The first record has everything, each later one what its change put (null: removed):

    {"format": 1, "revision": 7, "cluster": [version, {ClusterRecord}] | null,
     "topics": {"<name>": [version, {TopicRecord}] | null}, "tombstones": {"<uid>": {Tombstone} | null},
     "intents": {"<name>": [version, {any}] | null}}      left out if empty

After a crash the last change, if it was never acknowledged, is complete or absent. A damaged file is refused: guessing
here could give a topic a second life under the same ids. It can be moved away; the node then rebuilds its topics from
its logs, which name topics, channels and uids (`put_recovered`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from nsqha.commitlog.recordfile import RecordFile
from nsqha.election.codec import FORMAT, from_plain, to_plain, with_texts
from nsqha.election.memory import Change, MemoryStore, StoreState
from nsqha.election.model import FEATURE_LEVEL, ClusterRecord, Tombstone, TopicRecord, Versioned
from nsqha.election.store import Intent
from nsqha.errors import AppendFailed, ConfigError, LogCorrupt
from nsqha.ids import is_ephemeral, new_uid

if TYPE_CHECKING:
    from nsqha.commitlog.storage import Storage

REWRITE_BYTES = 1 << 20


class EmbeddedStore:
    """One file, one process, one thread at a time."""

    def __init__(
        self, storage: Storage, path: str, rng: random.Random, *, cluster_id: int = 0, revision_seen: int = 0
    ) -> None:
        """Open the file, or create one (`created`) for `cluster_id`; 0: draw an id.

        The folder must exist and be locked. ConfigError: the file is of another cluster, of a newer version, or older
        than `revision_seen`, a revision that the caller knows was reached. LogCorrupt: it is damaged.
        """
        self.created = not storage.exists(path)
        if self.created:
            # A new file continues above every revision that this node has acted on.
            revision = max(revision_seen, 0) + 1
            state = StoreState(Versioned(ClusterRecord(cluster_id or new_uid(rng)), revision), revision)
            whole = _encode(_everything(state))
            self._file = RecordFile.create(storage, path, whole)
        else:
            self._file, state, whole = _load(storage, path, cluster_id, revision_seen)
        memory = MemoryStore(rng, state=state, save=self._save)
        self.records, self.intents = memory.records, memory.intents
        self.sessions, self.watch = memory.sessions, memory.watch
        self.identity = memory.identity
        self._rewrite_at = _rewrite_at(len(whole))

    def close(self) -> None:
        self.watch.close()
        self._file.close()

    def _save(self, state: StoreState, change: Change) -> None:
        stored = {name: topic for name, topic in change.topics.items() if not is_ephemeral(name)}
        payload = _encode(replace(change, topics=stored), cluster_version=change.revision)
        if self._file.end + len(payload) > self._rewrite_at:
            after = StoreState(state.cluster, 0, dict(state.topics), dict(state.tombstones), dict(state.intents))
            after.apply(change)
            whole = _encode(_everything(after), cluster_version=after.cluster.version)
            try:
                self._file.replace(whole)
            except AppendFailed:
                pass  # no space for a second file; there may still be some to append to the old one
            else:
                self._rewrite_at = _rewrite_at(len(whole))
                return
        self._file.append(payload)


def _rewrite_at(state_bytes: int) -> int:
    return max(REWRITE_BYTES, 4 * state_bytes)


def _load(storage: Storage, path: str, cluster_id: int, revision_seen: int) -> tuple[RecordFile, StoreState, bytes]:
    """The file, its state, and its first record."""
    file, contents = RecordFile.load(storage, path)
    try:
        if contents.damaged:
            raise LogCorrupt(
                f"{path} is damaged; restore it from a backup, or move it away to rebuild it from the logs"
            )
        state = _decode(contents.payloads, path)
        cluster = state.cluster.record
        if cluster_id not in (0, cluster.cluster_id):
            raise ConfigError(
                f"{path} is the metadata of cluster {cluster.cluster_id:016x}, this data directory belongs to "
                f"{cluster_id:016x}; put the right file back or use another data directory"
            )
        if cluster.feature_level > FEATURE_LEVEL:
            raise ConfigError(
                f"{path} needs feature level {cluster.feature_level}, this version has {FEATURE_LEVEL}; "
                "start a newer version"
            )
        if state.revision < revision_seen:
            raise ConfigError(
                f"{path} is at revision {state.revision}, this node has seen {revision_seen}: it is an old copy; "
                "restore the newer one, or move it away to rebuild it from the logs"
            )
    except BaseException:
        file.close()
        raise
    whole = contents.payloads[0]
    if contents.torn:
        whole = _encode(_everything(state), cluster_version=state.cluster.version)
        file.replace(whole)
    return file, state, whole


def _everything(state: StoreState) -> Change:
    topics = {name: topic for name, topic in state.topics.items() if not is_ephemeral(name)}
    return Change(state.revision, state.cluster.record, topics, state.tombstones, state.intents)


def _encode(change: Change, *, cluster_version: int = 1) -> bytes:
    topics = {n: None if t is None else [t.version, with_texts(t.record)] for n, t in change.topics.items()}
    tombstones = {str(uid): None if t is None else to_plain(t) for uid, t in change.tombstones.items()}
    plain = {
        "format": FORMAT,
        "revision": change.revision,
        "cluster": None if change.cluster is None else [cluster_version, to_plain(change.cluster)],
        "topics": topics,
        "tombstones": tombstones,
    }
    if change.intents:
        plain["intents"] = {name: None if i is None else [i.version, i.record] for name, i in change.intents.items()}
    return msgspec.json.encode(plain)


class _Stored(msgspec.Struct):
    """The form in which a record is read."""

    revision: int
    cluster: tuple[int, dict[str, Any]] | None
    topics: Mapping[str, tuple[int, dict[str, Any]] | None]
    tombstones: Mapping[int, dict[str, Any] | None]
    intents: Mapping[str, tuple[int, Intent] | None] = {}


class _StoreFormat(msgspec.Struct):
    format: int


def _decode(payloads: tuple[bytes, ...], path: str) -> StoreState:
    state = StoreState(Versioned(ClusterRecord(0), 0))
    for payload in payloads:
        number = msgspec.json.decode(payload, type=_StoreFormat).format
        if number > FORMAT:
            raise ConfigError(f"{path} has format {number}, this version reads up to {FORMAT}; start a newer version")
        stored = msgspec.json.decode(payload, type=_Stored)
        topics = {n: t and Versioned(from_plain(TopicRecord, t[1]), t[0]) for n, t in stored.topics.items()}
        tombstones = {uid: None if t is None else from_plain(Tombstone, t) for uid, t in stored.tombstones.items()}
        intents: dict[str, Versioned[Intent] | None] = {
            name: i and Versioned(i[1], i[0]) for name, i in stored.intents.items()
        }
        state.apply(Change(stored.revision, topics=topics, tombstones=tombstones, intents=intents))
        if stored.cluster is not None:
            state.cluster = Versioned(from_plain(ClusterRecord, stored.cluster[1]), stored.cluster[0])
    return state
