"""`accept-metadata` that is refused, asked about, broken off and run again, and an etcd that is put back once more."""

from __future__ import annotations

import pytest

from tests.integration.cluster import UnderLoad
from tests.integration.restorable import Restorable, move_leader
from tests.integration.servers import wait_until

pytestmark = pytest.mark.timeout(300)


def test_a_node_is_away_and_the_command_dies_and_etcd_is_put_back_twice(restorable: Restorable) -> None:
    cluster = restorable.with_backup()
    with UnderLoad(cluster, "old"):
        move_leader(cluster, "old")
        away = cluster.followers("old")[-1]
        uid = cluster.uid(away)
        others = [node for node in cluster.nodes if node is not away]
        away.stop()
        cluster.wait_isr("old", 2)
        restorable.restore()
        restorable.wait_waiting(*others)
        wait_until(lambda: not cluster.uid(away), "the registration that was restored is over")

        refused = restorable.accept("--yes", status=6, answer_seconds=1.0)
        assert f"{uid:016x} (away); 1 partitions have a replica there" in refused["said"]
        asked = restorable.accept("--without", f"{uid:016x}", status=8)
        assert "not confirmed" in asked["said"]
        assert restorable.waiting() == {node.name: False for node in others}, "nothing was done"

        # Broken off between the hold and the end: they wait, also after a restart, and it is run again.
        restorable.put_hold()
        restorable.wait_waiting(*others, held=True)
        assert others[0].stop() == 0
        others[1].kill()
        for node in others:
            node.spawn()
        restorable.wait_waiting(*others, held=True)
        assert cluster.meta("old") is not None
        shown = restorable.accept("--yes", "--without", f"{uid:016x}")
        assert shown["unheard"] == [f"{uid:016x}"]
        assert shown["partitions"] and all(partition["loss"] == "" for partition in shown["partitions"])
        restorable.wait_believed()
        cluster.wait_isr("old", 2)

        away.start()  # it has nothing against this etcd but what it has of it is behind: it follows
        cluster.wait_registered(3)
        cluster.wait_isr("old", 3)

        # Nodes that believe stop as well, and notice what happens to etcd while they wait.
        restorable.put_hold()
        restorable.wait_waiting(held=True)
        restorable.restore()  # to the same old state, without the hold and without the first acceptance
        restorable.wait_waiting(held=True)
        shown = restorable.accept("--yes")
        assert shown["generation"] == 2
        restorable.wait_believed()
        cluster.wait_isr("old", 3)
    cluster.check_replicas()
