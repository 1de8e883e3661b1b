"""The controller as a process runs it: campaign, Live streams, Status calls and writes; only the network is missing."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import uvloop

from lookupd import controller, links
from lookupd.controller import Candidacy, ControllerShell
from nsqha import nsqlog
from nsqha.election.controller.events import Resign
from nsqha.election.memory import MemorySession
from nsqha.election.store import PartitionChange
from nsqha.errors import StaleMetadata, Unavailable
from nsqha.pb.v1.replication_pb2 import LiveMessage, StatusRequest
from tests.unit.lookupd.nodes_rig import World, controlled


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("nsqha")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "CAMPAIGN_AGAIN_S", 0.01)


def run(story: Callable[[World, ControllerShell], Awaitable[None]], nodes: int = 3) -> None:
    async def main() -> None:
        async with controlled(nodes) as (world, shell):
            await asyncio.wait_for(story(world, shell), 60)

    uvloop.run(main())


def test_a_new_topic_gets_replicas_and_a_leader() -> None:
    async def story(world: World, shell: ControllerShell) -> None:
        world.create()
        await world.led()
        meta = world.meta()
        assert sorted(meta.replicas) == [1, 2, 3] and meta.isr == {meta.leader: 100 + meta.leader}
        assert meta.registration == world.nodes[meta.leader].info.registration
        await world.until(lambda: shell.counts.elections == {"no leader yet": 1})

    run(story)


def test_a_stream_that_ends_and_a_node_that_refuses_mean_another_leader() -> None:
    async def story(world: World, shell: ControllerShell) -> None:
        world.create()
        await world.led()
        world.join_all()
        await asyncio.sleep(0.05)
        before = world.meta()
        world.nodes[before.leader].kill()
        await world.until(lambda: world.meta().leader != before.leader)
        after = world.meta()
        assert after.epoch == before.epoch + 1 and set(after.isr) == {1, 2, 3} - {before.leader}
        await world.until(lambda: shell.counts.elections["leader does not answer"] == 1)

    run(story)


class CountedWrites(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return super().write(text)


@pytest.mark.usefixtures("logging_as_it_was")
def test_nodes_are_asked_on_their_streams_and_older_ones_by_calls() -> None:
    """An answer by gRPC waits for several turns of a loop that is busy after the death of another node."""

    async def story(world: World, shell: ControllerShell) -> None:
        world.nodes[3].takes_questions = False
        world.nodes[3].kill()
        world.nodes[3].up = True
        await world.until(lambda: shell.term is not None and shell.term.links.open == [1, 2, 3])
        for node in world.nodes.values():
            node.asked_by_call = 0
        world.create()
        await world.led()
        world.join_all()
        await world.until(lambda: len(world.meta().isr) == 3)
        await world.until(lambda: all(node.statuses for node in world.nodes.values()))
        assert world.nodes[1].asked_by_call == world.nodes[2].asked_by_call == 0 < world.nodes[3].asked_by_call

    run(story)


@pytest.mark.parametrize("ends", ["it is lost", "it is late", "it refuses", "the term ends"])
def test_a_question_ends_with_its_answer_its_stream_or_its_time(ends: str) -> None:
    async def story(world: World, shell: ControllerShell) -> None:
        await world.until(lambda: shell.term is not None and shell.term.links.open == [1, 2, 3])
        assert shell.term is not None
        node, term = world.nodes[2], shell.term
        node.frozen = True
        asking = asyncio.ensure_future(term.links.ask(2, StatusRequest(), 0.05 if ends == "it is late" else 20))
        await asyncio.sleep(0)
        (stream,) = node.streams
        if ends == "it is lost":
            node.kill()
        elif ends == "it refuses":
            for number, why in ((99, "of another question"), (stream.sent[-1].question, "not here")):
                registration = node.info.registration
                stream.receive(LiveMessage(node_uid=2, registration=registration, question=number, refused=why))
        elif ends == "the term ends":
            term.links.close()
        with pytest.raises(Unavailable) as raised:
            await asyncio.wait_for(asking, 10)
        assert {"it is late": "within 0.05 s", "it refuses": "not here"}.get(ends, "has ended") in str(raised.value)

    run(story)


def test_elections_of_one_round_are_few_calls_of_the_store_and_few_writes_of_lines() -> None:
    async def story(world: World, shell: ControllerShell) -> None:
        world.create(partitions=60)
        await world.until(lambda: all(world.meta(number=number).leader for number in range(60)))
        world.join_all()
        await asyncio.sleep(0.05)
        led = [number for number in range(60) if world.meta(number=number).leader == 1]
        calls: list[int] = []
        replace_partitions = world.store.records.replace_partitions

        def counted(changes: Sequence[PartitionChange], **rest: Any) -> Any:
            calls.append(len(changes))
            return replace_partitions(changes, **rest)

        world.store.records.replace_partitions = counted
        nsqlog.configure(prefix="", level="info", stream=(lines := CountedWrites()))
        with nsqlog.by_turns(asyncio.get_running_loop().call_soon, threading.get_ident):  # as the daemon
            world.nodes[1].kill()
            await world.until(lambda: shell.counts.elections["leader does not answer"] == len(led))
        assert len(led) > 10 and max(calls) > 10 and len(calls) <= 6
        elected = [text for text in lines.texts if "(leader does not answer)" in text]
        assert sum(text.count("\n") for text in elected) >= len(led) and len(elected) <= len(calls)

    run(story)


def test_a_stream_that_ends_alone_changes_nothing() -> None:
    async def story(world: World, shell: ControllerShell) -> None:
        world.create()
        await world.led()
        before = world.meta()
        node = world.nodes[before.leader]
        asked = node.statuses
        node.streams[0].end("reset")
        await world.until(lambda: node.statuses > asked)
        await world.until(lambda: len(node.streams) == 1)
        assert world.meta().epoch == before.epoch

    run(story)


def test_what_a_node_says_of_others_makes_the_controller_look() -> None:
    async def story(world: World, shell: ControllerShell) -> None:
        world.create()
        await world.led()
        leader = world.meta().leader
        other = next(node for uid, node in world.nodes.items() if uid != leader)
        await world.until(lambda: other.streams)
        asked = world.nodes[leader].statuses
        hello = LiveMessage(node_uid=other.uid, registration=other.info.registration, suspects=[leader])
        other.streams[0].receive(hello)
        await world.until(lambda: world.nodes[leader].statuses > asked)

    run(story)


def test_a_leader_that_is_frozen_is_replaced_when_its_followers_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream ends, and its lease does not either."""
    monkeypatch.setattr(links, "LOOK_SECONDS", 0.01)

    async def story(world: World, shell: ControllerShell) -> None:
        world.create()
        await world.led()
        world.join_all()
        await asyncio.sleep(0.05)
        before = world.meta()
        world.nodes[before.leader].frozen = True
        await world.until(lambda: shell.term is not None and shell.term.machine.state.standing.silent)
        assert world.meta().epoch == before.epoch, "perhaps only the controller does not hear it"
        for uid, node in world.nodes.items():
            if uid != before.leader:
                told = LiveMessage(node_uid=uid, registration=node.info.registration, unheard=[before.leader])
                node.streams[0].receive(told)
        await world.until(lambda: world.meta().leader != before.leader)
        assert before.leader in world.store.watch.view().nodes and world.nodes[before.leader].streams

    run(story)


def test_a_node_that_answers_pings_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LOOK_SECONDS", 0.01)

    async def story(world: World, shell: ControllerShell) -> None:
        await world.until(lambda: shell.term is not None and len(shell.term.links.open) == 3)
        asked = [node.statuses for node in world.nodes.values()]
        await asyncio.sleep(0.5)
        assert [node.statuses for node in world.nodes.values()] == asked

    run(story)


def test_a_stranger_at_the_address_of_a_node_is_not_believed() -> None:
    async def story(world: World, shell: ControllerShell) -> None:
        await world.until(lambda: world.nodes[1].streams)
        stream = world.nodes[1].streams[0]
        stream.receive(LiveMessage(node_uid=9, registration=1, suspects=[2]))
        await world.until(lambda: stream.ended)
        assert shell.term is not None and 9 not in shell.term.links.open

    run(story)


def test_another_daemon_goes_on_when_the_controller_stops() -> None:
    async def main() -> None:
        world = World(3)
        first, second = world.shell("l1"), world.shell("l2")
        await first.start()
        await world.until(lambda: first.term is not None)
        await second.start()
        try:
            assert second.term is None
            await first.stop()
            await world.until(lambda: second.term is not None)
            world.create()
            await world.led()
        finally:
            await second.stop()
        assert world.store.records.controller() is None, "the key is given back"

    uvloop.run(main())


def test_a_lost_lease_ends_the_term_and_a_new_one_begins() -> None:
    async def story(world: World, shell: ControllerShell) -> None:
        sessions = []
        open_session = world.store.sessions.open
        world.store.sessions.open = lambda **kw: sessions.append(open_session(**kw)) or sessions[-1]  # type: ignore
        second = world.shell("l2")
        await shell.stop()
        await second.start()
        try:
            await world.until(lambda: second.term is not None)
            assert second.term is not None
            epoch = second.term.epoch
            sessions[-1].expire()
            await world.until(lambda: second.term is not None and second.term.epoch > epoch)
        finally:
            await second.stop()

    run(story)


def test_metadata_that_is_not_to_be_trusted_ends_the_term() -> None:
    async def story(world: World, shell: ControllerShell) -> None:
        await world.until(lambda: shell.term is not None)

        def refuse(*_: object, **__: object) -> None:
            raise StaleMetadata("an older etcd")

        world.store.records.replace_partition = refuse
        term = shell.term
        assert term is not None
        world.create()
        await world.until(lambda: term.over.done())
        assert "older" in term.over.result()

    run(story)


def test_a_campaign_that_breaks_off_begins_again() -> None:
    async def main() -> None:
        world = World(1)
        shell = world.shell()
        open_session, broken = world.store.sessions.open, [ValueError("a bug"), Unavailable("etcd is away")]

        def flaky(**options: Any) -> MemorySession:
            if broken:
                raise broken.pop()
            return open_session(**options)  # type: ignore[no-any-return]

        world.store.sessions.open = flaky
        await shell.start()
        try:
            await world.until(lambda: shell.term is not None)
        finally:
            await shell.stop()

    uvloop.run(main())


def test_a_controller_whose_process_is_gone_is_followed_at_once() -> None:
    async def story(world: World, shell: ControllerShell) -> None:
        await world.until(lambda: shell.term is not None)
        died = asyncio.Event()
        watched: list[str] = []

        async def gone(name: str) -> None:
            watched.append(name)
            await died.wait()

        other = world.shell("l2", gone)
        await other.start()
        try:
            await world.until(lambda: watched)
            await asyncio.sleep(0.05)
            assert other.term is None and watched == ["l1"]
            died.set()
            await world.until(lambda: other.term is not None)
            await world.until(lambda: shell.term is None)  # it lived after all, and knows that its term is over
            assert watched == ["l1"], "nobody watches himself"
        finally:
            await other.stop()

    run(story)


class SomeGate:
    """What etcd would say of the metadata."""

    def __init__(self) -> None:
        self.why = ""
        self.accepted = False

    def why_not(self) -> str:
        return self.why

    def believe_accepted(self) -> bool:
        return self.accepted


def test_nobody_is_controller_while_nodes_do_not_believe_the_metadata() -> None:
    async def main() -> None:
        world, gate = World(3), SomeGate()
        gate.why = "nodes wait"
        shell = world.shell(gate=gate)
        await shell.start()
        try:
            world.create()
            await asyncio.sleep(0.2)
            assert shell.term is None and world.store.records.controller() is None
            gate.why = ""
            await world.until(lambda: shell.term is not None)
            await world.led()
            gate.why = "nodes wait"
            world.store.watch.tell(["waiting/0000000000000001"])
            await world.until(lambda: shell.term is None)
            # A thread releases the key after the term.
            await world.until(lambda: world.store.records.controller() is None)
        finally:
            await shell.stop()

    uvloop.run(main())


def test_a_store_that_is_not_to_be_trusted_is_asked_again_when_it_was_accepted() -> None:
    async def main() -> None:
        world, gate = World(1), SomeGate()
        shell = world.shell(gate=gate)
        open_session = world.store.sessions.open

        def refuse(**options: Any) -> MemorySession:
            if not gate.accepted:
                raise StaleMetadata("an older etcd")
            return open_session(**options)

        world.store.sessions.open = refuse  # type: ignore[method-assign]
        await shell.start()
        try:
            await asyncio.sleep(0.1)
            assert shell.term is None
            gate.accepted = True
            await world.until(lambda: shell.term is not None)
        finally:
            await shell.stop()

    uvloop.run(main())


def test_a_controller_that_resigns_leaves_the_key_to_another_one() -> None:
    async def main() -> None:
        world = World(3)
        first, second = world.shell("l1"), world.shell("l2")
        await first.start()
        await world.until(lambda: first.term is not None)
        await second.start()
        try:
            assert first.term is not None
            first.term._perform(Resign("it does not reach node 2"))
            await world.until(lambda: second.term is not None)
            assert first.term is None
        finally:
            await first.stop()
            await second.stop()

    uvloop.run(main())


def test_the_only_controller_resigns_and_goes_on_and_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "LEAVE_TO_OTHERS_S", 0.01)

    async def story(world: World, shell: ControllerShell) -> None:
        await world.until(lambda: shell.term is not None)
        first = shell.term
        assert first is not None
        first._perform(Resign("it does not reach node 2"))
        await world.until(lambda: shell.term not in (None, first))
        second = shell.term
        assert second is not None
        second._perform(Resign("it does not reach node 2"))
        assert not second.resigned and not second.over.done(), "it would change nothing"

    run(story)


def test_resignations_become_rare_while_they_do_not_help() -> None:
    candidacy, now, times = Candidacy(), 0.0, []
    while now < 3000.0:
        if candidacy.may_resign(now):
            times.append(now)
        now += 1.0
    assert times == [0.0, 10.0, 30.0, 70.0, 150.0, 310.0, 630.0, 1270.0, 1910.0, 2550.0]
    assert candidacy.may_resign(10_000.0) and candidacy.may_resign(10_010.0), "what is long past does not count"
