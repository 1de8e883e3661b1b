"""What one channel more costs where there are many: `python -m benchmarks.channels [--at 100,500,900] [--nodes 1]`.

One topic. Channels are made one by one over HTTP; CPU of the brokers per channel of the `SAMPLE` that follow each
number, and then of deleting the same again.
"""

from __future__ import annotations

import argparse
import http.client
import tempfile
import time
from pathlib import Path

from . import servers
from .many import described, host_of
from .procstat import ProcessTree

SAMPLE = 40
SETTLE_S = 0.3  # after them: what follows from a change in other threads and nodes counts, too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", default="100,500,900", help="numbers of channels")
    parser.add_argument("--nodes", type=int, default=1, help="brokers; more than one have a cluster with etcd")
    args = parser.parse_args()
    servers.compile_modules()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        subject = servers.our_broker("compiled") if args.nodes == 1 else servers.our_cluster(args.nodes)
        with servers.fresh_server(subject, workspace, sync="interval") as server:
            if args.nodes == 1:
                address, tree = server.http, server.tree
            else:
                nodes = described(workspace / "cell" / "log")
                address, tree = host_of(nodes[0]["http"]), ProcessTree([node["pid"] for node in nodes])
            for at, made, deleted in costs(address, tree, [int(number) for number in args.at.split(",")]):
                print(f"{at:5} channels: {made:.2f} ms to make one more, {deleted:.2f} ms to delete it", flush=True)


def costs(address: tuple[str, int], tree: ProcessTree, numbers: list[int]) -> list[tuple[int, float, float]]:
    """CPU milliseconds of the brokers per channel that is made, and deleted, at each of these numbers of channels."""
    connection = http.client.HTTPConnection(*address)

    def post(path: str) -> None:
        connection.request("POST", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {answer.read().decode()}")
        answer.read()

    def change(how: str, channels: range) -> None:
        for number in channels:
            post(f"/channel/{how}?topic=many&channel=channel{number:05d}")

    def per_channel(how: str, channels: range) -> float:
        before = tree.cpu_ns()
        change(how, channels)
        time.sleep(SETTLE_S)
        return (tree.cpu_ns() - before) / 1e6 / len(channels)

    post("/topic/create?topic=many")
    there, found = 0, []
    for number in sorted(numbers):
        change("create", range(there, number))
        there = number
        time.sleep(SETTLE_S)
        sample = range(number, number + SAMPLE)
        found.append((number, per_channel("create", sample), per_channel("delete", sample)))
    return found


if __name__ == "__main__":
    main()
