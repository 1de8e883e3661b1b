"""Many topics at once: new ones in one transaction, reads as one call.

A new topic takes its salt from the cluster record, so each addition changes that record, and of several at once only
one would succeed. Therefore one thread adds what all of them wait for: the first that gets the lock takes every topic
there is room for, and the others find theirs done. Other processes add topics, too; a transaction that lost against
theirs is tried again, at most RETRIES times, without the topics that are refused.

When a node that led a thousand dies, a thousand records are to be read by those that lead them next. What the watch
keeps is as new as a read if it has come as far as the store was at a moment after the read was asked for: one call asks
for that revision, whatever the number of topics (`TopicReads.watched`). Else what is newer is read, of all topics in
two calls (`TopicReads.topics`). Both rest on etcd bringing the events of a watch in order, a revision whole at a time
(https://etcd.io/docs/v3.5/learning/api_guarantees/#watch-apis).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from nsqha.election.codec import encode
from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.calls import list_keys, list_newer, read_key, read_revision, transact
from nsqha.election.etcd.client import Compacted, EtcdClient
from nsqha.election.etcd.keys import created, get, put, unchanged
from nsqha.election.etcd.view import join_all, join_newer
from nsqha.election.model import ClusterRecord, TopicRecord, Versioned
from nsqha.election.session import View
from nsqha.errors import Conflict, Unavailable

RETRIES = 20
TOPICS_MAX = 16  # of one transaction: each takes three compares, of which there may be 64

WATCH_LOOKS = 8  # whether the watch has come so far, since it last came nearer ...
WATCH_SECONDS = 0.005  # ... with this between two
WATCH_LOOKS_ALL = 200  # however much is written
LISTED_PER_WANTED = 32  # topics are read one by one if there are more of them than this for each that is wanted

Made = Callable[[ClusterRecord], tuple[TopicRecord, ClusterRecord]]


@dataclass(eq=False)
class NewTopic:
    """A topic that is to be added, and what became of it."""

    name: str
    uid: int
    partitions: int
    lease: int
    made: Made
    result: Versioned[TopicRecord] | None = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None


class NewTopics:
    """The topics that threads of this process add."""

    def __init__(self, client: EtcdClient, keys: etcd_keys.Keys) -> None:
        self._client = client
        self._keys = keys
        self._waiting: deque[NewTopic] = deque()
        self._adding = threading.Lock()

    def add(self, topic: NewTopic) -> Versioned[TopicRecord]:
        """Put a topic and what `topic.made` makes of the cluster record. Conflict, and what a change raises."""
        self._waiting.append(topic)
        while not topic.done:
            with self._adding:
                if not topic.done:
                    self._add_next()
        if topic.error is not None:
            raise topic.error
        assert topic.result is not None
        return topic.result

    def _add_next(self) -> None:
        topics = list(self._taken())
        try:
            self._add_all(topics)
        except BaseException as error:
            for topic in topics:
                if not topic.done:
                    topic.error = error

    def _taken(self) -> Iterator[NewTopic]:
        """Take the topics of one transaction, at least one: those that fit beside each other."""
        names: set[str] = set()
        ops = 1
        while self._waiting and len(names) < TOPICS_MAX:
            topic = self._waiting[0]
            ops += 1 + topic.partitions
            if topic.name in names or (names and ops > etcd_keys.OPS_PER_PART):
                return
            names.add(topic.name)
            yield self._waiting.popleft()

    def _add_all(self, topics: list[NewTopic]) -> None:
        keys = self._keys
        found = read_key(self._client, keys.cluster)
        for _ in range(RETRIES):
            if found is None:
                raise Unavailable(f"etcd has no key {keys.prefix}cluster any more; put it back from a backup")
            cluster = etcd_keys.record_of(ClusterRecord, found)
            records, ops = [], []
            for topic in topics:
                record, cluster = topic.made(cluster)
                records.append(record)
                ops.append(put(keys.topic(topic.name), etcd_keys.topic_value(record), lease=topic.lease))
                for number, meta in record.partitions.items():
                    value = etcd_keys.partition_value(meta)
                    ops.append(put(keys.partition(topic.uid, number), value, lease=topic.lease))
            absent = [key for topic in topics for key in self._absent(topic)]
            answer = transact(
                self._client,
                [unchanged(keys.cluster, found.mod_revision), *(created(key, 0) for key in absent)],
                [put(keys.cluster, encode(cluster)), *ops],
                [get(keys.cluster), *map(get, absent)],
            )
            if answer.succeeded:
                for topic, record in zip(topics, records, strict=True):
                    topic.result = _versioned(record, answer.header.revision)
                return
            now, *others = [response.response_range.kvs for response in answer.responses]
            found = now[0] if now else None
            there = {key for key, kvs in zip(absent, others, strict=True) if kvs}
            for topic in topics:
                problem = next((text for key, text in self._absent(topic).items() if key in there), "")
                topic.error = Conflict(problem) if problem else None
            topics = [topic for topic in topics if not topic.done]
            if not topics:
                return
        raise Unavailable("the cluster record is changed by others all the time; try again")

    def _absent(self, topic: NewTopic) -> dict[bytes, str]:
        """Keys that must not exist, and what it means if one does."""
        keys = self._keys
        return {
            keys.topic(topic.name): f"topic {topic.name} exists already",
            keys.tombstone(topic.uid): f"topic {topic.name} with uid {topic.uid:016x} was deleted",
            keys.partition(topic.uid, 0): f"uid {topic.uid:016x} belongs to another topic",
        }


def _versioned(record: TopicRecord, revision: int) -> Versioned[TopicRecord]:
    metas = {number: replace(meta, version=revision) for number, meta in record.partitions.items()}
    return Versioned(replace(record, partitions=metas), revision)


class TopicReads:
    """Reads all topics, or several. Any number of threads."""

    def __init__(self, client: EtcdClient, keys: etcd_keys.Keys, known: Callable[[], View]) -> None:
        """`known` is the copy that the watch keeps."""
        self._client = client
        self._keys = keys
        self.known = known
        self._never = threading.Event()

    def watched(self, names: Collection[str]) -> dict[str, Versioned[TopicRecord] | None] | None:
        """These topics as the watch has brought them, which is as they are. None: it does not come so far in a moment,
        as it never does where another cluster of the same etcd was changed last, or it brought what could not be read.
        Unavailable, StaleMetadata."""
        newest = read_revision(self._client, self._keys.cluster)
        looks, since = 0, -1
        for _ in range(WATCH_LOOKS_ALL):
            known = self.known()
            if known.unreadable:
                return None
            if known.revision >= newest:
                return {name: known.topics.get(name) for name in names}
            # It comes nearer when much is written, and to read all from etcd beside it would take longer.
            looks = 1 if known.revision != since else looks + 1
            since = known.revision
            if looks == WATCH_LOOKS:
                break
            self._never.wait(WATCH_SECONDS)
        return None

    def better_one_by_one(self, wanted: int) -> bool:
        """Whether to read so many topics alone costs less than to look through all of them."""
        return wanted * LISTED_PER_WANTED < len(self.known().topics)

    def topics(self) -> dict[str, Versioned[TopicRecord]]:
        """All topics. Unavailable, StaleMetadata, and what a record that can not be read raises."""
        while True:
            known = self.known()
            try:
                if (newest := self._brought_up_to_date(known)) is not None:
                    return newest
                topics, revision = list_keys(self._client, self._keys.topics)
                partitions, _ = list_keys(self._client, self._keys.partitions, revision=revision)
            except Compacted:
                continue
            return join_all(self._keys, topics, partitions, known=known.topics)

    def _brought_up_to_date(self, known: View) -> dict[str, Versioned[TopicRecord]] | None:
        """The topics as they are now, by what has changed since the watch brought `known`: to read thousands of records
        of which few are newer would take longer than all else. None: topics went, or much has changed."""
        if not known.revision or known.unreadable:
            return None
        topics, revision = list_newer(self._client, self._keys.topics, known.revision)
        if topics is None:
            return None
        partitions, _ = list_newer(self._client, self._keys.partitions, known.revision, revision=revision)
        made = sum(kv.create_revision > known.revision for kv in topics.kvs)
        # Each topic that is not there any more makes the count smaller, also if another of its name was made.
        if partitions is None or topics.count != len(known.topics) + made:
            return None
        return join_newer(self._keys, topics.kvs, partitions.kvs, known=known.topics)
