"""Dead letters and single messages: by command, as a plain consumer sees them, and over a failover."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.terminal.exits import CONFLICT, USAGE, Exit
from tests.integration.cluster import Cluster, UnderLoad
from tests.integration.devnode import DevNode
from tests.integration.servers import wait_until
from tests.integration.test_turns import OneByOne
from tests.jepsen.load import dead_letters
from tests.jepsen.load.dead_letters import FailingMessages


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("dead"))
    try:
        yield node
    finally:
        node.stop()


def listed(node: DevNode, *words: str) -> list[Any]:
    return [json.loads(line) for line in node.ok(*words, "--json").splitlines()]


def test_a_message_that_always_fails_dies_and_is_raised(node: DevNode) -> None:
    node.create("poison", "c")
    node.ok("channel", "set", "poison", "c", "--max-attempts", "3")
    node.publish("poison", "bad", "good")
    with OneByOne(node.tcp, "poison") as consumer:
        seen: list[tuple[str, int]] = []
        while len(seen) < 4:
            body, attempts, message_id = consumer.next()
            seen.append((body, attempts))
            if body == "bad":
                consumer.requeue(message_id)
            else:
                consumer.fin(message_id)
        assert sorted(seen) == [("bad", 1), ("bad", 2), ("bad", 3), ("good", 1)]
        (dead,) = listed(node, "dead", "list", "poison", "c", "--bodies")
        assert (dead["body"], dead["attempts"], dead["reason"]) == ("bad", 3, "requeued")
        assert dead["died_ns"] > dead["published_ns"]
        channel = node.json("channel", "show", "poison", "c")
        assert (channel["dead"], channel["died"], channel["depth"], channel["deferred"]) == (1, 1, 0, 0)
        assert node.json("message", "show", "poison", "c", dead["id"])["state"] == "dead"
        planned = node.json("dead", "requeue", "poison", "c", "--all", "--plan")
        assert (planned["messages"], planned["done"]) == (1, False)
        assert node.json("dead", "requeue", "poison", "c", "--all", "--yes")["messages"] == 1
        body, attempts, message_id = consumer.next()
        assert (body, attempts) == ("bad", 1)
        consumer.fin(message_id)
    assert listed(node, "dead", "list", "poison", "c") == []


def test_emptying_keeps_the_dead_and_says_so(node: DevNode) -> None:
    node.create("kept", "c")
    node.publish("kept", "a", "b")
    unread = node.ok("peek", "kept", "--json").splitlines()
    first = json.loads(unread[0])["id"]
    refused = node.run("message", "kill", "kept", "c", first, "--yes")
    assert refused.returncode == 7
    assert "it is unread: it can be finished, nothing else" in refused.stderr
    with OneByOne(node.tcp, "kept") as consumer:
        _, _, message_id = consumer.next()
        assert node.json("message", "kill", "kept", "c", message_id.decode())["messages"] == 1
    said = node.run("channel", "empty", "kept", "c", "--yes")
    assert "it keeps 1 dead letter" in said.stderr
    assert node.json("dead", "purge", "kept", "c", message_id.decode())["messages"] == 1
    assert node.json("channel", "show", "kept", "c")["dead"] == 0


def test_a_deferred_publish_is_looked_at_brought_forward_and_cancelled(node: DevNode) -> None:
    node.create("later", "c")
    for body in ("one", "two", "three"):
        node.ok("pub", "later", body, "--delay", "1h")
    deferred = listed(node, "message", "list", "later", "c", "--state", "deferred", "--bodies")
    assert [message["body"] for message in deferred] == ["one", "two", "three"]
    ids = [message["id"] for message in deferred]
    assert node.json("message", "finish", "later", "c", ids[0])["messages"] == 1
    assert node.json("message", "requeue", "later", "c", ids[1])["messages"] == 1
    assert node.json("message", "defer", "later", "c", ids[2], "--by", "2h")["messages"] == 1
    with OneByOne(node.tcp, "later") as consumer:
        body, attempts, message_id = consumer.next()
        assert (body, attempts) == ("two", 1)
        (flying,) = listed(node, "message", "list", "later", "c", "--state", "in-flight")
        assert flying["id"] == message_id.decode()
        assert flying["client"]
        consumer.fin(message_id)
    (left,) = listed(node, "message", "list", "later", "c", "--state", "deferred")
    assert left["id"] == ids[2]
    assert left["due_ns"] > time.time_ns() + 6000 * 10**9


def test_an_unread_message_is_cancelled(node: DevNode) -> None:
    node.create("unread", "c")
    node.publish("unread", "a", "b", "c")
    ids = [json.loads(line)["id"] for line in node.ok("peek", "unread", "--json").splitlines()]
    assert node.json("message", "finish", "unread", "c", ids[1])["messages"] == 1
    assert node.json("channel", "show", "unread", "c")["depth"] == 2
    with OneByOne(node.tcp, "unread") as consumer:
        bodies: list[str] = []
        for _ in range(2):
            body, _, message_id = consumer.next()
            bodies.append(body)
            consumer.fin(message_id)
    assert bodies == ["a", "c"]


def test_a_list_has_the_beginnings_of_bodies(node: DevNode) -> None:
    node.create("large", "c")
    node.ok("pub", "large", "--delay", "1h", stdin="".join(f"{n:04}" + "x" * 50_000 + "\n" for n in range(700)))
    found = listed(node, "message", "list", "large", "c", "--state", "deferred", "--bodies", "--limit", "1000")
    assert [message["body"][:4] for message in found] == [f"{n:04}" for n in range(700)], "several pages: 2 MiB each"
    assert {(len(message["body"]), message["body_bytes"]) for message in found} == {(4096, 50_004)}
    assert len(listed(node, "message", "show", "large", "c", found[0]["id"])[0]["body"]) == 50_004


def test_more_than_a_page(node: DevNode) -> None:
    node.create("many", "c")
    node.ok("pub", "many", "--delay", "1h", stdin="x\n" * 2500)
    found = listed(node, "message", "list", "many", "c", "--state", "deferred", "--limit", "2400")
    assert len({message["id"] for message in found}) == 2400
    assert node.json("message", "kill", "many", "c", "--state", "deferred", "--yes")["messages"] == 2500
    assert node.json("dead", "purge", "many", "c", "--all", "--reason", "operator", "--yes")["messages"] == 2500
    assert node.json("channel", "show", "many", "c")["deferred"] == 0


def test_the_most_often_delivered_of_all_not_of_a_page(node: DevNode) -> None:
    node.create("sorted", "c")
    node.ok("pub", "sorted", "--delay", "1h", stdin="x\n" * 1500)
    node.publish("sorted", "slow")
    with OneByOne(node.tcp, "sorted") as consumer:
        for _ in range(2):
            message_id = consumer.next()[2]
            consumer.requeue(message_id, 0)
        assert consumer.next()[2] == message_id
        consumer.requeue(message_id, 3_600_000)
        words = ("message", "list", "sorted", "c", "--state", "deferred", "--limit", "1")
        often = (*words, "--sort", "attempts")
        wait_until(lambda: listed(node, *often)[0]["id"] == message_id.decode(), "it is the first")
    assert listed(node, *words)[0]["attempts"] == 0


def test_a_message_is_finished_as_in_youzans_fork(node: DevNode) -> None:
    node.create("fork", "c")
    node.publish("fork", "a", "b")
    ids = [json.loads(line)["id"] for line in node.ok("peek", "fork", "--json").splitlines()]

    def post(query: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{node.http}/message/finish?{query}", b"", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert post(f"topic=fork&partition=0&channel=c&msgid={ids[0]}") == (200, "")
    assert node.ok("sub", "fork", "c", "-n", "1").split() == ["b"]
    wait_until(lambda: node.json("message", "show", "fork", "c", ids[1])["state"] == "finished", "its FIN arrives")
    for query, status, said in (
        (f"topic=fork&channel=c&msgid={ids[0]}", 409, "finished already; while the log has it, nsqha message requeue"),
        ("topic=fork&channel=c&msgid=7", 400, "INVALID_ARG_MSGID"),
        ("topic=fork&channel=c", 400, "MISSING_ARG_MSGID"),
        ("topic=fork&channel=c&msgid=00000000000fffff", 409, "has not got it yet"),
        ("topic=fork&channel=c&msgid=ffff000000000000", 404, "MESSAGE_NOT_FOUND"),
        (f"topic=fork&channel=d&msgid={ids[0]}", 404, "CHANNEL_NOT_FOUND"),
        (f"topic=nope&channel=c&msgid={ids[0]}", 404, "TOPIC_NOT_FOUND"),
    ):
        found, text = post(query)
        assert (found, said in text) == (status, True), (query, found, text)


def test_the_dead_are_moved_to_a_topic_that_stock_tools_read(node: DevNode) -> None:
    node.create("moving", "c")
    node.create("moved", "c")
    node.ok("channel", "set", "moving", "c", "--max-attempts", "1", "--dead-letter", "topic:moved")
    node.publish("moving", *(f"m{n}" for n in range(150)))
    with OneByOne(node.tcp, "moving") as consumer:
        for _ in range(150):
            consumer.requeue(consumer.next()[2])
    bodies: list[str] = []
    with OneByOne(node.tcp, "moved") as consumer:
        while len(bodies) < 150:
            body, attempts, message_id = consumer.next()
            assert attempts == 1
            bodies.append(body)
            consumer.fin(message_id)
    assert bodies == [f"m{n}" for n in range(150)], "in order of death"
    wait_until(lambda: node.json("channel", "show", "moving", "c")["dead"] == 0, "they are there twice")
    assert node.json("channel", "show", "moving", "c")["died"] == 150


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["dead", "list", "nowhere", "c"], 3, "nowhere"),
        (["dead", "list", "poison", "nobody"], 3, "no channel nobody"),
        (["message", "show", "poison", "c", "zz"], 2, "not a message id"),
        (["message", "show", "poison", "c", "00000000000fffff"], 3, "has not got message"),
        (["message", "finish", "poison", "c", "ffff000000000000"], 3, "not one of topic"),
        (["message", "finish", "poison", "c"], 2, "give ids, or --state"),
        (["dead", "purge", "poison", "c", "--all"], 0, "finished 0 messages"),
        (["dead", "purge", "poison", "c", "--reason", "expired"], 2, "give ids, or --all"),
        (["dead", "purge", "poison", "c", *(f"{n:016x}" for n in range(1001))], 2, "1001 ids; 1000 at most"),
        (["dead", "list", "poison", "c", "--partition", "7"], 3, "no partition 7, only 1"),
        (["message", "defer", "poison", "c", "--state", "dead", "--by", "1000000h"], 2, "--by ends after"),
        (["message", "finish", "poison", "c", "0000000000000001", "--older", "1h"], 2, "they need --state, not ids"),
        (["dead", "purge", "poison", "c", "0000000000000001", "--reason", "expired"], 2, "they need --all, not ids"),
        (["message", "finish", "poison", "c", "0000000000000001", "--state", "dead"], 2, "give ids, or --state"),
        (["message", "list", "poison", "c", "--state", "unread"], 2, "one of in-flight, waiting, deferred, dead"),
        (["channel", "set", "poison", "c", "--dead-letter", "topic:"], 2, "is not the name of a topic"),
        (["channel", "set", "poison", "c", "--dead-max", "1000001"], 2, "dead_max is 1000001; it must be 1 to 1000000"),
        (["channel", "set", "poison", "c", "--ttl", "1ms", "--yes"], 2, "ttl_ms is 1; it must be 1000 to"),
        (["channel", "set", "poison", "c", "--max-depth", "1099511627777", "--yes"], 2, "max_depth is 1099511627777"),
        (["channel", "set", "poison", "c", "--retry", "9000h"], 2, "retry_ms is 32400000000; it must be 0 to"),
        (["channel", "set", "poison", "c", "--retry-factor", "nan"], 2, "retry_factor is nan"),
        (["channel", "set", "poison", "c", "--clear", "ttl", "--clear", "ttl"], 0, "set poison c"),
        (["channel", "set", "poison", "c", "--dead-letter", "nowhere"], 2, "one of keep, drop, topic:NAME"),
        (["channel", "set", "poison", "c", "--dead-letter", "topic:poison"], 2, "dead_letter is the topic itself"),
        (["channel", "set", "poison", "c", "--dead-letter", "topic:a b"], 2, "is not the name of a topic"),
        (["channel", "set", "poison", "c", "--dead-letter", "topic:x#ephemeral"], 2, "is not the name of a topic"),
        (["channel", "set", "poison", "c", "--max-attempts", "70000"], 2, "max_attempts is 70000"),
    ],
)
def test_wrong_commands_are_one_line(node: DevNode, words: list[str], status: int, said: str) -> None:
    if "poison" not in node.ok("topic", "list"):
        node.create("poison", "c")
    done = node.run(*words)
    assert said in done.stderr + done.stdout
    assert done.returncode == status, done.stderr


def test_an_id_of_another_life_of_the_topic_names_nothing(node: DevNode) -> None:
    for _ in range(2):
        node.create("reborn", "c")
        node.publish("reborn", "a")
        (line,) = node.ok("peek", "reborn", "--json").splitlines()
        old = json.loads(line)["id"]
        node.ok("topic", "delete", "reborn", "--yes")
    node.create("reborn", "c")
    for words in (("message", "show"), ("message", "finish"), ("dead", "requeue")):
        done = node.run(*words, "reborn", "c", old)
        assert (done.returncode, len(done.stderr.splitlines()) <= 2) == (3 if words[1] == "show" else 7, True), done
        assert "has not got" in done.stderr
    node.publish("reborn", "b")
    assert node.ok("sub", "reborn", "c", "-n", "1") == "b\n", "it was not finished"


def test_of_two_changes_at_once_the_second_is_told(node: DevNode) -> None:
    """As `nsqha channel set` does it: what was read before is sent along."""
    node.create("twice", "c")
    with Admin(node.grpc, 10) as admin:
        named = {"topic": "twice", "channel": "c"}
        before = admin.call("GetChannelPolicy", **named).policy
        policy = admin.messages.ChannelPolicy
        admin.call("UpdateChannelPolicy", **named, set=policy(max_attempts=3), expected=before)
        with pytest.raises(Exit) as refused:
            admin.call("UpdateChannelPolicy", **named, set=policy(max_attempts=4), expected=before)
        assert refused.value.status == CONFLICT
        assert admin.call("GetChannelPolicy", **named).policy == policy(max_attempts=3)
        for wrong in ({"clear": ["nope"]}, {"set": policy(skip=True, dead_letter="topic:#")}, {}):
            with pytest.raises(Exit) as refused:
                admin.call("UpdateChannelPolicy", **named, **wrong)
            assert refused.value.status == USAGE
        assert admin.call("GetChannelPolicy", **named).policy == policy(max_attempts=3)


def test_deleting_a_channel_says_what_is_dropped(node: DevNode) -> None:
    node.create("gone", "c")
    node.ok("pub", "gone", "--delay", "1h", stdin="a\nb\n")
    node.ok("message", "kill", "gone", "c", "--state", "deferred", "--yes")
    assert "it dropped 2 dead letters" in node.run("channel", "delete", "gone", "c", "--yes").stderr


@pytest.mark.timeout(180)
def test_the_dead_outlive_their_leader(cluster: Cluster) -> None:
    """Asked at a node that does not lead; listed and raised after the leader was killed."""
    cluster.create("mortal", "c")
    leader = cluster.leader("mortal")
    leader.request("/channel/policy?topic=mortal&channel=c", b'{"max_attempts": 2}')
    leader.request("/pub?topic=mortal", b"hello")
    with OneByOne(leader.tcp, "mortal") as consumer:
        for attempt in (1, 2):
            _, attempts, message_id = consumer.next()
            assert attempts == attempt
            consumer.requeue(message_id)
        wait_until(lambda: _dead(cluster, "mortal") == 1, "it dies")
    wait_until(lambda: leader.progress_is_committed("mortal", 1), "its death is in the log")
    leader.kill()
    wait_until(lambda: cluster.leader_now("mortal") not in (None, leader), "another node leads")
    wait_until(lambda: _dead(cluster, "mortal") == 1, "the dead letter lives on")
    leader.start()
    cluster.wait_isr("mortal", 3)


@pytest.mark.timeout(300)
def test_each_is_one_dead_letter_whoever_leads(cluster: Cluster) -> None:
    """Under load, the leader killed twice; `make crash-cluster ARGS=--dead` runs longer."""
    cluster.start()
    channels = ("steady", dead_letters.CHANNEL)
    cluster.create("exact", *channels)
    failing = FailingMessages.of(cluster, "exact")
    with UnderLoad(cluster, "exact", *channels, failing=failing) as load:
        for _ in range(2):
            cluster.wait_isr("exact", 3)
            leader = cluster.leader("exact")
            load.clients.avoid = cluster.nodes.index(leader)
            leader.kill()
            cluster.wait_isr("exact", 2)
            load.goes_on()
            leader.start()
        cluster.wait_isr("exact", 3)
    assert failing.dead > 0
    cluster.wait_level("exact")


def _dead(cluster: Cluster, topic: str) -> int:
    try:
        metrics = cluster.leader(topic).request("/metrics").decode()
    except OSError:
        return -1
    found = re.findall(rf'nsqha_channel_dead{{[^}}]*topic="{topic}"[^}}]*}} (\d+)', metrics)
    return sum(int(count) for count in found)
