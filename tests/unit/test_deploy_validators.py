"""What is in deploy/ is valid, as the tools of others see it; and these tools refuse what is spoilt."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nsqha.cli.generate.topology import (
    BROKER_PORTS,
    LOOKUPD_PORTS,
    RECOVERY_BYTES,
    RECOVERY_BYTES_PER_SECOND,
    UID,
    stop_seconds,
)
from nsqha.options import LookupdOptions, Options, flags_of, load_nsqd, load_nsqlookupd

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
DOCKERFILE = DEPLOY / "Dockerfile"
COMPOSE = sorted((DEPLOY / "compose").glob("*.yaml"))
MANIFESTS = sorted(path for path in (DEPLOY / "k8s").glob("*.yaml") if path.name != "kustomization.yaml")
YAML_RULES = "{extends: default, rules: {line-length: disable, document-start: disable, truthy: {check-keys: false}}}"


def accepts(tool: str, *words: str | Path) -> tuple[bool, str]:
    if not (BIN / tool).exists():
        pytest.skip(f"{tool} is not installed: group `deploy` of pyproject.toml")
    done = subprocess.run([str(BIN / tool), *map(str, words)], capture_output=True, text=True, timeout=60)
    return done.returncode == 0, done.stdout + done.stderr


def hadolint(*paths: Path) -> tuple[bool, str]:
    return accepts("hadolint", *paths)


def compose_schema(*paths: Path) -> tuple[bool, str]:
    return accepts("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *paths)


def kubernetes_schema(*paths: Path) -> tuple[bool, str]:
    return accepts("kubernetes-validate", "--strict", *paths)


def yaml_rules(*paths: Path) -> tuple[bool, str]:
    return accepts("yamllint", "--strict", "-d", YAML_RULES, *paths)


Validator = Callable[..., tuple[bool, str]]


@pytest.mark.parametrize(
    ("validator", "paths"),
    [
        (hadolint, [DOCKERFILE]),
        (compose_schema, COMPOSE),
        (kubernetes_schema, MANIFESTS),
        (yaml_rules, sorted(DEPLOY.rglob("*.y*ml"))),
    ],
    ids=["hadolint", "compose", "kubernetes", "yamllint"],
)
def test_what_is_committed_is_valid(validator: Validator, paths: list[Path]) -> None:
    assert paths
    valid, said = validator(*paths)
    assert valid, said


@pytest.mark.parametrize(
    ("validator", "path", "sound", "spoilt"),
    [
        (hadolint, DOCKERFILE, "python:3.13-bookworm", "python:latest"),
        (hadolint, DOCKERFILE, 'CMD ["nsqd"', 'CMD nsqd ["'),
        (compose_schema, COMPOSE[0], "depends_on", "depend_on"),
        (compose_schema, COMPOSE[0], "read_only: true", "read_only: [1]"),
        (kubernetes_schema, DEPLOY / "k8s/broker.yaml", "podManagementPolicy", "podManagmentPolicy"),
        (kubernetes_schema, DEPLOY / "k8s/network.yaml", "podSelector", "podsSelector"),
        (kubernetes_schema, DEPLOY / "k8s/services.yaml", "port: 4150", 'port: "4150"'),
        (yaml_rules, DEPLOY / "k8s/broker.yaml", "  replicas: 3", "  replicas: 3\n  replicas: 4"),
    ],
)  # fmt: skip
def test_what_is_spoilt_is_refused(validator: Validator, path: Path, sound: str, spoilt: str, tmp_path: Path) -> None:
    text = path.read_text()
    assert sound in text
    (tmp_path / path.name).write_text(text.replace(sound, spoilt))
    valid, said = validator(tmp_path / path.name)
    assert not valid, said


# ---- what the files say, against the code


def documents() -> list[Any]:
    return [text for path in MANIFESTS for text in yaml.safe_load_all(path.read_text())]


def containers() -> list[tuple[str, dict[str, str]]]:
    """(role, variables) of every daemon of ours in all files."""
    found = []
    for path in COMPOSE:
        for service in yaml.safe_load(path.read_text())["services"].values():
            if "build" in service:
                found.append((service["command"][-1], service["environment"]))
    for text in documents():
        if text["kind"] == "StatefulSet" and text["metadata"]["name"] != "nsqha-etcd":
            (container,) = text["spec"]["template"]["spec"]["containers"]
            found.append((container["command"][-1], {e["name"]: e.get("value", "x") for e in container["env"]}))
    return found


def test_every_variable_is_one_that_the_daemon_reads() -> None:
    others = {"NSQHA_ADDRESS", "POD_NAME", "POD_NAMESPACE", "HOST_NAME"}
    assert len(containers()) == 2 + 5 + 2
    for role, given in containers():
        lookupd = "lookupd" in role
        prefix = "NSQLOOKUPD_" if lookupd else "NSQD_"
        table = LookupdOptions if lookupd else Options
        known = {prefix + flag.name.upper().replace("-", "_") for flag in flags_of(table)}
        assert set(given) <= known | others
        loaded = load_nsqlookupd([], given) if lookupd else load_nsqd([], given)
        assert not loaded.notices and loaded.options.broadcast_address


def test_the_image_exposes_every_port_and_writes_to_one_folder() -> None:
    text = DOCKERFILE.read_text()
    (exposed,) = re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE)
    assert set(map(int, exposed.split())) == {p.number for p in (*BROKER_PORTS, *LOOKUPD_PORTS)}
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == [f"{UID}:{UID}"]
    assert len(re.findall(r"^VOLUME ", text, re.MULTILINE)) == 1 and len(re.findall(r"^FROM ", text, re.MULTILINE)) == 2


def test_the_kustomization_has_every_manifest() -> None:
    listed = yaml.safe_load((DEPLOY / "k8s" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [path.name for path in MANIFESTS]


@pytest.mark.parametrize("name", ["nsqha-broker", "nsqha-lookupd"])
def test_a_pod_has_time_and_few_rights(name: str) -> None:
    (text,) = [text for text in documents() if (text["kind"], text["metadata"]["name"]) == ("StatefulSet", name)]
    spec = text["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert text["spec"]["podManagementPolicy"] == "Parallel"
    assert spec["terminationGracePeriodSeconds"] >= stop_seconds() > 40
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= RECOVERY_BYTES / RECOVERY_BYTES_PER_SECOND
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz", "never etcd, replicas or lag"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz", "in sync, before the next one is rolled"
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == UID
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and rights["capabilities"] == {"drop": ["ALL"]}
    assert not rights["allowPrivilegeEscalation"] and not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"], "a service nsqd would become NSQD_PORT"


def test_selectors_find_the_pods_they_are_for() -> None:
    pods = [t["spec"]["template"]["metadata"]["labels"] for t in documents() if t["kind"] == "StatefulSet"]
    for text in documents():
        selector = text["spec"].get("selector", text["spec"].get("podSelector"))
        wanted = selector.get("matchLabels", selector)
        assert sum(wanted.items() <= labels.items() for labels in pods) == 1, text["metadata"]["name"]
