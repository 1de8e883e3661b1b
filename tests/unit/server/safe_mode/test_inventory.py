"""What a node that waits says of itself, and when it may start: over a journal and logs that are real files."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nsqha import hot
from nsqha.clock import ManualClock
from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.storage import OsStorage
from nsqha.election.etcd.metadata_restore import EtcdSnapshot
from nsqha.election.metadata_restore import AcceptedMetadata, Hold, Known, WaitingNode
from nsqha.election.model import ChannelInfo, ChannelList, PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.election.session import View
from nsqha.errors import ConfigError
from nsqha.options import Options
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.opening.opener import PartitionOpener
from nsqha.server.runtime.disk import DiskRounds
from nsqha.server.safe_mode import hold as held
from nsqha.server.safe_mode import inventory as evidence
from nsqha.server.safe_mode.inventory import RecoveredInventory, Seen

UID, OTHER = 0x51, 0x52
LOG_UID = 0xA1
CHANNELS = ChannelList(version=4, channels={"billing": ChannelInfo(7)})
RECORD = TopicRecord(
    "orders",
    UID,
    9,
    TopicSettings(partitions=2),
    CHANNELS,
    {n: PartitionMeta(epoch=3, replicas=(1, 2, 3), min_isr=2) for n in (0, 1)},
)


class Folder:
    """A data directory, its journal, and what opens its logs."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.loop = asyncio.new_event_loop()
        self.open()

    def open(self, page_cache: str = "b") -> None:
        self.journal = NodeJournal.open(OsStorage(), self.path, random.Random(1), page_cache=page_cache)
        clock = ManualClock()
        self.disk = DiskRounds(self.loop, clock, self._failed)
        self.opener = PartitionOpener(
            Options(data_path=self.path),
            loop=self.loop,
            clock=clock,
            disk=self.disk,
            journal=self.journal,
            rng=random.Random(2),
            fail=self._failed,
        )

    def _failed(self, error: BaseException) -> None:
        raise error

    def make(self, record: TopicRecord, *numbers: int, promise: int = 5) -> None:
        """Logs with one batch of nothing each."""
        logs = self.opener.create(record, dict.fromkeys(numbers, LOG_UID))
        for number, opened in logs.items():
            self.opener.stage_promise((record.uid, number), promise, opened.log, LOG_UID, "always")
            opened.log.close()
        self.journal.commit()

    def make_damaged(self, record: TopicRecord, *, lost: bool = False, durable: int = 11) -> int:
        """Partition 0 with ten messages, on this disk by what the journal, and only it, says. Two have rotted, one with
        its entry if that is durable; with `lost` the last ones are gone besides. The log id of the first."""
        log = self.opener.create(record, {0: LOG_UID})[0].log
        for n in range(10):
            data = bytearray(hot.frame(b"message %d" % n))
            hot.stamp(data, 0, log.end.offset, n + 1)
            log.append(data, count=1, flags=0, timestamp_ns=n + 1, epoch=1, durable=0)
        end = log.end.log_id + 3 if lost else durable
        self.journal.stage((record.uid, 0), promise=5, log_uid=LOG_UID, local_durable=end)
        self.journal.commit()
        log.close()
        entry = [("commitlog", ENTRY_BYTES * 5 + 50)] if durable > 5 else []
        for ending, at in (*entry, ("segment", b"message 4"), ("segment", b"message 7")):
            (path,) = Path(self.path).glob(f"topics/*/0/*.{ending}")
            data = bytearray(path.read_bytes())
            data[data.index(at) if isinstance(at, bytes) else at] ^= 0xFF
            path.write_bytes(data)
        return 5

    def held(self, seen: Seen = Seen(), **stored: TopicRecord) -> RecoveredInventory:
        records = {name: Versioned(record, 8) for name, record in stored.items()}
        return RecoveredInventory.recovered(self.path, self.opener, self.journal, seen, records)

    def close(self) -> None:
        self.journal.close()
        self.opener.cursor_cache.close()
        self.disk.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    made.close()
    made.loop.close()


# ---- what it has


def test_every_log_is_recovered_and_told_with_what_was_promised(folder: Folder) -> None:
    folder.make(RECORD, 0, 1)
    found = folder.held(orders=RECORD)
    assert [(s.key.topic_uid, s.key.partition, s.promise, s.log_uid) for s in found.replicas] == [
        (UID, 0, 5, LOG_UID),
        (UID, 1, 5, LOG_UID),
    ]
    assert not any(s.corrupt or s.cut for s in found.replicas)


def test_once_more_it_finds_the_same(folder: Folder) -> None:
    folder.make(RECORD, 0)
    before = folder.held()
    folder.close()
    folder.open()
    assert folder.held().replicas == before.replicas


@pytest.mark.parametrize("page_cache", ["b", "another"])
@pytest.mark.parametrize("lost", [False, True])
def test_damage_that_it_found_is_found_once_more_and_never_cut(folder: Folder, lost: bool, page_cache: str) -> None:
    """The plan counts on this log by the name and with the end that were told; a lower record of what was durable would
    have the next recovery take the damage for a torn end."""
    rotten = folder.make_damaged(RECORD, lost=lost)
    (told,) = folder.held(orders=RECORD).replicas
    assert told.corrupt and told.end == 11 and (told.log_uid == LOG_UID) == (not lost)
    record = folder.journal.record((UID, 0))
    assert record is not None and record.log_uid == told.log_uid, "what it goes by again when it is mended"
    folder.close()
    folder.open(page_cache)
    opened = folder.opener.recover(RECORD, [0])[0]
    opened.log.close()
    assert opened.report is not None and opened.report.serve_end == rotten
    assert opened.report.cuts == () and opened.log.end.log_id == told.end


def test_damage_of_frames_that_were_not_known_to_be_durable_is_looked_for_once_more(folder: Folder) -> None:
    """Of what is known to be durable a recovery reads only the entries."""
    rotten = folder.make_damaged(RECORD, durable=2)
    for _ in range(2):
        (told,) = folder.held(orders=RECORD).replicas
        assert told.corrupt and told.log_uid == LOG_UID and told.end == 11
        folder.close()
        folder.open()
    log = folder.opener.recover(RECORD, [0])[0].log
    assert log.doubtful_from == rotten == 5
    log.close()


def test_of_a_topic_that_nobody_describes_the_logs_tell(folder: Folder) -> None:
    folder.make(RECORD, 0)
    (told,) = folder.held().topics
    assert (told.version, told.record.name, told.record.uid, told.record.partitions) == (0, "orders", UID, {})
    assert folder.held(Seen(7, (Known(RECORD, 6),))).topics == [], "it was seen: settings and all"


def test_a_promise_that_may_be_lost_stays_in_doubt(folder: Folder) -> None:
    folder.make(RECORD, 0)
    folder.journal.node.stage_revision(1)
    folder.journal.commit()
    folder.close()
    journal = Path(folder.path) / "journal"
    data = journal.read_bytes()
    end = len(data.rstrip(b"\0"))
    journal.write_bytes(data[: end - 5] + bytes(len(data) - end + 5))  # the last record
    folder.open()
    for _ in range(2):
        record = folder.journal.record((UID, 0))
        assert record is not None and not record.promise_trusted, "torn, or looked at"
        folder.held()


def test_a_log_that_nobody_vouches_for_counts_as_another_whatever_the_metadata_say(folder: Folder) -> None:
    alone = replace(RECORD, partitions={0: PartitionMeta(epoch=3, replicas=(1,))})
    folder.make(alone, 0)
    folder.close()
    journal = Path(folder.path) / "journal"
    data = bytearray(journal.read_bytes())
    data[60] ^= 0xFF  # a record before the last: what is missing from it nobody knows
    journal.write_bytes(bytes(data))
    folder.open()
    assert not all(record.log_uid_trusted for record in folder.journal.records().values()), "the rig has to damage it"
    (status,) = folder.held(orders=alone).replicas
    assert status.log_uid not in (0, LOG_UID), "there may be other replicas by now"


def test_what_was_seen_is_kept_whole_or_not_at_all(folder: Folder) -> None:
    ephemeral = replace(RECORD, name="o#ephemeral", uid=OTHER)
    view = View(12, {"orders": Versioned(RECORD, 6), "o#ephemeral": Versioned(ephemeral, 7)})
    seen = evidence.seen_of(view)
    evidence.write_seen(folder.path, seen)
    assert evidence.read_seen(folder.path) == seen == Seen(12, (Known(RECORD, 6),))
    (Path(folder.path) / evidence.SEEN).write_bytes(b'{"format": 1, "revi')
    assert evidence.read_seen(folder.path) == Seen()
    evidence.forget_seen(folder.path)
    evidence.forget_seen(folder.path)
    assert evidence.read_seen(folder.path) == Seen()


def test_what_is_forgotten_does_not_come_back_after_a_power_loss(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence.write_seen(folder.path, Seen(9))
    synced: list[tuple[str, bool]] = []
    there = Path(folder.path) / evidence.SEEN
    monkeypatch.setattr(OsStorage, "sync_dir", lambda self, path: synced.append((path, there.exists())))
    evidence.forget_seen(folder.path)
    assert synced == [(folder.path, False)]


def test_the_answer_carries_it_to_whoever_asks() -> None:
    known = Known(replace(RECORD, partitions={0: PartitionMeta(epoch=8, version=44)}), 6)
    answer = evidence.reply(pb.StatusReply(node_uid=1), "n1", held=True, generation=2, view_revision=9, topics=[known])
    read = pb.EvidenceReply.FromString(answer.SerializeToString())
    assert [evidence.known_of(topic) for topic in read.topics] == [known], "also the versions of its partitions"
    assert (read.held, read.generation, read.view_revision) == (True, 2, 9)


# ---- when it may start

CLUSTER, ETCD = 0xC, 0xE


def look(**changes: object) -> EtcdSnapshot:
    base = EtcdSnapshot(ETCD, 100, CLUSTER, {}, None, Versioned(AcceptedMetadata(), 0))
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
def journal(folder: Folder) -> NodeJournal:
    folder.journal.node.join(CLUSTER, etcd_cluster_id=ETCD)
    folder.journal.node.stage_revision(100)
    folder.journal.node.follow_generation(1)
    return folder.journal


def accepted(journal: NodeJournal, generation: int, *others: int) -> Versioned[AcceptedMetadata]:
    return Versioned(AcceptedMetadata(generation, (journal.identity.node_uid, *others)), 50)


def test_a_node_starts_where_nothing_is_against_it(journal: NodeJournal) -> None:
    assert held.may_start(look(), journal)
    assert held.may_start(look(waiting={9: WaitingNode(9)}), journal), "others wait, this one need not"


def test_a_node_does_not_start_on_an_older_or_another_etcd_nor_during_a_hold(journal: NodeJournal) -> None:
    assert not held.may_start(look(revision=99), journal)
    assert not held.may_start(look(etcd_cluster_id=0xF), journal)
    assert not held.may_start(look(hold=Versioned(Hold(), 60)), journal)
    assert not held.may_start(look(cluster_id=0, etcd_cluster_id=0xF), journal), "nothing of the cluster is there"
    with pytest.raises(ConfigError, match="belongs to"):
        held.may_start(look(cluster_id=0xD), journal)


def test_a_doubt_outlives_that_the_metadata_look_newer_again(journal: NodeJournal) -> None:
    held.remember_doubt(journal)
    assert not held.may_start(look(revision=5000), journal)


def test_an_acceptance_counts_once_and_only_for_whom_it_names(journal: NodeJournal) -> None:
    held.remember_doubt(journal)
    assert held.may_start(look(revision=40, accepted=accepted(journal, 2)), journal)
    assert not held.may_start(look(revision=40, accepted=accepted(journal, 1)), journal), "followed already"
    assert not held.may_start(look(revision=40, accepted=Versioned(AcceptedMetadata(2, (77,)), 50)), journal)
    assert not held.may_start(look(revision=40, accepted=accepted(journal, 2), hold=Versioned(Hold(), 60)), journal), (
        "it is being decided once more"
    )


def test_following_an_acceptance_is_remembered_and_what_was_seen_is_not(folder: Folder, journal: NodeJournal) -> None:
    held.remember_doubt(journal)
    evidence.write_seen(folder.path, Seen(9))
    held.follow(journal, look(revision=40, etcd_cluster_id=0xF, accepted=accepted(journal, 2)), folder.path)
    folder.close()
    folder.open()
    identity = folder.journal.identity
    assert (identity.generation, identity.in_doubt, identity.revision_seen) == (2, False, 40)
    assert identity.etcd_cluster_id == 0xF
    assert evidence.read_seen(folder.path) == Seen()


def test_a_promise_above_the_metadata_shows_that_they_went_back(folder: Folder, journal: NodeJournal) -> None:
    folder.make(RECORD, 0, promise=5)
    at = lambda epoch: {"orders": Versioned(replace(RECORD, partitions={0: PartitionMeta(epoch=epoch)}), 9)}  # noqa: E731
    assert "promised epoch 5" in held.broken_promise(journal, at(4))
    assert not held.broken_promise(journal, at(5))
    assert not held.broken_promise(journal, {})
