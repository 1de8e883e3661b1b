"""The commands of docs/access.md do what it says, and its table of roles is the code's."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from pathlib import Path

from nsqha.access.roles import GRANTED
from nsqha.access.tokens import parse
from tests.integration.servers import BIN, Node

PAGE = (Path(__file__).resolve().parents[2] / "docs/access.md").read_text()


def test_the_first_file_is_made_and_taken(tmp_path: Path) -> None:
    commands = re.search(r"<!-- commands: .*? -->\n```sh\n(.*?)```", PAGE, re.DOTALL)
    assert commands
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-e", "-c", commands[1]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "anonymous: viewer\nops: viewer, reader, operator (*)\nbilling: publisher (invoices, "
    )
    table = parse((tmp_path / "access.toml").read_bytes())
    for name in ("ops", "billing", "mailer"):
        found = table.find((tmp_path / f"{name}.token").read_bytes().strip())
        assert found is not None and found.name == name
    with Node(tmp_path / "node", flags=[f"--access-file={tmp_path / 'access.toml'}"]) as node:
        shown = {"Authorization": f"Bearer {(tmp_path / 'billing.token').read_text().strip()}"}
        for topic, status in (("invoices", 200), ("invoices.eu", 200), ("orders", 403)):
            connection = http.client.HTTPConnection(node.http, timeout=20)
            connection.request("POST", f"/pub?topic={topic}", b"x", shown)
            assert connection.getresponse().status == status
            connection.close()
    assert (BIN / "nsqlookupd").exists()


def test_the_page_has_every_role() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == [role.value for role in GRANTED]
