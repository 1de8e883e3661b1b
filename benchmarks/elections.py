"""CPU of the controller while it replaces the leader of many partitions: `python -m benchmarks.elections 1000`.

A `ControllerMachine` and nothing else: three nodes that answer at once, of which the one that leads all partitions
refuses. Printed are the milliseconds of this thread until the first election and until the last, and how often a
partition was judged; best of ROUNDS.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from nsqha.election import elect
from nsqha.election.controller import elections
from nsqha.election.controller.controller import ControllerMachine
from nsqha.election.controller.events import (
    Answered,
    Event,
    Metadata,
    NotAnswered,
    Probe,
    PutDone,
    PutPartition,
    Suspect,
    Tick,
)
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.elect import Ballot, Elected, ReplicaReport, Wait
from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, TopicSettings, Versioned

ROUNDS = 5
STEP_S = 0.002  # of the machine's time, for each event
NODES = {
    uid: NodeInfo(uid, name=f"n{uid}", grpc_address=f"h{uid}:1", peer_address=f"h{uid}:2", registration=10 + uid)
    for uid in (1, 2, 3)
}


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with judged() as ballots:
        first, last = min((elect_all(count) for _ in range(ROUNDS)), key=lambda times: times[1])
    times = len(ballots) / count / ROUNDS
    print(f"{count} partitions: first {1000 * first:.0f} ms, last {1000 * last:.0f} ms, judged {times:.1f} times each")


@contextmanager
def judged() -> Iterator[list[Ballot]]:
    """What is judged meanwhile."""
    ballots: list[Ballot] = []

    def counted(ballot: Ballot) -> Elected | Wait:
        ballots.append(ballot)
        return elect.choose(ballot)

    vars(elections)["choose"] = counted
    try:
        yield ballots
    finally:
        vars(elections)["choose"] = elect.choose


def elect_all(count: int, limits: ControllerLimits | None = None) -> tuple[float, float]:
    """Seconds of CPU until the first partition has another leader, and until all have."""
    now = 100.0
    machine = ControllerMachine(now, limits)
    machine.step(Metadata(topics(count), NODES, {}), now)
    machine.step(Tick(), now)
    events: deque[Event] = deque([Suspect(1, "its stream ended")])
    begun, first, elected = time.thread_time(), 0.0, 0
    while elected < count:
        now += STEP_S
        if not events or now >= machine.next_tick():
            events.appendleft(Tick())
        for action in machine.step(events.popleft(), now):
            if isinstance(action, Probe):
                events.append(answer(action))
            elif isinstance(action, PutPartition):
                elected += 1
                events.append(PutDone(action.name, "applied", replace(action.meta, version=action.meta.version + 1)))
                first = first or time.thread_time() - begun
    return first, time.thread_time() - begun


def answer(probe: Probe) -> Answered | NotAnswered:
    """What the nodes say: node 1 refuses, and the others have the same."""
    if probe.node == 1:
        return NotAnswered(probe.number, 1, "refused")
    registration = NODES[probe.node].registration
    report = ReplicaReport(registration, probe.node, 1, 5)
    return Answered(probe.number, probe.node, registration, dict.fromkeys(probe.keys, report))


def topics(count: int) -> dict[str, Versioned[TopicRecord]]:
    """Records of so many topics with a partition each, all led by node 1."""
    meta = PartitionMeta(
        leader=1, epoch=1, replicas=(1, 2, 3), isr={1: 1, 2: 2, 3: 3}, min_isr=2, registration=11, version=5
    )
    records = [TopicRecord(f"t{n}", 1000 + n, n, TopicSettings(), partitions={0: meta}) for n in range(count)]
    return {record.name: Versioned(record, 5) for record in records}


if __name__ == "__main__":
    main()
