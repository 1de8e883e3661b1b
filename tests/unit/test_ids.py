from __future__ import annotations

import itertools

import pytest

from nsqha import ids


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 64, "t#ephemeral", "x" * 54 + "#ephemeral", "..", "."])
def test_names_that_nsq_accepts(name: str) -> None:
    assert ids.valid_name(name)


@pytest.mark.parametrize(
    "name", ["", "x" * 65, "a b", "a/b", "a\n", "#ephemeral", "a#other", "x" * 55 + "#ephemeral", "é"]
)
def test_names_that_nsq_refuses(name: str) -> None:
    assert not ids.valid_name(name)


def test_a_wire_id_is_one_addition_away_from_the_offset() -> None:
    base = ids.id_base(5, ids.topic_salt(3, 77))
    number = ids.parse_message_id(b"%016x" % (base + 123))
    assert number is not None
    assert number - base == 123
    assert ids.partition_of(number) == 5


def test_salts_of_a_cluster_are_distinct_and_consecutive_ones_far_apart() -> None:
    salts = [ids.topic_salt(n, 12345) for n in range(1 << ids.SALT_BITS)]
    assert len(set(salts)) == len(salts)
    assert all(abs(a - b) > 1000 for a, b in itertools.pairwise(salts))


def test_partition_bits_survive_the_largest_salt_and_offset() -> None:
    base = ids.id_base(ids.PARTITIONS_MAX - 1, (1 << ids.SALT_BITS) - 1)
    assert ids.partition_of(base + ids.OFFSET_MAX - 1) == ids.PARTITIONS_MAX - 1
    assert len(b"%016x" % (base + ids.OFFSET_MAX - 1)) == 16


@pytest.mark.parametrize("raw", [b"", b"0" * 15, b"0" * 17, b"0" * 15 + b"g", b"0" * 15 + b"A", b"0" * 15 + b"\n"])
def test_anything_but_sixteen_lowercase_hex_digits_is_no_id(raw: bytes) -> None:
    assert ids.parse_message_id(raw) is None
