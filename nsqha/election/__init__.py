"""The metadata: which topics exist, which node leads each partition, and where that is stored.

Downwards:

    controller  the machine that places replicas and elects leaders
    unclean     an operator's election
    etcd        the metadata of a cluster
    metadata_restore  metadata that were restored to an older state follow the nodes again
    elect       the choice of a partition's next leader
    embedded    the metadata of a single node, in one file
    memory      the metadata store in memory
    store       the contract of every metadata store
    rules       which changes of the metadata are allowed
    recorded    the record of a change that a command writes into the metadata
    moves       changes of replicas that take several steps
    session     a process's membership in its cluster
    health      the state of a partition, in words
    observed    what is seen of a cluster: records, and what nodes say of their replicas
    placement   which nodes hold a partition
    model       the records, frozen
    policy      what an operator asks of a channel
    codec       records as JSON
"""
