"""What the cluster verbs show and refuse, from records alone; and the flags of daemons as verbs."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nsqha.cli import broker, build_parser, lookupd
from nsqha.cli.cluster import change, looking, rebuilding, show
from nsqha.cli.cluster.access import Picture, look
from nsqha.cli.cluster.change import cost
from nsqha.cli.cluster.import_topics import partition as imported_partition
from nsqha.cli.cluster.rebuilding import Look
from nsqha.cli.terminal import exits
from nsqha.commitlog.journal import CutIntent, PartitionRecord
from nsqha.election.elect import ReplicaReport
from nsqha.election.memory import MemoryStore
from nsqha.election.model import Controller, NodeInfo, PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.election.moves import Intents
from nsqha.election.observed.answers import Observed, ReplicaAnswer
from nsqha.election.placement import PartitionName
from nsqha.election.unclean import Unclean, elect_unclean
from nsqha.errors import LogCorrupt

A, B, C, GONE = 0xA, 0xB, 0xC, 0xD
NODES = {uid: NodeInfo(uid, f"node-{uid:x}", registration=10 + uid) for uid in (A, B, C)}
ORDERS = PartitionName("orders", 7, 0)


def picture(*metas: PartitionMeta, intents: Intents | None = None) -> Picture:
    settings = TopicSettings(partitions=max(1, len(metas)))
    topic = TopicRecord("orders", 7, 0, settings, partitions=dict(enumerate(metas)))
    none = Intents({}, frozenset())
    return Picture("c", 1, "e:1", 5, {"orders": topic}, NODES, intents or none, Controller("l", epoch=3))


def meta(isr: tuple[int, ...] = (A, B, C), *, leader: int = A, replicas: tuple[int, ...] = (A, B, C)) -> PartitionMeta:
    return PartitionMeta(leader, 4, {uid: 100 + uid for uid in isr}, replicas, 2, registration=10 + leader)


@pytest.mark.parametrize(
    ("record", "state"),
    [
        (meta(), show.OK),
        (meta((A, B)), show.UNDER),
        (meta((A,)), show.BELOW),
        (meta((A, GONE), replicas=(A, B, GONE)), show.BELOW),
        (meta((GONE, B), leader=GONE), show.LEADERLESS),
        (meta(leader=0), show.LEADERLESS),
    ],
)
def test_the_state_of_a_partition(record: PartitionMeta, state: str) -> None:
    assert show.state_of(record, NODES) == state


def test_a_cluster_is_well_when_everything_can_be_acknowledged() -> None:
    assert show.status(picture(meta(), meta((A, B))))["healthy"]
    assert not show.status(picture(meta(), meta((A,))))["healthy"]
    assert not show.status(replace(picture(meta()), controller=None))["healthy"]
    doubted = replace(picture(meta()), doubt="nodes wait for nsqha cluster accept-metadata: node-a")
    assert not show.status(doubted)["healthy"]


def test_what_is_rebuilt_has_its_time_left() -> None:
    found = picture(meta((A, B)), meta((A, GONE), replicas=(A, B, GONE)), meta((GONE,), leader=GONE), meta())
    under_way = rebuilding.rebuilds(found)
    assert [(one.name.number, one.node) for one in under_way] == [(0, C), (1, B)], "alive, with a leader that is alive"
    before = Look(10.0, {A: {(7, 0): 9000, (7, 1): 500}, C: {(7, 0): 1000}, B: {(7, 1): 100}})
    after = Look(12.0, {A: {(7, 0): 10000, (7, 1): 700}, C: {(7, 0): 4000}, B: {(7, 1): 300}})
    shown = rebuilding.measured(under_way, before, after, found)
    assert [(one["bytes_left"], one["bytes_per_second"], one["seconds_left"]) for one in shown] == [
        (6000, 1000, 6.0),
        (400, 0, None),
    ]
    lines = [rebuilding.line_of(one) for one in shown]
    assert lines == ["6.0 kB left at 1.0 kB/s, about 6 s", "400 B left, comes no nearer"]
    assert show.status(found, rebuilding=shown)["rebuilding"] == shown
    rows = {row["name"]: row["rebuilding"] for row in show.nodes(found, shown)}
    assert rows["node-c"] == {"replicas": 1, "bytes_left": 6000, "bytes_per_second": 1000, "seconds_left": 6.0}
    assert rows["node-a"] is None


def test_a_node_that_does_not_say_where_its_log_ends_has_no_time_left() -> None:
    found = picture(meta((A, B)))
    silent = Look(10.0, {A: {(7, 0): 9000}})
    [shown] = rebuilding.measured(rebuilding.rebuilds(found), silent, silent._replace(at=11.0), found)
    assert shown["bytes_left"] is shown["bytes_per_second"] is shown["seconds_left"] is None
    assert rebuilding.line_of(shown) == "not known how much is left"
    done = rebuilding.measured(rebuilding.rebuilds(found), silent, Look(11.0, {A: {(7, 0): 5}, C: {(7, 0): 5}}), found)
    assert done[0]["seconds_left"] == 0.0
    summed = rebuilding.by_node([shown, *done])["node-c"]
    assert (summed["replicas"], summed["bytes_left"], summed["seconds_left"]) == (2, None, None)


def observed(*answers: ReplicaAnswer, node: int = A) -> Observed:
    """What the leader of the partitions 0, 1, .. says of them."""
    return Observed({node: {(ORDERS.uid, number): answer for number, answer in enumerate(answers)}})


def test_the_cluster_is_looked_at_again_only_where_that_shows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """An election that ends within the second is no news."""
    leads, waits = ReplicaAnswer(4), ReplicaAnswer(4, waits_ms=2500)
    elected = replace(picture(meta()), observed=observed(leads))
    args = build_parser().parse_args(["cluster", "nodes"])
    monkeypatch.setattr(looking, "LOOK_SECONDS", 0.001)
    for first, looks in (
        (elected, 1),
        (replace(elected, observed=observed(ReplicaAnswer(3))), 2),
        (replace(elected, observed=observed(waits)), 2),
        (replace(elected, topics=picture(meta(leader=0)).topics), 2),
        (replace(elected, topics=picture(meta((A, B))).topics), 2),  # its third replica is rebuilt, and has a rate
        (replace(elected, topics=picture(meta((A, B), replicas=(A, B, GONE))).topics), 1),
    ):
        shown = iter([first, elected])
        monkeypatch.setattr(looking, "_look", lambda _, shown=shown: next(shown))
        assert looking.seen(args).picture is (first if looks == 1 else elected)
        assert len(list(shown)) == 2 - looks


def test_records_that_can_not_be_read_are_shown_and_refuse_a_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "etcd key /nsqha/c/topics/bad: this is not a TopicRecord"

    def topics() -> dict[str, Versioned[TopicRecord]]:
        raise LogCorrupt(why)

    store, args = MemoryStore(random.Random(1)), build_parser().parse_args(["cluster", "status"])
    store.records.create_topic("orders", TopicSettings())
    view = replace(store.watch.view(), unreadable={"topics/bad": why})
    monkeypatch.setattr(store.records, "topics", topics)
    monkeypatch.setattr(store.watch, "view", lambda: view)
    shown = show.status(look(store, args, forgiving=True))
    assert shown["unreadable"] == [why] and shown["partitions"] == 1 and not shown["healthy"]
    show.print_status(shown, "e:1")
    assert f"\nunreadable  {why}\n" in capsys.readouterr().out
    with pytest.raises(LogCorrupt, match="topics/bad"):
        look(store, args)


def test_a_node_that_is_away_is_shown_by_what_records_say() -> None:
    shown = picture(meta(replicas=(A, B, GONE)))
    assert shown.away == [GONE]
    rows = {row["name"]: row for row in show.nodes(shown)}
    assert rows[f"{GONE:016x}"]["state"] == "away"
    assert (rows["node-a"]["replicas"], rows["node-a"]["leaderships"], rows["node-c"]["replicas"]) == (1, 1, 0)


def test_nodes_are_named_by_name_or_uid() -> None:
    shown = picture(meta(replicas=(A, B, GONE)))
    assert shown.node("node-b") == shown.node(f"{B:016x}") == B
    assert shown.node(f"{GONE:016x}", alive=False) == GONE
    with pytest.raises(exits.Exit, match="away") as away:
        shown.node(f"{GONE:016x}")
    assert away.value.status == exits.UNREACHABLE
    known = f"alive are node-a, node-b, .*away: {GONE:016x}"
    with pytest.raises(exits.Exit, match=known) as unknown:
        shown.node("node-aa")
    assert unknown.value.status == exits.NOT_FOUND
    twins = replace(shown, nodes={**NODES, C: replace(NODES[C], name="node-b")})
    with pytest.raises(exits.Exit, match="several nodes"):
        twins.node("node-b")


def test_a_topic_with_several_partitions_needs_a_number() -> None:
    assert picture(meta()).partition("orders", None)[0] == ORDERS
    with pytest.raises(exits.Exit, match="orders/0 to orders/1"):
        picture(meta(), meta()).partition("orders", None)
    with pytest.raises(exits.Exit, match="no partition 5"):
        picture(meta()).partition("orders", 5)


def test_a_node_that_is_away_keeps_its_last_name() -> None:
    shown = picture(meta(replicas=(A, B, GONE)), intents=Intents({}, frozenset(), names={GONE: "node-d", A: "old"}))
    assert shown.name(GONE) == "node-d" and shown.name(A) == "node-a"
    assert shown.node("node-d", alive=False) == GONE
    with pytest.raises(exits.Exit, match="node-d is away") as away:
        shown.node("node-d")
    assert away.value.status == exits.UNREACHABLE
    assert show.status(shown)["away"] == ["node-d"]
    taken = replace(shown, intents=Intents({}, frozenset(), names={GONE: "node-b"}))
    assert taken.name(GONE) == f"{GONE:016x}", "another node has the name now"
    assert taken.node("node-b") == B
    assert show.status(shown)["replacements"] == [] and show.node_state(GONE, shown) == "away"
    assert show.node_state(GONE, taken) == f"away, replaced by {B:016x}"
    (filled,) = show.status(taken)["replacements"]
    assert filled == {"uid": f"{GONE:016x}", "by": "node-b", "left": 1, "rebuilt": 1}
    forgotten = replace(shown, intents=Intents({}, frozenset(), forgotten=frozenset({GONE})))
    assert show.node_state(GONE, forgotten) == "away, forgotten"


def test_a_node_that_has_not_joined_says_why() -> None:
    shown = picture(meta())
    joining = {**NODES, B: replace(NODES[B], joining="node-a does not reach it")}
    shown = replace(shown, nodes=joining)
    assert show.node_state(B, shown) == "joining: node-a does not reach it"
    assert show.node_state(A, shown) == show.OK


def test_a_node_that_was_emptied_and_is_gone_is_not_missed() -> None:
    """`nsqha check cluster` would warn of it for ever."""
    emptied = Intents({}, frozenset({GONE}), names={GONE: "node-d"})
    shown = picture(meta(), intents=emptied)
    assert show.status(shown)["away"] == [] and show.node_state(GONE, shown) == "away, decommissioned"
    assert shown.node("node-d", alive=False) == GONE, "its decommission can be taken back"
    not_yet = picture(meta(replicas=(A, B, GONE)), intents=emptied)
    assert show.status(not_yet)["away"] == ["node-d"] and show.node_state(GONE, not_yet) == "away"


def test_what_no_other_host_can_take_is_said_with_the_reason() -> None:
    emptied = Intents({}, frozenset({A}))
    stuck = show.decommission(A, picture(meta(), meta((A, B), replicas=(A, B)), intents=emptied))["stuck"]
    assert stuck == {"orders/0": "it has 3 replicas, and 2 other hosts can have them"}
    (line,) = [line for line in show.stuck_lines(stuck) if "orders/0" in line]
    assert line == "orders/0: it has 3 replicas, and 2 other hosts can have them"
    moving = Intents({ORDERS: (B, C)}, frozenset({A}))
    assert show.decommission(A, picture(meta(), intents=moving))["stuck"] == {}, "it is on its way"
    silent = picture(meta((GONE,), leader=GONE, replicas=(GONE, B)), intents=Intents({}, frozenset({GONE})))
    assert show.decommission(GONE, silent)["stuck"] == {"orders/0": "none of its in-sync replicas is alive"}


def test_replicas_that_no_node_was_found_for_are_shown() -> None:
    shown = picture(meta())
    topic = replace(shown.topics["orders"], settings=TopicSettings(replicas=5))
    wide = replace(shown, topics={"orders": topic})
    assert show.status(wide)["owed"] == {"orders/0": 2} and show.status(shown)["owed"] == {}
    assert [row["owed"] for row in show.partitions(wide)] == [2]
    brief = replace(topic, name="brief#ephemeral", partitions={0: meta((A,), replicas=(A,))})
    here = replace(shown, topics={"brief#ephemeral": brief}, intents=Intents({}, frozenset({A})))
    assert show.status(here)["owed"] == {}, "it has the one replica of its node"
    assert show.decommission(A, here) == {
        "node": "node-a", "replicas": 0, "leaderships": 0, "moving": 0, "stuck": {},
    }  # fmt: skip


def test_what_becomes_of_a_forgotten_node_is_shown_as_the_planner_does_it() -> None:
    def plan(record: PartitionMeta, *uids: int) -> list[str]:
        shown = replace(picture(record), nodes={uid: NODES[uid] for uid in uids})
        return [kind for kind, places in show.forgetting(GONE, shown).items() if places]

    record = meta((A, B, GONE), replicas=(A, B, GONE))
    assert plan(record, A, B, C) == ["rebuilt"]
    assert plan(record, A, B) == ["dropped"]
    assert plan(replace(record, isr={A: 1, GONE: 1}), A, B) == ["waiting"], "without it the ISR is below min_isr"
    assert plan(meta((GONE,), leader=GONE, replicas=(GONE,)), A, B, C) == ["only"]
    assert plan(meta((GONE, B), replicas=(A, B, GONE)), A, C) == ["only"], "A is not in sync"
    assert plan(meta(), A, B) == [], "it holds nothing"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["forget", "node-a", "--yes"], exits.NOT_ALLOWED, "node-a is alive"),
        (["forget", f"{GONE:016x}", "--yes"], exits.NOT_ALLOWED, "no other in-sync replica of orders/1 is alive"),
        (["decommission", "node-a"], exits.NOT_CONFIRMED, "add --yes"),
    ],
)
def test_a_change_that_may_cost_something_is_shown_and_not_made(
    words: list[str], status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = picture(meta((A, B, GONE), replicas=(A, B, GONE)), meta((GONE,), leader=GONE, replicas=(GONE,)))
    store = MemoryStore(random.Random(1))
    monkeypatch.setattr(change, "opened", lambda args: contextlib.nullcontext(store))
    monkeypatch.setattr(change, "look", lambda store, args: shown)
    monkeypatch.setattr(change, "_changes", lambda store: None)  # it is not asked for anything
    args = build_parser("cluster").parse_args(["cluster", *words, "--etcd-endpoint", "127.0.0.1:1"])
    with pytest.raises(exits.Exit, match=said) as refused:
        args.run(args)
    assert refused.value.status == status
    assert status != exits.NOT_CONFIRMED or "node-a has 1 replica, 1 leadership" in capsys.readouterr().err
    records = [intent.record for intent in store.intents.all().values()]
    refused_ones = [(f"cluster {words[0]}", f"node={words[1]}", "refused: NOT_ALLOWED")]
    expected = [] if status == exits.NOT_CONFIRMED else refused_ones
    assert [(record["method"], record["target"], record["outcome"]) for record in records] == expected


# ---- unclean election


def report(uid: int, end: int, epoch: int = 4, **more: bool) -> ReplicaReport:
    return replace(ReplicaReport(10 + uid, 100 + uid, epoch, end, promise=4), **more)  # type: ignore[arg-type]


def chosen(found: Unclean | str) -> Unclean:
    assert isinstance(found, Unclean)
    return found


def test_the_replica_with_most_is_elected_in_an_epoch_above_every_promise() -> None:
    reports = {B: replace(report(B, 50), promise=9), C: report(C, 60, 3)}
    found = chosen(elect_unclean(meta((GONE,), leader=GONE, replicas=(GONE, B, C)), reports, NODES))
    assert (found.meta.leader, found.meta.epoch, found.meta.registration) == (B, 10, 10 + B)
    assert found.meta.isr == {B: 100 + B}
    assert (found.unheard, found.lossless) == ((GONE,), False)


def test_a_member_of_the_isr_with_its_log_loses_nothing() -> None:
    record = meta((GONE, B), leader=GONE, replicas=(GONE, B, C))
    found = chosen(elect_unclean(record, {B: report(B, 50), C: report(C, 40)}, NODES))
    assert found.lossless
    assert "nothing that was acknowledged is lost" in cost(found, {B: report(B, 50)}, picture(record))[0]
    for flaw in ({"cut": True}, {"corrupt": True}):
        assert not chosen(elect_unclean(record, {B: report(B, 50, **flaw)}, NODES, wanted=B)).lossless
    renewed = {B: replace(report(B, 50), log_uid=1)}
    assert not chosen(elect_unclean(record, renewed, NODES)).lossless


def test_what_is_known_of_older_copies_is_said_and_a_loss_is_not_excluded() -> None:
    record = meta((A, B), leader=A, replicas=(A, B, C))
    reports = {A: replace(report(A, 50), log_uid=1, chain=0xAB), B: replace(report(B, 50), log_uid=2, chain=0xAB)}
    shown = picture(record)
    found = chosen(elect_unclean(record, reports, NODES, name=shown.name))
    assert not found.lossless
    text = "\n".join(cost(found, reports, shown))
    assert "acknowledged messages may be lost" in text and "are lost" not in text
    assert "node-a has the log up to entry 50 (epoch 4, chain 00000000000000ab)" in text
    assert "node-b ends with the same entry" in text
    closed = reports | {B: replace(report(B, 50), chain=0xAB, poisoned="EIO")}
    found = chosen(elect_unclean(record, closed, NODES, name=shown.name))
    assert found.meta.leader == A and found.lossless
    (line,) = cost(found, closed, shown)
    assert "the log of node-b, which has all of it, ends with the same entry: nothing that was" in line


def test_what_others_have_more_is_said() -> None:
    record = meta((GONE,), leader=GONE, replicas=(GONE, B, C))
    reports = {B: report(B, 50), C: report(C, 60)}
    found = chosen(elect_unclean(record, reports, NODES, wanted=B))
    assert found.ahead == {C: 60}
    text = "\n".join(cost(found, reports, picture(record)))
    assert "up to entry 50" in text
    assert "node-c has 60" in text
    assert f"{GONE:016x}" in text


def test_a_replica_with_damage_may_lead_if_named_and_its_gaps_are_shown() -> None:
    record = meta((A, B), replicas=(A, B, C))
    bad = replace(report(B, 50, corrupt=True), damage=((5, 7, 40, 52), (9, 10, 0, 0)), damaged_ranges=3)
    assert "name the one" in str(elect_unclean(record, {B: bad}, NODES))
    found = chosen(elect_unclean(record, {B: bad}, NODES, wanted=B))
    assert found.meta.damage_accepted == found.meta.epoch > record.epoch
    text = "\n".join(cost(found, {B: bad}, picture(record)))
    assert "node-b cannot read batches 5 to 6: messages at offsets 40 to 51" in text
    assert "batches 9 to 9\n" in text and "1 more" in text and "nsqha log skip" in text
    whole = chosen(elect_unclean(record, {B: report(B, 50)}, NODES, wanted=B))
    assert not whole.meta.damage_accepted and "cannot read" not in "\n".join(cost(whole, {B: report(B, 50)}, picture()))


def test_nobody_is_elected_who_can_not_lead() -> None:
    record = meta((A, B), replicas=(A, B, C))
    assert elect_unclean(record, {}, NODES) == "no replica that can lead has answered"
    leads = {A: report(A, 5, leading=True)}
    assert elect_unclean(record, leads, NODES) == "its leader is alive and leads"
    for bad in (
        replace(report(B, 5), poisoned="disk"),
        replace(report(B, 5), registration=1),
        report(B, 5, corrupt=True),
    ):
        assert isinstance(elect_unclean(record, {B: bad}, NODES), str)
    assert isinstance(elect_unclean(record, {B: report(B, 5)}, NODES, wanted=C), str)


# ---- import


def test_an_imported_partition_begins_above_every_promise_with_its_own_log() -> None:
    before = PartitionMeta(5, 4, {5: 77}, (5,), 1, sync="interval", registration=9, version=3)
    assert imported_partition(before, 5, PartitionRecord(promise=6, log_uid=88), "orders/0") == PartitionMeta(
        0, 7, {5: 88}, (5,), 1, sync="interval"
    )
    assert imported_partition(before, 5, PartitionRecord(promise=2, log_uid=88), "orders/0").epoch == 5


@pytest.mark.parametrize(
    "record",
    [
        None,
        PartitionRecord(promise=4),
        PartitionRecord(promise=4, log_uid=8, log_uid_trusted=False),
        PartitionRecord(promise=4, log_uid=8, cut=CutIntent(1, 2, 3, 4, 5)),
    ],
)
def test_a_log_in_doubt_is_not_imported(record: PartitionRecord | None) -> None:
    with pytest.raises(exits.Exit, match="start the node once without etcd"):
        imported_partition(PartitionMeta(), 5, record, "orders/0")


# ---- daemons as verbs


def test_a_daemon_gets_the_words_that_were_given() -> None:
    words = [
        "broker",
        "--etcd-endpoint",
        "a:1",
        "--etcd-endpoint=b:2",
        "--deflate=false",
        "--snappy",
        "--retention-bytes",
        "-1",
    ]
    args = build_parser("broker").parse_args(words)
    assert args.given == [
        "--etcd-endpoint=a:1",
        "--etcd-endpoint=b:2",
        "--deflate=false",
        "--snappy=true",
        "--retention-bytes=-1",
    ]


@pytest.mark.parametrize("verb", ["broker", "lookupd"])
def test_every_flag_of_a_daemon_is_a_flag_of_its_verb(verb: str) -> None:
    from nsqha.options import LookupdOptions, Options, flags_of

    table = flags_of(Options if verb == "broker" else LookupdOptions)
    flags = set(build_parser(verb).verbs()[verb].flags())
    missing = {flag.name for flag in table if f"--{flag.name}" not in flags}
    assert missing == {"version", "verbose", "worker-id"} & {flag.name for flag in table}


def test_every_flag_of_a_cluster_is_in_its_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()
    flags = {*broker.GROUPS["cluster"], *lookupd.GROUPS["cluster"]}
    assert not [flag for flag in sorted(flags) if f"`--{flag}`" not in page]


def test_a_wrong_flag_of_a_daemon_has_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        build_parser("broker").parse_args(["broker", "--etcd-endpont", "x"])
    assert refused.value.code == exits.USAGE
    assert "did you mean --etcd-endpoint?" in capsys.readouterr().err


def test_a_verb_imports_what_it_needs() -> None:
    """Each line is a process that people and monitoring start all the time."""
    parse = "from nsqha.cli import build_parser; build_parser('cluster').parse_args(['cluster', 'status'])"
    show = "import nsqha.cli.cluster.show, nsqha.election.etcd.access"
    for code, without in (
        (parse, {"nsqha.election.model", "grpc", "msgspec"}),
        (
            show,
            {"aiohttp", "uvloop", "tenacity", "lookupd"}
            | {"nsqha.election.controller.events", "nsqha.server.node.broker"},
        ),
    ):
        check = f"import sys\n{code}\nassert not sys.modules.keys() & {without!r}, sys.modules.keys() & {without!r}"
        subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
