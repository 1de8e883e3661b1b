"""The comparison of channel states in a running broker finds one that is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import patch

from nsqha import hot
from nsqha.server.node.broker import Broker
from tests.jepsen.switches import states
from tests.unit.server.broker_rig import led, running, subscribed


def test_a_state_that_is_not_what_the_log_says_is_found(tmp_path: Path) -> None:
    async def story() -> None:
        with patch.object(Broker, "__init__", Broker.__init__):
            asked = states.StatesFile(tmp_path / "states")
            states.follow(asked.path)
            async with running(tmp_path / "node") as broker:
                await subscribed(broker, "t", "c")
                for _ in range(3):
                    await broker.publishing.publish("t", hot.frame(b"m"))
                assert await asyncio.to_thread(asked.wrong, 10) == []
                led(broker).cursors.state.channels["c"].floor = 1
                (wrong,) = await asyncio.to_thread(asked.wrong, 10)
                assert wrong.startswith("t/0: ") and "'channel c'" in wrong
                led(broker).cursors.state.channels["c"].floor = 0

    asyncio.run(story())
