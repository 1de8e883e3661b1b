"""A page of another site changes nothing; programs are not asked who they are."""

from __future__ import annotations

import pytest

from nsqha.server.http.browsers import is_ours, refusal

NAMES = frozenset(("broker-1",))
SITE, ORIGIN = "Sec-Fetch-Site", "Origin"


@pytest.mark.parametrize(
    ("host", "headers"),
    [
        ("127.0.0.1:4151", {SITE: "cross-site", ORIGIN: "https://evil.example"}),
        ("127.0.0.1:4151", {ORIGIN: "https://evil.example"}),  # browsers before 2023
        ("127.0.0.1:4151", {ORIGIN: "null"}),
        ("127.0.0.1:4151", {SITE: "Cross-Site"}),
        ("localhost:4151", {SITE: "same-site", ORIGIN: "http://localhost:3000"}),
        # A name that resolves to this node: for the browser the page is of the same origin.
        ("evil.example:4151", {SITE: "same-origin", ORIGIN: "http://evil.example:4151"}),
        ("evil.example:4151", {SITE: "same-origin"}),
        ("evil.example", {SITE: "same-origin", ORIGIN: "https://queue.example"}),
        # A name that resolves to a proxy which rewrites Host: browsers send no Sec-Fetch-Site over plain HTTP.
        ("127.0.0.1:4151", {ORIGIN: "http://evil.example"}),
        # A page of another port of this host, and one that the user opened in a frame of another site.
        ("10.0.0.1:4151", {SITE: "same-site", ORIGIN: "http://10.0.0.1:3000"}),
        ("127.0.0.1:4151", {SITE: "none", ORIGIN: "null"}),
        ("127.0.0.1.evil.example:4151", {SITE: "same-origin"}),
        ("", {SITE: "same-origin"}),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_a_page_of_another_site_is_refused(method: str, host: str, headers: dict[str, str]) -> None:
    assert refusal(method, {"Host": host, **headers}, NAMES)
    assert not refusal("GET", {"Host": host, **headers}, NAMES)


@pytest.mark.parametrize(
    ("host", "headers"),
    [
        ("anything", {}),  # programs
        ("127.0.0.1:4151", {SITE: "same-origin", ORIGIN: "http://127.0.0.1:4151"}),
        ("[::1]:4151", {SITE: "same-origin", ORIGIN: "http://[::1]:4151"}),
        # A proxy for https://queue.example that sends Host as nginx does unless it is told otherwise.
        ("127.0.0.1:4151", {SITE: "same-origin", ORIGIN: "https://queue.example"}),
        ("broker-1:4151", {SITE: "Same-Origin", ORIGIN: "https://queue.example"}),
        ("localhost:4151", {SITE: "none"}),  # typed by the user, or of an extension
        ("Broker-1:4151", {SITE: "same-origin", ORIGIN: "http://broker-1:4151"}),
    ],
)
def test_programs_and_pages_of_this_node_pass(host: str, headers: dict[str, str]) -> None:
    assert not refusal("POST", {"Host": host, **headers}, NAMES)


@pytest.mark.parametrize(
    "host", ["localhost", "dev.localhost:1", "10.0.0.1", "10.0.0.1:4151", "[fe80::1]", "broker-1."]
)
def test_names_of_this_node(host: str) -> None:
    assert is_ours(host, NAMES)


@pytest.mark.parametrize(
    "host", ["", "localhost.example", "broker-1.example:4151", "broker-10", "[broker-1]:1", "300.0.0.1"]
)
def test_names_of_others(host: str) -> None:
    assert not is_ours(host, NAMES)
