"""The token that verbs show to daemons with an access file: from --token-file, $NSQHA_TOKEN or $NSQHA_TOKEN_FILE.

Never from the command line itself, which every user of the host can read.
"""

from __future__ import annotations

import os

from nsqha.cli.terminal import exits

BYTES_MAX = 4096
WANTED = "; give a token: --token-file, or $NSQHA_TOKEN_FILE"
"""What is added to a refusal where none was shown."""


def token() -> str:
    """The token; empty if there is none. --token-file has become $NSQHA_TOKEN_FILE (`terminal.parser`). Raises Exit."""
    text = os.environ.get("NSQHA_TOKEN", "")
    if not text and (path := os.environ.get("NSQHA_TOKEN_FILE", "")):
        text = _read(path)
    text = text.strip()
    if not text.isascii() or not text.isprintable() or len(text) > BYTES_MAX:
        raise exits.Exit(exits.USAGE, "$NSQHA_TOKEN, or the file of --token-file, is no token: one line of ASCII")
    return text


def headers() -> dict[str, str]:
    """What a request by HTTP carries."""
    shown = token()
    return {"Authorization": f"Bearer {shown}"} if shown else {}


def wanted() -> str:
    """What to do about a refusal: nothing that is known, where a token was shown."""
    return "" if token() else WANTED


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(BYTES_MAX + 1).decode("utf-8-sig", "replace")
    except OSError as error:
        raise exits.Exit(exits.USAGE, f"--token-file: {path}: {error.strerror}") from None
