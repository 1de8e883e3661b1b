"""A fault for which the cluster is in no state at the moment is put off, and ends no run."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.errors import Unavailable
from tests.integration.servers import CannotStart
from tests.jepsen.deployment import NotNow
from tests.jepsen.faults import membership, overload, processes
from tests.jepsen.faults.fault import Injected


def without_etcd(monkeypatch: pytest.MonkeyPatch, *whole: Any) -> Any:
    """A deployment whose etcd does not answer."""

    def topic(name: str) -> None:
        raise Unavailable("etcd does not answer")

    monkeypatch.setattr(membership, "ETCD_SECONDS", 0.0)
    store = SimpleNamespace(records=SimpleNamespace(topic=topic))
    return SimpleNamespace(topic="t", store=store, whole_nodes=list(whole), brokers=[])


def test_a_record_that_etcd_does_not_give_is_one_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotNow, match="etcd does not answer"):
        membership.record_of(without_etcd(monkeypatch))


@pytest.mark.parametrize("inject", [membership.emptied, membership.policy, membership.deleted, membership.grown])
def test_what_operators_ask_for_is_put_off_while_nobody_can_answer(
    inject: membership.Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotNow):
        inject(without_etcd(monkeypatch), random.Random(1))  # no broker
    with pytest.raises(NotNow, match="etcd"):
        inject(without_etcd(monkeypatch, SimpleNamespace(name="n1")), random.Random(1))


def test_the_second_of_two_faults_is_healed_once_though_the_first_is_put_off() -> None:
    tries, healed = iter([NotNow("etcd is away"), None]), []

    def take_back() -> None:
        if (error := next(tries)) is not None:
            raise error

    first = Injected("first", frozenset(), take_back, lambda: "")
    second = Injected("second", frozenset(), lambda: healed.append(1), lambda: "")
    both = membership.during(lambda *_: first, lambda *_: second)(cast(Any, None), random.Random(1))
    with pytest.raises(NotNow):
        both.heal()
    both.heal()
    assert healed == [1]


def test_a_broker_that_has_ended_has_no_descriptors_to_run_out_of(monkeypatch: pytest.MonkeyPatch) -> None:
    victim = SimpleNamespace(name="n1", pid=1)
    monkeypatch.setattr(overload, "open_numbers", lambda pid: set())
    with pytest.raises(NotNow, match="n1 has ended"):
        overload.out_of_descriptors(cast(Any, SimpleNamespace(whole_nodes=[victim])), random.Random(1))


def test_a_loop_that_does_not_run_yet_can_not_stand_still() -> None:
    """Its process takes what was asked before it looks for what an earlier life was asked."""
    starting = SimpleNamespace(name="n1", listening=lambda: False)
    with pytest.raises(NotNow, match="n1 does not serve"):
        processes.stalled(cast(Any, SimpleNamespace(whole_nodes=[starting])), random.Random(1))


def test_nor_can_that_of_a_broker_that_has_ended() -> None:
    def listening() -> bool:
        raise CannotStart("it ended while starting")

    over = SimpleNamespace(name="n1", listening=listening)
    with pytest.raises(NotNow, match="n1 does not serve"):
        processes.stalled(cast(Any, SimpleNamespace(whole_nodes=[over])), random.Random(1))
