"""The daemons live in the sandbox of their units: under the very filter of system calls that systemd makes of the lines
there, without memory that is written and executed, without privileges."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from nsqha.cli.brokers.v2client import Subscriber, V2Publisher
from nsqha.cli.generate.systemd import SANDBOX
from tests.integration.servers import BIN, Host, Node, wait_until

NUMBERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")

LAUNCHER = '''
"""Run a command with these system calls only: EPERM for all others, as SystemCallErrorNumber= says."""
import ctypes, os, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
ALLOW, EPERM = 0x7FFF0000, 0x00050001
code = [(0x20, 0, 0, 4), (0x15, 1, 0, 0xC000003E), (0x06, 0, 0, EPERM), (0x20, 0, 0, 0)]
for number in map(int, sys.argv[1].split(",")):
    code += [(0x15, 0, 1, number), (0x06, 0, 0, ALLOW)]
code.append((0x06, 0, 0, EPERM))
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))

class Fprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

fprog = Fprog(len(code), ctypes.addressof(program))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
libc.prctl(65, 1, 0, 0, 0)  # PR_SET_MDWE; kernels before 6.3 have none
assert libc.prctl(22, 2, ctypes.byref(fprog), 0, 0) == 0  # PR_SET_SECCOMP, a filter
os.execv(sys.argv[2], sys.argv[2:])
'''


@cache
def group(name: str) -> frozenset[str]:
    """System calls of one of systemd's groups."""
    done = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
    words = [line.strip() for line in done.stdout.splitlines()[1:]]
    found: set[str] = set()
    for word in words:
        if word.startswith("@"):
            found |= group(word)
        elif word and not word.startswith("#"):
            found.add(word)
    return frozenset(found)


def allowed() -> str:
    """The numbers of what the unit allows."""
    calls = set(group("@default"))
    for sign, name in re.findall(r"^SystemCallFilter=(~?)(@[\w-]+)$", SANDBOX, re.MULTILINE):
        calls = calls - group(name) if sign else calls | group(name)
    defined = dict(re.findall(r"^#define __NR_(\w+) (\d+)$", NUMBERS.read_text(), re.MULTILINE))
    return ",".join(defined[call] for call in sorted(calls) if call in defined)


def test_a_broker_serves_in_the_sandbox_of_its_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None or platform.machine() != "x86_64" or not NUMBERS.exists():
        pytest.skip("systemd-analyze, x86_64 and its numbers of system calls are needed")
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)
    forbidden = [sys.executable, str(launcher), allowed(), sys.executable, "-c", "import os; os.chroot('/')"]
    assert b"Operation not permitted" in subprocess.run(forbidden, capture_output=True).stderr, "the filter works"
    host = Host(prefix=(sys.executable, str(launcher), allowed()))
    with Node(tmp_path / "node", host=host, flags=["--grpc-address=127.0.0.1:0", "--segment-bytes=65536"]) as node:
        publisher = V2Publisher(node.tcp, 20)
        node.request("/topic/create?topic=orders", b"")
        node.request("/channel/create?topic=orders&channel=billing", b"")
        publisher.publish("orders", [bytes(1000)] * 500)  # several segments
        reader = Subscriber(node.tcp, 20, "orders", "billing", window=100)
        got = 0

        def all_came() -> bool:
            nonlocal got
            messages = reader.messages()
            got += len(messages)
            reader.answer(messages, None, None)
            return got >= 500

        wait_until(all_came, "messages come")
        assert node.request("/readyz") == b"OK" and b"nsqha_" in node.request("/metrics")
        node.restart()
        assert node.request("/readyz") == b"OK"
        assert node.stop() == 0
        assert "Operation not permitted" not in node.log()
        node.start()


@pytest.mark.parametrize("there", [True, False])
def test_a_volume_that_is_not_its_own_is_one_line_with_what_to_do(there: bool, tmp_path: Path) -> None:
    """Of the image's user, or of ours without what root may do."""
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o555)
    path = data if there else data / "below"
    prefix = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"] if os.geteuid() == 0 else []
    command = [str(BIN / "nsqd"), f"--data-path={path}", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    done = subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert f"--data-path={path}: " in said
    assert f"Permission denied; this process is user {os.geteuid()}: give it" in said
    assert "Traceback" not in done.stderr
