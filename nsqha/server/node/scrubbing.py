"""The scrub of one node: which replicas it reads, and what happens to what it finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from nsqha.errors import Poisoned
from nsqha.nsqlog import Logger
from nsqha.server.partition.scrub import ScrubbedReplica, Scrubber

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.options import Options
    from nsqha.server.node.cluster_side import ClusterSide
    from nsqha.server.node.parts import NodeParts
    from nsqha.server.topics.topics import Topics

logger = Logger("broker")


class NodeScrub:
    """The scrub of one node."""

    def __init__(
        self,
        options: Options,
        parts: NodeParts,
        topics: Topics,
        side: ClusterSide,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._disk = parts.disk
        self._topics = topics
        self._side = side
        self._spawn = spawn
        self._fail = fail
        self.scrubber = Scrubber(
            self._replicas,
            bytes_per_second=options.scrub_bytes_per_second,
            interval_seconds=options.scrub_interval_ns / 1e9,
            measures=parts.opener.measures,
            rng=random.Random(parts.rng.getrandbits(64)),
        )
        # The other replica, or else the frames themselves, say what batches were that do not verify.
        self.scrubber.on_damage = side.found_damage
        self.scrubber.on_bad_anchor = self._found_bad_anchor
        side.when_mended(self.scrubber.mended)

    def _replicas(self) -> list[ScrubbedReplica]:
        """The logs that are on this node's disk."""
        led = [
            ScrubbedReplica(topic.name, p.number, p.log, lambda p=p: p.leader.committed, lambda p=p: p.closed)  # type: ignore[misc]
            for topic in self._topics.values()
            if not topic.ephemeral
            for p in topic.led
        ]
        return led + self._side.followed()

    def _found_bad_anchor(self, replica: ScrubbedReplica, first: int) -> None:
        """What says where a pair of files begins does not verify: a start would have to guess, and trust the log
        less."""
        try:
            restore = replica.log.repair.restoring_anchor(first)
        except OSError as error:
            logger.warning("anchor_delayed", "%s: %s; the next round tries again", replica.log.directory, error)
        else:
            self._spawn(self.restore_anchor(replica.log, first, restore))

    async def restore_anchor(self, log: PartitionLog, first: int, restore: Callable[[], None]) -> None:
        try:
            await self._disk.run(restore)
        except Poisoned as error:
            self._fail(error)
        except OSError as error:
            logger.warning("anchor_delayed", "%s: %s; the next round tries again", log.directory, error)
        else:
            logger.warning("anchor_restored", "%s: the anchor before log id %d is written again", log.directory, first)
            self.scrubber.mended(log, first - 1, first)
