"""Who calls, and whether they may."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsqha.access.certificates import certified
from nsqha.access.roles import GRANTED, Need, Role, granted
from nsqha.access.surfaces import (
    ADMINISTER,
    CONSUME,
    GRPC,
    OPEN,
    OPERATE,
    PUBLISH,
    VIEW,
    writes_audit,
)
from nsqha.access.tokens import entry
from nsqha.clock import ManualClock
from nsqha.server.authorization.access_file import AccessFile
from nsqha.server.authorization.guard import Denied, Guard

FROM = "10.0.0.7:4711"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall_ns=1_700_000_000 * 10**9)


@pytest.fixture
def guard(tmp_path: Path, clock: ManualClock) -> Guard:
    path = tmp_path / "access.toml"
    path.write_text(
        'anonymous = ["viewer"]\n'
        + entry("root", "admin-token", [Role.ADMIN])
        + entry("shop", "shop-token", [Role.PUBLISHER], ["orders"])
        + entry("old", "old-token", [Role.ADMIN], expires="2020-01-01")
    )
    path.chmod(0o600)
    return Guard(AccessFile(str(path), clock), clock)


def refused(guard: Guard, *args: object, **more: object) -> tuple[int, str, str]:
    with pytest.raises(Denied) as denied:
        guard.allow(*args, **more)  # type: ignore[arg-type]
    return denied.value.status, denied.value.code, denied.value.who


def test_a_token_decides_alone(guard: Guard) -> None:
    assert guard.allow(ADMINISTER, FROM, "Bearer admin-token").who == "root"
    assert guard.allow(PUBLISH, FROM, "bearer  shop-token ", "orders").who == "shop"
    administrator = certified("ops", ["nsqha:administrator"])
    assert refused(guard, ADMINISTER, FROM, "Bearer shop-token", certified=administrator) == (403, "FORBIDDEN", "shop")
    assert refused(guard, VIEW, FROM, "Bearer shop-token") == (403, "FORBIDDEN", "shop"), "though anybody else may"
    assert refused(guard, PUBLISH, FROM, "Bearer shop-token", "other") == (403, "FORBIDDEN", "shop")


def test_a_certificate_and_then_anybody(guard: Guard) -> None:
    assert guard.allow(VIEW, FROM, None).who == "anonymous"
    assert refused(guard, ADMINISTER, FROM, None) == (401, "UNAUTHORIZED", "anonymous")
    ops = certified("ops", ["nsqha:administrator"])
    assert guard.allow(ADMINISTER, FROM, None, certified=ops).who == "certificate ops"
    assert refused(guard, ADMINISTER, FROM, None, certified=certified("viewer", ["nsqha:viewer"]))[0] == 403
    assert guard.allow(VIEW, FROM, None, certified=certified("other", [])).who == "anonymous"


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer ", "Basic YTpi", "admin-token", "", "Bearer old-token"])
def test_what_is_no_token_is_refused_even_where_none_is_needed(guard: Guard, header: str) -> None:
    assert refused(guard, VIEW, FROM, header)[:2] == (401, "UNAUTHORIZED")
    assert refused(guard, OPEN, FROM, header)[:2] == (401, "UNAUTHORIZED")


def test_an_expired_token_says_so(guard: Guard) -> None:
    with pytest.raises(Denied, match="the token old has expired: `nsqha access token old` makes another") as denied:
        guard.allow(VIEW, FROM, "Bearer old-token")
    assert denied.value.who == "old"


def test_nobody_guesses_faster_than_twenty_a_second(guard: Guard, clock: ManualClock) -> None:
    for n in range(20):
        assert refused(guard, VIEW, FROM, f"Bearer guess{n}")[0] == 401
    assert refused(guard, VIEW, FROM, "Bearer guess20")[:2] == (429, "TOO_MANY_WRONG_TOKENS")
    assert refused(guard, VIEW, "10.0.0.8:1", "Bearer guess20")[0] == 401, "from elsewhere it may be tried"
    assert guard.allow(VIEW, FROM, "Bearer admin-token").who == "root", "behind a proxy others have the same address"
    assert guard.allow(VIEW, FROM, None).who == "anonymous", "without a token nothing is guessed"
    clock.advance(1.0)
    assert refused(guard, VIEW, FROM, "Bearer guess21")[0] == 401
    assert guard.refused == {401: 22, 429: 1}


def test_a_huge_token_is_not_even_hashed(guard: Guard) -> None:
    assert refused(guard, VIEW, FROM, "Bearer " + "x" * 5000)[0] == 401


def test_only_administrators_change_the_audit_topic(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "access.toml"
    roles = [*GRANTED, "both"]
    both = [Role.ADMIN, Role.PUBLISHER]
    path.write_text("".join(entry(role, role, both if role == "both" else [Role(role)]) for role in roles))
    path.chmod(0o600)
    guard = Guard(AccessFile(str(path), clock), clock, "audit")

    def may(need: Need, topic: str) -> list[str]:
        found = []
        for role in roles:
            grant = guard.token(role.encode(), FROM).grant
            try:
                guard.check(need, grant, FROM, topic)
            except Denied:
                assert not guard.may(need, grant, topic)
            else:
                assert guard.may(need, grant, topic)
                found.append(str(role))
        return found

    assert may(PUBLISH, "audit") == ["both"] and may(PUBLISH, "orders") == ["publisher", "both"]
    assert may(OPERATE, "audit") == ["admin", "both"] and may(OPERATE, "orders") == ["operator", "admin", "both"]
    assert may(CONSUME, "audit") == ["consumer"], "that is what the topic is for"
    for need in (VIEW, ADMINISTER):
        assert may(need, "audit") == may(need, "orders")


def test_each_change_of_messages_needs_an_administrator_in_the_audit_topic() -> None:
    for method in ("EmptyTopic", "DeleteTopic", "Seek", "UndoSeek", "EmptyChannel", "ChangeMessages", "PauseTopic"):
        assert writes_audit(GRPC[f"nsqha.v1.Admin/{method}"]).roles in (frozenset({Role.ADMIN}), frozenset()), method
        assert not granted("x", [Role.OPERATOR]).may(GRPC[f"nsqha.v1.Admin/{method}"]) or not granted(
            "x", [Role.OPERATOR]
        ).may(writes_audit(GRPC[f"nsqha.v1.Admin/{method}"])), method
