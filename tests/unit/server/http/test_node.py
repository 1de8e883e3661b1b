"""What a node says of itself over nsqd's HTTP API, and whom it answers without TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest

from nsqha.server.http.api import BrokerHttp
from nsqha.server.http.broker_api import Check
from nsqha.server.http.stats import BrokerStats
from nsqha.server.runtime.tls import server_context
from tests.unit.server.fake_broker import BrokerChannel, BrokerTopic, FakeBroker, client
from tests.unit.server.http_rig import JSON, NSQ, TEXT, ask, refusals, talk
from tests.unit.server.raw_http import Connection


def test_ping_is_plain_text() -> None:
    answer = ask(FakeBroker(), "GET", "/ping")
    assert (answer.status, answer.body) == (200, b"OK")
    assert answer.headers["content-type"] == TEXT
    assert "x-nsq-content-type" not in answer.headers


def test_ping_fails_while_the_disk_does() -> None:
    broker = FakeBroker()
    broker.health_text = "NOK - disk full"
    answer = ask(broker, "GET", "/ping")
    assert (answer.status, answer.body) == (500, b"NOK - disk full")
    assert answer.headers["content-type"] == TEXT


def test_info() -> None:
    broker = FakeBroker(topology_zone="z", topology_region="r", max_deflate_level=2, broadcast_http_port=80)
    answer = ask(broker, "GET", "/info")
    assert answer.headers["content-type"] == JSON
    host = answer.json["hostname"]
    assert answer.body.decode() == (
        f'{{"version":"1.3.0","broadcast_address":"node.example","hostname":"{host}","http_port":80,"tcp_port":4150,'
        '"start_time":1700000000,"max_heartbeat_interval":60000000000,"max_output_buffer_size":65536,'
        '"max_output_buffer_timeout":30000000000,"max_deflate_level":2,"topology_zone":"z","topology_region":"r"}'
    )


def test_the_cluster_is_shown_by_a_node_that_is_one_of_it() -> None:
    broker = FakeBroker()
    assert ask(broker, "GET", "/cluster").status == 404
    broker.side.cluster = b'{"cluster":"nsqha"}'
    answer = ask(broker, "GET", "/cluster")
    assert (answer.status, answer.headers["content-type"], answer.json) == (200, JSON, {"cluster": "nsqha"})


def test_info_names_the_grpc_port_if_it_is_asked_for() -> None:
    assert ask(FakeBroker(), "GET", "/info?include_nsqha=true").json["grpc_address"] == "127.0.0.1:4155"


def test_options_are_read_by_the_name_they_have_in_the_file() -> None:
    broker = FakeBroker(snappy=False)
    found = {}

    async def conversation(connection: Connection) -> None:
        for name in ("nsqlookupd_tcp_addresses", "log_level", "max_msg_size", "msg_timeout", "snappy", "statsd_prefix"):
            answer = await connection.ask("GET", f"/config/{name}")
            found[name] = (answer.headers["content-type"], answer.body)

    talk(broker, conversation)
    assert found == {
        "nsqlookupd_tcp_addresses": (JSON, b"[]"),
        "log_level": (JSON, b"2"),
        "max_msg_size": (JSON, b"1048576"),
        "msg_timeout": (JSON, b"60000000000"),
        "snappy": (JSON, b"false"),
        "statsd_prefix": (TEXT, b"nsq.%s"),
    }


def test_the_lookup_daemons_and_the_log_level_can_be_changed() -> None:
    broker = FakeBroker()

    async def conversation(connection: Connection) -> None:
        answer = await connection.ask("PUT", "/config/nsqlookupd_tcp_addresses", b'["127.0.0.1:1"]')
        assert answer.body == b'["127.0.0.1:1"]'
        assert (await connection.ask("GET", "/config/nsqlookupd_tcp_addresses")).body == b'["127.0.0.1:1"]'
        assert (await connection.ask("PUT", "/config/nsqlookupd_tcp_addresses", b"[]")).body == b"[]"
        assert (await connection.ask("PUT", "/config/log_level", b"DEBUG")).body == b"1"

    talk(broker, conversation)
    assert broker.options.log_level == "debug"


@pytest.mark.parametrize(
    ("cidr", "status"),
    [("", 403), ("10.0.0.0/8", 403), ("10.0.0.0/8, 127.0.0.1/8", 200), ("127.0.0.1", 200), ("::1/128", 403)],
)
def test_options_are_changed_from_where_that_is_allowed(cidr: str, status: int) -> None:
    broker = FakeBroker(allow_config_from_cidr=cidr)
    answer = ask(broker, "PUT", "/config/log_level", b"debug")
    assert answer.status == status
    assert broker.options.log_level == ("debug" if status == 200 else "info")
    if status == 403:
        assert answer.json["message"] == "FORBIDDEN" and "--allow-config-from-cidr" in answer.json["detail"]
    assert ask(broker, "GET", "/config/log_level").status == 200, "reading changes nothing"


def test_what_is_wrong_with_a_change_of_options() -> None:
    broker = FakeBroker(max_msg_size=100)
    lookupds = "/config/nsqlookupd_tcp_addresses"
    assert refusals(
        broker,
        ("PUT", lookupds, b""),
        ("PUT", lookupds, b"x" * 101),
        ("PUT", lookupds, b"nope"),
        ("PUT", lookupds, b'"127.0.0.1:1"'),
        ("PUT", lookupds, b"[1]"),
        ("PUT", "/config/log_level", b"loud"),
        ("PUT", "/config/log_level", b"\xff"),
        ("PUT", "/config/max_msg_size", b"1"),
        ("PUT", "/config/nope", b"1"),
        ("GET", "/config/nope", b""),
        ("POST", "/config/log_level", b"debug"),
    ) == [
        (413, "INVALID_VALUE"),
        (413, "INVALID_VALUE"),
        (400, "INVALID_VALUE"),
        (400, "INVALID_VALUE"),
        (400, "INVALID_VALUE"),
        (400, "INVALID_VALUE"),
        (400, "INVALID_VALUE"),
        (400, "INVALID_OPTION"),
        (400, "INVALID_OPTION"),
        (400, "INVALID_OPTION"),
        (405, "METHOD_NOT_ALLOWED"),
    ]
    assert broker.options.lookupd_tcp_addresses == ()


def test_stats_filters_by_query() -> None:
    broker = FakeBroker()
    broker.topics["bb"] = BrokerTopic(channels={"y": BrokerChannel()})
    broker.topics["aa"] = BrokerTopic(channels={"x": BrokerChannel(clients=(client(),))})

    async def conversation(connection: Connection) -> None:
        async def names(query: str) -> list[str] | None:
            answer = await connection.ask("GET", f"/stats?format=json{query}")
            assert answer.headers["content-type"] == JSON
            topics = answer.json["topics"]
            return topics if topics is None else [t["topic_name"] for t in topics]

        assert await names("") == ["aa", "bb"]
        assert await names("&topic=bb") == ["bb"]
        assert await names("&topic=nope") is None
        assert await names("&channel=x") == ["aa"]
        assert await names("&topic=bb&channel=x") == []
        for word, shown in (("false", None), ("0", None), ("true", 1), ("maybe", 1)):
            answer = await connection.ask(
                "GET", f"/stats?format=json&topic=aa&include_clients={word}&include_mem={word}"
            )
            clients = answer.json["topics"][0]["channels"][0]["clients"]
            assert clients is None if shown is None else len(clients) == 1
            assert ("memory" in answer.json) == (shown is not None)
        assert "nsqha" not in (await connection.ask("GET", "/stats?format=json")).json
        extra = (await connection.ask("GET", "/stats?format=json&include_nsqha=true")).json["nsqha"]
        assert (extra["version"], extra["hot"]) == ("9.9.9", "pure")
        assert (await connection.ask("GET", "/stats?format=%zz")).refusal == (400, "INVALID_REQUEST")

    talk(broker, conversation)


def test_statistics_of_many_topics() -> None:
    broker = FakeBroker()
    broker.topics.update({f"t{n:03}": BrokerTopic() for n in range(150)})
    assert len(ask(broker, "GET", "/stats?format=json").json["topics"]) == 150
    assert ask(broker, "GET", "/stats").body.count(b"be-depth") == 150


def test_stats_are_looked_at_in_turns() -> None:
    """Who has many topics has others who wait for none of them."""

    class InTurns(FakeBroker):
        def snapshot(self, topic: str = "", clients: bool = True) -> BrokerStats:
            raise AssertionError("all of it in one turn")

        async def snapshot_in_turns(self, topic: str = "", clients: bool = False) -> BrokerStats:
            asked.append((topic, clients))
            return BrokerStats(health="OK", start_time_ns=0)

    asked: list[tuple[str, bool]] = []
    ask(InTurns(), "GET", "/stats?format=json&topic=aa")
    ask(InTurns(), "GET", "/stats?include_clients=false")
    assert asked == [("aa", True), ("", False)]


def test_any_other_format_is_text() -> None:
    answer = ask(FakeBroker(), "GET", "/stats?format=xml")
    assert answer.headers["content-type"] == TEXT
    assert answer.headers["x-nsq-content-type"] == NSQ
    assert answer.body.startswith(b"nsqd v1.3.0 (built w/python")


def test_probes_tell_alive_from_ready() -> None:
    broker = FakeBroker()
    broker.check_list = (Check("log", True, live=True), Check("disk", False, "1 byte free"))

    async def conversation(connection: Connection) -> None:
        assert (await connection.ask("GET", "/healthz")).status == 200
        assert (await connection.ask("GET", "/startupz")).status == 200
        ready = await connection.ask("GET", "/readyz")
        assert (ready.status, ready.body) == (503, b"NOK\n[-] disk: 1 byte free")
        verbose = await connection.ask("GET", "/readyz?verbose")
        assert verbose.body == b"NOK\n[+] log\n[-] disk: 1 byte free"
        broker.check_list = (Check("log", False, "fsync failed", live=True),)
        assert (await connection.ask("GET", "/healthz")).status == 503
        broker.check_list = ()
        assert (await connection.ask("GET", "/readyz")).body == b"OK"

    talk(broker, conversation)


def test_metrics_are_served_in_both_formats() -> None:
    broker = FakeBroker()
    broker.topics["orders"] = BrokerTopic(bodies=[b"x"])

    async def conversation(connection: Connection) -> None:
        plain = await connection.ask("GET", "/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b'nsqha_publish_messages_total{topic="orders"} 1.0\n' in plain.body
        accept = "application/openmetrics-text; version=1.0.0"
        modern = await connection.ask("GET", "/metrics", Accept=accept)
        assert modern.headers["content-type"].startswith(accept)
        assert modern.body.endswith(b"# EOF\n")

    talk(broker, conversation)


def test_metrics_of_one_topic_are_of_no_other() -> None:
    broker = FakeBroker()
    for n in range(30):
        broker.topics[f"t{n}"] = BrokerTopic(bodies=[b"x"])

    async def conversation(connection: Connection) -> None:
        for n in range(30):
            body = (await connection.ask("GET", f"/metrics?topic=t{n}")).body
            assert b'nsqha_publish_messages_total{topic="t%d"} 1.0\n' % n in body
            assert body.count(b"nsqha_publish_messages_total{") == 1
            assert b"\nnsqha_healthy 1.0\n" in body
        assert (await connection.ask("GET", "/metrics")).body.count(b"nsqha_publish_messages_total{") == 30
        assert (await connection.ask("GET", "/metrics?topic=none")).status == 200

    talk(broker, conversation)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/debug/pprof/", b"/debug/pprof"),
        ("/debug/pprof/cmdline", b"python"),
        ("/debug/pprof/goroutine", b"http_rig.py"),
        ("/debug/pprof/threadcreate", b"thread MainThread\n"),
        ("/debug/pprof/heap", b"tracemalloc"),
        ("/debug/pprof/profile?seconds=0.05", b";"),
    ],
)
def test_debug_pages_answer(target: str, expected: bytes) -> None:
    answer = ask(FakeBroker(), "GET", target)
    assert answer.status == 200
    assert expected in answer.body


@pytest.mark.parametrize("seconds", ["x", "0", "-1", "301", "nan"])
def test_a_profile_has_a_bound(seconds: str) -> None:
    assert ask(FakeBroker(), "GET", f"/debug/pprof/profile?seconds={seconds}").status == 400


def test_paths_of_before_1_0_are_gone() -> None:
    for path in ("/put?topic=x", "/mput?topic=x", "/create_topic?topic=x", "/", "/no/such/thing"):
        assert ask(FakeBroker(), "POST", path).refusal == (404, "NOT_FOUND")


def test_plain_http_is_refused_where_tls_is_required(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    broker = FakeBroker(tls_required=2, tls_cert=cert, tls_key=key)
    for method, target in (("GET", "/ping"), ("POST", "/pub?topic=t"), ("GET", "/nope")):
        answer = ask(broker, method, target, b"x" if method == "POST" else b"")
        assert answer.status == 403
        assert answer.body == b'{"message": "TLS_REQUIRED", "https_port": 4152}'
        assert answer.headers["content-type"] == JSON
        assert answer.headers["x-nsq-content-type"] == NSQ
    assert broker.topics == {}


def test_https_serves_what_plain_http_refuses(certificate: tuple[str, str]) -> None:
    broker = FakeBroker(tls_required=2, tls_cert=certificate[0], tls_key=certificate[1])

    async def run() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        server = BrokerHttp(broker, None, sock, server_context(broker.options))
        await server.start()
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        connection = await Connection.open(port, trusting)
        assert (await connection.ask("POST", "/pub?topic=t", b"x")).body == b"OK"
        connection.close()
        await server.close()

    asyncio.run(run())
    assert broker.topics["t"].bodies == [b"x"]


def test_plain_http_may_stay_with_tcp_https(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    broker = FakeBroker(tls_required=1, tls_cert=cert, tls_key=key)
    assert ask(broker, "GET", "/ping").status == 200
