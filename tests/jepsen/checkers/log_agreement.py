"""Checker 2: a place of the log has one value, whoever is asked: consumers, replays, replicas, any leader.

altered   a message came out with another id or timestamp than before
reused    two messages have one id
disorder  ids or timestamps of one publisher's messages do not grow in the order it sent them
forked    a replica's files have another message at a place than consumers or another replica
missing   a replica's files lack a message that was OK'd, between others that they have
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from tests.jepsen.checkers.view import Checker, Connection, Delivery, Key, PartitionName, Sent, partition_of, where
from tests.jepsen.history import AnyEvent, Message, Stored


class LogAgreement(Checker):
    name = "log agreement"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._ids: dict[str, dict[str, Key]] = defaultdict(dict)  # by topic: id -> message
        self._stored: defaultdict[PartitionName, dict[str, set[str]]] = defaultdict(dict)  # node -> ids

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        if not sent.id:
            other = self._ids[by.topic.name].setdefault(message.id, key)
            if other != key:
                self.findings.add("reused", f"{where(t, by, key)}: id {message.id} is that of {other}")
        elif sent.id != message.id or sent.timestamp != message.timestamp:
            was, now = f"{sent.id} of {sent.timestamp}", f"{message.id} of {message.timestamp}"
            self.findings.add("altered", f"{where(t, by, key)}: was {was}, is {now}")

    def other(self, event: AnyEvent) -> None:
        if isinstance(event, Stored):
            self._replica(event)

    def _replica(self, event: Stored) -> None:
        known = self._ids[event.topic]
        ids = self._stored[event.topic, event.partition].setdefault(event.node, set())
        for message in event.messages:
            key = (message.process, message.counter)
            other = known.setdefault(message.id, key)
            text = f"{event.topic}/{event.partition} of {event.node}: id {message.id}"
            if other != key:
                self.findings.add("forked", f"{text} is {key}, elsewhere {other}")
            sent = self.view.messages.get(key)
            if sent is None or sent.crc != message.crc:
                self.findings.add("forked", f"{text}: {key} with this body was never sent")
            elif self.view.topic(event.topic).letters is not None:
                pass  # moved there, with an id of that topic
            elif sent.id and (sent.id, sent.timestamp) != (message.id, message.timestamp):
                self.findings.add("forked", f"{text} is {key} of {message.timestamp}, came out as {sent.id}")
            elif not sent.id:
                sent.id, sent.timestamp = message.id, message.timestamp
            ids.add(message.id)

    def end(self) -> None:
        self._check_order()
        self._check_replicas()
        figures, problems = self.findings.figures, self.findings.problems
        wrong = problems["disorder"]
        if self._ids:
            text = "what one connection publishes to a topic keeps its order; times never go back"
            self.findings.promise(text, "0 exceptions", f"{wrong} of {len(self.view.messages)}", kept=not wrong)
        figures["places compared"] = sum(map(len, self._ids.values()))
        if self._stored:
            figures["replicas read"] = sum(map(len, self._stored.values()))
            forks = problems["forked"] + problems["missing"]
            text = "replicas have the same messages at the same places"
            self.findings.promise(
                text, "0 forks", f"{forks} in {figures['replicas read']:.0f} replicas", kept=not forks
            )

    def _check_order(self) -> None:
        """One publisher's messages stand in the log in the order it sent them; time never goes back."""
        runs: dict[tuple[int, int, int], list[tuple[str, int]]] = {}
        partitions: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for (process, counter), sent in self.view.messages.items():
            if sent.id:
                life, partition = id(sent.op.topic), partition_of(sent.id)
                runs.setdefault((life, partition, process), []).append((sent.id, counter))
                partitions.setdefault((life, partition), []).append((sent.id, sent.timestamp))
        for (_, _, process), run in runs.items():
            run.sort()
            for (_, before), (message_id, counter) in pairwise(run):
                if counter < before:
                    self.findings.add("disorder", f"({process}, {counter}) has id {message_id}, after {before}")
        for stamps in partitions.values():
            stamps.sort()
            for (before_id, before), (message_id, timestamp) in pairwise(stamps):
                if timestamp < before:
                    text = f"{message_id} of {timestamp} stands after {before_id} of {before}"
                    self.findings.add("disorder", text)

    def _check_replicas(self) -> None:
        """What was OK'd is on every replica, from where its log begins: retention may have taken what is before."""
        oked: defaultdict[PartitionName, list[str]] = defaultdict(list)
        for sent in self.view.messages.values():
            if sent.id and sent.op.result == "ok":
                oked[sent.op.event.topic, partition_of(sent.id)].append(sent.id)
        for name, replicas in self._stored.items():
            for node, ids in replicas.items():
                first = min(ids, default="")
                lacks = sorted(message_id for message_id in oked[name] if message_id >= first and message_id not in ids)
                for message_id in lacks:
                    text = f"{name[0]}/{name[1]} of {node} lacks {message_id}, which was OK'd"
                    self.findings.add("missing", text)
