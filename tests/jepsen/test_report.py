"""A report says what the history has, to people and to programs, and needs nothing but itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.jepsen import history
from tests.jepsen.history import ChannelMade, Place
from tests.jepsen.report.__main__ import main
from tests.jepsen.report.drawing import BUCKETS, Drawing, buckets, thinned
from tests.jepsen.report.page import RunReport
from tests.jepsen.report.total import Total
from tests.jepsen.story import Story, again

ODD = '<b>"n1" & n2</b>'


def busy(*, lose: bool = False) -> Story:
    """A bit of everything."""
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok"))
    story.sub(1)
    for second in range(6):
        story.sample(rss=(50 + second) << 20, fds=40)
        story.take(1, *story.pub(5, partition=0))
        story.pass_time(1)
    story.fault("N1", 2.0)
    story.sample(node="n2", epoch=2, isr=2)
    story.take(1, *story.pub(3, partition=0))
    story.fault(ODD, 0.0, bit=True)
    messages = story.pub(2, partition=0)
    story.take(1, *messages[: 1 if lose else 2])
    story.seek("start", Place(0, 35, 33))
    story.take(1, *map(again, messages[: 1 if lose else 2]))
    story.heal()
    story.sample(node="n2", epoch=2)
    return story


def report_of(story: Story) -> RunReport:
    story.judged()
    return RunReport(story.events)


def test_figures_are_those_of_the_history() -> None:
    found = report_of(busy()).figures()
    assert found["ok"]
    assert found["messages"]["ok"] == 35
    assert sum(number for _, number in found["series"]["published"]) == 35
    assert sum(number for _, number in found["series"]["again"]) == 2
    assert found["faults"][0]["proof"] == "413 packets dropped"
    assert found["kinds"]["N1"]["gap worst"] == pytest.approx(2.0, abs=1.1)
    assert [(state["leader"], state["epoch"], state["isr"]) for state in found["partitions"]["t/0"]] == [
        ("n1", 1, 3),
        ("n2", 2, 2),
        ("n2", 2, 3),
    ]
    json.dumps(found)


def test_the_page_says_first_whether_all_is_well() -> None:
    good, bad = report_of(busy()).html(), report_of(busy(lose=True)).html()
    assert "Nothing is wrong" in good
    assert "<h2>Problems</h2>" not in good
    assert "Wrong: lost 1" in bad.replace("torn 1, ", "").replace(", torn 1", "")
    assert "never delivered" in bad or "(7, 34) on t/ch" in bad


def test_the_page_needs_nothing_else_and_quotes_what_it_shows() -> None:
    page = report_of(busy()).html()
    assert not re.search(r"(src|href)=|@import|url\(|<script", page)
    assert ODD not in page
    assert "&lt;b&gt;" in page


def test_the_picture_is_well_formed_and_has_every_lane() -> None:
    page = report_of(busy()).html()
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    texts = "\n".join(ElementTree.fromstring(svg).itertext())
    for expected in ("N1", "operators", "n1 e1", "n2 e2", "2 of 3", "t/ch", "MiB", "413 packets dropped", "3.0 s"):
        assert expected in texts, expected


def test_a_history_without_anything_is_drawn_as_well() -> None:
    assert "<svg" in RunReport([]).html()


def test_rates_are_per_second_and_long_runs_have_few_steps() -> None:
    assert buckets(2.5, {0: 10, 2: 4}) == [(0.0, 10.0), (1.0, 0.0), (2.0, 4.0)]
    steps = buckets(8 * 3600, dict.fromkeys(range(8 * 3600), 7))
    assert len(steps) <= BUCKETS + 1
    assert {round(value) for _, value in steps[:-1]} == {7}
    points = [(float(n), 99.0 if n == 4321 else 1.0) for n in range(10_000)]
    assert len(thinned(points)) <= BUCKETS
    assert (4321.0, 99.0) in thinned(points), "a peak has to be seen"


def test_time_is_drawn_within_the_frame() -> None:
    drawing = Drawing(10.0)
    assert drawing.x(-1) == drawing.x(0) < drawing.x(5) < drawing.x(10) == drawing.x(11)


def test_a_kept_history_is_judged_again_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lose, status in ((False, 0), (True, 1)):
        story = busy(lose=lose)
        story.judged()
        history.write(story.events, tmp_path / "history.jsonl")
        monkeypatch.setattr("sys.argv", ["report", str(tmp_path / "history.jsonl")])
        assert main() == status
        assert json.loads((tmp_path / "report.json").read_text())["ok"] is not lose


def test_many_runs_are_told_as_one(tmp_path: Path) -> None:
    for number, lose in enumerate((False, False, True)):
        report_of(busy(lose=lose)).write(tmp_path, f"report-{number}")
    total = Total(sorted(tmp_path.glob("*.json")))
    (sync,) = total.loads
    assert (total.loads[sync], total.ok[sync]) == (3, 3 * 35)
    assert total.kinds["N1"][sync] == 3
    assert total.problems["lost"] == 1
    assert len(total.times["N1 gap"]) == 3
    assert "| N1 | 3 | " in str(total)
