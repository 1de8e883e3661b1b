"""How bugs are planted: a mutant is a function that changes the product in this process until it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Mutant = Callable[[], Any]  # a context manager
MUTANTS: dict[str, Mutant] = {}


def mutant(make: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    """Count it among those that have to be noticed."""
    MUTANTS[make.__name__] = contextmanager(make)
    return make
