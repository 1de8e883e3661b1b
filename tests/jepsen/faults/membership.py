"""M1-M4, M6-M9: what operators do to a cluster, while its clients and the checkers go on.

    M1  a node is added and given a replica, or the lead; emptied and removed    M6  a channel is emptied
    M1  fewer replicas, and as many as before; another one leads                 M7  a topic is deleted
    M2  M1, and the leader dies or is cut off in the middle                      M8  a policy is set; its channel goes
    M3  a node loses its disk, and is another node under its name                M9  a topic gets more partitions
    M4  a roll to another installed version and back, one broker after the other; or some of them stay at it a while

What is emptied, deleted and given a policy is beside the channels that are checked: these must not notice. Seeks of
channels that are checked are the load's own doing. The proof is what the cluster itself says afterwards: records,
answers, registrations.
"""

from __future__ import annotations

import contextlib
import json
import random
import urllib.error
from collections.abc import Callable
from typing import Any

from nsqha import __version__
from nsqha.cli.brokers.admin import Admin
from nsqha.cli.terminal.exits import Exit
from nsqha.election.model import PEER_LEVEL, PartitionMeta, TopicRecord
from tests.integration.cluster import pause, posted
from tests.integration.installed_tree import InstalledTree
from tests.integration.servers import wait_until
from tests.jepsen.deployment import Broker, Deployment, NotNow, one_of
from tests.jepsen.faults import network, processes
from tests.jepsen.faults.fault import FaultKind, Injected, bitten

Inject = Callable[[Deployment, random.Random], Injected]

WAIT_SECONDS = 60.0
ETCD_SECONDS = 5.0
ANSWER_SECONDS = 15.0
PARTITIONS_MAX = 4  # to which a topic under load is grown
SCRATCH = "scratch"  # a channel that nobody is owed anything on
DOOMED = "doomed"  # a topic that comes and goes
OTHER_VERSION = "9.0.0"


def topic_of(deployment: Deployment, name: str) -> TopicRecord | None:
    """None: there is no such topic. NotNow while etcd has no majority; one that looks for a leader is waited for."""
    try:
        (found,) = wait_until(lambda: [deployment.store.records.topic(name)], "etcd answers", ETCD_SECONDS)
    except AssertionError as error:
        raise NotNow(f"no record can be read: {error}") from None
    return None if found is None else found.record


def record_of(deployment: Deployment) -> PartitionMeta:
    topic = topic_of(deployment, deployment.topic)
    assert topic is not None
    return topic.partitions[0]


def answering(deployment: Deployment) -> None:
    """NotNow unless an operator's request can be answered: by a broker that is whole, and by etcd."""
    one_of(random.Random(0), deployment.whole_nodes)
    record_of(deployment)


def asked(deployment: Deployment, path: str) -> None:
    """A POST to a lookup daemon, one that is whole if there is one, tried again while it is refused."""
    said: list[str] = []

    def done() -> bool:
        for daemon in deployment.whole_lookupds or deployment.lookupds:
            try:
                daemon.request(path, b"")
                return True
            except urllib.error.HTTPError as error:
                said.append(error.read().decode(errors="replace"))
            except OSError as error:
                said.append(str(error))
        return False

    try:
        wait_until(done, path, WAIT_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}: {said[-1:]}") from None


def told(deployment: Deployment, rpc: str, **fields: Any) -> Any:
    """The answer to a request to the Admin service of any broker, one that is whole if there is one, tried again while
    it fails. What is there already was made, and what is not there was deleted, by a try whose answer was lost. NotNow
    if nobody can answer."""
    answering(deployment)
    failed: list[str] = []

    def answered() -> list[Any]:
        for node in deployment.whole_nodes or deployment.brokers:
            try:
                with Admin(node.grpc, ANSWER_SECONDS) as admin:
                    return [admin.call(rpc, **{name: made(admin, value) for name, value in fields.items()})]
            except (Exit, OSError) as error:
                before = "exists already" if rpc.startswith("Create") else "there is no"
                if failed and rpc.startswith(("Create", "Delete")) and before in str(error):
                    return [None]
                failed.append(str(error))
        return []

    try:
        return wait_until(answered, f"{rpc} is answered", WAIT_SECONDS)[0]
    except AssertionError as error:
        raise AssertionError(f"{error}: {failed[-1:]}") from None


def made(admin: Admin, value: Any) -> Any:
    """A field's value; of a message (its name, its fields), the message."""
    return getattr(admin.messages, value[0])(**value[1]) if isinstance(value, tuple) else value


def whole_cluster(deployment: Deployment) -> None:
    """NotNow unless nobody is broken and all replicas are in sync."""
    if deployment.broken or not deployment.all_in_sync():
        raise NotNow("somebody is broken or behind")


# ---- M1


def added(deployment: Deployment, rng: random.Random) -> Injected:
    """The spare broker joins with an empty disk, and gets a replica; the lead, one time in two."""
    whole_cluster(deployment)
    spare = deployment.spare
    spare.wipe()
    spare.start()
    wait_until(lambda: deployment.uid(spare), f"{spare.name} is registered", WAIT_SECONDS)
    uid, meta = deployment.uid(spare), record_of(deployment)
    leads = rng.random() < 0.5
    kept = [each for each in meta.replicas if each != meta.leader]
    replicas = [uid, *kept] if leads else [meta.leader, uid, kept[0]]
    names = ",".join(f"{each:016x}" for each in replicas)
    asked(deployment, f"/cluster/move?topic={deployment.topic}&partition=0&replicas={names}")
    seen: list[int] = []

    def heal() -> None:
        seen.append(uid in record_of(deployment).replicas)
        asked(deployment, f"/cluster/decommission?node={uid:016x}")
        wait_until(lambda: uid not in deployment.named_in_records(), f"{spare.name} is empty", WAIT_SECONDS)
        spare.stop()
        wait_until(lambda: not deployment.uid(spare), f"{spare.name} is deregistered", WAIT_SECONDS)

    def proof() -> str:
        bitten(seen[0], f"{spare.name} was in no record")
        return f"{spare.name} had a replica, and is gone"

    what = f"{spare.name} is added and {'leads' if leads else 'follows'}, then emptied and removed"
    return Injected(what, frozenset([spare.name]), heal, proof)


def fewer_replicas(deployment: Deployment, rng: random.Random) -> Injected:
    before = record_of(deployment)
    told(deployment, "UpdateTopicSettings", topic=deployment.topic, replicas=2)
    seen: list[int] = []

    def heal() -> None:
        if not seen:
            with contextlib.suppress(AssertionError):  # somebody else is broken: it happens afterwards
                wait_until(lambda: len(record_of(deployment).replicas) == 2, "one goes", 20)
            seen.append(len(record_of(deployment).replicas))
        told(deployment, "UpdateTopicSettings", topic=deployment.topic, replicas=3)
        # Where somebody else is broken, a disk that hangs, say, it comes when that is healed.
        with contextlib.suppress(AssertionError) if deployment.broken else contextlib.nullcontext():
            wait_until(lambda: len(record_of(deployment).replicas) == 3, "one comes", WAIT_SECONDS)

    def proof() -> str:
        bitten(seen == [2], f"there were {seen} replicas, and {len(before.replicas)} before")
        return "there were 2 replicas, and are 3"

    return Injected("2 replicas instead of 3", frozenset(), heal, proof)


def another_leads(deployment: Deployment, rng: random.Random) -> Injected:
    """A transfer that an operator asks for."""
    leader, target = deployment.leader_of(), one_of(rng, deployment.followers_of())
    before, uid = record_of(deployment), deployment.uid(target)
    if not uid:
        raise NotNow(f"{target.name} is not registered: it has just started")
    names = ",".join(f"{each:016x}" for each in (uid, *(each for each in before.replicas if each != uid)))
    try:
        asked(deployment, f"/cluster/move?topic={deployment.topic}&partition=0&replicas={names}")
    except AssertionError as error:
        if deployment.broken:  # a move to a node that is not registered is refused
            raise NotNow(str(error)) from None
        raise

    def heal() -> None:
        with contextlib.suppress(AssertionError):  # somebody else is broken: a transfer is not urgent
            wait_until(lambda: record_of(deployment).epoch > before.epoch, "another one leads", 20)

    def proof() -> str:
        after = record_of(deployment)
        bitten(after.epoch > before.epoch, f"the epoch is still {after.epoch}")
        return f"epoch {before.epoch} ended, {after.epoch} is the last one"

    return Injected(f"{target.name} is to lead instead of {leader.name}", frozenset(), heal, proof)


# ---- M2


def undone(change: Injected) -> bool:
    try:
        change.heal()
    except NotNow:
        return False
    return True


def during(first: Inject, second: Inject) -> Inject:
    """The second happens in the middle of the first."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        change = first(deployment, rng)
        try:
            fault = second(deployment, rng)
        except NotNow:
            wait_until(lambda: undone(change), f"{change.what}, and that is taken back", WAIT_SECONDS)
            raise
        healed: list[bool] = []

        def heal() -> None:
            if not healed:  # what is put off is begun anew
                fault.heal()
                healed.append(True)
            change.heal()

        what = f"{change.what}; meanwhile {fault.what}"
        victims = change.victims | fault.victims
        return Injected(what, victims, heal, lambda: f"{fault.proof()}; {change.proof()}")

    return inject


# ---- M3


def another_disk(deployment: Deployment, rng: random.Random) -> Injected:
    """Survived with the others whole, and not promised otherwise."""
    whole_cluster(deployment)
    victim = one_of(rng, deployment.whole_nodes)
    lost = deployment.uid(victim)
    victim.kill()
    victim.wipe()

    def heal() -> None:
        victim.spawn()
        deployment.wait_listening([victim])
        wait_until(lambda: deployment.uid(victim) not in (0, lost), f"{victim.name} is another node", WAIT_SECONDS)
        asked(deployment, f"/cluster/decommission?node={lost:016x}")
        wait_until(lambda: lost not in deployment.named_in_records(), "it is replaced", WAIT_SECONDS)

    def proof() -> str:
        return f"{lost:016x} is {deployment.uid(victim):016x} now"

    return Injected(f"{victim.name} loses its disk", frozenset([victim.name]), heal, proof)


# ---- M4


def rolled(*, all_of_them: bool) -> Inject:
    """One broker after the other is stopped and started from another tree of files; back when it is healed.

    What `nsqha cluster nodes` shows is looked at after each step: both versions have to be at work at once."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        whole_cluster(deployment)
        tree = deployment.other_version(OTHER_VERSION, oldest=PEER_LEVEL, newest=PEER_LEVEL + 1)
        count = len(deployment.brokers)
        order = rng.sample(deployment.brokers, count if all_of_them else rng.randint(1, count - 1))
        seen, ran = list[set[str]](), list[bool]()
        for node in order:
            restarted(deployment, node, tree)
            seen.append(versions(deployment))
            ran.append(tree.runs(node.pid))
            pause(rng.uniform(0, 1))

        def heal() -> None:
            for node in rng.sample(order, len(order)):
                restarted(deployment, node, None)
                seen.append(versions(deployment))

        def proof() -> str:
            bitten(tree.version != __version__, f"{tree.root} is {__version__}, too")
            bitten(all(ran), f"of {len(order)} {ran.count(True)} ran from {tree.root}")
            mixed = sum(each == {tree.version, __version__} for each in seen)
            bitten(mixed, f"the versions were never mixed: {seen}")
            bitten(seen[-1] == {__version__}, f"at the end the versions are {seen[-1]}")
            return f"{len(order)} were {tree.version}; beside {__version__} in {mixed} of {len(seen)} looks"

        names = [node.name for node in order]
        what = f"{', '.join(names)} roll to {tree.version} and back"
        return Injected(what, frozenset(names), heal, proof)

    return inject


def restarted(deployment: Deployment, node: Broker, tree: InstalledTree | None) -> None:
    status = node.stop()
    assert status == 0, f"{node.name} did not stop well: status {status}\n{node.log()[-2000:]}"
    if tree is None:
        node.programmed()
    else:
        node.program = tree.program("nsqd")
    node.start()
    wait_until(deployment.all_in_sync, "every ISR is full", WAIT_SECONDS)


def versions(deployment: Deployment) -> set[str]:
    return {info.build for info in deployment.store.watch.view().nodes.values()}


# ---- M6-M9


def emptied(deployment: Deployment, rng: random.Random) -> Injected:
    """A channel beside, which had what was published since it was made."""
    topic = deployment.topic
    told(deployment, "CreateChannel", topic=topic, channel=SCRATCH)
    pause(rng.uniform(0.5, 2))
    depth = depth_of(deployment)
    told(deployment, "EmptyChannel", topic=topic, channel=SCRATCH)

    def heal() -> None:
        told(deployment, "DeleteChannel", topic=topic, channel=SCRATCH)

    def proof() -> str:
        bitten(depth, "there was nothing in it")
        return f"{depth} messages were in it"

    return Injected(f"{topic}/{SCRATCH} is emptied, then deleted", frozenset([SCRATCH]), heal, proof)


def depth_of(deployment: Deployment) -> int:
    found = told(deployment, "DescribeChannel", topic=deployment.topic, channel=SCRATCH)
    return int(found.channel.depth)


def deleted(deployment: Deployment, rng: random.Random) -> Injected:
    """A topic beside, with messages and a channel."""
    node = one_of(rng, deployment.whole_nodes)
    answering(deployment)
    for path in (f"/topic/create?topic={DOOMED}", f"/channel/create?topic={DOOMED}&channel=c"):
        wait_until(lambda path=path: posted(node, path), path, WAIT_SECONDS)  # type: ignore[misc]
    for number in range(20):
        with contextlib.suppress(OSError):
            node.request(f"/pub?topic={DOOMED}", b"%d" % number)
    was = topic_of(deployment, DOOMED)

    def heal() -> None:
        told(deployment, "DeleteTopic", topic=DOOMED)

    def proof() -> str:
        bitten(was is not None and topic_of(deployment, DOOMED) is None, "it was never there, or is still")
        return "it was there, and is not"

    return Injected(f"topic {DOOMED} is deleted", frozenset([DOOMED]), heal, proof)


def policy(deployment: Deployment, rng: random.Random) -> Injected:
    """Of a channel beside: what fails dies at once, what is old is passed over. And taken back."""
    topic, wanted = deployment.topic, {"max_attempts": 1, "ttl_ms": 1000}
    told(deployment, "CreateChannel", topic=topic, channel=SCRATCH)
    told(deployment, "UpdateChannelPolicy", topic=topic, channel=SCRATCH, set=("ChannelPolicy", wanted))
    node = one_of(rng, deployment.whole_nodes)
    said = json.loads(node.request(f"/channel/policy?topic={topic}&channel={SCRATCH}"))

    def heal() -> None:
        told(deployment, "DeleteChannel", topic=topic, channel=SCRATCH)

    def proof() -> str:
        bitten("max_attempts" in json.dumps(said), f"the policy was {said}")
        return "the policy was there"

    return Injected(f"{topic}/{SCRATCH} has a policy, then none", frozenset([SCRATCH]), heal, proof)


def grown(deployment: Deployment, rng: random.Random) -> Injected:
    topic = deployment.topic
    found = topic_of(deployment, topic)
    assert found is not None
    count = len(found.partitions)
    if count >= PARTITIONS_MAX:
        raise NotNow("it has enough partitions")
    told(deployment, "UpdateTopicSettings", topic=topic, partitions=count + 1)

    def proof() -> str:
        after = topic_of(deployment, topic)
        assert after is not None
        bitten(len(after.partitions) > count, f"there are {len(after.partitions)} partitions")
        return f"{count} partitions, then {len(after.partitions)}"

    return Injected(f"{topic} gets {count + 1} partitions", frozenset(), lambda: None, proof)


HOSTS = frozenset(("namespaces", "disks"))
killed_leader, cut_leader = processes.killed(processes.leader), network.cut(network.isolated_leader)

KINDS = (
    FaultKind("M1-add", "a node comes, gets a replica or leads, and goes", "nothing lost", added, alone=True),
    FaultKind("M1-replicas", "fewer replicas, then as many again", "nothing lost", fewer_replicas),
    FaultKind("M1-lead", "another one is to lead", "nothing lost, no gap", another_leads),
    FaultKind("M2-kill", "M1-add, and the leader dies", "nothing lost", during(added, killed_leader), alone=True),
    FaultKind(
        "M2-cut", "M1-add, the leader is cut off", "nothing lost", during(added, cut_leader), needs=HOSTS, alone=True
    ),
    FaultKind("M2-replicas", "fewer, and a kill", "nothing lost", during(fewer_replicas, killed_leader)),
    FaultKind("M3", "a node loses its disk", "resync; not electable before", another_disk, settle=60.0, alone=True),
    FaultKind(
        "M4-all",
        "a roll to another version and back",
        "nothing lost",
        rolled(all_of_them=True),
        settle=60.0,
        alone=True,
    ),
    FaultKind(
        "M4-mixed",
        "some brokers have another version for a while",
        "nothing lost",
        rolled(all_of_them=False),
        settle=60.0,
        alone=True,
    ),
    FaultKind("M6", "a channel is emptied", "others do not notice", emptied, (0.1, 2.0)),
    FaultKind("M7", "a topic is deleted", "others do not notice", deleted, (0.1, 2.0)),
    FaultKind("M8", "a channel gets a policy, and is deleted", "others do not notice", policy, (1.0, 4.0)),
    FaultKind("M9", "a topic gets one more partition", "nothing lost, order kept", grown),
)
