"""The lookup daemon: which nsqd has which topic.

Downwards:

    daemon       one lookup daemon: sockets, registry and API
    tcp          nsqd's connections, and who may register
    listeners    the HTTP, HTTPS and metrics listeners
    http_api     the HTTP API of clients, nsqadmin and nsqd
    fork_api     the HTTP API of the Youzan fork's tools
    cluster_api  the controller over HTTP
    metrics      /metrics: what it holds, and how the cluster is
    controller   the controller's shell: holds the key, carries out what the machine decides
    recorded     changes that `nsqha cluster` wrote into the metadata, taken into the audit
    standby      how a waiting daemon sees at once that the controller has died
    links        one stream from the controller to each node
    changes      what an operator changes
    directory    answers to clients about the cluster, from a view of the metadata
    lookup_v1    the lookup protocol, without a socket
    registry     who produces which topic
"""
