"""What the publishes of one partition that wait for a batch agree on; the queue itself is in `nsqha.hot`.

    publish -> add -> [the flush] -> take -> Taken, the next batch

What is taken together becomes one batch, at most `BATCH_BYTES` of it unless a single run is larger.
"""

from __future__ import annotations

from nsqha.hot._publishing_py import Reply, Taken, Waiter

__all__ = ["BATCH_BYTES", "NOT_STORED", "OUTCOME_UNKNOWN", "Reply", "Taken", "Waiter"]

BATCH_BYTES = 512 << 10  # merging stops here

# How every reason begins that a publish is answered with; the first is a promise that it may be sent again.
NOT_STORED = "not stored: "
OUTCOME_UNKNOWN = "outcome unknown: "
