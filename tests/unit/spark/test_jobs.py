"""What is checked before a job starts: one line that says what is missing, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspark_nsqha import jobs
from pyspark_nsqha.jobs import CannotStart, check_java, first_line, java_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('openjdk version "11.0.2" 2019-01-15\nOpenJDK Runtime', 11),
        ("command not found", None),
    ],
)
def test_the_version_of_java_is_read(text: str, version: int | None) -> None:
    assert java_version(text) == version


def java(folder: Path, says: str) -> None:
    program = folder / "bin/java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)


def test_java_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java(tmp_path, 'java version "1.8.0_392"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(CannotStart, match=rf"^{tmp_path}/bin/java is Java 8: Spark needs 17 or newer; set JAVA_HOME"):
        check_java()


def test_java_that_is_new_enough_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java(tmp_path, 'openjdk version "21.0.1" 2023-10-17')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    check_java()


def test_no_java_is_said_with_the_place_that_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(CannotStart, match=rf"no java in JAVA_HOME \({tmp_path}\): install Java 17"):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotStart, match="no java on the PATH: install Java 17"):
        check_java()


class Workers:
    """A session whose workers answer, or not."""

    defaultParallelism = 2

    def __init__(self, answers: list[str] | Exception) -> None:
        self.sparkContext = self
        self.answers = answers

    def parallelize(self, items: object, count: int) -> Workers:
        return self

    def flatMap(self, function: object) -> Workers:
        return self

    def collect(self) -> list[str]:
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


def test_workers_that_lack_something_are_named() -> None:
    jobs.check_workers(Workers([]))
    with pytest.raises(CannotStart, match=r"^/x/python on far has no pyarrow: install nsqha\[spark\] there"):
        jobs.check_workers(Workers(["/x/python on far has no pyarrow", "/x/python on far has no numpy"]))


TRACE = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times
\tat java.base/java.lang.Thread.run(Thread.java:840)
Caused by: java.io.IOException: Cannot run program "python9": error=2, No such file or directory
\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)
"""


def test_a_trace_is_one_line_that_says_what_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_line(Exception(TRACE)).startswith('IOException: Cannot run program "python9"')
    assert first_line(Exception("")) == "Exception"
    worker = "Error from python worker:\n  python3: Error while finding module specification for 'pyspark.daemon' "
    missing = f"{TRACE}{worker}(ModuleNotFoundError: No module named 'pyspark')\nPYTHONPATH was: x"
    assert first_line(Exception(missing)) == "ModuleNotFoundError: No module named 'pyspark'"
    monkeypatch.setenv("PYSPARK_PYTHON", "python9")
    with pytest.raises(CannotStart, match=r"^workers cannot run python9: IOException: .*; set PYSPARK_PYTHON to a"):
        jobs.check_workers(Workers(Exception(TRACE)))
