"""A tree of another version runs its own files, and says so."""

from __future__ import annotations

import subprocess
from pathlib import Path

from nsqha import __version__
from tests.integration.installed_tree import installed
from tests.integration.servers import wait_until

SHOW = "import nsqha, nsqha.election.model as m; print(nsqha.__file__, m.PEER_LEVEL, m.PEER_LEVEL_OLDEST)"


def test_a_daemon_of_an_installed_tree_has_its_files_and_its_levels(tmp_path: Path) -> None:
    tree = installed(tmp_path, version="9.0.0", oldest=2, newest=3)
    assert tree.version == "9.0.0" != __version__
    assert installed(tmp_path, version="9.0.0", oldest=2, newest=3) == tree, "made once"
    python, option, code = tree.program("nsqd")
    said = subprocess.check_output([python, option, code.replace("main()", f"\n{SHOW}")], cwd="/", text=True)
    assert said.split() == [str(tree.root / "nsqha/__init__.py"), "3", "2"]
    sleeping = subprocess.Popen([python, option, code.replace("main()", "\nimport time; time.sleep(60)")])
    try:
        wait_until(lambda: tree.runs(sleeping.pid), "the kernel says what runs")
    finally:
        sleeping.kill()
        sleeping.wait()
