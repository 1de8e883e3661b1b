"""The cache of channel state in a real broker: used when whole, done without when not, never believed unproven."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.integration.servers import Node, wait_until
from tests.integration.test_node import Client, mpub

DEFERRED, FINISHED, MESSAGES = 300, 200, 600
NOTHING_WRITTEN = "nsqha_cursor_cache_waiting_rows 0.0"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def restore(folder: Path, contents: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in contents.items():
        (folder / name).write_bytes(data)


def replace(folder: Path, text: str) -> None:
    shutil.rmtree(folder)
    folder.write_text(text)


def mixed(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """Some sectors of before, some of after."""
    size = max(len(old), len(new))
    old, new = old.ljust(size, b"\0"), new.ljust(size, b"\0")
    return b"".join((old, new)[rng.randrange(2)][at : at + 512] for at in range(0, size, 512))


def test_whatever_lies_there_the_channel_is_where_it_was(tmp_path: Path) -> None:
    rng = random.Random(3)
    with Node(tmp_path, flags=["--sync=interval"]) as node:
        folder = node.data / "cursors.lmdb"
        client = Client(node)
        client.send(mpub("t", [b"%d" % n for n in range(MESSAGES)]))
        client.ok()
        client.subscribe("t", "c", DEFERRED + FINISHED)
        ids = [client.message()[1] for _ in range(DEFERRED + FINISHED)]
        client.send(b"RDY 0\n" + b"".join(b"REQ %s 3600000\n" % id_ for id_ in ids[:DEFERRED]))
        wait_until(lambda: channel(node)["deferred_count"] == DEFERRED, "all are deferred")
        written(node, folder)
        before = files(folder)
        client.send(b"".join(b"FIN %s\n" % id_ for id_ in ids[DEFERRED:]))
        wait_until(lambda: channel(node)["in_flight_count"] == 0, "all are finished")
        wait_until(lambda: not uncommitted(node), "that is committed, not only finished")
        written(node, folder)

        after = files(folder)
        damages: dict[str, Callable[[], None]] = {
            "nothing": lambda: None,
            "deleted": lambda: shutil.rmtree(folder),
            "old": lambda: restore(folder, before),
            "mixed": lambda: restore(folder, {n: mixed(before[n], after[n], rng) for n in after}),
            "garbage": lambda: restore(folder, {name: rng.randbytes(50_000) for name in after}),
            "another's": lambda: restore(folder, {"data.mdb": b"not a database"}),
            "a file": lambda: replace(folder, "a file"),
        }
        for name, damage in damages.items():
            node.kill()
            damage()
            node.start()
            now = channel(node)
            assert (now["deferred_count"], now["depth"]) == (DEFERRED, MESSAGES - DEFERRED - FINISHED), name
            dropped = "channel state is read from the logs" in node.log()
            assert dropped == (name in ("mixed", "garbage")), (name, node.log())
            written(node, folder)

        client = Client(node)
        client.subscribe("t", "c", MESSAGES)
        rest = MESSAGES - DEFERRED - FINISHED
        assert [client.message()[2] for _ in range(rest)] == [b"%d" % n for n in range(MESSAGES - rest, MESSAGES)]
        assert channel(node)["deferred_count"] == DEFERRED
        client.close()
        assert node.stop() == 0
        node.start()
        assert channel(node)["deferred_count"] == DEFERRED


def channel(node: Node) -> dict[str, int]:
    return node.json("/stats?format=json&topic=t")["topics"][0]["channels"][0]  # type: ignore[no-any-return]


def uncommitted(node: Node) -> int:
    topics = node.json("/stats?format=json&include_nsqha=true")["nsqha"]["topics"]
    channels = next(topic["channels"] for topic in topics if topic["topic_name"] == "t")
    return sum(cursor["uncommitted_progress"] for cursor in channels[0]["cursors"])


def written(node: Node, folder: Path) -> None:
    """The cache has been written since now."""
    proof = folder / "proof"
    last = proof.read_bytes() if proof.exists() else b""  # before there is something that may be written at once
    node.request("/pub?topic=other", b"so that there is something to write")
    wait_until(lambda: proof.exists() and proof.read_bytes() != last, "the cache is written")
    wait_until(lambda: NOTHING_WRITTEN in node.request("/metrics").decode(), "nothing waits")
