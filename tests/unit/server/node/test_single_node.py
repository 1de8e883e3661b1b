"""A node that is alone does not load what only a cluster needs."""

from __future__ import annotations

import subprocess
import sys

CLUSTER = (
    "nsqha.server.node.cluster.",
    "nsqha.server.routing.forward",
    "nsqha.server.routing.relay",
    "nsqha.server.replica",
)


def test_a_node_that_is_alone_imports_nothing_of_a_cluster() -> None:
    code = (
        "import sys, nsqha.server.node.start\n"
        f"found = sorted(name for name in sys.modules if name.startswith({CLUSTER!r}))\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
