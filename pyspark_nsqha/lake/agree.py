"""One content for one name, where a store can neither create exclusively nor lock: Disk Paxos on objects.

    final?  --> vote (b, v) asked --> list --> vote (b, v) accepted + content --> list --> final? --> final
                                       |                                           |
                                       higher ballot: start over                   higher ballot: start over
                                       accepted votes: take over the content of the highest

pyarrow can upload, read, list and remove whole objects. That is enough for agreement: votes are registers that one
voter writes and all read (Gafni, Lamport: Disk Paxos, 2003). A ballot is a number and the voter's own random name, so
no two votes share a name, and no vote is ever replaced.

Why all voters that finish have the same content:

1. A voter finishes ballot b with v only if, after its accepted vote (b, v) was stored, no ballot above b was listed.
2. So a voter that begins a ballot c > b stored its `asked` vote after that listing began; it lists afterwards, and sees
   the accepted vote (b, v). By induction over ballots, every accepted vote above b has content v: its voter took the
   content of the highest accepted vote that it saw, which is b or one between b and c.
3. Hence of two that finish with b < c, the second has the first one's content; and only voters that finished write
   `final`, so all of them write the same bytes. It is never replaced by others, and never removed.
4. Votes are removed only when `final` is stored. A voter that missed a vote because it was removed listed after that,
   and reads `final` after its last listing: it finds it, and takes its content.

A voter that dies at any step, or whose upload takes effect long after it gave up, is only a slow voter: no step above
depends on a clock. A voter whose upload fails stops, since it is unknown whether it is stored; a retry is another
voter, and may complete what the first one proposed. Two that always overtake each other would never finish, so a voter
that was overtaken pauses for a random time.

The store must show an acknowledged upload in every listing and every read that begins afterwards: S3, Google Cloud
Storage, Azure and HDFS promise that.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import Any, Literal, NamedTuple

FINAL = ""  # the name that is agreed on; all others are votes
_VOTE = re.compile(r"(\d{10})\.([0-9a-zA-Z]+)\.(asked|accepted)")


class Step(NamedTuple):
    """The next operation; `list` is answered with names of votes, `read` with bytes or None."""

    kind: Literal["list", "read", "write", "remove", "pause"]
    name: str = FINAL
    data: bytes = b""


class Vote(NamedTuple):
    """The parsed name of a vote. Votes sort by ballot."""

    number: int
    voter: str
    accepted: bool

    @property
    def ballot(self) -> tuple[int, str]:
        return self.number, self.voter

    @property
    def name(self) -> str:
        return f"{self.number:010d}.{self.voter}.{'accepted' if self.accepted else 'asked'}"


def votes(names: Iterable[str]) -> list[Vote]:
    """The names that are votes, parsed."""
    found = [_VOTE.fullmatch(name) for name in names]
    return [Vote(int(one[1]), one[2], one[3] == "accepted") for one in found if one]


def agree(mine: bytes, voter: str) -> Generator[Step, Any, bytes]:
    """Return the content that all agree on: `mine`, or another voter's. `voter` is a name that no other ever has."""
    number = 0
    while True:
        final: bytes | None = yield Step("read")
        if final is not None:
            return final
        seen = votes((yield Step("list")))
        number = 1 + max([number, *(vote.number for vote in seen)])
        yield Step("write", Vote(number, voter, False).name, b"1")
        seen = votes((yield Step("list")))
        if _overtaken(seen, number, voter):
            yield Step("pause")
            continue
        content: bytes | None = mine
        if accepted := [vote for vote in seen if vote.accepted]:
            content = yield Step("read", max(accepted).name)
            if content is None:
                continue  # it was removed after `final` was stored
        yield Step("write", Vote(number, voter, True).name, content or b"")
        seen = votes((yield Step("list")))
        if _overtaken(seen, number, voter):
            yield Step("pause")
            continue
        final = yield Step("read")
        if final is not None:
            return final
        yield Step("write", FINAL, content or b"")
        for vote in seen:
            yield Step("remove", vote.name)
        return content or b""


def _overtaken(seen: Iterable[Vote], number: int, voter: str) -> bool:
    """Whether another voter has a higher ballot."""
    return any(vote.ballot > (number, voter) for vote in seen)
