"""What a seed decides before anything runs: the cluster, its clients, and what will befall it.

Swarm testing: each seed draws a few kinds of misfortune and of administration, each at a rate of its own. A run with
everything at once is always in the same kind of trouble; one with a partition and a seek finds what they do together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

FAULTS = {
    "kill": 0.5,
    "kill_leader": 0.5,
    "power_loss": 0.4,
    "power_loss_all": 0.08,
    "die_writing": 0.3,
    "stop_node": 0.2,
    "freeze": 0.4,
    "freeze_leader": 0.3,
    "partition": 0.4,
    "partition_one_way": 0.4,
    "isolate": 0.3,
    "cut": 0.5,
    "slow_link": 0.3,
    "slow_disk": 0.3,
    "disk_full": 0.2,
    "disk_error": 0.08,
    "bit_flip": 0.7,
    "metadata_trouble": 0.3,
    "metadata_unreachable": 0.3,
    "lost_change": 0.4,
    "controller_kill": 0.15,
    "controller_freeze": 0.15,
    "wipe": 0.1,
    "clock": 0.1,
}
"""How often a second each kind strikes where it was drawn; the seed makes it 0.3 to 2 times that."""

LATER_FAULTS = {
    "metadata_away": 0.12,
    "journal_damage": 0.12,
    "disk_hang": 0.12,
}
"""The same, of a source of chance of their own: with those above, all that earlier seeds had drawn would change."""

PARTING = {"part_ways": 0.4}
"""Likewise: logs that part, and the cut of the longer one is interrupted."""

OPERATIONS = {
    "seek_start": 0.25,
    "seek_offset": 0.3,
    "seek_time": 0.25,
    "seek_end": 0.1,
    "undo_seek": 0.3,
    "pause_channel": 0.25,
    "pause_topic": 0.15,
    "empty_channel": 0.1,
    "empty_topic": 0.1,
    "move": 0.25,
    "decommission": 0.1,
    "delete_topic": 0.1,
}
"""What operators do, likewise."""

LATER_OPERATIONS = {"settings": 0.3}


@dataclass
class Plan:
    """What the seed decides."""

    seed: int
    nodes: int = 3
    controllers: int = 1
    topics: int = 1
    partitions: int = 1
    channels: int = 1
    relayed: bool = False  # further consumers, each at a node that need not lead anything
    ephemeral: bool = False  # consumers of an #ephemeral channel
    damage_anywhere: bool = False  # bits flip on all nodes, of a partition too; else on one of its replicas
    lost_sectors: bool = False  # some flips are whole sectors that read as zeros
    losses: int = 0  # batches that are damaged on every replica (`tests.sim.losses`)
    ordered: bool = False  # topics whose channels wait for each FIN
    delay_seconds: float = 0.1  # messages are deferred so long at most
    sync: str = "always"
    segment_bytes: int = 1 << 20
    retention_seconds: float = 3600.0  # short: the log start moves, files go, replicas begin in the middle
    body_bytes: int = 200
    publishers: int = 3
    pause_seconds: float = 0.05
    seconds: float = 15.0
    faults: dict[str, float] = field(default_factory=dict)  # kind -> how often a second
    operations: dict[str, float] = field(default_factory=dict)
    batch_readers: float = 0.0  # holds on log starts, a second
    stubborn: bool = False  # many messages wait for longer than their files last, and then fail again and again

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """Any cluster, any subset of faults and operations at any rate."""
        rng = random.Random(f"plan {seed}")
        plan = cls(
            seed,
            nodes=rng.choice((3, 3, 3, 3, 4, 5)),
            controllers=rng.choice((1, 1, 2)),
            topics=rng.choice((1, 1, 2)),
            partitions=rng.choice((1, 1, 2)),
            sync=rng.choice(("always", "always", "always", "interval")),
            segment_bytes=rng.choice((2 << 10, 8 << 10, 32 << 10, 1 << 20)),
            body_bytes=rng.choice((20, 200, 2000)),
            publishers=rng.choice((2, 3, 4)),
            pause_seconds=rng.choice((0.05, 0.1, 0.2)),
            seconds=rng.uniform(4.0, 14.0),
            channels=rng.choice((1, 1, 2)),
            relayed=rng.random() < 0.3,
            ephemeral=rng.random() < 0.15,
            retention_seconds=rng.choice((0.5, 3600.0, 3600.0)),
        )
        plan.faults = _some(rng, FAULTS, rng.choice((0.15, 0.3, 0.5)))
        plan.damage_anywhere = "bit_flip" in plan.faults and rng.random() < 0.4
        plan.operations = _some(rng, OPERATIONS, rng.choice((0.0, 0.15, 0.3, 0.5)))
        _draw_later(plan, random.Random(f"later {seed}"))
        _keep_promises(plan)
        if "bit_flip" in plan.faults:  # of a source of its own: it came later than all else
            plan.losses = random.Random(f"losses {seed}").choice((0, 0, 0, 1, 1, 3))
        if plan.retention_seconds < 1.0:  # likewise; else nothing would go anyway
            plan.batch_readers = random.Random(f"batch readers {seed}").choice((0.0, 0.3, 1.0, 3.0))
        _draw_policies(plan, random.Random(f"policies {seed}"))
        _draw_states(plan, random.Random(f"states {seed}"))
        return plan


def _some(rng: random.Random, kinds: dict[str, float], share: float) -> dict[str, float]:
    return {kind: rate * rng.choice((0.3, 1.0, 2.0)) for kind, rate in kinds.items() if rng.random() < share}


def _draw_later(plan: Plan, rng: random.Random) -> None:
    plan.faults |= _some(rng, LATER_FAULTS, rng.choice((0.0, 0.15, 0.3)))
    plan.operations |= _some(rng, LATER_OPERATIONS, 0.15)
    plan.lost_sectors = "bit_flip" in plan.faults and rng.random() < 0.4
    if rng.random() < 0.12:
        plan.ordered, plan.relayed, plan.pause_seconds = True, False, max(plan.pause_seconds, 0.1)
        for kind in [kind for kind in plan.operations if "seek" in kind or "empty" in kind]:
            del plan.operations[kind]  # messages may go, or come again, in any order
    elif rng.random() < 0.2:
        plan.delay_seconds = 6.0


def _draw_policies(plan: Plan, rng: random.Random) -> None:
    if rng.random() < 0.6 or plan.ordered or "bit_flip" in plan.faults:
        return  # what is given up, and comes again in any order, has ledgers of its own
    plan.operations = {kind: rate for kind, rate in plan.operations.items() if "seek" not in kind}
    plan.operations["set_policy"] = rng.choice((0.15, 0.4, 1.0))
    if rng.random() < 0.5:
        plan.operations["change_messages"] = rng.choice((0.5, 2.0))


def _draw_states(plan: Plan, rng: random.Random) -> None:
    """What channel states go wrong by, if at all."""
    plan.faults |= _some(rng, PARTING, 0.15)
    if rng.random() < 0.15 and not plan.ordered:
        plan.stubborn, plan.retention_seconds, plan.segment_bytes = True, 0.5, rng.choice((2 << 10, 8 << 10))


def _keep_promises(plan: Plan) -> None:
    """Take out what would make a loss legitimate."""
    if plan.sync != "always":
        plan.faults.pop("power_loss_all", None)  # what OK means there does not survive all machines at once
    if "bit_flip" in plan.faults:
        plan.faults.pop("wipe", None)  # the copy that a damaged one is mended from
        plan.faults.pop("journal_damage", None)  # ... or the one whose log still goes by its name
        plan.operations.pop("settings", None)  # ... or the one that a floor of one leaves outside of the ISR
        plan.ordered = False  # with what an operator gives up, FINs go
