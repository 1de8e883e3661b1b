"""Every route says what it needs, and the table has no route that is not there."""

from __future__ import annotations

import asyncio

import pytest

from nsqha.access.surfaces import BROKER_HTTP
from nsqha.errors import ConfigError
from nsqha.server.http.api import observed_routes, routes
from nsqha.server.http.server import HttpApi
from tests.unit.server.fake_broker import FakeBroker


async def handler(_: object) -> None:
    """Never called."""


def test_the_table_and_the_routes_agree() -> None:
    async def main() -> tuple[list[str], list[str]]:
        served = routes(FakeBroker())
        return served.names, observed_routes(FakeBroker(), served).names

    found, observed = asyncio.run(main())
    assert {*found} == {*BROKER_HTTP} and len(found) == len(BROKER_HTTP)
    assert {*observed} == {"GET /ping", "GET /healthz", "GET /readyz", "GET /startupz", "GET /metrics"}


def test_a_route_that_is_in_no_table_stops_the_start() -> None:
    api = HttpApi(BROKER_HTTP)
    api.add("GET", "/ping", handler)
    with pytest.raises(ConfigError, match=r"POST /ping is in no table of nsqha.access.surfaces: say there which role"):
        api.add("POST", "/ping", handler)


def test_without_a_table_a_route_is_for_administrators() -> None:
    api = HttpApi()
    api.add("GET", "/anything", handler)
    need = api.need("GET", "/anything")
    assert need is not None and not need.open and str(need) == "admin"
