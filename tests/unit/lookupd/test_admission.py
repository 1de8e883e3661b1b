"""Who may register with a lookup daemon that has an access file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from pathlib import Path

import pytest
import uvloop

from lookupd.daemon import Lookupd
from lookupd.lookup_v1 import NotAdmitted
from lookupd.tcp import Admissions
from nsqha.access.roles import GRANTED, Role
from nsqha.access.surfaces import LOOKUP_V1
from nsqha.access.tokens import entry
from nsqha.clock import ManualClock, read
from nsqha.cluster_secret import ClusterSecret, lookup_proof
from nsqha.options import LookupdOptions, networks
from nsqha.server.authorization.access_file import read_table
from nsqha.server.authorization.guard import Guard

NEAR, FAR = "10.0.0.7:4711", "192.0.2.1:4711"
SECRET = ClusterSecret(b"s" * 32)
DIGEST = hashlib.sha256(b"what IDENTIFY said").digest()


def guard_of(path: Path, text: str) -> Guard:
    path.write_text(text)
    path.chmod(0o600)
    guard = Guard.of(str(path), ManualClock(wall_ns=1_700_000_000 * 10**9))
    assert guard is not None
    return guard


@pytest.fixture
def rules(tmp_path: Path) -> Admissions:
    text = entry("b1", "broker-token", [Role.BROKER]) + entry("old", "old-token", [Role.BROKER], expires="2020-01-01")
    text += "".join(entry(f"is-{role}", f"token-of-{role}", [role]) for role in GRANTED)
    return Admissions(guard_of(tmp_path / "access.toml", text), networks("10.0.0.0/8"), SECRET)


def test_only_the_addresses_of_the_flag_register_without_auth(rules: Admissions) -> None:
    for address in (NEAR, "[::ffff:10.0.0.7]:4711"):
        assert rules.of(address).open and rules.of(address).still(), address
    for address in (FAR, "[2001:db8::1]:4711", "unix:1"):
        assert not rules.of(address).open and not rules.of(address).still(), address


def test_no_role_but_broker_registers(rules: Admissions) -> None:
    admitted = []
    for role in GRANTED:
        peer = rules.of(FAR)
        try:
            answer = json.loads(peer.admit(f"token-of-{role}".encode(), DIGEST))
        except NotAdmitted as error:
            assert str(error) == "E_UNAUTHORIZED AUTH failed" and not peer.still()
        else:
            assert answer["identity"] == f"is-{role}" and peer.still()
            admitted.append(role)
    assert admitted == [Role.BROKER]


@pytest.mark.parametrize("token", [b"", b"nobody", b"old-token"])
def test_a_wrong_or_expired_token_is_refused_also_where_none_is_needed(rules: Admissions, token: bytes) -> None:
    for address in (NEAR, FAR):
        with pytest.raises(NotAdmitted, match="E_AUTH_FAILED"):
            rules.of(address).admit(token, DIGEST)


def test_a_proof_holds_for_one_connection_and_one_identity(rules: Admissions) -> None:
    def nonce() -> bytes:
        said = json.loads(peer.greeting(b'{"tcp_port":1}'))
        assert said["tcp_port"] == 1 and said["auth_required"] is True
        return bytes.fromhex(said["nonce"])

    peer = rules.of(FAR)
    proof = lookup_proof(SECRET, nonce(), DIGEST)
    assert json.loads(peer.admit(proof, DIGEST))["identity"] == "cluster secret" and peer.still()
    for digest, secret in ((hashlib.sha256(b"other").digest(), SECRET), (DIGEST, ClusterSecret(b"t" * 32))):
        peer = rules.of(FAR)
        with pytest.raises(NotAdmitted, match="E_AUTH_FAILED"):
            peer.admit(lookup_proof(secret, nonce(), digest), DIGEST)
    peer = rules.of(FAR)
    nonce()
    with pytest.raises(NotAdmitted, match="E_AUTH_FAILED"):
        peer.admit(proof, DIGEST)  # of another connection
    with pytest.raises(NotAdmitted, match="E_AUTH_FAILED"):
        rules.of(FAR).admit(lookup_proof(SECRET, b"", DIGEST), DIGEST)  # before there is a nonce


def test_a_daemon_without_a_secret_sends_no_nonce(tmp_path: Path) -> None:
    guard = guard_of(tmp_path / "access.toml", 'anonymous = ["viewer"]\n')
    assert json.loads(Admissions(guard, (), None).of(FAR).greeting(b"{}")) == {"auth_required": True}


def test_callers_without_a_token_register_where_the_file_gives_them_the_role(tmp_path: Path) -> None:
    guard = guard_of(tmp_path / "access.toml", 'anonymous = ["broker"]\n')
    assert Admissions(guard, (), None).of(FAR).open


def test_the_table_has_each_command() -> None:
    assert [name for name, need in LOOKUP_V1.items() if need.roles] == ["REGISTER", "UNREGISTER"]


class Peer:
    """A producer's side of the lookup protocol."""

    async def connect(self, address: str) -> Peer:
        self.reader, self.writer = await asyncio.open_connection(*address.rsplit(":", 1))
        self.writer.write(b"  V1")
        said = {"broadcast_address": "a", "tcp_port": 1, "http_port": 2, "version": "1"}
        self.greeting = await self.ask(b"IDENTIFY", json.dumps(said).encode())
        return self

    async def ask(self, line: bytes, body: bytes | None = None) -> bytes:
        self.writer.write(line + b"\n" + (b"" if body is None else struct.pack(">i", len(body)) + body))
        return await self.reply()

    async def reply(self) -> bytes:
        (size,) = struct.unpack(">i", await self.reader.readexactly(4))
        return await self.reader.readexactly(size)


def test_a_stranger_is_in_no_list_and_a_revoked_broker_leaves_all(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    guard = guard_of(path, entry("b1", "t1", [Role.BROKER]) + entry("b2", "t2", [Role.BROKER]))

    async def main() -> None:
        options = LookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", broadcast_address="me")
        daemon = Lookupd(options, clock=ManualClock(), guard=guard)
        await daemon.start()
        stranger = await Peer().connect(daemon.tcp_address)
        assert b'"auth_required":true' in stranger.greeting
        assert await stranger.ask(b"REGISTER t c") == b"E_AUTH_FIRST AUTH required before REGISTER"
        assert daemon.registry.topics() == []
        first, second = [await Peer().connect(daemon.tcp_address) for _ in range(2)]
        for peer, token in ((first, b"t1"), (second, b"t2")):
            assert b'"identity":"b' in await peer.ask(b"AUTH", token)
            assert await peer.ask(b"REGISTER t c") == b"OK"
        path.write_text(entry("b2", "t2", [Role.BROKER]))
        guard.file.take(read_table(str(path)))
        assert await first.reply() == b"E_AUTH_FAILED AUTH failed" and await first.reader.read() == b""
        assert await second.ask(b"PING") == b"OK"
        found = daemon.registry.lookup("t", read(ManualClock()))
        assert found is not None and len(found.producers) == 1
        await daemon.stop()

    uvloop.run(asyncio.wait_for(main(), 60))
