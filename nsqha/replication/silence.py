"""Whether another node is heard: a failure detector that counts looks, not seconds.

    something came since the last look --> 0 looks     quiet for ASK_LOOKS --> pinged     for SILENT_LOOKS --> silent

The answer to a ping is the work of the other node's loop. So one that has nothing to say is heard, and one whose
process stands, or whose host is cut off, is not.

The witness has to be fit itself. A look that comes late says that this process did not run: what it was sent may be
unread, and perhaps the whole machine stood, the other node with it. The count begins anew. So whoever calls another
node silent has run all the time, and looked SILENT_LOOKS times in vain.
"""

from __future__ import annotations

LOOK_SECONDS = 0.1  # between two looks
LATE_SECONDS = 0.25  # after the look before: too late
ASK_LOOKS = 2
SILENT_LOOKS = 10


class LookTimes:
    """When one process has looked."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = 0.0

    def late(self, now: float) -> bool:
        """Note a look; return whether it came late. Monotonic seconds."""
        before, self._last = self._last, now
        return now - before > LATE_SECONDS


class SilenceDetector:
    """What one process hears on one stream that is open."""

    __slots__ = ("_asked", "_heard", "looks")

    def __init__(self) -> None:
        self.looks = 0  # in a row, since something came, that were not late
        self._heard = -1.0
        self._asked = False  # and nothing has come since

    def look(self, heard: float, *, late: bool) -> bool:
        """Count a look. `heard`: when something came last, by any clock. True: the other side is to be pinged now."""
        if heard != self._heard:
            self._heard = heard
            self._asked = False
            self.looks = 0
        elif late:
            self.looks = 0
        else:
            self.looks += 1
        if self._asked or self.looks < ASK_LOOKS:
            return False
        self._asked = True
        return True

    def reset(self) -> None:
        """Nobody listens for now."""
        self.looks = 0

    @property
    def silent(self) -> bool:
        """Whether it has been quiet for so long that it counts as silent."""
        return self.looks >= SILENT_LOOKS
