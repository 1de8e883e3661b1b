"""What an operator asks of a channel: by command and over HTTP, as a plain consumer sees it, and over a failover."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, freeze, thaw
from tests.integration.devnode import DevNode
from tests.integration.servers import wait_until
from tests.integration.test_turns import OneByOne

DOCS = (Path(__file__).resolve().parents[2] / "docs/policies.md").read_text()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("policies"))
    try:
        yield node
    finally:
        node.stop()


def http(node: DevNode, query: str, body: bytes | None = None) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://{node.http}/channel/policy?{query}", body, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_message_that_failed_waits(node: DevNode) -> None:
    node.create("failing", "c")
    said = node.run("channel", "set", "failing", "c", "--retry", "700ms", "--retry-jitter", "0%")
    assert said.returncode == 0, said.stderr
    assert "retry 700ms (channel), jitter 0% (channel)" in said.stderr
    node.publish("failing", "a", "b")
    with OneByOne(node.tcp, "failing") as consumer:
        body, attempts, first = consumer.next()
        assert (body, attempts) == ("a", 1)
        failed = time.monotonic()
        consumer.requeue(first)
        body, _, second = consumer.next()
        assert body == "b"
        consumer.fin(second)
        assert consumer.next()[:2] == ("a", 2)
        assert time.monotonic() - failed >= 0.7
        failed = time.monotonic()
        consumer.requeue(first)
        assert consumer.next()[:2] == ("a", 3)
        assert time.monotonic() - failed >= 1.4


def test_what_a_channel_does_not_say_comes_from_the_topic(node: DevNode) -> None:
    node.create("shared", "c", "d")
    node.ok("channel", "set", "shared", "*", "--retry", "5s", "--retry-factor", "1")
    node.ok("channel", "set", "shared", "c", "--retry", "1m", "--retry-max", "1h")
    assert "policy: retry 1m00s (channel), at most 1h00m (channel), factor 1 (*)" in node.ok(
        "channel", "show", "shared", "c"
    )
    assert "policy: retry 5s (*), factor 1 (*)" in node.ok("channel", "show", "shared", "d")
    node.ok("channel", "set", "shared", "c", "--clear", "retry", "--clear", "retry-max")
    described = node.json("channel", "show", "shared", "c")
    assert described["default_policy"]["retry_ms"] == 5000
    assert "(channel)" not in node.ok("channel", "show", "shared", "c")


def test_http_says_the_same(node: DevNode) -> None:
    node.create("web", "c")
    status, answer = http(node, "topic=web&channel=c", b'{"retry_ms": 2000, "retry_instead": true}')
    assert (status, answer["policy"]) == (200, {"retry_ms": 2000, "retry_instead": True})
    assert http(node, "topic=web&channel=c") == (200, answer)
    assert answer["in_force"]["retry_ms"] == {"value": 2000, "from": "channel"}
    assert answer["in_force"]["retry_factor"] == {"value": 2.0, "from": "default"}
    assert http(node, "topic=web&channel=*", b'{"retry_factor": 3}')[1]["in_force"]["retry_factor"]["value"] == 3
    status, answer = http(node, "topic=web&channel=c", b'{"retry_instead": null}')
    assert (status, answer["policy"]) == (200, {"retry_ms": 2000})
    assert answer["in_force"]["retry_factor"] == {"value": 3.0, "from": "*"}


def test_the_oldest_beyond_a_depth_are_passed_over_and_counted(node: DevNode) -> None:
    node.create("deep", "c")
    node.publish("deep", *map(str, range(10)))
    refused = node.run("channel", "set", "deep", "c", "--max-depth", "3")
    assert refused.returncode == 8
    assert "--yes" in refused.stderr
    node.ok("channel", "set", "deep", "c", "--max-depth", "3", "--yes")
    node.publish("deep", "10")
    shown = node.json("channel", "show", "deep", "c")
    assert (shown["depth"], shown["dropped"], shown["skipped"]) == (3, 8, 0)
    assert "0 skipped, 0 too old, 8 beyond its depth" in node.ok("channel", "show", "deep", "c")
    assert node.ok("sub", "deep", "c", "-n", "3").split() == ["8", "9", "10"]
    with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=10) as answer:
        metrics = answer.read().decode().splitlines()
    dropped = [line for line in metrics if line.startswith("nsqha_channel_dropped") and "deep" in line]
    assert [float(line.split()[1]) for line in dropped] == [8], dropped


def test_what_is_too_old_is_passed_over_without_a_consumer(node: DevNode) -> None:
    node.create("aged", "c")
    node.publish("aged", "a")
    with OneByOne(node.tcp, "aged") as consumer:
        consumer.requeue(consumer.next()[2], 60_000)
        wait_until(lambda: node.json("channel", "show", "aged", "c")["deferred"] == 1, "REQ arrives")
    node.publish("aged", "b")
    node.ok("channel", "set", "aged", "c", "--ttl", "1s", "--yes")
    wait_until(lambda: node.json("channel", "show", "aged", "c")["expired"] == 1, "the unread one is passed over")
    shown = node.json("channel", "show", "aged", "c")
    assert (shown["depth"], shown["deferred"]) == (0, 1)
    node.publish("aged", "c")
    assert node.ok("sub", "aged", "c", "-n", "1").split() == ["c"]


def test_skip_and_unskip_as_in_youzans_fork(node: DevNode) -> None:
    node.create("skipped", "c")

    def post(path: str) -> None:
        urllib.request.urlopen(f"http://{node.http}{path}?topic=skipped&channel=c", b"", timeout=10).close()

    post("/channel/skip")
    node.publish("skipped", "a", "b")
    shown = node.json("channel", "show", "skipped", "c")
    assert (shown["depth"], shown["skipped"]) == (0, 2)
    post("/channel/unskip")
    node.publish("skipped", "c")
    assert node.ok("sub", "skipped", "c", "-n", "1").split() == ["c"]
    node.ok("seek", "skipped", "c", "start", "--yes")
    assert node.ok("sub", "skipped", "c", "-n", "3").split() == ["a", "b", "c"], "the log has them"


@pytest.mark.parametrize(
    ("query", "body", "status", "said"),
    [
        ("topic=bad&channel=c", b'{"retry_ms": -1}', 400, "retry_ms is -1; it must be 0 to"),
        ("topic=bad&channel=c", b'{"retry": 1}', 400, "no field retry; there are retry_ms"),
        ("topic=bad&channel=c", b'{"retry_ms": "1s"}', 400, "must be a whole number"),
        ("topic=bad&channel=c", b"{}", 400, "no field to change"),
        ("topic=bad&channel=c", b"[1", 400, ""),
        ("topic=bad&channel=e%23ephemeral", b'{"retry_ms": 1}', 404, ""),
        ("topic=bad&channel=nope", b'{"retry_ms": 1}', 404, ""),
        ("topic=nope&channel=*", b'{"retry_ms": 1}', 404, ""),
        ("topic=bad&channel=c", b"[" * 100_000, 413, ""),
    ],
)
def test_bad_input_is_refused_before_anything_is_stored(
    node: DevNode, query: str, body: bytes, status: int, said: str
) -> None:
    if "bad" not in node.ok("topic", "list", "--names").split():
        node.create("bad", "c")
    found, answer = http(node, query, body)
    assert found == status, answer
    assert said in answer.get("detail", "")
    assert http(node, "topic=bad&channel=c")[1]["policy"] == {}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["c"], 2, "nothing to change"),
        (["c", "--retry", "soon"], 2, "not a duration"),
        (["c", "--retry", "1us"], 2, "whole number of milliseconds"),
        (["c", "--retry-jitter", "0.2"], 2, "not a percentage"),
        (["c", "--retry-jitter", "120%"], 2, "retry_jitter is 1.2; it must be 0.0 to 1.0"),
        (["c", "--retry-factor", "11"], 2, "retry_factor is 11.0"),
        (["c", "--retry", "2s", "--retry-max", "1s"], 2, "cannot be less than retry_ms"),
        (["c", "--retry", "2s", "--clear", "retry"], 2, "both set and cleared"),
        (["c", "--clear", "tt"], 2, "retry-max"),
        (["nope", "--retry", "2s"], 3, "there is no channel nope"),
        (["*!", "--retry", "2s"], 2, "is not a name"),
        (["x#ephemeral", "--retry", "2s"], 3, "there is no channel"),
        (["r", "--retry", "2s"], 2, "is a reader's"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_is_one_line(node: DevNode, words: list[str], status: int, said: str) -> None:
    if "wrong" not in node.ok("topic", "list", "--names").split():
        node.create("wrong", "c")
        node.ok("channel", "create", "wrong", "r", "--reader")
    done = node.run("channel", "set", "wrong", *words)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_commands_of_the_page_do_what_it_says(node: DevNode) -> None:
    node.create("orders", "billing", "audit")
    environment = node.environment | {"NSQHA_HTTP_ADDRESS": node.http}
    outputs = []
    for block in re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL):
        for line in block.strip().splitlines():
            done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, (line, done.stderr)
            outputs.append(done.stdout)
    assert "retry 1s (channel), at most 10m00s (channel)" in outputs[1]
    assert json.loads(outputs[-1])["policy"] == {"retry_ms": 2000, "max_attempts": 5}


@pytest.mark.timeout(180)
def test_every_leader_follows_the_policy_and_so_does_the_next(cluster: Cluster) -> None:
    """Set at a node that does not lead; then the leader is killed, and all of them are."""
    cluster.create("lasting", "c")
    follower = cluster.followers("lasting")[0]
    answer = follower.request("/channel/policy?topic=lasting&channel=c", b'{"retry_ms": 1500, "retry_jitter": 0}')
    assert json.loads(answer)["policy"]["retry_ms"] == 1500

    def fails_and_waits(published: int) -> None:
        leader = cluster.leader("lasting")
        leader.request("/pub?topic=lasting", b"hello")
        with OneByOne(leader.tcp, "lasting") as consumer:
            _, attempts, message_id = consumer.next()
            failed = time.monotonic()
            consumer.requeue(message_id)
            assert consumer.next()[1] == attempts + 1
            assert time.monotonic() - failed >= 1.5
            consumer.fin(message_id)
            # Else the next leader would deliver it again, beside the next one.
            wait_until(lambda: leader.progress_is_committed("lasting", published), "the FIN is in the log")

    fails_and_waits(1)
    old = cluster.leader("lasting")
    old.kill()
    wait_until(lambda: (now := cluster.leader_now("lasting")) is not None and now is not old, "another node leads")
    fails_and_waits(2)
    old.start()
    cluster.wait_isr("lasting", 3)


@pytest.mark.timeout(180)
def test_a_change_is_answered_without_a_leader_that_has_no_lease(cluster: Cluster) -> None:
    """Two of three nodes do not answer, one of them led. Its lease ends; whoever leads next reads the record first."""
    cluster.start()
    cluster.create("unled", "c")
    leader, (other, asked) = cluster.leader("unled"), cluster.followers("unled")
    freeze(leader)
    freeze(other)
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            asked.request("/channel/policy?topic=unled&channel=c", b'{"max_attempts": 0}')
        assert refused.value.code == 400, "what is wrong needs no leader"
        asked.request("/channel/policy?topic=unled&channel=c", b'{"max_attempts": 1}', seconds=60)
    finally:
        thaw(leader)
        thaw(other)
    cluster.wait_isr("unled", 3, seconds=60)
    leads = cluster.leader("unled")
    leads.request("/pub?topic=unled", b"hello", seconds=30)
    with OneByOne(leads.tcp, "unled") as consumer:
        consumer.requeue(consumer.next()[2])
        stats = "/stats?format=json&include_nsqha=true&topic=unled"
        wait_until(lambda: b'"dead_count":1' in leads.request(stats), "it dies as the new policy says")
