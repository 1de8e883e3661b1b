"""The segment service: gives readers the log in the form that its files have (docs/segments.md).

Downwards:

    byte_server    bytes over HTTP/1.1: connections, threads, limits for unknown readers
    heads          reads the head of a request as a whole
    turns          which thread may run Python now
    sending        sends one answer: sendfile, TLS, an unchanged page cache
    ranges         what a request asks for, which files have it, and which of their bytes are sent
    renewals       makes, renews and releases the holds of partitions led here; a read renews them
    pins           what is committed, per partition, for `nsqha.admin.segments` (control over gRPC)
    log_source     what the service needs from its node
"""
