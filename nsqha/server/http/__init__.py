"""nsqd's HTTP API, and what people and monitors read there.

Downwards:

    api         publishing, administration, statistics, options, health
    debug       /debug/pprof
    server      NSQ's HTTP manners; aiohttp's server
    metrics     /metrics for Prometheus
    broker_api  what the HTTP side may ask of the broker
    text        the text form of /stats
    stats       immutable snapshots, and nsqd's /stats made of them
"""
