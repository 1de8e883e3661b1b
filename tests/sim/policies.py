"""What operators ask of channels and of single messages in a simulated cluster, and what became of each message.

attempts    the wire never shows more than a policy's max_attempts, whichever leader delivers
fates       at the end nothing has left a channel uncounted: what is finished there was finished by a consumer or an
            operator, passed over or dropped by a policy, emptied, or moved to the topic of dead letters
in time     what a policy passed over unread was as old, or had as much behind it, as it says when the log says that the
            channel was done with it; and it was not passed over before the policy was asked for
one place   a dead letter is kept, or was moved, once; twice only where a crash or a change of leader may repeat it
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nsqha.cursor.live.looking import MessageState, held
from nsqha.election.policy import FIELDS
from nsqha.errors import NsqhaError
from nsqha.pb.v1 import admin_pb2
from tests.jepsen.checkers.settling import rows_of
from tests.jepsen.history import Settling
from tests.sim.ledger import DEAD_TOPIC, LATE_SECONDS, PolicyChange, Stored
from tests.sim.loop import START, WALL_NS

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from tests.sim.cluster import SimCluster
    from tests.sim.node import SimNode
    from tests.sim.operators import Operators

TO_DEAD_TOPIC = f"topic:{DEAD_TOPIC}"
PASSING = ("skip", "ttl_ms", "max_depth")


def drawn(rng: random.Random) -> dict[str, Any]:
    """A policy: some fields, the others are cleared."""
    said: dict[str, Any] = dict.fromkeys(FIELDS)
    if rng.random() < 0.7:
        said["max_attempts"] = rng.choice((1, 2, 2, 3))
        said["dead_letter"] = rng.choice((None, "keep", "drop", TO_DEAD_TOPIC, TO_DEAD_TOPIC))
        said["dead_max"] = rng.choice((None, None, 1, 3))
    if rng.random() < 0.4:
        said["retry_ms"] = rng.choice((0, 100, 1000))
        said["retry_max_ms"] = rng.choice((1000, 4000))
        said["retry_instead"] = rng.choice((None, True))
    if rng.random() < 0.25:
        said |= rng.choice(({"skip": True}, {"ttl_ms": 1000}, {"ttl_ms": 3000}, {"max_depth": 1}, {"max_depth": 20}))
    return said


class PolicyOperators:
    """Who changes policies, and does something to single messages."""

    def __init__(self, operators: Operators, cluster: SimCluster, rng: random.Random) -> None:
        self.cluster = cluster
        self._operators = operators
        self._rng = rng
        self._ledger = cluster.oracle.ledger

    def change(
        self,
        node: SimNode,
        topic: str,
        channel: str,
        fields: dict[str, Any],
        done: Callable[[bool], None] = lambda done: None,
    ) -> str:
        """Ask the node for this policy; `done` hears whether it is in force."""
        now, broker, operators = self.cluster.world.time, node.broker, self._operators
        assert broker is not None
        change = PolicyChange(topic, channel, now(), operators.epochs_known(node, topic), fields=fields)
        self._ledger.policies.append(change)
        passes = any(fields[name] for name in PASSING)
        if passes:
            operators.operations("policy", topic, channel)

        def answered(_: Any) -> None:
            change.over = now()
            operators.binding(change, node)
            if not passes:
                for operation in self._ledger.operations:
                    place = (operation.kind, operation.topic, operation.channel)
                    if place == ("policy", topic, channel) and operation.began < change.began:
                        operation.ended = min(operation.ended, now() + LATE_SECONDS)
            done(True)

        def failed(error: NsqhaError) -> None:
            change.over = now() + LATE_SECONDS
            done(False)

        operators.ask(node, "policy", lambda: broker.channels.ask(topic, channel, fields), answered, failed)
        return f"{topic}:{channel} at {node.name} { {name: v for name, v in fields.items() if v is not None} }"

    # ---- single messages

    def act_on_some(self, node: SimNode, topic: str, channel: str) -> str:
        """Messages by their ids, whatever has become of them."""
        key = next(key for name, key, _ in self.cluster.named_metas() if name == topic)
        messages = self._ledger.messages.get(key, [])
        some = self._rng.sample(messages, min(len(messages), self._rng.randint(1, 5)))
        return self._act(node, topic, channel, [self._ledger.wire_id(topic, one) for one in some], some)

    def act_on_dead(self, node: SimNode, topic: str, channel: str) -> str:
        """Dead letters, as a list shows them."""
        port = node.admin
        assert port is not None
        request = admin_pb2.ListMessagesRequest(topic=topic, channel=channel, limit=5)
        request.state = admin_pb2.MESSAGE_STATE_DEAD

        def listed(reply: Any) -> None:
            found = [message.message_id for answer in reply.partitions for message in answer.messages]
            places = [self._ledger.find(topic, id_.encode()) for id_ in found]
            known = [self._ledger.messages[place[0]][place[1]] for place in places if place is not None]
            if found and node.joined:
                self._act(node, topic, channel, found, known)

        self._operators.ask(node, "list", lambda: port.list_messages(request), listed)
        return f"of {topic}:{channel} at {node.name}"

    def _act(self, node: SimNode, topic: str, channel: str, ids: list[str], stored: list[Stored]) -> str:
        port, now = node.admin, self.cluster.world.time
        assert port is not None
        action = self._rng.choice(("FINISH", "REQUEUE", "REQUEUE", "DEFER", "KILL"))
        request = admin_pb2.ChangeMessagesRequest(
            topic=topic,
            channel=channel,
            message_ids=ids,
            action=admin_pb2.MessageAction.Value(f"MESSAGE_ACTION_{action}"),
        )
        if action == "DEFER":
            seconds = self.cluster.time + self._rng.uniform(0.0, 3.0)
            request.due_ns = WALL_NS + round(seconds * 1e9)
        made = []
        if action in ("FINISH", "KILL"):
            bodies = frozenset(one.body for one in stored)
            made = [*self._operators.operations(action.lower(), topic, channel, bodies=bodies).values()]

        def answered(_: Any) -> None:
            for operation in made:
                operation.ended = now() + LATE_SECONDS  # a partition may have answered nothing

        if ids:
            self._operators.ask(node, action, lambda: port.change_messages(request), answered)
        return f"{action} {[one.body[:12] for one in stored]} of {topic}:{channel} at {node.name}"


# ---- what follows for messages


def fates(cluster: SimCluster) -> Iterator[str]:
    """Messages of which it is not known where they went, or that are in two places."""
    ledger = cluster.oracle.ledger
    for topic, key, _ in cluster.named_metas():
        led = [n.replicas.leading[key] for n in cluster.nodes if n.replicas and key in n.replicas.leading]
        if not led or topic == cluster.doomed:
            continue
        for channel in cluster.channels_of(topic):
            cursor = led[0].partition.cursors.channels[channel].cursor
            for stored in ledger.messages.get(key, ()):
                found = held(cursor, stored.offset)
                if found is not None and (why := _odd(cluster, topic, channel, stored, found.state)):
                    yield f"{topic}:{channel} {stored}: {why}"


def _odd(cluster: SimCluster, topic: str, channel: str, stored: Stored, state: MessageState) -> str:
    ledger, history = cluster.oracle.ledger, cluster.history
    copies = len(ledger.moved.get(stored.body, ()))
    moves = sum(c.fields["dead_letter"] == TO_DEAD_TOPIC for c in ledger.policies if c.topic == topic)
    if copies and not moves:
        return "it was moved, and nobody asked for it"
    if copies > len(cluster.channels_of(topic)) and not repeats(cluster):
        return f"it was moved {copies} times"
    if state is MessageState.DEAD and copies and len(cluster.channels_of(topic)) == 1 and not repeats(cluster):
        return "it is dead here, and was moved"
    if state is not MessageState.FINISHED or copies or stored.body in history.finished.get((topic, channel), {}):
        return ""
    drops = any(c.fields["dead_letter"] == "drop" for c in ledger.policies if (c.topic, c.channel) == (topic, channel))
    return "" if drops or ledger.excused(stored, topic, channel) else "it is finished, and nobody finished it"


def passed_too_early(cluster: SimCluster) -> Iterator[str]:
    """Messages that a channel passed over when no policy explained it yet, as far as the log says when that was."""
    ledger = cluster.oracle.ledger
    if "clock" in cluster.plan.faults:
        return
    for topic, key, _ in cluster.named_metas():
        led = [n.replicas.leading[key] for n in cluster.nodes if n.replicas and key in n.replicas.leading]
        if not led or led[0].log.start.log_id != 1:
            continue
        log, live = led[0].log, led[0].partition.cursors.channels
        entries = log.entries(1, led[0].committed)
        names = {live[name].uid: name for name in cluster.channels_of(topic) if name in live}
        for uid, said in rows_of(((entry, bytes(log.events(entry))) for entry in entries), {*names}).items():
            asked = [c for c in ledger.policies if (c.topic, c.channel) == (topic, names[uid])]
            if said.moved or any(change.fields["dead_letter"] == "drop" for change in asked):
                continue  # what died leaves no trace then
            for row in said.rows:
                for stored in ledger.messages.get(key, [])[row.first : row.end]:
                    if _unread(cluster, topic, names[uid], stored) and (why := _early(log, stored, row, asked)):
                        yield f"{topic}:{names[uid]} {stored}: {why}"


def _unread(cluster: SimCluster, topic: str, channel: str, stored: Stored) -> bool:
    """Whether nobody got it, and nothing but a policy can be why."""
    ledger, history = cluster.oracle.ledger, cluster.history
    seen = stored.body in history.delivered.get((topic, channel), {}) or stored.body in ledger.moved
    return not seen and not ledger.excused(stored, topic, channel, but="policy")


def _early(log: PartitionLog, stored: Stored, row: Settling, asked: list[PolicyChange]) -> str:
    """Why it should not have been passed over in that batch; empty: there was a policy that explains it."""
    entry = log.entry_for_offset(stored.offset)
    at = START + (row.timestamp - WALL_NS) / 1e9
    if entry is None or row.attempts:
        return ""
    age, behind = (row.timestamp - entry.timestamp_ns) / 1e6, row.log_end - stored.offset - 1
    for change in asked:
        fields, depth = change.fields, change.fields["max_depth"]
        old = fields["ttl_ms"] is not None and age >= fields["ttl_ms"]
        if change.began <= at and (fields["skip"] or old or (depth is not None and behind >= depth)):
            return ""
    return f"passed over at {at - START:.4f}, {age:.0f} ms old, with {behind} behind it"


def died_unseen(cluster: SimCluster, topic: str, channel: str, stored: Stored) -> bool:
    """Whether it was given up, perhaps before its only consumer had it from the connection that was lost."""
    ledger = cluster.oracle.ledger
    mine = [c for c in ledger.policies if (c.topic, c.channel) == (topic, channel)]
    if not any(change.fields["max_attempts"] for change in mine):
        return False
    if stored.body in ledger.moved or any(change.fields["dead_letter"] == "drop" for change in mine):
        return True
    for node in cluster.nodes:
        led = node.replicas.leading.get(stored.key) if node.replicas is not None else None
        if led is not None and (live := led.partition.cursors.channels.get(channel)) is not None:
            found = held(live.cursor, stored.offset)
            return found is not None and found.state is MessageState.DEAD
    return False


def repeats(cluster: SimCluster) -> bool:
    """Whether something may have befallen it after which a dead letter is moved once more."""
    raised = any(operation.kind in ("kill", "finish") for operation in cluster.oracle.ledger.operations)
    return bool(cluster.plan.faults) or raised or not cluster.plan.operations.keys() <= {"set_policy", "pause_channel"}


def dead_to_move(cluster: SimCluster) -> int:
    """How many dead letters are to be moved, and are not yet."""
    led = [led for node in cluster.nodes if node.replicas for led in node.replicas.leading.values()]
    return sum(cursor.deferred_overlay.dead for one in led for cursor in one.partition.cursors.passing.moving)
