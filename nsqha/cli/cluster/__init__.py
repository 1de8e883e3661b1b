"""`nsqha cluster`: its verbs talk to etcd, and to nodes where necessary.

Downwards:

    command        the command line
    accept         makes an etcd that was restored to an older state follow the nodes
    change         move, decommission, forget, balance, elect
    import_topics  a single node's topics become topics of a cluster
    looking        the cluster as etcd has it, or as a lookup daemon last knew it
    show           what status, nodes and topics show
    recording      what the verbs change, for the audit
    rebuilding     how far replicas are that are made again
    access         how the verbs reach etcd and the nodes
"""
