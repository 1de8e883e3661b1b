"""nsqd's HTTP API, and what people and monitors read there.

Downwards:

    api         all routes and the listeners; statistics, options, health
    debug       /debug/pprof
    publishing  /pub and /mpub
    administration  /topic/... and /channel/...
    cluster_page  /cluster: the cluster as one daemon sees it
    failures    what a change that failed is answered
    server      NSQ's HTTP conventions; aiohttp's server
    streaming   JSON answers in parts, for what may be large
    reading     what a connection has sent and is not parsed yet: parts, and turns
    heads       heads of requests as Go takes them
    browsers    changes that a page of another site asks for
    metrics     /metrics for Prometheus: when, which families, how many series
    broker_api  what the HTTP side needs from the broker
    text        the text form of /stats
    stats       immutable snapshots, and nsqd's /stats made from them
"""
