"""TOML from files, bounded before it is parsed. The parser of the standard library takes the square of the number of
parts of a key: 500,000 of them in 1 MB take days. And it is code in Python, which nothing can end.

What is counted here is read once, by expressions that never go back (`*+`).
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from nsqha.errors import ConfigError

KEY_PARTS_MAX = 32
_NOT_KEYS = re.compile(
    rb'"""(?:[^"\\]++|\\.|""?(?!"))*+(?:""""?"?|\\?\Z)'
    rb"|'''(?:[^']++|''?(?!'))*+(?:'''|'{0,2}\Z)"
    rb'|"(?:[^"\\\n]++|\\.)*+"?'
    rb"|'[^'\n]*+'?"
    rb"|\#[^\n]*+",
    re.DOTALL,
)
"""Strings, to the end of the text where they have none, and comments."""


def parse_toml(text: bytes, bytes_max: int) -> dict[str, Any]:
    """The content of a file, of which at most `bytes_max` + 1 bytes were read. ConfigError says what is wrong."""
    if len(text) > bytes_max:
        raise ConfigError(f"it has more than {bytes_max >> 20} MiB")
    lines = _NOT_KEYS.sub(b"", text).split(b"\n")
    if max(line.count(b".") for line in lines) >= KEY_PARTS_MAX:
        raise ConfigError(f"not a TOML file that is read here: a key has more than {KEY_PARTS_MAX} parts")
    try:
        return tomllib.loads(text.decode("utf-8-sig"))  # editors put a byte order mark in front
    except ValueError as error:  # also of a number with thousands of digits
        raise ConfigError(f"not a TOML file: {error}") from None
    except RecursionError:
        raise ConfigError("not a TOML file: nested too deeply") from None
