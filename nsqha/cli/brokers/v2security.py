"""TLS and AUTH of the NSQ V2 client, with the names that nsqd's and the NSQ tools' own options have.

    IDENTIFY {"tls_v1": true, ..} -> {"tls_v1": true, ..} -> TLS handshake -> OK -> AUTH -> answer

A secret comes from the command line, a file, or the environment; it appears in no error.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
from dataclasses import dataclass, field

from nsqha.cli.brokers.token import token
from nsqha.cli.terminal import exits

SECRET_BYTES_MAX = 4096


@dataclass(frozen=True)
class Security:
    """TLS and AUTH settings of a connection."""

    tls: bool = False
    root_ca_file: str = ""
    cert: str = ""
    key: str = ""
    insecure_skip_verify: bool = False
    auth_secret: bytes = field(default=b"", repr=False)
    token: bytes = field(default=b"", repr=False)  # for AUTH where the broker asks for it, if there is no secret

    @classmethod
    def of(cls, args: argparse.Namespace) -> Security:
        """Read the flags that `add_tcp` added. Raises Exit if they contradict each other."""
        if bool(args.tls_cert) != bool(args.tls_key):
            args.parser.error("--tls-cert and --tls-key go together")
        files = (args.tls_root_ca_file, args.tls_cert, args.tls_key)
        tls = args.tls or args.tls_insecure_skip_verify or any(files)
        if args.auth_secret and args.auth_secret_file:
            args.parser.error("give --auth-secret or --auth-secret-file, not both")
        secret = os.fsencode(args.auth_secret or os.environ.get("NSQHA_AUTH_SECRET", ""))
        if args.auth_secret_file:
            secret = _read_secret(args.auth_secret_file)
        return cls(tls, *files, args.tls_insecure_skip_verify, secret, token().encode())

    def wrap(self, plain: socket.socket, host: str, address: str) -> ssl.SSLSocket:
        """Do the TLS handshake. Raises Exit if a file is not usable, or one side does not trust the other."""
        context = self._context()
        try:
            return context.wrap_socket(plain, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            hint = "name its authority with --tls-root-ca-file, or accept any with --tls-insecure-skip-verify"
            text = f"{address}: its certificate is not trusted: {error.verify_message}; {hint}"
            raise exits.Exit(exits.NOT_ALLOWED, text) from None
        except OSError as error:
            raise exits.Exit(exits.UNREACHABLE, f"{address}: TLS handshake failed: {words(error)}") from None

    def _context(self) -> ssl.SSLContext:
        # As Go does: the default context of newer Pythons refuses authorities without a key usage, as many private
        # ones are.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.root_ca_file:
                context.load_verify_locations(cafile=self.root_ca_file)
            else:
                context.load_default_certs()
        except OSError as error:
            raise _unusable("--tls-root-ca-file", self.root_ca_file, error) from None
        if self.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert:
            try:
                # An encrypted key must not ask at the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
            except OSError as error:
                raise _unusable("--tls-cert and --tls-key", f"{self.cert}, {self.key}", error) from None
        return context


PLAIN = Security()


def words(error: OSError) -> str:
    """The reason of an error, without OpenSSL's source locations."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLError):
        return (error.reason or "the broker ended the handshake").replace("_", " ").lower()
    return error.strerror or "the broker closed the connection"


def _unusable(flag: str, path: str, error: OSError) -> exits.Exit:
    why = "it has no usable certificate or key" if isinstance(error, ssl.SSLError) else error.strerror
    return exits.Exit(exits.USAGE, f"{flag}: {path}: {why}")


def _read_secret(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            found = file.read(SECRET_BYTES_MAX + 1).rstrip(b"\r\n")
    except OSError as error:
        raise exits.Exit(exits.USAGE, f"--auth-secret-file: {path}: {error.strerror}") from None
    if not 0 < len(found) <= SECRET_BYTES_MAX:
        raise exits.Exit(exits.USAGE, f"--auth-secret-file: {path}: 1 to {SECRET_BYTES_MAX:,} bytes are expected")
    return found
