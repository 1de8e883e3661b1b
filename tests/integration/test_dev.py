"""`nsqha dev`: the first screen, --json for scripts, taken ports, and what outlives a kill."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from nsqha.cli import build_parser
from tests.integration.devnode import ANY_PORTS, BIN, DevNode, die_with_parent
from tests.integration.servers import wait_until


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(BIN / "nsqha"), "dev", *flags],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )


def first_screen(process: subprocess.Popen[str]) -> list[str]:
    """Everything up to the line that says how to stop."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith("Ctrl-C"):
            return lines
    raise AssertionError((lines, process.stderr.read() if process.stderr else ""))


def end(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[str, str]:
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    return stdout, stderr


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_the_first_screen_is_short_and_its_commands_work(tmp_path: Path) -> None:
    process = start(tmp_path, *ANY_PORTS)
    lines = first_screen(process)
    assert len(lines) <= 12
    assert all(len(line) <= 120 for line in lines[:5])
    text = "\n".join(lines)
    assert "fdatasync" in text  # what OK means
    assert str(tmp_path / "data") in text
    commands = [line.strip() for line in lines if re.match(r"  (curl|nsqha|\S*/nsqha) ", line)]
    assert len(commands) == 3
    address = re.search(r"http://([\d.:]+)/pub", commands[0])
    assert address
    assert urllib.request.urlopen(f"http://{address[1]}/pub?topic=orders", data=b"hello").read() == b"OK"
    for command, more, said in ((commands[1], "-n 1", "hello"), (commands[2], "--yes", "1 again")):
        words = [*shlex.split(command)[1:], *more.split()]
        done = subprocess.run([str(BIN / "nsqha"), *words], capture_output=True, text=True, timeout=60)
        assert said in done.stdout, done.stderr
    stdout, stderr = end(process)
    assert (stdout, stderr) == ("", "")


def test_a_taken_port_is_replaced_and_that_is_said(tmp_path: Path, taken: int) -> None:
    flags = [flag for flag in ANY_PORTS if not flag.startswith(("--tcp", "--http"))]
    process = start(tmp_path, *flags, f"--tcp-port={taken}", f"--http-port={taken}")
    lines = first_screen(process)
    assert len(lines) <= 12
    assert any(f"{taken} (tcp)" in line and f"{taken} (http)" in line for line in lines)
    assert f"127.0.0.1:{taken}" not in "\n".join(lines)
    end(process, signal.SIGTERM)


def test_json_is_one_line_and_nothing_else(tmp_path: Path, taken: int) -> None:
    process = start(tmp_path, "--json", *ANY_PORTS[1:], f"--tcp-port={taken}")
    assert process.stdout is not None
    described = json.loads(process.stdout.readline())
    assert set(described) == {"nodes", "lookupd"}
    node, lookupd = described["nodes"][0], described["lookupd"][0]
    assert set(node) == {"pid", "tcp", "http", "grpc", "segments", "data", "start"}
    assert set(lookupd) == {"pid", "tcp", "http"}
    assert node["pid"] == process.pid
    assert urllib.request.urlopen(f"http://{node['http']}/ping").read() == b"OK"
    assert urllib.request.urlopen(f"http://{lookupd['http']}/ping").read() == b"OK"
    stdout, _ = end(process)
    assert stdout == ""


def test_the_lookup_daemon_knows_the_broker(tmp_path: Path) -> None:
    node = DevNode(tmp_path)
    node.create("orders", "billing")
    lookupd = node.description["lookupd"][0]["http"]

    def found() -> Any:
        try:
            return json.loads(urllib.request.urlopen(f"http://{lookupd}/lookup?topic=orders").read())
        except HTTPError:
            return None  # it has not been told yet

    told = wait_until(lambda: (now := found()) and now["channels"] and now, "the lookup daemon knows the topic")
    assert told["channels"] == ["billing"]
    assert told["producers"][0]["tcp_port"] == int(node.tcp.rpartition(":")[2])
    assert node.stop() == 0


def test_what_was_published_survives_a_kill_and_start_brings_it_back(tmp_path: Path) -> None:
    node = DevNode(tmp_path)
    node.create("orders", "billing")
    node.publish("orders", "kept", "too")
    again = node.description["nodes"][0]["start"]
    node.process.kill()
    node.process.wait()
    process = subprocess.Popen(again, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
    assert process.stdout is not None
    described = json.loads(process.stdout.readline())["nodes"][0]
    assert (described["tcp"], described["data"]) == (node.tcp, str(tmp_path / "data"))
    assert node.ok("sub", "orders", "billing", "-n", "2").split() == ["kept", "too"]
    end(process)


def test_a_delay_of_days_is_accepted(tmp_path: Path) -> None:
    node = DevNode(tmp_path)
    node.create("orders", "billing")
    node.ok("pub", "orders", "later", "--delay", "364d")
    assert node.json("channel", "show", "orders", "billing")["deferred"] == 1
    assert node.stop() == 0


def test_a_folder_in_use_is_refused_in_one_line(tmp_path: Path) -> None:
    node = DevNode(tmp_path)
    done = subprocess.run(
        [str(BIN / "nsqha"), "dev", "--data-dir", str(tmp_path / "data"), *ANY_PORTS],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("nsqha dev: ")
    assert node.stop() == 0


@pytest.mark.parametrize("example", build_parser("dev").verbs()["dev"].examples)
def test_the_examples_of_its_help_run(tmp_path: Path, example: str) -> None:
    words = shlex.split(example)[2:]
    process = start(tmp_path, *words)
    assert process.stdout is not None
    if "--json" in words:
        json.loads(process.stdout.readline())
    else:
        lines = [line for line in first_screen(process) if "ports in use" not in line]
        assert len(lines) <= 12
    end(process)
    folder = tmp_path / (words[words.index("--data-dir") + 1] if "--data-dir" in words else "data")
    assert folder.is_dir()


@pytest.mark.parametrize("command", [["nsqha", "dev", *ANY_PORTS], ["nsqd", "--tcp-address=127.0.0.1:0"]])
def test_a_folder_that_can_not_be_used_is_named(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "d" / "lock").mkdir(parents=True)  # as for a folder of somebody else, also when root runs this
    words = [str(BIN / command[0]), *command[1:], "--data-path", "d"]
    if command[0] == "nsqd":
        words.append("--http-address=127.0.0.1:0")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, preexec_fn=die_with_parent)
    assert done.returncode == 1
    assert "d/lock: Is a directory" in done.stderr
    assert "Traceback" not in done.stderr
