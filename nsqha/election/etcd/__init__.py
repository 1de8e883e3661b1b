"""The metadata of a cluster in etcd: only this package uses etcd, with threads of its own.

Downwards:

    access     from flags to the metadata: what brokers, lookup daemons and `nsqha cluster` share
    store      the metadata store, put together
    records    reads of records, and changes that compare what they rely on
    many_topics  new ones in one transaction, reads as one call
    watch      one thread that follows all keys
    folders    records of data directories, which stay when their nodes are gone
    session    a process's life in the cluster: the keys on its lease
    metadata_restore  keys about metadata that nodes do not trust
    lease      a lease and the thread that renews it
    view       a copy of the keys, as immutable views
    calls      reads and transactions of keys
    keys       where records are, and requests about them
    client     calls: which endpoint, how long, how often, what a failure means
    bridge     messages and stubs from the package etcd3
    binary     where an etcd program is, to try a cluster on one machine
"""
