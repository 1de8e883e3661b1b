"""What everything above runs on: disk rounds, journal, cache, metadata, budget, tasks, TLS, listening sockets.

Downwards:

    cache         the cache of channel state, kept a second behind
    journal       what is staged in the node's journal reaches the disk
    disk          disk rounds: fdatasync for all partitions, off the loop
    metadata      the metadata store as the loop sees it
    budget        how many bytes of publishes may be under way
    changes       changes of a topic one at a time, and to their end
    whole         work that ends once it has begun
    unfinished    work that may take for ever: one piece of each thing at most, and callers that wait no longer
    background    tasks whose failure is logged
    certificates  certificate files, read again when they change
    tls           TLS from nsqd's flags
    listen        listening sockets with nsqd's idea of an address
    process       what this process uses
    diskspace     how much room the data directory has
    measures      histograms and counters that the node gathers
"""
