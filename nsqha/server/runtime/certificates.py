"""Certificate files, read again when they change: nothing is restarted or signalled.

    CertificateFiles    of the port between nodes; whoever connects or accepts asks `tls` each time
    ClientCertificate   what clients see by TCP and HTTPS; its `context` answers each handshake with the newest

Every LOOK_SECONDS the files are looked at. A new set counts from the next connection on, in both directions;
connections that stand are left alone. A set that can not be used (half replaced, expired, another key's) changes
nothing, and is said once it has stayed so for two looks. `generation` rises with each set.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from nsqha.errors import ConfigError
from nsqha.nsqlog import Logger
from nsqha.options import Options
from nsqha.server.runtime.tls import ClusterTls, load_cluster_tls, server_context

LOOK_SECONDS = 2.0

logger = Logger("certificates")

T = TypeVar("T")

_Stamps = tuple[tuple[int, int, int], ...]


class ClusterTlsFlags(Protocol):
    """The part of the options that names the files; of `Options` and `LookupdOptions`."""

    @property
    def cluster_tls_cert(self) -> str: ...
    @property
    def cluster_tls_key(self) -> str: ...
    @property
    def cluster_tls_ca(self) -> str: ...


class Renewed(ABC, Generic[T]):
    """The last good set. `look` is called in one thread at a time, the rest is read from any."""

    def __init__(self, *paths: str) -> None:
        """ConfigError: they can not be used."""
        self._paths = paths
        self._stamps = self._stat()
        self._bad: _Stamps | None = None  # files that could not be used, seen once
        self._said: _Stamps | None = None
        self._set = (1, self._load())

    @abstractmethod
    def _load(self) -> T:
        """What the files have now. ConfigError, OSError."""

    @property
    def newest(self) -> T:
        return self._set[1]

    @property
    def generation(self) -> int:
        """1, 2, ..: of the set that is `newest` now."""
        return self._set[0]

    def look(self) -> bool:
        """Whether there is a new set. Reads files, raises nothing."""
        stamps = self._stat()
        if stamps in (self._stamps, self._said):
            return False
        try:
            found = self._load()
        except (ConfigError, OSError) as error:
            if stamps == self._bad:
                self._said = stamps
                logger.error("certificates_unusable", "the set from before stays in use: %s", error)
            self._bad = stamps
            return False
        self._stamps, self._bad, self._said = stamps, None, None
        self._set = (self.generation + 1, found)
        logger.info("certificates_renewed", "%s were read again", ", ".join(self._paths))
        return True

    def _stat(self) -> _Stamps:
        return tuple(_stamp(path) for path in self._paths)


class CertificateFiles(Renewed[ClusterTls]):
    """Of the port between nodes."""

    @classmethod
    def of(cls, options: ClusterTlsFlags) -> CertificateFiles | None:
        """None without the flags."""
        if not options.cluster_tls_cert:
            return None
        return cls(options.cluster_tls_cert, options.cluster_tls_key, options.cluster_tls_ca)

    def _load(self) -> ClusterTls:
        return load_cluster_tls(*self._paths)

    @property
    def tls(self) -> ClusterTls:
        return self.newest


class ClientCertificate(Renewed[ssl.SSLContext]):
    """Of the ports for clients: --tls-cert, --tls-key and, for those who show one too, --tls-root-ca-file."""

    def __init__(self, options: Options) -> None:
        self._options = options
        super().__init__(*filter(None, (options.tls_cert, options.tls_key, options.tls_root_ca_file)))
        self.context = self.newest
        # The context is with listeners and connections already. It is asked once per handshake, name or no name.
        self.context.sni_callback = self._choose

    def _load(self) -> ssl.SSLContext:
        context = server_context(self._options)
        assert context is not None, "there is a --tls-cert"
        return context

    def _choose(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = self.newest


async def watch(files: Sequence[Renewed[Any]]) -> None:
    """Look again and again; a task that is cancelled when the process ends."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        for each in files:
            await asyncio.to_thread(each.look)


def _stamp(path: str) -> tuple[int, int, int]:
    """Differs when a file was written, replaced, or is another one behind a link."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
