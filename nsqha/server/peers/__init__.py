"""How nodes talk to each other: calls by gRPC, streams by an HTTP/2 endpoint on the loop.

Downwards:

    listener        the peer port, where streams between nodes arrive
    renewing        certificates that are renewed while connections live
    calls           streams and calls over gRPC
    client_stream   a stream at the end that opens it
    server_stream   a stream at the end that accepts it
    http2_stream    what both ends do: one stream of gRPC on a connection of its own
    frame_budget    what one connection may cost: frames that carry nothing, and turns
    keepalive       pings after silence
    send_queue      messages on their way out, as flow control and the socket let them pass
    stream          messages, handler and end of a stream
    greeting        what both ends of a stream say first: levels, and proofs of the secret
    http2           frames and headers of HTTP/2
    dialling        where to connect to, and whether to try
    identity        who may ask what, by certificate
    api             how nodes talk, without saying over what
"""
