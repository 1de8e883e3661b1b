"""Ready: registered, and each replica here is led or followed; what this node can do nothing about does not count."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, Versioned
from nsqha.errors import Unavailable
from nsqha.server.http.broker_api import Check
from nsqha.server.node.cluster.member import AnnouncedTrouble, cluster_checks

ME, OTHER = 1, 2
KEY = (7, 0)


def cluster(meta: PartitionMeta, *, leading: Any = (), followers: Any = None, alive: Any = (ME, OTHER)) -> Any:
    record = TopicRecord("t", KEY[0], 3, partitions={0: meta})
    return SimpleNamespace(
        node=ME,
        registration=SimpleNamespace(has_lease=True, info=NodeInfo(ME)),
        reach=SimpleNamespace(missing=""),
        nodes=lambda: {n: NodeInfo(n) for n in alive},
        view=lambda: SimpleNamespace(topics={"t": Versioned(record, 1)}),
        replicas=SimpleNamespace(
            leading={key: SimpleNamespace(isr_answers=True) for key in leading}, followers=followers or {}
        ),
    )


def follower(*, behind: bool = False, port: Any = "port", stopped: str | None = None) -> dict[Any, Any]:
    return {KEY: SimpleNamespace(behind=behind, port=port, stopped=stopped)}


def late(found: Any) -> str:
    registered, joined, replicas, leads = cluster_checks(found)
    assert joined.ok and leads == Check("leads", True)
    assert registered.ok
    assert replicas.ok == (replicas.detail == "")
    assert not registered.live
    assert not replicas.live
    return replicas.detail


MINE = PartitionMeta(leader=ME, replicas=(ME, OTHER))
THEIRS = PartitionMeta(leader=OTHER, replicas=(ME, OTHER))


def test_led_or_followed() -> None:
    assert late(cluster(MINE, leading=[KEY])) == ""
    assert late(cluster(THEIRS, followers=follower())) == ""
    assert late(cluster(PartitionMeta(leader=OTHER, replicas=(OTHER,)))) == "", "it has no replica here"


def test_a_node_that_has_not_joined_is_not_ready() -> None:
    found = cluster(MINE, leading=[KEY])
    found.reach.missing = "node-2 does not reach this node"
    _, joined, _, _ = cluster_checks(found)
    assert (joined.name, joined.ok, joined.detail, joined.live) == ("joined", False, found.reach.missing, False)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (cluster(MINE), "t/0 is not led yet"),
        (cluster(MINE, followers=follower()), "t/0 is not led yet"),
        (cluster(THEIRS), "t/0 is not open yet"),
        (cluster(THEIRS, followers=follower(port=None)), "t/0 is not followed yet"),
        (cluster(THEIRS, followers=follower(behind=True)), "t/0 catches up"),
        (cluster(THEIRS, followers=follower(stopped="a bug")), "t/0 is stopped: a bug"),
    ],
)
def test_what_is_late(found: Any, why: str) -> None:
    assert late(found) == why


def test_a_partition_that_nobody_leads_is_no_fault_of_this_node() -> None:
    assert late(cluster(THEIRS, followers=follower(port=None), alive=[ME])) == ""
    assert late(cluster(PartitionMeta(replicas=(ME, OTHER)), followers=follower(port=None))) == ""


@pytest.mark.parametrize(
    ("found", "ready"),
    [
        (cluster(MINE, leading=[KEY]), True),
        (cluster(THEIRS, followers=follower()), True),
        (cluster(THEIRS, followers=follower(port=None)), False),
        (
            cluster(PartitionMeta(leader=OTHER, replicas=(OTHER,))),
            False,
        ),  # it could send clients on, if it hears who leads
    ],
)
def test_without_a_lease_it_is_ready_as_long_as_its_replicas_answer(found: Any, ready: bool) -> None:
    """The metadata store may be away for all, and all serve."""
    found.registration.has_lease = False
    registered = cluster_checks(found)[0]
    assert registered.ok == ready
    assert "no lease" in registered.detail


def test_without_a_lease_and_a_follower_it_is_not_ready() -> None:
    found = cluster(MINE, leading=[KEY])
    found.registration.has_lease = False
    found.replicas.leading[KEY].isr_answers = False
    assert not cluster_checks(found)[0].ok


def test_a_node_that_is_not_to_lead_is_ready_and_says_why() -> None:
    found = cluster(MINE, leading=[KEY])
    found.registration.info = NodeInfo(ME, declines="its clock is wrong: set it (NTP)", leaving_why="its disk hangs")
    *_, leads = cluster_checks(found)
    assert leads.ok and leads.detail == "its disk hangs; this node declines to lead: its clock is wrong: set it (NTP)"


def test_what_an_operator_has_to_mend_is_announced_until_the_store_takes_it() -> None:
    told: list[str] = []
    reasons = {"now": "", "store": "is away"}

    async def announce(why: str) -> None:
        if reasons["store"]:
            raise Unavailable("etcd is away")
        told.append(why)

    async def story() -> None:
        tasks: list[asyncio.Task[None]] = []
        trouble = AnnouncedTrouble(
            lambda: reasons["now"], announce, lambda work: tasks.append(asyncio.ensure_future(work))
        )

        async def look() -> None:
            trouble.look()
            await asyncio.gather(*tasks)

        await look()
        assert not tasks, "there is nothing"
        reasons["now"] = "a.pem expired"
        await look()
        assert not told
        reasons["store"] = ""
        await look()
        await look()
        reasons["now"] = ""
        await look()
        assert told == ["a.pem expired", ""]

    asyncio.run(story())
