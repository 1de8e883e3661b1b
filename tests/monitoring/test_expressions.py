"""Every expression of rules and dashboards parses, and asks only for series and labels that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nsqha.cli.generate import alerts, dashboards
from tests.monitoring.exposed import series
from tests.monitoring.promtool import promtool

SERIES = series()
NAME = re.compile(r"\b(up|nsqha_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def of_dashboards() -> list[str]:
    found = []
    for text in dashboards.files().values():
        for panel in json.loads(text)["panels"]:
            found += [target["expr"] for target in panel["targets"]]
    return found


EXPRESSIONS = [alert.expr for alert in alerts.ALERTS] + of_dashboards()


def plain(expression: str) -> str:
    """Without Grafana's variables."""
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", "5m"))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_an_expression_asks_for_is_exposed(expression: str) -> None:
    named = NAME.findall(expression)
    assert named, "no series"
    labels: set[str] = set()
    for name, matchers in named:
        assert name in SERIES, f"{name} is not exposed"
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert asked <= SERIES[name], f"{name} has no label {asked - SERIES[name]}"
        labels |= SERIES[name]
    for group in GROUPED.findall(expression):
        asked = {label.strip() for label in group.split(",") if label.strip()}
        assert asked <= labels, f"no series of it has {asked - labels}"


def test_every_expression_parses(tmp_path: Path) -> None:
    rules = [{"record": f"e:{n}", "expr": plain(expression)} for n, expression in enumerate(EXPRESSIONS)]
    (tmp_path / "all.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "all.yml"))


def test_a_spoilt_expression_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yml").write_text('{"groups": [{"name": "a", "rules": [{"record": "e:0", "expr": "sum by ("}]}]}')
    with pytest.raises(AssertionError, match="parse error"):
        promtool("check", "rules", str(tmp_path / "bad.yml"))


def test_the_variables_of_dashboards_are_labels_that_there_are() -> None:
    for text in dashboards.files().values():
        for variable in json.loads(text)["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["query"])
                assert found and found[2] in SERIES[found[1]], variable


def test_each_panel_has_its_place() -> None:
    for text in dashboards.files().values():
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in json.loads(text)["panels"]]
        assert len(set(places)) == len(places)
