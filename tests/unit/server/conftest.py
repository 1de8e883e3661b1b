"""Certificates for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import run

import pytest


@pytest.fixture(scope="session")
def make_certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, str]]:
    """Self-signed: paths of certificate and key."""
    folder: Path = tmp_path_factory.mktemp("certificates")

    def make(name: str, *options: str) -> tuple[str, str]:
        cert, key = str(folder / f"{name}.crt"), str(folder / f"{name}.key")
        command = [
            "openssl",
            "req",
            "-x509",
            "-nodes",
            "-keyout",
            key,
            "-out",
            cert,
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
        ]
        run([*command, "-newkey", "rsa:2048", *options], check=True, capture_output=True)
        return cert, key

    return make


@pytest.fixture(scope="session")
def certificate(make_certificate: Callable[..., tuple[str, str]]) -> tuple[str, str]:
    return make_certificate("localhost")
