"""The secret that all processes of a cluster share, and the proofs that one side gives the other of knowing it.

A proof is an HMAC-SHA256 over what was said, with fresh nonces of both sides; the secret itself is never sent.

    a stream   the server's SETTINGS carry a nonce -> HEADERS with a nonce and a proof -> HEADERS with a proof
    a call     `CHALLENGE_PATH` with a nonce -> a nonce and a proof; then each call has a number and a proof of its own
    a lookup   IDENTIFY -> an answer with a nonce -> AUTH with a proof of the nonce and of what was sent with IDENTIFY

The file holds one secret a line, two lines while it is being replaced: the first is the new one. Each side proves all
secrets that it has, and one in common is enough, so the file may be changed on one node after the other. It is read
when the process starts.

What was proved is who speaks, and not what is said later: an active man in the middle may change that, and everybody
on the way may read it. TLS is for networks where that matters.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from nsqha.errors import ConfigError
from nsqha.private_file import read_private

NONCE_BYTES = 32
SECRET_CHARACTERS_MIN = 32
SECRETS_MAX = 2
FILE_BYTES_MAX = 4096
FLAG = "--cluster-secret-file"
MISSING = f"this cluster has a secret, and the caller proved none: give {FLAG}"
WRONG = f"the caller's secret is not this cluster's: compare the files of {FLAG}"
NOT_ASKED = f"it asks for no secret: start it with {FLAG}, or leave that out here"
NOT_PROVED = f"it does not know this cluster's secret: compare the files of {FLAG}"

CHALLENGE_PATH = "/nsqha.v1.ClusterSecret/Challenge"
SESSION_KEY, NUMBER_KEY, PROOF_KEY = "nsqha-session", "nsqha-number", "nsqha-proof"
"""Metadata of a call: the nonces of both sides, the number of the call in this session, and the proof."""
NONCE_KEY = "nsqha-nonce"
STALE_KEY = "nsqha-stale"
"""In the trailers of a refusal: the session is not known any more, so the caller begins another one."""

SESSIONS_MAX = 4096
WINDOW = 1024  # calls of a session that may overtake each other
NUMBER_DIGITS_MAX = 18


class ClusterSecret:
    """The secrets of one file, the new one first. Its repr shows none."""

    __slots__ = ("_keys",)

    def __init__(self, *secrets: bytes) -> None:
        self._keys = tuple(secrets)

    def proofs(self, *said: bytes) -> str:
        """What proves each secret, for these words."""
        return ",".join(_mac(key, said) for key in self._keys)

    def proved(self, proofs: str, *said: bytes) -> bool:
        """Whether one of `proofs` is of one of our secrets. It takes the same time wherever they differ."""
        given = proofs.encode("ascii", "replace").split(b",")[:SECRETS_MAX]
        mine = [_mac(key, said).encode() for key in self._keys]
        found = [hmac.compare_digest(one, other) for one in given for other in mine]
        return any(found)


def _mac(key: bytes, said: Iterable[bytes]) -> str:
    """Each word has its length before it: no two sequences of words have the same bytes."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for word in said:
        mac.update(len(word).to_bytes(4, "big") + word)
    return mac.hexdigest()


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def read_secret(path: str) -> ClusterSecret | None:
    """The secrets of the file; None: no file is named. ConfigError says what is wrong with it, and shows no byte."""
    if not path:
        return None
    text = read_private(FLAG, path, FILE_BYTES_MAX)
    secrets = [line.strip() for line in text.splitlines() if line.strip()]
    if not 1 <= len(secrets) <= SECRETS_MAX:
        raise ConfigError(f"{FLAG}={path}: it must have one secret, or a line with the new and a line with the old one")
    if any(len(secret) < SECRET_CHARACTERS_MIN for secret in secrets):
        raise ConfigError(
            f"{FLAG}={path}: a secret has at least {SECRET_CHARACTERS_MIN} characters; `openssl rand -hex 32` makes one"
        )
    return ClusterSecret(*secrets)


# ---- streams


def stream_proof(
    secret: ClusterSecret, side: bytes, client_nonce: bytes, server_nonce: bytes, path: str, *introductions: str
) -> str:
    """What `side` (b"client", b"server") proves with; `introductions`: what the sides said of themselves so far."""
    return secret.proofs(*_of_stream(side, client_nonce, server_nonce, path, introductions))


def stream_proved(
    secret: ClusterSecret,
    proofs: str,
    side: bytes,
    client_nonce: bytes,
    server_nonce: bytes,
    path: str,
    *introductions: str,
) -> bool:
    """Whether `side` has proved that."""
    return secret.proved(proofs, *_of_stream(side, client_nonce, server_nonce, path, introductions))


def _of_stream(
    side: bytes, client_nonce: bytes, server_nonce: bytes, path: str, introductions: tuple[str, ...]
) -> list[bytes]:
    return [
        b"nsqha stream 1",
        side,
        client_nonce,
        server_nonce,
        path.encode(),
        *(text.encode() for text in introductions),
    ]


def nonce_of(text: str) -> bytes:
    """The nonce in a header; empty if there is none."""
    try:
        nonce = bytes.fromhex(text)
    except ValueError:
        return b""
    return nonce if len(nonce) == NONCE_BYTES else b""


# ---- registrations with a lookup daemon

_LOOKUP_PROOF = b"nsqha-cluster-secret "  # tokens have no blank


def lookup_proof(secret: ClusterSecret, nonce: bytes, digest: bytes) -> bytes:
    """The secret of AUTH to a daemon that sent `nonce`; `digest`: the SHA-256 of what the broker sent with IDENTIFY."""
    return _LOOKUP_PROOF + secret.proofs(*_of_lookup(nonce, digest)).encode()


def is_lookup_proof(shown: bytes) -> bool:
    """True for a proof, false for a token."""
    return shown.startswith(_LOOKUP_PROOF)


def lookup_proved(secret: ClusterSecret, shown: bytes, nonce: bytes, digest: bytes) -> bool:
    """Whether the broker has proved that it knows the secret."""
    proofs = shown.removeprefix(_LOOKUP_PROOF).decode("ascii", "replace")
    return is_lookup_proof(shown) and secret.proved(proofs, *_of_lookup(nonce, digest))


def _of_lookup(nonce: bytes, digest: bytes) -> list[bytes]:
    return [b"nsqha lookup 1", b"client", nonce, digest]


# ---- calls


class CallProofs:
    """The calls of one client to one server in one session. Calls may come from several threads."""

    __slots__ = ("_numbers", "_secret", "_session")

    def __init__(self, secret: ClusterSecret, nonce: bytes, answer: bytes) -> None:
        """`nonce` is what the client sent, `answer` what the server said. ConfigError: it does not know the secret."""
        theirs, proofs = answer[:NONCE_BYTES], answer[NONCE_BYTES:].decode("ascii", "replace")
        if len(theirs) != NONCE_BYTES or not secret.proved(proofs, *_of_challenge(nonce, theirs)):
            raise ConfigError(NOT_PROVED)
        self._secret = secret
        self._session = nonce + theirs
        self._numbers = iter(range(1, 10**NUMBER_DIGITS_MAX))

    def metadata(self, method: str) -> tuple[tuple[str, str], ...]:
        """What the next call carries."""
        number = str(next(self._numbers))
        proofs = self._secret.proofs(*_of_call(self._session, method, number))
        return ((SESSION_KEY, self._session.hex()), (NUMBER_KEY, number), (PROOF_KEY, proofs))


class CallSessions:
    """The sessions of all clients of one server. A session that is forgotten begins again with a new nonce, so a call
    that was recorded on the way is never carried out again."""

    def __init__(self, secret: ClusterSecret, *, sessions_max: int = SESSIONS_MAX) -> None:
        self._secret = secret
        self._max = sessions_max
        self._offered: OrderedDict[bytes, None] = OrderedDict()  # nonces of sessions that have proved nothing yet
        self._sessions: OrderedDict[bytes, _Window] = OrderedDict()  # those that have; a stranger has none

    def challenge(self, nonce: bytes) -> bytes:
        """The answer to a client's nonce; empty: that is none."""
        if len(nonce) != NONCE_BYTES:
            return b""
        mine = new_nonce()
        self._offered[nonce + mine] = None
        if len(self._offered) > self._max:
            self._offered.popitem(last=False)
        return mine + self._secret.proofs(*_of_challenge(nonce, mine)).encode()

    def refused(self, method: str, metadata: Mapping[str, str]) -> tuple[str, bool]:
        """Why a call is not carried out (empty: it is), and whether another session would help."""
        session_text, number, proofs = (metadata.get(key, "") for key in (SESSION_KEY, NUMBER_KEY, PROOF_KEY))
        if not session_text or not number or not proofs:
            return MISSING, False
        try:
            session = bytes.fromhex(session_text)
        except ValueError:
            return WRONG, False
        known = session in self._sessions
        if not known and session not in self._offered:
            return "this node does not know the session any more", True
        if not self._secret.proved(proofs, *_of_call(session, method, number)):
            return WRONG, False
        if not (number.isascii() and number.isdigit() and len(number) <= NUMBER_DIGITS_MAX):
            return WRONG, False
        if not known:
            del self._offered[session]
            self._sessions[session] = _Window()
            if len(self._sessions) > self._max:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(session)
        if not self._sessions[session].take(int(number)):
            return "a call came twice, or far too late", False
        return "", False


class _Window:
    """The numbers of calls that have come: those near the highest one, as bits."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 1  # 0 is never sent

    def take(self, number: int) -> bool:
        """Whether it comes for the first time."""
        ahead = number - self._highest
        if ahead > 0:
            self._seen = (self._seen << ahead | 1) & ((1 << WINDOW) - 1) if ahead < WINDOW else 1
            self._highest = number
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


def _of_challenge(client_nonce: bytes, server_nonce: bytes) -> list[bytes]:
    return [b"nsqha challenge 1", b"server", client_nonce, server_nonce]


def _of_call(session: bytes, method: str, number: str) -> list[bytes]:
    return [b"nsqha call 1", b"client", session, method.encode(), number.encode("ascii", "replace")]
