"""The HTTP listeners of a lookup daemon.

    http      all routes; nsqds, consumers and the tools of NSQ know this one only
    https     the same routes, with --https-address; its certificate is read again when the files change
    metrics   metrics and health, with --metrics-address

All are bound before one of them serves: a port that is taken or a certificate that cannot be used leaves none open.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

from lookupd.http_api import LookupdApi
from nsqha.errors import ConfigError
from nsqha.nsqlog import Logger
from nsqha.options import LookupdOptions, host_name
from nsqha.server.authorization.audit import Audit
from nsqha.server.authorization.guard import Guard
from nsqha.server.http.server import HttpDoors, HttpServer
from nsqha.server.runtime.budget import SharedTurns
from nsqha.server.runtime.listen import bound_address, bound_port, listen
from nsqha.server.runtime.tasks import TaskGroup


class LookupdHttp:
    """Serves one LookupdApi wherever the options say."""

    def __init__(
        self, options: LookupdOptions, api: LookupdApi, logger: Logger, guard: Guard | None, audit: Audit
    ) -> None:
        """`guard`: who may do what, everybody without one."""
        self._options = options
        self._logger = logger
        self._sockets: dict[str, socket.socket] = {}
        self._tasks = TaskGroup()
        routes = api.routes()
        names = (host_name(), options.broadcast_address)
        turns = SharedTurns(asyncio.get_running_loop())
        self._servers = {
            name: HttpServer(served, logger, turns=turns, names=names, doors=HttpDoors(f"lookupd {name}", guard, audit))
            for name, served in (("http", routes), ("https", routes), ("metrics", api.observed_routes()))
        }
        self._tls: ssl.SSLContext | None = None

    def bind(self) -> None:
        """Read the certificate and take the addresses. ConfigError: one cannot be used; then none is taken."""
        self._tls = self._certificate()
        wanted = {name: getattr(self._options, f"{name}_address") for name in self._servers}
        try:
            for name, address in wanted.items():
                if address:
                    self._sockets[name] = listen(address, flag=f"{name}-address")
        except ConfigError:
            for sock in self._sockets.values():
                sock.close()
            self._sockets.clear()
            self._tasks.cancel()
            raise

    def _certificate(self) -> ssl.SSLContext | None:
        if not self._options.https_address:
            return None
        # Late: its import takes a hundredth of a second, and few lookup daemons have HTTPS.
        from nsqha.server.runtime import certificates

        certificate = certificates.ClientCertificate(self._options)
        self._tasks.spawn(certificates.watch([certificate]))
        return certificate.context

    @property
    def port(self) -> int:
        """The bound port of plain HTTP."""
        return bound_port(self._sockets["http"])

    def address(self, name: str) -> str:
        """Where a listener is bound; empty: it is not."""
        return bound_address(self._sockets[name]) if name in self._sockets else ""

    async def start(self) -> None:
        for name, sock in self._sockets.items():
            await self._servers[name].listen(sock, self._tls if name == "https" else None)

    def log_addresses(self) -> None:
        for name in self._sockets:
            address = self.address(name)
            if name == "http":
                self._logger.info("http_listening", "HTTP: listening on %s", address, address=address)
            else:
                self._logger.info("listening", "%s: listening on %s", name.upper(), address, address=name)

    async def close(self) -> None:
        self._tasks.cancel()
        for server in self._servers.values():
            await server.close()
