"""Files with secrets: the access file, the cluster's secret, the password for etcd, a token that a daemon shows.

One reader for all of them, so that each is refused for the same reasons: it is no regular file, every user of the host
may use it, it is longer than such a file can be. What is read is whole: no secret is ever a cut-off one. An error names
the flag and the file, and shows no byte of it.
"""

from __future__ import annotations

import os
import stat

from nsqha.errors import ConfigError


def read_private(flag: str, path: str, bytes_max: int) -> bytes:
    """All bytes of the file that `flag` names. ConfigError: one line, what is wrong and what to do."""
    where = f"{flag}={path}"
    try:
        # A pipe without a writer would hold up the start, and whoever ends it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{where}: this is no file")
            if mode & stat.S_IRWXO:
                raise ConfigError(f"{where}: every user of this host may use it; do `chmod o= {path}`")
            with open(descriptor, "rb", closefd=False) as file:
                text = file.read(bytes_max + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or "this is no name of a file"
        raise ConfigError(f"{where}: {why}; name a file that this user can read") from None
    if len(text) > bytes_max:
        raise ConfigError(f"{where}: it has more than {bytes_max:,} bytes")
    return text
