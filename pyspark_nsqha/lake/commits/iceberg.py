"""Commits to an Iceberg table with pyiceberg: readers of the table see what was committed, and see it once.

    manifest/<sequence>.<run>.staged     the whole manifest that is to be committed
    table snapshot                       add_files; summary: nsqha.sequence, nsqha.staged, nsqha.ranges
    manifest/<sequence>.json             as in a lake without a table

The table decides: the snapshot is committed on top of the one that was read, by the catalog's compare-and-set, and only
if the newest sequence in the table's history is the one that the addition was planned on. pyiceberg's own retries would
put the same files on top of any other commit, so they are disabled in the table. So is the removal of files that no
snapshot has any more (gc.enabled): manifests still name them. A manifest follows each snapshot; one that a crash left
out is written when the state is read next, from the staged file that the summary names. So readers of manifests
(verify, history) need no catalog.

The table is partitioned by identity(topic) and day(timestamp). Its catalog and credentials are pyiceberg's: a name in
.pyiceberg.yaml or in PYICEBERG_CATALOG__<NAME>__.. of the environment.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.commits import manifest
from pyspark_nsqha.lake.commits.commit import ManifestCommits, Moved
from pyspark_nsqha.lake.commits.manifest import Addition, BadManifest, LakeState
from pyspark_nsqha.lake.parquet import SCHEMA
from pyspark_nsqha.lake.store import Exists, Store, StoreFailed

TABLE = "nsqha.messages"
SEQUENCE, STAGED, RANGES = "nsqha.sequence", "nsqha.staged", "nsqha.ranges"
SETTINGS = {"commit.retry.num-retries": "0", "gc.enabled": "false"}
TRIES = 10  # if other programs than archivers change the table meanwhile


class IcebergCommits:
    """Commits to snapshots of a table, each followed by a manifest."""

    def __init__(
        self, store: Store, catalog: str = "default", table: str = TABLE, properties: Mapping[str, str] | None = None
    ) -> None:
        self.store = store
        self._manifests = ManifestCommits(store)
        self._name = table
        self._catalog_name = catalog
        self._properties = dict(properties or {})
        self._opened: Any = None

    def state(self, *, durable: bool = False) -> LakeState:
        state = self._manifests.state(durable=durable)
        found = self._summaries()
        newest = max(found, default=0)
        if newest < state.sequence and self._sequence() < state.sequence:
            raise BadManifest(
                f"table {self._name} is at commit {newest}, but the manifests of {self.store.uri} at {state.sequence}: "
                "it was rolled back or created again; archive to another lake, or roll it forward"
            )
        for sequence in range(state.sequence + 1, newest + 1):
            if sequence <= state.sequence:
                continue  # another run has written these manifests meanwhile
            if sequence not in found:
                raise BadManifest(
                    f"table {self._name} has no snapshot of commit {sequence}, but later ones: it has expired"
                )
            state = self._follow(state, found[sequence], sequence)
        return state

    def append(self, state: LakeState, addition: Addition, *, run: str) -> LakeState:
        sequence = state.sequence + 1
        after = state.with_added(addition, sequence)
        staged = f"{names.MANIFEST}/{sequence:020d}.{run}.staged"
        raw = manifest.encode(sequence, addition, written_ns=time.time_ns(), run=run)
        self.store.write(staged, raw, run=run)
        if sequence == 1:
            self.store.write(names.OF_TABLE, self._name.encode(), run=run)
        summary = {SEQUENCE: str(sequence), STAGED: staged, RANGES: _ranges(addition)}
        self._commit(addition, summary, sequence)
        self._create(sequence, raw, run)
        self.store.remove(staged)
        return after

    def proposed(self, state: LakeState) -> set[str]:
        return set()  # the table itself decides about its files

    def _commit(self, addition: Addition, summary: dict[str, str], sequence: int) -> None:
        from pyiceberg.exceptions import CommitFailedException, RESTError

        paths = [self._uri(file.path) for file in addition.files]
        for _ in range(TRIES):
            table = self._table()
            if self._sequence() != sequence - 1:
                raise Moved(f"table {self._name} has a newer commit than {sequence - 1}")
            try:
                with table.transaction() as transaction:
                    transaction.set_properties({SEQUENCE: str(sequence)})
                    transaction.add_files(paths, snapshot_properties=summary)
                return
            except CommitFailedException:
                continue
            except (OSError, ValueError) as error:
                raise StoreFailed(f"table {self._name} does not take the files: {_line(error)}") from None
            except RESTError as error:
                raise StoreFailed(
                    f"table {self._name}: the outcome is unknown ({_line(error)}); the next run finds out whether the "
                    "files were committed"
                ) from None
        raise StoreFailed(f"table {self._name} was changed {TRIES} times meanwhile; try again")

    def _follow(self, state: LakeState, summary: Mapping[str, str], sequence: int) -> LakeState:
        """The state after a snapshot that has no manifest yet; the manifest is written."""
        staged = summary[STAGED]
        try:
            raw = self.store.read(staged)
        except FileNotFoundError:
            # The run that committed it may have written its manifest since these were read.
            now = self._manifests.state(durable=True)
            if now.sequence >= sequence:
                return now
            raise BadManifest(
                f"{staged} is gone, but table {self._name} has a snapshot of it: restore it from a copy of the lake"
            ) from None
        there, run, addition = manifest.decode(raw, staged)
        if there != sequence:
            raise BadManifest(f"{staged} contains sequence {there}: restore it from a copy of the lake")
        after = state.with_added(addition, sequence)
        self._create(sequence, raw, run)
        self.store.remove(staged)
        return after

    def _create(self, sequence: int, raw: bytes, run: str) -> None:
        """Write the manifest; another run would write the same one."""
        try:
            self.store.create(names.manifest(sequence), raw, run=run)
        except Exists:
            pass

    # ---- the table

    def _uri(self, path: str) -> str:
        uri = self.store.uri if "://" in self.store.uri else f"file://{self.store.uri}"
        return f"{uri.rstrip('/')}/{path}"

    def _sequence(self) -> int:
        """The sequence of the newest commit, from the table's properties, which change with each snapshot."""
        return int(self._table().properties.get(SEQUENCE, "0"))

    def _summaries(self) -> dict[int, Mapping[str, str]]:
        """The summaries of our snapshots in the table's present history, by sequence."""
        found: dict[int, Mapping[str, str]] = {}
        table = self._table()
        snapshot = table.current_snapshot()
        while snapshot is not None:
            about = dict(snapshot.summary.additional_properties) if snapshot.summary is not None else {}
            if SEQUENCE in about:
                found[int(about[SEQUENCE])] = about
            parent = snapshot.parent_snapshot_id
            snapshot = table.snapshot_by_id(parent) if parent is not None else None
        return found

    def _table(self) -> Any:
        """The table, refreshed, and created if it does not exist. StoreFailed."""
        try:
            if self._opened is None:
                self._opened = self._open()
            self._opened.refresh()
            return self._opened
        except StoreFailed:
            raise
        except Exception as error:  # each catalog raises its own
            raise StoreFailed(f"catalog {self._catalog_name}, table {self._name}: {_line(error)}") from None

    def _open(self) -> Any:
        try:
            from pyiceberg.catalog import load_catalog
            from pyiceberg.exceptions import NoSuchTableError, TableAlreadyExistsError
        except ImportError:
            install = f"run in the clone of nsqha: {sys.executable} -m pip install -e '.[lake]'"
            raise StoreFailed(f"--format iceberg needs pyiceberg: {install}") from None
        catalog = load_catalog(self._catalog_name, **self._properties)
        try:
            table = catalog.load_table(self._name)
        except NoSuchTableError:
            catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            try:
                table = _made(catalog, self._name)
            except TableAlreadyExistsError:
                table = catalog.load_table(self._name)
        if not SETTINGS.items() <= table.properties.items():
            with table.transaction() as transaction:
                transaction.set_properties(SETTINGS)
        missing = sorted(set(SCHEMA.names) - {field.name for field in table.schema().fields})
        if missing:
            raise StoreFailed(f"table {self._name} has no column {', '.join(missing)}: it was not made by nsqha")
        return table


def _made(catalog: Any, name: str) -> Any:
    """Create the table with the columns of a file, partitioned by topic and day."""
    from pyiceberg.transforms import DayTransform, IdentityTransform

    with (
        catalog.create_table_transaction(name, SCHEMA, properties=SETTINGS) as transaction,
        transaction.update_spec() as spec,
    ):
        spec.add_field("topic", IdentityTransform(), "topic")
        spec.add_field("timestamp", DayTransform(), "timestamp_day")
    return catalog.load_table(name)


def _ranges(addition: Addition) -> str:
    """What was added, for people and other programs: topic/partition:first-end@uid, with commas."""
    return ",".join(f"{file.life}:{file.first}-{file.end}@{file.topic_uid:016x}" for file in addition.files)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
