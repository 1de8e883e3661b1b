"""How nodes talk to each other: calls by gRPC, streams by an HTTP/2 endpoint on the loop.

Downwards:

    listener        the peer port, where streams between nodes arrive
    renewing        certificates that are renewed while connections live
    calls           streams and calls over gRPC
    peer_calling    the end of a stream that opens it
    peer_accepting  the end of a stream that accepts it
    peer_http2      what both ends do on their connection
    stream          what both ends of a stream do alike
    http2           frames and headers of HTTP/2
    dialling        where to connect to, and whether to try
    identity        who may ask what, by certificate
    api             how nodes talk, without saying over what
"""
