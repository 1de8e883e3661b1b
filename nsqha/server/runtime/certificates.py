"""Certificate files, read again when they change: nothing is restarted or signalled.

    CertificateFiles    for the port between nodes; each connect and each accept reads `tls`
    ClientCertificate   what clients see over TCP and HTTPS; its `context` answers each handshake with the newest

The files are checked every LOOK_SECONDS. A new set is used from the next connection on, in both directions;
established connections keep theirs. A set that cannot be used (half replaced, expired, with another key) changes
nothing, and is logged once two checks in a row have found it. `generation` rises with each set. A certificate that
expires while it is in use is logged, and shown by /readyz and `nsqha check` (`measures.expired_certificates`).
"""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from nsqha.errors import ConfigError
from nsqha.nsqlog import Logger
from nsqha.server.runtime.measures import certificates_end, utc
from nsqha.server.runtime.tasks import in_thread
from nsqha.server.runtime.tls import ClusterTls, ListenerTlsFlags, load_cluster_tls, server_context

LOOK_SECONDS = 2.0
FILE_BYTES_MAX = 4 << 20

logger = Logger("certificates")

T = TypeVar("T")

_Stamps = tuple[tuple[int, int, int], ...]


class ClusterTlsFlags(Protocol):
    """The options that name the files; `Options` and `LookupdOptions` have them."""

    @property
    def cluster_tls_cert(self) -> str: ...
    @property
    def cluster_tls_key(self) -> str: ...
    @property
    def cluster_tls_ca(self) -> str: ...


class Renewed(ABC, Generic[T]):
    """Keeps the last usable set. `look` is called by one thread at a time; any thread may read the rest."""

    def __init__(self, *paths: str) -> None:
        """ConfigError if the files cannot be used."""
        self._paths = paths
        self._check_files()
        self._stamps = self._stat()
        self._bad: _Stamps | None = None  # files that could not be used, seen once
        self._said: _Stamps | None = None
        self._said_expired: dict[str, float] = {}
        self._set = (1, self._load())
        self._note_ends()

    @abstractmethod
    def _load(self) -> T:
        """Read the files as they are now. ConfigError or OSError if they cannot be used."""

    @property
    def newest(self) -> T:
        return self._set[1]

    @property
    def generation(self) -> int:
        """The number of the set that is `newest` now: 1, 2, .."""
        return self._set[0]

    def look(self) -> bool:
        """Read the files if they changed; returns whether there is a new set. Raises nothing."""
        stamps = self._stat()
        if stamps in (self._stamps, self._said):
            return False
        try:
            self._check_files()
            found = self._load()
        except (ConfigError, OSError) as error:
            if stamps == self._bad:
                self._said = stamps
                logger.error("certificates_unusable", "the previous certificates stay in use: %s", error)
            self._bad = stamps
            return False
        self._stamps, self._bad, self._said = stamps, None, None
        self._set = (self.generation + 1, found)
        self._note_ends()
        logger.info("certificates_renewed", "%s were read again", ", ".join(self._paths))
        return True

    def look_at_ends(self, now: float) -> None:
        """Log certificates that have expired, once each. `now`: Unix time."""
        for path in self._paths:
            end = certificates_end.get(path)
            if end is not None and end <= now and self._said_expired.get(path) != end:
                self._said_expired[path] = end
                text = "%s expired at %s: new connections with it are refused; replace the file (no restart)"
                logger.error("certificate_expired", text, path, utc(end))

    def _check_files(self) -> None:
        """ConfigError: one of them cannot be read to its end, so it is not begun."""
        for path in self._paths:
            try:
                found = os.stat(path)
            except OSError:
                continue  # whoever opens it says why
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path}: this is no file")
            if found.st_size > FILE_BYTES_MAX:
                raise ConfigError(f"{path}: it has more than {FILE_BYTES_MAX:,} bytes")

    def _note_ends(self) -> None:
        certificates_end.update({path: end for path in self._paths if (end := expiry(path)) is not None})

    def _stat(self) -> _Stamps:
        return tuple(_stamp(path) for path in self._paths)


class CertificateFiles(Renewed[ClusterTls]):
    """The certificate files of the port between nodes."""

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
    """The certificate of the client ports: --tls-cert, --tls-key and, to check clients' own, --tls-root-ca-file."""

    def __init__(self, options: ListenerTlsFlags) -> None:
        self._options = options
        super().__init__(*filter(None, (options.tls_cert, options.tls_key, options.tls_root_ca_file)))
        self.context = self.newest
        # Listeners and connections already hold the context. It is asked once per handshake, with or without a name.
        self.context.sni_callback = self._choose

    def _load(self) -> ssl.SSLContext:
        context = server_context(self._options)
        assert context is not None, "there is a --tls-cert"
        return context

    def _choose(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = self.newest


def expiry(path: str) -> float | None:
    """When the first certificate of a PEM file expires, Unix time; None: it has none, as a key's file."""
    try:
        # The one decoder of the standard library; `SSLContext` shows certificate authorities only.
        found = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]
        return float(ssl.cert_time_to_seconds(found["notAfter"]))
    except (OSError, ssl.SSLError, KeyError, ValueError):
        return None


async def watch(files: Sequence[Renewed[Any]]) -> None:
    """Check the files every LOOK_SECONDS; the task is cancelled when the process ends. A check that does not end, as on
    a network file system, holds up neither that nor the checks of other files."""
    await asyncio.gather(*map(_watch, files))


async def _watch(files: Renewed[Any]) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await in_thread(files.look)
        files.look_at_ends(time.time())


def _stamp(path: str) -> tuple[int, int, int]:
    """A value that differs when the file was written or replaced, or a link leads to another one."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
