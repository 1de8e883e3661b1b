"""A real Prometheus beside real daemons, with the files of deploy/: its scrape jobs and its rules.

What these files say stays, but where the daemons are, how often they are scraped (`STEP`), and how long a rule must
hold before it fires: `SHORTER` times less, and at least `LASTS_MIN`, which no change of leaders takes.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.integration.devnode import die_with_parent
from tests.integration.servers import free_port, wait_until
from tests.monitoring.promtool import ROOT, program, promtool

DEPLOY = ROOT / "deploy"
STEP = 0.5
SHORTER = 120
LASTS_MIN = 3.0
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def shortened(rules: str) -> str:
    """The rules, each `for:` of them made shorter, and nothing else."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * _UNITS[found[3]]
        return f"{found[1]}{max(seconds / SHORTER, LASTS_MIN) * 1000:.0f}ms" if seconds else found[0]

    return re.sub(r"^( +for: )(\d+)([smhd])$", shorter, rules, flags=re.MULTILINE)


class Prometheus:
    """One that runs. Use `running`."""

    def __init__(self, address: str) -> None:
        self._address = address

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
        """`targets`: addresses by the name of their job in deploy/; each job must be given."""
        binary = program("prometheus")
        config = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
        step = f"{STEP * 1000:.0f}ms"
        config["global"] |= {"scrape_interval": step, "scrape_timeout": step, "evaluation_interval": step}
        folder.mkdir(parents=True)
        rules = folder / "nsqha.rules.yml"
        rules.write_text(shortened((DEPLOY / "prometheus" / "nsqha.rules.yml").read_text()))
        promtool("check", "rules", str(rules))
        config["rule_files"] = [str(rules)]
        assert {job["job_name"] for job in config["scrape_configs"]} == set(targets)
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        words += [f"--web.listen-address={address}", "--log.level=warn"]
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [binary, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=die_with_parent
            )
        found = cls(address)
        try:
            wait_until(found.scrapes_all, "Prometheus has scraped every daemon", 60)
            yield found
        except BaseException:
            print(f"---- Prometheus\n{log.read_text(errors='replace')[-3000:]}")
            raise
        finally:
            process.kill()
            process.wait()

    def _get(self, path: str, **query: object) -> Any:
        url = f"http://{self._address}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as said:
            answer = json.load(said)
        assert answer["status"] == "success", answer
        return answer["data"]

    def scrapes_all(self) -> bool:
        try:
            active = self._get("/api/v1/targets")["activeTargets"]
        except OSError:
            return False
        return bool(active) and all(target["health"] == "up" for target in active)

    def now(self) -> float:
        """By its own clock, which is what series have."""
        return float(self._get("/api/v1/query", query="time()")["result"][0])

    def value(self, expression: str) -> float | None:
        """Of an expression with one series now; None: it has none."""
        result = self._get("/api/v1/query", query=expression)["result"]
        return float(result[0]["value"][1]) if result else None

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """Alerts that fire now, and the labels of each."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in self._get("/api/v1/alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found

    def fired(self, since: float) -> set[str]:
        """All alerts that fired at any moment since then."""
        asked = {"query": 'ALERTS{alertstate="firing"}', "start": since, "end": self.now(), "step": STEP / 2}
        return {series["metric"]["alertname"] for series in self._get("/api/v1/query_range", **asked)["result"]}
