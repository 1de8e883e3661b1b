"""What a mutant is: one rule of the channel core that is broken for the time of a run (`mutants`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

Patch = Any


@dataclass(frozen=True)
class Mutant:
    """`rule` is what is broken; `patches` break it."""

    name: str
    rule: str
    patches: Callable[[], list[Patch]]
    ordered: bool = False


MUTANTS: list[Mutant] = []


def mutant(rule: str, *, ordered: bool = False) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    def add(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        MUTANTS.append(Mutant(patches.__name__, rule, patches, ordered))
        return patches

    return add


def instead(owner: object, name: str, function: object) -> Patch:
    return patch.object(owner, name, function)
