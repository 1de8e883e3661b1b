"""Announces this node, its topics and its channels to every lookup daemon, as nsqd does (lookup protocol V1).

One task per lookup daemon: connect, `IDENTIFY`, `REGISTER` everything there is, then every change as it happens and a
`PING` each 15 s. A daemon forgets a node when its connection ends, so after any trouble the cure is always the same:
close, wait a little, connect and register everything again. So nothing is kept for a daemon that is away, and one that
reads too slowly is given up.

A brand-new topic begins with the channels that the lookup daemons know for it, or the messages until its consumers
reconnect would pass them by: `known_channels`.

A daemon with an access file says `auth_required` in its answer to `IDENTIFY`, and gets `AUTH`: with a proof of the
cluster's secret where it has one too, else with the token of --lookupd-token-file. Others never hear of either.

Requests may be pipelined: the daemon answers them in order, `OK` each; anything else is an error after which it closes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from nsqha import NSQ_VERSION
from nsqha.access.tokens import TOKEN_BYTES_MAX
from nsqha.cluster_secret import FLAG as SECRET_FLAG
from nsqha.cluster_secret import ClusterSecret, lookup_proof, nonce_of
from nsqha.errors import ConfigError
from nsqha.ids import is_ephemeral, valid_name
from nsqha.nsqlog import Logger
from nsqha.private_file import read_private
from nsqha.server.runtime.backoff import Backoff
from nsqha.server.runtime.listen import reason, split_host_port
from nsqha.server.runtime.tasks import TaskGroup, beside, in_thread
from nsqha.texts import gojson

if TYPE_CHECKING:
    import aiohttp

PING_SECONDS = 15.0
ANSWER_SECONDS = 1.0
"""As nsqd: a lookup daemon that does not accept or answer within a second is not there."""
RETRY_SECONDS = (0.1, 15.0)
"""First and longest pause before connecting again; it doubles."""
UNSENT_BYTES_MAX = 64 << 20
CHANNELS_BYTES_MAX = 5 << 20
TOKEN_FLAG = "--lookupd-token-file"
WANTED = f"it wants a token, role broker: give {TOKEN_FLAG}"
UNTOLD = "only daemons that --lookupd-tcp-address names are shown the token; add this one there"
_ACCEPT = "application/vnd.nsq; version=1.0"

Registrations = Callable[[], Mapping[str, Sequence[str]]]
"""All topics that this node has and their channels, now; of a cluster's, those of which it leads a part."""


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """How this node wants to be found."""

    broadcast_address: str
    hostname: str
    tcp_port: int
    http_port: int
    topology_zone: str = ""
    topology_region: str = ""

    @property
    def without_port(self) -> str:
        """The flag of a listener that has no port, as it is a unix socket or off; empty: both have one. Lookup daemons
        would send consumers and tools to a port that is none."""
        missing = [flag for flag, port in (("tcp", self.tcp_port), ("http", self.http_port)) if port <= 0]
        return f"--{missing[0]}-address" if missing else ""

    def json(self) -> bytes:
        fields = {"version": NSQ_VERSION} | {name: getattr(self, name) for name in self.__dataclass_fields__}
        return msgspec.json.encode(fields)


class LookupInfo(msgspec.Struct, frozen=True):
    """What a lookup daemon says of itself."""

    broadcast_address: str = ""
    http_port: int = 0
    auth_required: bool = False
    nonce: str = ""
    """For a proof of the cluster's secret; empty: the daemon has none."""

    @property
    def http_url(self) -> str:
        host = f"[{self.broadcast_address}]" if ":" in self.broadcast_address else self.broadcast_address
        return f"http://{host}:{self.http_port}"


class LookupdLost(Exception):
    """The lookup daemon is not there, or does not speak V1."""


class Credentials:
    """What lookup daemons with an access file are shown."""

    def __init__(
        self, token_file: str = "", token_for: Iterable[str] = (), secret: ClusterSecret | None = None
    ) -> None:
        """`token_file`: with the token, read each time; `token_for`: the daemons that are shown it, by address. Who may
        name more daemons while this node runs is not given its token by that. `secret`: of the cluster; it is proved
        to any daemon, and shown to none."""
        self.token_file = token_file
        self.secret = secret
        self._token_for = frozenset(token_for)

    def trusted(self, address: str) -> bool:
        """Whether the daemon may see the token."""
        return address in self._token_for

    async def token(self) -> str:
        """The token; empty without a file. ConfigError: the file can not be used."""
        return await in_thread(lambda: read_token(self.token_file)) if self.token_file else ""


class Registrar:
    """Keeps all lookup daemons informed. Its methods may be called at any time; nothing here ever blocks the broker."""

    def __init__(
        self,
        identity: ProducerIdentity,
        registrations: Registrations,
        *,
        answer_bytes_max: int,
        partitions: Callable[[str], int] = lambda _: 0,
        channels_max: int = 0,
        connect_seconds: float = 2.0,
        request_seconds: float = 5.0,
        credentials: Credentials | None = None,
    ) -> None:
        """`partitions`: how many a topic has, if all of them are here. `channels_max`: what a new topic may begin
        with; 0: no limit."""
        self._credentials = credentials or Credentials()
        self._identity = identity
        self._registrations = registrations
        self._partitions = partitions
        self._answer_bytes_max = answer_bytes_max
        self._channels_max = channels_max
        self._seconds = (connect_seconds, request_seconds)
        self._peers: dict[str, _Peer] = {}
        self._tasks = TaskGroup()
        self._announced = {topic: set(channels) for topic, channels in registrations().items()}
        self._announced_partitions = {topic: max(partitions(topic), 1) for topic in self._announced}
        self._session: aiohttp.ClientSession | None = None
        self._told_of_port = False
        self._logger = Logger("lookupd")

    def set_peers(self, addresses: Iterable[str]) -> None:
        """Announce to these daemons, and no longer to others. A node without a port is announced to none."""
        addresses = list(addresses)
        if addresses and (flag := self._identity.without_port):
            if not self._told_of_port:
                self._told_of_port = True
                text = (
                    "LOOKUP: this node is not registered with lookup daemons, as %s has no port; consumers do not find "
                    "it there. Where a proxy leads to it, set --broadcast-tcp-port and --broadcast-http-port"
                )
                self._logger.warning("lookupd_not_registered", text, flag)
            return
        wanted = dict.fromkeys(addresses)
        for address in [a for a in self._peers if a not in wanted]:
            self._logger.info("lookupd_removed", "LOOKUP: removing peer %s", address)
            self._peers.pop(address).end()
        for address in wanted:
            if address not in self._peers:
                self._logger.info("lookupd_added", "LOOKUP: adding peer %s", address)
                peer = _Peer(address, self._identity, self._everything, self._answer_bytes_max, self._credentials)
                self._peers[address] = peer
                peer.task = self._tasks.spawn(peer.run())

    async def close(self) -> None:
        """Leave every daemon: each forgets this node as its connection ends."""
        for peer in self._peers.values():
            peer.end()
        self._peers.clear()
        await self._tasks.close()
        if self._session is not None:
            await self._session.close()

    @property
    def connected(self) -> Mapping[str, bool]:
        """Which daemons know this node now."""
        return {address: peer.info is not None for address, peer in self._peers.items()}

    # ---- what happens on this node

    def changed(self, topic: str, channels: Iterable[str] | None) -> None:
        """What this node has of a topic now, None: nothing. The daemons hear what is new about that."""
        before, now = self._announced.get(topic), None if channels is None else set(channels)
        partitions = max(self._partitions(topic), 1)
        if now is not None and (before is None or partitions != self._announced_partitions[topic]):
            self._tell(_registering(topic, partitions))
            self._announced_partitions[topic] = partitions
        for channel in sorted((now or set()) - (before or set())):
            self._tell(f"REGISTER {topic} {channel}\n")
        for channel in sorted((before or set()) - (now or set())):
            self._tell(f"UNREGISTER {topic} {channel}\n")
        if now is not None:
            self._announced[topic] = now
        elif before is not None:
            self._tell(f"UNREGISTER {topic}\n")
            del self._announced[topic], self._announced_partitions[topic]

    def channels_changed(self, topic: str, channels: Mapping[str, bool]) -> None:
        """Which of these channels there are now of a topic that this node has."""
        announced = self._announced[topic]
        for channel, there in channels.items():
            if there and channel not in announced:
                announced.add(channel)
                self._tell(f"REGISTER {topic} {channel}\n")
            elif not there and channel in announced:
                announced.remove(channel)
                self._tell(f"UNREGISTER {topic} {channel}\n")

    def _everything(self) -> list[str]:
        lines = []
        for topic, channels in self._registrations().items():
            lines += [f"REGISTER {topic} {channel}\n" for channel in channels]
            partitions = self._partitions(topic)
            if not channels or partitions > 1:
                lines.append(_registering(topic, partitions))
        return lines

    def _tell(self, line: str) -> None:
        for peer in self._peers.values():
            peer.tell(line.encode())

    # ---- what other nodes made

    @property
    def may_know(self) -> bool:
        """Whether a daemon knows this node, or might when the first connection to it was tried."""
        return any(peer.info is not None or not peer.tried.is_set() for peer in self._peers.values())

    async def known_channels(self, topic: str, *, patient: bool = False) -> list[str]:
        """The channels of `topic` that any reachable daemon knows, without ephemeral ones, and not more than a topic
        may have. `patient`: a daemon to which no connection was tried yet is waited for.

        Takes as long as the slowest daemon, at most the request timeout; one that fails is as if it knew none.
        """
        if patient:
            for peer in list(self._peers.values()):
                await peer.tried.wait()
        known = [
            (info.http_url, self._credentials.trusted(address))
            for address, peer in self._peers.items()
            if (info := peer.info) and info.broadcast_address
        ]
        query = f"/channels?topic={quote(topic, safe='')}"
        answers = await asyncio.gather(*(self._channels(url + query, trusted) for url, trusted in known))
        found = sorted({c for answer in answers for c in answer if valid_name(c) and not is_ephemeral(c)})
        if not 0 < self._channels_max < len(found):
            return found
        text = (
            "LOOKUP: topic %s begins with the first %d of %d channels that lookup daemons know (--max-topic-channels)"
        )
        self._logger.warning("lookupd_channels_too_many", text, topic, self._channels_max, len(found))
        return found[: self._channels_max]

    async def _authorization(self) -> dict[str, str]:
        """The header with the token. ConfigError: its file can not be used."""
        token = await self._credentials.token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _remedy(self, status: int, trusted: bool) -> str:
        """What to do about the answer of a daemon with an access file."""
        if status not in (401, 403):
            return ""
        if not self._credentials.token_file:
            return f": {WANTED}"
        return f": this is for the token of {TOKEN_FLAG}, role broker" if trusted else f": {UNTOLD}"

    async def _channels(self, url: str, trusted: bool) -> list[str]:
        """`trusted`: the daemon may see the token."""
        import aiohttp
        from yarl import URL

        if self._session is None:
            connect, total = self._seconds
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=total, sock_connect=connect), headers={"Accept": _ACCEPT}
            )
        try:
            shown = await self._authorization() if trusted else {}
            # Whoever is trusted with the token is not trusted to pass it on.
            asked = self._session.get(URL(url, encoded=True), headers=shown, allow_redirects=not shown)
            async with asked as response:
                body = b""
                while part := await response.content.readany():
                    body += part
                    if len(body) > CHANNELS_BYTES_MAX:
                        raise ValueError(f"more than {CHANNELS_BYTES_MAX} bytes")
                if response.status != 200:
                    raise ValueError(f"status {response.status}{self._remedy(response.status, trusted)}")
                return gojson.decode(body, _Channels).channels
        except (aiohttp.ClientError, ConfigError, OSError, TimeoutError, ValueError) as error:
            self._logger.warning("lookupd_channels_failed", "LOOKUP: %s: %s", url, _why(error, self._seconds[1]))
            return []


def read_token(path: str) -> str:
    """The token for lookup daemons. ConfigError: the file can not be used."""
    token = read_private(TOKEN_FLAG, path, TOKEN_BYTES_MAX).decode("utf-8-sig", "replace").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{TOKEN_FLAG}={path}: it must have the token in one line, and nothing else")
    return token


def _why(error: Exception, seconds: float) -> str:
    """For the log: why the connection to a daemon that had `seconds` failed."""
    if isinstance(error, EOFError):
        return "it closed the connection"
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"no answer within {seconds:g} s"
    return (
        reason(getattr(error, "os_error", error)) or "no usable answer"
    )  # aiohttp keeps the error of the socket there


def _registering(topic: str, partitions: int) -> str:
    """The command for a topic. With several partitions, all of them here, their number follows an empty channel: our
    daemon shows them, nsqlookupd ignores the word."""
    return f"REGISTER {topic}  {partitions}\n" if partitions > 1 else f"REGISTER {topic}\n"


class _Channels(msgspec.Struct):
    channels: list[str] = []


class _Peer:
    """The connection to one lookup daemon."""

    def __init__(
        self,
        address: str,
        identity: ProducerIdentity,
        everything: Callable[[], list[str]],
        answer_bytes_max: int,
        credentials: Credentials,
    ) -> None:
        """`everything`: the commands that register what there is."""
        self._credentials = credentials
        self._by_token = False  # the next try: the daemon has another cluster's secret
        self.info: LookupInfo | None = None  # None while it does not know us
        self.tried = asyncio.Event()  # it knows us, or did not the first time
        self._address = address
        self._identity = identity
        self._everything = everything
        self._answer_bytes_max = answer_bytes_max
        self._changes: list[bytes] = []
        self._unanswered = 0
        self._heard_at = 0.0
        self._wake = asyncio.Event()
        self.task: asyncio.Task[None]  # runs `run`
        self._logger = Logger("lookupd")

    def end(self) -> None:
        """Leave the daemon: who waits for the first try waits no more."""
        self.task.cancel()
        self.tried.set()

    def tell(self, line: bytes) -> None:
        """Send this change, if the daemon knows us; if not, it will hear of everything anyway."""
        if self.info is not None:
            self._changes.append(line)
            self._wake.set()

    async def run(self) -> None:
        """Stay connected; ends only if it is cancelled."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(*RETRY_SECONDS)
        while True:
            started = loop.time()
            try:
                await self._serve()
            except (ConfigError, OSError, TimeoutError, ValueError, EOFError, LookupdLost) as error:
                why = _why(error, ANSWER_SECONDS)
                self._logger.warning("lookupd_lost", "LOOKUPD(%s): %s", self._address, why, peer=self._address)
            self.info = None
            self.tried.set()
            if loop.time() - started > PING_SECONDS:
                backoff.reset()  # it was well for a while: probably restarted
            await asyncio.sleep(backoff.next_pause())

    async def _serve(self) -> None:
        """One connection from beginning to end; returns or raises when it is of no more use."""
        host, port = split_host_port(self._address)
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host or "127.0.0.1", port)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                identity = self._identity.json()
                writer.write(b"  V1IDENTIFY\n" + len(identity).to_bytes(4, "big") + identity)
                info = gojson.decode(await self._answer(reader), LookupInfo)
                if info.auth_required:
                    await self._authenticate(reader, writer, info, identity)
            self._logger.info("lookupd_connected", "LOOKUPD(%s): peer info %s", self._address, info, peer=self._address)
            # No await between these two: a change is either in the list or comes as a change.
            self._changes = [line.encode() for line in self._everything()]
            self.info = info
            self.tried.set()
            self._unanswered = 0
            async with beside(self._read_answers(reader)) as answers:
                answers.add_done_callback(lambda _: self._wake.set())
                await self._talk(writer, answers)
        finally:
            writer.close()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, info: LookupInfo, identity: bytes
    ) -> None:
        """Show the daemon what it wants before a REGISTER. LookupdLost: there is nothing to show, or it is refused."""
        nonce, secret = nonce_of(info.nonce), self._credentials.secret
        prove = secret is not None and bool(nonce) and not self._by_token
        if secret is not None and prove:
            shown = lookup_proof(secret, nonce, hashlib.sha256(identity).digest())
            remedy = f"the daemon has another cluster's secret: compare the files of {SECRET_FLAG}"
        else:
            shown = await self._token()
            remedy = f"{TOKEN_FLAG} has to name a token of its access file, role broker"
        writer.write(b"AUTH\n" + len(shown).to_bytes(4, "big") + shown)
        try:
            await self._answer(reader)
        except LookupdLost as error:
            self._by_token = prove and bool(self._credentials.token_file)  # at the next try
            raise LookupdLost(f"{error}: {remedy}") from None

    async def _token(self) -> bytes:
        if not self._credentials.token_file:
            raise LookupdLost(WANTED)
        if not self._credentials.trusted(self._address):
            raise LookupdLost(UNTOLD)
        return (await self._credentials.token()).encode()

    async def _talk(self, writer: asyncio.StreamWriter, answers: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        next_ping = loop.time() + PING_SECONDS
        while not answers.done():
            self._wake.clear()
            now = loop.time()
            if now >= next_ping:
                self._changes.append(b"PING\n")
                next_ping = now + PING_SECONDS
            if self._changes:
                lines, self._changes = self._changes, []
                if not self._unanswered:
                    self._heard_at = now
                self._unanswered += len(lines)
                writer.write(b"".join(lines))
                if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
                    raise LookupdLost("does not keep up")
            wait_until = next_ping
            if self._unanswered:
                wait_until = self._heard_at + ANSWER_SECONDS
                if now >= wait_until:
                    raise TimeoutError
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(wait_until, next_ping)):
                    await self._wake.wait()
        answers.result()

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        while True:
            answer = await self._answer(reader)
            if answer != b"OK":
                raise LookupdLost(answer.decode("utf-8", "replace"))
            self._unanswered -= 1
            self._heard_at = asyncio.get_running_loop().time()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        size = int.from_bytes(await reader.readexactly(4), "big", signed=True)
        if not 0 <= size <= self._answer_bytes_max:
            raise LookupdLost(f"response body size ({size}) is outside of 0-{self._answer_bytes_max}")
        answer = await reader.readexactly(size)
        if answer.startswith(b"E_"):
            raise LookupdLost(answer.decode("utf-8", "replace"))
        return answer
