"""What a cluster on one machine consists of: ports, folders, command lines."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsqha.cli.dev.cluster import LINES_MAX, all_joined, summary
from nsqha.cli.dev.plan import ANY_PORT_FIRST, ETCD_PORT, PEER_PORT, PORTS, DevPlan, PortAllocator, is_free, make_plan
from nsqha.options import load_nsqd, load_nsqlookupd

WANTED = PORTS | {"peer": PEER_PORT, "etcd": ETCD_PORT}


class FakeSocket:
    def __init__(self, port: int) -> None:
        self.port = port

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def close(self) -> None:
        pass


def binder(taken: Collection[int]) -> Callable[[int], socket.socket | None]:
    """Free ports are 50000, 50001, ..."""
    free = iter(range(50000, 60000))

    def bind(port: int) -> socket.socket | None:
        return None if port in taken else FakeSocket(port or next(free))  # type: ignore[return-value]

    return bind


def plan(folder: Path, *, nodes: int = 3, taken: Collection[int] = (), sync: str = "always", **wanted: int) -> DevPlan:
    ports = PortAllocator(binder(taken))
    return make_plan(folder, nodes=nodes, wanted=WANTED | wanted, sync=sync, etcd="/bin/etcd", ports=ports)


def test_each_further_node_has_ports_100_higher(tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert [node.tcp for node in made.nodes] == ["127.0.0.1:4150", "127.0.0.1:4250", "127.0.0.1:4350"]
    assert [node.peer for node in made.nodes] == ["127.0.0.1:4153", "127.0.0.1:4253", "127.0.0.1:4353"]
    assert (made.lookupd.tcp, made.lookupd.http, made.etcd.endpoint) == (
        "127.0.0.1:4160",
        "127.0.0.1:4161",
        "127.0.0.1:2379",
    )
    assert made.notes == ()


def test_a_taken_port_is_replaced_and_named(tmp_path: Path) -> None:
    made = plan(tmp_path, taken=(4250, 2379))
    assert made.nodes[0].tcp == "127.0.0.1:4150"
    assert made.nodes[1].tcp == "127.0.0.1:50000"
    assert made.notes == ("ports in use, replaced by free ones: 4250 (tcp of node-2), 2379 (etcd)",)


def test_the_first_screen_says_where_etcd_is_if_it_is_not_at_its_usual_port(tmp_path: Path) -> None:
    def screen(made: DevPlan) -> list[str]:
        children = [SimpleNamespace(pid=n) for n in range(len(made.nodes))]
        return summary(SimpleNamespace(plan=made, brokers=children, args=SimpleNamespace(sync="none")))  # type: ignore

    assert any(line.endswith(" cluster status") for line in screen(plan(tmp_path)))
    moved = screen(plan(tmp_path, taken=(2379,)))
    assert any(line.endswith(" cluster status --etcd-endpoint 127.0.0.1:50000") for line in moved)
    many = screen(plan(tmp_path, nodes=15, taken=(2379,)))
    assert len(many) == LINES_MAX
    assert any(line.endswith("10 more: nsqha cluster nodes --etcd-endpoint 127.0.0.1:50000") for line in many)


def test_zero_means_any_port_for_every_node(tmp_path: Path) -> None:
    made = plan(tmp_path, tcp=0)
    assert {node.tcp for node in made.nodes} == {f"127.0.0.1:{port}" for port in (50000, 50001, 50002)}
    assert made.notes == ()


def test_the_command_lines_are_what_the_daemons_take(tmp_path: Path) -> None:
    made = plan(tmp_path, sync="interval")
    options = load_nsqd(made.nodes[1].argv[4:], {}).options
    assert (options.tcp_address, options.sync, options.node_name) == ("127.0.0.1:4250", "interval", "node-2")
    assert (options.etcd_endpoints, options.data_path) == (("127.0.0.1:2379",), str(tmp_path / "node-2"))
    lookupd = load_nsqlookupd(made.lookupd.argv[4:], {}).options
    assert lookupd.etcd_endpoints == ("127.0.0.1:2379",)


def test_etcd_syncs_its_files_where_ok_means_on_disk(tmp_path: Path) -> None:
    assert "--unsafe-no-fsync" not in plan(tmp_path, sync="always").etcd.argv
    for sync in ("interval", "none"):
        assert "--unsafe-no-fsync" in plan(tmp_path, sync=sync).etcd.argv


def test_data_that_is_not_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "journal").touch()
    for name in ("node-1", "node-4", "node-old"):
        (tmp_path / name).mkdir()
    single, extra = plan(tmp_path).notes
    assert "data of a single node" in single
    assert "node-4" in extra
    assert "node-1" not in extra


def test_nodes_have_joined_when_the_controller_has_a_stream_to_each() -> None:
    page = b'{"here": true, "nodes": [{"uid": "0a", "name": "node-1"}, {"uid": "0b", "name": "node-2"}], "links": %s}'
    names = ["node-1", "node-2"]
    assert all_joined(page % b'["0a", "0b"]', names)
    assert not all_joined(page % b'["0a"]', names)
    assert not all_joined(page % b'["0a", "0b"]', [*names, "node-3"])
    assert not all_joined((page % b'["0a", "0b"]').replace(b"true", b"false"), names)
    for broken in (b"", b"[]", b"{}", b'{"here": true, "nodes": [1], "links": []}', b"\xff"):
        assert not all_joined(broken, names)


def test_a_port_is_held_until_its_user_listens_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program, or another cluster, that looks for a port meanwhile gets none of them."""
    ports, others = PortAllocator(), PortAllocator()
    port = ports.take(0, "tcp")
    with socket.socket() as probe, pytest.raises(OSError):
        probe.bind(("127.0.0.1", port))
    drawn = iter([port - ANY_PORT_FIRST] * 2 + list(range(100)))
    monkeypatch.setattr("secrets.randbelow", lambda end: next(drawn))
    assert others.take(0, "tcp") != port
    others.release()
    with socket.create_server(("127.0.0.1", port)) as user:
        ports.release()
        assert not is_free(port)
        with socket.create_connection(("127.0.0.1", port)):
            user.accept()[0].close()
