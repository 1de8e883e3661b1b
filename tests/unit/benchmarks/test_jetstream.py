"""The comparison with JetStream: what its servers are told, and how cells become a table."""

from pathlib import Path

from benchmarks.figures import Cell
from benchmarks.jetstream.__main__ import configured, table


def cell(subject, number, cpu_us, *, failure=None):
    return Cell("pub-16x1", subject, number, {"cpu_us": cpu_us, "rate_per_s": 1e6 / cpu_us}, failure=failure)


def test_medians_of_what_worked_and_how_many_times_theirs_is():
    cells = [cell("nsqha 3", n, cpu) for n, cpu in enumerate((4.0, 2.0, 3.0))]
    cells += [cell("JetStream 3", 0, 12.0), cell("JetStream 3", 1, 99.0, failure="no answer")]
    head, line = table(cells)
    assert head.endswith("CPU ratio")
    assert " ".join(line.split()) == "pub-16x1 3 3.00 (2.00-4.00) 333,333 12.00 (12.00-12.00) 83,333 4.0"


def test_a_row_without_a_peer_is_left_out():
    assert len(list(table([cell("nsqha 1", 0, 4.0), cell("JetStream 1", 0, 1.0, failure="no answer")]))) == 1


def test_servers_of_a_cluster_know_one_another_and_sync_when_asked():
    alone = configured(0, "127.0.0.1:1", Path("/s"), ["127.0.0.1:9"], "interval")
    assert "cluster" not in alone and "sync_interval" not in alone
    second = configured(1, "127.0.0.1:2", Path("/s"), ["127.0.0.1:8", "127.0.0.1:9"], "always")
    assert "listen: 127.0.0.1:9" in second and "nats://127.0.0.1:8" in second and "sync_interval: always" in second
