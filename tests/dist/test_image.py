"""The commands of the Dockerfile, in an empty environment and as a user without rights; what they make is used so, too.

There is no container engine: the folders that they name are elsewhere, and what the base image would have (`python`,
a compiler) is this machine's. What pip would fetch is fetched before.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsqha.cli.generate.topology import DATA_PATH, UID
from tests.dist.conftest import ROOT
from tests.integration.servers import free_port, wait_until

pytestmark = pytest.mark.timeout(600)
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")


def unprivileged() -> tuple[str, list[str]]:
    """An interpreter, and what is before a command of a user without rights: the image's, or, where none of the
    interpreters is for everybody, us without what root may do."""
    ours = os.path.realpath(sys.executable)
    if os.geteuid() != 0:
        return ours, []
    user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs"]
    for python in (ours, f"/usr/bin/python3.{sys.version_info.minor}"):
        tried = subprocess.run([*user, "sh", "-c", f"{python} -c 'import ensurepip, venv'"], capture_output=True)
        if tried.returncode == 0:
            return python, user
    return ours, ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may enter; those of pytest are its own user's."""
    with tempfile.TemporaryDirectory(prefix="nsqha-image-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_the_commands_of_the_image_make_what_it_runs(wheelhouse: Callable[[str], Path], folder: Path) -> None:
    build, final = DOCKERFILE.split("\nFROM ")[-2:]
    base = folder / "bin"
    base.mkdir()
    python, prefix = unprivileged()
    (base / "python").symlink_to(python)
    places = {"/opt/nsqha": folder / "opt", "/src": folder / "src", "/data": folder / "data"}
    places["/src"].mkdir()
    for names, target in re.findall(r"^COPY (?!--)(.*) (\S+)$", build, re.MULTILINE):
        for source in names.split():
            copy = places["/src"] / (source if target == "./" else target)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", "_*.c"))
            else:
                shutil.copy(ROOT / source, copy)
    if "--reuid" in " ".join(prefix):
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, UID, UID, follow_symlinks=False)
    env = {"PATH": f"{base}:/usr/bin:/bin", "HOME": str(folder)}
    env |= dict(word.split("=", 1) for line in re.findall(r"^ENV (.*)$", build, re.MULTILINE) for word in line.split())
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheelhouse(sys.executable))}
    for command in re.findall(r"^RUN (.*)$", build, re.MULTILINE):
        for name, place in places.items():
            command = re.sub(rf"(?<![\w/]){name}\b", str(place), command)
        done = subprocess.run(
            [*prefix, "sh", "-ec", command], cwd=places["/src"], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert places["/data"].is_dir()
    use(final, folder / "opt", places["/data"], prefix)


def use(final: str, opt: Path, data: Path, prefix: list[str]) -> None:
    """Run the image's command, and its HEALTHCHECK, on a root that it cannot write to."""
    (given,) = re.findall(r"^CMD (\[.*\])$", final, re.MULTILINE)
    (health,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", final, re.MULTILINE)
    command, check = (re.findall(r'"([^"]+)"', words) for words in (given, health))
    command = [str(opt / "bin" / command[0]), *(word.replace(DATA_PATH, str(data)) for word in command[1:])]
    tcp, http = free_port(), free_port()
    env = {"PATH": f"{opt}/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "NSQHA_ADDRESS": f"127.0.0.1:{http}"}
    env |= {"NSQD_TCP_ADDRESS": f"127.0.0.1:{tcp}", "NSQD_HTTP_ADDRESS": f"127.0.0.1:{http}"}

    def healthy() -> bool:
        asked = [*prefix, str(opt / "bin" / check[0]), *check[1:]]
        return subprocess.run(asked, env=env, capture_output=True).returncode == 0

    assert not healthy()
    before = {path for path in opt.rglob("*")}
    with subprocess.Popen([*prefix, *command], env=env, cwd=data, stderr=subprocess.PIPE) as process:
        try:
            wait_until(healthy, "it is healthy", 60)
        finally:
            process.terminate()
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert process.wait(60) == 0, said
    assert "compiled functions" in said
    assert {path for path in opt.rglob("*")} == before, "it writes to its volume only"
