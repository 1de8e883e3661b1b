"""`make dist-test`: every distribution in an environment of its own, used; and what is in it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from release.build import WHEEL_BYTES_MAX, build, interpreters
from tests.dist.conftest import DIST, ROOT, clean_environment, distributions, python_of, version_tag
from tests.integration.devnode import ANY_PORTS, die_with_parent

pytestmark = pytest.mark.timeout(900)
Wheelhouse = Callable[[str], Path]
FIRST_MESSAGE_SECONDS = 10.0
C_SOURCES = (".pyx", ".pxd", ".h", ".c")


def wheels() -> list[Path]:
    return [path for path in distributions() if path.suffix == ".whl"]


def names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


# ---- what is in them


def test_there_is_one_of_each() -> None:
    tags = {path.name.split("-")[2] for path in wheels()}
    assert tags == {version_tag(python) for python in interpreters()} | {"py3"}
    assert len([path for path in distributions() if path.name.endswith(".tar.gz")]) == 1


@pytest.mark.parametrize("path", wheels(), ids=lambda path: path.name)
def test_a_wheel_has_what_git_has_of_its_packages(path: Path) -> None:
    """And no tests, no C sources, nothing that only this machine had."""
    listed = subprocess.run(["git", "ls-files", "nsqha", "lookupd", "pyspark_nsqha"], cwd=ROOT, capture_output=True)
    wanted = {name for name in listed.stdout.decode().split() if not name.endswith(C_SOURCES)}
    found = {name for name in names(path) if ".dist-info/" not in name and not name.endswith(("/", ".so"))}
    assert found == wanted
    assert path.stat().st_size <= WHEEL_BYTES_MAX


@pytest.mark.parametrize("path", wheels(), ids=lambda path: path.name)
def test_a_compiled_wheel_has_an_honest_tag(path: Path) -> None:
    extensions = {name for name in names(path) if name.endswith(".so")}
    if path.name.endswith("py3-none-any.whl"):
        assert not extensions
        return
    assert len(extensions) == 3 and "manylinux_2_17" in path.name
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(path)], capture_output=True, text=True)
    assert re.search(r"consistent with\s+the following platform tag:\s+\"manylinux_2_\d+_", shown.stdout), shown
    (newest,) = re.findall(r"consistent with\s+the following platform tag:\s+\"manylinux_2_(\d+)_", shown.stdout)
    assert int(newest) <= 17


def test_the_metadata_are_what_an_index_takes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, distributions())], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_sdist_has_no_machine_in_it() -> None:
    (path,) = DIST.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert {(member.uid, member.gid, member.uname) for member in members} == {(0, 0, "")}
    assert len({member.mtime for member in members}) == 1
    assert any(member.name.endswith("nsqha/hot/_hot.pyx") for member in members)
    assert not [member.name for member in members if "/tests/" in member.name or member.name.endswith((".so", ".c"))]


def test_the_same_commit_makes_the_same_bytes(tmp_path: Path) -> None:
    build(tmp_path / "again")
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert again == {path.name: path.read_bytes() for path in distributions()}


# ---- installed and used


def made(python: str, folder: Path) -> Path:
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


def pip(env: Path, house: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Our pip installs into `env` what is in `house`; nothing is asked of an index."""
    command = [sys.executable, "-m", "pip", "--python", str(env / "bin/python"), "install", "--quiet", "--no-index"]
    command += ["--find-links", str(house), "--no-cache-dir", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(command, capture_output=True, text=True, env=environment | extra)


@pytest.mark.parametrize("path", distributions(), ids=lambda path: path.name)
def test_from_an_empty_environment_to_the_first_message(path: Path, wheelhouse: Wheelhouse, tmp_path: Path) -> None:
    python = python_of(path)
    house = wheelhouse(python)
    env = made(python, tmp_path / "env")
    began = time.monotonic()
    # The sdist is for machines without a compiler, too: this one has none.
    done = pip(env, house, str(path), **({"CC": "/bin/false"} if path.suffix == ".gz" else {}))
    assert done.returncode == 0, done.stderr
    functions = first_message(env, tmp_path)
    took = time.monotonic() - began
    print(f"{path.name}: {took:.1f} s from pip to the first message, {functions} functions")
    assert functions == ("compiled" if "-cp3" in path.name else "pure")
    if path.suffix == ".whl" and "NSQHA_MEASURE" in os.environ:  # alone on the machine only
        assert took <= FIRST_MESSAGE_SECONDS
    said = run(env, "nsqd", "--version")
    assert said.startswith("nsqd v1.3.0 (built w/python3.")
    assert run(env, "nsqlookupd", "--version").startswith("nsqlookupd v1.3.0")
    check_man_pages(env, tmp_path)


def run(env: Path, *command: str, cwd: Path | None = None) -> str:
    program, *words = command
    done = subprocess.run(
        [str(env / "bin" / program), *words],
        env=clean_environment(env),
        cwd=cwd or env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, (command, done)
    return done.stdout


def first_message(env: Path, folder: Path) -> str:
    """`nsqha dev`, publish, receive; which functions it runs."""
    command = [str(env / "bin/nsqha"), "dev", "--json", "--data-dir", str(folder / "data"), *ANY_PORTS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=clean_environment(env), cwd=env, preexec_fn=die_with_parent
    ) as dev:
        assert dev.stdout is not None
        node: dict[str, Any] = json.loads(dev.stdout.readline())["nodes"][0]
        address = ["--nsqd-tcp-address", node["tcp"]]
        run(env, "nsqha", "pub", "orders", "first", *address)
        assert run(env, "nsqha", "sub", "orders", "billing", "-n", "1", *address) == "first\n"
        stats = json.loads(run(env, "nsqha", "stats", "--json", "--grpc-address", node["grpc"]))
        dev.send_signal(signal.SIGTERM)
        assert dev.wait(30) == 0
    return str(stats["node"]["implementation"])


def check_man_pages(env: Path, folder: Path) -> None:
    run(env, "nsqha", "generate", "man", "--to", str(folder / "made"))
    pages = sorted((folder / "made/share/man/man1").iterdir())
    assert {"nsqha.1", "nsqd.1", "nsqlookupd.1", "nsqha-pub.1"} <= {page.name for page in pages}
    for page in pages:
        done = subprocess.run(["groff", "-man", "-ww", "-z", "-Kutf8", "-Tutf8", str(page)], capture_output=True)
        assert (done.returncode, done.stderr) == (0, b""), page


def test_pip_takes_the_pure_wheel_where_no_other_fits(wheelhouse: Wheelhouse, tmp_path: Path) -> None:
    for version, platform, wanted in (
        ("3.11", "manylinux_2_17_x86_64", "cp311-cp311"),
        ("3.11", "win_amd64", "py3-none-any"),
        ("3.19", "manylinux_2_17_x86_64", "py3-none-any"),
        ("3.11", "musllinux_1_2_x86_64", "py3-none-any"),
    ):
        target = tmp_path / f"{version}-{platform}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-index", "--find-links", str(DIST)]
        command += ["--no-deps", "--only-binary=:all:", "--python-version", version, "--platform", platform]
        subprocess.run([*command, "--dest", str(target), "nsqha"], check=True, env={"PATH": os.environ["PATH"]})
        (taken,) = target.iterdir()
        assert wanted in taken.name


def test_an_older_python_is_told_so_in_one_line(tmp_path: Path) -> None:
    """By pip, and by a checkout that somebody runs with it."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    old = next(iter(sorted(pyenv.glob("3.10*/bin/python3.10"))), None)
    if old is None:
        pytest.skip("there is no Python 3.10 on this machine")
    env = made(str(old), tmp_path / "env")
    done = pip(env, DIST, str(next(iter(DIST.glob("*-py3-none-any.whl")))))
    assert done.returncode and "requires a different Python: 3.10" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("ERROR")]) == 1
    for module in ("nsqha", "lookupd", "nsqha.cli.nsqd"):
        run_ = subprocess.run([str(old), "-m", module], cwd=ROOT, capture_output=True, text=True)
        assert run_.returncode == 1
        assert run_.stderr == f"nsqha needs Python 3.11 or newer; this is 3.10 ({old})\n"
