"""Bugs planted on purpose: each breaks one rule of the product and has to be noticed within 500 lives.

    python -m tests.sim.mutants [NAME ...]      see tests/mutation.py

The seeds are those of `make sim`; where drawn lives do not come to what a rule is for, a scene does.
"""

from __future__ import annotations

from tests.mutation import run
from tests.sim import planted_damage, planted_operations, planted_policies, planted_replication
from tests.sim.planting import SUITE

__all__ = ["SUITE", "planted_damage", "planted_operations", "planted_policies", "planted_replication"]


if __name__ == "__main__":
    run(SUITE)
