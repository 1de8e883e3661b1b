"""Everything that is known of a cluster at one moment, as one text: what a broker or a lookup daemon gives to whoever
only looks, so that it needs neither etcd's address nor a right there.

    {"cluster", "cluster_id", "revision", "stale", "doubt", "controller", "topics", "nodes", "intents", "unreadable",
     "answers": {node: {"topic uid.partition": [leads epoch, waits ms, position, why]}}, "silent": {node: why}}

Records are as the metadata store keeps them, topics without their channels. Nodes are named by 16 hex digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from nsqha.election.codec import from_plain, to_plain, with_texts
from nsqha.election.model import ChannelList, Controller, NodeInfo, PartitionMeta, TopicRecord
from nsqha.election.observed.answers import Observed, ReplicaAnswer
from nsqha.election.placement import PartitionName, metas_of
from nsqha.errors import LogCorrupt

NO_CHANNELS = ChannelList()


@dataclass(frozen=True)
class ClusterPage:
    """The records, and what the nodes say."""

    cluster: str
    cluster_id: int
    revision: int
    topics: Mapping[str, TopicRecord]
    nodes: Mapping[int, NodeInfo]
    controller: Controller | None
    intents: Mapping[str, Mapping[str, Any]] | None  # None: not known, as the store does not answer
    unreadable: tuple[str, ...] = ()  # records that cannot be read, and why
    stale: str = ""  # why these are the records that were known last; empty: they are the present ones
    doubt: str = ""  # why the store is not trusted; empty: it is
    observed: Observed = field(default_factory=Observed)

    @property
    def metas(self) -> dict[PartitionName, PartitionMeta]:
        """All partitions of all topics."""
        return metas_of(self.topics)


def encode(page: ClusterPage) -> bytes:
    """The text of a page."""
    answers = {
        f"{node:016x}": {f"{uid:x}.{number}": list(answer) for (uid, number), answer in said.items()}
        for node, said in page.observed.answers.items()
    }
    return msgspec.json.encode(
        {
            "cluster": page.cluster,
            "cluster_id": f"{page.cluster_id:016x}",
            "revision": page.revision,
            "stale": page.stale,
            "doubt": page.doubt,
            "controller": to_plain(page.controller) if page.controller is not None else None,
            "topics": [with_texts(replace(topic, channels=NO_CHANNELS)) for topic in page.topics.values()],
            "nodes": [to_plain(node) for node in page.nodes.values()],
            "intents": page.intents,
            "unreadable": page.unreadable,
            "answers": answers,
            "silent": {f"{node:016x}": why for node, why in page.observed.silent.items()},
        }
    )


def decode(found: Mapping[str, Any]) -> ClusterPage:
    """The page that a daemon gave, as JSON types. LogCorrupt: it is none."""
    try:
        topics = [from_plain(TopicRecord, one) for one in found["topics"]]
        nodes = [from_plain(NodeInfo, one) for one in found["nodes"]]
        controller = found["controller"]
        return ClusterPage(
            found["cluster"],
            int(found["cluster_id"], 16),
            found["revision"],
            {topic.name: topic for topic in topics},
            {node.node_uid: node for node in nodes},
            None if controller is None else from_plain(Controller, controller),
            found["intents"],
            tuple(found["unreadable"]),
            found["stale"],
            found["doubt"],
            Observed(
                {int(node, 16): _answers(said) for node, said in found["answers"].items()},
                {int(node, 16): why for node, why in found["silent"].items()},
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LogCorrupt(f"this is not a page of a cluster: {type(error).__name__}: {error}") from error


def _answers(said: Mapping[str, list[Any]]) -> dict[tuple[int, int], ReplicaAnswer]:
    found = {}
    for text, answer in said.items():
        uid, _, number = text.partition(".")
        found[int(uid, 16), int(number)] = ReplicaAnswer(*answer[:4])
    return found
