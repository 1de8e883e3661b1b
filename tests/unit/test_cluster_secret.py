"""Proofs of the cluster's secret: what convinces, what does not, and the file that it is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsqha import cluster_secret
from nsqha.cluster_secret import (
    MISSING,
    NUMBER_KEY,
    PROOF_KEY,
    SESSION_KEY,
    WINDOW,
    WRONG,
    CallProofs,
    CallSessions,
    ClusterSecret,
    new_nonce,
    read_secret,
    stream_proof,
    stream_proved,
)
from nsqha.errors import ConfigError

NEW, OLD = b"n" * 32, b"o" * 32
STATUS = "/nsqha.v1.Replication/Status"


def session(client: ClusterSecret, sessions: CallSessions) -> CallProofs:
    nonce = new_nonce()
    return CallProofs(client, nonce, sessions.challenge(nonce))


def test_a_proof_is_an_hmac_over_words_with_their_lengths() -> None:
    made = ClusterSecret(NEW).proofs(b"ab", b"c")
    assert len(made) == 64
    assert made != ClusterSecret(NEW).proofs(b"a", b"bc")
    assert made != ClusterSecret(OLD).proofs(b"ab", b"c")


def test_one_secret_in_common_is_enough_whichever_side_was_changed_first() -> None:
    both, new, old = ClusterSecret(NEW, OLD), ClusterSecret(NEW), ClusterSecret(OLD)
    for one, other in ((both, old), (old, both), (both, new), (new, both)):
        assert other.proved(one.proofs(b"x"), b"x")
    assert not old.proved(new.proofs(b"x"), b"x")
    assert not new.proved("", b"x")
    assert not new.proved("\N{SNOWMAN}", b"x")


def test_a_stream_proof_holds_for_its_side_nonces_path_and_words_only() -> None:
    secret, mine, theirs = ClusterSecret(NEW), b"c" * 32, b"s" * 32
    proof = stream_proof(secret, b"client", mine, theirs, "/Push", "level=1-1")
    assert stream_proved(secret, proof, b"client", mine, theirs, "/Push", "level=1-1")
    assert not stream_proved(secret, proof, b"server", mine, theirs, "/Push", "level=1-1")
    assert not stream_proved(secret, proof, b"client", theirs, mine, "/Push", "level=1-1")
    assert not stream_proved(secret, proof, b"client", mine, theirs, "/Live", "level=1-1")
    assert not stream_proved(secret, proof, b"client", mine, theirs, "/Push", "level=1-9")


def test_a_call_is_carried_out_once() -> None:
    sessions = CallSessions(ClusterSecret(NEW))
    metadata = dict(session(ClusterSecret(NEW), sessions).metadata(STATUS))
    assert sessions.refused("/nsqha.v1.Admin/DeleteTopic", metadata) == (WRONG, False)
    assert sessions.refused(STATUS, {**metadata, NUMBER_KEY: "2"}) == (WRONG, False)
    assert sessions.refused(STATUS, metadata) == ("", False)
    assert sessions.refused(STATUS, metadata) == ("a call came twice, or far too late", False)


def test_calls_may_overtake_each_other_but_not_by_more_than_the_window() -> None:
    sessions = CallSessions(ClusterSecret(NEW))
    proofs = session(ClusterSecret(NEW), sessions)
    calls = [dict(proofs.metadata(STATUS)) for _ in range(WINDOW + 1)]
    assert sessions.refused(STATUS, calls[-1])[0] == ""
    assert sessions.refused(STATUS, calls[1])[0] == ""
    assert sessions.refused(STATUS, calls[0])[0] != ""


def test_who_proves_nothing_or_has_another_secret_is_refused() -> None:
    sessions = CallSessions(ClusterSecret(NEW))
    assert sessions.refused(STATUS, {}) == (MISSING, False)
    with pytest.raises(ConfigError, match="does not know this cluster's secret"):
        session(ClusterSecret(OLD), sessions)
    nonce = new_nonce()
    known = nonce + sessions.challenge(nonce)[:32]
    forged = {SESSION_KEY: known.hex(), NUMBER_KEY: "1", PROOF_KEY: "0" * 64}
    assert sessions.refused(STATUS, forged) == (WRONG, False)
    assert sessions.refused(STATUS, {**forged, SESSION_KEY: "zz"}) == (WRONG, False)
    assert sessions.challenge(b"short") == b""


def test_a_session_that_is_forgotten_begins_again_and_its_calls_do_not_count() -> None:
    sessions = CallSessions(ClusterSecret(NEW), sessions_max=1)
    first = dict(session(ClusterSecret(NEW), sessions).metadata(STATUS))
    assert sessions.refused(STATUS, first)[0] == ""
    second = dict(session(ClusterSecret(NEW), sessions).metadata(STATUS))
    assert sessions.refused(STATUS, second)[0] == ""
    assert sessions.refused(STATUS, first) == ("this node does not know the session any more", True)


def test_strangers_that_ask_for_nonces_push_out_no_session() -> None:
    sessions = CallSessions(ClusterSecret(NEW), sessions_max=2)
    proofs = session(ClusterSecret(NEW), sessions)
    assert sessions.refused(STATUS, dict(proofs.metadata(STATUS)))[0] == ""
    for _ in range(10):
        sessions.challenge(new_nonce())
    assert sessions.refused(STATUS, dict(proofs.metadata(STATUS)))[0] == ""


def written(tmp_path: Path, text: str, mode: int = 0o640) -> str:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_file_holds_one_secret_or_the_new_and_the_old_one(tmp_path: Path) -> None:
    assert read_secret("") is None
    one = read_secret(written(tmp_path, "n" * 32 + "\n"))
    assert one is not None
    assert one.proofs(b"x") == ClusterSecret(NEW).proofs(b"x")
    two = read_secret(written(tmp_path, "n" * 32 + "\n\n" + "o" * 32 + "\n"))
    assert two is not None
    assert two.proofs(b"x") == ClusterSecret(NEW, OLD).proofs(b"x")
    assert "nnn" not in repr(two)


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("n" * 32, 0o644, "every user of this host may use it; do `chmod o="),
        ("n" * 31, 0o600, "a secret has at least 32 characters"),
        ("", 0o600, "it must have one secret"),
        ("\n".join(["n" * 32] * 3), 0o600, "it must have one secret"),
        ("n" * 5000, 0o600, "it has more than 4,096 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, text: str, mode: int, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^{cluster_secret.FLAG}=.*{why}") as refused:
        read_secret(written(tmp_path, text, mode))
    assert "\n" not in str(refused.value)
    assert "nnn" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(str(tmp_path / "none"))
