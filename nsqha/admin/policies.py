"""Policies of channels in the messages of the Admin service."""

from __future__ import annotations

from typing import Any

from nsqha.election.model import ChannelList
from nsqha.election.policy import EVERY_CHANNEL, ChannelPolicy
from nsqha.pb.v1 import admin_pb2


def changes_of(request: Any) -> dict[str, Any]:
    """What an UpdateChannelPolicyRequest changes; None clears a field. ValueError if it changes nothing, or one field
    twice."""
    changes: dict[str, Any] = policy_of(request.set).said
    for name in request.clear:
        if changes.get(name) is not None:
            raise ValueError(f"{name} is both set and cleared")
        changes[name] = None
    if not changes:
        raise ValueError("nothing to change: neither a field that is set nor one that is cleared")
    return changes


def policy_of(message: Any) -> ChannelPolicy:
    """ValueError for what is out of range."""
    return ChannelPolicy(**{field.name: value for field, value in message.ListFields()})


def message_of(policy: ChannelPolicy) -> Any:
    return admin_pb2.ChannelPolicy(**policy.said)


def policies_of(channels: ChannelList, channel: str) -> Any:
    """The answer about one channel, or `*`."""
    own = ChannelPolicy() if channel == EVERY_CHANNEL else channels.own_policy(channel)
    return admin_pb2.ChannelPolicyResponse(policy=message_of(own), default_policy=message_of(channels.defaults))
