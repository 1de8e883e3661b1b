"""The README's commands do what it says, and the Makefile has its verbs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.integration.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SPARK = (ROOT / "docs/spark.md").read_text()


def test_the_three_commands_show_what_the_readme_says(tmp_path: Path) -> None:
    commands = re.search(r"<!-- commands: .*? -->\n```sh\n(.*?)```", README, re.DOTALL)
    assert commands
    ports = {name: free_port() for name in ("tcp", "http", "grpc", "segments", "lookupd-tcp", "lookupd-http")}
    dev = subprocess.Popen(
        [sys.executable, "-m", "nsqha", "dev", "--json", "--data-dir", str(tmp_path / "data")]
        + [word for name, port in ports.items() for word in (f"--{name}-port", str(port))],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert dev.stdout is not None
        assert json.loads(dev.stdout.readline())["nodes"][0]["tcp"] == f"127.0.0.1:{ports['tcp']}"
        environment = {
            "NSQHA_TCP_ADDRESS": f"127.0.0.1:{ports['tcp']}",
            "NSQHA_GRPC_ADDRESS": f"127.0.0.1:{ports['grpc']}",
            "PATH": "/usr/bin:/bin",
        }
        outputs = []
        for line in commands[1].strip().splitlines():
            words = shlex.split(line)
            assert words[0] == ".venv/bin/nsqha"
            done = subprocess.run(
                [sys.executable, "-m", "nsqha", *words[1:]], env=environment, cwd=ROOT, capture_output=True, timeout=60
            )
            assert done.returncode == 0, done.stderr.decode()
            outputs.append(done.stdout.decode())
        assert outputs[1].split() == ["first", "second", "third"]
        assert "3" in outputs[2]
        again = [sys.executable, "-m", "nsqha", "sub", "orders", "billing", "-n", "3"]
        done = subprocess.run(again, env=environment, cwd=ROOT, capture_output=True, timeout=60)
        assert done.stdout.split() == [b"first", b"second", b"third"]
    finally:
        dev.terminate()
        assert dev.wait(30) == 0


def test_every_verb_of_the_readme_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"^make ([\w-]+)", README + SPARK, re.MULTILINE))
    assert verbs >= {"dev", "install-spark", "test", "lint", "bench", "crash", "mutants"}
    assert not {verb for verb in verbs if not re.search(rf"^{verb}:", makefile, re.MULTILINE)}
