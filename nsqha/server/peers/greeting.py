"""What both sides of a stream between nodes say first, in the headers that open it: build, level, and proofs.

    nsqha-peer: level=1-1 build=0.1.0                 both sides: the levels of the protocol that it can speak
    nsqha-nonce, nsqha-proof                          with a secret, see `nsqha.cluster_secret`

A client with a secret sends its HEADERS once the server's SETTINGS have come, which carry the server's nonce as values
of settings of our own (RFC 9113: unknown ones are ignored), and its first message once the server has proved itself. A
server reads no message before the client has proved itself.

Levels: each build names the oldest and the newest level that it speaks. Two builds work together if these ranges meet.
A side that names none is no build of ours: any gRPC client, which is served as far as the methods do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nsqha import __version__
from nsqha.cluster_secret import (
    MISSING,
    NONCE_BYTES,
    NONCE_KEY,
    NOT_PROVED,
    PROOF_KEY,
    WRONG,
    ClusterSecret,
    new_nonce,
    nonce_of,
    stream_proof,
    stream_proved,
)
from nsqha.election.model import PEER_LEVEL, PEER_LEVEL_OLDEST, unlike_levels
from nsqha.server.peers.http2 import SETTING

PEER_KEY = "nsqha-peer"
INTRODUCTION = f"level={PEER_LEVEL_OLDEST}-{PEER_LEVEL} build={__version__}"
"""What this process says of itself."""
INTRODUCTION_CHARACTERS_MAX = 200
NONCE_SETTING = 0xF1A0
"""The first of the settings that carry a nonce, four bytes each."""

_LEVELS = re.compile(r"level=(\d{1,6})-(\d{1,6}) build=([0-9A-Za-z.+-]{1,40})( .*)?", re.ASCII)

Fields = tuple[tuple[str, str], ...]


def nonce_settings(nonce: bytes) -> list[tuple[int, int]]:
    """A nonce as settings."""
    return [(NONCE_SETTING + at // 4, int.from_bytes(nonce[at : at + 4], "big")) for at in range(0, NONCE_BYTES, 4)]


def nonce_in_settings(payload: bytes) -> bytes:
    """The nonce in the payload of SETTINGS; empty: there is none."""
    values = dict(SETTING.iter_unpack(payload))
    wanted = range(NONCE_SETTING, NONCE_SETTING + NONCE_BYTES // 4)
    if not all(name in values for name in wanted):
        return b""
    return b"".join(values[name].to_bytes(4, "big") for name in wanted)


def unlike(introduction: str) -> str:
    """Why a peer that says this of itself cannot work with this build; empty: it can."""
    if not introduction:
        return ""
    found = _LEVELS.fullmatch(introduction[:INTRODUCTION_CHARACTERS_MAX])
    oldest, newest, build = (int(found[1]), int(found[2]), found[3]) if found else (0, 0, "of an unknown version")
    return unlike_levels(oldest, newest, build)


class ClientGreeting:
    """The greeting of one stream, at the side that opens it."""

    def __init__(self, secret: ClusterSecret | None, path: str) -> None:
        self._secret = secret
        self._path = path
        self._mine = new_nonce() if secret else b""
        self._theirs = b""

    def opening(self, server_nonce: bytes) -> Fields:
        """What the HEADERS that open the stream carry."""
        if self._secret is None:
            return ((PEER_KEY, INTRODUCTION),)
        self._theirs = server_nonce
        proof = stream_proof(self._secret, b"client", self._mine, server_nonce, self._path, INTRODUCTION)
        return ((PEER_KEY, INTRODUCTION), (NONCE_KEY, self._mine.hex()), (PROOF_KEY, proof))

    def refused(self, fields: Mapping[str, str]) -> str:
        """Why this side does not speak to the server that answers so; empty: it does."""
        theirs = fields.get(PEER_KEY, "")
        if self._secret is not None:
            said = (self._mine, self._theirs, self._path, INTRODUCTION, theirs)
            if not stream_proved(self._secret, fields.get(PROOF_KEY, ""), b"server", *said):
                return NOT_PROVED
        return unlike(theirs)


class ServerGreeting:
    """The same at the side that accepts it."""

    def __init__(self, secret: ClusterSecret | None) -> None:
        self._secret = secret
        self._mine = new_nonce() if secret else b""

    @property
    def settings(self) -> list[tuple[int, int]]:
        """What the SETTINGS carry for it."""
        return nonce_settings(self._mine) if self._secret else []

    def refused(self, fields: Mapping[str, str], path: str) -> str:
        """Why the client that opens the stream so is not served; empty: it is."""
        theirs = fields.get(PEER_KEY, "")
        if self._secret is not None:
            nonce, proof = nonce_of(fields.get(NONCE_KEY, "")), fields.get(PROOF_KEY, "")
            if not nonce or not proof:
                return MISSING
            if not stream_proved(self._secret, proof, b"client", nonce, self._mine, path, theirs):
                return WRONG
        return unlike(theirs)

    def answer(self, fields: Mapping[str, str], path: str) -> Fields:
        """What the HEADERS that accept the stream carry."""
        if self._secret is None:
            return ((PEER_KEY, INTRODUCTION),)
        said = (nonce_of(fields.get(NONCE_KEY, "")), self._mine, path, fields.get(PEER_KEY, ""), INTRODUCTION)
        return ((PEER_KEY, INTRODUCTION), (PROOF_KEY, stream_proof(self._secret, b"server", *said)))
