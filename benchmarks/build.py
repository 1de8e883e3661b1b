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
SOURCE = HERE / "loadgen.pyx"
EXTENSION = HERE / f"loadgen{sysconfig.get_config_var('EXT_SUFFIX')}"


class CannotBuild(Exception):
    """No Cython or no C compiler; the text says which and what to install."""


def build(*, force: bool = False) -> Path:
    """The compiled load generator, made if it is missing or older than its source."""
    if not force and EXTENSION.exists() and EXTENSION.stat().st_mtime >= SOURCE.stat().st_mtime:
        return EXTENSION
    try:
        from Cython.Compiler.Main import compile as cythonize
    except ImportError as error:
        raise CannotBuild("the benchmark needs Cython: install the `bench` dependency group") from error
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    include = sysconfig.get_paths()["include"]
    # Made elsewhere and moved into place: an interrupted build, or two at once, leave no half extension behind.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=HERE) as directory:
        c_source, built = Path(directory) / "loadgen.c", Path(directory) / EXTENSION.name
        result = cythonize(  # type: ignore[no-untyped-call]
            str(SOURCE), output_file=str(c_source), full_module_name="benchmarks.loadgen"
        )
        if result.num_errors:
            raise CannotBuild(f"{SOURCE.name} has {result.num_errors} errors")
        options = ["-O3", "-fno-strict-aliasing", "-fPIC", "-shared", f"-I{include}"]
        try:
            subprocess.run([*compiler, *options, str(c_source), "-o", str(built)], check=True)
        except FileNotFoundError as error:
            raise CannotBuild(f"the benchmark needs a C compiler: {compiler[0]} is not installed") from error
        except subprocess.CalledProcessError as error:
            raise CannotBuild(f"the C compiler failed with status {error.returncode}") from error
        built.replace(EXTENSION)
    return EXTENSION


if __name__ == "__main__":
    try:
        print(build(force="--force" in sys.argv[1:]))
    except CannotBuild as refusal:
        sys.exit(f"benchmarks: {refusal}")
