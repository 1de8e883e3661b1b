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


def test_v2_clients_are_served_before_what_http_and_grpc_need_is_imported() -> None:
    """What is slow to import and has nothing to do with them: they wait for a node that starts again."""
    slow = ("aiohttp", "grpc", "google.protobuf", "attr", "yarl", "nsqha.server.http.stats")
    code = (
        "import asyncio, sys, tempfile\n"
        "from nsqha.options import Options\n"
        "from nsqha.server.node import start\n"
        "class Served(Exception): pass\n"
        "async def main():\n"
        "    def served(*how, **more): raise Served\n"
        "    asyncio.get_running_loop().create_server = served\n"
        "    at = {f'{name}_address': '127.0.0.1:0' for name in ('tcp', 'http', 'grpc', 'segments')}\n"
        "    with tempfile.TemporaryDirectory() as data:\n"
        "        node = start.Node(Options(data_path=data, **at), open_grpc=None)\n"
        "        try: await node.start()\n"
        "        except Served: pass\n"
        "        else: raise AssertionError('it listens without create_server')\n"
        f"        found = sorted(name for name in {slow!r} if name in sys.modules)\n"
        "        assert not found, found\n"
        "        import os; os._exit(0)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
