"""docs/configuration.md, made from the tables of flags: every setting with its default, range, variable and meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nsqha.cli import broker, lookupd
from nsqha.goflags import Flag
from nsqha.options import LookupdOptions, Options, flags_of

HEAD = """\
# Configuration

Every setting of the daemons. This page is made by `nsqha generate docs`; do not edit it.

A value comes from the flag, else from the environment, else from the file that `--config` names (TOML), else it is the
default. A flag is a setting's name with `-` for `_` where no other is named. What a setting does not take keeps the
daemon from starting, with one line that says why; so does a name that is none, in the file and on the command line.
Durations are written `1m30s`. All settings are there since 0.1.0.

```sh
nsqha config show
nsqha config show broker --all
nsqha config show broker --json -- --sync=interval
```

`nsqha config show` prints the settings of a daemon that is started in the same shell, and where each comes from;
`--config` names its file, and flags of the daemon follow `--`. A variable that is named like a daemon's and is none
keeps nothing from starting, as orchestrators put in some: it is listed as unknown, with the nearest name, and the
daemon logs those that are nearly one of its own. `GET /config/NAME` at the HTTP port of a broker that runs answers
what it uses.
"""

DAEMONS = (
    ("The broker", "`nsqd` and `nsqha broker`. Variables begin with `NSQD_`.", "NSQD_", Options, broker.GROUPS),
    (
        "The lookup daemon",
        "`nsqlookupd` and `nsqha lookupd`. Variables begin with `NSQLOOKUPD_`.",
        "NSQLOOKUPD_",
        LookupdOptions,
        lookupd.GROUPS,
    ),
)
OTHERS = "other settings"


def files() -> dict[str, str]:
    """The page, by its path in the repository."""
    parts = [HEAD]
    for title, text, prefix, options, groups in DAEMONS:
        parts.append(f"## {title}\n\n{text}\n")
        parts += _tables(flags_of(options), groups, prefix)
    return {"docs/configuration.md": "\n".join(parts)}


def _tables(flags: Iterable[Flag], groups: Mapping[str, Sequence[str]], prefix: str) -> Iterable[str]:
    rest = {flag.name: flag for flag in flags if flag.name != "version"}
    for title, names in groups.items():
        yield _table(title, [rest.pop(name) for name in names], prefix)
    yield _table(OTHERS, [flag for flag in rest.values() if not flag.inert], prefix)
    inert = ", ".join(f"`--{flag.name}`" for flag in rest.values() if flag.inert)
    yield f"Accepted, so that existing start scripts work, and without effect here: {inert}.\n"


def _table(title: str, flags: Iterable[Flag], prefix: str) -> str:
    rows = [f"| {' | '.join(_row(flag, prefix))} |" for flag in flags]
    head = ["| setting | flag | default | range | variable | meaning |", "|---|---|---|---|---|---|"]
    return "\n".join([f"### {title[0].upper()}{title[1:]}", "", *head, *rows, ""])


def _row(flag: Flag, prefix: str) -> tuple[str, ...]:
    default = flag.written(flag.default)
    variable = prefix + flag.name.upper().replace("-", "_")
    meaning = flag.usage.replace("|", "\\|").replace("<addr>:<port>", "`ADDR:PORT`")
    return (
        "command line only" if flag.name == "config" else f"`{flag.key}`",
        f"`--{flag.name}`",
        f"`{default}`" if default else "",
        flag.range(),
        f"`{variable}`",
        meaning,
    )
