"""The access file: what it says, and one line for each way in which it can be wrong."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import pytest

from nsqha.access.roles import Role
from nsqha.access.surfaces import BROKER_HTTP
from nsqha.access.tokens import TOKENS_MAX, entry, parse
from nsqha.errors import ConfigError

DIGEST = hashlib.sha256(b"secret").hexdigest()
GOOD = f"""
anonymous = ["viewer"]
[tokens.billing]
sha256 = "{DIGEST}"
roles = ["publisher", "viewer"]
topics = ["invoices", "invoices.*"]
expires = 2027-01-01
"""


def test_a_file_is_read() -> None:
    table = parse(GOOD.encode())
    assert table.anonymous.roles == {Role.VIEWER}
    token = table.find(b"secret")
    assert token is not None and token.name == "billing" and token.grant.who == "billing"
    assert token.grant.roles == {Role.PUBLISHER, Role.VIEWER}
    assert token.grant.topics.patterns == ("invoices", "invoices.*")
    end = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    assert not token.expired(end - 0.001) and token.expired(end)
    assert table.expired(end) == [token] and table.expired(end - 1) == []
    assert table.find(b"Secret") is None and table.find(b"") is None and table.find(DIGEST.encode()) is None


def test_a_byte_order_mark_is_passed_over() -> None:
    table = parse(b'\xef\xbb\xbfanonymous = ["viewer"]')
    assert table.anonymous.may(BROKER_HTTP["GET /stats"])


def test_an_empty_file_lets_nobody_do_anything() -> None:
    table = parse(b"")
    assert table.tokens == () and not table.anonymous.may(BROKER_HTTP["GET /stats"])


def token(**fields: str) -> str:
    shown = {"sha256": f'"{DIGEST}"', "roles": '["viewer"]', **fields}
    return "[tokens.ci]\n" + "\n".join(f"{key} = {value}" for key, value in shown.items() if value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("anonymous = [", "not a TOML file"),
        ("\xff", None),
        ('anonymous = "viewer"', r'anonymous: it has to be a list of roles, as in \["viewer"\]'),
        ('anonymos = ["viewer"]', r"anonymos: there is no such key \(did you mean anonymous\?\)"),
        ('anonymous = ["veiwer"]', r"anonymous: 'veiwer' is no role \(did you mean viewer\?\); roles are viewer, "),
        ('anonymous = ["node"]', "'node' is no role"),
        ('anonymous = ["segments"]', "'segments' is no role"),
        ("tokens = 3", "each token is a table of its own"),
        ("[tokens]\nci = 3", "each token is a table of its own"),
        ('[tokens."a b"]', "'a b' is no name for a token"),
        ("[tokens.anonymous]", "'anonymous' is no name for a token"),
        (token(sha256='"secret"'), "tokens.ci.sha256: it has to be the SHA-256 of the token"),
        (token(sha256=f'"{DIGEST.upper()}"'), "64 lower-case hex digits"),
        (token(sha256=""), "tokens.ci.sha256"),
        (token(roles=""), "tokens.ci.roles: it has to be a list"),
        (token(roles="[]"), "tokens.ci.roles: it has to be a list"),
        (token(roles='["publsher"]'), r"tokens.ci.roles: 'publsher' is no role \(did you mean publisher\?\)"),
        (token(roles="[3]"), "3 is no role"),
        (token(rols='["viewer"]'), r"tokens.ci.rols: there is no such key \(did you mean roles\?\)"),
        (token(roles='["consumer"]', topics='"orders"'), "tokens.ci.topics: it has to be a list of topics"),
        (token(roles='["consumer"]', topics='["a b"]'), "tokens.ci.topics: 'a b' is no pattern"),
        (token(roles='["consumer", "reader"]', topics='["a"]'), "give reader to a token of its own"),
        (token(roles='["admin"]', topics='["a"]'), "give admin to a token of its own"),
        (token(expires='"2027-01-01"'), "a date without quotation marks"),
        (token(expires="2027-01-01T00:00:00"), "a time needs its zone"),
        (
            token() + token().replace("ci", "cd").replace("[tokens", "\n[tokens"),
            "tokens.ci and tokens.cd have one sha256",
        ),
    ],
)
def test_what_is_wrong_is_one_line(text: str, why: str | None) -> None:
    data = text.encode("latin-1") if why is None else text.encode()
    with pytest.raises(ConfigError, match=why or "not a TOML file") as failure:
        parse(data)
    assert "\n" not in str(failure.value) or "TOML" in str(failure.value)
    assert "secret" not in str(failure.value)


def test_memory_is_bounded() -> None:
    with pytest.raises(ConfigError, match="MiB"):
        parse(b" " * (5 << 20))
    tables = "\n".join(f"[tokens.t{n}]" for n in range(TOKENS_MAX + 1))
    with pytest.raises(ConfigError, match="at most 10,000"):
        parse(tables.encode())


@pytest.mark.parametrize("name", ["ci", "team.ci", "a-b_c"])
def test_what_is_written_for_a_new_token_is_read(name: str) -> None:
    text = entry(name, "the token", [Role.PUBLISHER, Role.CONSUMER], ["a.*"], "2027-01-01")
    found = parse(text.encode()).find(b"the token")
    assert found is not None and found.name == name and found.grant.topics.patterns == ("a.*",)
    assert "the token" not in text
