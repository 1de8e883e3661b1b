"""Make the fixtures of this release: `python -m tests.releases.make` writes tests/releases/<version>.

    alone.tar.xz     data folder of a node that was alone, stopped cleanly
    cluster.tar.xz   data folders of three nodes, killed under a leader of a later epoch
    etcd.json        what their etcd had: key -> value; those on the lease of a process are under "leased"
    wire.json.xz     what nodes and a lookup daemon said to each other: method -> requests and replies, each the bytes
                     in hex and what they mean; and how they introduced themselves
    expected.json    what must come out of these folders

They are made once for each release, by that release, and never again: tests hold every later build to them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.integration.cluster import Cluster, Member  # first: it says how gRPC is loaded where processes are forked

# isort: split
from google.protobuf.json_format import MessageToDict

from nsqha import __version__
from nsqha.cli.brokers.v2client import Subscriber, V2Publisher
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from nsqha.server.peers.api import methods_of
from nsqha.server.peers.calls import SERVICES
from nsqha.server.peers.greeting import INTRODUCTION
from tests.integration.servers import Lookupd, Node, wait_until

RELEASES = Path(__file__).resolve().parent
ROOT = RELEASES.parents[1]
BYTES_MAX = 200 * 1024
ALIKE_MAX = 3  # messages of a method that say the same things; but all batches, as each follows from another
HOUR_MS = 3_600_000
NOT_DATA = {"lock", "lock.mdb"}  # who uses it now, and how

_RECORDING = """#!{python}
import sys

sys.path.insert(0, {root!r})
from nsqha.server.peers import api

encoded = api.Method.encoded


def recorded(self, message, expected):
    data = encoded(self, message, expected)
    side = "requests" if expected is self.request else "replies"
    with open({to!r}, "a") as file:
        file.write(f"{{self.name}} {{side}} {{data.hex()}}\\n")
    return data


api.Method.encoded = recorded
from {module} import main

main()
"""


# ---- a node that is alone


def alone(folder: Path) -> dict[str, Any]:
    """Leave a data folder of some life, and tell what a start has to find."""
    node = Node(folder, flags=["--segment-bytes=8192", "--retention=1ms"])
    with node:
        for topic, *channels in (("orders", "billing", "audit"), ("trimmed", "reader"), ("quiet",)):
            node.request(f"/topic/create?topic={topic}", b"")
            for channel in channels:
                node.request(f"/channel/create?topic={topic}&channel={channel}", b"")
        node.request("/channel/pause?topic=orders&channel=audit", b"")
        orders, trimmed = _published(node, "orders", 60), _published(node, "trimmed", 60)
        _published(node, "quiet", 3)
        first = _taken(node, "orders", "billing", 15, requeued=(5, 11, 12), delay_ms=HOUR_MS)
        node.request("/channel/policy?topic=orders&channel=billing", b'{"max_attempts": 1}')
        second = _taken(node, "orders", "billing", 15, requeued=(3, 7))
        _taken(node, "trimmed", "reader", 55)
        wait_until(lambda: _pairs(node, "trimmed") < 3, "retention removes what is finished", 30)
        node.restart()
        orders += _published(node, "orders", 5, first=60)
        assert node.stop() == 0
    left = {"orders/billing": [body for body in orders if body not in first + second]}
    left["trimmed/reader"] = trimmed[55:]
    return {
        "at": time.time(),  # by the clock of a test, too: what is deferred is due an hour later
        "left": left,
        "died": {"orders/billing": [second[3], second[7]]},
        "deferred": {"orders/billing": [first[5], first[11], first[12]]},
        "depths": {"orders/billing": len(left["orders/billing"]), "orders/audit": 65, "trimmed/reader": 5},
        "paused": ["orders/audit"],
        "policies": {"orders/billing": {"max_attempts": 1}},
        "unhanded": {"quiet": 3},
    }


def _published(node: Node, topic: str, count: int, first: int = 0) -> list[str]:
    bodies = [f"{topic} {n}" for n in range(first, first + count)]
    with contextlib.closing(V2Publisher(node.tcp, 20)) as publisher:
        for body in bodies:
            publisher.publish(topic, [padded(body)])
    return bodies


def padded(body: str) -> bytes:
    """A few of them fill a pair of files."""
    return body.encode().ljust(300, b".")


def unpadded(body: bytes) -> str:
    return body.rstrip(b".").decode()


def _pairs(node: Node, topic: str) -> int:
    return len(list((node.data / "topics").glob(f"{topic}-*/0/*.segment")))


def _taken(
    node: Node, topic: str, channel: str, count: int, *, requeued: tuple[int, ...] = (), delay_ms: int = 0
) -> list[str]:
    """So many messages are taken, and finished but for some."""
    found: list[str] = []
    with contextlib.closing(Subscriber(node.tcp, 20, topic, channel, window=1)) as reader:
        while len(found) < count:
            for message in reader.messages():
                # None comes that is not wanted: it would die, or come twice.
                reader.answer([message], delay_ms if len(found) in requeued else None, count - len(found) - 1)
                found.append(unpadded(message.body))
        reader.leave()
    _settled(node, topic, channel)
    return found


def _settled(node: Node, topic: str, channel: str) -> None:
    """What was answered has arrived, and a message that was on its way is back."""

    def nothing_in_flight() -> bool:
        found = node.channel(topic, channel)
        return found is not None and found["in_flight_count"] == 0 and found["client_count"] == 0

    wait_until(nothing_in_flight, "nothing is in flight", 20)


# ---- a cluster


def cluster(folder: Path, records: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Leave three data folders, and what was said to `records`; tell what must be found, and what etcd had."""
    Member.command = _recording(folder, records, "nsqha.cli.nsqd")
    Lookupd.command = _recording(folder, records, "lookupd.__main__")
    with Cluster.running(folder) as made:
        made.create("orders", "billing")
        bodies = _life(made)
        meta = made.meta("orders")
        assert meta is not None and meta.epoch > 1
        etcd = _etcd(made)
        for daemon in made.daemons:
            daemon.kill()
    return {"bodies": bodies, "topic": "orders", "channel": "billing"}, etcd


def _recording(folder: Path, records: Path, module: str) -> str:
    """A program that is the daemon, and keeps what it says to others."""
    folder.mkdir(exist_ok=True)
    path = folder / f"recording-{module}"
    path.write_text(_RECORDING.format(python=sys.executable, root=str(ROOT), to=str(records), module=module))
    path.chmod(0o755)
    return str(path)


def _life(made: Cluster) -> list[str]:
    """Publishes at every node, a consumer at a follower, a follower that falls behind, a leader that dies."""
    bodies = [f"order {n}" for n in range(60)]

    def publish(some: list[str]) -> None:
        for number, body in enumerate(some):
            running = [node for node in made.nodes if node.running]
            running[number % len(running)].request("/pub?topic=orders", body.encode(), seconds=40)

    publish(bodies[:20])
    follower, other = made.followers("orders")
    with contextlib.closing(Subscriber(other.tcp, 20, "orders", "billing", window=1)) as reader:
        found = [message.body.decode() for message in reader.messages()]
        assert found  # in flight there, and never answered
    follower.kill()
    made.wait_isr("orders", 2)
    publish(bodies[20:40])
    leader = made.leader("orders")
    leader.kill()
    leader.start()
    made.wait_isr("orders", 2)
    follower.start()  # behind a leader of a later epoch: it has to ask
    made.wait_isr("orders", 3)
    made.followers("orders")[0].request("/channel/create?topic=orders&channel=audit", b"")
    leader = made.leader("orders")
    leader.kill()
    publish(bodies[40:])
    leader.start()
    made.wait_isr("orders", 3)
    made.wait_level("orders")
    return bodies


def _etcd(made: Cluster) -> dict[str, Any]:
    client = EtcdClient(EtcdOptions((made.etcd.endpoint,)))
    request = rpc.RangeRequest(key=b"/nsqha/", range_end=b"/nsqha0")
    pairs = client.read(lambda stubs: stubs.kv.Range, request).kvs
    client.close()
    kept = {kv.key.decode(): kv.value.decode() for kv in pairs if not kv.lease}
    return {"kept": kept, "leased": {kv.key.decode(): kv.value.decode() for kv in pairs if kv.lease}}


def wire(records: Path) -> dict[str, Any]:
    """The first messages of each kind, no two the same."""
    methods, alike = methods_of(SERVICES), Counter[tuple[str, ...]]()
    said: dict[str, dict[str, list[Any]]] = {name: {"requests": [], "replies": []} for name in methods}
    for name, side, data in dict.fromkeys(tuple(line.split(" ")) for line in records.read_text().splitlines()):
        kind = methods[name].request if side == "requests" else methods[name].reply
        says = MessageToDict(kind.FromString(bytes.fromhex(data)), preserving_proto_field_name=True)
        alike[name, side, *says] += 1
        if "appends" in says or alike[name, side, *says] <= ALIKE_MAX:
            said[name][side].append({"hex": data, "says": says})
    heard = {name: sides for name, sides in said.items() if any(sides.values())}
    return {"introduction": INTRODUCTION, "methods": heard}


# ---- files


def packed(folders: dict[str, Path]) -> bytes:
    """The data folders by their names, always with the same bytes for the same files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, folder in folders.items():
            for path in sorted(folder.rglob("*")):
                if path.name in NOT_DATA:
                    continue
                info = archive.gettarinfo(path, f"{name}/{path.relative_to(folder)}")
                info.uid = info.gid = info.mtime = 0
                info.uname = info.gname = ""
                with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:
                    archive.addfile(info, file)
    return lzma.compress(out.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive, mode="r:xz") as files:
        files.extractall(into, filter="data")


def _text(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def make(target: Path) -> int:
    """Write the fixtures; their size."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        expected_alone = alone(at / "alone")
        expected_cluster, etcd = cluster(at / "cluster", at / "records")
        target.mkdir(parents=True)
        (target / "alone.tar.xz").write_bytes(packed({"data": at / "alone" / "data"}))
        nodes = {name: at / "cluster" / name / "data" for name in ("n1", "n2", "n3")}
        (target / "cluster.tar.xz").write_bytes(packed(nodes))
        expected = {"alone": expected_alone, "cluster": expected_cluster}
        (target / "etcd.json").write_bytes(_text(etcd))
        (target / "expected.json").write_bytes(_text(expected))
        (target / "wire.json.xz").write_bytes(lzma.compress(_text(wire(at / "records")), preset=9))
    return sum(path.stat().st_size for path in target.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--to", type=Path, default=RELEASES, help="folder that gets the folder of this release")
    target: Path = parser.parse_args().to / __version__
    if target.exists():
        print(f"{target} is there; fixtures of a release are made once, and then held to", file=sys.stderr)
        return 1
    size = make(target)
    print(f"{target}: {size} bytes")
    if size > BYTES_MAX:
        print(f"more than {BYTES_MAX}: lower ALIKE_MAX or the number of messages", file=sys.stderr)
    return size > BYTES_MAX


if __name__ == "__main__":
    sys.exit(main())
