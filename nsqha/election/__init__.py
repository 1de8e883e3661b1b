"""The small truth: which topics exist, who leads each partition, and where that is kept.

Downwards:

    controller  the machine that places replicas and elects leaders
    unclean     an operator's election
    etcd        the metadata of a cluster
    metadata_restore  metadata that went back to an older state follow the nodes again
    elect       who leads a partition next
    embedded    the metadata of a node that is alone, in one file
    store       what every metadata store promises, and the one in memory
    rules       what a change of the metadata may do
    moves       changes of replicas that take a while
    session     what a process is in its cluster
    codec       records as JSON
    health      how a partition is, in words
    placement   which nodes hold a partition
    model       the records, frozen
"""
