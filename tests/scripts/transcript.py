"""Scenes among replicas as scripts: what is done at the margin, what comes of it indented below.

    # A member that is gone leaves the ISR.
    nodes a b c
    lead a
      a promises epoch 1
      a leads epoch 1 from 1
    ...

The commands drive nodes of the simulation, which run the product's own code (`stage`); the lines below a command are
what happened, literally (`happenings`). The invariants of tests/sim are checked all the time; what breaks one is a
line that begins with "!".

    nodes NAMES [isr NAMES] [min_isr N] [sync interval] [led]
                       the first is elected; `led`: and leads, and all of the ISR have the first batch of its epoch
    controller         from now on there is one, and 3 seconds pass
    elect N [keep]     without one; `keep`: the old leader stays in the ISR
    succeed N          an operator asks the leader to hand over to this one
    lead N             the elected one hears of it
    read N             so does any other
    write N [COUNT]    messages are published there, each a batch of its own
    open N M...        the leader asks followers where they are, and hears it
    run                messages travel until none is left; those that open a stream stay
    arrive N M         one message reaches the follower
    return N M         one answer reaches the leader
    sync N...          a disk round ends
    cut N M            the streams break, and what is on them is lost
    pass SECONDS       time
    store              the oldest open compare-and-set reaches the store
    answer             ... and its outcome the leader
    unknown            the sender's deadline passes
    lose               it never reaches the store
    kill N | crash N | restart N
                       kill -9 | power cut, what was not synced is gone | and back
    forge N M          the batch that is under way arrives with another content

`python -m tests.scripts.transcript FILE...` writes what happens now into the files; review the difference.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.scripts.stage import Stage


class Player:
    """Reads commands, drives the cluster."""

    def __init__(self) -> None:
        self._stage: Stage | None = None

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "a scene begins with `nodes`"
        return self._stage

    def close(self) -> None:
        """The scene is over."""
        if self._stage is not None:
            self._stage.close()
            self._stage = None

    def command(self, line: str) -> list[str]:
        """Do it; what happened."""
        word, *arguments = line.split()
        if word == "nodes":
            self.close()
            self.nodes(arguments)
            return self.stage.happened.take()
        happened = self.stage.happened
        try:
            getattr(self, f"do_{word}")(*arguments)
            self.stage.settle()
        except AssertionError as wrong:
            happened.say(f"! {happened.named(str(wrong))}")
        return happened.take()

    def nodes(self, arguments: list[str]) -> None:
        keys = {"isr", "min_isr", "sync", "led"}
        starts = [i for i, word in enumerate(arguments) if word in keys] + [len(arguments)]
        names = arguments[: starts[0]]
        options = {arguments[i]: arguments[i + 1 : j] for i, j in pairwise(starts)}
        self._stage = Stage(
            names,
            isr=options.get("isr", names),
            min_isr=int(options.get("min_isr", ["2"])[0]),
            sync=options.get("sync", ["always"])[0],
        )
        if "led" in options:
            self.stage.begin()

    # ---- commands

    def do_controller(self) -> None:
        self.stage.start_controller()

    def do_elect(self, name: str, keep: str = "") -> None:
        self.stage.elect(name, keep=bool(keep))

    def do_succeed(self, name: str) -> None:
        self.stage.succeed(name)

    def do_lead(self, name: str) -> None:
        self.stage.read(name)

    do_read = do_lead

    def do_write(self, name: str, count: str = "1") -> None:
        for _ in range(int(count)):
            self.stage.write(name)

    def do_open(self, leader: str, *followers: str) -> None:
        for follower in followers:
            self.stage.open(leader, follower)

    def do_run(self) -> None:
        self.stage.run()

    def do_arrive(self, leader: str, follower: str) -> None:
        self.stage.let_go(leader, follower, back=False)

    def do_return(self, leader: str, follower: str) -> None:
        self.stage.let_go(leader, follower, back=True)

    def do_sync(self, *names: str) -> None:
        for name in names:
            self.stage.sync(name)

    def do_cut(self, a: str, b: str) -> None:
        self.stage.cut(a, b)

    def do_pass(self, seconds: str) -> None:
        self.stage.pass_time(float(seconds))

    def do_store(self) -> None:
        if (error := self.stage.changes.store()) is not None:
            self.stage.happened.say(f"the store refuses: {self.stage.happened.named(str(error))}")

    def do_answer(self) -> None:
        self.stage.changes.answer()

    def do_unknown(self) -> None:
        self.stage.changes.unknown()

    def do_lose(self) -> None:
        self.stage.changes.lose()

    def do_kill(self, name: str) -> None:
        self.stage.end(name)

    def do_crash(self, name: str) -> None:
        self.stage.end(name, power=True)

    def do_restart(self, name: str) -> None:
        self.stage.start(name)

    def do_forge(self, leader: str, follower: str) -> None:
        message: Any = self.stage.next_message(leader, follower, back=False)
        append = message.appends[0]
        append.data = append.data[:-1] + bytes([append.data[-1] ^ 1])
        self.stage.let_go(leader, follower, back=False, instead=message)


def play(script: str) -> str:
    """The script with what happens now."""
    player = Player()
    lines: list[str] = []
    try:
        for line in script.splitlines():
            if line.startswith(" "):
                continue
            lines.append(line)
            if line and not line.startswith("#"):
                lines += [f"  {happened}" for happened in player.command(line)]
    finally:
        player.close()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(play(path.read_text()))
