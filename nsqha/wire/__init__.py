"""The NSQ V2 protocol as calls: bytes in, calls of a handler out; no socket, clock or loop.

Downwards:

    session      one client's side of the protocol: bytes in, calls of handlers out
    commands     what each command checks, and which call it becomes
    handler      what a session asks of the shell
    unread       bytes that were received and not consumed
    mpub         the body of an MPUB while it arrives
    identify     IDENTIFY: what the client asks for, and what it gets
    compression  Snappy and deflate, bounded
    errors       error texts as whole frames
    encoder      other frames that the server sends
    words        numbers and names in a command line
    limits       what a client may ask for
"""
