"""How a command ends, also when a thread of gRPC was stopped in the middle of a call."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from nsqha.cli import nsqd
from nsqha.cli.terminal import exits
from nsqha.errors import AppendFailed
from nsqha.options import Options
from nsqha.server.node.start import OpenGrpc

# What is left of a call when the interpreter has stopped gRPC's thread: its lock is taken by nobody who could give it
# back, its finalizer wants it, and it is part of a cycle, so that only the interpreter's last collection finds it.
STOPPED_IN_A_CALL = """
import sys, threading
import grpc

class Call:
    def __init__(self):
        self.lock = threading.Lock()
        self.lock.acquire()
        self.itself = self

    def __del__(self):
        self.lock.acquire()

call = Call()
"""
ANY_PORT = Options(
    tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", grpc_address="127.0.0.1:0", segments_address="127.0.0.1:0"
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_the_interpreter_would_hang() -> None:
    """Else the tests below show nothing."""
    code = f"{STOPPED_IN_A_CALL}\nprint('there', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.kill()
    process.communicate()


def test_the_end_waits_for_no_call_and_loses_no_output() -> None:
    code = (
        f"{STOPPED_IN_A_CALL}\nfrom nsqha.cli.terminal import exits\n"
        "sys.stdout.write('half a line')\nsys.stderr.write('and talk')\nexits.end(5)"
    )
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (5, "half a line", "and talk")


def test_an_error_that_nobody_expected_ends_the_process_too() -> None:
    done = run(f"{STOPPED_IN_A_CALL}\nfrom nsqha.cli.terminal import exits\nexits.run(lambda: 1 // 0)")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.rstrip().endswith("ZeroDivisionError: integer division or modulo by zero")


def test_an_interrupt_that_became_another_error_is_one() -> None:
    """It comes while a class of a module that is being imported is made."""
    code = (
        "import signal\nfrom nsqha.cli.terminal import exits\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Attribute:\n"
        "    def __set_name__(self, owner, name):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "exits.run(lambda: type('Owner', (), {'attribute': Attribute()}))"
    )
    done = run(code)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("closed", ["sys.stdout.close()", "sys.stdout = sys.stderr = None"])
def test_an_output_that_is_closed_is_no_reason_to_stay(closed: str) -> None:
    assert run(f"{STOPPED_IN_A_CALL}\nfrom nsqha.cli.terminal import exits\n{closed}\nexits.end(5)").returncode == 5


@pytest.mark.parametrize(
    ("words", "module", "status"),
    [
        (["nsqha", "cluster", "status", "--etcd-endpoint=127.0.0.1:1"], "nsqha.cli", 6),
        (["nsqha", "broker", "--etcd-endpoint=127.0.0.1:1", "--data-path=/dev/null/x"], "nsqha.cli", 1),
        (["nsqd", "--data-path=/dev/null/x"], "nsqha.cli.nsqd", 1),
        (["nsqlookupd", "--etcd-endpoint=127.0.0.1:1", "--tcp-address=127.0.0.1:0"], "lookupd.__main__", 1),
    ],
)
def test_every_command_ends_so(words: list[str], module: str, status: int) -> None:
    done = run(f"{STOPPED_IN_A_CALL}\nsys.argv = {words!r}\nfrom {module} import main\nmain()")
    assert done.returncode == status
    assert "127.0.0.1:1" in done.stderr or "/dev/null/x" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_grpc_it_is_the_interpreter_that_ends() -> None:
    code = "import sys\nfrom nsqha.cli.terminal import exits\ntry:\n    exits.end(5)\nexcept SystemExit as end:\n"
    assert run(f"{code}    sys.exit(end.code + 1)").returncode == 6


@pytest.mark.parametrize("raised", [OSError(errno.ENOSPC, "No space left on device", "/d/journal.new"), None])
def test_a_node_that_can_not_start_on_a_full_disk_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: OSError | None
) -> None:
    def start(options: Options, open_grpc: OpenGrpc, sockets: dict[str, socket.socket]) -> int:
        for sock in sockets.values():
            sock.close()
        full = OSError(errno.ENOSPC, "No space left on device")
        if raised is not None:
            raise raised
        raise AppendFailed(f"/d/journal.new: {full}") from full

    monkeypatch.setattr("nsqha.server.node.start.serve_until_signal", start)
    assert nsqd.run(replace(ANY_PORT, data_path="/d"), ()) == exits.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert "--data-path=/d: the disk is full" in line and "free space and start again" in line
    assert "/d/journal.new" in line


GO_IGNORES = ["USR1", "USR2", "ALRM", "VTALRM", "PROF", "IO", "PWR", "XCPU", "XFSZ", "URG", "WINCH", "CHLD", "CONT"]


def test_a_signal_that_ends_no_go_program_ends_none_of_ours() -> None:
    """Scripts that rotate logs send SIGUSR1 to nsqd."""
    code = (
        "import signal\nfrom nsqha.cli.terminal import exits\n"
        f"numbers = [getattr(signal, 'SIG' + name) for name in {GO_IGNORES}]\n"
        "numbers += range(signal.SIGRTMIN, signal.SIGRTMAX + 1)\n"
        "exits.run(lambda: [signal.raise_signal(number) for number in numbers] and 7)"
    )
    done = run(code)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize(("before", "status"), [("SIG_DFL", -signal.SIGHUP), ("SIG_IGN", 7)])
def test_sighup_ends_a_process_at_once_unless_its_parent_ignores_it(before: str, status: int) -> None:
    code = (
        f"import signal\nfrom nsqha.cli.terminal import exits\nsignal.signal(signal.SIGHUP, signal.{before})\n"
        "exits.run(lambda: signal.raise_signal(signal.SIGHUP) or 7)"
    )
    assert run(code).returncode == status
