"""Commits: what makes a file count. One protocol, two implementations: manifests here, Iceberg in `iceberg`.

    state() ---> plan, write files ---> append(state, addition) ---> the next state
                                             |
                                             Moved: another run committed since `state`; read it and plan again

A manifest is created exclusively under the next sequence, so of two archivers one succeeds, and the sequence has no
gap; a manifest is never replaced by another. `append` returns what was read back from the store. Every BASE_EVERY
commits everything committed is also written as a base, so that readers can skip the earlier manifests. A base depends
only on these: one that is missing or half written does no harm.
"""

from __future__ import annotations

import time
from typing import Protocol

from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.commits import manifest
from pyspark_nsqha.lake.commits.manifest import Addition, BadManifest, LakeState, Overlap
from pyspark_nsqha.lake.store import Exists, Store, StoreFailed

BASE_EVERY = 64


class Moved(Exception):
    """Another run has committed meanwhile."""


class Commits(Protocol):
    """Reads and writes a lake's commits."""

    def state(self, *, durable: bool = False) -> LakeState:
        """What is committed now. BadManifest or StoreFailed if it cannot be read. `durable`: it is synced as well, in
        case its writer died before; needed before a floor is moved."""

    def append(self, state: LakeState, addition: Addition, *, run: str) -> LakeState:
        """Commit on top of `state`, durably; returns the new state. Moved or Overlap: nothing was committed.
        StoreFailed: the outcome is unknown."""

    def proposed(self, state: LakeState) -> set[str]:
        """Paths of files that the commit after `state` may name, also if its run has died."""


class ManifestCommits:
    """Commits to manifests in the lake's folder."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._last = LakeState()
        self.of_table = False  # updated by `state`

    def state(self, *, durable: bool = False) -> LakeState:
        deltas, bases = self._sequences()
        newest = max(deltas | bases, default=0)
        at = self._last
        if at.sequence > newest:
            lost = f"{self.store.uri} had manifests up to {at.sequence}, now they end at {newest}"
            raise BadManifest(f"{lost}: restore them from a copy of the lake")
        at, why = self._from_base(bases, at)
        for sequence in range(at.sequence + 1, newest + 1):
            if sequence not in deltas:
                gone = f"{names.manifest(sequence)} is missing in {self.store.uri}, but later ones exist"
                raise BadManifest(why or f"{gone}: restore it from a copy of the lake")
            at = at.with_added(self._read(names.manifest(sequence), sequence), sequence)
        if durable:
            self.store.sync(names.MANIFEST)
        self._last = at
        return at

    def _from_base(self, bases: set[int], at: LakeState) -> tuple[LakeState, str]:
        """The state of the newest base that can be read, if it is newer than `at`; and why a newer one cannot."""
        why = ""
        for sequence in sorted(bases, reverse=True):
            if sequence <= at.sequence:
                break
            try:
                return LakeState().with_added(self._read(names.base(sequence), sequence), sequence), why
            except (BadManifest, Overlap) as error:
                why = why or str(error)
        return at, why

    def append(self, state: LakeState, addition: Addition, *, run: str) -> LakeState:
        if self.of_table:
            raise StoreFailed(f"{self.store.uri} belongs to an Iceberg table: use --format iceberg")
        sequence = state.sequence + 1
        after = state.with_added(addition, sequence)
        raw = manifest.encode(sequence, addition, written_ns=time.time_ns(), run=run)
        try:
            self.store.create(names.manifest(sequence), raw, run=run)
        except Exists:
            raise Moved(f"{names.manifest(sequence)} was committed by another run") from None
        found = self.state(durable=True)
        if found.sequence < sequence or self.store.read(names.manifest(sequence)) != raw:
            raise StoreFailed(
                f"{names.manifest(sequence)} of {self.store.uri} was written, but the store returns something else: it "
                "does not show uploads at once; no floor was moved for it"
            )
        if sequence % BASE_EVERY == 0:
            self._write_base(after, run)
        return found

    def proposed(self, state: LakeState) -> set[str]:
        path = names.manifest(state.sequence + 1)
        found = [manifest.decode(raw, path)[2] for raw in self.store.proposed(path)]
        return {file.path for addition in found for file in addition.files}

    def _write_base(self, state: LakeState, run: str) -> None:
        """Write a base; errors are ignored, as no commit depends on it."""
        raw = manifest.encode(state.sequence, state.addition(), written_ns=time.time_ns(), run=run)
        try:
            self.store.write(names.base(state.sequence), raw, run=run)
        except StoreFailed:
            pass

    def _sequences(self) -> tuple[set[int], set[int]]:
        """The sequences of manifests, and those of bases."""
        found: tuple[set[int], set[int]] = set(), set()
        for file in self.store.list(names.MANIFEST):
            self.of_table = self.of_table or file.path == names.OF_TABLE
            if (parsed := names.parse_manifest(file.path)) is not None:
                found[parsed[1]].add(parsed[0])
        return found

    def _read(self, path: str, sequence: int) -> Addition:
        there, _, addition = manifest.decode(self.store.read(path), path)
        if there != sequence:
            raise BadManifest(f"{path} contains sequence {there}: restore it from a copy of the lake")
        return addition
