"""Stories of a controller over simulated nodes: what happens, and how long it may take in simulated time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from nsqha.election.controller import elections
from nsqha.election.controller.controller import ControllerMachine
from nsqha.election.controller.events import (
    Action,
    Answered,
    Blamed,
    Metadata,
    NotAnswered,
    Probe,
    PutDone,
    PutPartition,
    ReadTopic,
    Say,
    Suspect,
    Tick,
    TopicRead,
    Unheard,
)
from nsqha.election.controller.planner import PlanLimits
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.elect import Ballot, Elected, ReplicaReport, Wait
from nsqha.election.model import JUST_REGISTERED, TRIED_SECONDS, NodeInfo, PartitionMeta, TopicRecord, Versioned
from nsqha.election.moves import BALANCE, decommission_name, move_intent, move_name, read_intents
from nsqha.election.placement import Move, PartitionName
from tests.unit.election.cluster_rig import Cluster

QUICK = ControllerLimits(plan=PlanLimits(settle_s=1.0, replace_after_s=20.0, emergency_after_s=10.0))


def cluster(seed: int = 1, *, nodes: int = 3, **settings: int) -> Cluster:
    found = Cluster(seed, nodes=nodes, limits=QUICK)
    found.create("t", **settings)
    found.run(1.0)
    return found


def test_a_new_topic_is_placed_and_led_and_its_replicas_join() -> None:
    c = cluster(partitions=3)
    metas = [c.meta("t", n) for n in range(3)]
    assert all(sorted(meta.replicas) == [1, 2, 3] and set(meta.isr) == {1, 2, 3} for meta in metas)
    assert sorted(meta.leader for meta in metas) == [1, 2, 3]
    assert all(meta.min_isr == 2 for meta in metas)


def test_a_killed_leader_is_replaced_in_far_less_than_its_lease() -> None:
    c = cluster()
    before = c.meta("t")
    c.kill(before.leader)
    c.run(0.1)
    after = c.meta("t")
    assert after.leader not in (0, before.leader) and after.epoch > before.epoch
    assert before.leader not in after.isr
    (told,) = c.events("leader_elected")[-1:]
    assert told["why"] == "leader does not answer"
    assert isinstance(told["seconds"], float) and 0 < told["seconds"] < 0.1


def test_a_leader_that_still_answers_keeps_its_epoch() -> None:
    c = cluster()
    before = c.meta("t")
    c.feed(Suspect(before.leader, "stream ended"))
    c.run(1.0)
    assert c.meta("t").epoch == before.epoch
    assert not c.machine.state.rounds


def test_a_silent_host_is_replaced_after_the_doubt() -> None:
    c = cluster()
    before = c.meta("t")
    c.nodes[before.leader].silent = True
    c.feed(Suspect(before.leader, "blamed"))
    c.run(0.2)
    assert c.meta("t").leader != before.leader


def test_without_any_news_the_lease_is_the_backstop() -> None:
    c = cluster()
    before = c.meta("t")
    c.kill(before.leader, heard=False)
    c.run(1.0)
    assert c.meta("t").leader == before.leader
    c.run(3.0)
    assert c.meta("t").leader != before.leader


def test_leaderships_come_back_to_the_first_replica() -> None:
    c = cluster()
    first = c.meta("t").replicas[0]
    assert c.meta("t").leader == first
    c.kill(first)
    c.run(4.0)
    c.restart(first)
    c.run(10.0)
    meta = c.meta("t")
    assert meta.leader == first and set(meta.isr) == {1, 2, 3}
    assert c.events("leader_elected")[-1]["why"] == "transfer"


def test_a_node_that_dies_again_and_again_does_not_get_the_lead_each_time() -> None:
    c = cluster()
    before = c.meta("t")
    for _ in range(5):
        c.kill(before.leader)
        c.run(4.0)
        c.restart(before.leader)
        c.run(8.0)
    assert c.meta("t").leader != before.leader
    assert c.meta("t").epoch == before.epoch + 3, "replaced, given back once, replaced"
    c.run(61.0)
    assert c.meta("t").leader == before.leader


def test_a_move_does_not_wait_for_a_node_that_may_not_have_the_lead_yet() -> None:
    """As its first replica lost the lead twice, it would get it back only after a minute; the next one can have it."""
    c = cluster(nodes=4)
    (name,) = c.parts()
    first = c.meta("t").leader
    for _ in range(3):
        c.kill(first)
        c.run(4.0)
        c.restart(first)
        c.run(8.0)
    before = c.meta("t")
    assert before.leader != first and first in before.isr
    (third,) = set(before.replicas) - {first, before.leader}
    (new,) = {1, 2, 3, 4} - set(before.replicas)
    c.store.intents.put(move_name(name), move_intent(Move(name, (first, third, new)), "operator"))
    c.run(15.0)
    assert c.meta("t").leader in (third, new) and c.meta("t").replicas == (first, third, new)


def test_a_node_that_leaves_and_does_not_hand_over_by_itself_is_relieved() -> None:
    c = cluster()
    before = c.meta("t")
    node = c.nodes[before.leader]
    node.info = node.session.update(replace(node.info, leaving=True))
    c.run(0.9 * QUICK.handover_s)
    assert c.meta("t") == before  # it knows best when the next leader lacks nothing
    c.run(1.0)
    after = c.meta("t")
    assert after.leader != before.leader and after.isr == before.isr and after.successor == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_decommissioned_node_is_emptied(seed: int) -> None:
    c = cluster(seed, nodes=4, partitions=6)
    c.store.intents.put(decommission_name(2), {"node": 2})
    c.run(60.0)
    metas = c.parts()
    assert all(2 not in meta.replicas and 2 not in meta.isr for meta in metas.values())
    assert all(len(meta.replicas) == 3 and c.healthy(name, meta) for name, meta in metas.items())
    assert not [name for name in c.store.intents.all() if name.startswith("moves/")]


@pytest.mark.parametrize("dies", [True, False])
def test_a_move_to_a_node_that_is_decommissioned_goes_elsewhere_at_once(dies: bool) -> None:
    """Nobody waits `replace_after` for a node that an operator has given up."""
    c = cluster(nodes=4)
    before = c.meta("t")
    (target,) = {1, 2, 3, 4} - set(before.replicas)
    (name,) = c.parts()
    wanted = (before.leader, target, next(uid for uid in before.replicas if uid != before.leader))
    if dies:
        c.kill(target)
    c.store.intents.put(move_name(name), move_intent(Move(name, wanted), "operator"))
    c.store.intents.put(decommission_name(target), {"node": target})
    c.run(QUICK.plan.replace_after_s / 2)
    after = c.meta("t")
    assert sorted(after.replicas) == sorted(before.replicas) == sorted(after.isr)
    assert not [each for each in c.store.intents.all() if each.startswith("moves/")]


def test_the_name_of_a_node_is_kept_while_it_is_away_and_holds_something() -> None:
    c = cluster(nodes=4)
    gone = c.meta("t").replicas[1]
    holders = set(c.meta("t").replicas)

    def names() -> dict[int, str]:
        return dict(read_intents({name: found.record for name, found in c.store.intents.all().items()}).names)

    assert names() == {uid: c.nodes[uid].info.name for uid in holders}, "of nodes that hold something"
    node = c.nodes[gone]
    node.info = node.session.update(replace(node.info, name="renamed"))
    c.run(3.0)
    assert names()[gone] == "renamed"
    c.kill(gone)
    c.run(10.0)
    assert names()[gone] == "renamed"
    c.run(50.0)
    assert gone not in c.meta("t").replicas and gone not in names()


def test_a_node_that_stays_away_is_replaced() -> None:
    c = cluster(nodes=4)
    gone = c.meta("t").replicas[1]
    c.kill(gone)
    c.run(60.0)
    meta = c.meta("t")
    assert gone not in meta.replicas and len(meta.replicas) == 3 and set(meta.isr) == set(meta.replicas)


def test_a_topic_of_a_small_cluster_grows_with_it() -> None:
    c = Cluster(1, nodes=3, limits=QUICK)
    for uid in (2, 3):
        c.kill(uid)
    c.run(5.0)
    c.create("t")
    c.run(1.0)
    assert c.meta("t").replicas == (1,) and c.meta("t").min_isr == 1
    c.restart(2)
    c.restart(3)
    c.run(20.0)
    assert set(c.meta("t").isr) == {1, 2, 3} and c.meta("t").min_isr == 2


def test_a_record_that_is_missing_ends_the_work_and_nothing_else() -> None:
    c = cluster()
    c.store.records.delete_topic("t")
    c.run(1.0)
    assert not c.machine.state.parts and not c.machine.state.rounds


def test_ephemeral_topics_are_their_nodes_business() -> None:
    c = Cluster(1, nodes=3, limits=QUICK)
    c.create("t#ephemeral")
    c.run(3.0)
    assert c.meta("t#ephemeral").replicas == () and not c.puts


def test_another_controller_goes_on_with_a_transfer() -> None:
    c = cluster()
    meta = c.meta("t")
    target = meta.replicas[1]
    name = next(iter(c.parts()))
    c.store.records.replace_partition("t", name.uid, 0, replace(meta, successor=target))
    c.new_controller()
    c.run(0.5)
    assert c.meta("t").leader == target


# ---- events one by one


def machine(c: Cluster) -> tuple[ControllerMachine, PartitionName, PartitionMeta]:
    """A machine of its own, that has seen the records and nothing else."""
    found = ControllerMachine(c.now, QUICK)
    found.step(metadata(c), c.now)
    (name,) = c.parts()
    return found, name, c.meta("t")


def metadata(c: Cluster) -> Metadata:
    view = c.store.watch.view()
    return Metadata(view.topics, view.nodes, c.store.intents.all())


def probes(actions: list[Action]) -> dict[int, Probe]:
    return {action.node: action for action in actions if isinstance(action, Probe)}


def puts(actions: list[Action]) -> list[PutPartition]:
    return [action for action in actions if isinstance(action, PutPartition)]


def answer(c: Cluster, probe: Probe, **changes: int | bool) -> Answered:
    info = c.nodes[probe.node].info
    found = {}
    for key in probe.keys:
        log = c.nodes[probe.node].logs[key]
        entries = len(log.entries)
        report = ReplicaReport(
            info.registration, log.log_uid, log.entries[-1], entries, log.promise, leading=log.leading > 0
        )
        found[key] = replace(report, **changes)  # type: ignore[arg-type]
    return Answered(probe.number, probe.node, info.registration, found)


def test_the_rest_of_the_isr_is_asked_together_with_the_suspected_leader() -> None:
    c = cluster()
    m, _, meta = machine(c)
    asked = probes(m.step(Suspect(meta.leader, "reset"), c.now))
    assert set(asked) == {1, 2, 3} and all(probe.timeout_s == QUICK.doubt_s for probe in asked.values())
    others = [uid for uid in asked if uid != meta.leader]
    for uid in others:
        assert not puts(m.step(answer(c, asked[uid]), c.now + 0.01))
    (put,) = puts(m.step(NotAnswered(asked[meta.leader].number, meta.leader, "refused"), c.now + 0.02))
    assert put.meta.leader in others and put.registered == {put.meta.leader: put.meta.registration}


def test_who_was_asked_with_the_suspected_leader_is_not_asked_twice() -> None:
    c = cluster()
    m, _, meta = machine(c)
    asked = probes(m.step(Suspect(meta.leader, "reset"), c.now))
    again = m.step(NotAnswered(asked[meta.leader].number, meta.leader, "refused"), c.now + 0.01)
    assert not probes(again)
    first, second = [uid for uid in asked if uid != meta.leader]
    assert not puts(m.step(answer(c, asked[first]), c.now + 0.02)), "the other one may have more"
    assert puts(m.step(answer(c, asked[second]), c.now + 0.03))


def test_an_answer_to_an_older_question_elects_nobody() -> None:
    c = cluster()
    m, name, meta = machine(c)
    other = next(uid for uid in meta.replicas if uid != meta.leader)
    before = probes(m.step(Suspect(meta.leader, "reset"), c.now))
    m.step(answer(c, before[meta.leader]), c.now + 0.01)  # the leader is fine, and only then dies
    m.step(Suspect(meta.leader, "reset"), c.now + 0.02)
    m.step(answer(c, before[other]), c.now + 0.03)
    assert not m.state.rounds[name].reports


def test_an_older_record_that_arrives_late_changes_nothing() -> None:
    c = cluster()
    m, name, meta = machine(c)
    old = c.store.records.topic("t")
    assert old is not None
    c.store.records.replace_partition("t", name.uid, 0, replace(meta, epoch=meta.epoch + 1, leader=2))
    m.step(metadata(c), c.now)
    m.step(TopicRead("t", old), c.now)
    assert m.state.parts[name].meta.epoch == meta.epoch + 1


def test_a_change_that_was_refused_is_followed_by_a_read_and_another_try() -> None:
    c = cluster()
    m, name, meta = machine(c)
    asked = probes(m.step(Suspect(meta.leader, "reset"), c.now))
    for uid in set(asked) - {meta.leader}:
        m.step(answer(c, asked[uid]), c.now + 0.01)
    (put,) = puts(m.step(NotAnswered(asked[meta.leader].number, meta.leader, "refused"), c.now + 0.02))
    assert not puts(m.step(Tick(), c.now + 0.03)), "one at a time"
    actions = m.step(PutDone(name, "refused"), c.now + 0.04)
    assert ReadTopic("t") in actions and not puts(actions)
    newer = c.store.records.replace_partition("t", name.uid, 0, meta)
    (again,) = puts(m.step(TopicRead("t", c.store.records.topic("t")), c.now + 0.05))
    assert again.meta.version == newer.version != put.meta.version


def test_a_leader_that_restarted_gets_a_new_epoch_at_once() -> None:
    c = cluster()
    before = c.meta("t")
    node = c.nodes[before.leader]
    for log in node.logs.values():
        log.leading = 0
    node.session.close()
    c.start(before.leader)
    c.run(0.3)
    after = c.meta("t")
    assert after.epoch > before.epoch and c.events("leader_elected")[-1]["why"] in (
        "leader restarted",
        "leader is gone",
    )


def test_a_leader_whose_own_answer_is_of_another_life_is_replaced() -> None:
    c = cluster()
    m, name, meta = machine(c)
    asked = probes(m.step(Suspect(meta.leader, "reset"), c.now))
    told = replace(answer(c, asked[meta.leader]), registration=meta.registration + 100)
    m.step(told, c.now + 0.01)
    assert m.state.rounds[name].kind == "elect" and m.state.rounds[name].why == "leader restarted"


def test_a_leader_that_its_followers_lost_is_replaced_though_it_answers() -> None:
    c = cluster()
    before = c.meta("t")
    for uid in before.isr:
        if uid != before.leader:
            c.feed(Blamed(uid, frozenset({before.leader})))
    c.run(1.5)
    assert c.meta("t").epoch == before.epoch, "it may come back"
    c.run(1.5)
    assert c.meta("t").leader != before.leader
    assert c.events("leader_elected")[-1]["why"] == "leader is cut off from its followers"


def test_a_leader_that_was_cut_off_can_lead_again_once_it_has_restarted() -> None:
    """Nobody else can here."""
    c = cluster()
    before = c.meta("t")
    for uid in before.isr:
        if uid != before.leader:
            c.feed(Blamed(uid, frozenset({before.leader})))
            c.nodes[uid].silent = True
    c.run(3.0)
    assert [r.why for r in c.machine.state.rounds.values()] == ["leader is cut off from its followers"]
    assert c.meta("t").epoch == before.epoch, "nor can it as long as it is cut off"
    c.nodes[before.leader].session.close()
    c.start(before.leader)
    c.run(1.0)
    after = c.meta("t")
    assert after.epoch > before.epoch and after.leader == before.leader


def test_one_follower_that_lost_its_leader_is_not_enough() -> None:
    c = cluster()
    before = c.meta("t")
    c.feed(Blamed(next(uid for uid in before.isr if uid != before.leader), frozenset({before.leader})))
    c.run(5.0)
    assert c.meta("t").epoch == before.epoch


def test_a_leader_that_gave_its_epoch_up_is_found_by_the_audit() -> None:
    c = cluster()
    before = c.meta("t")
    (log,) = c.nodes[before.leader].logs.values()
    log.leading = 0
    c.run(10.0)
    after = c.meta("t")
    assert after.epoch > before.epoch and c.healthy(next(iter(c.parts())), after)
    assert c.events("leader_elected")[-1]["why"] == "leader does not lead"


@pytest.mark.parametrize(("earlier", "kind"), [(1, None), (0, "elect")])
def test_a_leader_that_says_that_it_could_not_lead_is_asked_no_more(earlier: int, kind: str | None) -> None:
    """What it says of an epoch before does not count: it may not have begun with this one yet."""
    c = cluster()
    m, name, meta = machine(c)
    asked = probes(m.step(Tick(), c.now + QUICK.audit_s))
    told = answer(c, asked[meta.leader], leading=False, promise=0)
    ((key, report),) = told.reports.items()
    declined = replace(report, declined_epoch=meta.epoch - earlier, declines="its log is damaged")
    m.step(replace(told, reports={key: declined}), c.now + QUICK.audit_s + 0.01)
    assert (m.state.rounds[name].kind if name in m.state.rounds else None) == kind
    assert m.state.last(name, c.now) == {meta.leader}


def test_a_node_that_did_not_lead_gets_the_lead_back_only_after_a_pause() -> None:
    c = cluster()
    before = c.meta("t")
    (log,) = c.nodes[before.leader].logs.values()
    log.leading = 0
    while c.meta("t").leader == before.leader:
        c.run(0.1)
    c.run(9.0)
    assert c.meta("t").leader != before.leader, "the first replica of the list, and fit otherwise"
    c.run(10.0)
    assert c.meta("t").leader == before.leader


def test_a_leader_that_only_the_controller_has_lost_keeps_its_epoch() -> None:
    c = cluster()
    m, name, meta = machine(c)
    asked = probes(m.step(Suspect(meta.leader, "reset"), c.now))
    m.step(NotAnswered(asked[meta.leader].number, meta.leader, "time-out"), c.now + 0.01)
    others = [uid for uid in asked if uid != meta.leader]
    for uid in others:
        assert not puts(m.step(answer(c, asked[uid], led_by=meta.leader), c.now + 0.02))
    assert m.state.rounds[name].kind == "watch"
    m.step(Blamed(others[0], frozenset({meta.leader})), c.now + 0.03)
    assert m.state.rounds[name].kind == "watch", "one that hears it is enough for min_isr"
    m.step(Blamed(others[1], frozenset({meta.leader})), c.now + 0.04)
    assert m.state.rounds[name].kind == "elect"


# ---- leaders that are silent, on streams that are open


def frozen(**settings: int) -> tuple[Cluster, PartitionMeta, list[int]]:
    """A cluster whose leader has just stopped, that, and the other members of its ISR."""
    c = cluster(**settings)
    meta = c.meta("t")
    c.nodes[meta.leader].silent = True
    return c, meta, [uid for uid in meta.isr if uid != meta.leader]


def unheard(c: Cluster, leader: int, *followers: int) -> None:
    for uid in followers:
        c.feed(Blamed(uid, frozenset(), frozenset({leader})))


def test_a_leader_that_nobody_hears_is_replaced_long_before_its_lease_ends() -> None:
    c, before, followers = frozen()
    unheard(c, before.leader, *followers)
    c.feed(Unheard(before.leader))
    c.run(0.2)
    after = c.meta("t")
    assert after.leader in followers and after.epoch == before.epoch + 1 and before.leader not in after.isr
    assert before.leader in c.store.records.nodes()


def test_it_is_replaced_as_soon_as_the_last_witness_speaks() -> None:
    c, before, followers = frozen()
    c.feed(Unheard(before.leader))
    unheard(c, before.leader, followers[0])
    c.run(1.0)
    assert c.meta("t").epoch == before.epoch, "it could commit with the other one"
    unheard(c, before.leader, followers[1])
    c.run(0.1)
    assert c.meta("t").leader in followers


def test_a_controller_that_hears_nothing_is_not_enough() -> None:
    """Also if followers that may hear the leader are too slow to say so."""
    c, before, followers = frozen()
    for uid in followers:
        c.nodes[uid].silent = True
    c.feed(Unheard(before.leader))
    c.run(0.3)
    c.nodes[followers[0]].silent = False
    c.run(2.0)
    assert c.meta("t").epoch == before.epoch


def test_followers_are_not_enough_while_the_controller_hears_it() -> None:
    c = cluster()
    before = c.meta("t")
    unheard(c, before.leader, *(uid for uid in before.isr if uid != before.leader))
    c.run(1.9)
    assert c.meta("t").epoch == before.epoch


def test_a_leader_that_answers_after_all_keeps_its_epoch() -> None:
    c = cluster()
    before = c.meta("t")
    unheard(c, before.leader, *(uid for uid in before.isr if uid != before.leader))
    c.feed(Unheard(before.leader))
    c.run(1.0)
    assert c.meta("t").epoch == before.epoch


def test_a_witness_that_hears_it_again_counts_no_more() -> None:
    c, before, followers = frozen()
    unheard(c, before.leader, *followers)
    c.feed(Blamed(followers[0], frozenset(), frozenset()))
    c.feed(Unheard(before.leader))
    c.run(1.0)
    assert c.meta("t").epoch == before.epoch


def test_a_witness_that_the_controller_does_not_hear_counts_not() -> None:
    c, before, followers = frozen()
    c.nodes[followers[0]].silent = True
    c.feed(Unheard(followers[0]))
    c.run(0.2)
    unheard(c, before.leader, *followers)
    c.feed(Unheard(before.leader))
    c.run(1.0)
    assert c.meta("t").epoch == before.epoch


def test_nobody_is_elected_who_could_not_commit_either() -> None:
    c, before, followers = frozen(replicas=2)
    assert before.min_isr == 2 and len(before.isr) == 2
    unheard(c, before.leader, *followers)
    c.feed(Unheard(before.leader))
    c.run(1.0)
    assert c.meta("t").epoch == before.epoch


def test_once_the_stream_has_ended_silence_is_judged_as_ever() -> None:
    c, before, _ = frozen()
    c.feed(Unheard(before.leader))
    c.run(0.3)
    assert c.meta("t").epoch == before.epoch
    c.feed(Suspect(before.leader, "it does not answer a ping"))
    c.run(1.0)
    assert c.meta("t").leader != before.leader


def test_a_leader_that_stops_again_and_again_loses_the_lead_ever_more_rarely() -> None:
    """For 1.2 s every 10 s, five minutes long; whoever leads meanwhile is well."""
    c = cluster()
    first, epoch = c.meta("t").leader, c.meta("t").epoch
    for _ in range(30):
        before = c.meta("t")
        if before.leader == first:
            c.nodes[first].silent = True
            unheard(c, first, *(uid for uid in before.isr if uid != first))
            c.feed(Unheard(first))
            c.run(1.2)
            c.nodes[first].silent = False
            unheard(c, 0, *(uid for uid in c.nodes))
            c.run(8.8)
        else:
            c.run(10.0)
    assert c.meta("t").epoch - epoch <= 7, "lost four times, and given back after some seconds, 60 s and 120 s"


def test_a_transfer_waits_until_the_successor_has_everything() -> None:
    c = cluster()
    name = next(iter(c.parts()))
    meta = c.meta("t")
    target = meta.replicas[1]
    c.store.records.replace_partition("t", name.uid, 0, replace(meta, successor=target))
    meta = c.meta("t")
    m = ControllerMachine(c.now, QUICK)
    assert not probes(m.step(metadata(c), c.now))
    now = c.now + QUICK.handover_s  # the leader had its time to do it itself
    asked = probes(m.step(Tick(), now))
    m.step(answer(c, asked[meta.leader]), now + 0.01)
    assert not puts(m.step(answer(c, asked[target], end=0), now + 0.01))
    asked = probes(m.step(Tick(), now + 0.05))
    m.step(answer(c, asked[meta.leader]), now + 0.06)
    (put,) = puts(m.step(answer(c, asked[target]), now + 0.06))
    assert put.meta == replace(
        meta, leader=target, epoch=meta.epoch + 1, successor=0, registration=c.nodes[target].info.registration
    )


def test_a_leader_that_hands_over_by_itself_is_an_election_to_tell_of() -> None:
    c = cluster()
    name = next(iter(c.parts()))
    meta = c.meta("t")
    m = ControllerMachine(c.now, QUICK)
    m.step(metadata(c), c.now)
    target = meta.replicas[1]
    registration = c.nodes[target].info.registration
    new = replace(meta, leader=target, epoch=meta.epoch + 1, registration=registration)
    c.store.records.replace_partition("t", name.uid, 0, new)
    said = [action for action in m.step(metadata(c), c.now) if isinstance(action, Say)]
    assert [(say.event, say.fields["why"], say.fields["epoch"]) for say in said] == [
        ("leader_elected", "handed over", meta.epoch + 1)
    ]


def test_a_transfer_that_takes_too_long_is_given_up() -> None:
    c = cluster()
    name = next(iter(c.parts()))
    before = c.meta("t")
    c.nodes[before.replicas[1]].silent = True
    c.store.records.replace_partition("t", name.uid, 0, replace(before, successor=before.replicas[1]))
    c.run(5.0)
    after = c.meta("t")
    assert after.successor == 0 and after.epoch == before.epoch and c.events("transfer_given_up")


def test_a_single_replica_waits_for_its_node_however_long_that_is_away() -> None:
    c = cluster(replicas=1)
    before = c.meta("t")
    (only,) = before.replicas
    c.kill(only)
    c.run(QUICK.plan.emergency_after_s + QUICK.plan.replace_after_s + 10.0)
    assert c.meta("t").replicas == (only,), "no other node has anything to copy"
    assert not [name for name in c.store.intents.all() if name.startswith("moves/")]
    c.restart(only)
    c.run(10.0)
    after = c.meta("t")
    assert (after.leader, after.replicas, set(after.isr)) == (only, (only,), {only}) and after.epoch > before.epoch


def test_what_only_an_operator_can_decide_names_the_command() -> None:
    machine = ControllerMachine(0.0, QUICK)
    nodes = {uid: NodeInfo(uid, registration=uid * 10) for uid in (1, 2)}
    meta = PartitionMeta(leader=3, registration=30, isr={1: 7}, replicas=(1, 2), version=4)
    found = machine.step(Metadata({"t": Versioned(TopicRecord("t", 5, 1, partitions={0: meta}), 4)}, nodes, {}), 0.0)
    said: list[Say] = []
    for at in range(20):
        for probe in probes(found).values():
            report = {(5, 0): ReplicaReport(10, 7, 1, 3, corrupt=True)} if probe.node == 1 else {}
            found = machine.step(Answered(probe.number, probe.node, probe.node * 10, report), at * 0.25)
            said += [action for action in found if isinstance(action, Say) and action.event == "operator_needed"]
        found = machine.step(Tick(), (at + 1) * 0.25)
    (one,) = said
    assert one.text.endswith("repair one; `nsqha cluster elect t/0 --unclean` shows what each replica has")


def test_balance_can_be_paused() -> None:
    c = cluster()
    first = c.meta("t").replicas[0]
    c.store.intents.put(BALANCE, {"paused": True})
    c.kill(first)
    c.run(4.0)
    c.restart(first)
    c.run(10.0)
    assert c.meta("t").leader != first


@pytest.mark.parametrize(("window", "goes_back"), [("01:00-05:00", False), ("00:00-05:00", True)])
def test_leaderships_go_back_in_the_hours_that_are_allowed(window: str, goes_back: bool) -> None:
    c = cluster()  # it is midnight all the time
    first = c.meta("t").replicas[0]
    c.store.intents.put(BALANCE, {"paused": False, "window": window})
    c.kill(first)
    c.run(4.0)
    assert c.meta("t").leader not in (0, first), "an election asks for no hour"
    c.restart(first)
    c.run(10.0)
    assert (c.meta("t").leader == first) is goes_back


def test_many_partitions_of_one_leader_are_asked_about_in_pieces() -> None:
    c = Cluster(1, nodes=3, limits=replace(QUICK, keys_max=3))
    c.create("t", partitions=30)
    c.run(3.0)
    dead = c.meta("t").leader
    c.kill(dead)
    c.run(0.2)
    assert all(meta.leader not in (0, dead) for meta in c.parts().values())


def test_of_a_leader_of_many_partitions_each_is_asked_for_in_its_turn() -> None:
    c = Cluster(1, nodes=3, limits=replace(QUICK, keys_max=3))
    c.create("t", partitions=30)
    c.run(3.0)
    leader = c.meta("t").leader
    last = max(name.number for name, meta in c.parts().items() if meta.leader == leader)
    before = c.meta("t", last)
    next(log for key, log in c.nodes[leader].logs.items() if key[1] == last).leading = 0
    c.run(60.0)
    assert c.meta("t", last).epoch > before.epoch


# ---- a controller that is cut off


def cut_from(c: Cluster, uids: set[int]) -> None:
    """The controller hears nothing from these nodes, which keep their leases."""
    for uid in uids:
        c.nodes[uid].silent = True
    for uid in sorted(uids):
        c.feed(Suspect(uid, "stream ended"))


def test_a_controller_that_can_elect_none_of_those_that_live_should_resign() -> None:
    c = cluster()
    cut_from(c, set(c.meta("t").isr))
    c.run(QUICK.resign_s)
    assert not c.resigned
    c.run(1.0)
    assert c.resigned and "t:0 waits for nodes that live" in c.resigned[0]


def test_a_controller_does_not_resign_because_of_a_node_that_nothing_waits_for() -> None:
    c = cluster()
    meta = c.meta("t")
    cut_from(c, {next(uid for uid in meta.isr if uid != meta.leader)})
    c.run(10 * QUICK.resign_s)
    assert not c.resigned


def test_a_controller_does_not_resign_because_of_nodes_without_a_lease() -> None:
    c = cluster()
    for uid in c.meta("t").isr:
        c.kill(uid)
    c.run(10 * QUICK.resign_s)
    assert c.meta("t").leader and not c.resigned


def test_what_plans_are_made_from_is_kept_up_with_each_change() -> None:
    c = cluster(partitions=3)
    c.create("u", partitions=2)
    c.kill(c.meta("t").leader)
    c.run(5.0)
    state = c.machine.state
    world = state.world()
    assert world.metas == {name: part.meta for name, part in state.parts.items()}
    assert world.settings == {name: part.settings for name, part in state.parts.items()}
    assert world.replica_nodes() == {uid for part in state.parts.values() for uid in part.meta.replicas}
    topic = next(iter(c.machine._topics))
    c.machine.step(Metadata({n: t for n, t in c.machine._topics.items() if n != topic}, dict(state.nodes), {}), c.now)
    assert topic not in {name.topic for name in state.world().metas}


def test_the_first_of_many_are_elected_meanwhile_and_each_is_judged_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = Cluster(1, nodes=3, limits=QUICK)
    c.create("t", partitions=120)
    c.run(3.0)
    m = ControllerMachine(c.now, replace(QUICK, round_keys=4))
    m.step(metadata(c), c.now)
    m.step(Tick(), c.now)
    judged = Counter[PartitionName]()
    choose = elections.choose

    def counted(ballot: Ballot) -> Elected | Wait:
        judged[names[ballot.meta.version]] += 1
        return choose(ballot)

    monkeypatch.setattr(elections, "choose", counted)
    dead = c.meta("t").leader
    led = {name for name, meta in c.parts().items() if meta.leader == dead}
    names = {meta.version: name for name, meta in c.parts().items()}
    asked = [action for action in m.step(Suspect(dead, "reset"), c.now) if isinstance(action, Probe)]
    elected: list[PutPartition] = []
    rounds = 0
    while asked:
        probe = asked.pop(0)
        done = NotAnswered(probe.number, dead, "refused") if probe.node == dead else answer(c, probe)
        rounds += 1
        for step in (done, Tick()):
            actions = m.step(step, c.now + 0.001 * rounds)
            elected += puts(actions)
            asked += [action for action in actions if isinstance(action, Probe)]
        assert len(elected) >= 4 * ((rounds - 1) // 2 - 1), "elections wait for questions about others"
    assert {put.name for put in elected} == led and len(led) > 30
    assert max(judged.values()) <= 4, judged


def test_slow_work_waits_for_elections_but_not_for_those_that_take_long() -> None:
    c = cluster()
    m, name, meta = machine(c)
    m.step(Tick(), c.now)
    planned: list[float] = []
    plan = m.state.planner.plan
    m.state.planner.plan = lambda world, now: (planned.append(now), plan(world, now))[1]  # type: ignore[func-returns-value,method-assign]
    began = c.now
    asked = probes(m.step(Suspect(meta.leader, "reset"), c.now))
    m.step(NotAnswered(asked[meta.leader].number, meta.leader, "refused"), c.now)
    while c.now < began + 2 * QUICK.plan_wait_s:
        c.now += 0.1
        m.step(Tick(), c.now)
    assert name in m.state.rounds and planned
    assert began + QUICK.plan_wait_s - 0.2 < planned[0] < began + QUICK.plan_wait_s + 2 * QUICK.scan_s
    assert len(planned) > 3, "an election that nobody can win holds up the rest for good"


def test_a_leader_that_never_committed_and_that_no_other_replica_hears_is_replaced() -> None:
    machine = ControllerMachine(0.0, QUICK)
    nodes = {uid: NodeInfo(uid, registration=uid * 10) for uid in (1, 2, 3)}
    created = PartitionMeta(
        leader=1, registration=10, isr={1: 7}, replicas=(1, 2, 3), min_isr=2, nothing_acked=True, version=4
    )
    record = TopicRecord("t", 5, 1, partitions={0: created})
    machine.step(Metadata({"t": Versioned(record, 4)}, nodes, {}), 0.0)

    def report(uid: int, led_by: int) -> ReplicaReport:
        leads = uid == 1
        return ReplicaReport(uid * 10, 6 + uid, 1, 1 if leads else 0, promise=1, leading=leads, led_by=led_by)

    elected, now = list[PutPartition](), 0.0
    for led_by in (1, 0):  # while another replica hears it, it may only be slow
        for _ in range(40):
            now += 0.25
            found = machine.step(Tick(), now)
            for probe in probes(found).values():
                if probe.keys:
                    said = {(5, 0): report(probe.node, 1 if probe.node == 1 else led_by)}
                    found += machine.step(Answered(probe.number, probe.node, probe.node * 10, said), now)
            elected += puts(found)
        assert bool(elected) is (led_by == 0)
    assert elected[0].meta.leader in (2, 3) and elected[0].meta.nothing_acked
    assert elected[0].why == "leader commits nothing"


def test_a_new_partition_waits_a_moment_for_nodes_that_have_just_registered() -> None:
    machine = ControllerMachine(0.0, QUICK)
    nodes = {uid: NodeInfo(uid, registration=uid * 10) for uid in (1, 2, 3)}
    new = {"t": Versioned(TopicRecord("t", 5, 1, partitions={0: PartitionMeta(version=4)}), 4)}
    joining = {**nodes, 3: replace(nodes[3], joining=JUST_REGISTERED)}
    assert not puts(machine.step(Metadata(new, joining, {}), 0.0))
    refused = {**nodes, 3: replace(nodes[3], joining="node-1 does not reach this node")}
    (put,) = puts(machine.step(Metadata(new, refused, {}), 0.1))
    assert sorted(put.meta.replicas) == [1, 2], "one that has not joined gets none"
    late = ControllerMachine(0.0, QUICK)
    late.step(Metadata(new, joining, {}), 0.0)
    (put,) = puts(late.step(Tick(), TRIED_SECONDS + 0.1))
    assert sorted(put.meta.replicas) == [1, 2], "one that says nothing more is not waited for"
