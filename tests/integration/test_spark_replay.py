"""`nsqha spark replay` and `nsqha spark lag` against a real node; replays in a real Spark."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli import build_parser
from nsqha.cli.brokers.admin import Admin
from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.cli.terminal import exits
from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.commits.manifest import Addition
from pyspark_nsqha.lake.commits.manifest import LakeState as LakeState
from pyspark_nsqha.lake.store import Store
from pyspark_nsqha.options import ConnectOptions
from pyspark_nsqha.snapshot import Segments
from pyspark_nsqha.writing import replay, replay_state
from tests.integration.devnode import DevNode
from tests.integration.servers import wait_until
from tests.integration.test_spark_lake import Archived, Broker

pytest.importorskip("pyspark")
pytestmark = pytest.mark.timeout(300)
names = count(1)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("replay"), "--sync=interval")
    yield node
    assert node.stop() == 0


class Topic:
    """A topic of two partitions, and how a command is called."""

    def __init__(self, node: DevNode, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.node = node
        self.folder = folder
        self.name = f"orders{next(names)}"
        self.again = f"{self.name}-again"
        self._capsys = capsys
        self.admin("CreateTopic", topic=self.name, settings={"partitions": 2})

    def admin(self, rpc: str, **fields: Any) -> Any:
        with Admin(self.node.grpc, 10) as admin:
            return admin.call(rpc, **fields)

    def publish(self, first: int, end: int) -> list[bytes]:
        """Half of them into each partition: a connection keeps to one."""
        bodies = [b'{"n": %d, "state": "%s"}' % (n, b"ok" if n % 10 else b"failed") for n in range(first, end)]
        for at in range(2):
            publisher = V2Publisher(self.node.tcp, 20)
            publisher.publish(self.name, bodies[at::2])
            publisher.close()
        return bodies

    def stored(self, topic: str) -> list[Any]:
        with Admin(self.node.grpc, 10) as admin:
            return list(admin.stream("PeekMessages", topic=topic, start=True, count_max=10_000))

    def sent(self) -> Counter[bytes]:
        return Counter(message.body for message in self.stored(self.again))

    def verb(self, *words: str) -> int:
        """In this process, so that all tests share one Spark."""
        args = build_parser("spark").parse_args(["spark", *words])
        status: int = args.run(args)
        return status

    def json(self, *words: str, status: int = exits.OK) -> Any:
        self._capsys.readouterr()
        assert self.verb(*words, "--broker", self.node.grpc, "--json") == status, self._capsys.readouterr().err
        return json.loads(self._capsys.readouterr().out)

    def replay(self, *words: str, status: int = exits.OK) -> Any:
        if "--channel" not in words:
            words = ("--into", self.again, *words)
            words = words if "--nsqd" in words else ("--nsqd", self.node.tcp, *words)
        return self.json("replay", self.name, *words, status=status)


@pytest.fixture
def topic(node: DevNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Topic:
    return Topic(node, tmp_path, capsys)


# ---- replay


def test_a_plan_says_how_much_and_sends_nothing(topic: Topic) -> None:
    topic.publish(0, 500)
    told = topic.replay("--from", "start", "--plan")
    size = sum(part.bytes for part in topic.admin("DescribeTopic", topic=topic.name).topic.partitions)
    assert (told["messages"], told["done"], told["sent"]) == (500, False, 0)
    assert 0 < told["bytes"] <= size
    offsets = topic.replay("--offsets", "0:10-30", "--offsets", "1:0-5", "--plan")
    assert offsets["messages"] == 25
    assert topic.again not in [one.name for one in topic.admin("ListTopics").topics]


def test_a_range_is_published_once_and_what_comes_later_is_not(topic: Topic, spark: Any) -> None:
    before = topic.publish(0, 300)
    time.sleep(0.01)
    middle = time.time_ns()
    wanted = topic.publish(300, 1000)
    told = topic.replay("--from", f"@{middle}", "--yes")
    assert (told["sent"], told["possible_duplicates"], told["missing"], told["left"]) == (700, 0, 0, 0)
    assert topic.sent() == Counter(wanted)
    assert not set(before) & set(topic.sent())


def test_offsets_name_exactly_these_messages(topic: Topic, spark: Any) -> None:
    topic.publish(0, 100)
    wanted = [one.body for one in topic.stored(topic.name) if (one.partition, one.offset // 10) in ((0, 1), (1, 3))]
    assert len(wanted) == 20
    assert topic.replay("--offsets", "0:10-20", "--offsets", "1:30-40", "--yes")["sent"] == 20
    assert topic.sent() == Counter(wanted)


def test_a_query_sends_what_it_selects_without_pandas(
    topic: Topic, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # as after `pip install`: the extra does not bring it
    wanted = [body for body in topic.publish(0, 1000) if b"failed" in body]
    where = ("--where", "get_json_object(cast(value as string), '$.state') = 'failed'")
    plan = topic.replay(*where, "--plan")
    assert (plan["messages"], plan["bytes"]) == (100, sum(map(len, wanted)))
    told = topic.replay(*where, "--yes")
    assert (told["sent"], told["left"], told["failed"]) == (100, 0, [])
    assert topic.sent() == Counter(wanted)


def test_a_query_that_cannot_run_is_said_before_anything_is_sent(topic: Topic, spark: Any, capsys: Any) -> None:
    topic.publish(0, 10)
    with pytest.raises(SystemExit) as ended:
        topic.replay("--where", "no_such_column = 3", "--yes")
    assert ended.value.code == exits.USAGE
    said = capsys.readouterr().err
    assert "--where:" in said and "no_such_column" in said and len(said.splitlines()) == 1
    with pytest.raises(SystemExit):
        topic.replay("--where", "nothing(", "--yes")
    said = capsys.readouterr().err
    assert "--where: [PARSE_SYNTAX_ERROR]" in said and len(said.splitlines()) == 1


def test_a_list_of_ids_is_sent_and_nothing_between_them(topic: Topic, spark: Any) -> None:
    topic.publish(0, 1000)
    chosen = [one for one in topic.stored(topic.name) if one.offset % 7 == 3]
    file = topic.folder / "ids"
    file.write_text("".join(f"{one.message_id}\n" for one in chosen))
    assert topic.replay("--ids", str(file), "--plan")["messages"] == len(chosen)
    assert topic.replay("--ids", str(file), "--yes", "--rate", "100000")["sent"] == len(chosen)
    assert topic.sent() == Counter(one.body for one in chosen)


def test_an_id_of_another_topic_is_named(topic: Topic) -> None:
    topic.publish(0, 10)
    (topic.folder / "ids").write_text("00000000000000ff\n")
    with pytest.raises(exits.Exit, match="1 of the ids, such as 00000000000000ff, are not in the log"):
        topic.replay("--ids", str(topic.folder / "ids"), "--yes")


def test_a_run_that_dies_after_publishing_is_gone_on_from(
    topic: Topic, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: a wave is stored, and nothing says so."""
    bodies = topic.publish(0, 1000)
    words = ("--from", "start", "--rate", "30", "--state", str(topic.folder / "state"), "--yes")
    monkeypatch.setattr(replay, "WAVE_SECONDS", 1)
    end, waves = replay_state.ReplayState.end, count(1)

    def dies(self: Any, *args: Any, **fields: Any) -> None:
        if next(waves) == 3:
            raise KeyboardInterrupt
        end(self, *args, **fields)

    monkeypatch.setattr(replay_state.ReplayState, "end", dies)
    with pytest.raises(KeyboardInterrupt):
        topic.replay(*words)
    before = sum(topic.sent().values())
    assert 90 <= before < 200
    monkeypatch.setattr(replay_state.ReplayState, "end", end)
    with pytest.raises(exits.Exit, match=r"is of another replay \(--from start\)"):
        topic.replay("--from", "-2h", "--state", str(topic.folder / "state"), "--yes")
    # The rate is no part of what is sent: a later run may have another one.
    told = topic.replay(*words[:2], "--state", str(topic.folder / "state"), "--yes")
    sent = topic.sent()
    assert set(sent) == set(bodies)
    twice = sum(sent.values()) - 1000
    assert 0 < twice <= told["possible_duplicates"] < 100
    assert told["left"] == 0
    again = topic.replay(*words)
    assert (again["sent"], sum(topic.sent().values())) == (told["sent"], 1000 + twice)


def test_the_topic_itself_is_refused_unless_that_is_meant_and_then_it_ends(topic: Topic, spark: Any) -> None:
    bodies = topic.publish(0, 100)
    with pytest.raises(SystemExit):
        topic.replay("--from", "start", "--into", topic.name, "--yes")
    told = topic.replay("--from", "start", "--into", topic.name, "--allow-same", "--yes")
    assert told["sent"] == 100
    assert Counter(one.body for one in topic.stored(topic.name)) == Counter(bodies * 2)


def test_a_broker_that_refuses_is_told_in_one_line_and_left_is_counted(topic: Topic, spark: Any, node: DevNode) -> None:
    topic.publish(0, 10)
    told = topic.replay("--from", "start", "--nsqd", node.http, "--yes", status=exits.FAILED)
    assert (told["sent"], told["left"], told["done"]) == (0, 10, False)
    assert "does not speak the NSQ protocol" in told["failed"][0]


def test_nothing_is_held_when_it_has_ended(topic: Topic, spark: Any) -> None:
    topic.publish(0, 10)
    topic.replay("--from", "start", "--yes")
    found = topic.admin("DescribeTopic", topic=topic.name).topic
    assert not [hold for part in found.partitions for hold in part.holds]


def test_what_the_log_has_no_more_comes_from_the_lake(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Broker(tmp_path / "node") as broker:
        archived = Archived(spark, broker, tmp_path / "lake")
        archived.publish(2000)
        archived.archive()
        archived.keep_nothing()
        archived.publish(600)
        wait_until(archived.trimmed, "retention takes what is in the lake", 30)
        words = ["spark", "replay", archived.topic, "--from", "start", "--into", "again"]
        words += ["--lake", str(tmp_path / "lake"), "--broker", broker.grpc, "--nsqd", broker.tcp, "--json"]
        plan = build_parser("spark").parse_args([*words, "--plan"])
        assert plan.run(plan) == exits.OK
        told = json.loads(capsys.readouterr().out)
        assert told["messages"] == 2600 and told["bytes"] > 2600 * 400
        args = build_parser("spark").parse_args([*words, "--yes"])
        assert args.run(args) == exits.OK
        with Admin(broker.grpc, 10) as admin:
            stored = admin.stream("PeekMessages", topic="again", start=True, count_max=10_000)
            assert sorted(one.body for one in stored) == sorted(archived.bodies)


# ---- a channel


def test_a_channel_is_moved_back_to_where_the_range_begins(topic: Topic) -> None:
    topic.admin("CreateChannel", topic=topic.name, channel="billing")
    topic.publish(0, 100)
    topic.admin("EmptyChannel", topic=topic.name, channel="billing")
    words = ("--offsets", "0:10-", "--channel", "billing")
    plan = topic.replay(*words, "--plan")
    assert (plan["messages"], plan["done"]) == (40, False)
    assert topic.admin("DescribeChannel", topic=topic.name, channel="billing").channel.depth == 0
    done = topic.replay(*words, "--yes")
    assert (done["messages"], done["done"], [one["to_offset"] for one in done["partitions"]]) == (40, True, [10])
    assert topic.admin("DescribeChannel", topic=topic.name, channel="billing").channel.depth == 40


def test_a_channel_that_has_not_come_so_far_skips_nothing(topic: Topic, capsys: pytest.CaptureFixture[str]) -> None:
    topic.admin("CreateChannel", topic=topic.name, channel="billing")
    topic.publish(0, 100)
    told = topic.replay("--offsets", "0:10-", "--channel", "billing", "--yes")
    assert (told["messages"], told["partitions"]) == (0, [])
    assert topic.admin("DescribeChannel", topic=topic.name, channel="billing").channel.depth == 100


# ---- lag


def test_lag_is_what_is_committed_and_not_read(topic: Topic) -> None:
    topic.publish(0, 100)
    log = Segments(ConnectOptions((topic.node.grpc,)))
    log.commit_reader(topic.name, "spark", {0: 10, 1: 50}, back=True)
    topic.admin("CreateChannel", topic=topic.name, channel="consumers")
    [channel] = topic.json("lag", topic.name)["channels"]
    assert (channel["topic"], channel["channel"], channel["messages"]) == (topic.name, "spark", 40)
    floors = [(one["partition"], one["floor"], one["end"], one["messages"]) for one in channel["partitions"]]
    assert floors == [(0, 10, 50, 40), (1, 50, 50, 0)]
    plan = topic.admin("Seek", topic=topic.name, channel="spark", target={"end": True}, plan_only=True)
    assert channel["bytes"] == sum(one.bytes for one in plan.partitions) > 0
    assert channel["oldest_seconds"] > 0 and channel["partitions"][1]["oldest_seconds"] == 0


def test_a_lag_above_the_limit_fails(topic: Topic) -> None:
    topic.publish(0, 100)
    Segments(ConnectOptions((topic.node.grpc,))).commit_reader(topic.name, "spark", {0: 10, 1: 50}, back=True)
    assert topic.json("lag", topic.name, "--fail-above", "40")["above"] == []
    told = topic.json("lag", topic.name, "--fail-above", "39", status=exits.FAILED)
    assert told["above"] == [f"{topic.name}/spark"]
    assert topic.json("lag", topic.name, "--fail-above", "1h")["above"] == []
    assert topic.json("lag", topic.name, "--fail-above", "0ms", status=exits.FAILED)["above"]


def test_topics_are_named_matched_or_all_and_one_channel_may_be_asked_for(topic: Topic) -> None:
    topic.publish(0, 10)
    log = Segments(ConnectOptions((topic.node.grpc,)))
    for name in ("one", "two"):
        log.commit_reader(topic.name, name, {0: 0, 1: 0}, back=True)

    def shown(*words: str) -> list[str]:
        told = topic.json("lag", *words)
        return [one["channel"] for one in told["channels"] if one["topic"] == topic.name]

    assert shown() == shown(topic.name) == shown("--pattern", f"{topic.name}.*") == ["one", "two"]
    assert shown("--pattern", f"{topic.name}.+") == []
    assert shown(topic.name, "--channel", "two") == ["two"]
    with pytest.raises(exits.Exit, match="there is no topic nope"):
        topic.json("lag", "nope")


def test_a_lake_that_has_nothing_lacks_everything(topic: Topic) -> None:
    topic.publish(0, 10)
    with pytest.raises(exits.Exit, match="is not a lake: it has no manifest"):
        topic.json("lag", topic.name, "--lake", str(topic.folder))
    ManifestCommits(Store(str(topic.folder))).append(LakeState(), Addition(), run="run")
    [channel] = topic.json("lag", topic.name, "--lake", str(topic.folder))["channels"]
    assert (channel["channel"], channel["lake_messages"]) == ("", 10)
    told = topic.json("lag", topic.name, "--lake", str(topic.folder), "--fail-above", "9", status=exits.FAILED)
    assert told["above"] == [f"{topic.name}/"]
