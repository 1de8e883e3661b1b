"""Scenes among replicas as scripts: what is done at the margin, what comes of it indented below.

    # A member that is gone leaves the ISR.
    nodes a b c
    lead a
      a leads epoch 1 from 1
    ...

The commands drive the tiny cluster of the random histories (tests/unit/replication/tiny.py), whose decisions are the
product's; the lines below a command are all that happened, literally. Everything is checked after each command.

    nodes NAMES [isr NAMES] [min_isr N] [sync interval]
    elect N [keep]     the controller; `keep`: the old leader stays in the ISR
    lead N             the elected one promises and leads
    write N [COUNT]    batches
    open N M...        a stream from leader to follower, up to the first answer
    run                messages travel until none is left
    arrive N M         one message reaches the follower
    return N M         one answer reaches the leader
    sync N...          a disk round
    cut N M            the stream breaks
    pass SECONDS       time
    store              the oldest open compare-and-set reaches the store
    answer             ... and its outcome the leader
    unknown            the sender's deadline passes
    lose               it never reaches the store
    read N             the leader reads the record
    expel N            the controller removes a dead member
    kill N | crash N | wipe N | restart N
                       kill -9 | power cut, what was not synced is gone | the disk is replaced | and back
    rot N LOG_ID       the entry becomes another one, as if the disk had changed it and no checksum told; until the next
                       scene the checks of the cluster are off, as they are about disks that keep what they have
    forge N M          the next batch under way gets another content

`python -m tests.scripts.transcript FILE...` writes what happens now into the files; review the difference.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from tests.unit.replication.tiny import Tiny
from tests.unit.replication.tiny_parts import AppendMsg, Request, Stream
from tests.unit.replication.tiny_rules import check


class Player:
    """Reads commands, drives the cluster."""

    def __init__(self) -> None:
        self.tiny = Tiny()
        self.disks_keep = True

    def command(self, line: str) -> list[str]:
        """Do it; what happened."""
        word, *arguments = line.split()
        before = len(self.tiny.trace)
        if word == "nodes":
            self.nodes(arguments)
            return []
        try:
            getattr(self, word)(*arguments)
            self.tiny.look_all()
            if self.disks_keep:
                check(self.tiny)
        except AssertionError as wrong:
            self.tiny.say(f"! {wrong}")
        return self.tiny.trace[before:]

    def nodes(self, arguments: list[str]) -> None:
        keys = {"isr", "min_isr", "sync"}
        self.disks_keep = True
        starts = [i for i, word in enumerate(arguments) if word in keys] + [len(arguments)]
        names = arguments[: starts[0]]
        options = {arguments[i]: arguments[i + 1 : j] for i, j in pairwise(starts)}
        self.tiny = Tiny(
            len(names),
            min_isr=int(options.get("min_isr", ["2"])[0]),
            sync_always=options.get("sync") != ["interval"],
            members=len(options.get("isr", names)),
        )

    def _node(self, name: str) -> int:
        return next(uid for uid, node in self.tiny.nodes.items() if node.name == name)

    def _stream(self, leader: str, follower: str) -> Stream:
        leading = self.tiny.nodes[self._node(leader)].leading
        for stream in self.tiny.streams:
            if (stream.leader, stream.follower) == (self._node(leader), self._node(follower)):
                return stream
        assert leading is not None
        return leading.streams[self._node(follower)]

    def _request(self) -> Request:
        return self.tiny.requests[0]

    # ---- commands

    def elect(self, name: str, keep: str = "") -> None:
        assert self.tiny.electable(self._node(name)), f"{name} is not electable"
        self.tiny.elect(self._node(name), keep=bool(keep))

    def lead(self, name: str) -> None:
        assert self.tiny.may_become(self._node(name)), f"{name} may not lead"
        self.tiny.become(self._node(name))

    def write(self, name: str, count: str = "1") -> None:
        for _ in range(int(count)):
            self.tiny.write(self._node(name))

    def open(self, leader: str, *followers: str) -> None:
        for follower in followers:
            self.tiny.connect(self._node(leader), self._node(follower))
            stream = self._stream(leader, follower)
            self.tiny.arrives(stream)
            self.tiny.returns(stream)

    def run(self) -> None:
        while any(stream.down or stream.up for stream in self.tiny.streams):
            for stream in list(self.tiny.streams):
                while stream.down and not stream.closed:
                    self.tiny.arrives(stream)
                while stream.up and not stream.closed:
                    self.tiny.returns(stream)

    def arrive(self, leader: str, follower: str) -> None:
        self.tiny.arrives(self._stream(leader, follower))

    def sync(self, *names: str) -> None:
        for name in names:
            self.tiny.sync(self._node(name))

    def cut(self, leader: str, follower: str) -> None:
        self.tiny.cut(self._stream(leader, follower))

    def store(self) -> None:
        self.tiny.settle(next(request for request in self.tiny.requests if request.outcome is None))

    def answer(self) -> None:
        self.tiny.answer(next(request for request in self.tiny.requests if request.outcome is not None))

    def unknown(self) -> None:
        self.tiny.give_up(next(request for request in self.tiny.requests if not request.told))

    def lose(self) -> None:
        self.tiny.drop(self._request())

    def read(self, name: str) -> None:
        self.tiny.refresh(self._node(name))

    def expel(self, name: str) -> None:
        self.tiny.expel(self._node(name))

    def kill(self, name: str) -> None:
        self.tiny.kill(self._node(name))

    def crash(self, name: str) -> None:
        node = self.tiny.nodes[self._node(name)]
        self.tiny.crash(node.uid, node.durable)

    def wipe(self, name: str) -> None:
        self.tiny.wipe(self._node(name))

    def restart(self, name: str) -> None:
        self.tiny.restart(self._node(name))

    def rot(self, name: str, log_id: str) -> None:
        self.disks_keep = False
        log = self.tiny.nodes[self._node(name)].log
        log[int(log_id)] = log[int(log_id)]._replace(crc=0xBAD, chain=0xBAD)

    def forge(self, leader: str, follower: str) -> None:
        messages = self._stream(leader, follower).down
        message = messages.popleft()
        assert isinstance(message, AppendMsg)
        first, *others = message.entries
        messages.appendleft(replace(message, entries=(first._replace(crc=0xBAD), *others)))


def play(script: str) -> str:
    """The script with what happens now."""
    player = Player()
    # Two commands that are words of Python.
    setattr(player, "pass", lambda seconds: player.tiny.wait(float(seconds)))
    setattr(player, "return", lambda leader, follower: player.tiny.returns(player._stream(leader, follower)))
    lines: list[str] = []
    for line in script.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"  {happened}" for happened in player.command(line)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(play(path.read_text()))
