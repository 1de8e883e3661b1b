"""How verbs reach brokers.

Downwards:

    v2client    a small NSQ V2 client on a blocking socket
    v2security  TLS and AUTH of that client
    admin       the gRPC administration
"""
