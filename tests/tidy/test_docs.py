"""What the pages name is there: files, modules and classes, flags."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from nsqha.options import LookupdOptions, Options, flags_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "deploy").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PACKAGES = ("wire", "commitlog", "cursor", "replication", "election", "server", "admin", "hot", "lookupd")
FOREIGN = {"--" + name for name in ("auto-compaction-retention", "home-dir", "now", "py-files", "system")}
"""Flags of etcd, systemd and Spark."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def definitions(path: Path) -> set[str]:
    """Classes and functions of a module, and `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def exists(name: str) -> bool:
    """Whether `package.module`, `package.Class` or `package.module.Class`, perhaps with a method, is there."""
    package, *rest = name.split(".")
    folder = ROOT / package if package == "lookupd" else ROOT / "nsqha" / package
    while rest and (folder / rest[0]).is_dir():  # a room of the package
        folder, rest = folder / rest[0], rest[1:]
    modules = list(folder.rglob("*.py"))
    if rest and (module := folder / f"{rest[0]}.py").exists():
        modules, rest = [module], rest[1:]
    return not rest or any(".".join(rest) in definitions(path) for path in modules)


def test_the_architecture_names_what_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    names = set(re.findall(rf"`((?:{'|'.join(PACKAGES)})\.[\w.]+)`", text))
    assert len(names) > 60
    assert not sorted(name for name in names if not exists(name))


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)", page.read_text())
    paths = re.findall(r"`((?:nsqha|lookupd|tests|docs|benchmarks|proto)/[\w/.]+)`", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
    assert not [path for path in paths if not (ROOT / path).exists()]


def anchor(heading: str) -> str:
    """What a link to this heading has behind its #: letters, digits, _ and -, in lower case."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#{1,6} +(.+)$", text, flags=re.MULTILINE)}


def test_anchors_are_made_as_where_the_pages_are_shown() -> None:
    assert anchor("The bound of a broker's series") == "the-bound-of-a-brokers-series"
    assert anchor("A [link](x.md), and `code_1`") == "a-link-and-code_1"


@every_page
def test_every_link_into_a_page_leads_to_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text())
    targets = [(page.parent / path if path else page, part) for path, part in links]
    assert not [
        (target.name, part) for target, part in targets if target.suffix == ".md" and part not in anchors(target)
    ]


@cache
def flags() -> set[str]:
    """Everything that any of our programs takes, the tests' own tools included."""
    known = {"--" + flag.name for options in (Options, LookupdOptions) for flag in flags_of(options)}
    folders = ("nsqha", "lookupd", "benchmarks", "tests/jepsen", "tests/sim", "tests/spec")
    for path in [ROOT / "Makefile", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]:
        known |= set(re.findall(r"--[a-z][\w-]+", path.read_text()))
    return known


@every_page
def test_every_flag_is_one(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w(?![\w-])", page.read_text()))
    assert not sorted(named - flags() - FOREIGN)


def test_every_extra_that_is_named_is_one() -> None:
    """Of `nsqha[extra]` and `pip install -e '.[extra,other]'`, in pages and in what commands say."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path for folder in ("nsqha", "lookupd", "pyspark_nsqha") for path in (ROOT / folder).rglob("*.py")]
    named = {
        (path.name, extra)
        for path in [ROOT / "Makefile", *PAGES, *sources]
        for some in re.findall(r"(?:nsqha|'\.)\[([a-z][a-z,-]*)\]", path.read_text())
        for extra in some.split(",")
    }
    assert {extra for _, extra in named} == set(extras), sorted(named)
