"""The record of a change that a command writes into the metadata itself, for the audit.

A daemon records what it is asked to change. `nsqha cluster` asks none of them: it writes into etcd. So it leaves a
record there, an intent of its own kind, which the controller takes into its audit and removes (`lookupd.recorded`):

    recorded/<16 hex>   {"who": "..", "from": "..", "method": "cluster move", "target": "..", "plan": false,
                         "outcome": "", "took": 0.0}

    put without an outcome  ->  the change  ->  put with the outcome

So no change is without a record, wherever the command dies. What it says of its caller is what the command knew: who
may write into etcd may write anything there, and etcd's own log has who that was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "recorded/"
WAITING_MAX = 1000  # records that no controller has taken yet; a command beyond that goes on without one, and says so
SECONDS_MAX = 1e6
CHARACTERS_MAX = 500  # of each text, when it is read: anything may be in the store


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """One change, asked for by a command."""

    who: str
    address: str  # of the host that the command ran on
    method: str
    target: str
    plan: bool = False
    outcome: str = ""  # empty: under way, or the command died
    took: float = 0.0

    def intent(self) -> dict[str, Any]:
        return {
            "who": self.who,
            "from": self.address,
            "method": self.method,
            "target": self.target,
            "plan": self.plan,
            "outcome": self.outcome,
            "took": self.took,
        }


def recorded_name(number: int) -> str:
    return f"{PREFIX}{number:016x}"


def read_recorded(intent: Mapping[str, Any]) -> RecordedChange:
    """What an intent says; what is missing, or is of another kind, is empty."""
    who, address, method, target, outcome = (
        _text(intent.get(name)) for name in ("who", "from", "method", "target", "outcome")
    )
    took = intent.get("took")
    seconds = took if isinstance(took, float) and 0 <= took < SECONDS_MAX else 0.0
    return RecordedChange(who, address, method, target, bool(intent.get("plan")), outcome, seconds)


def waiting(intents: Iterable[str]) -> int:
    """How many records are among these names."""
    return sum(name.startswith(PREFIX) for name in intents)


def _text(value: object) -> str:
    return value[:CHARACTERS_MAX] if isinstance(value, str) else ""
