"""nsqd's HTTP API over a real loopback server and a broker in memory."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

import pytest

from nsqha.errors import AppendFailed, NotFound, OutcomeUnknown, Poisoned, Unavailable
from nsqha.server import http_envelope
from nsqha.server.api import Check
from nsqha.server.http_api import HttpServer
from nsqha.server.tls import server_context
from tests.unit.server.fake_broker import SECOND, FakeBroker, FakeChannel, FakeTopic, client
from tests.unit.server.raw_http import Answer, Connection

TEXT = "text/plain; charset=utf-8"
JSON = "application/json; charset=utf-8"
NSQ = "nsq; version=1.0"


def talk(broker: FakeBroker, conversation: Callable[[Connection], Awaitable[None]]) -> None:
    """Run a conversation with a server of `broker`."""

    async def run() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        port = sock.getsockname()[1]
        server = HttpServer(broker, sock, None)
        await server.start()
        connection = await Connection.open(port)
        try:
            await conversation(connection)
        finally:
            connection.close()
            await server.close()

    asyncio.run(run())


def ask(broker: FakeBroker, method: str, target: str, body: bytes = b"", *, chunked: bool = False) -> Answer:
    """One request."""
    answers = []

    async def conversation(connection: Connection) -> None:
        answers.append(await connection.ask(method, target, body, chunked=chunked))

    talk(broker, conversation)
    return answers[0]


def refusals(broker: FakeBroker, *requests: tuple[str, str, bytes]) -> list[tuple[int, str]]:
    found = []

    async def conversation(connection: Connection) -> None:
        for method, target, body in requests:
            found.append((await connection.ask(method, target, body)).refusal)

    talk(broker, conversation)
    return found


# ---- publishing


def test_pub_stores_the_body_as_it_is() -> None:
    broker = FakeBroker()
    body = bytes(range(256)) + b"\n\r\n"
    answer = ask(broker, "POST", "/pub?topic=t", body)
    assert answer.status == 200
    assert answer.body == b"OK"
    assert answer.headers["content-type"] == TEXT
    assert answer.headers["x-nsq-content-type"] == NSQ
    assert answer.headers["content-length"] == "2"
    assert broker.topics["t"].bodies == [body]
    assert broker.publishing.delays == [None]


def test_pub_checks_the_body_before_the_topic() -> None:
    broker = FakeBroker(max_msg_size=100)
    assert refusals(
        broker,
        ("POST", "/pub", b"x" * 101),
        ("POST", "/pub?topic=a*b", b""),
        ("POST", "/pub", b"x"),
        ("POST", "/pub?topic=", b"x"),
        ("POST", "/pub?topic=a*b", b"x"),
        ("POST", "/pub?topic=" + "n" * 65, b"x"),
        ("POST", "/pub?topic=%zz", b"x"),
    ) == [
        (413, "MSG_TOO_BIG"),
        (400, "MSG_EMPTY"),
        (400, "MISSING_ARG_TOPIC"),
        (400, "INVALID_TOPIC"),
        (400, "INVALID_TOPIC"),
        (400, "INVALID_TOPIC"),
        (400, "INVALID_REQUEST"),
    ]
    assert broker.topics == {}


def test_pub_takes_a_message_of_exactly_the_limit_also_chunked() -> None:
    broker = FakeBroker(max_msg_size=100)
    assert ask(broker, "POST", "/pub?topic=t", b"x" * 100).status == 200
    assert ask(broker, "POST", "/pub?topic=t", b"x" * 100, chunked=True).status == 200
    assert ask(broker, "POST", "/pub?topic=t", b"x" * 101, chunked=True).refusal == (413, "MSG_TOO_BIG")
    assert len(broker.topics["t"].bodies) == 2


def test_pub_refuses_an_announced_size_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_envelope, "LINGER_S", 0.01)

    async def conversation(connection: Connection) -> None:
        connection.writer.write(b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert (await connection.answer()).refusal == (413, "MSG_TOO_BIG")

    talk(FakeBroker(), conversation)


def test_pub_answers_expect_100_continue() -> None:
    broker = FakeBroker()

    async def conversation(connection: Connection) -> None:
        connection.writer.write(
            b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
        )
        assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.writer.write(b"hello")
        assert (await connection.answer()).body == b"OK"

    talk(broker, conversation)
    assert broker.topics["t"].bodies == [b"hello"]


@pytest.mark.parametrize("delay", ["-1", "x", "", "1.5", "3600001", "9" * 30, "1_0", " 1"])
def test_defer_must_be_milliseconds_within_max_req_timeout(delay: str) -> None:
    broker = FakeBroker()
    answer = ask(broker, "POST", f"/pub?topic=t&defer={delay.replace(' ', '%20')}", b"x")
    assert answer.refusal == (400, "INVALID_DEFER")
    assert broker.publishing.delays == []


def test_defer_is_handed_on() -> None:
    broker = FakeBroker()
    for delay in ("0", "700", "3600000"):
        assert ask(broker, "POST", f"/pub?topic=t&defer={delay}", b"x").status == 200
    assert ask(broker, "POST", "/mpub?topic=t&defer=5", b"a\nb").status == 200
    assert broker.publishing.delays == [None, 700, 3_600_000, 5]


def test_a_longer_max_req_timeout_allows_longer_delays() -> None:
    broker = FakeBroker(max_req_timeout_ns=8760 * 3600 * SECOND)
    assert ask(broker, "POST", f"/pub?topic=t&defer={8760 * 3600 * 1000}", b"x").status == 200


def test_a_form_is_a_message() -> None:
    assert ask(FakeBroker(), "POST", "/pub", b"topic=abc").refusal == (400, "MISSING_ARG_TOPIC")


def test_mpub_takes_one_message_per_line_and_skips_empty_ones() -> None:
    broker = FakeBroker()
    assert ask(broker, "POST", "/mpub?topic=t", b"\n\none\r\n\n\ntwo\n").body == b"OK"
    assert broker.topics["t"].bodies == [b"one\r", b"two"]


@pytest.mark.parametrize("body", [b"", b"\n\n"])
def test_mpub_without_a_message_is_ok_and_makes_the_topic(body: bytes) -> None:
    broker = FakeBroker()
    assert ask(broker, "POST", "/mpub?topic=t", body).body == b"OK"
    assert broker.topics["t"].bodies == []
    assert broker.publishing.delays == []


COUNTED = b"\0\0\0\2" + b"\0\0\0\3a\nb" + b"\0\0\0\1c"


@pytest.mark.parametrize("word", ["true", "1", "yes", ""])
def test_mpub_binary_takes_counted_messages(word: str) -> None:
    broker = FakeBroker()
    assert ask(broker, "POST", f"/mpub?topic=t&binary={word}", COUNTED).body == b"OK"
    assert broker.topics["t"].bodies == [b"a\nb", b"c"]


@pytest.mark.parametrize("word", ["false", "0"])
def test_mpub_binary_false_means_lines(word: str) -> None:
    broker = FakeBroker()
    ask(broker, "POST", f"/mpub?topic=t&binary={word}", b"a\nb")
    assert broker.topics["t"].bodies == [b"a", b"b"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "BAD_BODY"),
        (b"\0\0\0", "BAD_BODY"),
        (b"\0\0\0\0", "BAD_BODY"),
        (b"\xff\xff\xff\xff", "BAD_BODY"),
        (b"\x7f\xff\xff\xff" + b"\0\0\0\1a", "BAD_BODY"),
        (b"\0\0\0\2" + b"\0\0\0\1a", "BAD_MESSAGE"),
        (b"\0\0\0\2" + b"\0\0\0\1a" + b"\0\0\0\0", "BAD_MESSAGE"),
        (b"\0\0\0\1" + b"\xff\xff\xff\xff", "BAD_MESSAGE"),
        (b"\0\0\0\1" + b"\0\0\0\xc9" + b"x" * 201, "BAD_MESSAGE"),
    ],
)
def test_a_broken_counted_body_is_refused_whole_but_makes_the_topic(body: bytes, code: str) -> None:
    broker = FakeBroker(max_msg_size=200)
    assert ask(broker, "POST", "/mpub?topic=t&binary=true", body).refusal == (413, code)
    assert broker.topics["t"].bodies == []


def test_mpub_limits() -> None:
    broker = FakeBroker(max_msg_size=10, max_body_size=50)
    assert refusals(
        broker,
        ("POST", "/mpub", b"x" * 51),
        ("POST", "/mpub", b"x"),
        ("POST", "/mpub?topic=a*b", b"x"),
        ("POST", "/mpub?topic=t", b"ok\n" + b"x" * 11),
        ("POST", "/mpub?topic=t", b"y\n" * 25 + b"y"),
    ) == [
        (413, "BODY_TOO_BIG"),
        (400, "MISSING_ARG_TOPIC"),
        (400, "INVALID_TOPIC"),
        (413, "MSG_TOO_BIG"),
        (413, "BODY_TOO_BIG"),
    ]
    assert ask(broker, "POST", "/mpub?topic=t", b"y\n" * 26, chunked=True).refusal == (413, "BODY_TOO_BIG")
    assert ask(broker, "POST", "/mpub?topic=t", b"y\n" * 25).status == 200
    assert len(broker.topics["t"].bodies) == 25


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (Unavailable("disk low"), (503, "UNAVAILABLE")),
        (AppendFailed("no space"), (503, "UNAVAILABLE")),
        (OutcomeUnknown("no answer"), (504, "OUTCOME_UNKNOWN")),
        (Poisoned("fsync failed"), (500, "INTERNAL_ERROR")),
        (NotFound("t"), (404, "TOPIC_NOT_FOUND")),
        (RuntimeError("a bug"), (500, "INTERNAL_ERROR")),
    ],
)
def test_a_failed_publish_says_whether_it_may_be_stored(error: Exception, refusal: tuple[int, str]) -> None:
    broker = FakeBroker()
    broker.topics["t"] = FakeTopic()
    broker.topics.refusal = error
    answer = ask(broker, "POST", "/pub?topic=t", b"x")
    assert answer.refusal == refusal
    assert answer.json.get("detail", str(error)) == str(error)
    assert ask(broker, "POST", "/mpub?topic=t", b"x").refusal == refusal


def test_a_stopping_broker_says_so() -> None:
    broker = FakeBroker()
    broker.exiting = True
    assert refusals(broker, ("POST", "/pub?topic=t", b"x"), ("POST", "/mpub?topic=t", b"x")) == [(503, "EXITING")] * 2


def test_a_publish_that_the_stop_overtakes_says_so() -> None:
    broker = FakeBroker()

    async def publish(*_args: object, **_fields: object) -> None:
        broker.exiting = True
        raise Unavailable("exiting")

    broker.publishing.publish = publish  # type: ignore[method-assign]
    assert ask(broker, "POST", "/pub?topic=t", b"x").refusal == (503, "EXITING")


def test_without_auto_create_a_publish_needs_its_topic() -> None:
    broker = FakeBroker(auto_create_topics=False)
    assert (
        refusals(broker, ("POST", "/pub?topic=t", b"x"), ("POST", "/mpub?topic=t", b"x"))
        == [(404, "TOPIC_NOT_FOUND")] * 2
    )
    assert ask(broker, "POST", "/topic/create?topic=t").status == 200
    assert ask(broker, "POST", "/pub?topic=t", b"x").status == 200


def test_a_connection_serves_many_requests() -> None:
    broker = FakeBroker()

    async def conversation(connection: Connection) -> None:
        for n in range(20):
            assert (await connection.ask("POST", "/pub?topic=t", b"%d" % n)).body == b"OK"

    talk(broker, conversation)
    assert len(broker.topics["t"].bodies) == 20


# ---- administration


def test_the_life_of_topics_and_channels() -> None:
    broker = FakeBroker()

    async def conversation(connection: Connection) -> None:
        async def done(target: str) -> None:
            answer = await connection.ask("POST", target)
            assert (answer.status, answer.body) == (200, b"")
            assert "content-type" not in answer.headers
            assert answer.headers["x-nsq-content-type"] == NSQ

        await done("/topic/create?topic=t")
        await done("/topic/create?topic=t")
        await done("/topic/pause?topic=t")
        assert broker.topics["t"].paused
        await done("/topic/unpause?topic=t")
        assert not broker.topics["t"].paused
        await done("/channel/create?topic=t&channel=c%23ephemeral")
        await done("/channel/create?topic=t&channel=c")
        assert set(broker.topics["t"].channels) == {"c", "c#ephemeral"}
        await done("/channel/pause?topic=t&channel=c")
        assert broker.topics["t"].channels["c"].paused
        await done("/channel/unpause?topic=t&channel=c")
        assert not broker.topics["t"].channels["c"].paused
        broker.topics["t"].channels["c"].depth = 5
        await done("/channel/empty?topic=t&channel=c")
        assert broker.topics["t"].channels["c"].depth == 0
        await done("/channel/delete?topic=t&channel=c")
        assert set(broker.topics["t"].channels) == {"c#ephemeral"}
        broker.topics["t"].bodies.append(b"x")
        await done("/topic/empty?topic=t")
        assert broker.topics["t"].bodies == []
        await done("/topic/delete?topic=t")
        assert broker.topics == {}

    talk(broker, conversation)


@pytest.mark.parametrize("verb", ["create", "delete", "empty", "pause", "unpause"])
def test_channel_calls_check_topic_then_channel(verb: str) -> None:
    broker = FakeBroker()
    broker.topics["t"] = FakeTopic()
    path = f"/channel/{verb}"
    assert refusals(
        broker,
        ("POST", path, b""),
        ("POST", f"{path}?topic=a*b", b""),
        ("POST", f"{path}?topic=t", b""),
        ("POST", f"{path}?topic=t&channel=a*b", b""),
        ("POST", f"{path}?topic=unknown&channel=c", b""),
        ("GET", f"{path}?topic=t&channel=c", b""),
    ) == [
        (400, "MISSING_ARG_TOPIC"),
        (400, "INVALID_ARG_TOPIC"),
        (400, "MISSING_ARG_CHANNEL"),
        (400, "INVALID_ARG_CHANNEL"),
        (404, "TOPIC_NOT_FOUND"),
        (405, "METHOD_NOT_ALLOWED"),
    ]
    if verb != "create":
        assert ask(broker, "POST", f"{path}?topic=t&channel=c").refusal == (404, "CHANNEL_NOT_FOUND")


def test_only_create_and_empty_look_at_the_name_of_a_topic() -> None:
    found = {}
    for verb in ("create", "delete", "empty", "pause", "unpause"):
        path = f"/topic/{verb}"
        found[verb] = refusals(FakeBroker(), ("POST", path, b""), ("POST", f"{path}?topic=a*b", b""))
    assert {verb: answers[0] for verb, answers in found.items()} == dict.fromkeys(found, (400, "MISSING_ARG_TOPIC"))
    assert {verb: answers[1] for verb, answers in found.items()} == {
        "create": (400, "INVALID_TOPIC"),
        "delete": (404, "TOPIC_NOT_FOUND"),
        "empty": (400, "INVALID_TOPIC"),
        "pause": (404, "TOPIC_NOT_FOUND"),
        "unpause": (404, "TOPIC_NOT_FOUND"),
    }


def test_what_vanishes_while_it_is_changed_is_not_found() -> None:
    broker = FakeBroker()
    broker.topics["t"] = FakeTopic(channels={"c": FakeChannel()})
    broker.topics.refusal = NotFound("gone meanwhile")
    assert ask(broker, "POST", "/topic/pause?topic=t").refusal == (404, "TOPIC_NOT_FOUND")
    assert ask(broker, "POST", "/channel/pause?topic=t&channel=c").refusal == (404, "CHANNEL_NOT_FOUND")


def test_a_change_that_can_not_be_made_says_why() -> None:
    broker = FakeBroker()
    broker.topics.refusal = Unavailable("no leader for partition 3")
    answer = ask(broker, "POST", "/topic/create?topic=t")
    assert answer.refusal == (503, "UNAVAILABLE")
    assert answer.json["detail"] == "no leader for partition 3"


# ---- what it is and how it goes


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
    broker.topics["bb"] = FakeTopic(channels={"y": FakeChannel()})
    broker.topics["aa"] = FakeTopic(channels={"x": FakeChannel(clients=(client(),))})

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
    broker.topics.update({f"t{n:03}": FakeTopic() for n in range(150)})
    assert len(ask(broker, "GET", "/stats?format=json").json["topics"]) == 150
    assert ask(broker, "GET", "/stats").body.count(b"be-depth") == 150


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
    broker.topics["orders"] = FakeTopic(bodies=[b"x"])

    async def conversation(connection: Connection) -> None:
        plain = await connection.ask("GET", "/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b'nsqha_publish_messages_total{topic="orders"} 1.0\n' in plain.body
        accept = "application/openmetrics-text; version=1.0.0"
        modern = await connection.ask("GET", "/metrics", Accept=accept)
        assert modern.headers["content-type"].startswith(accept)
        assert modern.body.endswith(b"# EOF\n")

    talk(broker, conversation)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/debug/pprof/", b"/debug/pprof"),
        ("/debug/pprof/cmdline", b"python"),
        ("/debug/pprof/goroutine", b"test_http_api.py"),
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


# ---- TLS


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
        server = HttpServer(broker, None, sock, server_context(broker.options))
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
