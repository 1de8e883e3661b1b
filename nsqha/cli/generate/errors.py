"""docs/errors.md, made from `nsqha.cli.explain.explanations`: every code of an answer and every event of a log."""

from __future__ import annotations

from collections.abc import Mapping

from nsqha.cli.explain.explanations import GRPC_STATUSES, HTTP_CODES, LOG_EVENTS, V2_CODES, Explanation

HEAD = """\
# Errors and events

What every code of an answer and every event of a log means, and what to do. This page is made by `nsqha generate
errors`; do
not edit it. In a terminal:

```sh
nsqha explain disk_low E_PUB_FAILED
```

Names are stable: machines read them, never the wording. With `--log-format=json` each line has its name as `event`.
`{}` stands
for a part that varies.

## Answers over TCP

All of them close the connection, except FIN, REQ and TOUCH.
"""
PARTS = (
    ("", V2_CODES),
    ("## Answers over HTTP\n\n`message` of the body.\n", HTTP_CODES),
    ("## Answers over gRPC\n", GRPC_STATUSES),
)


def files() -> dict[str, str]:
    """The page, by its path in the repository."""
    lines = [HEAD]
    for head, table in PARTS:
        lines += [head, _table(table)] if head else [_table(table)]
    lines.append("## Events of the logs\n")
    for title, events in LOG_EVENTS.items():
        lines += [f"### {title}\n", _table(events)]
    return {"docs/errors.md": "\n".join(lines)}


def _table(explanations: Mapping[str, Explanation]) -> str:
    rows = [f"| `{name}` | {meaning} | {remedy} |" for name, (meaning, remedy) in sorted(explanations.items())]
    return "\n".join(["| name | meaning | what to do |", "|---|---|---|", *rows, ""])
