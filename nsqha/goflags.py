"""Command line flags, config file and environment, with the syntax of Go's flag package.

    -x v   --x v   -x=v   --x=v     one dash or two are the same; a boolean takes a value only after `=`

A value comes from the flag, else from the environment (`PREFIX_X`, `-` becomes `_`), else from the TOML file, else it
is the default. A repeatable flag appends, and each value may be a list with commas. Errors have Go's wording:

    flag provided but not defined: -x              invalid value "soon" for flag -msg-timeout: parse error
    flag needs an argument: -x                     invalid boolean value "maybe" for -tls-required: parse error

Different from Go on purpose: an argument that is not a flag is refused. Go stops reading there and silently ignores
every flag after it, so `nsqd --verbose true --tcp-address=...` would listen on another address than configured.

Durations are integers of nanoseconds inside, `1m30s` outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nsqha.errors import ConfigError

_UNIT_NS = {"ns": 1, "us": 1000, "µs": 1000, "μs": 1000, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)")
_INT64_MAX = (1 << 63) - 1
_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_FALSE = ("0", "f", "F", "false", "FALSE", "False")


def parse_duration(text: str) -> int:
    """Nanoseconds of `1h2m3.5s`. ValueError for what Go refuses: no unit, a blank, more than 292 years."""
    sign, rest = (-1, text[1:]) if text[:1] == "-" else (1, text[1:] if text[:1] == "+" else text)
    if rest == "0":
        return 0
    total, position = 0, 0
    while position < len(rest):
        part = _PART.match(rest, position)
        if part is None or not (part[1] or part[2]) or len(part[0]) > 40:
            raise ValueError("parse error")
        unit = _UNIT_NS[part[3]]
        fraction = part[2] or ""
        total += int(part[1] or 0) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
        position = part.end()
    if not rest or total > _INT64_MAX:
        raise ValueError("parse error")
    return sign * total


def format_duration(ns: int) -> str:
    """Format a duration as Go does: `0s`, `1.5µs`, `2ms`, `1m30s`, `1h0m0.25s`."""
    if ns == 0:
        return "0s"
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    for unit, size in (("ns", 1), ("µs", 1000), ("ms", 10**6)):
        if ns < size * 1000:
            return f"{sign}{_decimal(ns, size)}{unit}"
    minutes, rest = divmod(ns, 60 * 10**9)
    hours, minutes = divmod(minutes, 60)
    head = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{sign}{head}{_decimal(rest, 10**9)}s"


def _decimal(value: int, unit: int) -> str:
    whole, rest = divmod(value, unit)
    return f"{whole}.{rest:0{len(str(unit)) - 1}d}".rstrip("0") if rest else str(whole)


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of one type are read; the readers raise ValueError with the reason."""

    word: str
    from_text: Callable[[str], Any]
    from_toml: Callable[[Any], Any]
    is_bool: bool = False
    many: bool = False
    words: tuple[str, ...] = ()
    """The only values, where there are few."""

    def of_file(self, value: object) -> Any:
        """Read a value from the config file: text as on the command line, other types as TOML has them."""
        return self.from_text(value) if isinstance(value, str) else self.from_toml(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting of a program."""

    name: str
    kind: Kind
    default: Any
    usage: str
    key: str
    """Its name in the config file; "" if it belongs on the command line only."""
    inert: str = ""
    """Why it is accepted although it has no effect here; logged once if it is set."""
    least: int | None = None
    most: int | None = None
    """Both inclusive; of a duration in nanoseconds."""

    def written(self, value: Any) -> str:
        """The value as the flag takes it."""
        if self.kind is DURATION:
            return format_duration(value)
        if self.kind is BOOL:
            return "true" if value else "false"
        return ",".join(map(str, value)) if self.kind.many else str(value)

    def out_of_range(self, value: Any) -> str:
        """Why this value is not one of the flag; "" if it is one."""
        if self.least is not None and value < self.least:
            return f"must be {self._lowest()}"
        if self.most is not None and value > self.most:
            return f"must be at most {self.written(self.most)}"
        return ""

    def range(self) -> str:
        """The values that it takes, in words; "" for all of its kind."""
        low = "" if self.least is None else self._lowest()
        high = "" if self.most is None else f"at most {self.written(self.most)}"
        return ", ".join(filter(None, (low, high))) or ", ".join(self.kind.words)

    def _lowest(self) -> str:
        assert self.least is not None
        return "above zero" if self.kind is DURATION and self.least == 1 else f"at least {self.written(self.least)}"


@dataclass(frozen=True, slots=True)
class FlagValues:
    """A value for every flag of a program, and where it came from."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    """flag name -> "flag", "env" or "file"; a flag at its default is not in it."""
    notices: Sequence[str] = ()
    """Lines to log once: flags without effect here."""


class UsageError(ConfigError):
    """The command line is wrong; the exit status is 2, as Go's."""


class HelpWanted(Exception):
    """-h or --help."""


class VersionWanted(Exception):
    """--version."""


def load(
    flags: Iterable[Flag],
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    env_prefix: str,
    read_toml: Callable[[str], Mapping[str, Any]],
    old: Mapping[str, str] | None = None,
) -> FlagValues:
    """Read all sources. `read_toml` gets the path that the flag `config` names, if it is set. `old`: keys of the file
    that were settings once, and why each has no effect."""
    table = {flag.name: flag for flag in flags}
    given = parse_arguments(table, argv)
    if given.get("version"):
        raise VersionWanted
    sources = dict.fromkeys(given, "flag")
    for name, value in _from_environment(table, environ, env_prefix).items():
        if name not in given:
            given[name], sources[name] = value, "env"
    notices = []
    if path := given.get("config"):
        data, old = dict(read_toml(path)), old or {}
        notices = [f"{key} in {path} has no effect: {old[key]}" for key in old if data.pop(key, None) is not None]
        for name, value in _from_file(table, path, data).items():
            if name not in given:
                given[name], sources[name] = value, "file"
    notices += [f"--{name} has no effect: {table[name].inert}" for name in given if table[name].inert]
    defaults = {name: flag.default for name, flag in table.items()}
    return FlagValues(defaults | given, sources, tuple(notices))


def parse_arguments(table: Mapping[str, Flag], argv: Sequence[str]) -> dict[str, Any]:
    """The values of the flags in `argv`, which does not start with the program's name. UsageError, HelpWanted."""
    found: dict[str, Any] = {}
    rest = list(reversed(argv))
    while rest:
        word = rest.pop()
        name, equals, text = word.lstrip("-").partition("=")
        dashes = len(word) - len(word.lstrip("-"))
        if dashes == 0 or word in ("-", "--"):
            raise UsageError(f'unexpected argument "{word}": flags are -name=value, a boolean takes no separate value')
        if dashes > 2 or not name:
            raise UsageError(f"bad flag syntax: {word}")
        flag = table.get(name)
        if flag is None:
            if name in ("h", "help"):
                raise HelpWanted
            raise UsageError(f"flag provided but not defined: -{name}{_meant(name, table)}")
        if not equals and flag.kind.is_bool:
            text = "true"
        elif not equals:
            if not rest:
                raise UsageError(f"flag needs an argument: -{name}")
            text = rest.pop()
        value = _read(flag, text)
        found[name] = found.get(name, ()) + value if flag.kind.many else value
    return found


def _read(flag: Flag, text: str) -> Any:
    try:
        return flag.kind.from_text(text)
    except ValueError as error:
        what = "invalid boolean value" if flag.kind is BOOL else "invalid value"
        raise UsageError(f'{what} "{text}" for flag -{flag.name}: {error}') from None


def _meant(name: str, table: Mapping[str, Flag]) -> str:
    close = _close_matches(name, table, 1, 0.75)
    return f" (did you mean -{close[0]}?)" if close else ""


def _close_matches(name: str, names: Iterable[str], n: int, cutoff: float) -> list[str]:
    import difflib  # only a wrong name needs it

    return difflib.get_close_matches(name, names, n, cutoff)


def _from_environment(table: Mapping[str, Flag], environ: Mapping[str, str], prefix: str) -> dict[str, Any]:
    found = {}
    for name, flag in table.items():
        variable = prefix + name.upper().replace("-", "_")
        if flag.key and variable in environ:
            try:
                found[name] = flag.kind.from_text(environ[variable])
            except ValueError as error:
                raise ConfigError(f'{variable}="{environ[variable]}" in the environment: {error}') from None
    return found


def _from_file(table: Mapping[str, Flag], path: str, data: Mapping[str, Any]) -> dict[str, Any]:
    by_key = {flag.key: flag for flag in table.values() if flag.key and flag.name != "config"}
    found = {}
    for key, value in data.items():
        flag = by_key.get(key)
        if flag is None:
            close = _close_matches(key, by_key, 1, 0.6)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"--config={path}: there is no setting {key}{meant}")
        try:
            found[flag.name] = flag.kind.of_file(value)
        except ValueError as error:
            if flag.inert and flag.kind is BOOL:  # nsqd has the flag for its old users, and does not look for the key
                found[flag.name] = False
                continue
            raise ConfigError(f"{path}: {key} = {value!r}: {error}") from None
    return found


def usage(program: str, flags: Iterable[Flag]) -> str:
    """The text of --help, in Go's layout."""
    lines = [f"Usage of {program}:"]
    for flag in flags:
        lines.append(f"  -{flag.name}" + ("" if flag.kind.is_bool else f" {flag.kind.word}"))
        shown = _show(flag)
        text = f"accepted, without effect: {flag.inert}" if flag.inert else flag.usage
        lines.append(f"    \t{text}" + (f" (default {shown})" if shown else ""))
    return "\n".join(lines) + "\n"


def _show(flag: Flag) -> str:
    if flag.kind is DURATION:
        return format_duration(flag.default) if flag.default else ""
    if flag.kind is BOOL:
        return "true" if flag.default else ""
    return str(flag.default) if flag.default not in ("", 0, ()) else ""


def parse_bool(text: str) -> bool:
    """Go's booleans: 1, t, true, 0, f, false, and their capitals."""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("parse error")


def _integer(text: str) -> int:
    """Parse an integer in base 10, or 0x, 0o, 0b; within 64 bits."""
    if len(text) > 70 or not re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|0[oO]?[0-7]*|0[bB][01]+|[1-9][0-9]*)", text):
        raise ValueError("parse error")
    digits = text.lstrip("+-")
    value = int(digits, 8 if re.fullmatch("0[0-7]+", digits) else 0)
    return _in_range(-value if text[0] == "-" else value)


def _in_range(value: int) -> int:
    if not -_INT64_MAX - 1 <= value <= _INT64_MAX:
        raise ValueError("value out of range")
    return value


def _strings(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in _text(text).split(",") if part.strip())


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("parse error") from None


def _exactly(type_: type, word: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not type_:
            raise ValueError(f"expected {word}")
        return value

    return check


def _toml_duration(value: Any) -> int:
    """Read a duration; a bare number is milliseconds, as in nsqd."""
    if type(value) is not int:
        raise ValueError('expected a duration, for example "1m30s" or milliseconds')
    return _in_range(value * 10**6)


def _toml_list(of: type[str] | type[float]) -> Callable[[Any], tuple[Any, ...]]:
    def check(value: Any) -> tuple[Any, ...]:
        items = value if isinstance(value, list) else [value]
        if of is float:
            items = [float(item) if type(item) is int else item for item in items]
        if not all(type(item) is of for item in items):
            raise ValueError(f"expected a list of {'numbers' if of is float else 'strings'}")
        return tuple(items if of is float else map(_text, items))

    return check


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError("a NUL character")  # no path and no name can contain it
    return text


STRING = Kind("string", _text, _exactly(str, "a string"))
INT = Kind("int", _integer, lambda value: _in_range(_exactly(int, "a whole number")(value)))
BOOL = Kind("", parse_bool, _exactly(bool, "true or false"), is_bool=True)
DURATION = Kind("duration", parse_duration, _toml_duration)
STRINGS = Kind("value", _strings, _toml_list(str), many=True)
FLOATS = Kind("value", lambda text: tuple(_float(part) for part in _strings(text)), _toml_list(float), many=True)


def choice(*words: str) -> Kind:
    """The kind of a flag whose value is one of these words; capitals do not matter."""

    def check(text: str) -> str:
        if text.lower() not in words:
            raise ValueError("must be one of " + ", ".join(filter(None, words)))
        return text.lower()

    return Kind("string", check, _exactly(str, "a string"), words=tuple(word for word in words if word))
