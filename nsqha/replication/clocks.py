"""Which time it is, when the wall clocks of nodes, or one of them, can not be believed.

    own clock, PeerClocks --look--> what most nodes agree on --> anchor --> wall_ns: within `bound_ns` of the anchor

A wall clock is compared as what it is ahead of this process's monotonic clock, so that a step of the own one changes
nothing of what is known of the others. The anchor is such a difference too, and goes on by the monotonic clock between
two looks: all that takes its time from a `BoundedClock` (stamps of batches, due times, retention, the policy for
abandoned channels) sees a step of any size as one of `bound_ns` at most.

    most nodes agree      the anchor follows them, at once the first time; a step of all of them only after STEP_SECONDS
    alone                 they are this node: a step counts when it has lasted STEP_SECONDS, or after a restart
    no majority agrees    the anchor follows only small changes of the own clock

`trusted` says whether files may go by time. What is not detected: most nodes that are wrong in the same way from their
start, and a node alone that starts with a wrong clock. A process that stood still with its monotonic clock (a virtual
machine that was suspended) sees a step, and lags for STEP_SECONDS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from nsqha.clock import Clock

FRESH_SECONDS = 20.0  # what was heard of a peer counts for so long
EXACT = 0.05  # of the bound: an answer that took longer is worse than one of a while ago
STEP_SECONDS = 600.0  # a step of the time that most agree on is believed when it has lasted for so long
BEYOND_LOOKS = 5  # that find the own clock beyond the bound, about a second apart, until others are to lead
CALM_LOOKS = 10  # that do not, until this node may lead again
UNKNOWN_LOOKS = 60  # without the clocks of most nodes, until that is a reason to warn


def agreed(aheads: Sequence[int], members: int, bound_ns: int) -> int | None:
    """What more than half of `members` nodes agree on within the bound; None: there is no such time.

    The values in the middle are looked at: what a majority agrees on lies around one of them."""
    ordered = sorted(aheads)
    for middle in {ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]} if ordered else ():
        if 2 * sum(abs(ahead - middle) <= bound_ns for ahead in ordered) > members:
            return middle
    return None


class PeerClocks:
    """What the wall clocks of other nodes were ahead of this node's monotonic clock."""

    def __init__(self, bound_ns: int) -> None:
        self._bound = bound_ns
        self._heard: dict[int, tuple[float, int, int]] = {}  # node -> (when, ahead, within what that is so, in ns)

    def heard(self, node: int, wall_ns: int, *, asked: float, answered: float) -> None:
        """A peer's wall clock, read somewhere between two moments of ours: half way, as NTP takes it.

        It is so within half of what the answer took. One that took longer than the bound says nothing; one that took
        longer than EXACT of it is left out while something more exact is known: the other node stood still, or we."""
        error = round((answered - asked) / 2 * 1e9)
        if 2 * error > self._bound:
            return
        when, _, exact = self._heard.get(node, (0.0, 0, error))
        if 2 * error > EXACT * self._bound and exact < error and self._fresh(when, answered):
            return
        self._heard[node] = answered, wall_ns - round((asked + answered) / 2 * 1e9), error

    def _fresh(self, at: float, now: float) -> bool:
        return now - at <= FRESH_SECONDS

    def keep(self, nodes: Collection[int]) -> None:
        """The others are gone."""
        self._heard = {node: heard for node, heard in self._heard.items() if node in nodes}

    def aheads(self, mono: float) -> dict[int, int]:
        """Those that are not too old."""
        return {node: ahead for node, (at, ahead, _) in self._heard.items() if self._fresh(at, mono)}


class BoundedClock:
    """The clock of one node: its wall clock as far as it is not beyond the bound; a bound of 0 checks nothing."""

    def __init__(self, clock: Clock, bound_ns: int) -> None:
        self.monotonic: Callable[[], float] = clock.monotonic
        self.raw_wall_ns: Callable[[], int] = clock.wall_ns
        self.wall_ns: Callable[[], int] = self._bounded if bound_ns else clock.wall_ns
        self.peers = PeerClocks(bound_ns)
        self.trusted = True
        self.off_ns: int | None = 0  # what the own clock is ahead of most nodes; None: no majority agrees
        self.bound_ns = bound_ns
        self._anchor = self.own_ahead()
        self._compared = False  # most nodes have agreed once
        self._step: tuple[float, int] | None = None  # since when they agree on what
        self._since = clock.monotonic()

    def own_ahead(self) -> int:
        """What the own wall clock, as it is, is ahead of the monotonic one."""
        return self.raw_wall_ns() - round(self.monotonic() * 1e9)

    def compared_with(self, members: int) -> bool:
        """Whether the clocks of most of so many nodes are known, this one's included."""
        return 2 * (1 + len(self.peers.aheads(self.monotonic()))) > members

    def offsets(self) -> dict[int, int]:
        """What the clocks of peers are ahead of the own one, as it is."""
        own = self.own_ahead()
        return {node: ahead - own for node, ahead in self.peers.aheads(self.monotonic()).items()}

    def _bounded(self) -> int:
        wall, bound = self.raw_wall_ns(), self.bound_ns
        off = wall - round(self.monotonic() * 1e9) - self._anchor
        if -bound <= off <= bound:
            return wall
        return wall - off + (bound if off > 0 else -bound)

    def look(self, members: int = 1) -> None:
        """About once a second. `members`: nodes of the cluster that are alive, this one included."""
        if not self.bound_ns:
            return
        now, own = self.monotonic(), self.own_ahead()
        others = self.peers.aheads(now).values()
        most = agreed([own, *others], members, self.bound_ns)
        self.off_ns = None if most is None else own - most
        if most is None:
            if self._near(own, self._anchor):
                self._anchor = own
            self._step = None
            known = self._compared or now - self._since >= STEP_SECONDS
            self.trusted = known and all(self._near(own, other) for other in others)
            return
        self._follow(most, now, at_once=members > 1 and not self._compared)
        self._compared |= members > 1
        self.trusted = self._step is None

    def _follow(self, most: int, now: float, *, at_once: bool) -> None:
        if at_once or self._near(most, self._anchor):
            self._anchor, self._step = most, None
        elif self._step is None or not self._near(most, self._step[1]):
            self._step = now, most
        elif now - self._step[0] >= STEP_SECONDS:
            self._anchor, self._step = most, None

    def _near(self, one: int, other: int) -> bool:
        return abs(one - other) <= self.bound_ns


class SkewDecision:
    """Whether a node lets others lead because its clock is beyond the bound, with hysteresis."""

    def __init__(self) -> None:
        self.declines = False
        self._looks = 0  # in a row that speak against the present state

    def look(self, off_ns: int | None, bound_ns: int) -> bool:
        """One look; whether the decision changed. None, no majority agrees, is no reason to decline."""
        beyond = off_ns is not None and abs(off_ns) > bound_ns > 0
        self._looks = self._looks + 1 if beyond is not self.declines else 0
        if self._looks < (CALM_LOOKS if self.declines else BEYOND_LOOKS):
            return False
        self.declines, self._looks = beyond, 0
        return True


class DistrustNews:
    """When it is worth a line that time-based retention is paused, and that it goes on.

    A node that starts has not compared clocks yet, and trusts none: that ends within seconds and is no news. So looks
    are counted: those that had the clocks of most nodes, or many more without."""

    def __init__(self) -> None:
        self.said = False  # it was worth a line, and has not ended
        self._compared = 0  # looks in a row that do not trust the clock, with what most nodes say
        self._looks = 0  # ... all of them

    def look(self, *, trusted: bool, compared: bool) -> bool:
        """One look; whether there is news. `compared`: the clocks of most nodes are known."""
        if trusted:
            self._compared = self._looks = 0
            news, self.said = self.said, False
            return news
        self._looks += 1
        self._compared = self._compared + 1 if compared else 0
        if self.said or (self._compared < BEYOND_LOOKS and self._looks < UNKNOWN_LOOKS):
            return False
        self.said = True
        return True
