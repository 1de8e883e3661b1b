"""A process in a time namespace has another monotonic clock, and the kernel says by how much."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.integration.servers import wait_until
from tests.jepsen.hosts.namespaces import NotPossible, TimeNamespace, monotonic_offset

HOUR = 3600
SHOW = "import time; print(time.monotonic(), flush=True); time.sleep(100)"


def test_a_process_has_the_clock_of_its_time_namespace() -> None:
    try:
        space = TimeNamespace(HOUR)
    except NotPossible as error:
        pytest.skip(str(error))
    before = time.monotonic()
    process = subprocess.Popen([*space.prefix, sys.executable, "-c", SHOW], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = float(process.stdout.readline())
        assert before + HOUR <= said <= time.monotonic() + HOUR
        assert monotonic_offset(process.pid) == HOUR
        space.end()
        assert monotonic_offset(process.pid) == HOUR
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: monotonic_offset(process.pid) is None, "it is gone")


def test_a_clock_can_not_be_before_its_zero() -> None:
    with pytest.raises(NotPossible):
        TimeNamespace(-int(time.monotonic()) - HOUR)
