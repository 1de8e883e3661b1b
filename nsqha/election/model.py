"""The records that the whole cluster agrees on. Frozen: a change is a new record that is put by compare-and-set.

    cluster                 ClusterRecord     id, salt counter, feature level
    nodes/<node uid>        NodeInfo          lives as long as its node does
    topics/<name>           TopicRecord       uid, salt, settings, channel list
                              PartitionMeta   per partition: leader, epoch, ISR (etcd keeps it under a key of its own)
    tombstones/<topic uid>  Tombstone         a deleted topic whose files may still exist on some node
    controller              Controller        the process that places and elects; lives as long as that does
    intents/<name>          any JSON object   what the controller has begun (moves, placements)

Two counters that are never mixed: `epoch` rises when a partition's leader changes and is stamped on every batch;
`version` is the revision of the last change to a record and guards compare-and-set.

Units are in the names. Node ids, topic, channel and log uids are 64-bit integers, 0 = none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from operator import is_not
from typing import Any, Generic, Literal, TypeVar, get_args

from nsqha import __version__
from nsqha.election.codec import StoredRecord as StoredRecord
from nsqha.election.codec import keep_text
from nsqha.election.policy import EVERY_CHANNEL, SILENT, ChannelPolicy, InForce, PoliciesSaid, in_force
from nsqha.errors import Conflict, NotFound
from nsqha.ids import PARTITIONS_MAX, SALT_BITS, is_ephemeral, topic_salt, valid_name

FEATURE_LEVEL = 1  # what this version understands; a cluster at a higher level is refused

PEER_LEVEL = 1  # of what nodes say to each other: raised when an older build would misunderstand it
PEER_LEVEL_OLDEST = 1  # that this build still speaks: a cluster is upgraded node by node, so the one before should stay

Sync = Literal["always", "interval", "none"]
UNLIMITED = -1
REPLICAS_MAX = 15
JUST_REGISTERED = "it has just registered, and its connections are being tried"
TRIED_SECONDS = 1.0  # that a node says so at most; new partitions wait so long for the nodes that do
MOVED_FROM_MAX = 32  # nodes that a record remembers as former replicas

_SINCE = "since"  # where a list of channels has what changed since another one, beside its fields

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Versioned(Generic[R]):
    """A record as it was read; a change has to name `version`."""

    record: R
    version: int


@dataclass(frozen=True)
class TopicSettings(StoredRecord):
    """Settings of a topic that an operator may choose. None: the node's (or cluster's) default at the time of use."""

    sync: Sync | None = None  # what OK means: on disk, in the page cache, or the same without the timer
    retention_ms: int | None = None  # finished messages are kept for replay this long; UNLIMITED: for ever
    retention_bytes: int | None = None  # ... and at most this much per partition; UNLIMITED: no limit
    # Retention never passes an unread message of a channel, unless the channel counts as abandoned:
    abandoned_after_ms: int | None = None  # no consumer and nothing finished for this long; None: never
    abandoned_over_bytes: int | None = None  # more than this many bytes of a partition unread; None: never
    ordered: bool = False  # a message is delivered only after the one before it is finished, per partition
    partitions: int = 1
    replicas: int | None = None  # None: min(3, nodes)
    min_isr: int | None = None  # None: replicas // 2 + 1

    def __post_init__(self) -> None:
        if self.sync is not None and self.sync not in get_args(Sync):
            raise ValueError(f"sync is {self.sync!r}; it must be always, interval or none")
        _check("partitions", self.partitions, 1, PARTITIONS_MAX)
        _check("retention_ms", self.retention_ms, UNLIMITED)
        _check("retention_bytes", self.retention_bytes, UNLIMITED)
        _check("abandoned_after_ms", self.abandoned_after_ms, 1)
        _check("abandoned_over_bytes", self.abandoned_over_bytes, 1)
        _check("replicas", self.replicas, 1, REPLICAS_MAX)
        _check("min_isr", self.min_isr, 1, REPLICAS_MAX)
        if self.replicas is not None and self.min_isr is not None and self.min_isr > self.replicas:
            raise ValueError(f"min_isr is {self.min_isr}; it cannot be more than replicas, {self.replicas}")


@dataclass(frozen=True)
class ChannelInfo(StoredRecord):
    """One channel of a topic. The node that creates it draws the uid, which is never used again."""

    uid: int
    paused: bool = False
    reader: bool = False  # it delivers nothing; a reader of the log's files keeps its floor there
    policy: ChannelPolicy = field(default_factory=lambda: SILENT)  # what an operator asks of it


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of what is not equal in both, without a step of Python for each of what is the very same."""
    unlike = compress(after, map(is_not, after.values(), map(before.get, after)))
    names = tuple(name for name in unlike if before.get(name) != after[name])
    came = sum(name not in before for name in names)
    if len(before) + came > len(after):
        names += tuple(name for name in before if name not in after)
    return names


@dataclass(frozen=True)
class ChannelList(StoredRecord):
    """The durable channels of a topic; `version` counts changes, so that a log can recognize an older copy."""

    version: int = 0
    paused: bool = False  # the topic
    channels: Mapping[str, ChannelInfo] = field(default_factory=dict)
    defaults: ChannelPolicy = field(default_factory=lambda: SILENT)  # of channels that say nothing themselves
    unasked: bool = False  # lookup daemons are still to be asked for the channels that the topic begins with

    @cached_property
    def policies(self) -> PoliciesSaid:
        """All that is said of policies here."""
        speaking = {n: i.policy for n, i in self.channels.items() if i.policy is not SILENT and i.policy != SILENT}
        return PoliciesSaid(speaking, self.defaults)

    def changed_since(self, before: ChannelList) -> Collection[str]:
        """The names of all channels that came, went or changed since that list, older or newer.

        A list that was made of another one by a change knows that; of others that are compared, each is compared once,
        as all partitions of a topic ask for the same."""
        if self.channels is before.channels:
            return ()
        since, names = self.__dict__.get(_SINCE, (None, ()))
        if since is not before.channels:
            names = _differing(before.channels, self.channels)
            self._differs(before, names)
        return names  # type: ignore[no-any-return]

    def policy_in_force(self, name: str) -> dict[str, InForce]:
        """What this channel follows, for every field of a policy."""
        return in_force(self.own_policy(name), self.defaults)

    def own_policy(self, name: str) -> ChannelPolicy:
        """What is said for this channel, or `*`, alone."""
        if name == EVERY_CHANNEL:
            return self.defaults
        info = self.channels.get(name)
        return ChannelPolicy() if info is None else info.policy

    def with_policy(
        self, name: str, changes: Mapping[str, Any], *, expected: ChannelPolicy | None = None
    ) -> ChannelList:
        """Other values for some fields of a channel's policy, or of `*`; None clears one. ValueError if they do not
        fit. Conflict: what is said now is not what was `expected`."""
        if name != EVERY_CHANNEL and self._existing(name).reader:
            raise ValueError(f"channel {name} is a reader's, which hands out nothing: it has no policy")
        known = self.own_policy(name)
        if expected is not None and known.said != expected.said:
            said = ", ".join(f"{field}={value}" for field, value in known.said.items()) or "nothing"
            raise Conflict(f"another request has changed the policy of channel {name}; it says {said} now")
        changed = known.with_changes(changes)
        if changed == known:
            return self
        if name == EVERY_CHANNEL:
            return replace(self._next(), defaults=changed)
        return self._with(name, replace(self.channels[name], policy=changed))

    def with_channel(self, name: str, uid: int, *, reader: bool = False) -> ChannelList:
        if not valid_name(name) or is_ephemeral(name):
            raise ValueError(f"{name!r} is not a name for a durable channel")
        if name in self.channels:
            raise Conflict(f"channel {name} exists already")
        return self._with(name, ChannelInfo(uid, reader=reader))

    def begun_with(self, channels: Mapping[str, int]) -> ChannelList:
        """The list with all that lookup daemons know (name -> uid), which were asked now."""
        begun = replace(self, unasked=False)
        for name, uid in channels.items():
            if name not in begun.channels:
                begun = begun.with_channel(name, uid)
        return begun

    def without_channel(self, name: str) -> ChannelList:
        self._existing(name)
        return self._with(name, None)

    def with_channel_paused(self, name: str, paused: bool) -> ChannelList:
        info = self._existing(name)
        if info.paused == paused:
            return self
        return self._with(name, replace(info, paused=paused))

    def with_topic_paused(self, paused: bool) -> ChannelList:
        return self if self.paused == paused else self._next(paused=paused)

    def with_policies_of(self, other: ChannelList) -> ChannelList:
        """The same list with what a record said of its channels: this one may be from a log, which has no policies."""
        said = {info.uid: info.policy for info in other.channels.values()}
        channels = {n: replace(info, policy=said.get(info.uid, info.policy)) for n, info in self.channels.items()}
        return replace(self, channels=channels, defaults=other.defaults)

    def above(self, version: int) -> ChannelList:
        """The same list, newer than every copy up to `version`: after an import or a rebuild from logs."""
        return replace(self, version=max(self.version, version) + 1)

    def _existing(self, name: str) -> ChannelInfo:
        if name not in self.channels:
            raise NotFound(f"there is no channel {name}")
        return self.channels[name]

    def _with(self, name: str, info: ChannelInfo | None) -> ChannelList:
        """The next list, with this for the channel; None: without it."""
        channels = dict(self.channels)
        if info is None:
            del channels[name]
        else:
            channels[name] = info
            keep_text(info)
        changed = self._next(channels=channels)
        changed._differs(self, (name,))
        return changed

    def _differs(self, before: ChannelList, names: tuple[str, ...]) -> None:
        """These are the channels that came, went or changed. If they say nothing of policies, that is not sought."""
        self.__dict__[_SINCE] = before.channels, names
        found = [info for each in (before, self) for name in names if (info := each.channels.get(name)) is not None]
        if self.defaults == before.defaults and all(info.policy == SILENT for info in found):
            self.__dict__["policies"] = before.policies

    def _next(self, *, channels: Mapping[str, ChannelInfo] | None = None, paused: bool | None = None) -> ChannelList:
        return replace(
            self,
            version=self.version + 1,
            channels=self.channels if channels is None else channels,
            paused=self.paused if paused is None else paused,
        )


@dataclass(frozen=True)
class PartitionMeta(StoredRecord):
    """The leader of a partition and the replicas that must have a message before it is acknowledged.

    `nothing_acked` is set with the first leader if the ISR is below `min_isr` then, and cleared for ever in the first
    write after which it is not below: no leader acknowledges anything before it has read such a record. So while it is
    set, no log of the partition ever had a message that was acknowledged."""

    leader: int = 0  # node uid; 0: none yet
    epoch: int = 1  # of the leader
    isr: Mapping[int, int] = field(default_factory=dict)  # node uid -> log_uid that counts there (0: not reported yet)
    replicas: tuple[int, ...] = ()  # node uids, the preferred leader first
    min_isr: int = 1
    sync: Sync | None = None  # None: as the topic's settings say
    registration: int = 0  # the leader's process life: one life leads an epoch. 0: a node without a cluster
    successor: int = 0  # node that leads next; the leader that sees this takes no more publishes. 0: none
    version: int = 0  # revision of the last change to this partition; set by the store
    damage_accepted: int = 0  # the epoch whose leader an operator lets lead although its log is damaged; 0: none
    nothing_acked: bool = False  # the ISR has been below min_isr since this partition was created
    moved_from: tuple[int, ...] = ()  # nodes that had a replica, the last one last: some may still have its files

    def __post_init__(self) -> None:
        if self.nothing_acked and len(self.isr) >= self.min_isr:
            object.__setattr__(self, "nothing_acked", False)  # here, so that no change can forget it

    @property
    def electable(self) -> Collection[int]:
        """The nodes that may be elected: any replica while nothing can be lost, members of the ISR from then on."""
        return self.isr if self.isr and not self.nothing_acked else self.replicas

    def led_by(self, node: int, log_uid: int = 0) -> PartitionMeta:
        """The same epoch with this node alone: how a single node creates its partitions."""
        return replace(self, leader=node, isr={node: log_uid}, replicas=(node,), min_isr=1)


@dataclass(frozen=True)
class TopicRecord(StoredRecord):
    """One life of a topic: after a delete, a topic of the same name has another uid and salt."""

    name: str
    uid: int
    salt: int  # in the wire ids of its messages, see nsqha.ids
    settings: TopicSettings = field(default_factory=TopicSettings)
    channels: ChannelList = field(default_factory=ChannelList)
    partitions: Mapping[int, PartitionMeta] = field(default_factory=dict)


@dataclass(frozen=True)
class Tombstone(StoredRecord):
    """A deleted topic. A node removes files only if it sees this; it goes when every node in `nodes` has done so."""

    name: str
    uid: int
    partitions: int
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClusterRecord(StoredRecord):
    """The cluster's identity and counters, which exist once."""

    cluster_id: int
    salt_counter: int = 0  # topics created so far; raised in the transaction that creates one
    feature_level: int = FEATURE_LEVEL

    @property
    def salt_constant(self) -> int:
        """Part of every salt. It comes from the id, which is in every node's journal, so a rebuild has the same one."""
        return self.cluster_id & ((1 << SALT_BITS) - 1)

    def next_salt(self) -> int:
        return topic_salt(self.salt_counter, self.salt_constant)

    def past_salt(self, salt: int) -> ClusterRecord:
        """The record with the counter above the one of `salt`, so that this salt is not used again."""
        # Bit reversal is its own inverse.
        counter = topic_salt(salt ^ self.salt_constant, 0)
        return replace(self, salt_counter=max(self.salt_counter, counter + 1))


@dataclass(frozen=True)
class NodeInfo(StoredRecord):
    """A node that is alive, as it announced itself."""

    node_uid: int
    name: str = ""
    host: str = ""  # replicas of a partition are never on the same host
    zone: str = ""
    region: str = ""
    hostname: str = ""
    broadcast_address: str = ""  # where clients connect, with the ports of the addresses
    tcp_address: str = ""
    http_address: str = ""
    grpc_address: str = ""  # calls: administration, segments, and those between nodes
    peer_address: str = ""  # streams between nodes; empty: it takes none
    segments_address: str = ""  # empty: it serves none
    boot_id: str = ""
    registration: int = 0  # one process life; set by the store, never used again
    feature_level: int = FEATURE_LEVEL
    version: str = ""  # of nsqd, which it behaves like
    build: str = ""  # of nsqha; empty: older than all that say it
    peer_level: int = 0  # the newest level of the protocol between nodes that it speaks
    peer_level_oldest: int = 0
    poisoned: str = ""  # why its data directory is closed; empty: it is not
    leaving: bool = False  # it shuts down or its disk hangs: its leaderships must move
    leaving_why: str = ""  # of a node that does not shut down
    declines: str = ""  # why it should lead only where no other can: its disk or its clock; empty: it need not
    folder: str = ""  # names the lock file that it holds, among those of one host since its boot; empty: not known
    trouble: str = ""  # what an operator has to mend there, though it leads as before: an expired certificate
    joining: str = ""  # which connections it lacks until it gets replicas that it never held; empty: none

    @property
    def just_registered(self) -> bool:
        """True while its connections are tried for the first time."""
        return self.joining == JUST_REGISTERED


def name_taken(node: NodeInfo, others: Iterable[NodeInfo]) -> str:
    """Why a node cannot register beside these, as one of them has its name; empty: it can. A node that replaces a lost
    one takes its name, so two live ones of one name would be taken for each other."""
    for other in others:
        if node.name and other.name == node.name and other.node_uid != node.node_uid:
            return (
                f"node name {node.name} is taken by node {other.node_uid:016x} at {other.tcp_address}, which is alive: "
                "give this one another --node-name (or --broadcast-address), or stop that one"
            )
    return ""


def unlike_levels(oldest: int, newest: int, build: str) -> str:
    """Why a build that speaks these levels between nodes cannot work with this one; empty: it can."""
    if newest >= PEER_LEVEL_OLDEST and oldest <= PEER_LEVEL:
        return ""
    advice = "upgrade that one" if newest < PEER_LEVEL_OLDEST else "upgrade this one"
    mine = f"nsqha {__version__} with levels {PEER_LEVEL_OLDEST} to {PEER_LEVEL}"
    return f"nsqha {build} with levels {oldest} to {newest} does not work together with {mine}: {advice}"


def foreign_folder(cluster_id: int, *, has_joined: bool) -> str:
    """What is wrong with the data directory of a node that belongs to this other cluster, and the remedy. Without
    `has_joined` it is the cluster of a node that ran alone."""
    if has_joined:
        whose = f"this data directory belongs to {cluster_id:016x}"
        return f"{whose}; check the cluster's name and etcd's endpoints, or use another data directory"
    return (
        "this data directory is of a node that ran alone: `nsqha cluster import` moves its topics into the cluster; or "
        "use another data directory"
    )


@dataclass(frozen=True)
class FolderUse(StoredRecord):
    """What is remembered of a node's data directory while the node is not there."""

    node_uid: int
    uses: int = 0  # as in the directory's journal, or one less
    poisoned: str = ""  # why it was closed in that use; empty: it was not


@dataclass(frozen=True)
class Controller(StoredRecord):
    """The process that places partitions and elects leaders."""

    name: str = ""
    grpc_address: str = ""
    epoch: int = 0  # of this term; set by the store, never used again, higher than every earlier one


def _check(name: str, value: int | None, lowest: int, highest: int | None = None) -> None:
    if value is None:
        return
    if value < lowest or (highest is not None and value > highest):
        upto = "" if highest is None else f" to {highest}"
        raise ValueError(f"{name} is {value}; it must be {lowest}{upto}{' or more' if highest is None else ''}")
