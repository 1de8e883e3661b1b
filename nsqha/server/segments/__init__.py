"""The segment service: the log for readers that take it as it lies in the files (docs/segments.md).

Downwards:

    byte_server    bytes over HTTP/1.1: connections, threads, what strangers may not do
    heads          a request's head, whole
    turns          which thread may run Python now
    sending        one answer on its way: sendfile, TLS, the page cache as it was
    ranges         what a request asks for, which files have it, and what of them is sent
    renewals       holds of what is led here; reading puts their end off
    pins           what is committed, partition by partition, for `nsqha.admin.segments`, which is control over gRPC
    log_source     what the service asks of its node
"""
