"""Builds the load generator in place. `make bench` runs this before anything else; it does nothing when up to date.

A plain compiler call rather than a setuptools build: the benchmark is no part of the wheel, and two steps
(Cython, C) are easier to read when they fail.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = [HERE / f"{name}.pyx" for name in ("connection", "measures", "loadgen")]
READ = [*SOURCES, *HERE.glob("*.pxd"), HERE / "system.h"]


class CannotBuild(Exception):
    """No Cython or no C compiler; the text says which and what to install."""


def extension(source: Path) -> Path:
    return HERE / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(*, force: bool = False) -> list[Path]:
    """The compiled load generator, made if it is missing or older than its source."""
    made = [extension(source) for source in SOURCES]
    newest = max(path.stat().st_mtime for path in READ)
    if not force and all(path.exists() and path.stat().st_mtime >= newest for path in made):
        return made
    # Made elsewhere and moved into place: an interrupted build, or two at once, leave no half extension behind.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=HERE) as directory:
        built = [_compiled(source, Path(directory)) for source in SOURCES]
        for path in built:
            path.replace(HERE / path.name)
    return made


def _compiled(source: Path, directory: Path) -> Path:
    try:
        from Cython.Compiler.Main import compile as cythonize
    except ImportError as error:
        raise CannotBuild("the benchmark needs Cython: install the `bench` dependency group") from error
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    c_source, built = directory / f"{source.stem}.c", directory / extension(source).name
    result = cythonize(  # type: ignore[no-untyped-call]
        str(source), output_file=str(c_source), full_module_name=f"benchmarks.{source.stem}"
    )
    if result.num_errors:
        raise CannotBuild(f"{source.name} has {result.num_errors} errors")
    include = [f"-I{sysconfig.get_paths()['include']}", f"-I{HERE}"]
    options = ["-O3", "-fno-strict-aliasing", "-fPIC", "-shared", *include]
    try:
        subprocess.run([*compiler, *options, str(c_source), "-o", str(built)], check=True)
    except FileNotFoundError as error:
        raise CannotBuild(f"the benchmark needs a C compiler: {compiler[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise CannotBuild(f"the C compiler failed with status {error.returncode}") from error
    return built


if __name__ == "__main__":
    try:
        print(*build(force="--force" in sys.argv[1:]))
    except CannotBuild as refusal:
        sys.exit(f"benchmarks: {refusal}")
