"""Administration over gRPC (`proto/nsqha/v1/admin.proto`): the broker's own API with plans before acts.

Downwards:

    service      each RPC is one call of the broker; the gRPC listener of a node
    describe     descriptions of topics and channels, from all nodes
    segments     the Segments service: snapshots, holds, reader channels
    peeking      stored messages of all partitions, merged by time
    replay       seek and undo: from times and ids to offsets, and what that would cost
    messages     single messages of a channel: looked at, and changed
    skipping     lets stopped channels continue, and gives up what no replica has
    call_counts  how many calls were answered, by method and status
    access       whether the caller has permission, and whether the request can be read
    fan_out      sends a request about a topic to the leader of each partition
    topic_request  such a request: which partitions it concerns, and what one of them answers
    policies     policies of channels in messages
    answers      an RPC that fails: errors as gRPC status codes
    peer_admins  the same services of the other nodes
"""
