"""The metadata store: the contract of every implementation.

    MetadataStore    four parts and their end; calls block, so the shell makes them in a worker thread
      records          MetadataRecords: topics with their partitions, tombstones, who is there; reads and changes
      intents          MetadataIntents: what administrators want of the controller
      sessions         MetadataSessions: this process's registration and lease
      watch            MetadataWatch: the local copy of all records, and hints about changes

    MemoryStore (nsqha.election.memory)      all the rules below; tests, simulation
    EmbeddedStore (nsqha.election.embedded)  the same, stored in a file, for a node without etcd
    EtcdStore (nsqha.election.etcd.store)    the cluster's

A caller asks for the part that it uses.

- Every change is compare-and-set: it names the version it read and raises `Conflict` if that is no longer current.
- A change is durable when the call returns. `OutcomeUnknown`: it may or may not have happened; read again.
- `revision` rises with every change; a record's version is the revision of its last change. A partition has a version
  of its own, so leaders that change an ISR and nodes that add channels do not disturb each other.
- A missing record means nothing; a `Tombstone` means that the topic was deleted. It stays until its files are gone.
- An ephemeral topic's record is kept like any other but never stored, and leaves no tombstone.
- A change can name registrations or a controller that it relies on; it is a Conflict when one of them is gone.
- Hints name a record that may have changed ("topics/<name>" also for its partitions, "tombstones/<uid>", "nodes/<uid>",
  "controller", "intents/<name>", "cluster"; uids as 16 hex digits); the receiver reads it again. They may be late,
  repeated or, when a connection breaks, a single "" for "anything".
- StaleMetadata from any method: this is another store than the one this node belongs to, or an older state of it.
- ConfigError or LogCorrupt from a read: a record is of a newer version, or is not one. Only such an intent counts as
  empty instead: this version does not know it, and it can be changed or removed by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nsqha.election.model import (
    ChannelList,
    ClusterRecord,
    Controller,
    NodeInfo,
    PartitionMeta,
    Tombstone,
    TopicRecord,
    TopicSettings,
    Versioned,
)
from nsqha.election.session import ClusterSession, Lost, StoreIdentity, View
from nsqha.errors import Conflict, NotFound, OutcomeUnknown, Unavailable

Hint = Callable[[str], None]
Intent = Mapping[str, Any]  # a JSON object
Refusal = Conflict | NotFound | Unavailable | OutcomeUnknown  # why a change was not made, or may not have been


@dataclass(frozen=True)
class PartitionChange:
    """One of several partitions that are changed in one call; see `MetadataRecords.replace_partition`."""

    name: str
    uid: int
    number: int
    meta: PartitionMeta
    registered: Mapping[int, int] = field(default_factory=dict)


class MetadataRecords(Protocol):
    """The records of a store: reads and compare-and-set changes, in the caller's thread."""

    @property
    def revision(self) -> int:
        """The revision of the newest change that this store has seen."""

    def cluster(self) -> Versioned[ClusterRecord]:
        """The cluster's record."""

    def topics(self) -> dict[str, Versioned[TopicRecord]]:
        """All topics by name."""

    def topic(self, name: str) -> Versioned[TopicRecord] | None:
        """One topic, by a linearizable read."""

    def topics_of(self, names: Collection[str]) -> dict[str, Versioned[TopicRecord] | None]:
        """Several topics, each as `topic` reads it. One record that can not be read may fail them all."""

    def create_topic(
        self,
        name: str,
        settings: TopicSettings,
        *,
        partitions: Mapping[int, PartitionMeta] | None = None,
        channels: ChannelList | None = None,
        uid: int | None = None,
    ) -> Versioned[TopicRecord]:
        """Draw a uid, take a salt and store the record. Without `partitions` they wait for a leader, in epoch 1.
        `channels`: those that exist from its first message on. `uid`: one that the caller has drawn for it.

        Conflict if it exists; ValueError if the name or the partitions do not fit."""

    def replace(
        self, name: str, expected_version: int, record: TopicRecord, *, controller: int | None = None
    ) -> Versioned[TopicRecord]:
        """Change a topic. Conflict unless the topic, and every partition that differs, is still as it was read.

        `controller` is the epoch of the controller that makes the change.

        Partitions can be added, not removed; name, uid and salt never change (ValueError). NotFound."""

    def replace_partition(
        self,
        name: str,
        uid: int,
        number: int,
        meta: PartitionMeta,
        *,
        registered: Mapping[int, int] | None = None,
        controller: int | None = None,
    ) -> PartitionMeta:
        """Change one partition, guarded by `meta.version`; returns it with its new version. NotFound, Conflict.

        `registered` maps nodes to the registrations they must still have (a node that joins the ISR), `controller` is
        the epoch of the controller that makes the change. After OutcomeUnknown call `fence_partition`."""

    def replace_partitions(
        self, changes: Sequence[PartitionChange], *, controller: int | None = None
    ) -> list[PartitionMeta | Refusal]:
        """Change many partitions, each at most once, in few transactions; the result of each stands at its index.

        A change that `replace_partition` would make is made, whatever becomes of the others. Raises what concerns all
        (StaleMetadata), some of them may be made then."""

    def fence_partition(self, name: str, uid: int, number: int, version: int) -> PartitionMeta:
        """Resolve an unknown outcome of a change guarded by `version`: the result has that change or excludes it.

        If the partition still has this version it is put again unchanged, with a new version, so that the lost change
        cannot happen any more. Unavailable: the outcome is still unknown. NotFound: the topic is gone."""

    def delete_topic(self, name: str, *, expected_version: int | None = None) -> Tombstone:
        """Put a tombstone in the place of a topic. NotFound, Conflict."""

    def tombstones(self) -> dict[int, Tombstone]:
        """Deleted topics by uid."""

    def forget_tombstone(self, uid: int, *, node: int | None = None) -> None:
        """Remove a tombstone: no node has a file of this topic any more. No error if it is gone already.

        `node`: no file is left on that node; the tombstone is removed when that is true of every node it names."""

    def put_recovered(self, record: TopicRecord) -> Versioned[TopicRecord]:
        """Store a record that was rebuilt from logs or comes from another cluster; uid and salt are kept.

        Its channel list must be newer than every log's (`ChannelList.above`), its epochs higher than every promise.
        Conflict if the name is taken or the uid was deleted."""

    def raise_epochs(self, *, leader: int | None = None) -> dict[str, Versioned[TopicRecord]]:
        """Begin a new epoch of every partition, led by `leader` alone if given; returns all topics.

        For a single node, at start: one process life leads an epoch. One write in the embedded store; in etcd it may
        stop half-way, so that the next attempt begins another epoch of some partitions."""

    def controller(self) -> Controller | None:
        """The current controller, by a linearizable read."""

    def nodes(self) -> dict[int, NodeInfo]:
        """The nodes that are alive, by uid."""


class MetadataIntents(Protocol):
    """What administrators want of the controller, by name."""

    def all(self) -> dict[str, Versioned[Intent]]:
        """All intents, by name."""

    def put(
        self, name: str, intent: Intent, *, expected_version: int = 0, controller: int | None = None
    ) -> Versioned[Intent]:
        """Create (`expected_version` 0) or change an intent. Conflict; ValueError for an invalid name."""

    def remove(self, name: str, expected_version: int, *, controller: int | None = None) -> None:
        """Remove an intent that is done or given up. Conflict, also if it is gone."""


class MetadataSessions(Protocol):
    """This process's membership in its cluster."""

    def open(self, *, ttl_s: float, lost: Lost) -> ClusterSession:
        """Open this process's session. `lost` may be called from any thread. Conflict: there is a session already."""


class MetadataWatch(Protocol):
    """The local copy of all records, and news of it."""

    def view(self) -> View:
        """The local copy of all records; it costs no call and may be late."""

    def on_change(self, hint: Hint) -> Callable[[], None]:
        """Call `hint(name of a record)` after changes, from any thread; it must not block. Call the result to stop."""


class MetadataStore(Protocol):
    """A metadata store: its parts."""

    @property
    def records(self) -> MetadataRecords: ...

    @property
    def intents(self) -> MetadataIntents: ...

    @property
    def sessions(self) -> MetadataSessions: ...

    @property
    def watch(self) -> MetadataWatch: ...

    def identity(self) -> StoreIdentity:
        """Which store this is and the newest revision seen, for the journal."""

    def close(self) -> None:
        """Release files, threads and leases."""
