"""What everything above runs on: disk rounds, journal, cache, metadata, budget, tasks, TLS, listening sockets.

Downwards:

    cache         the cache of channel state, kept a second behind
    journal       what is staged in the node's journal reaches the disk
    disk          disk rounds: fdatasync for all partitions, off the loop
    metadata      the metadata store as the loop sees it
    budget        how many bytes of publishes may be under way
    tasks         work that goes on whatever becomes of its callers, and changes of a topic one at a time
    backoff       how long an owner waits before it tries again
    certificates  certificate files, read again when they change
    tls           TLS from nsqd's flags
    listen        listening sockets with nsqd's idea of an address
    measures      what the node counts, what room its disk has, what its process uses
"""
