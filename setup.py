"""The compiled extensions; everything else is in pyproject.toml.

NSQHA_EXTENSIONS says what becomes of them:

    optional   (default) a machine without a compiler installs all the same, and runs the pure twins
    required   the build fails if they cannot be built; for wheels that are given to others
    none       a wheel for every platform, with the pure twins only
"""

import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip asks the metadata first; this is for who runs the file
    sys.exit("nsqha needs Python 3.11 or newer; this is {}.{} ({})".format(*sys.version_info[:2], sys.executable))

from setuptools import Extension, setup

WANTED = os.environ.get("NSQHA_EXTENSIONS", "optional")
if WANTED not in ("optional", "required", "none"):
    sys.exit(f"NSQHA_EXTENSIONS={WANTED}: must be optional, required or none")

# No -g, which the interpreter's own flags have: paths of the machine that built it, and most of the size.
ARGS = ["-O3", "-fno-strict-aliasing", "-g0"]
NAMES = {
    "_hot": ["nsqha/hot/blake2b.h", "nsqha/hot/crc32.h", "nsqha/hot/_hot.pxd"],
    "_publishing": ["nsqha/hot/_hot.pxd"],
    "_syncing": ["nsqha/hot/sync_threads.h"],
}

setup(
    ext_modules=[
        Extension(
            f"nsqha.hot.{name}",
            [f"nsqha/hot/{name}.pyx"],
            depends=depends,
            optional=WANTED == "optional",
            extra_compile_args=ARGS,
        )
        for name, depends in NAMES.items()
        if WANTED != "none"
    ]
)
