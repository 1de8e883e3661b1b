"""`make dist`: what is given to others, in dist/, the same bytes from the same commit.

    nsqha-V.tar.gz                              the sdist; every wheel is built from it
    nsqha-V-cp311-cp311-manylinux_2_17_*.whl    one for each CPython from 3.11 on on this machine, compiled
    nsqha-V-py3-none-any.whl                    the pure twins; pip takes it where none of the others fits

Linux wheels get their tag from auditwheel, which reads the symbols that the extensions need: it refuses one that needs
a newer C library than the tag says. All times in the archives are those of the last commit (SOURCE_DATE_EPOCH).
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PLATFORM = "manylinux_2_17"
MINORS = range(11, 20)
WHEEL_BYTES_MAX = 2_000_000
BUILD_NEEDS = ("setuptools>=77", "Cython>=3.1")  # as pyproject.toml says


class BuildFailed(Exception):
    """Nothing was put into dist/."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make dist")
    parser.add_argument("--to", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    try:
        for path in build(args.to):
            print(f"{path.stat().st_size:>9,}  {path}", file=sys.stderr)
    except BuildFailed as error:
        sys.exit(f"make dist: {error}")


def build(target: Path, *, root: Path = ROOT) -> list[Path]:
    """Build everything; `target` is emptied first. BuildFailed."""
    work = root / "build" / "dist"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _out(["git", "log", "-1", "--format=%ct"], root) or 0)
    found = [sdist(root, work, epoch)]
    for python in interpreters():
        found.append(repaired(wheel(found[0], work, epoch, python=python, extensions="required"), work, epoch))
    found.append(wheel(found[0], work, epoch, python=sys.executable, extensions="none"))
    for path in found:
        if path.stat().st_size > WHEEL_BYTES_MAX and path.suffix == ".whl":
            raise BuildFailed(f"{path.name} has {path.stat().st_size} bytes, {WHEEL_BYTES_MAX} are allowed")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    return [Path(shutil.copy(path, target)) for path in found]


def interpreters() -> list[str]:
    """This one, and one of every other CPython from 3.11 on: of the PATH, else of pyenv."""
    found = {sys.version_info.minor: sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in MINORS:
        name = f"python3.{minor}"
        for path in (shutil.which(name), *map(str, sorted(pyenv.glob(f"*/bin/{name}")))):
            # pyenv's programs on the PATH end with an error where that version is not chosen.
            if minor not in found and path and _out([path, "-c", "print('runs')"], ROOT):
                found[minor] = path
    return [found[minor] for minor in sorted(found)]


# ---- the sdist


def sdist(root: Path, work: Path, epoch: int) -> Path:
    """Build it from a copy of what git has, or would have: no file that only this machine has gets into it."""
    copy = work / "tree"
    for name in _out(["git", "ls-files", "--cached", "--others", "--exclude-standard"], root).splitlines():
        if (root / name).is_file() and not name.startswith("tests/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, copy / name)
    code = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    _run([sys.executable, "-c", code, str(work)], copy, epoch)
    (made,) = work.glob("*.tar.gz")
    _normalize(made, epoch)
    return made


def _normalize(path: Path, epoch: int) -> None:
    """Write the archive again, sorted, with one time and no owners."""
    with tarfile.open(path) as archive:
        files = [(member, archive.extractfile(member).read()) for member in archive if member.isfile()]  # type: ignore[union-attr]
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in sorted(files, key=lambda file: file[0].name):
            entry = tarfile.TarInfo(member.name)
            entry.size, entry.mtime, entry.mode = len(data), epoch, 0o644
            archive.addfile(entry, io.BytesIO(data))
    path.write_bytes(gzip.compress(plain.getvalue(), mtime=epoch))


# ---- wheels


def wheel(source: Path, work: Path, epoch: int, *, python: str, extensions: str) -> Path:
    """Build a wheel of the sdist with that interpreter, in a folder that has the same path each time."""
    folder = work / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    out = work / f"{extensions}-{Path(python).name}"
    command = [_with_build_tools(python, work), "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(out)]
    (unpacked,) = folder.iterdir()
    _run([*command, str(unpacked)], folder, epoch, NSQHA_EXTENSIONS=extensions)
    (made,) = out.glob("*.whl")
    return made


def _with_build_tools(python: str, work: Path) -> str:
    """The interpreter itself if it is ours, which has them; else one of an environment that is made for it."""
    if python == sys.executable:
        return python
    env = work / f"env-{Path(python).name}"
    if not env.exists():
        _run([python, "-m", "venv", str(env)], work, 0)
        _run([str(env / "bin/python"), "-m", "pip", "install", "--quiet", *BUILD_NEEDS], work, 0)
    return str(env / "bin" / "python")


def repaired(path: Path, work: Path, epoch: int) -> Path:
    """The wheel with the tag of the oldest systems it runs on; as it is where there is no such tag."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return path
    out = work / "repaired"
    tag = f"{PLATFORM}_{platform.machine()}"
    command = [str(BIN / "auditwheel"), "repair", "--strip", "--plat", tag, "--only-plat", "-w", str(out), str(path)]
    _run(command, work, epoch)
    return next(made for made in out.glob("*.whl") if made.name.split("-")[2] == path.name.split("-")[2])


# ---- commands


def _run(command: list[str], cwd: Path, epoch: int, **environment: str) -> None:
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=cwd, env=env | environment, capture_output=True, text=True)
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")


def _out(command: list[str], cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True).stdout


def wheels(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*.whl"))


if __name__ == "__main__":
    main()
