"""How verbs reach brokers.

Downwards:

    producers   the brokers that `pub`, `sub` and `tail` connect to
    v2client    a small NSQ V2 client on a blocking socket
    v2security  TLS and AUTH of that client
    admin       the gRPC administration
    discovery   from any one address to the other ports
    token       the token that verbs show
"""
