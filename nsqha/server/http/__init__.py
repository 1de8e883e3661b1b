"""nsqd's HTTP API, and what people and monitors read there.

Downwards:

    api         all routes and the listeners; statistics, options, health
    debug       /debug/pprof
    publishing  /pub and /mpub
    administration  /topic/... and /channel/...
    failures    what a change that failed is answered
    server      NSQ's HTTP conventions; aiohttp's server
    reading     what a connection has sent and is not parsed yet: parts, and turns
    browsers    changes that a page of another site asks for
    scrapes     who gets /metrics, and when
    metrics     its families, for Prometheus
    turns       work on the loop in turns
    exposition  the text of series that come in thousands
    series      the bound of all series: what is merged, and into what
    broker_api  what the HTTP side needs from the broker
    text        the text form of /stats
    stats       immutable snapshots, and nsqd's /stats made from them
"""
