"""Writing generated files over what is there: all of them or none.

A file that says something else may have been changed by hand. It is shown as a diff, and replaced only with --force.
Each file appears whole under its name: a generator that is interrupted leaves no half of one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from nsqha.cli.terminal import exits

Files = Mapping[str, str]
"""Path below the folder of --to -> text."""

FILE_BYTES_MAX = 16 << 20  # of a file that is compared


def differences(folder: Path, files: Files) -> dict[str, str]:
    """Path -> unified diff, of the files that are there and say something else. Raises Exit."""
    found = {}
    for name, text in sorted(files.items()):
        there = _read(folder / name)
        if there is not None and there != text:
            lines = difflib.unified_diff(
                there.splitlines(keepends=True), text.splitlines(keepends=True), f"{name} (there)", f"{name} (new)"
            )
            found[name] = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
    return found


def write(folder: Path, files: Files) -> list[str]:
    """Write what is not there or says something else; returns the paths of these. Raises Exit."""
    written = []
    for name, text in sorted(files.items()):
        path = folder / name
        if _read(path) == text:
            continue
        part = path.with_name(f".{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text)
            part.chmod(0o644)
            os.replace(part, path)
        except OSError as error:
            raise exits.Exit(exits.FAILED, f"{path}: {error.strerror}") from None
        written.append(name)
    return written


def _read(path: Path) -> str | None:
    """The text that is there; None: nothing is."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise exits.Exit(exits.FAILED, f"{path}: this is no file that was generated: it is too large")
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise exits.Exit(exits.FAILED, f"{path}: {error.strerror}") from None
