"""The token that a reader shows to brokers with an access file (role reader): from $NSQHA_TOKEN, or the file that
$NSQHA_TOKEN_FILE names, on the machine that asks: the driver's and each executor's.

No option, as options are shown in plans and event logs.
"""

from __future__ import annotations

import os

from pyspark_nsqha.model import ReadFailed

BYTES_MAX = 4096


def token() -> str:
    """The token; empty if there is none. ReadFailed."""
    text = os.environ.get("NSQHA_TOKEN", "")
    if not text and (path := os.environ.get("NSQHA_TOKEN_FILE", "")):
        try:
            with open(path, "rb") as file:
                text = file.read(BYTES_MAX + 1).decode("ascii", "replace")
        except OSError as error:
            raise ReadFailed(f"$NSQHA_TOKEN_FILE: {path}: {error.strerror} (on this machine)") from None
    text = text.strip()
    if not text.isascii() or not text.isprintable() or len(text) > BYTES_MAX:
        raise ReadFailed("$NSQHA_TOKEN, or the file of $NSQHA_TOKEN_FILE, is no token: one line of ASCII")
    return text


def headers() -> dict[str, str]:
    """What a request by HTTP carries."""
    shown = token()
    return {"Authorization": f"Bearer {shown}"} if shown else {}
