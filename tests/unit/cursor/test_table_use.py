"""Who reads the tables, and when their map may grow."""

from __future__ import annotations

import gc

import pytest

from nsqha.cursor.cache.lmdb_tables import ReadPin, TablesError, TableUse


class FakeTables:
    """Tables that only count."""

    def __init__(self) -> None:
        self.grown = 0
        self.full = False

    def pin(self) -> ReadPin:
        return ReadPin(None)

    def grow(self) -> None:
        if self.full:
            raise TablesError("no address space")
        self.grown += 1


def use_of(tables: FakeTables) -> TableUse:
    return TableUse(tables)  # type: ignore[arg-type]


def test_a_pin_is_shared_until_the_tables_change():
    use = use_of(FakeTables())
    pin = use.pin()
    assert use.pin() is pin
    use.forget_pin()
    assert use.pin() is not pin


def test_the_map_grows_when_no_load_and_no_pin_reads():
    tables = FakeTables()
    use = use_of(tables)
    with use.loading():
        assert not use.grow()
    pin = use.pin()
    use.forget_pin()
    assert not use.grow(), "a pin that is not shared any more still reads"
    del pin
    gc.collect()
    assert use.grow() and tables.grown == 1


def test_a_map_that_can_not_grow_may_be_read_again():
    tables = FakeTables()
    tables.full = True
    use = use_of(tables)
    with pytest.raises(TablesError):
        use.grow()
    assert not use.growing


def test_without_tables_there_is_nothing_to_pin_or_to_grow():
    use = TableUse(None)
    assert use.pin() is None and not use.grow()
