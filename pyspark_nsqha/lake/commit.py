"""Commits: what makes a file count. One protocol, two implementations: manifests here, Iceberg in `iceberg`.

    state() ---> plan, write files ---> append(state, addition) ---> the next state
                                             |
                                             Moved: somebody else committed since `state`; read it and plan anew

A manifest is created exclusively under the next sequence, so of two archivers one succeeds, and there is no hole in the
sequence; a manifest is never replaced by another. What `append` answers was read back from the store. Every BASE_EVERY
commits all that was committed is written once more as a base, which spares readers the manifests before. A base is made
of them alone: one that is missing or half written costs nothing.
"""

from __future__ import annotations

import time
from typing import Protocol

from pyspark_nsqha.lake import manifest, names
from pyspark_nsqha.lake.manifest import Addition, BadManifest, LakeState, Overlap
from pyspark_nsqha.lake.store import Exists, Store, StoreFailed

BASE_EVERY = 64


class Moved(Exception):
    """Somebody else has committed meanwhile."""


class Commits(Protocol):
    """Where a lake's commits are."""

    def state(self, *, durable: bool = False) -> LakeState:
        """What is committed now. BadManifest or StoreFailed if that can not be read. `durable`: and stays so, also if
        somebody died who had not seen to that yet: what floors rest on."""

    def append(self, state: LakeState, addition: Addition, *, run: str) -> LakeState:
        """Commit on top of `state`, durably; what is committed then. Moved or Overlap: nothing was committed.
        StoreFailed: nobody knows."""

    def proposed(self, state: LakeState) -> set[str]:
        """Paths of files that the commit behind `state` may name, although nobody is at work on it any more."""


class ManifestCommits:
    """Manifests beside the data."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._last = LakeState()
        self.of_table = False  # as of the last `state`

    def state(self, *, durable: bool = False) -> LakeState:
        deltas, bases = self._sequences()
        newest = max(deltas | bases, default=0)
        at = self._last
        if at.sequence > newest:
            lost = f"manifests up to {at.sequence} of {self.store.uri} were there, now they end at {newest}"
            raise BadManifest(f"{lost}: restore them from a copy of the lake")
        at, why = self._from_base(bases, at)
        for sequence in range(at.sequence + 1, newest + 1):
            if sequence not in deltas:
                gone = f"{names.manifest(sequence)} is not in {self.store.uri}, but later ones are"
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
            raise StoreFailed(f"the commits of {self.store.uri} are those of a table: use --format iceberg")
        sequence = state.sequence + 1
        after = state.with_added(addition, sequence)
        raw = manifest.encode(sequence, addition, written_ns=time.time_ns(), run=run)
        try:
            self.store.create(names.manifest(sequence), raw, run=run)
        except Exists:
            raise Moved(f"{names.manifest(sequence)} was committed by somebody else") from None
        found = self.state(durable=True)
        if found.sequence < sequence or self.store.read(names.manifest(sequence)) != raw:
            raise StoreFailed(
                f"{names.manifest(sequence)} of {self.store.uri} was written, and is not what is there: the store does "
                "not show at once what was uploaded; no floor was moved for it"
            )
        if sequence % BASE_EVERY == 0:
            self._write_base(after, run)
        return found

    def proposed(self, state: LakeState) -> set[str]:
        path = names.manifest(state.sequence + 1)
        found = [manifest.decode(raw, path)[2] for raw in self.store.proposed(path)]
        return {file.path for addition in found for file in addition.files}

    def _write_base(self, state: LakeState, run: str) -> None:
        """It spares readers work, and is never what a commit depends on."""
        raw = manifest.encode(state.sequence, state.addition(), written_ns=time.time_ns(), run=run)
        try:
            self.store.write(names.base(state.sequence), raw, run=run)
        except StoreFailed:
            pass

    def _sequences(self) -> tuple[set[int], set[int]]:
        """Those of manifests, and those of bases."""
        found: tuple[set[int], set[int]] = set(), set()
        for file in self.store.list(names.MANIFEST):
            self.of_table = self.of_table or file.path == names.OF_TABLE
            if (parsed := names.parse_manifest(file.path)) is not None:
                found[parsed[1]].add(parsed[0])
        return found

    def _read(self, path: str, sequence: int) -> Addition:
        there, _, addition = manifest.decode(self.store.read(path), path)
        if there != sequence:
            raise BadManifest(f"{path} says that it is number {there}: restore it from a copy of the lake")
        return addition
