"""Our broker with the progress of channels in the log as late as it once was: what writing it soon costs.

    python -m benchmarks -k latency-1000 --peer 'late=>.venv/bin/python -m benchmarks.late_progress --sync={sync}'

Progress rides with published batches at most every 0.1 s and is written alone after 1 s, instead of 0.004 and 0.05, and
never with the FINs (`nsqha.cursor.limits`): a killed process repeats more of what was finished. All else is the same
broker.
"""

from __future__ import annotations

from functools import partial

from nsqha.cli import nsqd
from nsqha.cursor.limits import ChannelLimits
from nsqha.server.opening import opener

if __name__ == "__main__":
    late = partial(
        ChannelLimits, progress_soon_s=0.1, progress_interval_s=0.1, progress_alone_s=0.0, progress_idle_s=1.0
    )
    setattr(opener, "ChannelLimits", late)  # noqa: B010 - it is a name that the module only imports
    nsqd.main()
