"""What each role may do, as the issue of access has it; and topic patterns."""

from __future__ import annotations

import pytest

from nsqha.access.certificates import certified, grant_of
from nsqha.access.roles import GRANTED, Need, Role, TopicPatterns, granted
from nsqha.access.surfaces import BROKER_HTTP, GRPC, LOOKUP_V1, LOOKUPD_HTTP

MAY = {
    # what is asked for -> the roles that may, apart from the cluster's own nodes
    ("http", "GET /stats"): "viewer reader operator admin",
    ("http", "GET /metrics"): "viewer reader operator admin",
    ("http", "POST /pub"): "publisher",
    ("http", "POST /topic/create"): "operator admin",
    ("http", "POST /channel/empty"): "operator admin",
    ("http", "POST /channel/policy"): "operator admin",
    ("http", "POST /topic/delete"): "admin",
    ("http", "PUT /config/:opt"): "admin",
    ("http", "GET /debug/pprof/heap"): "admin",
    ("http", "GET /readyz"): "viewer reader publisher consumer broker operator admin",
    ("lookupd", "GET /lookup"): "viewer reader publisher consumer broker operator admin",
    ("lookupd", "GET /nodes"): "viewer reader operator admin",
    ("lookupd", "POST /cluster/move"): "admin",
    ("lookupd-tcp", "REGISTER"): "broker",
    ("grpc", "nsqha.v1.Admin/DescribeTopic"): "viewer reader operator admin",
    ("grpc", "nsqha.v1.Admin/PeekMessages"): "reader admin",
    ("grpc", "nsqha.v1.Admin/ListMessages"): "reader operator admin",
    ("grpc", "nsqha.v1.Admin/ChangeMessages"): "operator admin",
    ("grpc", "nsqha.v1.Admin/Seek"): "operator admin",
    ("grpc", "nsqha.v1.Admin/UndoSeek"): "operator admin",
    ("grpc", "nsqha.v1.Admin/DeleteTopic"): "admin",
    ("grpc", "nsqha.v1.Admin/UpdateTopicSettings"): "admin",
    ("grpc", "nsqha.v1.Segments/Snapshot"): "reader admin",
    ("grpc", "nsqha.v1.Replication/Fetch"): "",
    ("grpc", "nsqha.v1.Routing/Administer"): "",
}
TABLES = {"http": BROKER_HTTP, "lookupd": LOOKUPD_HTTP, "lookupd-tcp": LOOKUP_V1, "grpc": GRPC}


@pytest.mark.parametrize(("surface", "name"), MAY)
def test_what_each_role_may(surface: str, name: str) -> None:
    need = TABLES[surface][name]
    may = [role.value for role in GRANTED if granted("x", {role}).may(need, "t")]
    assert may == MAY[surface, name].split()
    assert granted("a node", {Role.NODE}).may(need, "t")


def test_without_a_role_only_what_is_open() -> None:
    nobody = granted("x", ())
    for table in TABLES.values():
        assert {name for name, need in table.items() if nobody.may(need, "t")} == {
            name for name, need in table.items() if need.open
        }


def test_whatever_a_post_changes_is_audited() -> None:
    for table in (BROKER_HTTP, LOOKUPD_HTTP):
        for name, need in table.items():
            assert need.change is (not name.startswith("GET") and name not in ("POST /pub", "POST /mpub")), name
    quiet = ("Get", "List", "Describe", "Peek")
    for name, need in GRPC.items():
        if name.startswith("nsqha.v1.Admin/"):
            assert need.change is not name.partition("/")[2].startswith(quiet), name


@pytest.mark.parametrize(
    ("patterns", "inside", "outside"),
    [
        (["orders"], ["orders"], ["orders2", "order", "orders.x", ""]),
        (["orders.*", "audit"], ["orders.", "orders.eu", "audit"], ["orders", "xorders.eu", "auditor"]),
        (["*.eu"], ["a.eu", ".eu"], ["eu", "a_eu", "a.eu2"]),
        (["*"], ["anything", "with#ephemeral"], []),
        (["a.b"], ["a.b"], ["axb"]),
        (["a*b*c"], ["abc", "a1b2c"], ["acb"]),
    ],
)
def test_patterns_match_whole_names(patterns: list[str], inside: list[str], outside: list[str]) -> None:
    found = TopicPatterns(patterns)
    assert all(map(found.match, inside)) and not any(map(found.match, outside))


@pytest.mark.parametrize("pattern", ["", "a b", "*a*b*c*", "x" * 65, "[ab]", "a?"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is no pattern"):
        TopicPatterns([pattern])


def test_topics_bound_publisher_and_consumer_alone() -> None:
    both = granted("x", {Role.VIEWER, Role.PUBLISHER}, TopicPatterns(["orders"]))
    assert both.may(BROKER_HTTP["POST /pub"], "orders")
    assert not both.may(BROKER_HTTP["POST /pub"], "other") and not both.may(BROKER_HTTP["POST /pub"])
    assert both.may(BROKER_HTTP["GET /stats"], "other")
    assert both.may(LOOKUPD_HTTP["GET /lookup"], "other"), "as a viewer"
    assert not granted("x", {Role.CONSUMER}, TopicPatterns(["orders"])).may(LOOKUPD_HTTP["GET /lookup"], "other")


def test_certificates_give_roles() -> None:
    def may(*uris: str) -> list[str]:
        grant = certified("x", uris)
        return [
            name
            for name in ("GetNode", "PeekMessages", "Seek", "DeleteTopic")
            if grant.may(GRPC[f"nsqha.v1.Admin/{name}"])
        ]

    assert may("nsqha:viewer") == ["GetNode"]
    assert may("nsqha:operator") == ["GetNode", "Seek"]
    assert may("nsqha:administrator") == ["GetNode", "PeekMessages", "Seek", "DeleteTopic"]
    assert may("nsqha:reader") == [] and certified("x", ["nsqha:reader"]).may(GRPC["nsqha.v1.Segments/Snapshot"])
    assert may("nsqha:Viewer", "nsqha:viewer/", "nsqha:admin", "nsqha:node") == []


def test_the_certificate_of_a_socket_is_read() -> None:
    found = grant_of({"subject": ((("commonName", "ops"),),), "subjectAltName": (("URI", "nsqha:operator"),)})
    assert found.who == "certificate ops" and Role.OPERATOR in found.roles
    assert grant_of({}).roles == frozenset()


def test_a_need_says_what_it_is() -> None:
    assert str(LOOKUPD_HTTP["GET /lookup"]) == "viewer or publisher or consumer or broker"
    assert str(Need()) == "open" and str(GRPC["nsqha.v1.Segments/Snapshot"]) == "reader"
