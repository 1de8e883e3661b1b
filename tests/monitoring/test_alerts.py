"""Each alert fires when it should, and clears when that is over: promtool runs the rules over series made for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from nsqha.cli.generate import alerts
from tests.monitoring.promtool import promtool

C = 'topic="t",channel="c"'


class Case(NamedTuple):
    """Series of an alert, in Prometheus' notation of values per minute; the minute when it must fire, and when not."""

    series: dict[str, str]
    fires: int
    clears: int


BAD = "1x30 0x60"  # for half an hour, then not
CASES: dict[str, Case] = {
    "NsqhaDown": Case({'up{job="nsqha",instance="a"}': "0x10 1x20"}, 5, 20),
    "NsqhaUnhealthy": Case({'nsqha_healthy{instance="a"}': "0x10 1x20"}, 5, 20),
    "NsqhaNodeAway": Case({"nsqha_cluster_nodes_away": "1x10 0x20"}, 5, 20),
    "NsqhaNoController": Case({"nsqha_controller": "0x10 1x20", "nsqha_cluster_registered": "1x40"}, 5, 20),
    "NsqhaPartitionLeaderless": Case({"nsqha_cluster_partitions_leaderless": "2x10 0x20"}, 5, 20),
    "NsqhaBelowMinIsr": Case({"nsqha_cluster_partitions_below_min_isr": "2x10 0x20"}, 5, 20),
    "NsqhaUnderReplicated": Case({"nsqha_cluster_partitions_under_replicated": "2x10 0x20"}, 8, 20),
    "NsqhaIsrFlapping": Case(
        {
            'nsqha_partition_isr_changes_total{topic="t",kind="shrink"}': "0+1x30 30x60",
            'nsqha_partition_epoch{topic="t",partition="0"}': "1x90",
        },
        20,
        60,
    ),
    "NsqhaLeaderFlapping": Case(
        {
            'nsqha_partition_leader_changes_total{topic="t"}': "0+1x30 30x60",
            'nsqha_partition_epoch{topic="t",partition="0"}': "1x90",
        },
        20,
        60,
    ),
    "NsqhaFollowerBehind": Case({'nsqha_push_lag_seconds{instance="a",follower="b"}': "9x10 0x20"}, 5, 20),
    "NsqhaCatchUpStalls": Case(
        {'nsqha_catch_up_left_bytes{instance="a",kind="rebuild"}': "5000x60 4000-100x60"}, 45, 90
    ),
    "NsqhaRefusesToLead": Case({'nsqha_cluster_node_refuses_to_lead{node="a",why="declines"}': "1x10 _x20"}, 5, 20),
    "NsqhaChannelStuck": Case({f'nsqha_channel_stuck{{{C},partition="0"}}': "1x10 0x20"}, 5, 20),
    "NsqhaChannelOld": Case({f'nsqha_channel_oldest_unfinished_seconds{{{C},partition="0"}}': "1000x20 0x20"}, 10, 30),
    "NsqhaChannelWithoutConsumers": Case(
        {f"nsqha_channel_clients{{{C}}}": "0x30 1x30", f'nsqha_channel_depth{{{C},partition="0"}}': "5x60"}, 20, 45
    ),
    "NsqhaRequeueStorm": Case(
        {
            f"nsqha_channel_requeued_total{{{C}}}": "0+600x30 18000x30",
            f"nsqha_channel_timed_out_total{{{C}}}": "0+0x60",
            f"nsqha_channel_acked_total{{{C}}}": "0+60x60",
        },
        25,
        50,
    ),
    "NsqhaDeadLetters": Case({f'nsqha_channel_died_total{{{C},reason="requeued"}}': "_x5 1x200"}, 10, 150),
    "NsqhaDiskRefuses": Case({'nsqha_disk_refusing_publishes{instance="a"}': "1x10 0x20"}, 5, 20),
    "NsqhaDiskFillsSoon": Case(
        {
            'nsqha_disk_free_bytes{instance="a"}': "20000-100x100 10000x200",
            'nsqha_disk_total_bytes{instance="a"}': "100000x400",
        },
        90,
        200,
    ),
    "NsqhaFsyncSlow": Case(
        {
            'nsqha_fsync_seconds_bucket{instance="a",le="0.25"}': "0+1x30 30+100x60",
            'nsqha_fsync_seconds_bucket{instance="a",le="1.0"}': "0+100x30 3000+100x60",
            'nsqha_fsync_seconds_bucket{instance="a",le="+Inf"}': "0+100x30 3000+100x60",
        },
        20,
        70,
    ),
    "NsqhaLoopStalled": Case(
        {
            'nsqha_loop_lag_seconds_bucket{instance="a",le="0.25"}': "0+1x30 30+100x60",
            'nsqha_loop_lag_seconds_bucket{instance="a",le="1.0"}': "0+100x30 3000+100x60",
            'nsqha_loop_lag_seconds_bucket{instance="a",le="+Inf"}': "0+100x30 3000+100x60",
        },
        20,
        70,
    ),
    "NsqhaLeaseShort": Case(
        {
            'nsqha_lease_remaining_seconds{instance="a"}': "0.5x10 3x20",
            'nsqha_cluster_registered{instance="a"}': "1x40",
        },
        5,
        20,
    ),
    "NsqhaLogDamaged": Case({'nsqha_log_events_total{instance="a",event="log_damaged"}': "1x10 _x20"}, 5, 20),
    "NsqhaPossibleLoss": Case({'nsqha_log_events_total{instance="a",event="possible_loss"}': "1x10 _x20"}, 5, 20),
    "NsqhaAuthUnanswered": Case(
        {'nsqha_auth_refused_logins_total{instance="a",why="no_answer"}': "0+6x10 60x30"}, 8, 30
    ),
    "NsqhaClockOffset": Case({'nsqha_clock_offset_seconds{instance="a",peer="b"}': "-5x15 0x20"}, 10, 30),
    "NsqhaCertificateExpires": Case(
        {'nsqha_certificate_expiry_timestamp_seconds{instance="a",path="/x"}': "86400x10 99999999x20"}, 5, 20
    ),
    "NsqhaVersions": Case(
        {
            'nsqha_build_info{instance="a",version="1"}': "1x1600 _x100",
            'nsqha_build_info{instance="b",version="2"}': "1x1700",
        },
        1550,
        1650,
    ),
}
HEALTHY = {
    'up{job="nsqha",instance="a"}': "1x200",
    'nsqha_healthy{instance="a"}': "1x200",
    "nsqha_cluster_nodes_away": "0x200",
    "nsqha_controller": "1x200",
    'nsqha_cluster_registered{instance="a"}': "1x200",
    "nsqha_cluster_partitions_leaderless": "0x200",
    "nsqha_cluster_partitions_below_min_isr": "0x200",
    "nsqha_cluster_partitions_under_replicated": "0x200",
    'nsqha_partition_isr_changes_total{topic="t",kind="shrink"}': "1x200",
    'nsqha_partition_leader_changes_total{topic="t"}': "1x200",
    'nsqha_partition_epoch{topic="t",partition="0"}': "4x200",
    'nsqha_push_lag_seconds{instance="a",follower="b"}': "0.1x200",
    'nsqha_catch_up_left_bytes{instance="a",kind="rebuild"}': "900000-3000x200",
    'nsqha_catch_up_left_bytes{instance="a",kind="follower"}': "0x200",
    'nsqha_auth_refused_logins_total{instance="a",why="no_answer"}': "7x200",
    'nsqha_auth_refused_logins_total{instance="a",why="refused"}': "0+6x200",
    f"nsqha_channel_clients{{{C}}}": "1x200",
    f'nsqha_channel_depth{{{C},partition="0"}}': "5x200",
    f'nsqha_channel_stuck{{{C},partition="0"}}': "0x200",
    f'nsqha_channel_oldest_unfinished_seconds{{{C},partition="0"}}': "3x200",
    f"nsqha_channel_requeued_total{{{C}}}": "0+6x200",
    f"nsqha_channel_timed_out_total{{{C}}}": "0+6x200",
    f"nsqha_channel_acked_total{{{C}}}": "0+6000x200",
    'nsqha_disk_refusing_publishes{instance="a"}': "0x200",
    'nsqha_disk_free_bytes{instance="a"}': "90000-1x200",
    'nsqha_disk_total_bytes{instance="a"}': "100000x200",
    'nsqha_lease_remaining_seconds{instance="a"}': "2.5x200",
    'nsqha_clock_offset_seconds{instance="a",peer="b"}': "0.01x200",
    'nsqha_certificate_expiry_timestamp_seconds{instance="a",path="/x"}': "99999999x200",
    'nsqha_build_info{instance="a",version="1"}': "1x200",
    'nsqha_build_info{instance="b",version="1"}': "1x200",
}


def fires(alert: str, at: int, case: Case, rules: Path) -> bool:
    """Whether the alert fires at that minute: promtool refuses the expectation that it does not."""
    expected = {"eval_time": f"{at}m", "alertname": alert, "exp_alerts": []}
    try:
        run([expected], case.series, rules)
    except AssertionError as error:
        assert re.search(rf"alertname: {alert}\b", str(error)), error
        return True
    return False


def run(expected: list[dict[str, object]], series: dict[str, str], rules: Path) -> None:
    test = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": expected,
            }
        ],
    }
    file = rules.parent / "test.yml"
    file.write_text(json.dumps(test))
    promtool("test", "rules", str(file))


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "nsqha.rules.yml"
    path.write_text(alerts.files()[alerts.RULES])
    return path


def test_the_rules_are_valid_and_each_has_a_case(rules: Path) -> None:
    promtool("check", "rules", str(rules))
    assert {alert.name for alert in alerts.ALERTS} == set(CASES)
    assert len({alert.name for alert in alerts.ALERTS}) == len(alerts.ALERTS)


@pytest.mark.parametrize("alert", CASES)
def test_it_fires_and_clears(alert: str, rules: Path) -> None:
    case = CASES[alert]
    assert fires(alert, case.fires, case, rules)
    assert not fires(alert, case.clears, case, rules)


def test_nothing_fires_while_all_is_well(rules: Path) -> None:
    run([{"eval_time": "150m", "alertname": alert, "exp_alerts": []} for alert in CASES], HEALTHY, rules)


def test_each_has_a_section_of_the_runbook() -> None:
    page = alerts.files()[alerts.PAGE]
    for alert in alerts.ALERTS:
        assert f"\n## {alert.name}\n" in page
        assert alert.severity in (alerts.CRITICAL, alerts.WARNING)
        assert alert.remedy.rstrip().endswith((".", ")"))
