"""A copy of a cluster's keys, kept up to date by the watch and handed out as immutable views.

Only the watch thread changes it. A record that cannot be read (of a newer version, or damaged) stays as it was known
before, is reported once, and is named in each view (`unreadable`); a caller that must decide by it reads it from the
store and gets the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.model import Controller, NodeInfo, PartitionMeta, Tombstone, TopicRecord, Versioned
from nsqha.election.session import View
from nsqha.election.store import Hint
from nsqha.errors import ConfigError, LogCorrupt

Trouble = Callable[[str], None]


class WatchedView:
    """The newest view, and who hears of changes."""

    def __init__(self, trouble: Trouble) -> None:
        self._trouble = trouble
        self._hints: list[Hint] = []
        self._view = View()

    def view(self) -> View:
        return self._view

    def on_change(self, hint: Hint) -> Callable[[], None]:
        self._hints.append(hint)
        return lambda: self._hints.remove(hint) if hint in self._hints else None

    def publish(self, view: View, names: list[str]) -> None:
        """Show this view from now on; called by the thread that watches."""
        self._view = view
        for hint in tuple(self._hints):
            for name in names:
                try:
                    hint(name)
                except Exception as error:
                    # The caller's fault (a loop that is closed), which must not cost all others their hints.
                    self._trouble(f"a hint about {name or 'anything'} was not taken: {error!r}")

    def close(self) -> None:
        """Call no hint any more."""
        self._hints.clear()


@dataclass
class KeyedRecords:
    """The records of the keys. A topic's partitions are under its uid, as in etcd, until a view joins them."""

    keys: etcd_keys.Keys
    trouble: Trouble
    revision: int = 0
    topics: dict[str, Versioned[TopicRecord]] = field(default_factory=dict)
    partitions: dict[int, dict[int, PartitionMeta]] = field(default_factory=dict)
    tombstones: dict[int, Tombstone] = field(default_factory=dict)
    nodes: dict[int, NodeInfo] = field(default_factory=dict)
    controller: Controller | None = None
    node_names: dict[int, str] = field(default_factory=dict)  # also of those that are away
    unreadable: dict[str, str] = field(default_factory=dict)  # without the prefix -> why
    _names: dict[int, str] = field(default_factory=dict)  # by topic uid
    _round: dict[str, None] = field(default_factory=dict)  # keys that changed since the last view
    _gone: list[int] = field(default_factory=list)  # uids of topics that were removed since the last view

    def put(self, kv: Any) -> None:
        short = self._touch(kv)
        try:
            self._put(short, kv)
            self.unreadable.pop(short, None)
        except (LogCorrupt, ConfigError) as error:
            self.unreadable[short] = str(error)
            self.trouble(str(error))

    def remove(self, kv: Any) -> None:
        short = self._touch(kv)
        self.unreadable.pop(short, None)
        kind, _, rest = short.partition("/")
        if short == "controller":
            self.controller = None
        elif kind == "topics":
            removed = self.topics.pop(rest, None)
            if removed is not None:
                self._gone.append(removed.record.uid)
        elif kind == "nodes":
            self.nodes.pop(etcd_keys.uid_of(short), None)
        elif kind == "tombstones":
            self.tombstones.pop(etcd_keys.uid_of(short), None)
        elif kind == "intents":
            self.node_names.pop(etcd_keys.uid_of(short), None)
        elif (partition := etcd_keys.partition_of(short)) is not None:
            uid, number = partition
            self.partitions.get(uid, {}).pop(number, None)

    def changed(self, before: View) -> tuple[View, list[str]]:
        """The view after what was put and removed since `before`, and a hint for each record."""
        # Only now is the name of a new topic certain: its partitions' keys come first.
        hints = list(dict.fromkeys(self._hint(short) for short in self._round))
        topics = dict(before.topics)
        for hint in hints:
            kind, _, name = hint.partition("/")
            if kind == "topics":
                topics.pop(name, None)
                if name in self.topics:
                    topics[name] = self._join(self.topics[name])
        self._end_round()
        return self._view(topics), hints

    def whole(self) -> View:
        """Build the view from all records."""
        self._end_round()
        return self._view({name: self._join(topic) for name, topic in self.topics.items()})

    def _view(self, topics: dict[str, Versioned[TopicRecord]]) -> View:
        return View(
            self.revision,
            topics,
            dict(self.tombstones),
            dict(self.nodes),
            self.controller,
            dict(self.node_names),
            dict(self.unreadable),
        )

    def _join(self, topic: Versioned[TopicRecord]) -> Versioned[TopicRecord]:
        return join(topic, self.partitions.get(topic.record.uid, {}))

    def _touch(self, kv: Any) -> str:
        short = self.keys.short(kv.key)
        self.revision = max(self.revision, kv.mod_revision)
        self._round[short] = None
        return short

    def _hint(self, short: str) -> str:
        partition = etcd_keys.partition_of(short)
        if partition is None:
            return short
        name = self._names.get(partition[0])
        return "" if name is None else f"topics/{name}"

    def _end_round(self) -> None:
        for uid in self._gone:
            self._names.pop(uid, None)
            self.partitions.pop(uid, None)
        self._round.clear()
        self._gone.clear()

    def _put(self, short: str, kv: Any) -> None:
        kind, _, rest = short.partition("/")
        if short == "controller":
            self.controller = etcd_keys.controller_of(kv)
        elif kind == "topics":
            before = self.topics.get(rest)
            self.topics[rest] = topic = etcd_keys.versioned_of(TopicRecord, kv)
            if before is not None and before.record.uid != topic.record.uid:
                self._gone.append(before.record.uid)
            self._names[topic.record.uid] = rest
        elif kind == "nodes" and (uid := etcd_keys.uid_of(short)):
            self.nodes[uid] = etcd_keys.node_info(kv)
        elif kind == "tombstones" and (uid := etcd_keys.uid_of(short)):
            self.tombstones[uid] = etcd_keys.record_of(Tombstone, kv)
        elif kind == "intents":
            intent = etcd_keys.intent_of(kv).record  # also for intents that are not kept here: this reports damage
            if uid := etcd_keys.uid_of(short):
                self.node_names[uid] = str(intent.get("name", ""))
        elif (partition := etcd_keys.partition_of(short)) is not None:
            uid, number = partition
            self.partitions.setdefault(uid, {})[number] = etcd_keys.partition_meta(kv)


def join(topic: Versioned[TopicRecord], partitions: dict[int, PartitionMeta]) -> Versioned[TopicRecord]:
    """A topic record with its partitions."""
    return Versioned(replace(topic.record, partitions=dict(sorted(partitions.items()))), topic.version)


def join_all(
    keys: etcd_keys.Keys,
    topics: Iterable[Any],
    partitions: Iterable[Any],
    *,
    known: Mapping[str, Versioned[TopicRecord]],
) -> dict[str, Versioned[TopicRecord]]:
    """All topics with their partitions, as keys that were just read have them. What the watch has brought at the same
    revision is not decoded again: of thousands of records few are newer."""
    uids = {topic.record.uid: topic.record.partitions for topic in known.values()}
    metas: dict[int, dict[int, PartitionMeta]] = {}
    for kv in partitions:
        if (found := etcd_keys.partition_of(keys.short(kv.key))) is not None:
            uid, number = found
            meta = uids.get(uid, {}).get(number)
            same = meta is not None and meta.version == kv.mod_revision
            metas.setdefault(uid, {})[number] = meta if same and meta is not None else etcd_keys.partition_meta(kv)
    joined = {}
    for kv in topics:
        old = known.get(keys.short(kv.key).partition("/")[2])
        topic = old if old is not None and old.version == kv.mod_revision else None
        topic = topic or etcd_keys.versioned_of(TopicRecord, kv)
        joined[topic.record.name] = join(topic, metas.get(topic.record.uid, {}))
    return joined


def join_newer(
    keys: etcd_keys.Keys,
    topics: Iterable[Any],
    partitions: Iterable[Any],
    *,
    known: Mapping[str, Versioned[TopicRecord]],
) -> dict[str, Versioned[TopicRecord]]:
    """All topics with their partitions: those that are `known`, and what was put since in their place."""
    newest = dict(known)
    metas: dict[int, dict[int, PartitionMeta]] = {}
    for kv in partitions:
        if (found := etcd_keys.partition_of(keys.short(kv.key))) is not None:
            metas.setdefault(found[0], {})[found[1]] = etcd_keys.partition_meta(kv)
    for kv in topics:
        topic = etcd_keys.versioned_of(TopicRecord, kv)
        before = known.get(topic.record.name)
        newest[topic.record.name] = join(topic, dict(before.record.partitions) if before is not None else {})
    for name, topic in newest.items() if metas else ():
        if (changed := metas.get(topic.record.uid)) is not None:
            newest[name] = join(topic, {**topic.record.partitions, **changed})
    return newest
