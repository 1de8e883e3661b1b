"""The certificate files of the port between nodes, read again when they change: nothing is restarted or signalled.

Every LOOK_SECONDS the files are looked at. A new set counts from the next connection on, in both directions;
connections that stand are left alone. A set that can not be used (half replaced, expired, another key's) changes
nothing, and is said once it has stayed so for two looks. Whoever connects or accepts asks `tls` each time and keeps
nothing of it but `generation`, which rises with each set.
"""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

from nsqha.errors import ConfigError
from nsqha.nsqlog import Log
from nsqha.server.tls import ClusterTls, load_cluster_tls

LOOK_SECONDS = 2.0

log = Log("certificates")

_Stamps = tuple[tuple[int, int, int], ...]


class ClusterTlsFlags(Protocol):
    """The part of the options that names the files; of `Options` and `LookupdOptions`."""

    @property
    def cluster_tls_cert(self) -> str: ...
    @property
    def cluster_tls_key(self) -> str: ...
    @property
    def cluster_tls_ca(self) -> str: ...


class CertificateFiles:
    """The last good set. `look` is called in one thread at a time, the rest is read from any."""

    def __init__(self, cert: str, key: str, ca: str) -> None:
        """ConfigError: they can not be used."""
        self._paths = (cert, key, ca)
        self._stamps = self._stat()
        self._bad: _Stamps | None = None  # files that could not be used, seen once
        self._said: _Stamps | None = None
        self._set = (1, load_cluster_tls(*self._paths))

    @classmethod
    def of(cls, options: ClusterTlsFlags) -> CertificateFiles | None:
        """None without the flags."""
        if not options.cluster_tls_cert:
            return None
        return cls(options.cluster_tls_cert, options.cluster_tls_key, options.cluster_tls_ca)

    @property
    def tls(self) -> ClusterTls:
        return self._set[1]

    @property
    def generation(self) -> int:
        """1, 2, ..: of the set that `tls` gives now."""
        return self._set[0]

    def look(self) -> bool:
        """Whether there is a new set. Reads files, raises nothing."""
        stamps = self._stat()
        if stamps in (self._stamps, self._said):
            return False
        try:
            tls = load_cluster_tls(*self._paths)
        except (ConfigError, OSError) as error:
            if stamps == self._bad:
                self._said = stamps
                log.error("certificates_unusable", "the set from before stays in use: %s", error)
            self._bad = stamps
            return False
        self._stamps, self._bad, self._said = stamps, None, None
        self._set = (self.generation + 1, tls)
        log.info("certificates_renewed", "%s, %s and %s were read again", *self._paths)
        return True

    def _stat(self) -> _Stamps:
        return tuple(_stamp(path) for path in self._paths)


async def watch(files: CertificateFiles) -> None:
    """Look again and again; a task that is cancelled when the process ends."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await asyncio.to_thread(files.look)


def _stamp(path: str) -> tuple[int, int, int]:
    """Differs when a file was written, replaced, or is another one behind a link."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
