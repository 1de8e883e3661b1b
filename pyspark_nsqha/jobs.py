"""Spark for our commands: a session whose workers run this interpreter, checked before a job starts.

    java, pyspark --> session --> one small job that asks each worker: pyarrow? this package? --> the command's job

Without these checks a worker without pyarrow would cause sixty lines of JVM trace. Without PYSPARK_PYTHON workers run
the `python3` of the PATH: it is set to this interpreter, unless it is already set.

What the JVM and local workers write to stderr goes into a file, which is removed on success and named in the error
otherwise: a command does not show the dozen lines of every start.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

JAVA_LEAST = 17
PYSPARK_LEAST = (4, 1)
PYARROW_LEAST = 18
LOOK_SECONDS = 0.5  # between two reports of progress

In = TypeVar("In")
Out = TypeVar("Out")


class CannotStart(Exception):
    """Spark cannot be started, or cannot run our tasks; the message says what is missing and where."""


def check_pyspark() -> None:
    """CannotStart if it is not installed, or too old."""
    try:
        import pyspark
    except ImportError:
        install = f"{sys.executable} -m pip install -e '.[spark]'"
        raise CannotStart(f"pyspark is not installed here: run in the clone of nsqha: {install}") from None
    version = tuple(int(number) for number in re.findall(r"\d+", pyspark.__version__)[:2])
    if version < PYSPARK_LEAST:
        raise CannotStart(f"pyspark {pyspark.__version__} is too old: pip install 'pyspark>=4.1'")


def check_java() -> None:
    """CannotStart if there is none, or it is too old."""
    home = os.environ.get("JAVA_HOME", "")
    java = shutil.which(os.path.join(home, "bin", "java") if home else "java")
    where = f"in JAVA_HOME ({home})" if home else "on the PATH"
    if java is None:
        raise CannotStart(f"there is no java {where}: install Java {JAVA_LEAST} or newer, and set JAVA_HOME to it")
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotStart(f"{java} cannot be run: {error}; set JAVA_HOME to Java {JAVA_LEAST} or newer") from None
    found = java_version(done.stderr + done.stdout)
    if found is None:
        said = " ".join((done.stderr + done.stdout).split())[:200]
        raise CannotStart(f"{java} does not say which version it is ({said}): set JAVA_HOME to Java {JAVA_LEAST}")
    if found < JAVA_LEAST:
        raise CannotStart(f"{java} is Java {found}: Spark needs {JAVA_LEAST} or newer; set JAVA_HOME to it")


def java_version(text: str) -> int | None:
    """The version that `java -version` printed, as 8, 17 or 21; None if it is not found there."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if found is None:
        return None
    major, minor = int(found[1]), int(found[2] or 0)
    return minor if major == 1 else major


@contextmanager
def session(name: str, *, master: str, conf: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A SparkSession; an active one is used, and not stopped. CannotStart."""
    check_pyspark()
    check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    if (before := SparkSession.getActiveSession()) is not None:
        yield before
        return
    builder: Any = SparkSession.builder.appName(name).master(master)
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    if master.startswith("local"):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    for key, value in (settings | dict(conf or {})).items():
        builder = builder.config(key, value)
    with _log() as path:
        try:
            with _stderr_to(path):
                found = builder.getOrCreate()
        except Exception as error:
            raise CannotStart(f"Spark does not start at --master {master}: {first_line(error)}; see {path}") from None
        try:
            check_workers(found)
            yield found
        except CannotStart as error:
            raise CannotStart(f"{error}; Spark's log is {path}") from None
        finally:
            _stop(found)


def _stop(session: Any) -> None:
    """Stop it; an error is ignored, as the JVM may have ended before, such as by the same Ctrl-C."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    try:
        session.stop()
    except Exception:
        pass


@contextmanager
def _log() -> Iterator[str]:
    """A file for Spark's output; it is removed unless something fails."""
    descriptor, path = tempfile.mkstemp(prefix="nsqha-spark-", suffix=".log")
    os.close(descriptor)
    try:
        yield path
    except (CannotStart, GeneratorExit):
        raise
    except BaseException:
        os.unlink(path)
        raise
    os.unlink(path)


@contextmanager
def _stderr_to(path: str) -> Iterator[None]:
    """Make the file the stderr of processes that are started meanwhile; this process gets its own back afterwards."""
    sys.stderr.flush()
    ours, log = os.dup(2), os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.dup2(log, 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        os.close(log)


def check_workers(session: Any) -> None:
    """CannotStart if a worker's Python lacks something. One small job, as many tasks as there are cores."""
    from pyspark_nsqha import __file__ as ours

    least = PYARROW_LEAST

    # A local function is pickled with its code, so it also reports what is missing where our package is not installed.
    def missing(_: Any) -> list[str]:
        import socket
        import sys

        why = []
        try:
            import pyarrow

            if int(pyarrow.__version__.split(".")[0]) < least:
                why.append(f"has pyarrow {pyarrow.__version__}, {least} or newer is needed")
        except ImportError:
            why.append("has no pyarrow")
        try:
            import numpy  # noqa: F401
        except ImportError:
            why.append("has no numpy")
        try:
            import pyspark_nsqha.lake.names  # noqa: F401
        except ImportError as error:
            why.append(f"cannot import pyspark_nsqha ({error})")
        return [f"{sys.executable} on {socket.gethostname()} {one}" for one in why]

    context = session.sparkContext
    count = max(context.defaultParallelism, 1)
    try:
        problems = context.parallelize(range(count), count).flatMap(missing).collect()
    except Exception as error:
        python = os.environ["PYSPARK_PYTHON"]
        raise CannotStart(
            f"workers cannot run {python}: {first_line(error)}; set PYSPARK_PYTHON to a Python that exists on every "
            "machine, with nsqha[spark] installed"
        ) from None
    if problems:
        raise CannotStart(
            f"{problems[0]}: install nsqha[spark] there, or set PYSPARK_PYTHON to a Python that has it (here: {ours})"
        )


def run_tasks(
    session: Any,
    function: Callable[[In], Out],
    items: Sequence[In],
    *,
    size: Callable[[In], int] = lambda item: 0,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Out]:
    """Run `function` on each item in a task of its own; results in the same order. `progress` gets the size done.

    CannotStart with one line if the job fails: `function` itself is expected to return its errors.
    """
    context = session.sparkContext
    done = context.accumulator(0)

    def work(pair: tuple[int, In]) -> Out:
        item_size, item = pair
        result = function(item)
        done.add(item_size)
        return result

    stop = threading.Event()

    def look() -> None:
        while not stop.wait(LOOK_SECONDS):
            progress(done.value)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        pairs = [(size(item), item) for item in items]
        found: list[Out] = context.parallelize(pairs, max(len(pairs), 1)).map(work).collect()
        return found
    except Exception as error:
        raise CannotStart(f"the Spark job failed: {first_line(error)}") from None
    finally:
        stop.set()
        looking.join()


def is_running(session: Any) -> bool:
    """Whether a job may still succeed; false if the JVM is gone."""
    try:
        return not session.sparkContext._jsc.sc().isStopped()
    except Exception:
        return False


def first_line(error: BaseException) -> str:
    """The cause in a JVM trace, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if missing := re.search(r"(?:ModuleNotFoundError|ImportError): [^)\n]+", str(error)):
        return missing[0][:300]
    for line in lines:
        if found := re.match(r"(?:Caused by: )?(?:[\w.$]+\.)?(\w*(?:Error|Exception)): (.+)", line):
            kind, text = found.groups()
            if kind not in ("SparkException", "Py4JJavaError"):
                return f"{kind}: {text}"[:300]
    return (lines[0] if lines else type(error).__name__)[:300]
