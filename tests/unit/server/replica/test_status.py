"""What a node gives of its logs: read off the loop, and only if it is still what it was when the read has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.commitlog import copying
from nsqha.errors import LogCorrupt, NotFound, Unavailable
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.partition.partition import Partition
from nsqha.server.peers.api import PeerIdentity
from tests.unit.commitlog.logs import roll
from tests.unit.server.replica_rig import (
    CLUSTER,
    KEY,
    REGISTRATION,
    WIRE_KEY,
    A,
    B,
    ReplicaRig,
    add,
    followed,
    log_of,
    pause,
    run,
    serving,
)

PEER = PeerIdentity("somewhere")


async def leads(rig: ReplicaRig) -> Any:
    """The log of a partition that the node leads in epoch 2, with its epoch start and three batches."""
    await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
    mine = {rig.node: rig.follower.log_uid}
    await rig.settle(rig.record(leader=rig.node, epoch=2, isr=mine, registration=REGISTRATION, min_isr=1))
    await pause()
    log = rig.replicas.leading[KEY].log
    for _ in range(3):
        add(log, 2, b"m")
    return log


def fetch(rig: ReplicaRig, first: int, *, epoch: int = 2, end: int = 0) -> Any:
    request = pb.FetchRequest(cluster_id=CLUSTER, key=WIRE_KEY, epoch=epoch, first=first, end=end, max_bytes=1 << 20)
    return asyncio.ensure_future(rig.replicas.answers.fetch(PEER, request))


def log_ids(reply: Any) -> list[int]:
    return [entry.log_id for entry, _, _ in copying.batches(reply.entries, reply.data)]


async def status(rig: ReplicaRig) -> Any:
    (replica,) = (await rig.replicas.answers.status(PEER, pb.StatusRequest(cluster_id=CLUSTER))).replicas
    return replica


def test_a_replica_says_whose_stream_it_has_and_why_it_did_not_lead(monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
        assert (await status(rig)).led_by == 0, "nobody has opened it yet"
        rig.follower.port = SimpleNamespace(leader=A)  # type: ignore[assignment]
        told = await status(rig)
        assert (told.led_by, told.declined_epoch, told.declines) == (A, 0, "")
        mine = {rig.node: rig.follower.log_uid}
        rig.follower.port = None

        def refuse(*_: Any) -> None:
            raise Unavailable("no descriptor is left")

        elected = {"leader": rig.node, "isr": mine, "registration": REGISTRATION, "min_isr": 1}
        with monkeypatch.context() as patched:
            patched.setattr(Partition, "start_epoch", refuse)
            await rig.settle(rig.record(epoch=2, **elected))
        told = await status(rig)
        assert (told.led_by, told.declined_epoch) == (0, 2)
        assert told.declines == "Unavailable: no descriptor is left"
        await rig.settle(rig.record(epoch=3, **elected))
        told = await status(rig)
        assert (told.led_by, told.declined_epoch, told.declines) == (rig.node, 0, "")

    run(scenario)


def test_partitions_without_a_leader_are_looked_for_until_enough_are_found() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await leads(rig)
        table = rig.replicas.table
        connected, waiting = SimpleNamespace(port=object()), SimpleNamespace(port=None)
        followers: Any = {(n, 0): waiting if n % 2 else connected for n in range(1, 7)}
        table.followers.update(followers)
        keys = [KEY, (99, 0), *followers]
        assert rig.replicas.answers.unled(keys, 3) == [(1, 0), (3, 0), (5, 0)], "not what is led, or is not here"
        assert rig.replicas.answers.unled(keys, 1) == [(1, 0), (3, 0), (4, 0), (5, 0), (6, 0)], "the rest as it was"
        for key in followers:
            del table.followers[key]

    run(scenario)


def test_batches_are_read_while_the_loop_goes_on() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log = await leads(rig)
        rig.disk.hold()
        reading = fetch(rig, 2)
        await pause()
        add(log, 2, b"appended while it is read")
        assert not reading.done()
        rig.disk.release()
        reply = await reading
        assert log_ids(reply) == [2, 3, 4] and reply.end == 5

    run(scenario)


def test_each_pair_of_files_is_given_to_its_end() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log = await leads(rig)
        roll(log)
        add(log, 2, b"n")
        assert [log_ids(await fetch(rig, first)) for first in (1, 4, 5)] == [[1, 2, 3, 4], [4], [5]]
        assert log_ids(await fetch(rig, 6)) == []

    run(scenario)


def test_what_was_read_for_a_leader_that_was_replaced_meanwhile_is_not_given() -> None:
    """The next leader may have had it cut, and put other batches there, before the read."""

    async def scenario() -> None:
        rig = ReplicaRig()
        await leads(rig)
        rig.disk.hold()
        reading = fetch(rig, 2)
        await pause()
        new = log_of(3)
        rig.record(leader=B, epoch=3, isr={B: 6})
        rig.peers.serves = serving(new, 3)
        rig.leader(B).ask(3, new, start=1)
        await pause()
        rig.disk.release()
        with pytest.raises(Unavailable):
            await reading
        await pause(1)
        assert [e.epoch for e in rig.follower.log.entries(1, 99)] == [3]

    run(scenario)


def test_who_mends_is_given_what_is_here_by_anybody_and_told_what_is_committed() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig, 2)
        theirs = log_of(2, 2, 2)
        stream.push(2, theirs, 1, committed=3)
        await pause()
        assert log_ids(await fetch(rig, 1, epoch=0)) == [1, 2], "as far as it is committed, if nothing is said"
        reply = await fetch(rig, 1, epoch=0, end=9)
        assert log_ids(reply) == [1, 2, 3] and reply.committed == 3
        with pytest.raises(NotFound):
            await fetch(rig, 4, epoch=0, end=5)
        rig.disk.hold()
        reading = fetch(rig, 1, epoch=0, end=3)
        await pause()
        rig.follower.log.cutting(1)()
        rig.disk.release()
        with pytest.raises((NotFound, LogCorrupt)):
            await reading

    run(scenario)


def test_what_was_cut_while_it_was_read_is_not_reported_as_committed() -> None:
    """At the end of its log the one that mends has nothing but our word for it."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig, 2)
        stream.push(2, log_of(2, 2, 2), 1, committed=2)
        await pause()
        told = asyncio.Event()

        async def read(job: Callable[[], Any]) -> Any:
            found = job()
            await told.wait()
            return found

        rig.disk.read = read
        reading = fetch(rig, 1, epoch=0, end=4)
        await pause()
        log = rig.follower.log
        log.cutting(3)()
        add(log, 3, b"another batch under log id 3")
        rig.follower.applier.committed = 4
        told.set()
        with pytest.raises(NotFound):
            await reading

    run(scenario)
