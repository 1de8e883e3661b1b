"""Every event that is logged and every code that refuses something is explained, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from nsqha.cli.explain.explanations import GRPC_STATUSES, HTTP_CODES, LOG_EVENTS, V2_CODES, explain
from nsqha.nsqlog import LINES_LOST
from nsqha.server.authorization.guard import CODES

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {"debug", "info", "warning", "error", "fatal"}
EXPLAINED = {name for events in LOG_EVENTS.values() for name in events}


def modules(*folders: str) -> Iterator[ast.Module]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "/pb/" not in str(path) and path.name != "explanations.py":
                yield ast.parse(path.read_text())


def calls(*folders: str) -> Iterator[ast.Call]:
    for module in modules(*folders):
        yield from (node for node in ast.walk(module) if isinstance(node, ast.Call))


def form(node: ast.expr) -> str | None:
    """The text of a literal; what an f-string fills in is `{}`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]
    return None


def logged() -> set[str]:
    found = set()
    for call in calls("nsqha", "lookupd"):
        function, arguments = call.func, call.args
        if isinstance(function, ast.Attribute) and function.attr in LEVELS:
            if ast.unparse(function.value).rpartition(".")[2].strip("_").endswith("logger") and arguments:
                found.add(form(arguments[0]))
        elif isinstance(function, ast.Name) and function.id in ("RareWarnings", "RefusalLog"):
            found.add(form(arguments[1]))
    return {event for event in found if event is not None}


def literals(*folders: str) -> set[str]:
    found = set()
    for module in modules(*folders):
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
                found.add(node.value if isinstance(node.value, str) else node.value.decode("latin-1"))
            elif isinstance(node, ast.JoinedStr) and (text := form(node)):
                found.add(text)
    return found


def test_every_event_is_explained_and_no_other() -> None:
    events = logged()
    assert len(events) > 150  # the search finds them
    named = {"isr_{}", "transfer_given_up"}  # by `change`, in server.replica.leading.leadership
    named |= {LINES_LOST}  # said by the log itself
    assert sorted(events - EXPLAINED) == []
    assert sorted(EXPLAINED - events - named) == []


def test_every_code_of_http_is_explained_and_no_other() -> None:
    raised = {
        form(call.args[1])
        for call in calls("nsqha/server", "lookupd")
        if isinstance(call.func, ast.Name) and call.func.id == "ApiError" and len(call.args) > 1
    }
    found = {code for code in raised if code and code.isupper()}  # the others are sentences, as nsqd's debug pages have
    assert len(found) > 20
    assert sorted(code for code in found if explain(code) is None) == []
    assert {code for code in CODES if explain(code) is None} == set()
    said = "\n".join(literals("nsqha/server", "lookupd"))
    assert sorted(code for code in HTTP_CODES if code not in said) == []


def test_every_code_of_the_protocol_is_explained_and_no_other() -> None:
    texts = literals("nsqha/wire", "nsqha/server/clients")
    said = {found[0] for text in texts if (found := re.match(r"E_[A-Z_]*[A-Z](?=$| |%b)|E_\{\}_FAILED", text))}
    assert len(said) > 10
    assert sorted(code for code in said if explain(code) is None) == []
    assert sorted(set(V2_CODES) - said) == []


def test_every_status_of_grpc_is_explained() -> None:
    from nsqha.admin.answers import _STATUS

    assert {code.name for _, code in _STATUS} == set(GRPC_STATUSES)


def test_an_explanation_is_a_sentence() -> None:
    tables = [*LOG_EVENTS.values(), V2_CODES, HTTP_CODES, GRPC_STATUSES]
    for name, explanation in [item for table in tables for item in table.items()]:
        assert explanation.meaning[0].isupper() or explanation.meaning.startswith("etcd"), name
        assert explanation.meaning.endswith((".", "?", ")")), name


def test_a_name_that_varies_is_found_by_its_form() -> None:
    assert explain("MISSING_ARG_TOPIC") == HTTP_CODES["MISSING_ARG_{}"]
    assert explain("E_PUB_FAILED") == V2_CODES["E_{}_FAILED"]
    assert explain("isr_shrink") is not None
    assert explain("no_such_thing") is None
