"""What every kind of commit promises, and what each of them does about crashes of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pyspark_nsqha.lake import store as store_module
from pyspark_nsqha.lake.commits import commit
from pyspark_nsqha.lake.commits.commit import Commits, ManifestCommits, Moved
from pyspark_nsqha.lake.commits.iceberg import IcebergCommits
from pyspark_nsqha.lake.commits.manifest import Addition, BadManifest, LakeFile, LakeState, Missing, Overlap, encode
from pyspark_nsqha.lake.plan import pieces
from pyspark_nsqha.lake.store import Store, StoreFailed
from pyspark_nsqha.lake.task import write_piece
from tests.unit.spark.lake_rig import Crash, Partition

Open = Callable[[], Commits]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "lake"))


def iceberg(store: Store) -> IcebergCommits:
    place = Path(store.uri).parent
    uri = {"type": "sql", "uri": f"sqlite:///{place}/catalog.db", "warehouse": f"file://{place}/warehouse"}
    return IcebergCommits(store, "test", properties=uri)


@pytest.fixture(params=["manifest", "iceberg"])
def opened(request: pytest.FixtureRequest, store: Store) -> Open:
    """Another process that opens the same lake."""
    if request.param == "manifest":
        return lambda: ManifestCommits(store)
    pytest.importorskip("pyiceberg")
    return lambda: iceberg(store)


@pytest.fixture
def files(store: Store) -> tuple[LakeFile, ...]:
    """Written, and not committed."""
    made = Partition(step=300)
    for n in range(30):
        made.publish(b"%d" % n * 9)
    found = []
    for piece in pieces(made.pin(cuts=True), ManifestCommits(store).state(), split_bytes=300):
        found += write_piece(piece.split, store, made.read, run="r").addition.files
    assert len(found) > 4
    return tuple(found)


def test_what_was_appended_is_the_state(opened: Open, files: tuple[LakeFile, ...]) -> None:
    commits = opened()
    first = commits.append(commits.state(), Addition(files[:2]), run="a")
    gap = Missing(*files[0].life, 1000, 1010, "lost")
    second = commits.append(first, Addition(files[2:3], (gap,)), run="a")
    assert opened().state() == commits.state() == second
    assert (second.sequence, second.addition()) == (2, Addition(files[:3], (gap,)))


def test_a_gap_alone_is_a_commit(opened: Open, files: tuple[LakeFile, ...]) -> None:
    commits = opened()
    gap = Missing(*files[0].life, 0, 10, "lost")
    commits.append(commits.state(), Addition((), (gap,)), run="a")
    assert opened().state().addition() == Addition((), (gap,))


def test_of_two_on_the_same_state_one_has_moved(opened: Open, files: tuple[LakeFile, ...]) -> None:
    one, other = opened(), opened()
    seen_by_one, seen_by_other = one.state(), other.state()
    other.append(seen_by_other, Addition(files[1:2]), run="b")
    with pytest.raises(Moved):
        one.append(seen_by_one, Addition(files[:1]), run="a")
    one.append(one.state(), Addition(files[:1]), run="a")
    assert opened().state().addition() == Addition(files[:2])


def test_messages_that_are_there_are_refused(opened: Open, files: tuple[LakeFile, ...]) -> None:
    commits = opened()
    state = commits.append(commits.state(), Addition(files[:1]), run="a")
    with pytest.raises(Overlap):
        commits.append(state, Addition((replace(files[0], first=1, rows=files[0].end - 1),)), run="a")
    assert opened().state() == state


def test_what_was_committed_is_seen_by_whoever_had_read_before(opened: Open, files: tuple[LakeFile, ...]) -> None:
    reader, writer = opened(), opened()
    assert reader.state().sequence == 0
    for file in files[:3]:
        writer.append(writer.state(), Addition((file,)), run="a")
    assert reader.state().addition() == Addition(files[:3])


# ---- manifests


def test_a_base_stands_for_all_manifests_before_it(
    store: Store, files: tuple[LakeFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "BASE_EVERY", 2)
    commits = ManifestCommits(store)
    for file in files[:5]:
        commits.append(commits.state(), Addition((file,)), run="a")
    for sequence in (1, 2, 3, 4):
        store.remove(f"manifest/{sequence:020d}.json")
    assert ManifestCommits(store).state() == commits.state()
    (Path(store.uri) / "manifest/00000000000000000004.base.json").write_bytes(b"{}")
    with pytest.raises(BadManifest, match="is not a manifest"):
        ManifestCommits(store).state()


def test_a_base_that_is_half_written_costs_nothing(
    store: Store, files: tuple[LakeFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "BASE_EVERY", 2)
    commits = ManifestCommits(store)
    for file in files[:5]:
        commits.append(commits.state(), Addition((file,)), run="a")
    for sequence in (4, 2):
        (Path(store.uri) / f"manifest/{sequence:020d}.base.json").write_bytes(b"{")
        assert ManifestCommits(store).state() == commits.state()


def test_what_floors_rest_on_is_durable_whoever_wrote_it(
    store: Store, files: tuple[LakeFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody died between the link and the sync of the folder."""
    folder = f"{store.uri}/manifest"
    synced: list[str] = []
    with monkeypatch.context() as patched, pytest.raises(Crash):

        def dies(path: str) -> None:
            if path == folder:
                raise Crash("sync")

        patched.setattr(store_module, "_sync_folder", dies)
        ManifestCommits(store).append(LakeState(), Addition(files[:1]), run="a")
    monkeypatch.setattr(store_module, "_sync_folder", synced.append)
    monkeypatch.setattr(store_module, "_durable", set())
    assert ManifestCommits(store).state().sequence == 1 and synced == []
    assert ManifestCommits(store).state(durable=True).sequence == 1
    assert synced == [store.uri, folder]


def test_what_was_appended_is_read_back_from_the_store(
    store: Store, files: tuple[LakeFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that loses what it has taken, or shows something else, moves no floor."""
    commits = ManifestCommits(store)
    monkeypatch.setattr(store, "create", lambda *_, **__: None)
    with pytest.raises(StoreFailed, match="no floor was moved"):
        commits.append(commits.state(), Addition(files[:1]), run="a")
    raw = encode(1, Addition(files[1:2]), written_ns=1, run="b")
    monkeypatch.setattr(store, "create", lambda path, data, run: store.write(path, raw, run=run))
    with pytest.raises(StoreFailed, match="no floor was moved"):
        commits.append(commits.state(), Addition(files[:1]), run="a")


def test_manifests_that_went_under_somebody_who_knew_them_are_missed(store: Store, files: tuple[LakeFile, ...]) -> None:
    commits = ManifestCommits(store)
    commits.append(commits.state(), Addition(files[:1]), run="a")
    store.remove("manifest/00000000000000000001.json")
    with pytest.raises(BadManifest, match="had manifests up to 1, now they end at 0"):
        commits.state()


# ---- Iceberg


def rows(commits: IcebergCommits) -> list[int]:
    return sorted(commits._table().scan().to_arrow().column("offset").to_pylist())


def test_the_table_has_the_rows_of_the_files_once(store: Store, files: tuple[LakeFile, ...]) -> None:
    commits = iceberg(store)
    for file in files[:3]:
        commits.append(commits.state(), Addition((file,)), run="a")
    assert rows(iceberg(store)) == list(range(files[2].end))
    assert [field.name for field in commits._table().spec().fields] == ["topic", "timestamp_day"]
    summary = commits._table().current_snapshot().summary.additional_properties
    assert summary["nsqha.ranges"] == f"orders/0:{files[2].first}-{files[2].end}@0000000000000abc"


@pytest.mark.parametrize("moment", ["write", "_commit", "_create", "remove"])
def test_a_crash_anywhere_leaves_each_range_once(
    store: Store, files: tuple[LakeFile, ...], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = iceberg(store)
    state = commits.append(commits.state(), Addition(files[:1]), run="a")

    def crash(*_: object, **__: object) -> None:
        raise Crash(moment)

    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(store if moment in ("write", "remove") else commits, moment, crash)
        commits.append(state, Addition(files[1:2]), run="a")
    again = iceberg(store)
    state = again.state()
    if state.sequence == 1:
        state = again.append(state, Addition(files[1:2]), run="b")
    again.append(state, Addition(files[2:3]), run="b")
    assert rows(iceberg(store)) == list(range(files[2].end))
    assert ManifestCommits(store).state() == iceberg(store).state()
    assert iceberg(store).state().addition() == Addition(files[:3])


def test_somebody_else_who_changes_the_table_does_not_stop_us(store: Store, files: tuple[LakeFile, ...]) -> None:
    commits = iceberg(store)
    state = commits.append(commits.state(), Addition(files[:1]), run="a")
    table = iceberg(store)._table()
    with table.transaction() as transaction:
        transaction.set_properties(comment="from elsewhere")
    commits.append(state, Addition(files[1:2]), run="a")
    assert rows(commits) == list(range(files[1].end))


def test_a_manifest_that_somebody_writes_while_the_table_is_read_is_seen(
    store: Store, files: tuple[LakeFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifests are read, then others commit twice and remove what was staged, then the table is read."""
    reader, writer = iceberg(store), iceberg(store)
    writer.append(writer.state(), Addition(files[:1]), run="a")
    reader.state()
    summaries = reader._summaries

    def late() -> object:
        for file in files[1:3]:
            writer.append(writer.state(), Addition((file,)), run="a")
        return summaries()

    monkeypatch.setattr(reader, "_summaries", late)
    assert reader.state().addition() == Addition(files[:3])


def test_a_catalog_that_does_not_say_what_became_of_a_commit_is_asked_later(
    store: Store, files: tuple[LakeFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.exceptions import CommitStateUnknownException, ServiceUnavailableError

    commits = iceberg(store)
    state = commits.append(commits.state(), Addition(files[:1]), run="a")
    commit_table = SqlCatalog.commit_table

    def unknown(*asked: object) -> object:
        commit_table(*asked)  # type: ignore[arg-type]
        raise CommitStateUnknownException("gateway timeout")

    def unavailable(*_: object) -> object:
        raise ServiceUnavailableError("later")

    for fails in (unavailable, unknown):
        with monkeypatch.context() as patched, pytest.raises(StoreFailed, match=r"the outcome is unknown \("):
            patched.setattr(SqlCatalog, "commit_table", fails)
            commits.append(state, Addition(files[1:2]), run="a")
    assert iceberg(store).state().addition() == Addition(files[:2])
    assert rows(commits) == list(range(files[1].end))


def test_a_table_keeps_files_that_manifests_name(store: Store, files: tuple[LakeFile, ...]) -> None:
    commits = iceberg(store)
    commits.append(commits.state(), Addition(files[:1]), run="a")
    assert commits._table().properties["gc.enabled"] == "false"
    with commits._table().transaction() as transaction:
        transaction.remove_properties("gc.enabled")
    assert iceberg(store)._table().properties["gc.enabled"] == "false"


def test_a_table_that_was_made_anew_is_noticed(store: Store, files: tuple[LakeFile, ...]) -> None:
    commits = iceberg(store)
    commits.append(commits.state(), Addition(files[:1]), run="a")
    commits._table().catalog.drop_table("nsqha.messages")
    with pytest.raises(BadManifest, match="rolled back or created again"):
        iceberg(store).state()
