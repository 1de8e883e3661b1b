from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha.cursor import listing
from nsqha.cursor.listing import NO_CHANNELS, ChannelEntry, Listing

names = st.text(st.sampled_from("ab"), min_size=1, max_size=3)  # much alike, so that bytes are the same by chance
channels = st.dictionaries(names, st.builds(ChannelEntry, st.just(""), st.integers(0, 3), st.booleans()), max_size=9)


def in_order(found: dict[str, ChannelEntry]) -> Listing:
    return Listing.of(found[name]._replace(name=name) for name in sorted(found))


@settings(max_examples=500, deadline=None)
@given(channels, channels)
def test_a_listing_knows_what_another_one_does_not_have(before, after):
    old, new = in_order(before), in_order(after)
    gone, came = new.since(old)
    assert sorted(gone) == sorted({*old} - {*new})
    assert sorted(came) == sorted({*new} - {*old})


@settings(max_examples=500, deadline=None)
@given(channels, channels)
def test_a_listing_is_read_beside_another_one_as_without(before, after):
    new = in_order(after)
    read = Listing.read(new.entries, len(after), in_order(before))
    assert [*read] == [*new] and len(read) == len(after)
    assert read.changed({}) == Listing.read(new.entries, len(after), NO_CHANNELS)
    assert in_order({**before, **after}) == read.changed(
        {name: entry._replace(name=name) for name, entry in before.items() if name not in after}
    )


@settings(max_examples=500, deadline=None)
@given(channels, channels)
def test_a_changed_listing_is_as_one_that_is_made_anew(before, after):
    changes = {name: after[name]._replace(name=name) if name in after else None for name in {*before, *after}}
    changed = in_order(before).changed(changes)
    assert changed == in_order(after)
    assert changed.since(NO_CHANNELS) == ([], [*in_order(after)])


@settings(max_examples=500, deadline=None)
@given(channels, channels, st.data())
def test_bytes_that_do_not_fit_are_refused_whatever_is_known(before, after, data):
    entries = in_order(after).entries
    cut = entries[: data.draw(st.integers(0, len(entries)))]
    wrong = data.draw(st.sampled_from([cut, cut + b"\xff", entries + b"\0", entries]))
    count = data.draw(st.integers(0, 9))
    outcomes = []
    for known in (NO_CHANNELS, in_order(before), in_order(after)):
        try:
            outcomes.append([*Listing.read(wrong, count, known)])
        except (struct.error, UnicodeDecodeError):
            outcomes.append(None)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0] is None or len(outcomes[0]) == count


@pytest.mark.parametrize("size", [10, 1000])
def test_one_more_channel_is_all_that_is_looked_at(size, monkeypatch):
    rng = random.Random(1)
    entries = sorted(ChannelEntry(f"channel{n:04}", rng.getrandbits(63)) for n in range(size))
    looked_at = []
    original = listing._entries
    monkeypatch.setattr(listing, "_entries", lambda data: looked_at.append(len(data)) or original(data))
    for at in (0, size // 2, size - 1):
        one = entries[at]
        before = Listing.of(entry for entry in entries if entry is not one)
        after = before.changed({one.name: one})
        read = Listing.read(after.entries, size, before)
        assert read.since(before) == ([], [one])
        assert Listing.read(before.entries, size - 1, read).since(read) == ([one], [])
    assert max(looked_at) == len(Listing.of([one]).entries)
