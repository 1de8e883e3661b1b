"""The NSQ V2 protocol as calls: bytes in, calls of a handler out; no socket, clock or loop.

Downwards:

    session      one client's side of the protocol: bytes in, calls of a handler out
    handler      what a session asks of the shell
    mpub         the body of an MPUB while it arrives
    identify     IDENTIFY: what the client asks for, and what it gets
    compression  Snappy and deflate, bounded
    errors       error texts as whole frames
    encoder      other frames that the server sends
    words        numbers and names in a command line
    limits       what a client may ask for
"""
