"""Followers whose logs became others than they were, and no checksum told: what nodes of the simulation do not come to.

Every entry has a CRC, so a disk that is only damaged is noticed before. That logs are compared by chains, and that
nothing committed is cut, holds without that.
"""

from __future__ import annotations

import pytest

from tests.unit.replication.tiny import Tiny
from tests.unit.replication.tiny_parts import Stream

A, B, C = 1, 2, 3


def opened(tiny: Tiny, leader: int, follower: int) -> Stream:
    """A stream, up to the first answer."""
    tiny.connect(leader, follower)
    leading = tiny.nodes[leader].leading
    assert leading is not None
    stream = leading.streams[follower]
    tiny.arrives(stream)
    tiny.returns(stream)
    return stream


def run(tiny: Tiny) -> None:
    """Messages travel until none is left."""
    while any(stream.down or stream.up for stream in tiny.streams):
        for stream in list(tiny.streams):
            while stream.down and not stream.closed:
                tiny.arrives(stream)
            while stream.up and not stream.closed:
                tiny.returns(stream)


def rot(tiny: Tiny, node: int, log_id: int) -> None:
    """The entry becomes another one."""
    log = tiny.nodes[node].log
    log[log_id] = log[log_id]._replace(crc=0xBAD, chain=0xBAD)


def chains(tiny: Tiny, node: int) -> list[int]:
    return [entry.chain for entry in tiny.nodes[node].log]


@pytest.fixture
def tiny() -> Tiny:
    made = Tiny(sync_always=False)
    made.become(A)
    return made


def test_equal_numbers_are_no_proof(tiny: Tiny) -> None:
    """b has another entry 2. The next batch does not fit its chain, and b looks below."""
    streams = [opened(tiny, A, B), opened(tiny, A, C)]
    tiny.write(A)
    tiny.write(A)
    for _ in range(2):
        tiny.arrives(streams[0])
    rot(tiny, B, 2)
    tiny.cut(streams[0])
    tiny.write(A)
    stream = opened(tiny, A, B)
    assert tiny.trace[-1] == "b opened at 3 with another past"
    tiny.arrives(stream)
    assert tiny.trace[-1] == "b refuses: mismatch at 3"
    tiny.returns(stream)
    opened(tiny, A, B)
    assert tiny.trace[-2:] == ["b cuts at 1", "b opened at 1"]
    run(tiny)
    assert chains(tiny, B) == chains(tiny, A) and tiny.nodes[A].committed == 4


def test_what_is_known_to_be_committed_is_never_cut(tiny: Tiny) -> None:
    """The partition stops instead."""
    opened(tiny, A, B), opened(tiny, A, C)
    for _ in range(3):
        tiny.write(A)
    run(tiny)
    tiny.write(A)
    run(tiny)
    tiny.elect(C, keep=True)
    tiny.become(C)
    rot(tiny, B, 4)
    with pytest.raises(AssertionError, match="asked to cut the log at 1, and everything below 4 is committed"):
        opened(tiny, C, B)
    assert len(tiny.nodes[B].log) == 5
