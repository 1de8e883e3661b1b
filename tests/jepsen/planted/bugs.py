"""Which planted bug is looked for how: the faults, the sync mode and the load in which it does harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module

from tests.jepsen.planted.directed import chosen
from tests.jepsen.suite import Plan
from tests.mutation import Mutant

SIM = "tests.sim.mutants"
CURSOR = "tests.unit.cursor.mutants"
HERE = "tests.jepsen.planted.plants"


@dataclass(frozen=True)
class Hunt:
    """How it is looked for: rounds of so many faults, each with clients of its own and judged at its end."""

    faults: str  # ids, as `make jepsen` takes them
    sync: str = "always"
    most: int = 2  # faults in a round
    swarm: bool = False  # several at a time
    dead: bool = False  # with a channel in which some messages always fail
    standard: bool = False  # every kind of topic and channel, and not one topic with more publishers
    rate: float = 500.0  # messages a second of a standard load

    def plan(self, seed: int, plants: Sequence[str] = ()) -> Plan:
        kinds = chosen(self.faults.split(","))
        return Plan(
            kinds,
            seed,
            sync=self.sync,
            swarm=self.swarm,
            simple=not self.standard,
            dead=self.dead,
            rate=self.rate,
            plants=plants,
        )

    def __str__(self) -> str:
        flags = (("several at a time", self.swarm), ("dead letters", self.dead), ("standard load", self.standard))
        extras = [word for word, there in flags if there]
        return ", ".join((self.faults, f"sync={self.sync}", *extras))


@dataclass(frozen=True)
class Bug:
    """A rule of the product that is broken in all daemons of a deployment."""

    name: str
    place: str  # module of mutants
    hunt: Hunt

    @property
    def plant(self) -> str:
        """As `tests.jepsen.program` takes it."""
        return f"{self.place}:{self.name}"

    @property
    def mutant(self) -> Mutant[object]:
        found: Mutant[object] = import_module(self.place).SUITE.mutants[self.name]
        return found


ISOLATED = Hunt("N1-leader")
KILLED = Hunt("P1-leader")
DEAD = replace(KILLED, dead=True)
STANDARD = replace(KILLED, standard=True, most=1, rate=200.0)  # an ordered channel takes one message at a time

FOUND = (
    # ---- promises and epochs
    Bug("epoch_unchecked", SIM, Hunt("N1-leader,P2-leader")),
    # ---- what an acknowledgement means
    Bug("commit_without_followers", SIM, ISOLATED),
    Bug("unknown_told_as_refused", SIM, Hunt("N1-leader,P2-leader")),
    Bug("unknown_publish_sent_again", SIM, KILLED),
    Bug("commit_before_the_disk", SIM, Hunt("D1-first", most=1)),
    Bug("rounds_without_fsync", SIM, Hunt("D2")),
    Bug("nothing_is_synced", HERE, Hunt("D2")),
    Bug("directories_not_synced_by_the_process", HERE, Hunt("D2")),
    Bug("page_cache_trusted_after_a_power_loss", SIM, Hunt("D3", sync="interval")),
    Bug("clock_unclamped", HERE, Hunt("C1,C3")),
    # ---- damage
    Bug("damage_not_repaired", SIM, Hunt("D8-segment", most=1)),
    Bug("older_copy_trusted", HERE, Hunt("D10-first", most=1)),
    # ---- the ISR
    Bug("effective_too_small", SIM, Hunt("N2-pair")),
    Bug("floor_ignored", SIM, Hunt("N6")),
    Bug("joins_before_it_caught_up", SIM, Hunt("N9-behind")),
    Bug("opened_anywhere", SIM, ISOLATED),
    # ---- logs that part
    Bug("never_caught_up", SIM, ISOLATED),
    # ---- channels
    Bug("fin_forgotten_at_failover", HERE, STANDARD),
    Bug("floor_is_next_read", CURSOR, STANDARD),
    Bug("timeout_forgets", CURSOR, STANDARD),
    Bug("delivery_takes_it_out", CURSOR, STANDARD),
    Bug("ttl_drops_everything_at_once", HERE, STANDARD),
    Bug("depth_is_half_of_what_was_said", HERE, STANDARD),
    Bug("requeue_loses_dead_letters", SIM, DEAD),
    Bug("death_is_not_deferred", CURSOR, DEAD),
    Bug("raising_keeps_attempts", CURSOR, DEAD),
)

# Not found so far: they did no harm under these faults, or nobody has looked for long enough.
SOUGHT = (
    Bug("promise_not_journalled", SIM, Hunt("D3")),
    Bug("epoch_resumed", SIM, Hunt("D2,P1-all")),
    Bug("elected_outside_the_isr", SIM, Hunt("N1-behind")),
    Bug("watch_trusted", HERE, Hunt("N5,E2")),
    Bug("failed_candidate_forgotten", HERE, Hunt("D7-hang")),
    Bug("own_stall_counted", HERE, Hunt("P8,P7")),
    Bug("rounds_forgotten", SIM, KILLED),
    Bug("ack_from_the_page_cache", SIM, Hunt("D1-second", most=1)),
    Bug("damage_delivered", SIM, Hunt("D8-segment,D8-running", standard=True, rate=200.0)),
    Bug("written_whole_taken_for_torn", SIM, Hunt("D8-first", most=1)),
    Bug("compares_nothing", SIM, Hunt("N5,N1-leader")),
    Bug("unknown_taken_for_refused", SIM, Hunt("N1-leader,N5,E2")),
    Bug("cut_too_far", SIM, ISOLATED),
    Bug("uncommitted_applied", SIM, ISOLATED),
    Bug("floor_before_its_deferrals", CURSOR, STANDARD),
    Bug("undo_without_deferred", HERE, STANDARD),
    Bug("undo_without_ranges", CURSOR, STANDARD),
    Bug("seek_forgets_what_was_finished_behind_it", SIM, STANDARD),
    Bug("ordered_before_the_fin_is_committed", SIM, STANDARD),
    Bug("log_start_passes_slow_channels", SIM, STANDARD),
    Bug("death_is_not_in_the_log", SIM, DEAD),
    Bug("death_one_attempt_late", CURSOR, DEAD),
    Bug("deliver_at_is_ignored", CURSOR, STANDARD),
    Bug("requeues_stay_in_memory", CURSOR, STANDARD),
)

BUGS: dict[str, Bug] = {bug.name: bug for bug in (*FOUND, *SOUGHT)}
