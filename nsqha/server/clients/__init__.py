"""NSQ clients: their connections, what they may do, what they publish and where they subscribe.

Downwards:

    connection   one client's socket: commands in, replies and messages out
    subscribe    consumers find their place at a topic's channel, and leave it
    publish      where a publish goes; publishes by HTTP and gRPC
    heartbeat    whether a client is still there
    permissions  what one connection may do
    auth         what the auth server says of a secret
"""
