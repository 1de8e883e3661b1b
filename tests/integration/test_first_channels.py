"""A node that is killed before a lookup daemon said which channels a new topic begins with."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.integration.servers import Lookupd, Node, wait_until


def test_they_come_with_the_next_life_and_get_every_message(tmp_path: Path) -> None:
    with Lookupd(tmp_path / "lookupd", ["--broadcast-address=127.0.0.1"]) as lookupd:
        lookupd.request("/channel/create?topic=t&channel=archive", b"")
        node = Node(tmp_path / "node", flags=[f"--lookupd-tcp-address={lookupd.tcp}", "--broadcast-address=127.0.0.1"])
        with node:
            wait_until(lambda: "peer info" in node.log(), "the node knows the daemon")
            os.kill(lookupd.pid, signal.SIGSTOP)
            try:
                node.request("/pub?topic=t", b"one")
                assert node.channel("t", "archive") is None
                node.kill()
            finally:
                os.kill(lookupd.pid, signal.SIGCONT)
            node.start()
            node.request("/pub?topic=t", b"two")
            wait_until(lambda: node.channel("t", "archive"), "the channel is there")
            found = node.channel("t", "archive")
            assert found is not None and found["depth"] == 2
