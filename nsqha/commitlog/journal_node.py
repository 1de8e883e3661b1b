"""What the journal says of its node: who it is, which metadata it believes, and whether its directory is closed.

It is staged here, and `NodeJournal` writes it with each round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nsqha.commitlog.journal_record import NodeIdentity, NodeState
from nsqha.errors import ConfigError

POISON_TEXT_MAX = 400


class JournalNode:
    """The node's part of one journal."""

    def __init__(self, state: NodeState) -> None:
        self.state = state

    @property
    def identity(self) -> NodeIdentity:
        """Who this directory is."""
        return self.state.identity

    @property
    def poisoned(self) -> str:
        """Why the directory is closed; empty if it is not."""
        return self.state.poison

    def stage_revision(self, revision_seen: int) -> None:
        """The metadata was read at this revision."""
        if revision_seen > self.identity.revision_seen:
            self._set_identity(revision_seen=revision_seen)

    def join(self, cluster_id: int, *, etcd_cluster_id: int = 0) -> None:
        """Belong to this cluster from now on; refuses another one than before."""
        mine = self.identity
        other_etcd = etcd_cluster_id != 0 and mine.etcd_cluster_id not in (0, etcd_cluster_id)
        if mine.cluster_id not in (0, cluster_id) or other_etcd:
            raise ConfigError(
                f"this data directory belongs to cluster {mine.cluster_id:016x} (etcd {mine.etcd_cluster_id:x}), not "
                f"to {cluster_id:016x} (etcd {etcd_cluster_id:x}); use the metadata it was made with, or another folder"
            )
        self._set_identity(cluster_id=cluster_id, etcd_cluster_id=etcd_cluster_id or mine.etcd_cluster_id)

    def accept_metadata(
        self, *, cluster_id: int, etcd_cluster_id: int, revision_seen: int, generation: int = 0
    ) -> None:
        """An operator vouched for other metadata than before (import, accept-metadata)."""
        self._set_identity(
            cluster_id=cluster_id,
            etcd_cluster_id=etcd_cluster_id,
            revision_seen=revision_seen,
            generation=max(generation, self.identity.generation),
            in_doubt=False,
        )

    def follow_generation(self, generation: int) -> None:
        """The metadata that is believed was accepted this many times."""
        if generation > self.identity.generation:
            self._set_identity(generation=generation)

    def doubt_metadata(self) -> None:
        """The metadata went back; it may look newer again at the next start, so this is remembered."""
        self._set_identity(in_doubt=True)

    def poison(self, reason: str) -> None:
        """Nothing more is trusted in this directory; the first reason stays."""
        if not self.state.poison:
            self.state = replace(self.state, poison=(" ".join(reason.split()) or "unknown")[:POISON_TEXT_MAX])

    def stage_uses(self, uses: int) -> None:
        """The directory was taken into use so often (`server.node.cluster.folder_life`)."""
        self._set_identity(uses=uses)

    def clear_poison(self) -> None:
        """Only for a recovery that has verified the files again."""
        self.state = replace(self.state, poison="")

    def _set_identity(self, **changes: Any) -> None:
        identity = replace(self.identity, **changes)
        if identity != self.identity:
            self.state = replace(self.state, identity=identity)
