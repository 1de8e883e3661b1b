"""The channel list of a topic: what may be added to it, and which of the two kinds of channels is there.

A channel is one for consumers or a reader's; both share their names, so what is made must not be of the other kind.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

from nsqha import ids
from nsqha.election.model import ChannelList
from nsqha.errors import LimitReached, NotFound, WrongKind
from nsqha.server.partition.topic import Topic

READERS_MAX = 64  # reader channels of one topic: each holds its retention, and any reader may make them

Change = Callable[[ChannelList], ChannelList]


def wrong_kind(topic: str, channel: str, *, reader: bool) -> WrongKind:
    """Why a channel that is there, and is a reader's or not, does not do."""
    if reader:
        what = "is a reader's: it is moved by nsqha spark, not by consumers"
    else:
        what = "is one for consumers: a reader needs a channel of its own"
    return WrongKind(f"channel {channel} of topic {topic} {what}")


def check_kind(topic: Topic, channel: str, *, reader: bool) -> None:
    """WrongKind: the channel is there, and is of the other kind."""
    there = topic.is_reader(channel)
    if there not in (None, reader):
        raise wrong_kind(topic.name, channel, reader=there)


def check_there(topic: Topic, channel: str) -> None:
    """NotFound: the topic has no such channel."""
    if not topic.has_channel(channel):
        raise NotFound(f"there is no channel {channel} of topic {topic.name}")


async def add_channel(
    change: Callable[[Topic, Change], Awaitable[None]],
    rng: random.Random,
    topic: Topic,
    channel: str,
    *,
    reader: bool = False,
    channels_max: int = 0,
) -> None:
    """Into the record, by `change`; an #ephemeral one, which has no place there, into the logs that are led here.

    The logs of the others follow by `Topic.reconcile`. WrongKind: it is there, and of the other kind. LimitReached:
    there are READERS_MAX others for readers, or `channels_max` others (0: no limit)."""
    if ids.is_ephemeral(channel):
        _check_number(topic, topic.record.channels, channels_max)
        for partition in topic.led:
            if partition.serving:  # another leader's epoch may have only begun; it is asked again
                partition.cursors.requests.create_ephemeral(channel, ids.new_uid(rng))
        return
    uid = ids.new_uid(rng)

    def added(channels: ChannelList) -> ChannelList:
        there = channels.channels.get(channel)
        if there is None:
            if reader and sum(other.reader for other in channels.channels.values()) >= READERS_MAX:
                raise LimitReached(
                    f"topic {topic.name} has {READERS_MAX} reader channels, as many as there may be: delete one that "
                    f"is not used (nsqha channel delete)"
                )
            _check_number(topic, channels, channels_max)
            return channels.with_channel(channel, uid, reader=reader)
        if there.reader != reader:
            raise wrong_kind(topic.name, channel, reader=there.reader)
        return channels

    await change(topic, added)


def _check_number(topic: Topic, listed: ChannelList, channels_max: int) -> None:
    """LimitReached: there is no place for one more. Every change of the list is written with the whole list."""
    kept_here = set().union(*(partition.cursors.bounded for partition in topic.led))  # #ephemeral ones are in no record
    number = len(listed.channels) + len(kept_here.difference(listed.channels))
    if 0 < channels_max <= number:
        raise LimitReached(
            f"topic {topic.name} has {number} channels, as many as --max-topic-channels allows: delete one that is "
            "not used"
        )
