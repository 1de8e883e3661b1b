"""NSQ clients: their connections, what they may do, what they publish and where they subscribe.

Downwards:

    figures           one connection as a record for the statistics
    connection        one client's socket: bytes in to the session, replies and messages out; all clients of the node
    consuming         the SUB of a client, and its window
    negotiation       IDENTIFY and AUTH: what client and server agree on
    client_publisher  what a client publishes, and where to
    flow              one command after the other: what makes the next one wait, and the end
    transport         the transport, with TLS and compression over it
    context           what connections work with
    unfinished        what unfinished commands of all clients hold together
    subscribe         consumers find their place at a topic's channel, and leave it
    publish           where a publish goes; publishes by HTTP and gRPC
    heartbeat         whether a client is still there
    auth              what the access file or the auth server says of a secret, and what one connection may do
    token_auth        tokens of the access file as secrets of AUTH
"""
