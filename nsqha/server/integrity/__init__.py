"""Batches that do not verify: where they are, which logs can be trusted, and how they are mended or given up.

Downwards:

    log_integrity   these parts put together, for one node
    mark_lost       an operator gives up what is damaged
    corrupt_ranges  batches of replicas that do not verify, until they are mended
    peer_repair     such ranges written again from another replica
    suspect_logs    how far the logs of this node can be vouched for
"""
