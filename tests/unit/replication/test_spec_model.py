"""tests/sim/spec_trace.py is the TLA+ spec: as many states, the same invariants, the same mutants."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests.sim.spec_trace import FAULTS, InvariantBroken, NotAStep, Spec, State, Step, TraceChecker
from tests.spec.tlc import CONFIGS, Config, spec_constants

BY_NAME = {config.name: config for config in CONFIGS}


def spec_of(config: Config) -> Spec:
    """What TLC checks under that name."""
    values = {**spec_constants(), **config.constants}
    return Spec(
        min_isr=values["MinIsr"],
        fsync_ack=bool(values["FsyncAck"]),
        max_epoch=values["MaxEpoch"],
        max_value=values["MaxValue"],
        max_crash=values["MaxCrash"],
        max_version=values["MaxVersion"],
        on=frozenset(name for name in values if name.startswith(("Mut", "Allow")) and values[name]),
    )


def states(spec: Spec) -> Iterator[State]:
    """Every state that can be reached, each once."""
    todo = [replace(spec, leader=leader).initial() for leader in spec.replicas]
    seen = {s.key() for s in todo}
    while todo:
        s = todo.pop()
        yield s
        for _, following in spec.steps(s):
            if (key := following.key()) not in seen:
                seen.add(key)
                todo.append(following)


@pytest.mark.parametrize("name", ["same-isr", "same-election", "same-faults", "same-hand-over"])
def test_as_many_states_as_tlc_finds_and_the_invariants_hold_in_all(name: str) -> None:
    config, found = BY_NAME[name], 0
    spec = spec_of(config)
    for s in states(spec):
        found += 1
        assert not spec.broken(s)
    assert found == config.distinct


@pytest.mark.parametrize("fsync_ack", [True, False])
def test_the_invariants_hold_on_random_walks_without_bounds(fsync_ack: bool) -> None:
    spec, taken = Spec(fsync_ack=fsync_ack), set[str]()
    acked = 0
    for seed in range(150):
        rng = random.Random(seed)
        # Without weights nodes would be down most of the time, and nothing would ever be committed.
        weights = {"Push": 4, "Commit": 8, "Write": 2, "Sync": 4, "Become": 8, "Restart": 4, "Elect": 0.3, "Expand": 2}
        weights |= dict.fromkeys(("Crash", "Kill", "Wipe"), 0.1) | {"HandOver": 0.2, "FenceIsr": 3, "Refresh": 4}
        s = spec.initial()
        for _ in range(60):
            steps = list(spec.steps(s))
            step, s = rng.choices(steps, [weights.get(step[0], 1.0) for step, _ in steps])[0]
            taken.add(step[0])
            assert not spec.broken(s), f"seed {seed}"
        acked += len(s.acked)
    every = "Write Push Sync Commit Elect FenceIsr Become Hear Refresh Shrink Expand Swap EtcdApply Reply FenceRequest"
    assert taken == {*every.split(), "HandOver", "Crash", "Kill", "Power", "Wipe", "Restart"}
    assert acked > 300


# The shortest way that each mutant has to a violation; a request is (leader, epoch, version).
COUNTEREXAMPLES = {
    "no-promise": """
        Become a, Elect b False, Become b, Write b, Push b c
        Push a c                        # c promised epoch 2 and lets the leader of epoch 1 cut its log
        Sync b, Commit b""",
    "duplicate-by-position": """
        Become a, Write a, Push a b, Elect c False, Become c, Write c
        Push c b                        # b has something under this log id, so c's is taken for a duplicate
        Sync c, Commit c""",
    "proposed-isr": """
        Become a, Write a, Push a b, Shrink a c, Sync a
        Commit a                        # c may still be elected: the request is under way""",
    "lossy-electable-wipe": """
        Become a, Write a, Push a b, Push a c, Sync a, Commit a, Wipe a
        Restart a False                 # in the ISR, with nothing""",
    "lossy-electable-interval": """
        Become a, Write a, Push a b, Push a c, Commit a, Crash a 0
        Restart a False""",
    "any-registration": """
        Become a, Write a, Push a b, Push a c, Sync a, Commit a, Wipe b, Restart b True
        Expand a b                      # with what b's former life acknowledged
        EtcdApply a/1/1""",
    "resume-epoch": """
        Elect b False, Become b, Push b a, Write b, Expand b a, Crash b 1, Restart b False
        Become b                        # its new life does not know that a may join
        Push b c, Commit b, EtcdApply b/2/2""",
    "no-request-fence": """
        Elect b False, Become b, Push b a, Write b, Push b c, Expand b a
        FenceRequest b                  # does nothing: the request can still be taken
        Sync b, Commit b, EtcdApply b/2/2""",
    "no-recovery-sync": """
        Become a, Write a, Kill a
        Restart a False                 # found its entry in the page cache and calls it durable
        Elect a False, Become a, Push a b, Push a c, Commit a, Crash a 0, Restart a False""",
    "reuse-log-id": """
        Become a, Write a, Push a b, FailedWrite a
        Write a                         # another batch under the log id that b has
        Push a b, Push a c, Sync a, Commit a""",
    "below-min-isr": """
        Elect b False, Crash c 0, FenceIsr c, Become b, Write b, Sync b
        Commit b                        # the only copy""",
    "no-floor": """
        Elect b False, Crash c 0
        FenceIsr c""",
}


def script(text: str) -> list[Step]:
    """The steps of a script: words are names, numbers, truths and requests written leader/epoch/version."""

    def word(text: str) -> object:
        if "/" in text:
            leader, epoch, version = text.split("/")
            return leader, int(epoch), int(version)
        if text in ("True", "False"):
            return text == "True"
        return int(text) if text.isdigit() else text

    lines = (line.partition("#")[0] for line in text.splitlines())
    return [tuple(map(word, step.split())) for line in lines for step in line.split(",") if step.strip()]


def broken_by(spec: Spec, steps: Sequence[Step]) -> set[str]:
    """What does not hold after the last step. Raises NotAStep."""
    s = spec.initial()
    for step in steps:
        s = spec.apply(s, step)
    return set(spec.broken(s))


MUTANTS = [config for config in CONFIGS if config.violates]


@pytest.mark.parametrize("config", MUTANTS, ids=lambda config: config.name)
def test_a_rule_that_is_switched_off_is_missed(config: Config) -> None:
    spec, steps = spec_of(config), script(COUNTEREXAMPLES[config.name])
    assert config.violates in broken_by(replace(spec, max_crash=9, max_version=9), steps)


@pytest.mark.parametrize("config", MUTANTS, ids=lambda config: config.name)
def test_with_the_rule_the_same_steps_are_refused_or_harmless(config: Config) -> None:
    steps = script(COUNTEREXAMPLES[config.name])
    healthy = replace(spec_of(config), on=FAULTS, max_crash=9, max_version=9)
    try:
        assert broken_by(healthy, steps) == set()
    except NotAStep:
        pass


def following(*steps: str) -> TraceChecker:
    checker = TraceChecker()
    checker.follow(script(",".join(steps)))
    return checker


def test_a_trace_that_the_spec_allows_is_followed() -> None:
    checker = following("Become a", "Write a", "Write a", "Push a b 2", "Push a c 2", "Sync a", "Commit a 2")
    checker.expect("b", log_end=2, promise=1, committed=None)
    checker.expect("a", committed=2, epoch=1)
    assert checker.state.acked == ((1, 1), (1, 2))


def test_a_commit_to_where_it_is_already_is_no_step() -> None:
    checker = following("Become a", "Commit a 0")
    assert checker.state.acked == ()


def test_a_push_to_one_that_promised_more_is_refused_with_the_story() -> None:
    with pytest.raises(NotAStep, match=r"c promised epoch 2[\s\S]*Push b c"):
        following("Become a", "Elect b False", "Become b", "Push b c", "Push a c")


def test_an_outcome_nobody_asked_for_is_refused() -> None:
    with pytest.raises(NotAStep, match="no request"):
        following("Become a", "EtcdApply a/1/1")


def test_a_real_node_that_differs_from_the_spec_is_noticed() -> None:
    with pytest.raises(AssertionError, match="a's log_end is 2, the spec says 1"):
        following("Become a", "Write a").expect("a", log_end=2)


def test_a_loss_is_reported_by_the_name_of_the_invariant() -> None:
    checker = TraceChecker(spec_of(BY_NAME["proposed-isr"]))
    with pytest.raises(InvariantBroken, match=r"^NoLoss after \('Commit', 'a'\)"):
        checker.follow(script(COUNTEREXAMPLES["proposed-isr"]))
