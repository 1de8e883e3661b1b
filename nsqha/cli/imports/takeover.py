"""Carrying a layout out at a broker, so that a kill at any moment loses nothing.

Where it is, is in a file of its own: per topic the level and how many of its messages are acknowledged. It is written
after each acknowledged run, so after a kill or an unknown outcome one run of at most `RUN_MESSAGES` comes twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import islice

from nsqha.cli.imports.http_target import HttpTarget
from nsqha.cli.imports.layout import TopicLayout
from nsqha.cli.imports.nsqd_folder import NsqdFolder, Queued, read_file
from nsqha.cli.terminal import exits

RUN_MESSAGES = 200
RUN_BYTES = 256 << 10
STATE_BYTES_MAX = 256 << 20


class ImportState:
    """How far an import is, in a file."""

    def __init__(self, path: str, folder: NsqdFolder, target: str) -> None:
        self.path = path
        self.begun: dict[str, list[int]] = {}  # topic -> level, messages of it that are acknowledged
        self._head = {"source": folder.path, "target": target, "files": folder.fingerprint()}
        try:
            found = json.loads(read_file(path, STATE_BYTES_MAX))
            if any(found[key] != value for key, value in self._head.items()):
                why = "is of an import of another folder, to another broker, or nsqd has written to the folder since"
                raise exits.Exit(exits.CONFLICT, f"{path} {why}; to begin from the start, name another with --state")
            self.begun = found["topics"]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise exits.Exit(exits.FAILED, f"{path} cannot be read as the state of an import: {error}") from None

    def reached(self, topic: str, level: int, published: int) -> None:
        """Note it; on disk when this returns."""
        self.begun[topic] = [level, published]
        new = f"{self.path}.new"
        try:
            with open(new, "w", encoding="utf-8") as file:
                json.dump({**self._head, "topics": self.begun}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
        except OSError as error:
            raise exits.Exit(exits.FAILED, f"--state {self.path} cannot be written: {error.strerror}") from None


def take_over(
    folder: NsqdFolder, layout: TopicLayout, target: HttpTarget, state: ImportState, told: Callable[[int], None]
) -> None:
    """Bring a topic over, from where `state` says; `told` hears how many messages each run had."""
    topic = layout.topic.name
    level, published = state.begun.get(topic, [0, 0])
    if topic not in state.begun:
        state.reached(topic, 0, 0)  # before the topic exists: afterwards it is known to be ours
    while level <= layout.last:
        if level == 0:
            target.create_topic(topic)
        if level < layout.last:
            channel = layout.channels[level]
            target.create_channel(topic, channel)
            if layout.topic.channels[channel].paused:
                target.pause_channel(topic, channel)
        elif layout.topic.paused:
            target.pause_topic(topic)  # what waits in the topic then goes on waiting there
        for run in _runs(islice(layout.published(folder, level), published, None)):
            target.publish(topic, [message.body for message in run])
            published += len(run)
            state.reached(topic, level, published)
            told(len(run))
        level, published = level + 1, 0
        state.reached(topic, level, published)


def _runs(messages: Iterator[Queued]) -> Iterator[list[Queued]]:
    run: list[Queued] = []
    size = 0
    for message in messages:
        if run and (len(run) == RUN_MESSAGES or size + len(message.body) > RUN_BYTES):
            yield run
            run, size = [], 0
        run.append(message)
        size += len(message.body)
    if run:
        yield run
