"""A fault for which the cluster is in no state at the moment is put off, and ends no run."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.errors import Unavailable
from tests.jepsen.deployment import NotNow
from tests.jepsen.faults import overload
from tests.jepsen.faults.membership import record_of


def test_a_record_that_etcd_does_not_give_is_one_for_later() -> None:
    def meta(topic: str) -> None:
        raise Unavailable("etcd does not answer")

    with pytest.raises(NotNow, match="etcd does not answer"):
        record_of(cast(Any, SimpleNamespace(topic="t", meta=meta)))


def test_a_broker_that_has_ended_has_no_descriptors_to_run_out_of(monkeypatch: pytest.MonkeyPatch) -> None:
    victim = SimpleNamespace(name="n1", pid=1)
    monkeypatch.setattr(overload, "open_numbers", lambda pid: set())
    with pytest.raises(NotNow, match="n1 has ended"):
        overload.out_of_descriptors(cast(Any, SimpleNamespace(whole_nodes=[victim])), random.Random(1))
