"""A severity with its reasons, and the formats it is shown in. The numbers are exit statuses as monitoring has them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Severity(enum.IntEnum):
    """The exit status of the check."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


MEANING = {
    Severity.WARNING: "warning: it serves, and somebody should look",
    Severity.CRITICAL: "critical",
    Severity.UNKNOWN: "unknown: it could not be checked",
}
_RANK = (Severity.OK, Severity.WARNING, Severity.UNKNOWN, Severity.CRITICAL)
"""Whatever could not be checked hides nothing that is critical."""


@dataclass(frozen=True)
class Observation:
    """One thing that was looked at."""

    severity: Severity
    text: str


@dataclass(frozen=True)
class CheckResult:
    """What was found."""

    what: str
    """`NODE`, `CLUSTER`, `CHANNEL`."""
    reasons: Sequence[Observation]
    figures: Mapping[str, float] = field(default_factory=dict)
    """Name -> value; seconds end in `_seconds`."""

    @property
    def severity(self) -> Severity:
        return max((reason.severity for reason in self.reasons), key=_RANK.index, default=Severity.OK)

    def text(self) -> str:
        """The worst first, a line each."""
        lines = [f"{self.what} {self.severity.name}"]
        for reason in self._worst_first():
            lines.append(f"  {reason.severity.name.lower():9}{reason.text}")
        return "\n".join(lines)

    def nagios(self) -> str:
        """One line, with figures as plugins write them; `|` would begin these."""
        shown = [reason for reason in self._worst_first() if reason.severity] or self._worst_first()
        line = f"NSQHA {self.what} {self.severity.name} - {'; '.join(reason.text for reason in shown)}"
        figures = " ".join(f"{name}={value:g}{'s' * name.endswith('_seconds')}" for name, value in self.figures.items())
        return " ".join(line.replace("|", "/").split()) + (f" | {figures}" if figures else "")

    def json(self) -> dict[str, Any]:
        return {
            "what": self.what.lower(),
            "status": self.severity.name.lower(),
            "reasons": [{"status": r.severity.name.lower(), "text": r.text} for r in self._worst_first()],
            "figures": dict(self.figures),
        }

    def _worst_first(self) -> list[Observation]:
        return sorted(self.reasons, key=lambda reason: -_RANK.index(reason.severity))
