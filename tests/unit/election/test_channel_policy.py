"""Policies of channels in the metadata record."""

from __future__ import annotations

import json

import pytest

from nsqha.election.codec import decode, encode
from nsqha.election.model import ChannelInfo, ChannelList, TopicRecord
from nsqha.election.policy import AS_NSQD, FIELDS, ChannelPolicy
from nsqha.errors import Conflict, NotFound

LIST = ChannelList().with_channel("a", 1).with_channel("b", 2)


def test_what_a_channel_does_not_say_is_looked_up():
    listed = LIST.with_policy("*", {"retry_ms": 5000, "retry_factor": 1.0}).with_policy("a", {"retry_ms": 1000})
    found = listed.policy_in_force("a")
    assert found["retry_ms"] == (1000, "channel")
    assert found["retry_factor"] == (1.0, "*")
    assert found["retry_jitter"] == (0.2, "default")
    assert listed.policy_in_force("b")["retry_ms"] == (5000, "*")
    assert listed.policy_in_force("x#ephemeral")["retry_ms"] == (5000, "*")
    assert set(AS_NSQD.said) == set(FIELDS) - {"max_attempts", "max_depth", "ttl_ms"}, (
        "every field has a default, or no bound"
    )
    assert found["max_depth"] == (None, "default")


def test_each_change_is_a_version_and_none_is_not():
    changed = LIST.with_policy("a", {"retry_ms": 1000})
    assert changed.version == LIST.version + 1
    assert changed.with_policy("a", {"retry_ms": 1000}) is changed
    assert changed.with_policy("a", {"retry_ms": None}).own_policy("a") == ChannelPolicy()
    again = changed.without_channel("a").with_channel("a", 3)
    assert again.own_policy("a") == ChannelPolicy(), "a new channel of the name says nothing"


def test_who_expected_something_else_is_told():
    changed = LIST.with_policy("a", {"retry_ms": 1000}, expected=ChannelPolicy())
    with pytest.raises(Conflict, match="says retry_ms=1000 now"):
        changed.with_policy("a", {"retry_ms": 2000}, expected=ChannelPolicy())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"retry_ms": -1}, "retry_ms is -1"),
        ({"retry_max_ms": 8760 * 3_600_000 + 1}, "retry_max_ms is"),
        ({"retry_factor": 0.9}, "it must be 1.0 to 10.0"),
        ({"retry_factor": float("nan")}, "retry_factor is nan"),
        ({"retry_jitter": 1.1}, "retry_jitter is 1.1"),
        ({"retry_ms": 2000, "retry_max_ms": 1000}, "cannot be less than retry_ms, 2000"),
        ({"retrys": 1}, "no field retrys; there are retry_ms"),
        ({"unknown": {}}, "no field unknown"),
        ({"retry_ms": "1s"}, "retry_ms is '1s'; it must be a whole number"),
        ({"retry_ms": 1.5}, "retry_ms is 1.5; it must be a whole number"),
        ({"retry_ms": True}, "retry_ms is True; it must be a whole number"),
        ({"retry_instead": 1}, "retry_instead is 1; it must be true or false"),
        ({"skip": "yes"}, "skip is 'yes'; it must be true or false"),
        ({"ttl_ms": 999}, "ttl_ms is 999; it must be 1000 to"),
        ({"max_depth": 0}, "max_depth is 0; it must be 1 to"),
        ({"max_depth": (1 << 40) + 1}, "max_depth is"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], why: str):
    with pytest.raises(ValueError, match=why):
        LIST.with_policy("a", changes)


def test_channels_without_a_policy():
    with pytest.raises(NotFound):
        LIST.with_policy("c", {"retry_ms": 1})
    with pytest.raises(ValueError, match="is a reader's"):
        LIST.with_channel("r", 5, reader=True).with_policy("r", {"retry_ms": 1})


def test_only_what_is_said_is_written():
    plain = json.loads(encode(TopicRecord("t", 1, 2, channels=LIST)))["channels"]
    assert plain["channels"]["a"] == {"uid": 1, "paused": False, "reader": False}
    assert "defaults" not in plain
    changed = LIST.with_policy("*", {"retry_jitter": 0.5}).with_policy("b", {"retry_ms": 7})
    data = encode(TopicRecord("t", 1, 2, channels=changed))
    plain = json.loads(data)["channels"]
    assert plain["defaults"] == {"retry_jitter": 0.5}
    assert plain["channels"]["b"]["policy"] == {"retry_ms": 7}
    assert decode(TopicRecord, data).channels == changed


def test_a_field_of_a_newer_version_stays():
    data = {"format": 1, "name": "t", "uid": 1, "salt": 2}
    data["channels"] = {"channels": {"a": {"uid": 1, "policy": {"trace": 5}}}}  # type: ignore[assignment]
    found = decode(TopicRecord, json.dumps(data).encode())
    assert json.loads(encode(found))["channels"]["channels"]["a"]["policy"] == {"trace": 5}
    changed = found.channels.with_policy("a", {"retry_ms": 1})
    assert changed.channels["a"] == ChannelInfo(1, policy=ChannelPolicy(1, unknown={"trace": 5}))


def test_an_import_keeps_what_was_asked():
    """It writes the list of a single node above every copy that a log has (`cluster import`)."""
    asked = LIST.with_policy("a", {"retry_ms": 7}).with_policy("*", {"skip": True}).above(40)
    assert (asked.version, asked.own_policy("a").said, asked.defaults.said) == (41, {"retry_ms": 7}, {"skip": True})
