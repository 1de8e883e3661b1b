"""A Spark of one master and two workers on loopback, from the files of the installed PySpark, and jobs for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.devnode import die_with_parent
from tests.integration.servers import free_port, wait_until
from tests.integration.spark_session import ROOT

JOB_SECONDS = 150
JOB = Path(__file__).with_name("job.py")
START_SECONDS = 120.0  # of a JVM on a machine that does other things
STOP_SECONDS = 20.0


def spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def archive(path: Path) -> Path:
    """What `--py-files` takes: both packages whole. Tasks need two modules of the broker's; but the archive comes first
    on the driver's path, too, where a part of that package would hide the rest of it."""
    with zipfile.ZipFile(path, "w") as out:
        for file in sorted(file for package in ("pyspark_nsqha", "nsqha") for file in (ROOT / package).rglob("*.py")):
            out.write(file, file.relative_to(ROOT))
    return path


def bare_python(folder: Path, *packages: str) -> Path:
    """A Python that has these packages, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    ours, theirs = (prefix / "lib" / version / "site-packages" for prefix in (Path(sys.prefix), folder))
    for package in packages:
        for there in (package, f"{package}.libs"):
            if (ours / there).exists():
                (theirs / there).symlink_to(ours / there)
    return folder / "bin" / "python"


def whole_python(folder: Path) -> Path:
    """A Python in which everything of ours is installed, as from a wheel. An editable installation is no package on the
    path, and Spark looks for data sources nowhere else."""
    python = bare_python(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path("lib") / version / "site-packages"
    (folder / packages / "ours.pth").write_text(f"{ROOT}\n{Path(sys.prefix) / packages}\n")
    return python


def named_python(folder: Path, name: str, python: Path | str) -> Path:
    """A folder for PATH, in which `name` is this Python."""
    folder.mkdir()
    script = folder / name
    script.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    script.chmod(0o755)
    return folder


def environment(**more: str) -> dict[str, str]:
    """Of a machine on which nobody has set anything for Spark or for Python."""
    ours = ("PYSPARK_", "SPARK_", "PYTHONPATH")
    return {key: value for key, value in os.environ.items() if not key.startswith(ours)} | more


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line of a job's stdout; it must have succeeded."""
    said = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if re.search("Error|Exception|exit", line)]
    assert done.returncode == 0, "\n".join(said[:30]) or done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@dataclass
class Standalone:
    """Use `running`."""

    folder: Path
    master: str
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @classmethod
    @contextmanager
    def running(cls, folder: Path, path: Path) -> Iterator[Standalone]:
        """Both workers are registered; `path` is in front of their PATH. Nothing is left when the block ends."""
        port = free_port()
        found = cls(folder, f"spark://127.0.0.1:{port}")
        try:
            found._start("master", path, "master.Master", "--port", str(port))
            elected = "I have been elected leader"
            wait_until(lambda: elected in found._said("master"), "the master serves", START_SECONDS)
            for name in ("worker1", "worker2"):
                work = ["--cores", "1", "--memory", "1g", "--work-dir", str(folder / name), found.master]
                found._start(name, path, "worker.Worker", *work)
            came = "Registering worker"
            wait_until(lambda: found._said("master").count(came) == 2, "two workers are there", START_SECONDS)
            yield found
        except BaseException:
            for log in sorted(folder.glob("*.log")):
                print(f"---- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
            raise
        finally:
            found._stop()

    def _start(self, name: str, path: Path, what: str, *arguments: str) -> None:
        env = environment(
            PATH=f"{path}{os.pathsep}{os.environ['PATH']}",
            SPARK_LOCAL_IP="127.0.0.1",
            SPARK_DAEMON_MEMORY="256m",
            SPARK_HOME=str(spark_home()),
            SPARK_LOCAL_DIRS=str(self.folder),
        )
        command = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{what}"]
        here = ["--host", "127.0.0.1", "--webui-port", str(free_port())]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.daemons.append(
                subprocess.Popen(
                    [*command, *here, *arguments],
                    env=env,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=die_with_parent,
                )
            )

    def _said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        wait_until(lambda: not self.left(), "executors end with their workers", STOP_SECONDS)

    def left(self) -> list[int]:
        """Executors that still run."""
        return [pid for pid, command in commands() if self.master in command or str(self.folder) in command]

    def submit(
        self, python: Path | str, what: str, given: dict[str, Any], *options: str, path: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A job by spark-submit; `python` is everybody's, and each machine's PATH may mean another one by it.

        Not the workers' alone: what Spark finds by itself it runs with PYSPARK_DRIVER_PYTHON, in tasks as well."""
        front = "" if path is None else f"{path}{os.pathsep}"
        env = environment(
            PATH=front + os.environ["PATH"],
            SPARK_LOCAL_IP="127.0.0.1",
            PYSPARK_PYTHON=str(python),
            PYSPARK_DRIVER_PYTHON=str(python),
        )
        settings = {
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
            "spark.log.level": "ERROR",
        }
        confs = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
        command = [str(spark_home() / "bin" / "spark-submit"), "--master", self.master, *confs, *options, str(JOB)]
        return run([*command, what, json.dumps(given)], env, self.folder)


def run(command: Sequence[str], env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A driver in a session of its own, so that nothing of it is left when its time is over."""
    driver = subprocess.Popen(
        command,
        env=env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + JOB_SECONDS
    try:
        out, err = driver.communicate(timeout=JOB_SECONDS)
    except BaseException:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate()
        raise
    assert time.monotonic() < until
    return subprocess.CompletedProcess(command, driver.returncode, out, err)


def commands() -> Iterator[tuple[int, str]]:
    """Processes and their command lines."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
