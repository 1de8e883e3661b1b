"""How many wrong tokens one address may try."""

from __future__ import annotations

from nsqha.access.attempts import WrongTokens


def test_beyond_twenty_in_a_second_nothing_is_looked_at() -> None:
    wrong = WrongTokens()
    for n in range(20):
        assert not wrong.too_many("10.0.0.7", 5.0 + n / 100)
        wrong.wrong("10.0.0.7", 5.0 + n / 100)
    assert wrong.too_many("10.0.0.7", 5.99)
    assert not wrong.too_many("10.0.0.8", 5.99), "others are not concerned"
    assert not wrong.too_many("10.0.0.7", 6.0)
    wrong.wrong("10.0.0.7", 6.0)
    assert not wrong.too_many("10.0.0.7", 6.1), "the second before is forgotten"


def test_one_host_is_a_network_of_ipv6() -> None:
    wrong = WrongTokens(per_second=2)
    wrong.wrong("2001:db8::1", 1.0)
    wrong.wrong("2001:db8::ffff:2", 1.0)
    assert wrong.too_many("2001:db8::3", 1.0) and not wrong.too_many("2001:db8:0:1::3", 1.0)
    wrong.wrong("::ffff:10.0.0.7", 1.0)
    wrong.wrong("10.0.0.7", 1.0)
    assert wrong.too_many("::ffff:10.0.0.7", 1.0) and wrong.too_many("10.0.0.7", 1.0)


def test_the_table_is_bounded_and_the_oldest_goes_first() -> None:
    wrong = WrongTokens(per_second=1, addresses_max=3)
    for host in ("a", "b", "a", "c", "d"):
        wrong.wrong(host, 1.0)
    assert len(wrong) == 3
    assert not wrong.too_many("b", 1.0) and all(wrong.too_many(host, 1.0) for host in "acd")
