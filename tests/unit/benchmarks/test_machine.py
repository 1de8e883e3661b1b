"""The steps that a machine is compared by: that what is timed is a round trip."""

import pytest
import uvloop

from benchmarks import machine


@pytest.mark.parametrize("kind", ["tcp", "grpc"])
def test_a_round_trip_takes_cpu_on_both_sides(kind):
    cpu_us, trip_us = uvloop.run(machine.round_trips(kind, rounds=1, trips=50))
    assert cpu_us > 1
    assert trip_us > 1
