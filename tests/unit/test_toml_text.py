"""TOML that would never be parsed to its end is refused before."""

from __future__ import annotations

import tomllib

import pytest

from nsqha.errors import ConfigError
from nsqha.texts.toml_text import KEY_PARTS_MAX, parse_toml

MIB = 1 << 20
PARTS = 500_000


@pytest.mark.parametrize(
    "key",
    [
        ".".join(["a"] * PARTS) + " = 1",
        " . ".join(["a"] * PARTS) + " = 1",
        "[" + ".".join(["a"] * PARTS) + "]",
        "[[" + ".".join(["a"] * PARTS) + "]]",
        ".".join(['"a.b"'] * 100_000) + " = 1",
        "x = {" + ".".join(["'a'"] * PARTS) + " = 1}",
        's = """a"""""\n' + ".".join(["a"] * PARTS) + " = 1",
        "s = '''a'''''\n" + ".".join(["a"] * PARTS) + " = 1",
        's = "a\\""\n' + ".".join(["a"] * PARTS) + " = 1",
        ".".join(["a"] * (KEY_PARTS_MAX + 1)) + " = 1",
    ],
)
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(_: str) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(tomllib, "loads", loads)
    with pytest.raises(ConfigError, match="a key has more than 32 parts"):
        parse_toml(f"first = 1\n{key}\n".encode(), 4 * MIB)


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * KEY_PARTS_MAX) + " = 1",
        "topics = [" + ", ".join(['"a.b.c"'] * 1000) + "]",
        "s = '" + "." * 1000 + "' # " + "." * 1000,
        's = "' + "." * 50 + '\\"' + "." * 50 + '"',
        's = """\n' + "...\n" * 50 + '\\""" ' + "." * 50 + '"""""',
        "s = '''\n" + "." * 50 + "'" + "." * 50 + "'''''",
        "\n".join(f"a{n}.b.c = 1.5" for n in range(1000)),
    ],
)
def test_dots_elsewhere_are_no_parts(text: str) -> None:
    assert parse_toml(text.encode(), MIB) == tomllib.loads(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a = " + b"9" * 5000, "not a TOML file"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b'a = """' + b'\\"""' * 1000, "not a TOML file"),
        (b"\xff", "not a TOML file"),
        (b"#" * MIB + b"#", "more than 1 MiB"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(text: bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        parse_toml(text, MIB)
    assert "\n" not in str(refused.value)
